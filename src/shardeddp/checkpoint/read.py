"""Reading tensors of a checkpoint: checked, as lazy tensors, or as streams of bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shardeddp.checkpoint.durable import Source, read_into, read_text
from shardeddp.checkpoint.find import read_manifest
from shardeddp.checkpoint.items import memory_view, require_checksum
from shardeddp.checkpoint.location import AnyPath, Location, disk_errors, location
from shardeddp.checkpoint.manifest import (
    BLOCK_NBYTES,
    CRC,
    STATE,
    ItemPath,
    Manifest,
    StoredFile,
    StoredTensor,
    name_of,
)
from shardeddp.checkpoint.pieces import Piece, Pieces, assemble
from shardeddp.checkpoint.strict_json import parse_json
from shardeddp.errors import CheckpointError, DamagedCheckpointError
from shardeddp.plan.layout import Box, Interval, whole_of
from shardeddp.tensor.operations import asks_only_about
from shardeddp.torch_private import make_wrapper_subclass, pytree, without_torch_function

# -- Checked reading of intervals


_SLAB_NBYTES = 4 * BLOCK_NBYTES
"""Bytes read at once of a box with rows that are not contiguous."""


class CheckpointReader:
    """Reader of a sharded checkpoint of this package."""

    def __init__(self, path: AnyPath, part: tuple[int, int] = (0, 1)) -> None:
        self.path: Location = location(path)
        self.manifest: Manifest = read_manifest(self.path, part)
        self._folder = (self.path / self.manifest.folder).reading_ahead()
        self._pieces = Pieces(self._folder, self.manifest)
        if self.manifest.algorithm == CRC:
            raise CheckpointError(
                f"{self.path} is one plain file, expected a directory: torch.load() reads it"
            )

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors of the checkpoint by name."""
        return self.manifest.tensors

    def tree(self) -> Any:
        """Return the JSON of ``state.json``: the state tree, with names instead of tensors."""
        expected = self._listed(STATE)
        whole = Interval(0, expected.nbytes)
        with self._opened(STATE) as descriptor:
            text = read_text(descriptor, whole, str(self._folder / STATE))
        require_checksum(text, expected.checksum, self._folder / STATE, whole)
        return parse_json(text, STATE)

    def file(self, name: str) -> bytes:
        """Return the bytes of a file without tensors, checked."""
        expected = self._listed(name)
        data = bytearray(expected.nbytes)
        with self._opened(name) as descriptor:
            whole = Interval(0, len(data))
            self._read_checked(descriptor, name, "", whole, memoryview(data), expected.checksum)
        return bytes(data)

    def _listed(self, name: str) -> StoredFile:
        if name not in self.manifest.files:
            raise CheckpointError(
                f"{self.path} has no {name} by its manifest, expected one: it is damaged, or was "
                f"put together by something else"
            )
        return self.manifest.files[name]

    def read(self, name: str, interval: Interval, box: Box | None = None) -> torch.Tensor:
        """Read an interval of a flattened tensor, or of a flattened box of it: 1D, on the host.

        Each block is compared with its checksum.
        """
        tensor = self.tensors[name]
        if box is None and len(tensor.sections) == 1:
            return self._read_section(name, tensor.sections[0], interval)
        sections = {number: self.manifest.sections[number].box for number in tensor.sections}
        stored = [
            (place, partial(self._read_box, name, number, place))
            for number, place in sections.items()
        ]
        return assemble(interval, box or whole_of(tensor.shape), tensor.dtype, stored)

    def _read_box(self, name: str, section: int, place: Box, box: Box) -> torch.Tensor:
        """Read a box of a section, which covers ``place`` of the tensor, in the box's shape.

        Rows that are not contiguous are read with the bytes between them, a slab at a time.
        """
        inner, dtype = box.inside(place), self.manifest.sections[section].dtype
        strides = [math.prod(place.sizes[dim + 1 :]) for dim in range(len(place.sizes))]
        found = torch.empty(box.sizes, dtype=dtype, device="cpu")
        dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
        count = 1 if dim is None else box.sizes[dim]
        step = count if dim is None else max(1, _SLAB_NBYTES // (strides[dim] * dtype.itemsize))
        for first in range(0, count, step):
            offsets, sizes = list(inner.offsets), list(inner.sizes)
            if dim is not None:
                offsets[dim], sizes[dim] = offsets[dim] + first, min(step, count - first)
            start = sum(map(math.prod, zip(offsets, strides, strict=True)))
            stop = (
                start + 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
            )
            flat = self._read_section(name, section, Interval(start, stop))
            target = found if dim is None else found.narrow(dim, first, sizes[dim])
            target.copy_(flat.as_strided(sizes, strides))
        return found

    def _read_section(self, name: str, section: int, interval: Interval) -> torch.Tensor:
        # The placement says which files have these elements. They are located before memory is
        # allocated: pieces have bytes of their own, all of which exist.
        pieces = self._pieces.of(section, interval)
        dtype = self.manifest.sections[section].dtype
        elements = torch.empty(interval.numel, dtype=dtype, device="cpu")
        memory = memory_view(elements)
        itemsize = dtype.itemsize
        for piece in pieces:
            common = piece.interval.intersect(interval)
            wanted = common.shift(-piece.interval.start)
            start = (common.start - interval.start) * itemsize
            out = memory[start : start + common.numel * itemsize]
            nbytes = Interval(wanted.start * itemsize, wanted.stop * itemsize)
            self._read_piece(name, piece, piece.interval.numel * itemsize, nbytes, out)
        return elements

    def _read_piece(
        self, name: str, piece: Piece, nbytes: int, wanted: Interval, out: memoryview
    ) -> None:
        """Read bytes of a payload by blocks: whole blocks into ``out``, others through a buffer."""
        with self._opened(piece.item.file) as descriptor:
            for index in range(wanted.start // BLOCK_NBYTES, -(-wanted.stop // BLOCK_NBYTES)):
                block = Interval(index * BLOCK_NBYTES, min(nbytes, (index + 1) * BLOCK_NBYTES))
                common = block.intersect(wanted)
                target = out[common.start - wanted.start : common.stop - wanted.start]
                data = target if common == block else memoryview(bytearray(block.numel))
                where = block.shift(piece.payload)
                self._read_checked(
                    descriptor, piece.item.file, name, where, data, piece.checksums[index]
                )
                if data is not target:
                    target[:] = data[common.start - block.start : common.stop - block.start]

    @contextmanager
    def _opened(self, file: str) -> Generator[Source]:
        path = self._folder / file
        with disk_errors("reading", path), path.open_source() as (descriptor, _):
            yield descriptor

    def _read_checked(
        self,
        descriptor: Source,
        file: str,
        name: str,
        where: Interval,
        out: memoryview,
        expected: str,
    ) -> None:
        """Fill ``out`` with the bytes of a file from ``where`` and compare their checksum."""
        done = read_into(descriptor, out, where.start)
        if done < len(out):
            raise DamagedCheckpointError(
                f"{self._folder / file} ends at byte {where.start + done:,}, expected {where.stop:,}"
            )
        of = f" of {name}" if name else ""
        require_checksum(out, expected, self._folder / file, where, of)


# -- LazyTensor: a tensor that is read from the disk on first use


class Read(Protocol):
    """Function that reads elements of one tensor, as :meth:`CheckpointReader.read` does."""

    def __call__(self, interval: Interval, box: Box | None = None, /) -> torch.Tensor:
        """Read the interval: 1D, on the host."""
        ...


class LazyTensor(torch.Tensor):
    """Tensor of a checkpoint that is read on use: an interval for a shard, else all elements.

    For code that renames, drops or inspects entries of a checkpoint it is a tensor on the CPU. An
    operation on it runs on a plain tensor that is read for it. Once an operation has written to
    that tensor, or returned its memory (a view, a numpy array), it is kept and holds the elements
    from then on.
    """

    path: ItemPath
    """Path of the tensor in the checkpoint."""

    _read: Read
    _read_before: dict[tuple[Interval, Box | None], torch.Tensor]
    _copied: Callable[[LazyTensor], None] | None  # None: a deep copy is a plain tensor
    _kept: torch.Tensor | None  # the elements, in this shape, instead of those on the disk

    def __new__(  # noqa: D102
        cls, path: ItemPath, shape: tuple[int, ...], dtype: torch.dtype, read: Read
    ) -> LazyTensor:
        made = make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.path = path
        made._read = read
        made._read_before = {}
        made._copied = None
        made._kept = None
        return made

    def report_copies(self, copied: Callable[[LazyTensor], None]) -> None:
        """Make deep copies lazy, and call a function with each of them."""
        self._copied = copied

    def read_ahead(self, interval: Interval, box: Box | None = None) -> None:
        """Read an interval now, for the next :meth:`elements` call with the same arguments."""
        if self._kept is None:
            self._read_before[interval, box] = self._from_disk(interval, box)

    def elements(self, interval: Interval, box: Box | None = None) -> torch.Tensor:
        """Return an interval of the flattened tensor or of a box of it, 1D; the caller owns it."""
        if self._kept is not None:
            kept = self._kept if box is None else self._kept[box.slices]
            return kept.flatten()[interval.start : interval.stop].clone()
        found = self._read_before.pop((interval, box), None)
        return self._from_disk(interval, box) if found is None else found

    def _from_disk(self, interval: Interval, box: Box | None) -> torch.Tensor:
        return self._read(interval) if box is None else self._read(interval, box)

    def whole(self) -> torch.Tensor:
        """Return all elements, in the tensor's shape; the caller owns them."""
        return self.elements(self.all_of_it).view(self.shape)

    def keep(self) -> torch.Tensor:
        """Read all elements and hold them from now on, even if the checkpoint is deleted."""
        if self._kept is None:
            self._kept = self.whole()
        return self._kept

    @property
    def all_of_it(self) -> Interval:
        """The interval of all elements."""
        return Interval(0, self.numel())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self._copied is None:
            return copy.deepcopy(self.whole(), memo)
        other = LazyTensor(self.path, tuple(self.shape), self.dtype, self._read)
        other._copied = self._copied
        other._kept = None if self._kept is None else self._kept.detach().clone()
        memo[id(self)] = other
        self._copied(other)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LazyTensor({name_of(self.path)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_torch_function():
            if asks_only_about(func) and func.__name__ not in (
                "detach",
                "__set__",
                "zeros_like",
                "empty_like",
            ):
                return func(*args, **(kwargs or {}))
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _on_whole(func, args, kwargs)


def elements_of(tensor: torch.Tensor, interval: Interval) -> torch.Tensor:
    """Return elements of a flattened tensor, 1D; of a lazy tensor only these are read."""
    if isinstance(tensor, LazyTensor):
        return tensor.elements(interval)
    return tensor.reshape(-1)[interval.start : interval.stop]


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    read: dict[int, tuple[LazyTensor, torch.Tensor]] = {}

    def plain(lazy: LazyTensor) -> torch.Tensor:
        if id(lazy) not in read:
            read[id(lazy)] = lazy, lazy.whole() if lazy._kept is None else lazy._kept
        return read[id(lazy)][1]

    with without_torch_function():
        arguments: Any = pytree.tree_map_only(LazyTensor, plain, (args, kwargs or {}))
    versions = {key: tensor._version for key, (_, tensor) in read.items()}
    result = func(*arguments[0], **arguments[1])
    for key, (lazy, tensor) in read.items():
        if tensor.shape != lazy.shape:
            raise RuntimeError(
                f"{func.__name__}() would change the shape of {name_of(lazy.path)}, a tensor of a "
                f"checkpoint, from {tuple(lazy.shape)} to {tuple(tensor.shape)}. Take a copy of it "
                f"first: .clone()"
            )
        if (
            func.__name__ == "__set__"
            or tensor._version != versions[key]
            or _gives_out(result, tensor)
        ):
            lazy._kept = tensor
    lazy_of = {id(tensor): lazy for lazy, tensor in read.values()}
    # An in-place operation returns the tensor that it was called on.
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: lazy_of.get(id(tensor), tensor), result
    )


def _gives_out(result: Any, tensor: torch.Tensor) -> bool:
    """Return True if a result may reference the memory of a tensor."""
    memory = tensor.untyped_storage().data_ptr()
    return any(
        type(leaf) in _PLAIN and leaf.untyped_storage().data_ptr() == memory
        if isinstance(leaf, torch.Tensor)
        else type(leaf) not in _VALUES
        for leaf in pytree.tree_leaves(result)
    )


_PLAIN = (torch.Tensor, nn.Parameter)
_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
)
"""Types that hold no memory; numpy arrays, storages and the like do."""


# -- Tensors as checked streams of bytes, for exports

CHUNK_NBYTES = 32 * 2**20
"""Chunk of a tensor in memory at a time; several blocks, as one cut by a chunk is read twice."""

Progress = Callable[[int], object]
"""Callback that gets the number of bytes read, checked or written since its last call."""


def silent(nbytes: int) -> None:
    """Ignore the progress."""


def chunks(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, overflowed: Progress = silent
) -> Iterator[memoryview]:
    """Yield elements of a tensor on the host as bytes, in row-major order, as ``dtype`` if given.

    A view is valid until the next one. Of a lazy tensor one chunk is read at a time.
    ``overflowed`` is called with the number of finite elements that ``dtype`` makes infinite.
    """
    numel = max(1, CHUNK_NBYTES // max(1, tensor.element_size()))
    take = tensor.elements if isinstance(tensor, LazyTensor) else _taker(tensor)
    for start in range(0, tensor.numel(), numel):
        part = take(Interval(start, min(tensor.numel(), start + numel)))
        cast = part if dtype is None else part.to(dtype)
        if cast is not part and not (finite := cast.isfinite()).all():
            # float64 has this operation for the dtypes of 8 bits, too.
            overflowed(int((part.to(torch.float64).isfinite() & ~finite).sum()))
        yield memory_view(cast).cast("B")


def _taker(tensor: torch.Tensor) -> Callable[[Interval], torch.Tensor]:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return lambda interval: flat[interval.start : interval.stop]
