"""Items of a data file in torch's own format, their checksums, and their CRCs without torch."""

import io
import math
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash

from shardeddp.checkpoint.durable import Source, read_into, read_text, write_buffers
from shardeddp.checkpoint.manifest import BLOCK_NBYTES, PIECE, Item, StoredFile
from shardeddp.checkpoint.remote import Upload
from shardeddp.errors import CheckpointError, DamagedCheckpointError
from shardeddp.plan.layout import Interval
from shardeddp.tensor.views import GatheredView
from shardeddp.torch_private import (
    rebuild_tensor,
    typed_storage_class,
    typed_storage_length,
    untyped_storage,
)

# -- Checksums: xxh3 of 128 bits, block by block
#
# https://xxhash.com; they detect accidents, not forgeries.


def hexdigest(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def require_checksum(
    data: bytearray | memoryview, expected: str, path: object, where: Interval, what: str = ""
) -> None:
    """Refuse bytes that were read from ``where`` in a file if their checksum differs."""
    if (found := hexdigest(data)) != expected:
        raise DamagedCheckpointError(
            f"{path} is damaged: bytes {where.start:,} to {where.stop:,}{what} have checksum "
            f"{found}, expected {expected}"
        )


def memory_view(elements: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor; writing to them changes the tensor."""
    # One element is contiguous with any stride, but a view as bytes needs stride 1.
    flat = elements.detach().as_strided((elements.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the checksum of bytes as the 16 bytes in piece tables."""
    return xxhash.xxh3_128_digest(data)


def block_digests(elements: torch.Tensor) -> list[bytes]:
    """Return digests of every ``BLOCK_NBYTES`` of a contiguous host tensor; the last is shorter."""
    data = memory_view(elements)
    return [
        digest(data[start : start + BLOCK_NBYTES]) for start in range(0, len(data), BLOCK_NBYTES)
    ]


# -- Data files: items that ``torch.load`` reads, and a table at the end
#
# [Note: the frame of a tensor's item] An item is a zip archive of stored records, as ``torch.save``
# writes it, but ``torch.save`` needs one more copy of the tensor and a slow CRC. The bytes around
# the payload depend only on dtype and shape, so they are made once for each pair::
#
#     head     three small records that describe the payload, and the local header of its record,
#              padded so that the payload starts on a multiple of 64 bytes
#     payload  straight from the tensor's memory
#     tail     data descriptor, central directory and its end; with the payload's CRC, known by then

ALIGNMENT = 64
"""Alignment in bytes of items in a data file and of payloads in an item."""

_ZIP64 = 0xFFFFFFFF
"""Smallest size or offset that does not fit into the 32 bits of a plain zip archive."""

_LOCAL, _CENTRAL, _DESCRIPTOR, _END = b"PK\3\4", b"PK\1\2", b"PK\7\x08", b"PK\5\6"
_END_64, _END_64_LOCATOR = b"PK\6\6", b"PK\6\7"
_UTF8, _HAS_DESCRIPTOR = 0x800, 0x8


class DataFile:
    """Writer of one data file.

    It cannot be used after an error: the content of the disk is then unknown.

    Args:
        fd: File descriptor, open for writing at the start of an empty file, or an upload. The
            caller syncs and closes it.
        name: Name of the file in the checkpoint, ``"__0_0.distcp"``.
        crc: True to write the CRC of every tensor, with which other tools detect damage (checksums
            of :meth:`put_tensor` do not depend on it). False writes zeros, as ``torch.save`` can.
    """

    def __init__(self, fd: int | Upload, name: str, *, crc: bool = True) -> None:
        self._fd = fd
        self._name = name
        self._crc = crc
        self._nbytes = 0
        self._frames = xxhash.xxh3_128()

    def put_tensor(self, tensor: torch.Tensor) -> tuple[Item, int, list[bytes]]:
        """Append a contiguous CPU tensor, without a copy in memory.

        Returns:
            The item; the offset of its payload in the file; the digest of each ``BLOCK_NBYTES`` of
            the payload.
        """
        payload = _payload(tensor)
        frame = frame_of(tensor.dtype, tuple(tensor.shape), crc=self._crc)
        crc, digests = 0, list[bytes]()
        # The head is written with the first block: one call for a small tensor.
        padding = self._padding()
        waiting: list[bytes | memoryview] = [padding, frame.head]
        offset = self._nbytes + len(padding)
        self._frames.update(frame.head)
        for start in range(0, len(payload), BLOCK_NBYTES):
            block = payload[start : start + BLOCK_NBYTES]
            digests.append(digest(block))
            if self._crc:
                crc = zlib.crc32(block, crc)
            waiting.append(block)
            if start + BLOCK_NBYTES < len(payload):
                self._write(waiting)
                waiting = []
        tail = frame.tail(crc)
        self._frames.update(tail)
        self._write([*waiting, tail])
        item = Item(file=self._name, offset=offset, nbytes=self._nbytes - offset)
        return item, offset + len(frame.head), digests

    def put_object(self, value: object) -> Item:
        """Append a value pickled by ``torch.save``; a small one, as it is copied in memory."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        padding = self._padding()
        offset = self._nbytes + len(padding)
        self._frames.update(buffer.getbuffer())
        self._write([padding, buffer.getbuffer()])
        return Item(file=self._name, offset=offset, nbytes=self._nbytes - offset)

    def close(
        self, rows: Sequence[tuple[int, ...]] = (), digests: Sequence[bytes] = ()
    ) -> StoredFile:
        """Append the table of pieces: the file is complete, but neither synced nor closed.

        Args:
            rows: Fields of ``PIECE`` of each piece, sorted by section and start.
            digests: Digests of their blocks, in the same order.

        Returns:
            Size of the file, checksum of everything in it but payloads of tensors and the table,
            and size and checksum of the table.
        """
        table = np.array(list(rows), dtype=PIECE).tobytes() + b"".join(digests)
        self._write([table])
        return StoredFile(
            nbytes=self._nbytes,
            checksum=self._frames.hexdigest(),
            pieces=len(rows),
            blocks=len(digests),
            table=hexdigest(table) if rows else "",
        )

    def _padding(self) -> bytes:
        """Return the padding before the next item."""
        padding = bytes(-self._nbytes % ALIGNMENT)
        self._frames.update(padding)
        return padding

    def _write(self, buffers: Sequence[bytes | memoryview]) -> None:
        try:
            self._nbytes += write_buffers(self._fd, buffers)
        except OSError as error:
            error.filename = self._name  # the error of a descriptor has no name
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Bytes around the payload of an item; see [Note: the frame of a tensor's item]."""

    head: bytes
    before_crc: bytes
    after_crc: bytes

    def tail(self, crc: int) -> bytes:
        """Return the bytes after a payload with this CRC (0 if it was not computed)."""
        written = struct.pack("<I", crc)
        return b"".join((_DESCRIPTOR, written, self.before_crc, written, self.after_crc))


@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: tuple[int, ...], *, crc: bool) -> Frame:
    """Return the frame of a tensor, without its CRC."""
    nbytes = math.prod(shape) * dtype.itemsize
    head, entries = bytearray(), list[bytes]()
    small = {
        "data.pkl": TensorPickler().pickled(torch.empty(shape, dtype=dtype, device="meta")),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }
    for name, data in small.items():
        record = _StoredRecord(
            name=name, nbytes=len(data), offset=len(head), crc=zlib.crc32(data) if crc else 0
        )
        head += record.local() + data
        entries.append(record.central())
    # torch.load calls the only storage "0"
    record = _StoredRecord(name="data/0", nbytes=nbytes, offset=len(head), crc=0, described=True)
    head += record.local()
    sizes = struct.pack("<QQ" if nbytes >= _ZIP64 else "<II", nbytes, nbytes)
    directory_offset = len(head) + nbytes + len(_DESCRIPTOR) + 4 + len(sizes)
    last = record.central()
    directory = b"".join((*entries, last))
    place = len(entries) + 1, len(directory), directory_offset
    end = (_end_64(*place) if directory_offset >= _ZIP64 else b"") + _end(*place)
    # The CRC of the payload is at byte 16 of its entry, which is the last one.
    return Frame(
        head=bytes(head),
        before_crc=sizes + b"".join(entries) + last[:16],
        after_crc=last[20:] + end,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredRecord:
    """Stored record of a zip archive."""

    name: str
    nbytes: int
    offset: int
    """Offset of its local header in the archive."""

    crc: int
    described: bool = False
    """True if the CRC follows the data, since it is not known before; such data is aligned."""

    def local(self) -> bytes:
        """Return the header before the data."""
        name, extra = self._name(), self._sizes_64()
        if self.described:
            # A private extra field of at least its own 4 bytes, as torch.save pads.
            padding = -(self.offset + 30 + len(name) + len(extra) + 4) % ALIGNMENT
            extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        return struct.pack("<4s", _LOCAL) + self._common(name, extra) + name + extra

    def central(self) -> bytes:
        """Return the entry in the central directory."""
        name, extra = self._name(), self._sizes_64()
        made_by = struct.pack("<4sH", _CENTRAL, 45)
        return (
            made_by
            + self._common(name, extra)
            + struct.pack("<HHHII", 0, 0, 0, 0, self.offset)
            + name
            + extra
        )

    def _common(self, name: bytes, extra: bytes) -> bytes:
        flags = _UTF8 | (_HAS_DESCRIPTOR if self.described else 0)
        size = min(self.nbytes, _ZIP64)
        version = 45 if size == _ZIP64 else 20
        # Stored; without time and date, so that equal tensors make equal items.
        return struct.pack(
            "<5H3I2H", version, flags, 0, 0, 0, self.crc, size, size, len(name), len(extra)
        )

    def _name(self) -> bytes:
        return f"archive/{self.name}".encode()

    def _sizes_64(self) -> bytes:
        return (
            struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if self.nbytes >= _ZIP64 else b""
        )


def _end(count: int, nbytes: int, offset: int) -> bytes:
    """Return the end of a central directory of ``count`` entries and ``nbytes`` bytes."""
    counts, sizes = 2 * [min(count, 0xFFFF)], [min(nbytes, _ZIP64), min(offset, _ZIP64)]
    return struct.pack("<4s4H2IH", _END, 0, 0, *counts, *sizes, 0)


def _end_64(count: int, nbytes: int, offset: int) -> bytes:
    """Return what precedes :func:`_end` if a value in it can be too large."""
    end_64 = struct.pack("<4sQ2H2I4Q", _END_64, 44, 45, 45, 0, 0, count, count, nbytes, offset)
    return end_64 + struct.pack("<4sIQI", _END_64_LOCATOR, 0, offset + nbytes, 1)


@dataclass(frozen=True, slots=True)
class _Storage:
    """Reference to the elements of a tensor in the pickle."""

    key: int
    nbytes: int


class TensorPickler(pickle.Pickler):
    """Pickler of tensors as references to records of their elements, as in ``torch.save``.

    Tensors for which ``memory`` returns equal keys have the same elements, and one record.
    """

    def __init__(self, memory: Callable[[torch.Tensor], Hashable] = id) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=2)  # as `weights_only=True` requires
        self._memory = memory
        self._keys: dict[Hashable, int] = {}
        self.storages: list[torch.Tensor] = []
        """Tensors of the records, in order; kept alive so that no id is reused."""

    def pickled(self, tree: Any) -> bytes:
        """Return the pickle of a tree."""
        self.dump(tree)
        return self._buffer.getvalue()

    def key_of(self, tensor: torch.Tensor) -> int:
        """Return the record number of a tensor; a new one for new elements."""
        identity = self._memory(tensor), tensor.dtype, tuple(tensor.shape)
        key = self._keys.setdefault(identity, len(self.storages))
        if key == len(self.storages):
            self.storages.append(tensor)
        return key

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference to a record; None for other objects."""
        if isinstance(obj, _Storage):
            return "storage", torch.UntypedStorage, str(obj.key), "cpu", obj.nbytes
        if isinstance(obj, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, self._record_of(obj), "cpu", obj.nbytes()
        if isinstance(obj, torch.TypedStorage):
            kind, record = typed_storage_class(obj), self._record_of(untyped_storage(obj))
            return "storage", vars(torch)[kind], record, "cpu", typed_storage_length(obj)
        return None

    def _record_of(self, storage: torch.UntypedStorage) -> str:
        """Return the number of a record with all bytes of a storage."""
        elements = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return str(self.key_of(elements.set_(storage)))

    def reducer_override(self, obj: Any) -> Any:
        """Return function and arguments that rebuild a tensor."""
        if isinstance(obj, GatheredView):
            obj = obj.plain().detach().clone()
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided or obj.is_quantized:
            # A sparse tensor is reduced to strided ones; a quantized one has its whole storage.
            return NotImplemented
        shape = tuple(obj.shape)
        strides = tuple(
            math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape))
        )
        storage = _Storage(self.key_of(obj), obj.numel() * obj.element_size())
        hooks: OrderedDict[int, Any] = OrderedDict()
        # torch.save uses this function for its newer dtypes; it works for all of them.
        return rebuild_tensor, (storage, 0, shape, strides, False, hooks, obj.dtype)


def _payload(tensor: torch.Tensor) -> memoryview:
    """Return the elements as bytes, in the tensor's own memory."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    if not plain or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"expected a contiguous tensor on the CPU without a lazy conjugation or negation, "
            f"found a {type(tensor).__name__} of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} on {tensor.device}: call "
            f".cpu().resolve_conj().resolve_neg().contiguous() first"
        )
    return memory_view(tensor)


