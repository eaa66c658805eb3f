"""Import of other tools' `torch.distributed.checkpoint` directories, with or without Lightning."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import os
import pickle
import stat
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from shardeddp.checkpoint.durable import open_regular
from shardeddp.checkpoint.foreign_pickle import (
    BUILTINS,
    MAX_DEPTH,
    Archive,
    Instance,
    Maker,
    UnsafeGlobalError,
    is_dense,
    make_size,
    span_of,
    unpickle,
)
from shardeddp.checkpoint.items import check_item_crc, read_bytes
from shardeddp.checkpoint.manifest import (
    DATA_FILE,
    DCP_METADATA,
    LIGHTNING_META,
    Item,
    ItemPath,
    StoredObject,
    name_of,
)
from shardeddp.checkpoint.pieces import assemble
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Box, Interval, check_cover, whole_of

# -- The index of ``torch.distributed.checkpoint``, read without running it
#
# The index, ``.metadata``, is a pickle of three mappings: the kind of each name, with the boxes
# that a tensor is stored in; the path of keys that each name was made of; and the bytes of each box
# and each object. These are checked here, against each other and against the sizes of the files,
# before a byte of a tensor is read.


class ForeignPiece(NamedTuple):
    """Box of a tensor, and the archive of it."""

    box: Box
    item: Item


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTensor:
    """Tensor of a foreign checkpoint."""

    path: ItemPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[ForeignPiece, ...]
    """Pieces with elements: they cover the tensor and do not overlap."""

    @property
    def name(self) -> str:
        """Path joined by dots."""
        return name_of(self.path)


class ForeignIndex(NamedTuple):
    """Content of a foreign checkpoint by name; paths are as the tool has written them."""

    tensors: Mapping[str, ForeignTensor]
    objects: Mapping[str, StoredObject]


def parse_index(data: bytes, files: Mapping[str, int], trust_pickle: bool = False) -> ForeignIndex:
    """Read a ``.metadata``; refuse one that does not fit the data files, given with their sizes."""
    try:
        root = pickle.loads(data) if trust_pickle else unpickle(data, DCP_METADATA, _KNOWN)
        return _index(root, files)
    except CheckpointError:
        raise
    except Exception as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(
            f"{DCP_METADATA} contradicts itself, or the files: {reason}"
        ) from error


def _make_layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise ValueError("expected dense tensors")
    return torch.strided


def _make_format(_: Any, name: Any) -> None:
    """Accept enum members as Python 3.11.0 to 3.11.3 pickles them; other attributes may be code."""
    formats = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
    if name not in formats:
        raise UnsafeGlobalError("builtins.getattr")


_HOME = "torch.distributed.checkpoint"
_METADATA = """
    Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties MetadataIndex
    ChunkStorageMetadata StorageMeta _MEM_FORMAT_ENCODING
