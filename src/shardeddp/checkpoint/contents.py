"""Checkpoint contents as the dictionary that Lightning saved; large tensors stay on the disk."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

from shardeddp.checkpoint.full_read import require_data, require_intact
from shardeddp.checkpoint.import_foreign import MODEL, ForeignCheckpoint
from shardeddp.checkpoint.kept_shards import KeptShards
from shardeddp.checkpoint.location import AnyPath, disk_errors, location, preflight
from shardeddp.checkpoint.manifest import LIGHTNING_META, PLAIN_EXTRA, SHARDED_EXTRA, name_of
from shardeddp.checkpoint.read import CheckpointReader, LazyTensor
from shardeddp.checkpoint.schema import (
    HYPER_PARAMETERS,
    KEY,
    OPTIMIZERS,
    STATES,
    VERSION,
    WEIGHTS,
    check_entries,
)
from shardeddp.checkpoint.snapshot import memory_key
from shardeddp.checkpoint.state_codec import (
    Codec,
    Opaque,
    decode,
    dict_codec,
    opaque_paths,
    with_leaves,
)
from shardeddp.errors import CheckpointError, printable

# -- Checkpoint contents as Lightning's dictionary
#
# No tensors are read.
#
# For tools, which have neither a model nor a process group; also for directories of other tools.

ATTRIBUTES = "attribute_dict"
"""Tag of Lightning's dict with attributes."""

# Tools read it as a plain dict.
_CODECS = (dict_codec(dict, ATTRIBUTES),)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a checkpoint, or some entries of it."""

    checkpoint: dict[str, Any]
    """Entries by key; tensors are lazy."""

    memory: Callable[[torch.Tensor], Hashable] = id
    """Key of a tensor's elements; equal for tensors that are stored once."""

    notes: list[str] = field(default_factory=list[str])
    """Sentences for the user on entries that are missing."""


def read_contents(
    path: AnyPath,
    keys: Collection[str] | None = None,
    *,
    trust_pickle: bool = False,
    how_to_trust: str = "--trust-pickle",
    codecs: Sequence[Codec] = _CODECS,
    part: tuple[int, int] = (0, 1),
) -> Contents:
    """Open a checkpoint of this package.

    Args:
        path: Directory of the checkpoint.
        keys: Keys of the entries to read, if they exist; None: all.
        trust_pickle: True to unpickle objects that only pickle could save, which runs code of the
            checkpoint's author. Else they are left out of hyper-parameters and refused elsewhere.
        how_to_trust: Advice to the user how to trust them, for messages.
        codecs: Codecs for values of further types.
        part: Share of the files to look for on this rank, ``(rank, ranks)``.
    """
    reader = CheckpointReader(path, part)
    tree = reader.tree()
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{path} holds a {type(tree).__name__}, expected the entries of a Lightning checkpoint"
        )
    wanted = {key: value for key, value in tree.items() if keys is None or key in keys}
    checkpoint: dict[str, Any] = decode(wanted, partial(_lazy, reader), codecs)
    opaque = {key: paths for key, value in checkpoint.items() if (paths := opaque_paths(value))}
    notes: list[str] = []
    if opaque and trust_pickle:
        meta = torch.load(
            io.BytesIO(reader.file(LIGHTNING_META)), map_location="cpu", weights_only=False
        )
        checkpoint |= {key: _filled(checkpoint[key], meta.get(key)) for key in opaque}
    elif opaque:
        notes.append(_without_opaque(checkpoint, opaque, how_to_trust))
    return Contents(checkpoint=checkpoint, memory=partial(_storage_of, reader), notes=notes)


