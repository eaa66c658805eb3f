"""Reads what ``torch.save`` wrote: a zip archive of stored records, anywhere in a file, checked by its own CRCs.

``torch.load`` does not compare the CRCs that ``torch.save`` writes; this reader does. It takes nothing on trust: a
record lies inside of the archive, is neither compressed nor encrypted, and is as long as its tensor says, before it is
read.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardeddp.checkpoint.foreign.unpickling import BUILTINS, Maker, check_tree, make_size, unpickle
from shardeddp.errors import CheckpointError

READ_NBYTES = 4 * 2**20
MAX_PICKLE_NBYTES = 64 * 2**20
MAX_DIRECTORY_NBYTES = 16 * 2**20
_FOREIGN = 0xFFFFFFFF
"""What a 32-bit field of a zip holds when the value stands in a 64-bit one."""

_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 0x2041  # flag bits 0, 6 and 13

_LITTLE = (b"little", b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of an open file, and what they are, for errors."""

    fd: int
    offset: int
    nbytes: int
    where: str

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Bytes from ``offset`` of the span on.

        Raises:
            CheckpointError: They are not all in it.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CheckpointError(
                f"{self.where} is damaged: it points to bytes {offset:,} to {offset + nbytes:,} of its {self.nbytes:,}"
            )
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        while done < nbytes:
            part = os.pread(self.fd, min(nbytes - done, READ_NBYTES), self.offset + offset + done)
            if not part:
                raise CheckpointError(f"{self.where}: the file ends {nbytes - done:,} bytes too early")
            view[done : done + len(part)] = part
            done += len(part)
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A record of an archive."""

    header: int
    """Where its local header is, from the start of the archive."""

    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageType:
    """The class of a storage: what its elements are."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A tensor as its pickle describes it: a view of a record."""

    record: str
    dtype: torch.dtype
    offset: int
    """First element, in elements of ``dtype``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    record_nbytes: int
    """Of the record, as the pickle has it."""

    @property
    def span(self) -> int:
        """Elements from the first to behind the last; 0 without elements."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


class Archive:
    """The records of an archive; ``has_crc`` says whether there is anything to check them with.

    Args:
        span: All bytes of it.

    Raises:
        CheckpointError: It is none that ``torch.save`` has written, or it is damaged.
    """

    def __init__(self, span: Span) -> None:
        self.span = span
        self._records = dict(_entries(span))
        # torch.serialization.set_crc32_options(False) writes zeros.
        self.has_crc = any(record.crc for record in self._records.values())
        if sum(record.nbytes for record in self._records.values()) > span.nbytes:
            raise CheckpointError(f"{span.where} is damaged: its records overlap")
        if bytes(self._read("byteorder") if "byteorder" in self._records else b"") not in _LITTLE:
            raise CheckpointError(f"{span.where} was written on a big-endian machine, which is not supported")

    def payload(self, record: str, nbytes: int) -> Span:
        """Where the bytes of a record are; its CRC has been compared.

        Raises:
            CheckpointError: There is no such record, it has another length, or it is damaged.
        """
        where = f"record {record} of {self.span.where}"
        if (stored := self._records.get(record)) is None:
            raise CheckpointError(f"{self.span.where} is damaged: it has no record {record[:100]!r}")
        if stored.nbytes != nbytes:
            raise CheckpointError(f"{where}: expected {nbytes:,} bytes, found {stored.nbytes:,}")
        header = _LOCAL.unpack(self.span.read(stored.header, _LOCAL.size))
        start = stored.header + _LOCAL.size + header[9] + header[10]
        if header[0] != b"PK\x03\x04" or header[3] or start + nbytes > self.span.nbytes:
            raise CheckpointError(f"{where}: its header is damaged, or does not lie in the archive")
        payload = Span(fd=self.span.fd, offset=self.span.offset + start, nbytes=nbytes, where=where)
        if self.has_crc:
            _compare_crc(payload, stored.crc)
        return payload

    def check(self) -> int:
        """Compare the CRC of every record; returns how many bytes that were."""
        return sum(self.payload(name, record.nbytes).nbytes for name, record in self._records.items())

    def load_view(self) -> TensorView:
        """The description of the one tensor that the archive is.

        Raises:
            CheckpointError: It is something else.
        """
        known = _known(lambda view: view)
        view = unpickle(self._pickle(), self.span.where, known, _storage)
        if not isinstance(view, TensorView):
            raise CheckpointError(f"{self.span.where}: expected a tensor, found {type(view).__name__}")
        return view

    def load(self) -> Any:
        """The value that was saved: plain containers of plain values and CPU tensors.

        Raises:
            CheckpointError: It holds anything else, or is damaged.
        """
        storages: dict[str, torch.Tensor] = {}
        known = _known(partial(self._tensor, storages))
        value = unpickle(self._pickle(), self.span.where, known, _storage)
        check_tree(value, self.span.where)
        return value

    def _tensor(self, storages: dict[str, torch.Tensor], view: TensorView) -> torch.Tensor:
        """A view of a record, which is read once."""
        nbytes = view.record_nbytes
        if view.record not in storages:
            data = self.payload(view.record, nbytes).read(0, nbytes)
            storages[view.record] = torch.frombuffer(data, dtype=torch.uint8) if nbytes else torch.empty(0)
        if 0 in view.shape:
            return torch.empty(view.shape, dtype=view.dtype)
        elements = nbytes // view.dtype.itemsize * view.dtype.itemsize
        return storages[view.record][:elements].view(view.dtype).as_strided(view.shape, view.strides, view.offset)

    def _pickle(self) -> bytes:
        if (record := self._records.get("data.pkl")) is not None and record.nbytes > MAX_PICKLE_NBYTES:
            raise CheckpointError(f"{self.span.where}: a pickle of {record.nbytes:,} bytes is too large to be data")
        return bytes(self._read("data.pkl"))

    def _read(self, record: str) -> bytearray:
        nbytes = self._records[record].nbytes if record in self._records else 0
        return self.payload(record, nbytes).read(0, nbytes)


