"""The last checkpoint of some directories: the one of the highest step that can be used, whatever clocks say."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardeddp.checkpoint.disk.committed import find_checkpoints, read_manifest
from shardeddp.checkpoint.disk.plain_file import carries_index
from shardeddp.errors import CheckpointError


@dataclass(frozen=True, order=True)
class _Candidate:
    resumable: bool
    step: int
    called_last: bool
    path: str


def last_checkpoints(named: Iterable[str], folders: Iterable[str]) -> list[Path]:
    """Checkpoints to go on from, the best first; one warning names what looks like one and cannot be used.

    Args:
        named: Paths of checkpoints that are called "last", of either kind.
        folders: Directories whose checkpoints of this package count as well: a run that was killed between two saves of
            one step has only the first of them.

    Raises:
        CheckpointError: There are some, and none can be used.
    """
    candidates: dict[str, _Candidate] = {}
    skipped: dict[str, str] = {}
    for path in named:
        try:
            candidates[os.path.realpath(path)] = _candidate(path)
        except (CheckpointError, OSError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
            skipped[path] = str(error)
    for folder in folders:
        found = find_checkpoints(folder)
        skipped |= {os.path.join(folder, name): why for name, why in found.skipped.items()}
        for checkpoint in found.checkpoints:
            path = str(checkpoint.path)
            candidates.setdefault(os.path.realpath(path), _candidate(path, called_last=False))
    if skipped:
        warnings.warn("not whole, left aside: " + "; ".join(skipped.values()), stacklevel=2)
    if skipped and not candidates:
        raise CheckpointError(
            f"no checkpoint is whole among {', '.join(skipped)}. Leave ckpt_path out to train from the beginning"
        )
    return [Path(candidate.path) for candidate in sorted(candidates.values(), reverse=True)]


def _candidate(path: str, called_last: bool = True) -> _Candidate:
    if os.path.isdir(path) or carries_index(path):
        manifest = read_manifest(path)
        trained = any(str(entry.path[0]).startswith("optimizer_") for entry in manifest.objects.values())
        return _Candidate(trained, manifest.run.step, called_last, path)
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is neither a sharded checkpoint nor a file that torch.save wrote")
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        return _Candidate(True, -1, called_last, path)  # it holds objects of others: its step is not to be known yet
    step = content.get("global_step", -1)  # files that others have put together may leave it out
    return _Candidate("optimizer_states" in content, step, called_last, path)