def read_file_contents(path: Path, trust_pickle: bool = False) -> Contents:
    """Open a plain ``.ckpt`` file; it is mapped, not read into memory.

    ``trust_pickle`` unpickles more than data, which runs code of the file's author.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is not what torch.save writes since torch 1.6: expected a zip archive"
        )
    checkpoint: Any = _load_file(str(path), not trust_pickle, how_to_trust=_TRUST_OF_TOOLS)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(WEIGHTS), dict):
        raise CheckpointError(f"{path} is no checkpoint of Lightning: there is no {WEIGHTS} in it")
    return Contents(checkpoint=cast("dict[str, Any]", checkpoint), memory=memory_key)


def read_foreign_contents(path: Path, trust_pickle: bool = False) -> Contents:
    """Open a checkpoint directory of another tool."""
    foreign = ForeignCheckpoint(path, trust_pickle=trust_pickle)
    model: dict[str, Any] = {}
    optimizers: dict[int, dict[Any, Any]] = {}
    stored: list[tuple[Sequence[str | int], Any]] = [
        (it.path, _lazy(foreign, name)) for name, it in foreign.tensors.items()
    ]
    stored += [(it.path, foreign.read_object(name)) for name, it in foreign.objects.items()]
    for (root, *rest), value in stored:
        number = str(root).removeprefix("optimizer_")
        if root == MODEL and rest:
            model[name_of(rest)] = value
        elif number != root and number.isascii() and number.isdigit() and rest:
            _put(optimizers.setdefault(int(number), {}), rest, value)
    lightning = {"epoch": 0, "global_step": 0, VERSION: lightning_version()}
    checkpoint: dict[str, Any] = lightning | dict(foreign.meta) | {WEIGHTS: model}
    if optimizers:
        checkpoint[OPTIMIZERS] = [
            _by_index(path, optimizers[number]) for number in sorted(optimizers)
        ]
    return Contents(checkpoint=checkpoint)


def lightning_version() -> str:
    """Return the version of the installed Lightning, under either of its two package names."""
    try:
        return version("lightning")
    except PackageNotFoundError:
        return version("pytorch-lightning")


def _lazy(reader: CheckpointReader | ForeignCheckpoint, name: str) -> torch.Tensor:
    try:
        tensor = reader.tensors[name]
    except KeyError:
        raise CheckpointError(
            f"{reader.path} refers to {name!r} and holds no such tensor"
        ) from None
    return LazyTensor(tensor.path, tensor.shape, tensor.dtype, partial(reader.read, name))


def _storage_of(reader: CheckpointReader, tensor: torch.Tensor) -> Hashable:
    """Return a key of a tensor's elements; tensors that shared memory are stored once."""
    if not isinstance(tensor, LazyTensor):
        return id(tensor)
    stored = reader.tensors[name_of(tensor.path)]
    return stored.sections if stored.numel else tensor.path


def _without_opaque(
    checkpoint: dict[str, Any], opaque: Mapping[str, Sequence[str]], how_to_trust: str
) -> str:
    """Drop hyper-parameters that could not be saved; return a sentence that lists them."""
    what = "objects that only pickle can save"
    if not opaque.keys() <= set(HYPER_PARAMETERS):
        paths = [f"{key}.{path}".rstrip(".") for key, found in opaque.items() for path in found]
        raise CheckpointError(
            f"it holds {what}, at {', '.join(paths)}. {how_to_trust} unpickles them, which can "
            f"run any code: use it only if you trust whoever wrote them"
        )
    entries = {key: checkpoint.pop(key) for key in opaque}
    gone = _prune(entries)
    checkpoint.update(entries)
    return (
        f"left out {', '.join(gone)}: {what}, and the sequences and sets that hold "
        f"them ({how_to_trust} unpickles them)"
    )


def _filled(value: Any, pickled: Any) -> Any:
    """Return a value with unpickled objects instead of those that could not be encoded.

    The pickled tree lacks the sharded tensors, so all other values are kept.
    """
    if isinstance(value, Opaque):
        return pickled
    if not opaque_paths(value):
        return value
    if isinstance(value, dict) and isinstance(pickled, Mapping) and len(value) == len(pickled):
        # By order, since keys may be such objects, too.
        pairs = [*zip(value.items(), pickled.items(), strict=True)]
        filled = copy.copy(value)  # a Counter, or a dict with a default
        filled.clear()
        for own, other in pairs:
            key, item = map(_filled, own, other)
            filled[key] = item
        return filled
    if (
        isinstance(value, (list, tuple))
        and isinstance(pickled, (list, tuple))
        and len(value) == len(pickled)
    ):
        return type(value)(_filled(*pair) for pair in zip(value, pickled, strict=True))
    return pickled


def _prune(entries: dict[Any, Any], around: tuple[str, ...] = ()) -> list[str]:
    """Drop entries that could not be saved, and return their dotted paths.

    A sequence or a set with such an item goes as a whole.
    """
    gone: list[str] = []
    for key, item in [*entries.items()]:
        path = (*around, key if isinstance(key, str) else f"({type(key).__name__})")
        inner = vars(item) if isinstance(item, Namespace) else item
        if not opaque_paths(key) and isinstance(inner, dict):
            gone += _prune(cast("dict[Any, Any]", inner), path)
        elif opaque_paths((key, item)):
            del entries[key]
            gone.append(".".join(path))
    return gone


