"""Export: a checkpoint as one or several safetensors files, or as one plain ``.ckpt`` file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from shardeddp.checkpoint.contents import (
    Contents,
    read_contents,
    read_file_contents,
    read_foreign_contents,
)
from shardeddp.checkpoint.directory import new_files
from shardeddp.checkpoint.find import carries_manifest
from shardeddp.checkpoint.full_write import TorchFile
from shardeddp.checkpoint.import_foreign import FOREIGN
from shardeddp.checkpoint.location import AnyPath, location
from shardeddp.checkpoint.manifest import DCP_METADATA
from shardeddp.checkpoint.read import Progress, silent
from shardeddp.checkpoint.safetensors import (
    Entry,
    file_paths,
    index_bytes,
    index_path,
    split,
    write_safetensors,
)
from shardeddp.checkpoint.schema import HYPER_PARAMETERS, TRAINED, VERSION, WEIGHTS
from shardeddp.checkpoint.snapshot import tensors_of
from shardeddp.checkpoint.state_codec import plain, without_prefix
from shardeddp.errors import CheckpointError, first_three

# -- Export to safetensors or to one plain ``.ckpt`` file
#
# All data is streamed: one chunk of one tensor is in memory at a time, and checked before writing.

MAX_FILE_NBYTES = 5 * 10**9
"""Largest safetensors file that an export makes, unless another size is asked for."""

_OF_A_MODEL = (
    "epoch",
    "global_step",
    VERSION,
    "loops",
    "hparams_name",
    "hparams_type",
    WEIGHTS,
)
"""Entries of a weights-only checkpoint of Lightning, beside hyper-parameters."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Weights and entries of a checkpoint to export, and their form."""

    foreign: bool = False
    """True if the directory is one of another tool."""

    trust_pickle: bool = False
    """True to run the pickles in it; see :func:`read_contents`."""

    ema: bool = False
    """True for the averaged weights instead of the trained ones."""

    strip_prefix: str = ""
    """Prefix to drop from tensor names that have it."""

    adapter: str = ""
    """Name of a peft adapter to export alone; empty: all weights."""

    dtype: torch.dtype | None = None
    """Dtype of all floating-point tensors in the file; None: their own."""

    weights_only: bool = False
    """True to leave out optimizers, schedulers, and callbacks."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export."""

    paths: list[Path]
    nbytes: int
    num_tensors: int
    notes: list[str] = field(default_factory=list[str])
    """Remarks for the user, as sentences."""


def to_safetensors(
    source: AnyPath,
    target: Path,
    selection: Selection = Selection(),
    *,
    max_nbytes: int = MAX_FILE_NBYTES,
    force: bool = False,
    started: Progress = silent,
    progress: Progress = silent,
) -> Exported:
    """Write the weights of a checkpoint as safetensors.

    Tensors that share memory are written once, under the first name; the metadata has the others,
    as ``{"head.weight": "embedding.weight"}``.

    Weights of more than ``max_nbytes`` become several files and an index, named after ``target``; a
    single larger tensor still gets a file. ``started`` is called once with the number of bytes to
    be written, ``progress`` with those of each written chunk.
    """
    _require_outside(target)
    contents = open_contents(source, selection, (WEIGHTS, TRAINED))
    notes = list(contents.notes)
    weights = _names(_weights(contents.checkpoint, selection, notes), selection.strip_prefix)
    if selection.adapter:
        weights = _of_adapter(weights, selection.adapter)
        has_config = (target.parent / "adapter_config.json").exists()
        if target.name != "adapter_model.safetensors" or not has_config:
            notes.append(
                "peft reads it as adapter_model.safetensors beside an adapter_config.json, which "
                f"model.peft_config[{selection.adapter!r}].save_pretrained(folder) writes"
            )
    entries, aliases = _once(weights, contents.memory, selection.dtype)
    skipped = [name for name, value in weights.items() if not _is_dense(value)]
    if skipped:
        notes.append(f"left out what is no dense tensor: {', '.join(skipped)}")
    files = split(entries, max_nbytes)
    paths = file_paths(target, len(files))
    nbytes = sum(entry.nbytes for entry in entries)
    started(nbytes)
    index = [index_path(target)] if len(files) > 1 else []
    metadata = {"format": "pt"} | aliases
    former = _former(target) - {path.name for path in [*paths, *index]}
    if former and not force:
        raise CheckpointError(
            f"an earlier export to {target} has other files ({first_three(sorted(former))}), which "
            f"would not belong to this one: remove them, or replace them with --force"
        )
    overflows: dict[str, int] = {}
    with new_files([*paths, *index], force) as opened:
        for file, part in zip(opened, files, strict=False):
            overflows |= write_safetensors(file, part, metadata, progress)
        if overflows:
            notes.append(_overflow(overflows, selection.dtype))
            if not force:
                raise CheckpointError(
                    f"{notes[-1]}: take a dtype of more range, or write them so with --force"
                )
        if index:
            parts = {path.name: part for path, part in zip(paths, files, strict=True)}
            opened[-1].write(index_bytes(parts, metadata))
    for name in former:
        target.with_name(name).unlink(missing_ok=True)
    return Exported(paths=[*paths, *index], nbytes=nbytes, num_tensors=len(entries), notes=notes)


