"""Pieces of tensors: in which file which elements lie, from tables that are checked before use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardeddp.checkpoint.durable import read_dense
from shardeddp.checkpoint.items import require_checksum
from shardeddp.checkpoint.location import AnyPath, Location, disk_errors, location
from shardeddp.checkpoint.manifest import (
    BLOCK_NBYTES,
    DIGEST_NBYTES,
    EXTENT,
    MAX_NBYTES,
    PIECE,
    PLACEMENT,
    Item,
    Manifest,
    Section,
)
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Box, Interval, boxes

Integers = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]
"""Array of a structured dtype."""

INTERVAL = np.dtype([("section", "<u4"), ("start", "<u8"), ("stop", "<u8")])
"""Row of consecutive elements of a section in one file, in any number of pieces."""

_HOLE_NBYTES = 64
"""Consecutive zero bytes that no table has: every row and every checksum has others."""


class Piece(NamedTuple):
    """Box of a tensor, stored in one go."""

    interval: Interval
    """Elements of the flattened tensor."""

    item: Item
    payload: int
    """Offset of the elements in the file; row-major, without gaps."""

    checksums: tuple[str, ...]
    """Checksum of each ``BLOCK_NBYTES`` of the payload; the last block may be shorter."""


# -- Piece table of one data file


class PieceTable:
    """Table of the pieces in one data file; refused if it contradicts itself or the manifest.

    Its content was compared with its checksum before.
    """

    def __init__(self, name: str, data: bytes | bytearray, manifest: Manifest, path: str) -> None:
        self._name = name
        self._path = path
        stored = manifest.files[name]
        rows = np.frombuffer(data, PIECE, stored.pieces)
        self._digests = memoryview(data)[rows.nbytes :]
        columns = [rows[column] for column in PIECE.names or ()]
        for column in columns[1:]:
            self._require(column < MAX_NBYTES, "numbers of 62 bits")
        self.sections, self.starts, self.stops, self._items, self._item_nbytes, self.payloads = (
            column.astype(np.int64) for column in columns
        )
        self._check(manifest.sections, stored.blocks, manifest.table_of(name).start)

    def intervals(self) -> Rows:
        """Return ``INTERVAL`` rows of the file by section; consecutive pieces are one."""
        return intervals_of(self.sections, self.starts, self.stops)

    def of(self, section: int, interval: Interval) -> Iterator[Piece]:
        """Yield the pieces with any of these elements, in order."""
        first, last = np.searchsorted(self.sections, [section, section + 1]).tolist()
        first += int(np.searchsorted(self.stops[first:last], interval.start, side="right"))
        for row in range(first, last):
            if self.starts[row] >= interval.stop:
                return
            yield self[row]

    def by_payload(self) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces with their sections, in the order of the file."""
        for row in np.argsort(self.payloads, kind="stable").tolist():
            yield int(self.sections[row]), self[row]

    def __getitem__(self, row: int) -> Piece:
        """Return the piece of a row."""
        blocks = range(self._blocks[row], self._blocks[row + 1])
        return Piece(
            Interval(int(self.starts[row]), int(self.stops[row])),
            Item(
                file=self._name,
                offset=int(self._items[row]),
                nbytes=int(self._item_nbytes[row]),
            ),
            int(self.payloads[row]),
            tuple(
                self._digests[block * DIGEST_NBYTES : (block + 1) * DIGEST_NBYTES].hex()
                for block in blocks
            ),
        )

    def _check(self, sections: Sequence[Section], blocks: int, end: int) -> None:
        """Check all rows; each check relies on earlier ones, so that sums do not overflow."""
        self._require(self.sections < len(sections), f"one of {len(sections)} sections")
        wanted, inverse = np.unique(self.sections, return_inverse=True)
        found = [sections[number] for number in wanted.tolist()]
        numels = np.array([section.numel for section in found], dtype=np.int64)[inverse]
        itemsizes = np.array([it.dtype.itemsize for it in found], dtype=np.int64)[inverse]
        self._require(self.starts < self.stops, "elements")
        self._require(self.stops <= numels, "elements of its tensor")
        follows = self.sections[1:] > self.sections[:-1]
        follows |= (self.sections[1:] == self.sections[:-1]) & (self.starts[1:] >= self.stops[:-1])
        self._require(np.append(follows, True), "elements before those of the next row")
        ends = self._items + self._item_nbytes
        self._require(ends <= end, f"an item inside of the {end:,} bytes before the table")
        self._nbytes = (self.stops - self.starts) * itemsizes
        inside = (self._items <= self.payloads) & (self.payloads + self._nbytes <= ends)
        self._require(inside, "a payload inside of its item")
        order = np.argsort(self.payloads, kind="stable")
        alone = (self.payloads + self._nbytes)[order][:-1] <= self.payloads[order][1:]
        # Overlapping pieces could demand any amount of memory.
        self._require(np.append(alone, True), "bytes that no other row has as well", order)
        counts = -(-self._nbytes // BLOCK_NBYTES)
        self._blocks: list[int] = [0, *np.cumsum(counts).tolist()]
        if self._blocks[-1] != blocks:
            raise CheckpointError(
                f"{self._path} contradicts itself: its pieces have {self._blocks[-1]} blocks, its "
                f"table has the checksums of {blocks}"
            )

    def _require(
        self, fulfilled: npt.NDArray[np.bool_], what: str, order: Integers | None = None
    ) -> None:
        if not fulfilled.all():
            row = int(np.argmin(fulfilled))
            row = row if order is None else int(order[row])
            raise CheckpointError(
                f"{self._path} contradicts itself: row {row} of its table of pieces was expected "
                f"to have {what}"
            )


# -- Placement: the data files of each tensor


_REQUESTS_AT_ONCE = 16


class Pieces:
    """Locates pieces in a directory; reads only the needed rows of placement and tables."""

    def __init__(self, path: AnyPath, manifest: Manifest) -> None:
        self._path: Location = location(path)
        self._manifest = manifest
        self._tables: dict[str, PieceTable] = {}
        self._extents: dict[int, tuple[Integers, Integers]] = {}

    def of(self, section: int, interval: Interval) -> list[Piece]:
        """Return the pieces with these elements of a section, in order."""
        numel, found = self._manifest.sections[section].numel, list[Piece]()
        if interval.stop > numel:
            raise ValueError(f"expected elements below {numel}, found {interval}")
        if not interval.numel:
            return found
        starts, files = self.extents(section)
        stops = np.append(starts[1:], numel)
        first = int(np.searchsorted(stops, interval.start, side="right"))
        last = int(np.searchsorted(starts, interval.stop))
        parts = (column[first:last].tolist() for column in (starts, stops, files))
        for start, stop, file in zip(*parts, strict=True):
            name = self._manifest.data_files[file]
            wanted = interval.intersect(Interval(start, stop))
            end = wanted.start
            for piece in self.table(name).of(section, wanted):
                # A piece found by several rows of the placement could be read any number of times.
                if not start <= piece.interval.start <= end or piece.interval.stop > stop:
                    break
                found.append(piece)
                end = piece.interval.stop
            if end < wanted.stop:
                raise CheckpointError(
                    f"{self._path / name} has no piece with element {end} of "
                    f"{_name(self._manifest, section)}, which lies there by {PLACEMENT}"
                )
        return found

    def table(self, name: str) -> PieceTable:
        """Return the table of a data file, which is cached."""
        if name not in self._tables:
            self._tables[name] = self.read_table(name)
        return self._tables[name]

    def read_tables(self) -> None:
        """Read the tables of all data files; several at once, since a store's requests are slow."""
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE, "shardeddp-tables") as threads:
            deque(threads.map(self.table, self._manifest.data_files), maxlen=0)

    def read_table(self, name: str) -> PieceTable:
        """Read the table of a data file."""
        where, expected = self._manifest.table_of(name), self._manifest.files[name].table
        data = self._manifest.inline.get(name)
        if data is None:
            data = self._read(name, where, expected, "its table of pieces")
        return PieceTable(name, data, self._manifest, str(self._path / name))

    def extents(self, section: int) -> tuple[Integers, Integers]:
        """Return the placement of a section: first elements of its intervals, and their files."""
        if section not in self._extents:
            self._extents[section] = self._read_extents(section)
        return self._extents[section]

    def check(self, intervals: Sequence[Rows]) -> None:
        """Refuse a placement unlike the rows ``INTERVAL`` of each table, in the order of files."""
        names = [_name(self._manifest, each) for each in range(len(self._manifest.sections))]
        numels = [section.numel for section in self._manifest.sections]
        rows, counts = placement_of(intervals, numels, names)
        first = 0
        for section, count in enumerate(counts):
            expected, first = rows[first : first + count], first + count
            starts, files = self.extents(section)
            if not (
                np.array_equal(starts, expected["start"])
                and np.array_equal(files, expected["file"])
            ):
                raise CheckpointError(
                    f"{self._path / PLACEMENT} has other files for {names[section]} than those "
                    f"that have its elements"
                )

    def _read_extents(self, section: int) -> tuple[Integers, Integers]:
        stored, name = self._manifest.sections[section], _name(self._manifest, section)
        data = self._manifest.inline.get(PLACEMENT)
        if data is None:
            data = self._read(PLACEMENT, stored.rows, stored.checksum, f"the files of {name}")
        else:
            data = data[stored.rows.start : stored.rows.stop]
        rows = np.frombuffer(data, EXTENT)
        numbers = rows["file"].astype(np.int64)
        small = rows["start"] < stored.numel
        starts = np.where(small, rows["start"], 0).astype(np.int64)
        ordered = small.all() and (np.diff(starts, prepend=-1) > 0).all()
        if not ordered or starts[:1].any() or (numbers >= len(self._manifest.data_files)).any():
            raise CheckpointError(
                f"{self._path / PLACEMENT} contradicts itself: the parts of {name} were expected to "
                f"start at 0 and behind each other, below {stored.numel}, in one of "
                f"{len(self._manifest.data_files)} files"
            )
        return starts, numbers

    def _read(self, name: str, where: Interval, expected: str, what: str) -> bytearray:
        path = self._path / name
        with disk_errors("reading", path), path.open_source() as (descriptor, _):
            data = read_dense(descriptor, where, str(path), _HOLE_NBYTES)
        if data:
            require_checksum(data, expected, path, where, f", {what},")
        return data