def _compare_crc(payload: Span, expected: int) -> None:
    crc = 0
    for start in range(0, payload.nbytes, READ_NBYTES):
        crc = zlib.crc32(payload.read(start, min(READ_NBYTES, payload.nbytes - start)), crc)
    if crc != expected:
        raise CheckpointError(
            f"{payload.where} is damaged: expected CRC {expected:08x} over its {payload.nbytes:,} bytes at byte"
            f" {payload.offset:,} of the file, found {crc:08x}. Use another checkpoint"
        )


def _entries(span: Span) -> Iterator[tuple[str, Stored]]:
    """The directory of the archive: record by name, without the folder that all are in."""
    start, nbytes, count = _directory(span)
    data, at = span.read(start, nbytes), 0
    seen: set[str] = set()
    for _ in range(count):
        if at + _ENTRY.size > nbytes:
            raise CheckpointError(f"{span.where} is damaged: its directory ends early")
        fields = _ENTRY.unpack_from(data, at)
        flags, method, crc, packed, unpacked, name_nbytes, extra_nbytes, comment_nbytes = (
            *(fields[3], fields[4]),
            *fields[7:13],
        )
        at += _ENTRY.size
        name = bytes(data[at : at + name_nbytes]).decode("utf-8", "replace").partition("/")[2]
        extra = bytes(data[at + name_nbytes : at + name_nbytes + extra_nbytes])
        at += name_nbytes + extra_nbytes + comment_nbytes
        unpacked, packed, header = _wide((unpacked, packed, fields[16]), extra)
        if fields[0] != b"PK\x01\x02" or method or flags & _ENCRYPTED or packed != unpacked or name in seen:
            raise CheckpointError(
                f"{span.where}: expected records that are stored as they are, each once; record {name[:100]!r} is not"
            )
        if header + _LOCAL.size + unpacked > start:
            raise CheckpointError(f"{span.where}: record {name[:100]!r} does not lie in the archive")
        seen.add(name)
        yield name, Stored(header=header, nbytes=unpacked, crc=crc)


