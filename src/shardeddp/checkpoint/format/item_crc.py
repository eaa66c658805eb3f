"""The CRCs inside an item or a plain file, checked without torch: they find damage where no manifest has checksums."""

import os
import struct
import zipfile
import zlib
from dataclasses import dataclass

from shardeddp.checkpoint.format.manifest import Item
from shardeddp.errors import CheckpointError

CHUNK_NBYTES = 2**20
"""Read and checked at a time; it stays in the processor's cache in between."""

MAX_DIRECTORY_NBYTES = 16 * 2**20
"""Of the central directory of an item, which is held in memory: some 100 thousand records."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_END_RECORD = struct.Struct("<4s4H2IH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Stored bytes inside an item."""

    name: str
    offset: int
    """Of the first byte, from the start of the item."""

    nbytes: int
    crc: int


def check_item_crc(fd: int, item: Item) -> bool:
    """Check the bytes of an item against the CRCs that ``torch.save`` has put there.

    They cover the records of the zip archive and not what lies around these. Nothing is unpickled or unpacked, and no
    more is read than the item has bytes (and its directory once more).

    Args:
        fd: The data file, open for reading; its position is left alone.
        item: In that file.

    Returns:
        Whether there are CRCs. False for an item that was written without: nothing in it was checked.

    Raises:
        CheckpointError: A CRC is wrong, or the item is no archive of stored records that lie inside of it.
        OSError: Reading failed.
    """
    records = records_of(fd, item)
    if not any(record.crc for record in records):
        return False
    for record in records:
        found = crc_of(fd, item, record)
        if found != record.crc:
            first, last = item.offset + record.offset, item.offset + record.offset + record.nbytes
            raise _damaged(
                item,
                f"record {record.name!r} at bytes {first:,} to {last:,} of the file has CRC {found:08x}, "
                f"expected {record.crc:08x}",
            )
    return True


def records_of(fd: int, item: Item) -> list[Record]:
    """The stored records of an item, in order, from its directory alone.

    Args:
        fd: The data file, open for reading; its position is left alone.
        item: In that file.

    Raises:
        CheckpointError: The item is no archive of stored records that lie inside of it.
        OSError: Reading failed.
    """
    window = _Window(fd, item)
    try:
        with zipfile.ZipFile(window) as archive:
            entries = archive.infolist()
            _check_end(window, len(entries))
            records = [_locate(window, info) for info in entries]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise _damaged(item, f"it is no zip archive of stored records ({error})") from error
    if sum(record.nbytes for record in records) > item.nbytes:
        raise _damaged(item, f"its records claim more than its {item.nbytes:,} bytes")
    return records


def crc_of(fd: int, item: Item, record: Record) -> int:
    """The CRC of the bytes that a record has now."""
    window, buffer, crc = _Window(fd, item), bytearray(CHUNK_NBYTES), 0
    for start in range(0, record.nbytes, len(buffer)):
        view = memoryview(buffer)[: min(len(buffer), record.nbytes - start)]
        window.read_into(view, record.offset + start)
        crc = zlib.crc32(view, crc)
    return crc


def read_record(fd: int, item: Item, record: Record) -> bytes:
    """The bytes of a record, held against its CRC.

    Raises:
        CheckpointError: They are not those that were written.
    """
    data = bytearray(record.nbytes)
    _Window(fd, item).read_into(memoryview(data), record.offset)
    if zlib.crc32(data) != record.crc:
        raise _damaged(item, f"record {record.name!r} has CRC {zlib.crc32(data):08x}, expected {record.crc:08x}")
    return bytes(data)


class _Window:
    """An item as a file: what `zipfile` needs of one to read a central directory."""

    def __init__(self, fd: int, item: Item) -> None:
        self._fd = fd
        self._item = item
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._item.nbytes}[whence]
        if start + offset < 0:
            raise ValueError("a position before the start")
        self._position = start + offset
        return self._position

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self._item.nbytes - self._position)
        nbytes = left if nbytes < 0 else min(nbytes, left)
        if nbytes > MAX_DIRECTORY_NBYTES:
            raise zipfile.BadZipFile(f"a directory of {nbytes:,} bytes, at most {MAX_DIRECTORY_NBYTES:,} were expected")
        data = bytearray(nbytes)
        self.read_into(memoryview(data), self._position)
        self._position += nbytes
        return bytes(data)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with bytes of the item, all of which lie inside of it."""
        while len(view):
            count = os.preadv(self._fd, [view], self._item.offset + offset)
            if count == 0:
                raise _damaged(self._item, f"the file ends after {self._item.offset + offset:,} bytes")
            view, offset = view[count:], offset + count


def _check_end(window: _Window, count: int) -> None:
    """Whether the directory had as many entries as it says: `zipfile` does not look, and a wrong length hides some."""
    window.seek(-_END_RECORD.size, os.SEEK_END)
    signature, *_, expected, _, _, _ = _END_RECORD.unpack(window.read(_END_RECORD.size))
    if signature != b"PK\5\6":
        raise zipfile.BadZipFile("it does not end as torch.save ends one")
    if expected != min(count, 0xFFFF) or not count:
        raise zipfile.BadZipFile(f"{expected} records were expected, {count} found")


def _locate(window: _Window, info: zipfile.ZipInfo) -> Record:
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise zipfile.BadZipFile(f"record {info.filename!r} is compressed")
    end = window.seek(0, os.SEEK_END)
    window.seek(info.header_offset)
    header = window.read(_LOCAL_HEADER.size)
    signature, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
    offset = info.header_offset + len(header) + name_nbytes + extra_nbytes
    if signature != b"PK\3\4" or offset + info.file_size > end:
        raise zipfile.BadZipFile(f"record {info.filename!r} is not where the directory says")
    return Record(name=info.filename, offset=offset, nbytes=info.file_size, crc=info.CRC)


def _damaged(item: Item, what: str) -> CheckpointError:
    return CheckpointError(
        f"{item.file} is damaged in its item of {item.nbytes:,} bytes at byte {item.offset:,}: {what}. "
        "Use another checkpoint, or a copy of this one."
    )
