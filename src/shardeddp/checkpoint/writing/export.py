"""Export: a checkpoint as one or several safetensors files, or as one plain ``.ckpt`` file.

Everything is streamed: a part of one tensor is in memory at a time, and it is checked before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from shardeddp.checkpoint.disk.new_files import new_files
from shardeddp.checkpoint.disk.plain_file import carries_index, damaged_records
from shardeddp.checkpoint.reading.contents import (
    HYPER_PARAMETERS,
    TRAINED,
    WEIGHTS,
    Contents,
    read_contents,
    read_file_contents,
    read_foreign_contents,
)
from shardeddp.checkpoint.reading.stream import Progress, silent
from shardeddp.checkpoint.writing import safetensors
from shardeddp.checkpoint.writing.safetensors import Entry, write_safetensors
from shardeddp.checkpoint.writing.snapshot import tensors_of
from shardeddp.checkpoint.writing.torch_file import TorchFile, plain
from shardeddp.errors import CheckpointError, DamagedCheckpointError

GB = 10**9

_OF_A_MODEL = ("epoch", "global_step", "pytorch-lightning_version", "loops", "hparams_name", "hparams_type", WEIGHTS)
"""What Lightning keeps in a checkpoint of weights alone, beside hyper-parameters."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of a checkpoint is exported, and how."""

    foreign: bool = False
    """The directory is one of another tool."""

    trust_pickle: bool = False
    """Run the pickles in it; see :func:`read_contents`."""

    ema: bool = False
    """The averaged weights instead of the trained ones."""

    strip_prefix: str = ""
    """Dropped from the names of tensors that begin so."""

    dtype: torch.dtype | None = None
    """Of all floating-point tensors; None: as they are."""

    weights_only: bool = False
    """Leave out optimizers, schedulers, and callbacks."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    paths: list[Path]
    nbytes: int
    num_tensors: int
    notes: list[str] = field(default_factory=list[str])
    """What the user should know, in sentences."""


def to_safetensors(
    source: Path,
    target: Path,
    selection: Selection = Selection(),
    *,
    max_nbytes: int = 5 * GB,
    force: bool = False,
    started: Progress = silent,
    progress: Progress = silent,
) -> Exported:
    """Write the weights of a checkpoint as safetensors.

    Tensors that share memory are written once, under the first name; the metadata has the others, as
    ``{"head.weight": "embedding.weight"}``.

    Args:
        source: The checkpoint's directory, or a plain file.
        target: The file. If the weights are more than ``max_nbytes``, it is several and an index, named after it.
        selection: Which weights.
        max_nbytes: Of one file, unless a single tensor is larger.
        force: Replace what is there.
        started: Told how many bytes there will be, before the first is written.
        progress: Told of each chunk.

    Raises:
        CheckpointError: The checkpoint is damaged or has no such weights, or the files cannot be written.
        NotImplementedError: A dtype is none of safetensors'.
    """
    contents = _open(source, selection, (WEIGHTS, TRAINED))
    notes = list(contents.notes)
    weights = _names(_weights(contents.checkpoint, selection, notes), selection.strip_prefix)
    entries, aliases = _once(weights, contents.memory, selection.dtype)
    skipped = [name for name, value in weights.items() if not _is_dense(value)]
    if skipped:
        notes.append(f"left out what is no dense tensor: {', '.join(skipped)}")
    files = safetensors.split(entries, max_nbytes)
    paths = safetensors.file_paths(target, len(files))
    nbytes = sum(entry.nbytes for entry in entries)
    started(nbytes)
    index = [safetensors.index_path(target)] if len(files) > 1 else []
    metadata = {"format": "pt"} | aliases
    with new_files([*paths, *index], force) as opened:
        for file, part in zip(opened, files, strict=False):
            write_safetensors(file, part, metadata, progress)
        if index:
            parts = {path.name: part for path, part in zip(paths, files, strict=True)}
            opened[-1].write(safetensors.index_bytes(parts, metadata))
    return Exported(paths=[*paths, *index], nbytes=nbytes, num_tensors=len(entries), notes=notes)


def to_ckpt(
    source: Path,
    target: Path,
    selection: Selection = Selection(),
    *,
    force: bool = False,
    started: Progress = silent,
    progress: Progress = silent,
) -> Exported:
    """Write a checkpoint as the one file that Lightning writes without sharding.

    Arguments and errors are those of :func:`to_safetensors`. Optimizer states are numbered as torch numbers them. With
    ``weights_only`` the file has the weights and what ``LightningModule.load_from_checkpoint`` needs; without, a run
    can be resumed from it under any strategy.
    """
    if selection.dtype is not None:
        raise NotImplementedError("a .ckpt file keeps the dtypes of the training; a safetensors file may have others")
    if not selection.weights_only and (selection.ema or selection.strip_prefix):
        raise NotImplementedError(
            "a whole .ckpt file is as the training saved it: averaged weights and other names go with weights_only"
        )
    kept = (*_OF_A_MODEL, *HYPER_PARAMETERS, TRAINED) if selection.weights_only else None
    contents = _open(source, selection, kept)
    checkpoint, notes = dict(contents.checkpoint), list(contents.notes)
    if selection.weights_only:
        weights = _weights(checkpoint, selection, notes)
        checkpoint = {key: value for key, value in checkpoint.items() if kept and key in kept and key != TRAINED}
        checkpoint[WEIGHTS] = _names(weights, selection.strip_prefix)
    if WEIGHTS not in checkpoint:
        raise CheckpointError(f"{source} has no weights: there is no {WEIGHTS} in it")
    tensors = {contents.memory(tensor): tensor for tensor in tensors_of(checkpoint)}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    started(nbytes)
    with new_files([target], force) as [file]:
        TorchFile(plain(checkpoint), contents.memory).write(file, progress=progress)
        file.flush()
        file.seek(0)
        unsafe = sorted(get_unsafe_globals_in_checkpoint(file))
        if unsafe:
            notes.append(f"torch.load reads it with weights_only=False only, because it holds {', '.join(unsafe)}")
    return Exported(paths=[target], nbytes=nbytes, num_tensors=len(tensors), notes=notes)


def _open(source: Path, selection: Selection, keys: Sequence[str] | None) -> Contents:
    if selection.foreign:
        return read_foreign_contents(source, selection.trust_pickle)
    if source.is_file():
        return _open_file(source, selection, keys)
    return read_contents(source, keys, trust_pickle=selection.trust_pickle)


def _open_file(source: Path, selection: Selection, keys: Sequence[str] | None) -> Contents:
    damaged = damaged_records(source) if carries_index(source) else []
    if damaged:
        raise DamagedCheckpointError(f"{source} is damaged: " + "; ".join(map(str, damaged)))
    contents = read_file_contents(source, selection.trust_pickle)
    wanted = {key: value for key, value in contents.checkpoint.items() if keys is None or key in keys}
    return replace(contents, checkpoint=wanted)


def _weights(checkpoint: Mapping[str, Any], selection: Selection, notes: list[str]) -> Mapping[str, Any]:
    """The weights that were asked for."""
    if selection.ema and TRAINED not in checkpoint:
        raise CheckpointError(
            f"there are no averaged weights: no {TRAINED} in it, which Lightning's WeightAveraging and "
            f"EMAWeightAveraging save. Leave --ema out for the trained weights"
        )
    if not selection.ema and TRAINED in checkpoint:
        notes.append("these are the weights as trained; the checkpoint has averaged ones too (--ema)")
        return checkpoint[TRAINED]
    if not checkpoint.get(WEIGHTS):
        raise CheckpointError(f"there are no weights: nothing in {WEIGHTS}")
    return checkpoint[WEIGHTS]


def _names(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    renamed = {name.removeprefix(prefix): value for name, value in weights.items()}
    if prefix and renamed.keys() == weights.keys():
        raise CheckpointError(f"no name starts with {prefix!r}; the first is {next(iter(weights))!r}")
    if len(renamed) < len(weights):
        raise CheckpointError(f"without {prefix!r} some names are the same: leave --strip-prefix out")
    return renamed


def _is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _once(
    weights: Mapping[str, Any], memory: Callable[[torch.Tensor], Hashable], dtype: torch.dtype | None
) -> tuple[list[Entry], dict[str, str]]:
    """The tensors to write, and under which of their names those stand that share memory with one."""
    entries: dict[Hashable, Entry] = {}
    aliases: dict[str, str] = {}
    for name, tensor in weights.items():
        if not _is_dense(tensor):
            continue
        key = memory(tensor), tensor.dtype, tuple(tensor.shape)
        if key in entries:
            aliases[name] = entries[key].name
        else:
            converted = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
            entries[key] = Entry(name=name, tensor=tensor, dtype=converted)
    return list(entries.values()), aliases