"""
_PLACES = ["PosixPath", "WindowsPath", "PurePosixPath"]
_CLASSES = {
    f"{_HOME}.metadata": _METADATA.split(),
    f"{_HOME}.filesystem": ["_StorageInfo", "_StoragePrefix"],
    "torch.distributed._shard.sharded_tensor.metadata": ["TensorProperties", "MEM_FORMAT_ENCODING"],
    # Directory of the checkpoint at its writing; under the second name in Python 3.13.
    "pathlib": _PLACES,
    "pathlib._local": _PLACES,
}
_KNOWN = {
    **BUILTINS,
    **{
        f"{module}.{name}": Maker(partial(Instance, name))
        for module, names in _CLASSES.items()
        for name in names
    },
    "torch.serialization._get_layout": Maker(_make_layout),
    "builtins.getattr": Maker(_make_format),
}
"""Globals of an index, as torch 2.0 and later write it."""


# The functions below raise ValueError for failed checks, any exception for values of a wrong kind.


def _index(root: Any, files: Mapping[str, int]) -> ForeignIndex:
    fields = _fields(root, "Metadata")
    items = _items(fields["storage_data"], files)
    tensors: dict[str, ForeignTensor] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in fields["state_dict_metadata"].items():
        path = _path(_text(name), fields.get("planner_data"))
        if _kind(entry) == "BytesStorageMetadata":
            objects[name] = StoredObject(path=path, item=_take(items, name, None))
        else:
            tensors[name] = _tensor(path, _fields(entry, "TensorStorageMetadata"), items)
    if items:
        raise ValueError(f"the bytes of {_quote(next(iter(items))[0])} belong to nothing")
    _check_lists([stored.path for stored in (*tensors.values(), *objects.values())])
    return ForeignIndex(tensors, objects)


def _kind(value: Any) -> str:
    """Return the class name of a value that was read as data, or unpickled."""
    return value.kind if isinstance(value, Instance) else type(value).__name__


def _fields(value: Any, kind: str) -> Mapping[Any, Any]:
    """Return the attributes of an object of a class."""
    if _kind(value) != kind:
        raise ValueError(f"expected a {kind}, found a {_kind(value)}")
    fields = value.state if isinstance(value, Instance) else vars(value)
    if kind == "TensorProperties" and isinstance(fields, tuple):
        fields = dict(zip(("dtype", "layout"), fields, strict=False))  # the others are unused
    if not isinstance(fields, dict):
        raise ValueError(f"expected the attributes of a {kind}, found a {type(fields).__name__}")
    return fields


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, found a {type(value).__name__}")
    return value


def _quote(name: str) -> str:
    return repr(name[:200])


def _path(name: str, paths: Any) -> ItemPath:
    """Return the keys that a name was made of; joined, they are the name."""
    if not paths:  # saved without flattening: names are keys
        return (name,)
    path = paths.get(name)
    if not isinstance(path, tuple) or not 0 < len(path) <= MAX_DEPTH:
        raise ValueError(f"planner_data has no path of keys for {_quote(name)}")
    numbers = [key for key in path if not isinstance(key, str)]
    known = all(type(key) is int and 0 <= key < 2**53 for key in numbers)
    # Strings may be shared and long: they are joined only if they cannot be longer than the name.
    length = sum(len(key) for key in path if isinstance(key, str))
    if not known or length > len(name) or name_of(path) != name:
        raise ValueError(f"{_quote(name)} cannot be made of the keys that planner_data has for it")
    return path


def _check_lists(paths: Iterable[ItemPath]) -> None:
    """Check that integers in paths are list indexes, from 0 on without a gap."""
    indices: dict[str, set[int]] = {}
    for path in paths:
        for depth, key in enumerate(path):
            if isinstance(key, int):
                indices.setdefault(repr(path[:depth]), set()).add(key)
    for prefix, found in indices.items():
        if max(found) >= len(found):
            raise ValueError(
                f"{prefix[:200]} would be a list with place {max(found):,}, of whose places only "
                f"{len(found):,} are stored"
            )


def _key(name: str, offset: tuple[int, ...] | None) -> tuple[str, str]:
    """Return the key of an item: with the offset of a tensor's box, or without for an object.

    It is of strings, because a file can choose numbers with equal hashes.
    """
    return name, "" if offset is None else f" at {list(offset)}"


def _items(stored: Mapping[Any, Any], files: Mapping[str, int]) -> dict[tuple[str, str], Item]:
    """Return the items by key; checks that they lie in the files and do not overlap."""
    items: dict[tuple[str, str], Item] = {}
    for index, info in stored.items():
        fields = _fields(index, "MetadataIndex")
        name, offset = _text(fields["fqn"]), fields.get("offset")
        key = _key(name, None if offset is None else make_size(offset))
        if key in items:
            raise ValueError(f"the bytes of {_quote(name)}{key[1]} are there twice")
        items[key] = _item(_quote(name), _fields(info, "_StorageInfo"), files)
    ordered = sorted(items.values(), key=lambda it: (it.file, it.offset, it.nbytes))
    for first, second in itertools.pairwise(ordered):
        if first.file == second.file and first.offset + first.nbytes > second.offset:
            raise ValueError(
                f"bytes {second.offset:,} to {first.offset + first.nbytes:,} of {second.file} "
                f"belong to more than one item"
            )
    return items


def _item(name: str, fields: Mapping[Any, Any], files: Mapping[str, int]) -> Item:
    file = _text(fields["relative_path"])
    if fields.get("transform_descriptors"):
        raise ValueError(
            f"{name} was stored through an extension (compression or the like), which is not "
            f"supported"
        )
    if not DATA_FILE.fullmatch(file):
        raise ValueError(
            f"{name} is said to be in {_quote(file)}, expected a file __<rank>_<number>.distcp"
        )
    if file not in files:
        raise ValueError(
            f"{name} is in {file}, which is missing in the directory (or is not a regular file)"
        )
    start, length = make_size((fields["offset"], fields["length"]))
    if length == 0 or start + length > files[file]:
        raise ValueError(
            f"{name} is at bytes {start:,} to {start + length:,} of the {files[file]:,} of {file}"
        )
    return Item(file=file, offset=start, nbytes=length)


def _take(items: dict[tuple[str, str], Item], name: str, offset: tuple[int, ...] | None) -> Item:
    key = _key(name, offset)
    if key not in items:
        raise ValueError(f"the bytes of {_quote(name)}{key[1]} are missing")
    return items.pop(key)


def _tensor(
    path: ItemPath, fields: Mapping[Any, Any], items: dict[tuple[str, str], Item]
) -> ForeignTensor:
    """Return one tensor; its items are removed from ``items``."""
    name, shape = name_of(path), make_size(fields["size"])
    properties = _fields(fields["properties"], "TensorProperties")
    dtype = properties["dtype"]
    if not is_dense(dtype) or properties["layout"] is not torch.strided:
        raise ValueError(f"{_quote(name)} is no dense tensor of a known element type")
    if len(fields["chunks"]) > len(items):  # many tensors may share one list
        raise ValueError(f"{_quote(name)} has more boxes than there are bytes for")
    pieces: list[ForeignPiece] = []
    for chunk in fields["chunks"]:
        place = _fields(chunk, "ChunkStorageMetadata")
        box = Box(make_size(place["offsets"]), make_size(place["sizes"]))
        if not len(box.offsets) == len(box.sizes) == len(shape) or any(
            at + n > size for at, n, size in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            raise ValueError(f"{_quote(name)} of shape {shape} has a box outside of it: {box}")
        item = _take(items, name, box.offsets)
        if box.numel * dtype.itemsize > item.nbytes:
            raise ValueError(
                f"{_quote(name)} has {box.numel:,} elements of {dtype} in the {item.nbytes:,} "
                f"bytes at byte {item.offset:,} of {item.file}"
            )
        if box.numel:
            pieces.append(ForeignPiece(box, item))
    check_cover(_quote(name), shape, [piece.box for piece in pieces])
    return ForeignTensor(path=path, dtype=dtype, shape=shape, pieces=tuple(pieces))


# -- Checkpoints of other tools
#
# Nothing of such a directory is executed, and no path in it is followed: pickles are read as data,
# files are regular files of the directory itself. :class:`ForeignCheckpoint` gives it the layout of
# a checkpoint of this package:
#
# - ``FSDPStrategy``: ``model``, ``optimizer_0``, ..., and ``meta.pt``; unchanged.
# - ``ModelParallelStrategy``: the same with ``state_dict`` for ``model``; it is renamed.
# - Others: without either, tensors directly at the root (``layers.0.weight``) go to ``model``.

MAX_INDEX_NBYTES = 64 * 2**20
"""Limit of ``.metadata``: some 400 thousand boxes, which take about 15 times as much memory."""

MODEL = "model"
_MODEL_PARALLEL = "state_dict"

_Stored = TypeVar("_Stored", ForeignTensor, StoredObject)

log = logging.getLogger(__name__)

FOREIGN = "checkpoints of other tools are read from file systems"
"""Reason to refuse one in a store."""


class ForeignCheckpoint:
    """Checkpoint directory of another tool, open for reading.

    Opening reads the index and the sizes of the files, and refuses a checkpoint with incomplete
    tensors. Reading an element of a piece for the first time compares the CRC of the whole piece.
    Several processes may read at once; there are no collectives.

    Args:
        path: Path of the directory, or of a link to it.
        trust_pickle: True to run the pickles of the directory, which may then hold more than data.
            Only for directories that you would run as a program, too.
    """

    def __init__(self, path: str | os.PathLike[str], *, trust_pickle: bool = False) -> None:
        self.path = os.fspath(path)
        self._trust_pickle = trust_pickle
        if trust_pickle:
            log.warning(
                "trust_pickle=True: the pickles in %s are run, with the rights of this process. "
                "Whoever wrote the directory, or could write into it, decides what they do.",
                self.path,
            )
        self._files = self._list()
        if not os.path.lexists(os.path.join(self.path, DCP_METADATA)):
            raise CheckpointError(
                f"{self.path} has no {DCP_METADATA}: expected a directory that "
                f"torch.distributed.checkpoint has written"
            )
        with self._open(DCP_METADATA) as (fd, whole):
            if whole.nbytes > MAX_INDEX_NBYTES and not trust_pickle:
                raise CheckpointError(
                    f"{DCP_METADATA} has {whole.nbytes:,} bytes, expected at most "
                    f"{MAX_INDEX_NBYTES:,}: pass trust_pickle=True if you know why it is so large"
                )
            data = bytes(read_bytes(fd, whole, Interval(0, whole.nbytes)))
            tensors, objects = _normalised(parse_index(data, self._files, trust_pickle))
        self.tensors = MappingProxyType(tensors)
        """Tensors by name: the path joined by dots."""

        self.objects = MappingProxyType(objects)
        """Values other than tensors, by name: options of optimizers, for example."""

        self._payloads: dict[Item, tuple[int, tuple[int, ...]]] = {}

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """Lightning's entries without tensors (``meta.pt``); empty if there are none.

        They include loops, callbacks and hyperparameters.
        """
        if not os.path.lexists(os.path.join(self.path, LIGHTNING_META)):
            return {}
        with self._open(LIGHTNING_META, LIGHTNING_META) as (fd, whole):
            value = self._load(fd, whole)
            if not isinstance(value, dict):
                raise CheckpointError(f"expected a mapping, found {type(value).__name__}")
        return value

    def read(self, name: str, interval: Interval, box: Box | None = None) -> torch.Tensor:
        """Read elements of a tensor, 1D; see :meth:`CheckpointReader.read`."""
        tensor = self.tensors[name]
        stored = [(piece.box, partial(self._read_box, tensor, piece)) for piece in tensor.pieces]
        return assemble(interval, box or whole_of(tensor.shape), tensor.dtype, stored)

    def read_object(self, name: str) -> Any:
        """Read one of :attr:`objects`: plain containers of plain values and CPU tensors."""
        item = self.objects[name].item
        with self._open(item.file, _where(f"object {name!r}", item)) as (fd, _):
            return self._load(fd, item)

    def _read_box(self, tensor: ForeignTensor, piece: ForeignPiece, box: Box) -> torch.Tensor:
        """Read a box within a piece, as a tensor of the box's shape."""
        item, itemsize = piece.item, tensor.dtype.itemsize
        with self._open(item.file, _where(f"a piece of {tensor.name!r}", item)) as (fd, _):
            if item not in self._payloads:
                self._payloads[item] = _payload(fd, tensor, piece)
            start, strides = self._payloads[item]
            inner = (at - origin for at, origin in zip(box.offsets, piece.box.offsets, strict=True))
            start += sum(map(math.prod, zip(inner, strides, strict=True))) * itemsize
            stop = start + span_of(box.sizes, strides) * itemsize
            data = read_bytes(fd, item, Interval(start, stop))
        elements = torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype)
        return elements.as_strided(box.sizes, strides)

    def _load(self, fd: int, item: Item) -> Any:
        if not self._trust_pickle:
            return Archive(fd, item).load()
        check_item_crc(fd, item)
        stream = io.BytesIO(read_bytes(fd, item, Interval(0, item.nbytes)))
        try:
            return torch.load(stream, map_location="cpu", weights_only=False)
        except Exception as error:
            raise CheckpointError(
                f"it cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def _list(self) -> dict[str, int]:
        """Return the size of every data file."""
        try:
            names = [name for name in os.listdir(self.path) if DATA_FILE.fullmatch(name)]
            found = {name: os.lstat(os.path.join(self.path, name)) for name in names}
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"expected a checkpoint directory at {self.path!r}: {error}"
            ) from error
        return {name: it.st_size for name, it in found.items() if stat.S_ISREG(it.st_mode)}

    @contextlib.contextmanager
    def _open(self, name: str, what: str = "") -> Generator[tuple[int, Item]]:
        """Open a regular file of the directory, with all of its bytes as an item."""
        try:
            with open_regular(os.path.join(self.path, name)) as (fd, nbytes):
                if nbytes != self._files.get(name, nbytes):
                    raise CheckpointError(f"{name} has changed since the checkpoint was opened")
                yield fd, Item(file=name, offset=0, nbytes=nbytes)
        except (CheckpointError, OSError, MemoryError) as error:
            raise CheckpointError(f"{self.path}: {what and what + ': '}{error}") from error


