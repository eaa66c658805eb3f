"""Plain checkpoints, one file each: what this package has written into one, and whether its bytes are still those."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardeddp.checkpoint.disk.durable import StrPath, disk_errors, open_regular
from shardeddp.checkpoint.format.item_crc import Record, crc_of, read_record, records_of
from shardeddp.checkpoint.format.manifest import INDEX, Item, Manifest
from shardeddp.checkpoint.format.manifest_file import index_from_bytes
from shardeddp.errors import CheckpointError
from shardeddp.plan.intervals import Interval

_MAX_INDEX_NBYTES = 64 * 2**20
_ELEMENTS = re.compile(r"(?:.*/)?data/(\d{1,9})")


@dataclass(frozen=True, kw_only=True)
class DamagedRecord:
    """Bytes of a plain checkpoint that are not those that were written."""

    where: Interval
    """In the file."""

    name: str
    """Of the tensor, or of the record of the archive where it is no tensor's."""

    expected: str
    found: str

    def __str__(self) -> str:
        """All of it in one line."""
        where = f"bytes {self.where.start:,} to {self.where.stop:,} of {self.name}"
        return f"{where} have CRC {self.found}, expected {self.expected}"


def read_index(path: StrPath) -> Manifest:
    """What this package says of a plain checkpoint that it has written; elements are not read.

    Args:
        path: The file, or a link to it.

    Raises:
        CheckpointError: It is none, or damaged.
    """
    with _opened(path) as (descriptor, item):
        return _index(descriptor, item, records_of(descriptor, item))


def carries_index(path: StrPath) -> bool:
    """Whether a file is a plain checkpoint that this package has written."""
    try:
        with _opened(path) as (descriptor, item):
            return any(_is_index(record) for record in records_of(descriptor, item))
    except (CheckpointError, OSError):
        return False


def damaged_records(
    path: StrPath, part: tuple[int, int] = (0, 1), progress: Callable[[int], None] = lambda nbytes: None
) -> list[DamagedRecord]:
    """Compare the records of a plain checkpoint of this package with their CRCs.

    Args:
        path: The file, or a link to it.
        part: Which records: ``(1, 3)`` is the second of three parts.
        progress: Told how many more bytes have been compared.

    Raises:
        CheckpointError: It is no archive of records, or has no index.
    """
    damaged: list[DamagedRecord] = []
    with _opened(path) as (descriptor, item):
        records = records_of(descriptor, item)
        tensors = _index(descriptor, item, records).tensors.values()
        names = {piece.payload: tensor.name for tensor in tensors for piece in tensor.pieces if tensor.numel}
        for record in records[part[0] :: part[1]]:
            found = crc_of(descriptor, item, record)
            if found != record.crc:
                name, expected = names.get(record.offset, record.name), f"{record.crc:08x}"
                where = Interval(record.offset, record.offset + record.nbytes)
                damaged.append(DamagedRecord(where=where, name=name, expected=expected, found=f"{found:08x}"))
            progress(record.nbytes)
    return damaged


def _index(descriptor: int, item: Item, records: list[Record]) -> Manifest:
    record = next(filter(_is_index, records), None)
    if record is None:
        raise CheckpointError(f"there is no {INDEX} in it: another tool wrote it, or an older release")
    if record.nbytes > _MAX_INDEX_NBYTES:
        raise CheckpointError(f"{INDEX} has {record.nbytes:,} bytes, expected at most {_MAX_INDEX_NBYTES:,}")
    found = ((_ELEMENTS.fullmatch(each.name), each) for each in records)
    elements = {
        int(match[1]): Interval(each.offset, each.offset + each.nbytes) for match, each in found if match is not None
    }
    return index_from_bytes(read_record(descriptor, item, record), item.file, item.nbytes, elements)


def _is_index(record: Record) -> bool:
    return Path(record.name).name == INDEX


@contextmanager
def _opened(path: StrPath) -> Generator[tuple[int, Item]]:
    real = os.path.realpath(path)
    with disk_errors("reading", path):
        descriptor, nbytes = open_regular(real)
    try:
        yield descriptor, Item(file=os.path.basename(real), offset=0, nbytes=nbytes)
    except CheckpointError as error:
        raise error if str(path) in str(error) else type(error)(f"{os.fspath(path)}: {error}") from error
    finally:
        os.close(descriptor)
