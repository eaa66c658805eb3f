"""Reads the index of a checkpoint of ``torch.distributed.checkpoint`` without running it, and checks what it says.

The index, ``.metadata``, is a pickle of three mappings: what each name is, with the boxes that a tensor is stored in;
the path of keys that each name was made of; and where the bytes of each box and each object are. All that follows from
them is checked here, against each other and against the sizes of the files, before a byte of a tensor is read.
"""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardeddp.checkpoint.foreign.unpickling import BUILTINS, CodeAskedForError, Maker, Record, make_size, unpickle
from shardeddp.checkpoint.format.manifest import DATA_FILE, DCP_METADATA, Item, ItemPath, StoredObject, name_of
from shardeddp.errors import CheckpointError
from shardeddp.plan.intervals import Box

MAX_CUT_DIMS = 6
"""Dims along which a tensor may be cut into boxes; a device mesh has fewer."""

_DTYPE = re.compile(r"torch\.(b?float\d.*|complex\d+|u?int(8|16|32|64)|bool)")
"""Types whose elements are whole bytes and mean something by themselves, unlike those of quantized tensors."""

_HOME = "torch.distributed.checkpoint"
_OLD_HOME = "torch.distributed._shard.sharded_tensor.metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPiece:
    """A box of a tensor, and the archive of it."""

    box: Box
    item: Item


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTensor:
    """One tensor of a foreign checkpoint."""

    path: ItemPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[ForeignPiece, ...]
    """Those with elements: they cover the tensor and do not overlap."""

    @property
    def name(self) -> str:
        """The path as one word."""
        return name_of(self.path)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ForeignIndex:
    """What a foreign checkpoint holds; the paths are those that the tool has written."""

    tensors: Mapping[str, ForeignTensor]
    """By name."""

    objects: Mapping[str, StoredObject]
    """By name."""


@dataclass(frozen=True, slots=True)
class _Key:
    """Where an item belongs: an offset for a box of a tensor, none for an object."""

    name: str
    offset: tuple[int, ...] | None


def read_index(data: bytes, files: Mapping[str, int], trust_pickle: bool = False) -> ForeignIndex:
    """Read the content of a ``.metadata``.

    Args:
        data: Its bytes.
        files: Size of every data file of the directory.
        trust_pickle: Run the pickle, as ``torch.distributed.checkpoint`` would.

    Raises:
        CheckpointError: It asks for more than data, contradicts itself, or contradicts the files.
    """
    root = _run(data) if trust_pickle else unpickle(data, DCP_METADATA, _known())
    fields = _fields(root, "Metadata")
    described = _mapping(fields, "state_dict_metadata")
    paths = fields.get("planner_data")
    items = _items(_mapping(fields, "storage_data"), files)
    tensors: dict[str, ForeignTensor] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in described.items():
        path = _path(_text(name), paths)
        if _kind(entry) == "BytesStorageMetadata":
            objects[name] = StoredObject(path=path, item=_take(items, _Key(name, None)))
        else:
            tensors[name] = _tensor(path, _fields(entry, "TensorStorageMetadata"), items)
    if items:
        raise CheckpointError(f"{DCP_METADATA} has bytes for {_quote(next(iter(items)).name)}, which belong to nothing")
    _check_lists([stored.path for stored in (*tensors.values(), *objects.values())])
    return ForeignIndex(tensors=tensors, objects=objects)


def _known() -> Mapping[str, Any]:
    """The globals of an index, as torch 2.0 and later write it."""
    metadata = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex")
    classes = [f"{_HOME}.metadata.{name}" for name in (*metadata, "ChunkStorageMetadata", "StorageMeta")]
    classes += [f"{_HOME}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")]
    classes += [f"{_OLD_HOME}.TensorProperties"]
    formats = [f"{_HOME}.metadata._MEM_FORMAT_ENCODING", f"{_OLD_HOME}.MEM_FORMAT_ENCODING"]
    homes = ("pathlib", "pathlib._local")
    places = [f"{home}.{name}" for home in homes for name in ("PosixPath", "WindowsPath", "PurePosixPath")]
    return {
        **BUILTINS,
        **{name: Maker(partial(Record, name.rpartition(".")[2])) for name in classes},
        **dict.fromkeys(formats, _FORMAT),
        "builtins.getattr": Maker(_make_format),
        # Where the checkpoint was when it was written does not matter.
        **{name: Maker(lambda *parts: None) for name in places},
        "torch.serialization._get_layout": Maker(_make_layout),
    }


