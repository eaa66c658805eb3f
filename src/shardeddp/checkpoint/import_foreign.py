"""Import of other tools' `torch.distributed.checkpoint` directories, with or without Lightning."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import os
import pickle
import re
import stat
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch

from shardeddp.checkpoint.foreign_pickle import (
    BUILTINS,
    Archive,
    CodeAskedForError,
    Maker,
    Record,
    Span,
    TensorView,
    make_size,
    unpickle,
)
from shardeddp.checkpoint.manifest import (
    DATA_FILE,
    DCP_METADATA,
    LIGHTNING_META,
    Item,
    ItemPath,
    StoredObject,
    name_of,
)
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Box, Interval, boxes

# -- Reads the index of a checkpoint of ``torch.distributed.checkpoint`` without running it, and
#    checks what it says
#
# The index, ``.metadata``, is a pickle of three mappings: what each name is, with the boxes that a
# tensor is stored in; the path of keys that each name was made of; and where the bytes of each box
# and each object are. All that follows from them is checked here, against each other and against
# the sizes of the files, before a byte of a tensor is read.

MAX_CUT_DIMS = 6
"""Dims along which a tensor may be cut into boxes; a device mesh has fewer."""

_DTYPE = re.compile(r"torch\.(b?float\d.*|complex\d+|u?int(8|16|32|64)|bool)")
"""Types whose elements are whole bytes and mean something alone, unlike quantized ones."""

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
        raise CheckpointError(
            f"{DCP_METADATA} has bytes for {_quote(next(iter(items)).name)}, which belong to "
            f"nothing"
        )
    _check_lists([stored.path for stored in (*tensors.values(), *objects.values())])
    return ForeignIndex(tensors=tensors, objects=objects)


def _known() -> Mapping[str, Any]:
    """The globals of an index, as torch 2.0 and later write it."""
    metadata = (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
    )
    classes = [
        f"{_HOME}.metadata.{name}" for name in (*metadata, "ChunkStorageMetadata", "StorageMeta")
    ]
    classes += [f"{_HOME}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")]
    classes += [f"{_OLD_HOME}.TensorProperties"]
    formats = [f"{_HOME}.metadata._MEM_FORMAT_ENCODING", f"{_OLD_HOME}.MEM_FORMAT_ENCODING"]
    homes = ("pathlib", "pathlib._local")
    places = [
        f"{home}.{name}" for home in homes for name in ("PosixPath", "WindowsPath", "PurePosixPath")
    ]
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
    """How Python 3.11.0 to 3.11.3 spell an enumeration's member; other attributes might be code."""
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
        raise CheckpointError(
            f"{DCP_METADATA} cannot be unpickled: {type(error).__name__}: {error}"
        ) from error


# -- the same view of what was only read and of what was run


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, Record) else type(value).__name__


def _fields(value: Any, kind: str) -> Mapping[Any, Any]:
    if _kind(value) != kind:
        raise CheckpointError(
            f"{DCP_METADATA} contradicts itself: expected a {kind}, found a {_kind(value)[:80]}"
        )
    return value.fields if isinstance(value, Record) else vars(value)


def _mapping(fields: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    if not isinstance(value := fields.get(name), dict):
        raise CheckpointError(
            f"{DCP_METADATA}: expected a mapping as {name}, found {type(value).__name__}"
        )
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
        raise CheckpointError(
            f"{DCP_METADATA}: planner_data has no path of keys that {_quote(name)} could be made of"
        )
    return path


def _could_make(path: tuple[Any, ...], name: str) -> bool:
    """Whether the keys, joined, are the name."""
    if not path or not all(
        isinstance(key, str) or (type(key) is int and 0 <= key < 2**53) for key in path
    ):
        return False
    return (
        sum(len(key) for key in path if isinstance(key, str)) <= len(name) and name_of(path) == name
    )


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
                f"{DCP_METADATA}: {_quote(name_of(prefix))} would be a list with place "
                f"{max(found):,}, of whose places only {len(found):,} are stored"
            )


# -- where the bytes are