def _name(manifest: Manifest, section: int) -> str:
    return manifest.owners.get(section, f"section {section}")


# -- Boxes assembled from stored boxes

ReadBox = Callable[[Box], torch.Tensor]
"""Reads a box of a tensor that is inside of a stored one, in the box's shape."""


def assemble(
    interval: Interval, box: Box, dtype: torch.dtype, stored: Sequence[tuple[Box, ReadBox]]
) -> torch.Tensor:
    """Return elements of a tensor that is stored in boxes: 1D, on the host.

    The interval counts in the flattened box. Stored boxes cover the tensor and do not overlap.
    """
    wanted = [each.outside(box) for each in boxes(interval, box.sizes)]
    flat = torch.empty(interval.numel, dtype=dtype, device="cpu")
    at = 0
    for each in wanted:
        target = flat[at : at + each.numel].view(each.sizes)
        at += each.numel
        for box, read in stored:
            if (common := each.intersect(box)) is not None:
                target[common.inside(each).slices].copy_(read(common))
    return flat


# -- Writing of tables and placement


def intervals_of(sections: Integers, starts: Integers, stops: Integers) -> Rows:
    """Merge consecutive sorted pieces to rows ``INTERVAL``."""
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = (sections[1:] != sections[:-1]) | (starts[1:] != stops[:-1])
    ends = np.append(begins[1:], True)[: len(starts)]
    intervals = np.empty(int(begins.sum()), dtype=INTERVAL)
    intervals["section"], intervals["start"], intervals["stop"] = (
        sections[begins],
        starts[begins],
        stops[ends],
    )
    return intervals