def _make_number(number: int) -> int:
    return number


_FORMAT = Maker(_make_number)
_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


def _make_format(kind: Any, name: Any) -> int:
    """How Python 3.11.0 to 3.11.3 spell the member of an enumeration; any other attribute might be code."""
    if kind is not _FORMAT or name not in _FORMATS:
        raise CodeAskedForError("builtins.getattr")
    return _FORMATS.index(name)


def _make_layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise ValueError("expected dense tensors")
    return torch.strided


def _run(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CheckpointError(f"{DCP_METADATA} cannot be unpickled: {type(error).__name__}: {error}") from error


# -- the same view of what was only read and of what was run


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Record) else type(value).__name__


def _fields(value: Any, kind: str) -> Mapping[Any, Any]:
    if _kind(value) != kind:
        raise CheckpointError(f"{DCP_METADATA} contradicts itself: expected a {kind}, found a {_kind(value)[:80]}")
    return value.fields if isinstance(value, Record) else vars(value)


def _mapping(fields: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    if not isinstance(value := fields.get(name), dict):
        raise CheckpointError(f"{DCP_METADATA}: expected a mapping as {name}, found {type(value).__name__}")
    return value


def _size(value: Any, what: str) -> tuple[int, ...]:
    try:
        return make_size(value)
    except ValueError as error:
        raise CheckpointError(f"{DCP_METADATA}: {what}: {error}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"{DCP_METADATA}: expected names, found a {type(value).__name__}")
    return value


def _quote(name: Any) -> str:
    return repr(name[:200]) if isinstance(name, str) else f"a {type(name).__name__}"


# -- names and paths


def _path(name: str, paths: Any) -> ItemPath:
    """The keys that a name was made of; joined, they are the name."""
    if not paths:  # saved without flattening: names are keys
        return (name,)
    path: Any = paths.get(name) if isinstance(paths, dict) else None
    # No more keys than the name has room for are looked at.
    if not isinstance(path, tuple) or len(path) > len(name) + 1 or not _could_make(path, name):
        raise CheckpointError(f"{DCP_METADATA}: planner_data has no path of keys that {_quote(name)} could be made of")
    return path


def _could_make(path: tuple[Any, ...], name: str) -> bool:
    """Whether the keys, joined, are the name."""
    if not path or not all(isinstance(key, str) or (type(key) is int and 0 <= key < 2**53) for key in path):
        return False
    return sum(len(key) for key in path if isinstance(key, str)) <= len(name) and name_of(path) == name


def _check_lists(paths: Iterable[ItemPath]) -> None:
    """Integers in paths are places in lists, which are filled from 0 on without a gap."""
    indices: dict[ItemPath, set[int]] = {}
    for path in paths:
        for depth, key in enumerate(path):
            if isinstance(key, int):
                indices.setdefault(path[:depth], set()).add(key)
    for prefix, found in indices.items():
        if max(found) >= len(found):
            raise CheckpointError(
                f"{DCP_METADATA}: {_quote(name_of(prefix))} would be a list with place {max(found):,}, of whose places"
                f" only {len(found):,} are stored"
            )


# -- where the bytes are


def _items(stored: Mapping[Any, Any], files: Mapping[str, int]) -> dict[_Key, Item]:
    """The items by what they belong to; all lie in the files, and none in another."""
    items: dict[_Key, Item] = {}
    for index, info in stored.items():
        place = _fields(index, "MetadataIndex")
        offset = place.get("offset")
        key = _Key(_text(place.get("fqn")), None if offset is None else _size(offset, "the offset of an item"))
        if key in items:
            raise CheckpointError(f"{DCP_METADATA} has bytes twice for {_quote(key.name)} at {offset}")
        items[key] = _item(_quote(key.name), _fields(info, "_StorageInfo"), files)
    for first, second in itertools.pairwise(sorted(items.values(), key=lambda it: (it.file, it.offset, it.nbytes))):
        if first.file == second.file and first.offset + first.nbytes > second.offset:
            raise CheckpointError(
                f"{DCP_METADATA}: bytes {second.offset:,} to {first.offset + first.nbytes:,} of {second.file} belong to"
                " more than one item"
            )
    return items


def _item(name: str, fields: Mapping[Any, Any], files: Mapping[str, int]) -> Item:
    file, offset, nbytes = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if fields.get("transform_descriptors"):
        raise CheckpointError(
            f"{name} was stored through an extension (compression or the like), which is not supported"
        )
    if not isinstance(file, str) or not DATA_FILE.fullmatch(file):
        raise CheckpointError(f"{name} is said to be in {_quote(file)}: expected a data file, __<rank>_<number>.distcp")
    if file not in files:
        raise CheckpointError(f"{name} is in {file}, which is missing in the directory (or is not a regular file)")
    start, length = _size((offset, nbytes), f"the place of {name}")
    if length == 0 or start + length > files[file]:
        raise CheckpointError(
            f"{name} is at bytes {start:,} to {start + length:,} of {file}, which has {files[file]:,} bytes"
        )
    return Item(file=file, offset=start, nbytes=length)


def _take(items: dict[_Key, Item], key: _Key) -> Item:
    if (item := items.pop(key, None)) is None:
        at = "" if key.offset is None else f" at {list(key.offset)}"
        raise CheckpointError(f"{DCP_METADATA}: the bytes of {_quote(key.name)}{at} are missing")
    return item


# -- tensors


def _tensor(path: ItemPath, fields: Mapping[Any, Any], items: dict[_Key, Item]) -> ForeignTensor:
    """One tensor; takes its items out of those that are left."""
    name = name_of(path)
    dtype = _dtype(name, fields.get("properties"))
    shape = _size(fields.get("size"), f"the shape of {_quote(name)}")
    if not isinstance(chunks := fields.get("chunks"), list) or len(chunks) > len(items):
        raise CheckpointError(f"{DCP_METADATA}: {_quote(name)} has more boxes than there are bytes for")
    pieces: list[ForeignPiece] = []
    for chunk in chunks:
        place = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = (_size(place.get(word), f"a box of {_quote(name)}") for word in ("offsets", "sizes"))
        box = Box(offsets, sizes)
        inside = len(box.offsets) == len(box.sizes) == len(shape)
        if not inside or any(at + n > size for at, n, size in zip(box.offsets, box.sizes, shape, strict=True)):
            raise CheckpointError(f"{DCP_METADATA}: {_quote(name)} of shape {shape} has a box outside of it: {box}")
        item = _take(items, _Key(name, box.offsets))
        if box.numel * dtype.itemsize > item.nbytes:
            raise CheckpointError(
                f"{_quote(name)}: a box of {box.numel:,} elements of {dtype} cannot be in the {item.nbytes:,} bytes at"
                f" byte {item.offset:,} of {item.file}"
            )
        if box.numel:
            pieces.append(ForeignPiece(box=box, item=item))
    _check_cover(name, shape, [piece.box for piece in pieces])
    return ForeignTensor(path=path, dtype=dtype, shape=shape, pieces=tuple(pieces))


def _dtype(name: str, properties: Any) -> torch.dtype:
    """The element type; properties are pickled as a tuple of dtype, layout, and three things that do not matter."""
    if isinstance(properties, Record):
        state = properties.state
        dtype, layout = state[:2] if isinstance(state, tuple) and len(state) == 5 else (None, None)
    else:
        fields = _fields(properties, "TensorProperties")
        dtype, layout = fields.get("dtype"), fields.get("layout")
    if not isinstance(dtype, torch.dtype) or not _DTYPE.fullmatch(str(dtype)) or layout is not torch.strided:
        raise CheckpointError(f"{DCP_METADATA}: {_quote(name)} is no dense tensor of a known element type")
    return dtype


def _check_cover(name: str, shape: Sequence[int], found: Sequence[Box]) -> None:
    """Every element of the tensor is in exactly one box.

    Summed up, the boxes count how often each element is covered. A count is determined by its differences along all
    dims, and those of a box are its corners with alternating signs: so the corners of all boxes have to add up to the
    corners of the tensor. That takes one pass, however the boxes lie.
    """
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in found)]
    if len(cut) > MAX_CUT_DIMS:
        raise CheckpointError(f"{_quote(name)} is cut along {len(cut)} dims, expected at most {MAX_CUT_DIMS}")
    whole = [Box((0,) * len(shape), tuple(shape))] if 0 not in shape else []
    corners: Counter[tuple[int, ...]] = Counter()
    for these, sign in ((found, 1), (whole, -1)):
        for box in these:
            edges = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in cut]
            for corner in itertools.product(*edges):
                corners[tuple(at for at, _ in corner)] += sign * math.prod(alternating for _, alternating in corner)
    if any(corners.values()):
        raise CheckpointError(
            f"{DCP_METADATA}: the {len(found):,} boxes of {_quote(name)} do not cover its shape {tuple(shape)}:"
            " elements are missing, or in more than one box"
        )
