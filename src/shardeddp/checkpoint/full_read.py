"""Reading of full checkpoints: this package's entry in their index, and the CRCs of their records."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardeddp.checkpoint.durable import Source, StrPath
from shardeddp.checkpoint.foreign_pickle import refuse_traps
from shardeddp.checkpoint.items import Record, crc_of, read_bytes, read_record, records_of
from shardeddp.checkpoint.location import AnyPath, disk_errors, location
from shardeddp.checkpoint.manifest import INDEX, Item, Manifest, index_from_bytes
from shardeddp.errors import CheckpointError, DamagedCheckpointError, first_three
from shardeddp.plan.layout import Interval

PLAIN_SUFFIX = ".ckpt"
"""Suffix of checkpoint names, also of those that are directories."""

_ELEMENTS = re.compile(r"(?:.*/)?data/(\d{1,9})")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One range of a checkpoint, or file of it, that is not as it was written."""

    file: str
    """Name of the file in the checkpoint; empty for the checkpoint as a whole."""

    tensor: str = ""
    """Tensor with bytes there, or the archive's record if no tensor has; empty if neither."""

    where: Interval | None = None
    """Bytes of the file; None for the file as a whole."""

    expected: str
    found: str

    def __str__(self) -> str:
        """Return the damage as one line."""
        where = f" bytes {self.where.start:,} to {self.where.stop:,}" if self.where else ""
        of = f" of {self.tensor}" if self.tensor else ""
        return f"{self.file}{where}{of}: expected {self.expected}, found {self.found}".lstrip(": ")


def read_index(path: AnyPath) -> Manifest:
    """Return the index that this package wrote into a plain checkpoint; elements are not read."""
    with opened_file(path) as (descriptor, item):
        return _index(descriptor, item, records_of(descriptor, item))[0]


def require_data(path: StrPath) -> None:
    """Refuse a file of ``torch.save`` that would crash ``torch.load(weights_only=True)``."""
    with opened_file(path) as (descriptor, item), open(path, "rb") as file:
        if not zipfile.is_zipfile(path):
            refuse_traps(file, str(path), _PICKLES_BEFORE_1_6)
            return
        for record in records_of(descriptor, item):
            if record.name.endswith("/data.pkl"):
                file.seek(record.offset)
                refuse_traps(file, str(path))


_PICKLES_BEFORE_1_6 = 5
"""Pickles in a file of torch before 1.6: magic number, version, system, state, storage keys."""


def is_archive_of_torch(path: Path) -> bool:
    """Return True if a file has the record names of ``torch.save``."""
    try:
        with opened_file(path) as (descriptor, item):
            return any(it.name.endswith("/data.pkl") for it in records_of(descriptor, item))
    except CheckpointError:
        return False


def carries_index(path: AnyPath) -> bool:
    """Return True if a file is a plain checkpoint of this package, even a damaged one.

    If its records cannot be told, the end of the file decides: it lists the index last.
    """
    try:
        with opened_file(path) as (descriptor, item):
            try:
                return any(_is_index(record) for record in records_of(descriptor, item))
            except CheckpointError:
                end = Interval(max(0, item.nbytes - _END_NBYTES), item.nbytes)
                return INDEX.encode() in read_bytes(descriptor, item, end)
    except (CheckpointError, OSError):
        return False


_END_NBYTES = 2**16
"""Bytes at the end of a damaged file in which the name of the index is looked for."""


def damaged_records(
    path: AnyPath,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int], object] = lambda nbytes: None,
) -> list[Damage]:
    """Compare the records of a plain checkpoint with their CRCs; return the damages, in order.

    ``torch.save`` or this package has written the CRCs. A file without them
    (``torch.serialization.set_crc32_options``) is not checked.
    """
    damaged: list[Damage] = []
    with opened_file(path) as (descriptor, item):
        records = records_of(descriptor, item)
        if not any(record.crc for record in records):
            return []
        names = _names(descriptor, item, records)
        for record in records[part[0] :: part[1]]:
            found = crc_of(descriptor, item, record)
            if found != record.crc:
                damaged.append(
                    Damage(
                        file=location(path).name,
                        tensor=names.get(record.offset, record.name),
                        where=Interval(record.offset, record.offset + record.nbytes),
                        expected=f"{record.crc:08x}",
                        found=f"{found:08x}",
                    )
                )
            progress(record.nbytes)
    return damaged


def require_intact(path: StrPath, part: tuple[int, int] = (0, 1)) -> None:
    """Refuse a plain checkpoint with a damaged record in the given share of its records."""
    damaged = damaged_records(path, part)
    if damaged:
        raise DamagedCheckpointError(
            f"{path} is damaged (CRCs of records): {first_three(map(str, damaged))}"
        )


def _names(descriptor: Source, item: Item, records: list[Record]) -> dict[int, str]:
    """Return names of tensors by the offset of their elements, if this package wrote the file."""
    try:
        manifest, elements = _index(descriptor, item, records)
    except CheckpointError:
        return {}
    tensors = manifest.tensors.values()
    return {elements[it.sections[0]].start: it.name for it in tensors if it.numel}


def _index(
    descriptor: Source, item: Item, records: list[Record]
) -> tuple[Manifest, dict[int, Interval]]:
    """Return the index that this package wrote, and the bytes of each numbered record."""
    record = next(filter(_is_index, records), None)
    if record is None:
        raise CheckpointError(
            f"there is no {INDEX} in it: another tool wrote it, or an older release"
        )
    found = ((_ELEMENTS.fullmatch(each.name), each) for each in records)
    elements = {
        int(match[1]): Interval(each.offset, each.offset + each.nbytes)
        for match, each in found
        if match is not None
    }
    root = record.name.partition("/")[0]
    inside = {
        INDEX,
        "data.pkl",
        "byteorder",
        "version",
        *(f"data/{n}" for n in range(len(elements))),
    }
    if odd := sorted({each.name for each in records} ^ {f"{root}/{name}" for name in inside}):
        raise CheckpointError(f"its records are not those it was written with: {first_three(odd)}")
    data = read_record(descriptor, item, record)
    return index_from_bytes(data, item.file, item.nbytes, elements), elements


def _is_index(record: Record) -> bool:
    return Path(record.name).name == INDEX


@contextmanager
def opened_file(path: AnyPath) -> Generator[tuple[Source, Item]]:
    """Open a plain file, or the target of a link, with all of its bytes as an item."""
    place = location(path)
    real = place.real()
    try:
        with disk_errors("reading", place), real.open_source() as (descriptor, nbytes):
            yield descriptor, Item(file=real.name, offset=0, nbytes=nbytes)
    except CheckpointError as error:
        raise (error if str(path) in str(error) else type(error)(f"{path}: {error}")) from error