# -- CRCs inside items and plain files, checked without torch
#
# They detect damage where no manifest has checksums. ``fd`` is the file of an item, open for
# reading; offsets of records are from the start of their item.

CHUNK_NBYTES = 2**20
"""Bytes read and checked at once; few enough to stay in the processor's cache in between."""

_ENTRY_FIELDS_NBYTES, _END_NBYTES = 46, 22
"""Bytes of the fields of such an entry, and of the record that ends the archive."""

_ENTRY_NBYTES = _ENTRY_FIELDS_NBYTES + 3 * 2**16
"""Longest entry of a central directory: its fields, a name, extra fields and a comment."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_UNREADABLE = 0x2061  # bits of the flags: 0, 6 and 13 are encryption, 5 is a patch
_IS_FOLDER = 0x10  # bit 4 of the attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Stored bytes within an item."""

    name: str
    offset: int
    """Offset of the first byte, from the start of the item."""

    nbytes: int
    crc: int


def check_item_crc(fd: Source, item: Item) -> bool:
    """Compare the bytes of an item with the CRCs of ``torch.save``; return False if it has none.

    They cover the records of the zip archive, not the bytes around them. Nothing is unpickled or
    decompressed, and at most the item's bytes are read (and its directory once more).
    """
    records = records_of(fd, item)
    if not any(record.crc for record in records):
        return False
    for record in records:
        check_record(fd, item, record)
    return True