_AT_A_TIME = 2**17
"""Rows ``INTERVAL`` sorted at once: sorting those of thousands of ranks would take 100 MB."""


def placement_of(
    intervals: Sequence[Rows], numels: Sequence[int], names: Sequence[str]
) -> tuple[Rows, list[int]]:
    """Return the placement of all elements, from the elements in each file.

    Args:
        intervals: Rows ``INTERVAL`` of each file, in the order of their numbers; sorted by section.
        numels: Number of elements of each section.
        names: Name of each section, for errors.

    Returns:
        Rows ``EXTENT`` by section and start, and the number of rows of each section.

    Raises:
        CheckpointError: Elements of a section are stored twice, or not at all.
    """
    total = sum(map(len, intervals))
    step = max(1, len(numels) * _AT_A_TIME // max(1, total))
    rows, counts, end = np.empty(total, dtype=EXTENT), list[int](), 0
    for first in range(0, len(numels), step):
        own = [
            each[slice(*np.searchsorted(each["section"], [first, first + step]))]
            for each in intervals
        ]
        some = slice(first, first + step)
        found, parts = _placement_of(own, first, numels[some], names[some])
        rows[end : end + len(found)] = found
        end += len(found)
        counts += parts
    return rows[:end], counts


def _placement_of(
    intervals: Sequence[Rows], first: int, numels: Sequence[int], names: Sequence[str]
) -> tuple[Rows, list[int]]:
    """Return the placement of some sections, from number ``first`` on."""
    found = np.concatenate([np.empty(0, dtype=INTERVAL), *intervals])
    files = np.repeat(np.arange(len(intervals)), [len(each) for each in intervals])
    order = np.lexsort((found["start"], found["section"]))
    found, files = found[order], files[order]
    sections, starts, stops = found["section"] - np.uint32(first), found["start"], found["stop"]
    begins = np.append(True, sections[1:] != sections[:-1])[: len(found)]
    ends = np.append(begins[1:], True)[: len(found)]
    expected = np.append(np.zeros(1, dtype=np.uint64), stops[:-1])[: len(found)]
    expected[begins] = 0
    wanted = np.array(numels, dtype=np.uint64)
    wrong = (starts != expected) | (ends & (stops != wanted[sections]))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise CheckpointError(
            f"elements of {names[sections[row]]} are stored twice or not at all: those from "
            f"{starts[row]} to {stops[row]} of {wanted[sections[row]]} follow those up to "
            f"{expected[row]}"
        )
    missing = np.setdiff1d(np.flatnonzero(wanted), sections)
    if len(missing):
        raise CheckpointError(f"no element of {names[missing[0]]} is stored")
    # Consecutive elements in the same file need no row of their own.
    kept = begins | np.append(True, files[1:] != files[:-1])[: len(found)]
    rows = np.empty(int(kept.sum()), dtype=EXTENT)
    rows["start"], rows["file"] = starts[kept], files[kept]
    return rows, np.bincount(sections[kept], minlength=len(numels)).tolist()