def _directory(span: Span) -> tuple[int, int, int]:
    """Start, bytes and entries of the directory, from the record at the end of the archive."""
    problem = f"{span.where} is no archive of torch.save, or its end is missing"
    if span.nbytes < _END.size:
        raise CheckpointError(problem)
    end = span.nbytes - _END.size
    signature, _, _, _, count, nbytes, start, _ = _END.unpack(span.read(end, _END.size))
    if signature != b"PK\x05\x06":
        raise CheckpointError(problem)
    if count == 0xFFFF or _FOREIGN in (nbytes, start):
        locator = end - _END64_LOCATOR.size
        found, _, wide, _ = _END64_LOCATOR.unpack(span.read(locator, _END64_LOCATOR.size))
        if found != b"PK\x06\x07":
            raise CheckpointError(problem)
        found, *_, count, nbytes, start = _END64.unpack(span.read(wide, _END64.size))
        if found != b"PK\x06\x06":
            raise CheckpointError(problem)
    if start + nbytes > end or nbytes > MAX_DIRECTORY_NBYTES:
        raise CheckpointError(f"{span.where}: its directory of {nbytes:,} bytes at {start:,} cannot be")
    return start, nbytes, count


def _wide(values: Sequence[int], extra: bytes) -> list[int]:
    """Sizes and offset of an entry; those that do not fit into 32 bits stand in its extra field, in this order."""
    wide, at = b"", 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    numbers = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    return [next(numbers, _FOREIGN) if value == _FOREIGN else value for value in values]


def _known(tensor: Callable[[TensorView], Any]) -> Mapping[str, Any]:
    """The globals of an archive's pickle; ``tensor`` makes the values."""

    def rebuild(
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any,
        hooks: Any,
        dtype: Any = None,
        metadata: Any = None,
    ) -> Any:
        # Version 2 has its metadata (bits of conjugation) where version 3 has the dtype.
        if not isinstance(storage, _Storage) or metadata or (dtype and not isinstance(dtype, torch.dtype)):
            raise ValueError("expected a plain tensor of a storage")
        dtype = dtype or storage.dtype
        (start,), sizes, steps = make_size((offset,)), make_size(shape), make_size(strides)
        view = TensorView(
            record=storage.record,
            dtype=dtype,
            offset=start,
            shape=sizes,
            strides=steps,
            record_nbytes=storage.nbytes,
        )
        if len(sizes) != len(steps) or (view.span and (start + view.span) * dtype.itemsize > storage.nbytes):
            raise ValueError("a tensor reaches beyond its storage")
        return tensor(view)

    def parameter(data: Any, requires_grad: Any, hooks: Any) -> Any:
        return data  # a parameter's value is all that is wanted of it

    return {**_STORAGE_TYPES, **BUILTINS, **_tensor_makers(rebuild, parameter)}


def _tensor_makers(rebuild: Callable[..., Any], parameter: Callable[..., Any]) -> Mapping[str, Any]:
    return {
        "torch._utils._rebuild_tensor_v2": Maker(rebuild),
        "torch._utils._rebuild_tensor_v3": Maker(rebuild),
        "torch._utils._rebuild_parameter": Maker(parameter),
        "torch.device": Maker(torch.device),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage:
    """What a reference in the pickle stands for."""

    dtype: torch.dtype
    record: str
    nbytes: int


def _storage(reference: Any) -> _Storage:
    tag, kind, key, _, numel = reference  # where the storage was does not matter: it comes to the host
    if tag != "storage" or not isinstance(kind, StorageType) or not isinstance(key, str):
        raise ValueError("expected a reference to a storage")
    (count,) = make_size((numel,))
    return _Storage(dtype=kind.dtype, record=f"data/{key}", nbytes=count * kind.dtype.itemsize)


_STORAGE_TYPES: Mapping[str, Any] = {
    "torch.DoubleStorage": StorageType(dtype=torch.float64),
    "torch.FloatStorage": StorageType(dtype=torch.float32),
    "torch.HalfStorage": StorageType(dtype=torch.float16),
    "torch.BFloat16Storage": StorageType(dtype=torch.bfloat16),
    "torch.LongStorage": StorageType(dtype=torch.int64),
    "torch.IntStorage": StorageType(dtype=torch.int32),
    "torch.ShortStorage": StorageType(dtype=torch.int16),
    "torch.CharStorage": StorageType(dtype=torch.int8),
    "torch.ByteStorage": StorageType(dtype=torch.uint8),
    "torch.BoolStorage": StorageType(dtype=torch.bool),
    "torch.ComplexFloatStorage": StorageType(dtype=torch.complex64),
    "torch.ComplexDoubleStorage": StorageType(dtype=torch.complex128),
    "torch.storage.UntypedStorage": StorageType(dtype=torch.uint8),
}