def check_record(fd: Source, item: Item, record: Record) -> None:
    """Compare the bytes of a record with its CRC."""
    found = crc_of(fd, item, record)
    if found != record.crc:
        raise _damaged(
            item,
            f"record {record.name!r} has CRC {found:08x}, found over its {record.nbytes:,} bytes "
            f"at byte {item.offset + record.offset:,} of the file, expected CRC {record.crc:08x}",
        )


def records_of(fd: Source, item: Item) -> list[Record]:
    """Return the stored records of an item, from its directory alone; refuse other items."""
    window = _Window(fd, item)
    try:
        with zipfile.ZipFile(window) as archive:
            entries = archive.infolist()
            _check_ends(window, entries, archive.start_dir)
            records = [_locate(window, info, archive.start_dir) for info in entries]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise _damaged(item, f"it is no zip archive of stored records ({error})") from error
    for first, second in pairwise(sorted(records, key=lambda it: (it.offset, it.nbytes))):
        if first.offset + first.nbytes > second.offset:
            claim = f"{second.name!r} starts inside of {first.name!r}"
            raise _damaged(item, f"its records claim more than bytes of their own: {claim}")
    # Of two records of one name, torch and this package could read different ones.
    names = {record.name for record in records}
    if len(names) < len(records):
        raise _damaged(item, "two of its records have the same name")
    # torch reads records of one folder only; it has the name of the first one's.
    root = records[0].name.partition("/")[0]
    if strays := sorted(name for name in names if not name.startswith(f"{root}/")):
        raise _damaged(item, f"record {strays[0]!r} is not in the folder {root!r} of the others")
    if f"{root}/data.pkl" not in names:
        raise _damaged(item, f"there is no record {f'{root}/data.pkl'!r}")
    return records


