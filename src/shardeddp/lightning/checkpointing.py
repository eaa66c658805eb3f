"""Saving checkpoints: as one file or as a directory of shards, now or in a thread.

Also deletion of checkpoints and of leftovers.
"""

from __future__ import annotations

import os
import platform
import posixpath
import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from shardeddp.checkpoint import clean
from shardeddp.checkpoint.durable import is_remote, local_path, location, resolve
from shardeddp.checkpoint.find import last_checkpoints
from shardeddp.checkpoint.full_write import save_full, stream_full, with_plain_views
from shardeddp.checkpoint.manifest import TrainingRun
from shardeddp.checkpoint.remote import RemotePath, require_writable
from shardeddp.checkpoint.schema import count_in
from shardeddp.checkpoint.snapshot import ParameterNames, nbytes_of, take_snapshot
from shardeddp.checkpoint.write import Saver
from shardeddp.comm import Mesh, agree_on_any, run_on_all_ranks
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    LIGHTNING_VERSION,
    CheckpointIO,
    ModelCheckpoint,
    Trainer,
    rank_zero_info,
)
from shardeddp.lightning.restore import CODECS, clear_away, is_default_io
from shardeddp.lightning.run_group import RunGroup

_HOW_TO_READ = (
    "trainer.fit(ckpt_path=), MyModule.load_from_checkpoint() where shardeddp is imported, and "
    "`shardeddp consolidate` read them; torch.load() does not"
)


