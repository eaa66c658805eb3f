"""Opens checkpoints that other tools wrote: directories of ``torch.distributed.checkpoint``, with or without Lightning.

Nothing of such a directory is executed, and no path in it is followed: pickles are read as data, files are regular
files of the directory itself. :class:`ForeignCheckpoint` gives it the layout of a checkpoint of this package:

- ``FSDPStrategy``: ``model``, ``optimizer_0``, ..., and ``meta.pt``; as it is.
- ``ModelParallelStrategy``: the same with ``state_dict`` in place of ``model``, which is what it becomes here.
- Anything else: if there is neither, tensors directly at the root (``layers.0.weight``) become those of ``model``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from shardeddp.checkpoint.foreign.archive import Archive, Span, TensorView
from shardeddp.checkpoint.foreign.index import ForeignIndex, ForeignPiece, ForeignTensor, read_index
from shardeddp.checkpoint.format.manifest import (
    DATA_FILE,
    DCP_METADATA,
    LIGHTNING_META,
    Item,
    ItemPath,
    StoredObject,
    name_of,
)
from shardeddp.errors import CheckpointError
from shardeddp.plan.intervals import Box, Interval, boxes

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

    Opening reads the index and the sizes of the files, and refuses a checkpoint whose tensors are not there in full.
    Reading an element of a piece for the first time compares the CRC of the whole piece. A process may read while
    others do; there are no collectives.

    Args:
        path: The directory; it may be a link to one.
        trust_pickle: Run the pickles of the directory, which may then hold more than data. Only for what you would
            run as a program, too.
        max_index_nbytes: Refuse a larger ``.metadata``. Reading one takes about 15 times its size of memory.

    Raises:
        CheckpointError: It is no such directory, or contradicts itself, or needs ``trust_pickle``: says where.
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
                "trust_pickle=True: the pickles in %s are run, with the rights of this process. Whoever wrote the"
                " directory, or could write into it, decides what they do.",
                self.path,
            )
        self._files = self._list()
        with self._open(DCP_METADATA) as span:
            if span.nbytes > max_index_nbytes:
                raise CheckpointError(
                    f"{self.path}: {DCP_METADATA} has {span.nbytes:,} bytes, expected at most {max_index_nbytes:,}:"
                    " pass a higher max_index_nbytes if it is that large for a reason"
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
        """What Lightning keeps beside the tensors (``meta.pt``): loops, callbacks, hyperparameters; empty without it.

        Raises:
            CheckpointError: It is damaged, or holds more than data.
        """
        if not self._is_there(LIGHTNING_META):
            return {}
        with self._named(), self._open(LIGHTNING_META) as span:
            value = self._load(span)
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: expected a mapping in {LIGHTNING_META}, found {type(value).__name__}")
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
                        _narrow(target, common, box).copy_(self._read_box(spans[file], tensor, piece, common))
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

    def _read_box(self, span: Span, tensor: ForeignTensor, piece: ForeignPiece, box: Box) -> torch.Tensor:
        """A part of a piece, as a tensor of its shape."""
        if (payload := self._payloads.get(piece.item)) is None:
            archive = Archive(_part(span, piece.item, f"a piece of {tensor.name!r}"))
            view = archive.load_view()
            _check_view(view, tensor, piece)
            record = archive.payload(view.record, view.record_nbytes)
            payload = _Payload(offset=record.offset + view.offset * tensor.dtype.itemsize, strides=view.strides)
            self._payloads[piece.item] = payload
        inner = [at - origin for at, origin in zip(box.offsets, piece.box.offsets, strict=True)]
        first = sum(at * stride for at, stride in zip(inner, payload.strides, strict=True))
        count = 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, payload.strides, strict=True))
        itemsize = tensor.dtype.itemsize
        data = span.read(payload.offset + first * itemsize, count * itemsize)
        return torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype).as_strided(box.sizes, payload.strides)

    def _load(self, span: Span) -> Any:
        if self._trust_pickle:
            Archive(span).check()
            try:
                return torch.load(io.BytesIO(span.read(0, span.nbytes)), map_location="cpu", weights_only=False)
            except Exception as error:
                raise CheckpointError(f"{span.where} cannot be loaded: {type(error).__name__}: {error}") from error
        return Archive(span).load()

    # -- files

    def _list(self) -> dict[str, int]:
        """Bytes of every data file."""
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if DATA_FILE.fullmatch(entry.name)]
            found = {name: os.lstat(os.path.join(self.path, name)) for name in names}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"expected a checkpoint directory at {self.path!r}: {error}") from error
        return {name: status.st_size for name, status in found.items() if stat.S_ISREG(status.st_mode)}

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    @contextlib.contextmanager
    def _open(self, name: str) -> Generator[Span]:
        """A regular file of the directory; nothing that a link leads to, and nothing that blocks."""
        try:
            fd = os.open(os.path.join(self.path, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            hint = ": without it this is no checkpoint of torch.distributed.checkpoint" if name == DCP_METADATA else ""
            text = f"{self.path}: {name} cannot be opened as a regular file ({error.strerror}){hint}"
            raise CheckpointError(text) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{self.path}: expected {name} to be a regular file, found something else")
            if status.st_size != self._files.get(name, status.st_size):
                raise CheckpointError(f"{self.path}: {name} has changed since the checkpoint was opened")
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
        raise CheckpointError(f"{tensor.name!r}: the tensor stored at byte {piece.item.offset:,} is in itself twice")
    if expected != found:
        raise CheckpointError(
            f"{tensor.name!r}: the index says {expected[0]} of shape {expected[1]}, and at byte {piece.item.offset:,}"
            f" of {piece.item.file} there is {found[0]} of shape {found[1]}"
        )


def _intersect(first: Box, second: Box) -> Box | None:
    """The common part; None if there is none."""
    pairs = [
        Interval(at, at + size).intersect(Interval(other, other + other_size))
        for at, size, other, other_size in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
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
    found = {tensor.name: tensor for tensor in tensors}, {name_of(stored.path): stored for stored in objects}
    if len({*found[0], *found[1]}) != len(tensors) + len(objects):
        raise CheckpointError(f"two of its {len(names):,} values would have the same name under {MODEL!r}")
    return found