def _where(what: str, item: Item) -> str:
    return f"{what}, bytes {item.offset:,} to {item.offset + item.nbytes:,} of {item.file}"


def _payload(fd: int, tensor: ForeignTensor, piece: ForeignPiece) -> tuple[int, tuple[int, ...]]:
    """Return the byte offset of a piece's elements in its item, and strides; compares the CRC."""
    view, record = Archive(fd, piece.item).load_view()
    expected, found = (tensor.dtype, piece.box.sizes), (view.dtype, view.shape)
    if expected != found:
        raise CheckpointError(
            f"the index says {expected[0]} of shape {expected[1]}, and there is {found[0]} of "
            f"shape {found[1]}"
        )
    if span_of(view.shape, view.strides) < piece.box.numel:
        raise CheckpointError("the tensor that is stored there is in itself twice")
    return record.offset + view.offset * view.dtype.itemsize, view.strides


def _normalised(index: ForeignIndex) -> tuple[dict[str, ForeignTensor], dict[str, StoredObject]]:
    """Return tensors and objects by name, in the layout of this package."""
    roots = {it.path[0] for it in (*index.tensors.values(), *index.objects.values())}
    bare = not roots & {MODEL, _MODEL_PARALLEL}

    def placed(stored: _Stored) -> _Stored:
        path = stored.path
        if path[0] == _MODEL_PARALLEL and MODEL not in roots:
            path = (MODEL, *path[1:])
        elif bare and len(path) == 1 and isinstance(stored, ForeignTensor):
            path = (MODEL, *path)
        return replace(stored, path=path)

    tensors = {it.name: it for it in map(placed, index.tensors.values())}
    objects = {name_of(it.path): it for it in map(placed, index.objects.values())}
    count = len(index.tensors) + len(index.objects)
    if len({*tensors, *objects}) < count:
        raise CheckpointError(
            f"two of its {count:,} values would have the same name under {MODEL!r}"
        )
    return tensors, objects