def _put(tree: dict[Any, Any], path: Sequence[str | int], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _by_index(path: Path, optimizer: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state in torch's form, parameters by number; other tools name them."""
    found = optimizer.get("param_groups", [])
    groups: list[Any] = (
        [found[index] for index in sorted(found)] if isinstance(found, dict) else list(found)
    )
    numbers: dict[Any, int] = {}
    numbered: list[dict[str, Any]] = []
    for group in groups:
        names = group.get("params", [])
        names = [names[index] for index in sorted(names)] if isinstance(names, dict) else names
        numbered.append(
            {**group, "params": [numbers.setdefault(name, len(numbers)) for name in names]}
        )
    unknown = [name for name in optimizer.get("state", {}) if name not in numbers]
    if unknown:
        raise CheckpointError(
            f"{path}: an optimizer has states of {unknown[0]!r}, which is in none of its groups"
        )
    return {
        "state": {numbers[name]: state for name, state in optimizer.get("state", {}).items()},
        "param_groups": numbered,
    }


# -- Opening a checkpoint for a run
#
# Large tensors stay on the disk.


def open_checkpoint(
    path: AnyPath,
    weights_only: bool | None,
    codecs: Sequence[Codec] = (),
    part: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Read a checkpoint except tensors of model and optimizers and those that will be sharded.

    ``weights_only=False`` trusts pickles; see :func:`read_contents`.
    """
    trust = "loading it with weights_only=False"
    try:
        contents = read_contents(
            path,
            trust_pickle=weights_only is False,
            how_to_trust=trust,
            codecs=codecs,
            part=part,
        )
    except CheckpointError as error:
        raise error if str(path) in str(error) else type(error)(f"{path}: {error}") from error
    for note in contents.notes:
        warnings.warn(printable(f"{path}: {note}"), stacklevel=2)
    checkpoint = check_entries(contents.checkpoint, path)
    kept = KeptShards(checkpoint)
    own: dict[str, Any] = checkpoint.get(KEY, {})
    if not isinstance(own.get(STATES), dict):
        return _read_small(checkpoint, kept, contents.memory)
    # Of the states of all ranks, each rank reads its own.
    others = {name: it for name, it in own.items() if name != STATES}
    read = _read_small({**checkpoint, KEY: others}, kept, contents.memory)
    return {**read, KEY: {**read[KEY], STATES: own[STATES]}}


def open_file(path: AnyPath, weights_only: bool | None, part: tuple[int, int]) -> dict[str, Any]:
    """Read a plain checkpoint, mapped: a rank reads only the elements of its shards.

    One of a store is read from a local copy, which is gone when the process ends.
    """
    place = location(path)
    with contextlib.ExitStack() as copies:
        with disk_errors("copying", place):
            file = copies.enter_context(place.local_copy(preflight))
        try:
            return _load_file(file, weights_only, part)  # mapped data outlives a deleted copy
        except CheckpointError as error:
            raise type(error)(str(error).replace(file, str(place))) from error


_TRUST_OF_RUNS = (
    "allow the class with torch.serialization.add_safe_globals([...]), or unpickle everything with "
    "trainer.fit(..., weights_only=False), which can run any code in it"
)
_TRUST_OF_TOOLS = "--trust-pickle unpickles everything, which can run any code in it"


def _load_file(
    path: str,
    weights_only: bool | None,
    part: tuple[int, int] = (0, 1),
    how_to_trust: str = _TRUST_OF_RUNS,
) -> dict[str, Any]:
    require_intact(path, part)
    if weights_only is not False:
        require_data(path)
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except Exception as error:  # torch has no class for errors of a file
        raise refusal_of(path, error, how_to_trust) from error


def refusal_of(path: str, error: Exception, how_to_trust: str = _TRUST_OF_RUNS) -> CheckpointError:
    """Return the error for a file that ``torch.load`` refuses, with advice."""
    if not isinstance(error, pickle.UnpicklingError):
        return CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}")
    why = _UNPICKLER.search(str(error))
    return CheckpointError(
        f"{path} holds more than numbers, text, tensors and containers of them, or is damaged: "
        f"{why[1] if why else str(error).splitlines()[0]}. If you trust whoever wrote it, "
        f"{how_to_trust}"
    )


_UNPICKLER = re.compile(r"WeightsUnpickler error:\s*(\S.*?)(?:\.? Please|\.? *$)", re.MULTILINE)
"""Matches the sentence on the object itself in torch's error, without the advice around it."""


def _read_small(
    tree: dict[str, Any], kept: KeptShards, memory: Callable[[torch.Tensor], Hashable]
) -> dict[str, Any]:
    """Read the callbacks' tensors at once, except those that will be sharded.

    Callbacks may inspect and change their state. Tensors that were one object are one again.
    """
    found: dict[Hashable, torch.Tensor] = {}

    def read(value: Any) -> Any:
        if not isinstance(value, LazyTensor) or value in kept:
            return value
        if value.path[:2] not in (PLAIN_EXTRA, SHARDED_EXTRA):
            return value
        key = memory(value), value.dtype, tuple(value.shape)
        if key not in found:
            found[key] = value.whole()
        return found[key]

    return with_leaves(tree, read)
