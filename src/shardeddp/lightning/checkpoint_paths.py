"""Checkpoint paths of callbacks: their folders, links to the last checkpoint, and moved runs."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from shardeddp.checkpoint.durable import resolve
from shardeddp.checkpoint.location import is_remote, local_path
from shardeddp.lightning.api import ModelCheckpoint, Trainer


def unlink_last(path: str, trainer: Trainer) -> None:
    """Remove the links of ``save_last="link"`` to a checkpoint that is about to be deleted."""
    for callback in trainer.checkpoint_callbacks:
        folder = local_path(getattr(callback, "dirpath", None) or "")
        # Only if the callback makes links: the path may come from a foreign checkpoint.
        links = getattr(callback, "save_last", None) == "link"
        if not links or not folder or is_remote(folder) or not os.path.isdir(folder):
            continue
        names = _names_of_last(callback)
        for link in Path(folder).iterdir():
            if link.is_symlink() and names.fullmatch(link.name):
                target = os.path.join(folder, os.readlink(link))
                if place_of(target) == place_of(path):
                    link.unlink(missing_ok=True)


def _names_of_last(callback: Any) -> re.Pattern[str]:
    """Compile the pattern of a callback's last-checkpoint names, for all metrics and versions."""
    named = re.split(r"{[^}]*}", callback.CHECKPOINT_NAME_LAST)
    name, join = ".+".join(map(re.escape, named)), re.escape(callback.CHECKPOINT_JOIN_CHAR)
    return re.compile(rf"{name}({join}v\d+)?{re.escape(callback.FILE_EXTENSION)}")


def paths_after_move(states: Mapping[str, Any], path: str, trainer: Trainer) -> dict[str, Any]:
    """Update states of callbacks after their directory was moved, copied or renamed as a whole.

    Lightning stores absolute paths, and restores only the best one if the directory has changed.
    Paths in the former directory are replaced by existing paths of the same names next to the
    checkpoint that is read.

    Returns:
        Changed states by state key.
    """
    if is_remote(path):
        return {}
    moved = dict[str, Any]()
    for callback in trainer.checkpoint_callbacks:
        state, own = states.get(callback.state_key), getattr(callback, "dirpath", None) or ""
        if not isinstance(state, Mapping) or not isinstance(
            state.get("best_k_models", {}), Mapping
        ):
            continue  # state of a user-defined class
        former = state.get("dirpath")
        stays = bool(own) and not is_remote(own) and lies_in(path, own)
        here = own if stays else os.path.dirname(place_of(path))
        if not isinstance(former, str) or not former or is_remote(former) or former == here:
            continue
        to, best = partial(_moved, former=former, here=here), state.get("best_model_path")
        moved[callback.state_key] = (
            _rebased(state, to, own, callback)
            if stays
            else {**state, "best_model_path": to(best) or best}
        )
    return moved


def _moved(path: str | None, former: str, here: str) -> str:
    """Return the new path of a file in a moved directory; "" if it does not exist."""
    if not path or not PurePosixPath(path).is_relative_to(former):
        return path or ""
    now = os.path.join(here, PurePosixPath(path).relative_to(former))
    return now if os.path.lexists(now) else ""


def _rebased(
    state: Mapping[str, Any], to: Callable[[str | None], str], own: str, callback: Any
) -> dict[str, Any]:
    """Return the state of a callback with its paths in the new directory."""
    kept = {to(path): score for path, score in state.get("best_k_models", {}).items()}
    kept.pop("", None)
    best, worst = (max, min) if getattr(callback, "mode", "") == "max" else (min, max)
    found = {
        **state,
        "dirpath": own,
        "best_k_models": kept,
        "last_model_path": to(state.get("last_model_path")),
        "best_model_path": to(state.get("best_model_path")),
        "kth_best_model_path": to(state.get("kth_best_model_path")),
    }
    # Replace best and k-th best if their files are missing.
    if kept and found["best_model_path"] not in kept:
        found["best_model_path"] = best(kept, key=kept.__getitem__)
        found["best_model_score"] = kept[found["best_model_path"]]
    if kept and found["kth_best_model_path"] not in kept:
        found["kth_best_model_path"] = worst(kept, key=kept.__getitem__)
        found["kth_value"] = kept[found["kth_best_model_path"]]
    return found


def checkpoint_folders(trainer: Trainer) -> list[str]:
    """Return the checkpoint directories of all callbacks, including those in object stores."""
    callbacks = trainer.checkpoint_callbacks
    folders = (local_path(getattr(callback, "dirpath", None) or "") for callback in callbacks)
    return [folder for folder in folders if folder]


def folders_to_be(trainer: Trainer) -> Iterator[str]:
    """Yield the future checkpoint directories of saving callbacks, before their setup."""
    dry = trainer.fast_dev_run  # type: ignore[attr-defined]
    for callback in () if dry else trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not (
            callback.save_top_k or callback.save_last
        ):
            continue
        given = getattr(callback, "dirpath", None)
        logged = trainer.loggers[0].save_dir if trainer.loggers else None
        yield str(given or logged or trainer.default_root_dir)


def place_of(path: str) -> str:
    """Normalize a checkpoint's path, with links resolved."""
    if is_remote(path):
        return posixpath.normpath(path)
    folder, name = resolve(os.path.expanduser(path))
    return os.path.join(folder, name)


def lies_in(path: str, folder: str) -> bool:
    """True if a checkpoint is in a folder or below it, with links resolved."""
    inside = posixpath.normpath(folder) if is_remote(folder) else os.path.realpath(folder)
    return PurePosixPath(place_of(path)).parent.is_relative_to(inside)