def to_ckpt(
    source: AnyPath,
    target: Path,
    selection: Selection = Selection(),
    *,
    force: bool = False,
    started: Progress = silent,
    progress: Progress = silent,
) -> Exported:
    """Write a checkpoint as the one file that Lightning writes without sharding.

    Arguments and errors are those of :func:`to_safetensors`. Parameters in optimizer states are
    numbered, as torch does it. With ``weights_only`` the file has the weights and the entries for
    ``LightningModule.load_from_checkpoint``; else a run can be resumed from it under any strategy.
    """
    if selection.dtype is not None:
        raise NotImplementedError(
            "a .ckpt file keeps the dtypes of the training; a safetensors file may have others"
        )
    if not selection.weights_only and (selection.ema or selection.strip_prefix):
        raise NotImplementedError(
            "a whole .ckpt file is as the training saved it: averaged weights and other names go "
            "with weights_only"
        )
    _require_outside(target)
    kept = (*_OF_A_MODEL, *HYPER_PARAMETERS, TRAINED) if selection.weights_only else None
    contents = open_contents(source, selection, kept)
    checkpoint, notes = dict(contents.checkpoint), list(contents.notes)
    if selection.weights_only:
        weights = _weights(checkpoint, selection, notes)
        checkpoint = {
            key: value
            for key, value in checkpoint.items()
            if kept and key in kept and key != TRAINED
        }
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
            notes.append(
                f"torch.load reads it with weights_only=False only, because it holds "
                f"{', '.join(unsafe)}"
            )
    return Exported(paths=[target], nbytes=nbytes, num_tensors=len(tensors), notes=notes)


def _overflow(counts: Mapping[str, int], dtype: torch.dtype | None) -> str:
    """Return a clause on the values that a cast made infinite."""
    named = first_three(f"{count:,} of {name}" for name, count in counts.items())
    return f"{sum(counts.values()):,} finite values are infinite as {dtype} ({named})"


def _require_outside(target: Path) -> None:
    """Refuse to write into a checkpoint: verification rejects unknown files there."""
    folder = location(target.parent)
    if carries_manifest(folder) or folder.holds(DCP_METADATA):
        raise CheckpointError(
            f"{target.parent} is a checkpoint: expected {target.name} to go elsewhere, where it "
            f"damages none"
        )


def _former(target: Path) -> set[str]:
    """Return names of the files of an earlier export to this path: one, or several and an index."""
    index = index_path(target)
    found = {target.name} if os.path.lexists(target) else set[str]()
    try:
        places: Any = json.loads(index.read_bytes())["weight_map"].values()
        names = set(map(str, places))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return found
    pattern = re.compile(rf"{re.escape(target.stem)}-\d{{5}}-of-\d{{5}}{re.escape(target.suffix)}")
    return found | {index.name} | {name for name in names if pattern.fullmatch(name)}


def open_contents(
    source: AnyPath, selection: Selection = Selection(), keys: Sequence[str] | None = None
) -> Contents:
    """Open a checkpoint of any kind; only its entries with these keys, if some are given."""
    source = location(source)
    if selection.foreign:
        return read_foreign_contents(source.local_only(FOREIGN), selection.trust_pickle)
    if source.is_file() and not carries_manifest(source):
        file = source.local_only("plain files are read in a file system: copy it here")
        contents = read_file_contents(file, selection.trust_pickle)
        found = contents.checkpoint
        wanted = {key: it for key, it in found.items() if keys is None or key in keys}
        return replace(contents, checkpoint=wanted)
    return read_contents(source, keys, trust_pickle=selection.trust_pickle)


def _weights(
    checkpoint: Mapping[str, Any], selection: Selection, notes: list[str]
) -> Mapping[str, Any]:
    """Return the averaged or trained weights, by the selection."""
    if selection.ema and TRAINED not in checkpoint:
        raise CheckpointError(
            f"there are no averaged weights: no {TRAINED} in it, which Lightning's WeightAveraging "
            f"and EMAWeightAveraging save. Leave --ema out for the trained weights"
        )
    if not selection.ema and TRAINED in checkpoint:
        notes.append(
            "these are the weights as trained; the checkpoint has averaged ones too (--ema)"
        )
        return checkpoint[TRAINED]
    if not checkpoint.get(WEIGHTS):
        raise CheckpointError(f"there are no weights: nothing in {WEIGHTS}")
    return checkpoint[WEIGHTS]


def _names(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    renamed = without_prefix(weights, prefix)
    if prefix and renamed.keys() == weights.keys():
        raise CheckpointError(
            f"no name starts with {prefix!r}; the first is {next(iter(weights))!r}"
        )
    if len(renamed) < len(weights):
        raise CheckpointError(
            f"without {prefix!r} some names are the same: leave --strip-prefix out"
        )
    return renamed


def _of_adapter(weights: Mapping[str, Any], adapter: str) -> dict[str, Any]:
    """Return the weights of an adapter, under their names in peft's own files."""
    found: dict[str, Any] = {}
    for name, value in weights.items():
        _, base, inside = name.rpartition("base_model.")
        parts = inside.split(".")
        if not base or adapter not in parts[1:]:
            continue
        place = parts.index(adapter, 1)
        start = place - (parts[place - 1] == "modules_to_save")
        found[".".join(("base_model", *parts[:start], *parts[place + 1 :]))] = value
    if not found:
        first = max(weights, key=lambda name: "lora_" in name)  # the first with an adapter in it
        raise CheckpointError(
            f"there is no adapter {adapter!r}: no weight has it behind base_model in its name; one "
            f"is {first!r}"
        )
    return found


def _is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _once(
    weights: Mapping[str, Any],
    memory: Callable[[torch.Tensor], Hashable],
    dtype: torch.dtype | None,
) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors to write, and by further name the written name of the same memory."""
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
