"""Pieces are found by placement and tables, of which no more is read than needed, and nothing is believed unchecked."""

import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardeddp.checkpoint.find import read_manifest
from shardeddp.checkpoint.items import DataFile, hexdigest
from shardeddp.checkpoint.manifest import (
    ALGORITHM,
    BLOCK_NBYTES,
    MANIFEST,
    PIECE,
    PLACEMENT,
    Manifest,
    Section,
    StoredFile,
    StoredTensor,
    TrainingRun,
    manifest_to_bytes,
)
from shardeddp.checkpoint.pieces import INTERVAL, Pieces, intervals_of, placement_of
from shardeddp.checkpoint.read import CheckpointReader
from shardeddp.checkpoint.verify import verify
from shardeddp.errors import CheckpointError, DamagedCheckpointError
from shardeddp.plan.layout import Interval, boxes
from support.tables import edit_manifest, edit_placement, edit_table, put_table, table_of
from support.torture_mutations import read_files, write_files

pytestmark = pytest.mark.timeout(60)

SHAPES = [(7, 5), (40,), (3, 4, 5), (), (0, 3), (BLOCK_NBYTES // 2 + 9,)]
NAMES = [f"model.{number}" for number in range(len(SHAPES))]
RUN_OF_IT = TrainingRun(
    uuid="u",
    step=1,
    epoch=0,
    world_size=3,
    shard_size=3,
    sharding_strategy="full_shard",
    versions={},
)


def put(path: Path, ranks: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint whose tensors are cut anywhere, in which several parts may lie in one file."""
    path.mkdir()
    draw = random.Random(seed)
    tensors = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 0.5
        for name, shape in zip(NAMES, SHAPES, strict=True)
    }
    parts: list[list[tuple[int, Interval]]] = [[] for _ in range(ranks)]
    for section, tensor in enumerate(tensors.values()):
        cuts = sorted(draw.randrange(tensor.numel() + 1) for _ in range(2 * ranks))
        edges = [0, *cuts, tensor.numel()]
        for start, stop in pairwise(edges):
            if start < stop:
                parts[draw.randrange(ranks)].append((section, Interval(start, stop)))
    files, intervals = dict[str, StoredFile](), list[Any]()
    for rank, own in enumerate(parts):
        name, rows, digests = f"__{rank}_0.distcp", list[tuple[int, ...]](), list[bytes]()
        with open(path / name, "wb") as opened:
            file = DataFile(opened.fileno(), name)
            for section, interval in own:
                start = interval.start
                for box in boxes(interval, SHAPES[section]):
                    stop = start + box.numel
                    elements = tensors[NAMES[section]].reshape(-1)[start:stop]
                    item, payload, found = file.put_tensor(elements.view(box.sizes))
                    rows.append((section, start, stop, item.offset, item.nbytes, payload))
                    digests += found
                    start = stop
            files[name] = file.close(rows, digests)
        table = np.array(rows, dtype=PIECE)
        intervals.append(intervals_of(table["section"], table["start"], table["stop"]))
    numels = [tensor.numel() for tensor in tensors.values()]
    placement, counts = placement_of(intervals, numels, NAMES)
    (path / PLACEMENT).write_bytes(placement.tobytes())
    files[PLACEMENT] = StoredFile(nbytes=placement.nbytes, checksum=hexdigest(placement.tobytes()))
    sections, first = list[Section](), 0
    for tensor, count in zip(tensors.values(), counts, strict=True):
        own_rows = hexdigest(placement[first : first + count].tobytes())
        sections.append(Section(tensor.dtype, tuple(tensor.shape), first, count, own_rows))
        first += count
    stored = {
        name: StoredTensor(
            path=("model", name[6:]), dtype=it.dtype, shape=tuple(it.shape), sections=(number,)
        )
        for number, (name, it) in enumerate(tensors.items())
    }
    manifest = Manifest(
        run=RUN_OF_IT,
        algorithm=ALGORITHM,
        files=files,
        tensors=stored,
        objects={},
        sections=tuple(sections),
    )
    (path / MANIFEST).write_bytes(manifest_to_bytes(manifest))
    return tensors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    put(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize("seed", range(6))
def test_any_elements_are_read_and_nothing_else_of_them(tmp_path: Path, seed: int) -> None:
    path, draw = tmp_path / "a.ckpt", random.Random(seed)
    tensors = put(path, draw.randint(1, 9), seed)
    reader, pieces = CheckpointReader(path), Pieces(path, read_manifest(path))
    assert verify(path) == []
    for section, (name, tensor) in enumerate(tensors.items()):
        for _ in range(30):
            start, stop = sorted(draw.randrange(tensor.numel() + 1) for _ in range(2))
            assert torch.equal(
                reader.read(name, Interval(start, stop)), tensor.reshape(-1)[start:stop]
            )
            found = pieces.of(section, Interval(start, stop))
            ends = [piece.interval.stop for piece in found]
            assert [piece.interval.start for piece in found[1:]] == ends[:-1]
            if start < stop:
                assert found[0].interval.start <= start < ends[0]
                assert found[-1].interval.start < stop <= ends[-1]
            else:
                assert found == []
        with pytest.raises(ValueError, match="expected elements below"):
            reader.read(name, Interval(0, tensor.numel() + 1))


def test_only_files_with_wanted_elements_are_opened(path: Path) -> None:
    reader = CheckpointReader(path)
    first = Pieces(path, reader.manifest).of(0, Interval(0, 1))[0]
    for name in reader.manifest.data_files:
        if name != first.item.file:
            (path / name).unlink()
    reader.read(NAMES[0], Interval(0, 1))
    with pytest.raises(CheckpointError, match=r"reading .*distcp failed: No such file"):
        reader.read(NAMES[0], Interval(0, 35))


def test_rows_that_follow_each_other_are_one_run() -> None:
    sections, starts, stops = (
        np.array(column) for column in ([0, 0, 0, 1, 1], [0, 3, 9, 9, 12], [3, 6, 12, 10, 13])
    )
    found = intervals_of(sections, starts, stops).tolist()
    assert found == [(0, 0, 6), (0, 9, 12), (1, 9, 10), (1, 12, 13)]
    assert len(intervals_of(sections[:0], starts[:0], stops[:0])) == 0


def intervals(*rows: tuple[int, int, int]) -> Any:
    return np.array(list(rows), dtype=INTERVAL)


def test_a_placement_has_a_row_for_each_change_of_the_file() -> None:
    found, counts = placement_of(
        [intervals((0, 0, 2), (0, 2, 3), (2, 4, 5)), intervals(), intervals((0, 3, 5), (2, 0, 4))],
        [5, 0, 5],
        "abc",
    )
    assert (found.tolist(), counts) == ([(0, 0), (3, 2), (0, 2), (4, 0)], [2, 0, 2])
    assert placement_of([], [], [])[1] == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(0, 0, 3), (0, 4, 5)], "elements of a are stored twice or not at all: those from 4 to 5"),
        ([(0, 0, 3), (0, 2, 5)], "elements of a are stored twice or not at all: those from 2 to 5"),
        ([(0, 1, 5)], "elements of a are stored twice or not at all: those from 1 to 5"),
        ([(0, 0, 4)], "those from 0 to 4 of 5 follow"),
        ([(0, 0, 6)], "those from 0 to 6 of 5 follow"),
        ([(0, 0, 5), (0, 0, 5)], "elements of a are stored twice"),
        ([], "no element of a is stored"),
    ],
)
def test_elements_that_are_missing_or_there_twice_are_refused(
    rows: list[tuple[int, int, int]], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        placement_of([intervals((1, 0, 2)), intervals(*rows)], [5, 2], "ab")


# -- tables and placements that lie, under checksums that fit


def set_row(row: int, **values: int) -> Callable[[Any, list[bytes]], None]:
    def change(table: Any, digests: list[bytes]) -> None:
        for column, value in values.items():
            table[row][column] = value

    return change


ROWS: dict[str, tuple[Callable[[Any, list[bytes]], Any], str]] = {
    "no such section": (set_row(1, section=6), "row 1 .* one of 6 sections"),
    "another section": (set_row(0, section=1), r"row 0 .* elements (of its|before those)"),
    "no elements": (lambda rows, _: rows["stop"].__setitem__(2, rows["start"][2]), "row 2 .* elements"),
    "too many elements": (set_row(0, stop=36), "row 0 .* elements of its tensor"),
    "numbers without end": (set_row(3, item=2**63), "row 3 .* 62 bits"),
    "an overflow": (set_row(3, item=2**62 - 1, item_nbytes=2**62 - 1), "row 3 .* an item inside"),
    "an item in the table": (set_row(-1, item_nbytes=2**40), "an item inside of the .* bytes before"),
    "a payload before its item": (set_row(2, payload=0), "row 2 .* a payload inside of its item"),
    "a payload that is too long": (set_row(2, item_nbytes=9), "row 2 .* a payload inside"),
    "rows backwards": (lambda rows, _: rows[::-1].copy(), "elements before those of the next row"),
    "a row twice": (
        lambda rows, digests: digests.insert(0, digests[0]) or np.insert(rows, 0, rows[0]),
        "row 0 .* elements before those of the next row",
    ),
    "a checksum too few": (lambda rows, digests: digests.pop() and None, "blocks, its table has the checksums of"),
    "a checksum too many": (lambda rows, digests: digests.append(b"0" * 16), "blocks, its table has the checksums of"),
    "a row too few": (lambda rows, digests: digests.pop(0) and rows[1:], "has no piece with element"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_a_table_that_contradicts_itself_is_refused_by_reading_and_found_by_verification(
    path: Path, case: str
) -> None:
    change, text = ROWS[case]
    files = read_files(path)
    name = "__0_0.distcp"
    edit_table(files, name, change)
    write_files(path, files)
    reader = CheckpointReader(path)
    with pytest.raises(CheckpointError, match=f"{name}.*{text}"):
        for tensor in reader.tensors.values():
            reader.read(tensor.name, Interval(0, tensor.numel))
    assert [damage.file for damage in verify(path)] == [name]


def test_pieces_with_the_same_bytes_are_refused(path: Path) -> None:
    files, name = read_files(path), "__0_0.distcp"
    rows, digests = table_of(files, name)
    for column in ("item", "item_nbytes"):
        rows[1][column] = rows[0][column]
    rows[1]["payload"] = rows[0]["payload"] + 1
    rows[1]["stop"] = rows[1]["start"] + 1
    put_table(files, name, rows, digests)
    write_files(path, files)
    with pytest.raises(CheckpointError, match=r"row 0 .* bytes that no other row has as well"):
        Pieces(path, read_manifest(path)).table(name)


@pytest.mark.parametrize("lie", [{"pieces": 1}, {"blocks": 1}, {"pieces": 2, "blocks": 40}])
def test_counts_that_lie_are_refused(path: Path, lie: dict[str, int]) -> None:
    files, name = read_files(path), "__0_0.distcp"
    put_table(files, name, *table_of(files, name), **lie)
    write_files(path, files)
    with pytest.raises(CheckpointError, match=f"{name} (is damaged|contradicts itself)"):
        Pieces(path, read_manifest(path)).table(name)
    assert [damage.file for damage in verify(path)] == [name]


def of_two_parts(manifest: Manifest) -> int:
    """The first row of a section with several parts."""
    return next(it.first for it in manifest.sections if it.parts > 1)


PLACES: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "a file that is not there": (lambda rows, at: rows["file"].__setitem__(at, 3), "contradicts"),
    "another start": (lambda rows, at: rows["start"].__setitem__(at, 1), "contradicts"),
    "a start of another part": (
        lambda rows, at: rows["start"].__setitem__(at + 1, rows["start"][at + 1] + 1),
        "has no piece with element",
    ),
    "a start twice": (lambda rows, at: rows["start"].__setitem__(at + 1, 0), "contradicts"),
    "a start without end": (lambda rows, at: rows["start"].__setitem__(at + 1, 2**64 - 1), "contra"),
    "another file": (
        lambda rows, at: rows["file"].__setitem__(at, (rows["file"][at] + 1) % 3),
        "has no piece with element 0 of model.0, which lies there by placement.bin",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_a_placement_that_lies_is_refused_by_reading_and_found_by_verification(
    path: Path, case: str
) -> None:
    change, text = PLACES[case]
    manifest, files = read_manifest(path), read_files(path)
    edit_placement(files, lambda rows: change(rows, of_two_parts(manifest)))
    write_files(path, files)
    reader = CheckpointReader(path)
    with pytest.raises(CheckpointError, match=text):
        reader.read(NAMES[0], Interval(0, 35))
    assert [damage.file for damage in verify(path)] == [PLACEMENT]


def test_a_placement_that_names_parts_of_a_piece_is_refused(path: Path) -> None:
    """Else one piece could be read any number of times."""
    files = read_files(path)
    manifest = read_manifest(path)
    number = next(at for at, it in enumerate(manifest.sections) if it.parts > 2 and it.numel > 99)
    first = manifest.sections[number].first

    def change(rows: Any) -> None:
        rows["start"][first + 1] = 1

    edit_placement(files, change)
    write_files(path, files)
    with pytest.raises(CheckpointError, match="has no piece with element"):
        CheckpointReader(path).read(NAMES[number], Interval(0, 99))


@pytest.mark.parametrize("name", ["__0_0.distcp", PLACEMENT])
def test_a_changed_byte_of_a_table_or_the_placement_is_named_with_its_bytes(
    path: Path, name: str
) -> None:
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)
    reader = CheckpointReader(path)
    with pytest.raises(
        DamagedCheckpointError,
        match=rf"{name} is damaged: bytes [\d,]+ to [\d,]+, .*, have checksum \w+, expected \w+",
    ):
        for tensor in reader.tensors.values():
            reader.read(tensor.name, Interval(0, tensor.numel))


def test_a_table_of_holes_takes_no_memory(path: Path) -> None:
    files, name = read_files(path), "__0_0.distcp"
    put_table(files, name, *table_of(files, name), pieces=2**34)
    nbytes = 2**40

    def grow(manifest: Any) -> None:
        manifest["files"][name][0] = nbytes

    edit_manifest(files, grow)
    write_files(path, files)
    os.truncate(path / name, nbytes)
    with pytest.raises(DamagedCheckpointError, match=r"bytes of content, found a hole"):
        Pieces(path, read_manifest(path)).table(name)