class Checkpoints:
    """Checkpoints that a run writes and deletes.

    Args:
        group: Process group of the run, with its options.
    """

    def __init__(self, group: RunGroup) -> None:
        self._group = group
        self._saver = Saver(group.options.checkpoint_options)
        self._announced = False  # True once logged that checkpoints are directories
        self._written: set[str] = set()

    def begin_run(self, trainer: Trainer, io: CheckpointIO) -> None:
        """Refuse a plugin that sharded checkpoints would bypass; delete leftovers of killed runs."""
        self._check_io(io)
        if self._group.is_rank_zero:
            root = trainer.default_root_dir
            clear_away([*checkpoint_folders(trainer), *([] if is_remote(root) else [root])])

    def _check_io(self, io: CheckpointIO) -> None:
        options = self._group.options
        kind, saves = options.state_dict_type, options.checkpoint_options
        if is_default_io(io) or kind == "full":
            return
        if kind == "sharded" or saves.asynchronous:
            raise ConfigurationError(
                f"checkpoint_io={type(io).__name__} writes checkpoints that are one file, and "
                f"state_dict_type={kind!r}, asynchronous={saves.asynchronous} writes "
                f"directories by itself. Use state_dict_type='full' with it; for saves behind the "
                f"back of training, checkpoint_options=CheckpointOptions(asynchronous=True) "
                f"without it"
            )

    def check_stores(self, trainer: Trainer) -> None:
        """Refuse an object store that cannot be written, before callbacks access it.

        Collective of all ranks.
        """
        refusal = ""
        if self._group.is_rank_zero:
            try:
                for folder in filter(is_remote, map(local_path, _folders_to_be(trainer))):
                    require_writable(RemotePath(folder), trainer.world_size)
            except ConfigurationError as error:
                refusal = str(error)
        if refusal := self._group.broadcast(refusal):
            raise ConfigurationError(refusal)

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any,
        io: CheckpointIO,
        names: Callable[[], ParameterNames],
        trainer: Trainer | None = None,
    ) -> None:
        """Write a checkpoint according to ``state_dict_type``; a collective of all ranks.

        If a step fails on one rank, say on rank 2:

        ====================================  ==================  ==================================
        step                                  raised on           left on the disk
        ====================================  ==================  ==================================
        ``with_plain_views``, ``broadcast``,  rank 2 [1]          former checkpoint
        ``names``
        ``Saver.wait`` for the save before    all, its error      former checkpoint (of directories,
                                                                  after they are described)
        *One file,* ``stream_full``
        pickling, comparing replicas          all                 former checkpoint
        gather of a tensor                    rank 2 [1]          former checkpoint [2]
        writing, by rank 0                    all, after all      former checkpoint; the new one if
                                              other gathers       only the last flush has failed
        *One file by a plugin,* ``save_full``
        gather of a tensor                    rank 2 [1]          former checkpoint
        writing, by rank 0                    all                 whatever the plugin leaves
        *Directory,* ``take_snapshot``
        describing                            all                 former checkpoint
        copying, if asynchronous              all                 former checkpoint
        *Directory,* ``write_checkpoint``     [3]
        preparing, by rank 0                  all                 former checkpoint
        writing one data file a rank          all                 former checkpoint [2]
        comparing replicas                    all                 former checkpoint [2]
        committing, by rank 0                 all                 former checkpoint [2]; the new one
                                                                  if the undo of its rename fails
        deleting the former, by rank 0        none: logged        new checkpoint [2]
        ====================================  ==================  ==================================

        All: ``run_on_all_ranks`` and its like in ``comm/agreement.py`` raise a CheckpointError with
        "(found on rank 2)" if state or file system is the reason, else a RankError with the
        traceback. Each rank may then go on to train and to save.

        [1] The others wait in that collective until the process group ends it, and get this error
        as the cause (``comm/propagation.py``). An interrupted or killed rank counts as such in
        every step.

        [2] Temporary files have names of their own (``.tmp-...``; in a store, a folder that no
        manifest names). Rank 0 deletes them when it raises; those of a killed rank 0 are deleted by
        the next start (:func:`clear_away`), in a store once they are a day old.

        [3] In a thread if asynchronous: the error is logged, and all ranks raise it at the next
        batch, save or end of a run. Deletions that wait for the save are dropped.

        Args:
            checkpoint: Nested state with sharded tensors.
            filepath: Target path; that of rank 0 holds for all ranks.
            storage_options: Options for the plugin; they require a single file.
            io: Checkpoint plugin of the Trainer.
            names: Function that returns the parameter names of each optimizer.
            trainer: Trainer that saves; None under Fabric.
        """
        if not os.fspath(filepath) or "\0" in os.fspath(filepath):
            raise ValueError(
                f"save_checkpoint() takes the path of a checkpoint, found {filepath!r}"
            )
        self._written.add(_place_of(local_path(filepath)))
        mesh = self._group.current
        if mesh is None:
            _write_by_plugin(checkpoint, filepath, storage_options, io, None)
            return
        checkpoint = with_plain_views(checkpoint)
        # Rank 0 decides for all: other ranks may have different callbacks and paths.
        why = self._why_directory(checkpoint, storage_options, io) if mesh.rank == 0 else None
        path, why = self._group.broadcast((os.path.expanduser(local_path(filepath)), why))
        place, described = location(path), self._describe(checkpoint, mesh, trainer)
        if why is None:
            self.wait()
            if streams(storage_options, io):
                stream_full(
                    checkpoint,
                    place,
                    mesh,
                    names(),
                    described,
                    self._group.options.checkpoint_options,
                )
            else:
                _write_by_plugin(checkpoint, filepath, storage_options, io, mesh)
            return
        if storage_options is not None:
            raise TypeError(
                "storage_options are for one file: use state_dict_type='full', or leave them out "
                "of save_checkpoint()"
            )
        if why and not self._announced:
            self._announced = True
            rank_zero_info(f"ShardedDP: checkpoints are directories, because {why}. {_HOW_TO_READ}")
        snapshot = run_on_all_ranks(
            "describing the checkpoint",
            partial(take_snapshot, checkpoint, names(), mesh, CODECS),
            mesh.control,
        )
        self._saver.save(snapshot, place, described, mesh.saving)

    def _why_directory(
        self,
        checkpoint: Mapping[str, Any],
        storage_options: Any,
        io: CheckpointIO,
    ) -> str | None:
        """Return the reason for a directory: "" if the user chose it, None for a single file."""
        kind = self._group.options.state_dict_type
        options = self._group.options.checkpoint_options
        if kind != "auto":
            return "" if kind == "sharded" else None
        if options.asynchronous:
            return "CheckpointOptions(asynchronous=True) is for directories"
        if not options.zip_crc:
            return "CheckpointOptions(zip_crc=False) is for directories"
        nbytes = nbytes_of(checkpoint)
        if nbytes <= options.max_file_gb * 1e9 or not streams(storage_options, io):
            return None
        return f"one has {nbytes / 1e9:.1f} GB and CheckpointOptions(max_file_gb={options.max_file_gb:g}) is less"

    def _describe(
        self, checkpoint: Mapping[str, Any], mesh: Mesh, trainer: Trainer | None
    ) -> TrainingRun:
        # A user's hook may have replaced the counts in the checkpoint.
        step, epoch = (trainer.global_step, trainer.current_epoch) if trainer else (0, 0)
        return TrainingRun(
            uuid=uuid.uuid4().hex,
            step=count_in(checkpoint, "global_step", step),
            epoch=count_in(checkpoint, "epoch", epoch),
            world_size=mesh.topology.world_size,
            shard_size=mesh.topology.shard_size,
            sharding_strategy=self._group.options.sharding_strategy,
            versions={
                "torch": str(torch.__version__),
                "lightning": LIGHTNING_VERSION,
                "python": platform.python_version(),
            },
        )

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            CheckpointError: The background save has failed.
        """
        self._saver.wait()

    def begin_batch(self) -> None:
        """Raise the error of a failed background save.

        Collective of all ranks while a save is in progress.
        """
        if self._saver.started and not any(
            agree_on_any([self._saver.busy], self._group.mesh.control)
        ):
            self.wait()

    def remove(self, filepath: str | Path, io: CheckpointIO, trainer: Trainer | None) -> None:
        """Delete a checkpoint after saves in progress.

        A callback may have read the path from a checkpoint of another author. So it must be a
        checkpoint that this run has written, or one of this package in a checkpoint directory of
        this run's callbacks.
        """
        path = local_path(filepath)
        if trainer is None:
            raise RuntimeError(
                "ShardedDP knows where its checkpoints are only while a Trainer runs"
            )
        written = _place_of(path) in self._written
        # Unlink now: the deletion may wait for a save, and until then a callback would find the
        # link and choose another name.
        unlink_last(path, trainer)
        if streams(None, io):
            roots = checkpoint_folders(trainer)
            self._saver.then(partial(clean.remove, path, roots, written=written))
        elif written or any(_lies_in(path, folder) for folder in checkpoint_folders(trainer)):
            io.remove_checkpoint(path)
        else:
            warnings.warn(
                f"The checkpoint {path!r} was not deleted: this run has not written it, and it "
                f"lies outside of the directories in which callbacks keep checkpoints.",
                stacklevel=2,
            )

    def follow_move(
        self, checkpoint: Mapping[str, Any], path: str | Path, trainer: Trainer | None
    ) -> None:
        """Update callbacks' paths if the checkpoint directory was moved; a collective of all ranks.

        Rank 0 looks for the files, so that all ranks continue with the same names.
        """
        states = checkpoint.get("callbacks")
        if trainer is not None and states:
            local, moved = os.path.expanduser(local_path(path)), dict[str, Any]()
            if self._group.is_rank_zero:
                moved = paths_after_move(states, local, trainer)
            states.update(self._group.broadcast(moved))

    def find_last(self, candidates: list[str], folders: list[str], *, clears: bool) -> str | None:
        """Return the path of the checkpoint of the highest step; None if there is none.

        With ``clears``, leftovers of killed runs in the folders are deleted first.
        """
        self.wait()
        if clears:
            clear_away(folders)
        found = last_checkpoints(candidates, folders)
        return str(found[0]) if found else None


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
                if _place_of(target) == _place_of(path):
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
        stays = bool(own) and not is_remote(own) and _lies_in(path, own)
        here = own if stays else os.path.dirname(_place_of(path))
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


def _folders_to_be(trainer: Trainer) -> Iterator[str]:
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


def _place_of(path: str) -> str:
    """Normalize a checkpoint's path, with links resolved."""
    if is_remote(path):
        return posixpath.normpath(path)
    folder, name = resolve(os.path.expanduser(path))
    return os.path.join(folder, name)


def _lies_in(path: str, folder: str) -> bool:
    inside = posixpath.normpath(folder) if is_remote(folder) else os.path.realpath(folder)
    return PurePosixPath(_place_of(path)).parent.is_relative_to(inside)


def streams(storage_options: Any, io: CheckpointIO) -> bool:
    """True if a single file can be streamed while its tensors are gathered.

    False if a plugin or storage options control the writing.
    """
    return is_default_io(io) and storage_options is None


def _write_by_plugin(
    checkpoint: dict[str, Any],
    path: str | Path,
    storage_options: Any,
    io: CheckpointIO,
    mesh: Mesh | None,
) -> None:
    """Write one file with the user's plugin, from rank 0's memory."""

    def write(full: dict[str, Any]) -> None:
        io.save_checkpoint(full, path, storage_options=storage_options)

    save_full(checkpoint, str(path), write, mesh)
