"""Opening: a checkpoint as the dictionary that Lightning saved, for a run; large tensors stay on the disk."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardeddp.checkpoint.disk.plain_file import carries_index, damaged_records
from shardeddp.checkpoint.format.encoding import Codec
from shardeddp.checkpoint.format.manifest import PLAIN_EXTRA, SHARDED_EXTRA
from shardeddp.checkpoint.kept_shards import KeptShards
from shardeddp.checkpoint.reading.contents import read_contents
from shardeddp.checkpoint.reading.lazy import LazyTensor
from shardeddp.errors import CheckpointError, DamagedCheckpointError


def open_checkpoint(path: Path, weights_only: bool | None, codecs: Sequence[Codec] = ()) -> dict[str, Any]:
    """Read everything of a checkpoint but the tensors of model and optimizers, and those that will be sharded.

    Args:
        path: The directory.
        weights_only: False: objects that only pickle could save are unpickled, which runs the code of whoever wrote
            them. Else they are refused, or left out of hyper-parameters with a warning.
        codecs: For values of further types in it.

    Raises:
        CheckpointError: It is damaged, or holds objects that are not to be unpickled.
    """
    trust = "loading it with weights_only=False"
    try:
        contents = read_contents(path, trust_pickle=weights_only is False, how_to_trust=trust, codecs=codecs)
    except CheckpointError as error:
        raise error if str(path) in str(error) else type(error)(f"{path}: {error}") from error
    for note in contents.notes:
        warnings.warn(f"{path}: {note}", stacklevel=2)
    kept = KeptShards(contents.checkpoint)
    return {key: _with_small_tensors(value, kept) for key, value in contents.checkpoint.items()}


def open_file(path: str, weights_only: bool | None, part: tuple[int, int]) -> dict[str, Any]:
    """Read a plain checkpoint, mapped, so that a rank reads no more of it than it puts into its shards.

    Args:
        path: The file, of this package, of Lightning or of torch.
        weights_only: As ``torch.load`` takes it.
        part: Which part of a file of this package is compared with its checksums here: ``(rank, ranks)``.

    Raises:
        DamagedCheckpointError: That part is not what was written.
    """
    damaged = damaged_records(path, part) if carries_index(path) else []
    if damaged:
        raise DamagedCheckpointError(f"{path} is damaged: " + "; ".join(map(str, damaged)))
    return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)


def _with_small_tensors(value: Any, kept: KeptShards) -> Any:
    """What callbacks keep is theirs to look at and to change: read at once, if no shards are going to be made of it."""
    if isinstance(value, LazyTensor):
        lazy = value in kept or value.path[: len(PLAIN_EXTRA)] not in (PLAIN_EXTRA, SHARDED_EXTRA)
        return value if lazy else value.whole()
    if isinstance(value, Mapping):
        read = {key: _with_small_tensors(item, kept) for key, item in value.items()}
        if isinstance(value, dict):
            value.update((key, item) for key, item in read.items() if item is not value[key])
        return value
    if type(value) in (list, tuple):
        return type(value)(_with_small_tensors(item, kept) for item in value)
    return value