def _items(stored: Mapping[Any, Any], files: Mapping[str, int]) -> dict[_Key, Item]:
    """The items by what they belong to; all lie in the files, and none in another."""
    items: dict[_Key, Item] = {}
    for index, info in stored.items():
        place = _fields(index, "MetadataIndex")
        offset = place.get("offset")
        key = _Key(
            _text(place.get("fqn")),
            None if offset is None else _size(offset, "the offset of an item"),
        )
        if key in items:
            raise CheckpointError(
                f"{DCP_METADATA} has bytes twice for {_quote(key.name)} at {offset}"
            )
        items[key] = _item(_quote(key.name), _fields(info, "_StorageInfo"), files)
    for first, second in itertools.pairwise(
        sorted(items.values(), key=lambda it: (it.file, it.offset, it.nbytes))
    ):
        if first.file == second.file and first.offset + first.nbytes > second.offset:
            raise CheckpointError(
                f"{DCP_METADATA}: bytes {second.offset:,} to {first.offset + first.nbytes:,} of "
                f"{second.file} belong to more than one item"
            )
    return items


def _item(name: str, fields: Mapping[Any, Any], files: Mapping[str, int]) -> Item:
    file, offset, nbytes = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if fields.get("transform_descriptors"):
        raise CheckpointError(
            f"{name} was stored through an extension (compression or the like), which is not "
            f"supported"
        )
    if not isinstance(file, str) or not DATA_FILE.fullmatch(file):
        raise CheckpointError(
            f"{name} is said to be in {_quote(file)}: expected a data file, "
            f"__<rank>_<number>.distcp"
        )
    if file not in files:
        raise CheckpointError(
            f"{name} is in {file}, which is missing in the directory (or is not a regular file)"
        )
    start, length = _size((offset, nbytes), f"the place of {name}")
    if length == 0 or start + length > files[file]:
        raise CheckpointError(
            f"{name} is at bytes {start:,} to {start + length:,} of {file}, which has "
            f"{files[file]:,} bytes"
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
        raise CheckpointError(
            f"{DCP_METADATA}: {_quote(name)} has more boxes than there are bytes for"
        )
    pieces: list[ForeignPiece] = []
    for chunk in chunks:
        place = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = (
            _size(place.get(word), f"a box of {_quote(name)}") for word in ("offsets", "sizes")
        )
        box = Box(offsets, sizes)
        inside = len(box.offsets) == len(box.sizes) == len(shape)
        if not inside or any(
            at + n > size for at, n, size in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            raise CheckpointError(
                f"{DCP_METADATA}: {_quote(name)} of shape {shape} has a box outside of it: {box}"
            )
        item = _take(items, _Key(name, box.offsets))
        if box.numel * dtype.itemsize > item.nbytes:
            raise CheckpointError(
                f"{_quote(name)}: a box of {box.numel:,} elements of {dtype} cannot be in the "
                f"{item.nbytes:,} bytes at byte {item.offset:,} of {item.file}"
            )
        if box.numel:
            pieces.append(ForeignPiece(box=box, item=item))
    _check_cover(name, shape, [piece.box for piece in pieces])
    return ForeignTensor(path=path, dtype=dtype, shape=shape, pieces=tuple(pieces))


def _dtype(name: str, properties: Any) -> torch.dtype:
    """The element type of a tensor.

    Properties are pickled as a tuple of dtype, layout, and three things that do not matter.
    """
    if isinstance(properties, Record):
        state = properties.state
        dtype, layout = state[:2] if isinstance(state, tuple) and len(state) == 5 else (None, None)
    else:
        fields = _fields(properties, "TensorProperties")
        dtype, layout = fields.get("dtype"), fields.get("layout")
    if (
        not isinstance(dtype, torch.dtype)
        or not _DTYPE.fullmatch(str(dtype))
        or layout is not torch.strided
    ):
        raise CheckpointError(
            f"{DCP_METADATA}: {_quote(name)} is no dense tensor of a known element type"
        )
    return dtype


def _check_cover(name: str, shape: Sequence[int], found: Sequence[Box]) -> None:
    """Every element of the tensor is in exactly one box.

    Summed up, the boxes count how often each element is covered. A count is determined by its
    differences along all dims, and those of a box are its corners with alternating signs: so the
    corners of all boxes have to add up to the corners of the tensor. That takes one pass, however
    the boxes lie.
    """
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in found)]
    if len(cut) > MAX_CUT_DIMS:
        raise CheckpointError(
            f"{_quote(name)} is cut along {len(cut)} dims, expected at most {MAX_CUT_DIMS}"
        )
    whole = [Box((0,) * len(shape), tuple(shape))] if 0 not in shape else []
    corners: Counter[tuple[int, ...]] = Counter()
    for these, sign in ((found, 1), (whole, -1)):
        for box in these:
            edges = [
                ((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in cut
            ]
            for corner in itertools.product(*edges):
                corners[tuple(at for at, _ in corner)] += sign * math.prod(
                    alternating for _, alternating in corner
                )
    if any(corners.values()):
        raise CheckpointError(
            f"{DCP_METADATA}: the {len(found):,} boxes of {_quote(name)} do not cover its shape "
            f"{tuple(shape)}: elements are missing, or in more than one box"
        )


# -- Opens checkpoints that other tools wrote: directories of ``torch.distributed.checkpoint``, with
#    or without
#    Lightning
#
# Nothing of such a directory is executed, and no path in it is followed: pickles are read as data,
# files are regular files of the directory itself. :class:`ForeignCheckpoint` gives it the layout of
# a checkpoint of this package:
#
# - ``FSDPStrategy``: ``model``, ``optimizer_0``, ..., and ``meta.pt``; as it is.
# - ``ModelParallelStrategy``: the same with ``state_dict`` in place of ``model``, which is what it becomes here.
# - Anything else: if there is neither, tensors directly at the root (``layers.0.weight``) become those of ``model``.

MAX_INDEX_NBYTES = 64 * 2**20
"""Of ``.metadata``; some 400 thousand boxes."""

MODEL = "model"
_MODEL_PARALLEL = "state_dict"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Payload:
    """Where the elements of a piece are in its file; the archive around them has been checked."""

    offset: int
    strides: tuple[int, ...]


class ForeignCheckpoint:
    """A checkpoint directory of another tool, open for reading.

    Opening reads the index and the sizes of the files, and refuses a checkpoint whose tensors are
    not there in full. Reading an element of a piece for the first time compares the CRC of the
    whole piece. A process may read while others do; there are no collectives.

    Args:
        path: The directory; it may be a link to one.
        trust_pickle: Run the pickles of the directory, which may then hold more than data. Only for
            what you would run as a program, too.
        max_index_nbytes: Refuse a larger ``.metadata``. Reading one takes about 15 times its size
            of memory.

    Raises:
        CheckpointError: It is no such directory, or contradicts itself, or needs ``trust_pickle``:
            says where.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        trust_pickle: bool = False,
        max_index_nbytes: int = MAX_INDEX_NBYTES,
    ) -> None:
        self.path = os.fspath(path)
        self._trust_pickle = trust_pickle
        if trust_pickle:
            log.warning(
                "trust_pickle=True: the pickles in %s are run, with the rights of this process. "
                "Whoever wrote the directory, or could write into it, decides what they do.",
                self.path,
            )
        self._files = self._list()
        with self._open(DCP_METADATA) as span:
            if span.nbytes > max_index_nbytes:
                raise CheckpointError(
                    f"{self.path}: {DCP_METADATA} has {span.nbytes:,} bytes, expected at most "
                    f"{max_index_nbytes:,}: pass a higher max_index_nbytes if it is that large for "
                    f"a reason"
                )
            data = bytes(span.read(0, span.nbytes))
        with self._named():
            index = read_index(data, self._files, trust_pickle)
            tensors, objects = _normalised(index)
        self.tensors: Mapping[str, ForeignTensor] = MappingProxyType(tensors)
        """By name: the path joined by dots."""

        self.objects: Mapping[str, StoredObject] = MappingProxyType(objects)
        """What is not a tensor, by name: options of optimizers, for example."""

        self._payloads: dict[Item, _Payload] = {}

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """What Lightning keeps beside the tensors (``meta.pt``); empty without it.

        It has loops, callbacks and hyperparameters.

        Raises:
            CheckpointError: It is damaged, or holds more than data.
        """
        if not self._is_there(LIGHTNING_META):
            return {}
        with self._named(), self._open(LIGHTNING_META) as span:
            value = self._load(span)
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{self.path}: expected a mapping in {LIGHTNING_META}, found {type(value).__name__}"
            )
        return value

    def read(self, name: str, interval: Interval) -> torch.Tensor:
        """Elements of a tensor, in row-major order, from the pieces that hold some of them.

        Args:
            name: One of :attr:`tensors`.
            interval: Of the flattened tensor.

        Returns:
            1D, ``interval.numel`` elements on the host, in the dtype of the checkpoint.

        Raises:
            CheckpointError: A piece is damaged, or is not what the index says.
            ValueError: The interval does not lie in the tensor.
        """
        tensor = self.tensors[name]
        wanted = boxes(interval, tensor.shape)
        flat = torch.empty(interval.numel, dtype=tensor.dtype)
        at = 0
        with contextlib.ExitStack() as stack, self._named():
            spans: dict[str, Span] = {}
            for box in wanted:
                target = flat[at : at + box.numel].view(box.sizes)
                at += box.numel
                for piece in tensor.pieces:
                    if (common := _intersect(box, piece.box)) is not None:
                        file = piece.item.file
                        spans[file] = spans.get(file) or stack.enter_context(self._open(file))
                        _narrow(target, common, box).copy_(
                            self._read_box(spans[file], tensor, piece, common)
                        )
        return flat

    def read_object(self, name: str) -> Any:
        """One of :attr:`objects`: plain containers of plain values and CPU tensors.

        Raises:
            CheckpointError: It is damaged, or holds more than data.
        """
        item = self.objects[name].item
        with self._named(), self._open(item.file) as span:
            return self._load(_part(span, item, f"object {name!r}"))

    def check(self, name: str) -> None:
        """Compare every byte of a tensor or an object with its CRC, and what it is with the index.

        Raises:
            CheckpointError: Something is damaged.
        """
        tensor = self.tensors.get(name)
        items = [piece.item for piece in tensor.pieces] if tensor else [self.objects[name].item]
        with self._named():
            for index, item in enumerate(items):
                with self._open(item.file) as span:
                    archive = Archive(_part(span, item, repr(name)))
                    archive.check()
                    if tensor:
                        _check_view(archive.load_view(), tensor, tensor.pieces[index])

    def _read_box(
        self, span: Span, tensor: ForeignTensor, piece: ForeignPiece, box: Box
    ) -> torch.Tensor:
        """A part of a piece, as a tensor of its shape."""
        if (payload := self._payloads.get(piece.item)) is None:
            archive = Archive(_part(span, piece.item, f"a piece of {tensor.name!r}"))
            view = archive.load_view()
            _check_view(view, tensor, piece)
            record = archive.payload(view.record, view.record_nbytes)
            payload = _Payload(
                offset=record.offset + view.offset * tensor.dtype.itemsize, strides=view.strides
            )
            self._payloads[piece.item] = payload
        inner = [at - origin for at, origin in zip(box.offsets, piece.box.offsets, strict=True)]
        first = sum(at * stride for at, stride in zip(inner, payload.strides, strict=True))
        count = 1 + sum(
            (size - 1) * stride for size, stride in zip(box.sizes, payload.strides, strict=True)
        )
        itemsize = tensor.dtype.itemsize
        data = span.read(payload.offset + first * itemsize, count * itemsize)
        return (
            torch.frombuffer(data, dtype=torch.uint8)
            .view(tensor.dtype)
            .as_strided(box.sizes, payload.strides)
        )

    def _load(self, span: Span) -> Any:
        if self._trust_pickle:
            Archive(span).check()
            try:
                return torch.load(
                    io.BytesIO(span.read(0, span.nbytes)), map_location="cpu", weights_only=False
                )
            except Exception as error:
                raise CheckpointError(
                    f"{span.where} cannot be loaded: {type(error).__name__}: {error}"
                ) from error
        return Archive(span).load()

    # -- files

    def _list(self) -> dict[str, int]:
        """Bytes of every data file."""
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if DATA_FILE.fullmatch(entry.name)]
            found = {name: os.lstat(os.path.join(self.path, name)) for name in names}
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"expected a checkpoint directory at {self.path!r}: {error}"
            ) from error
        return {
            name: status.st_size for name, status in found.items() if stat.S_ISREG(status.st_mode)
        }

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    @contextlib.contextmanager
    def _open(self, name: str) -> Generator[Span]:
        """A regular file of the directory; nothing that a link leads to or that blocks."""
        try:
            fd = os.open(
                os.path.join(self.path, name),
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            )
        except OSError as error:
            hint = (
                ": without it this is no checkpoint of torch.distributed.checkpoint"
                if name == DCP_METADATA
                else ""
            )
            text = (
                f"{self.path}: {name} cannot be opened as a regular file ({error.strerror}){hint}"
            )
            raise CheckpointError(text) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(
                    f"{self.path}: expected {name} to be a regular file, found something else"
                )
            if status.st_size != self._files.get(name, status.st_size):
                raise CheckpointError(
                    f"{self.path}: {name} has changed since the checkpoint was opened"
                )
            yield Span(fd=fd, offset=0, nbytes=status.st_size, where=name)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _named(self) -> Generator[None]:
        """Errors say which checkpoint it is."""
        try:
            yield
        except CheckpointError as error:
            if str(error).startswith(self.path):
                raise
            raise CheckpointError(f"{self.path}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{self.path}: reading failed: {error}") from error


def _part(span: Span, item: Item, what: str) -> Span:
    where = f"{what}, bytes {item.offset:,} to {item.offset + item.nbytes:,} of {item.file}"
    return replace(span, offset=item.offset, nbytes=item.nbytes, where=where)


def _check_view(view: TensorView, tensor: ForeignTensor, piece: ForeignPiece) -> None:
    expected, found = (tensor.dtype, piece.box.sizes), (view.dtype, view.shape)
    if expected == found and view.span < piece.box.numel:
        raise CheckpointError(
            f"{tensor.name!r}: the tensor stored at byte {piece.item.offset:,} is in itself twice"
        )
    if expected != found:
        raise CheckpointError(
            f"{tensor.name!r}: the index says {expected[0]} of shape {expected[1]}, and at byte "
            f"{piece.item.offset:,} of {piece.item.file} there is {found[0]} of shape {found[1]}"
        )


def _intersect(first: Box, second: Box) -> Box | None:
    """The common part; None if there is none."""
    pairs = [
        Interval(at, at + size).intersect(Interval(other, other + other_size))
        for at, size, other, other_size in zip(
            first.offsets, first.sizes, second.offsets, second.sizes, strict=True
        )
    ]
    box = Box(tuple(pair.start for pair in pairs), tuple(pair.numel for pair in pairs))
    return box if box.numel else None


def _narrow(target: torch.Tensor, part: Box, box: Box) -> torch.Tensor:
    """The part of a tensor that holds a box."""
    for dim, (at, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        target = target.narrow(dim, at - box.offsets[dim], size)
    return target


def _normalised(index: ForeignIndex) -> tuple[dict[str, ForeignTensor], dict[str, StoredObject]]:
    """Tensors and objects by name, in the layout of this package."""
    roots = {stored.path[0] for stored in (*index.tensors.values(), *index.objects.values())}
    bare = not roots & {MODEL, _MODEL_PARALLEL}

    def place(path: ItemPath, is_tensor: bool) -> ItemPath:
        if bare:
            return (MODEL, *path) if is_tensor and len(path) == 1 else path
        return (MODEL, *path[1:]) if MODEL not in roots and path[0] == _MODEL_PARALLEL else path

    tensors = [replace(tensor, path=place(tensor.path, True)) for tensor in index.tensors.values()]
    objects = [replace(stored, path=place(stored.path, False)) for stored in index.objects.values()]
    names = {stored.path for stored in (*tensors, *objects)}
    found = (
        {tensor.name: tensor for tensor in tensors},
        {name_of(stored.path): stored for stored in objects},
    )
    if len({*found[0], *found[1]}) != len(tensors) + len(objects):
        raise CheckpointError(
            f"two of its {len(names):,} values would have the same name under {MODEL!r}"
        )
    return found