def crc_of(fd: Source, item: Item, record: Record) -> int:
    """Return the CRC of the bytes that a record has now."""
    window, buffer, crc = _Window(fd, item), bytearray(CHUNK_NBYTES), 0
    for start in range(0, record.nbytes, len(buffer)):
        view = memoryview(buffer)[: min(len(buffer), record.nbytes - start)]
        window.read_into(view, record.offset + start)
        crc = zlib.crc32(view, crc)
    return crc


def read_record(fd: Source, item: Item, record: Record) -> bytearray:
    """Read the text of a record and compare its CRC."""
    start = item.offset + record.offset
    data = read_text(fd, Interval(start, start + record.nbytes), record.name)
    if zlib.crc32(data) != record.crc:
        raise _damaged(
            item,
            f"record {record.name!r} has CRC {zlib.crc32(data):08x}, expected {record.crc:08x}",
        )
    return data


def read_bytes(fd: Source, item: Item, interval: Interval) -> bytearray:
    """Read bytes of an item, counted from its start; the interval has to be within it."""
    data = bytearray(interval.numel)
    _Window(fd, item).read_into(memoryview(data), interval.start)
    return data


class _Window:
    """Item as the part of a file interface that `zipfile` needs to read a central directory."""

    def __init__(self, fd: Source, item: Item) -> None:
        self._fd = fd
        self._item = item
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._item.nbytes}[
            whence
        ]
        if start + offset < 0:
            raise ValueError("a position before the start")
        self._position = start + offset
        return self._position

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self._item.nbytes - self._position)
        nbytes = left if nbytes < 0 else min(nbytes, left)
        data = bytearray()
        while len(data) < nbytes:
            part = bytearray(min(_ENTRY_NBYTES, nbytes - len(data)))
            self.read_into(memoryview(part), self._position + len(data))
            # Memory is allocated as entries arrive: a file can claim any size and have holes.
            if len(part) == _ENTRY_NBYTES and _CENTRAL not in part:
                raise zipfile.BadZipFile(f"a directory of {nbytes:,} bytes is none of entries")
            data += part
        self._position += nbytes
        return bytes(data)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with bytes of the item from ``offset``; it has to have that many."""
        start = self._item.offset + offset
        done = read_into(self._fd, view, start)
        if done < len(view):
            raise _damaged(self._item, f"the file ends after {start + done:,} bytes")


def _check_ends(window: _Window, entries: Sequence[zipfile.ZipInfo], start: int) -> None:
    """Check that the archive is all of the item, and that its directory and ends fit each other.

    `zipfile` does not check, but torch refuses some that do not; a wrong length hides entries.
    """
    window.seek(-_END_NBYTES, os.SEEK_END)
    if window.read(len(_END)) != _END:
        raise zipfile.BadZipFile("it does not end as torch.save ends one")
    if not entries or min(info.header_offset for info in entries) != 0:
        raise zipfile.BadZipFile("it does not start with a record")
    window.seek(start)
    rest, at = bytearray(window.read()), 0
    for _ in entries:
        at += _ENTRY_FIELDS_NBYTES + sum(struct.unpack_from("<3H", rest, at + 28))
    if len(rest) - at > _END_NBYTES:
        rest[at + 12 : at + 16] = struct.pack("<2H", 45, 45)  # versions: they say nothing
    end = _end(len(entries), at, start)
    if bytes(rest[at:]) not in (end, _end_64(len(entries), at, start) + end):
        raise zipfile.BadZipFile(f"its directory does not end after {len(entries):,} records")


def _locate(window: _Window, info: zipfile.ZipInfo, end: int) -> Record:
    """Return the byte range of a record, which has to be before the directory."""
    window.seek(info.header_offset)
    wanted = info.filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
    header = window.read(_LOCAL_HEADER.size)
    name = window.read(len(wanted))
    signature, _, _, method, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
    stored = info.compress_type == method == zipfile.ZIP_STORED
    if not stored or info.compress_size != info.file_size or info.flag_bits & _UNREADABLE:
        raise zipfile.BadZipFile(f"record {info.filename!r} is compressed, encrypted, or a patch")
    offset = info.header_offset + len(header) + name_nbytes + extra_nbytes
    if signature != _LOCAL or offset + info.file_size > end:
        raise zipfile.BadZipFile(f"record {info.filename!r} is not where the directory says")
    if name != wanted or name_nbytes != len(wanted):
        raise zipfile.BadZipFile(f"record {info.filename!r} calls itself {name!r}")
    # torch would read nothing of a folder, and refuses archives on several disks.
    if info.external_attr & _IS_FOLDER or info.volume:
        raise zipfile.BadZipFile(f"record {info.filename!r} is called a folder, or on another disk")
    return Record(name=info.filename, offset=offset, nbytes=info.file_size, crc=info.CRC)


def _damaged(item: Item, what: str) -> CheckpointError:
    return CheckpointError(
        f"{item.file} is damaged in its item of {item.nbytes:,} bytes at byte {item.offset:,}: "
        f"{what}. Use another checkpoint, or a copy of this one."
    )
