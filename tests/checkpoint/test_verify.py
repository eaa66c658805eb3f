"""Verification finds every changed byte, says where it is, and reads nothing twice."""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardeddp.checkpoint.find import checkpoints_in, read_manifest
from shardeddp.checkpoint.full_read import Damage
from shardeddp.checkpoint.manifest import (
    BLOCK_NBYTES,
    DCP_METADATA,
    LIGHTNING_META,
    MANIFEST,
    PLACEMENT,
    STATE,
)
from shardeddp.checkpoint.verify import examine, newest_verified, verify
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval
from support.exporting import checkpoint, flip, put
from support.tables import edit_manifest, edit_table, pieces_of
from support.torture_mutations import read_files, write_files

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled, unavailable or uninitialized"
    ),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

DATA = "__0_0.distcp"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return put(tmp_path / "step=7.ckpt")


def only(damages: list[Damage]) -> Damage:
    assert len(damages) == 1, [str(damage) for damage in damages]
    return damages[0]


def test_a_whole_checkpoint_is_good_and_all_of_it_is_read_once(path: Path) -> None:
    done: list[int] = []
    total: list[int] = []
    found = examine(path, done.append, total.append)
    assert found.good
    assert (found.step, found.unchecked) == (7, [])
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    assert [sum(done)] == total == [found.nbytes] == [sum(sizes.values()) - sizes[MANIFEST]]


def test_a_changed_element_is_found_with_file_tensor_and_bytes(path: Path) -> None:
    piece = pieces_of(path, "model.net.scale")[0]
    flip(path / DATA, piece.payload + 3)
    damage = only(verify(path))
    assert (damage.file, damage.tensor) == (DATA, "model.net.scale")
    assert damage.where == Interval(piece.payload, piece.payload + 10)
    assert damage.expected == piece.checksums[0] != damage.found
    text = f"{DATA} bytes {piece.payload:,} to {piece.payload + 10:,} of model.net.scale: expected {damage.expected}"
    assert str(damage) == f"{text}, found {damage.found}"


def test_only_the_block_with_the_damage_is_named(tmp_path: Path) -> None:
    large = checkpoint(state_dict={"large": torch.zeros(BLOCK_NBYTES // 2)}, optimizer_states=[])
    path = put(tmp_path / "large.ckpt", large)
    start = pieces_of(path, "model.large")[0].payload
    flip(path / DATA, start + BLOCK_NBYTES)
    assert only(verify(path)).where == Interval(start + BLOCK_NBYTES, start + 2 * BLOCK_NBYTES)


def test_a_changed_byte_between_tensors_is_found(path: Path) -> None:
    piece = pieces_of(path, "model.net.scale")[0]
    flip(path / DATA, piece.payload - 5)
    damage = only(verify(path))
    assert (damage.file, damage.tensor, damage.where) == (DATA, "", None)
    assert "around its tensors" in str(damage)


def test_a_changed_byte_of_a_table_is_found_with_what_depends_on_it(path: Path) -> None:
    table = read_manifest(path).table_of(DATA)
    flip(path / DATA, table.start + 30)
    damage = only(verify(path))
    assert damage.file == DATA
    assert f"bytes {table.start:,} to {table.stop:,}, its table of pieces, have" in damage.found
    assert "model.net.scale" in damage.found


def test_a_placement_that_says_otherwise_than_the_tables_is_found(path: Path) -> None:
    files = read_files(path)

    def exchange(rows: Any, digests: list[bytes]) -> None:
        """The values of two steps, which have one shape and dtype."""
        rows[[5, 7]] = rows[[7, 5]]
        rows["section"][[5, 7]] = rows["section"][[7, 5]] + 100

    edit_table(files, DATA, exchange)
    write_files(path, files)
    damage = only(verify(path))
    assert damage.file == DATA
    assert "of its table of pieces was expected to have one of 10 sections" in damage.found


def test_the_index_of_dcp_may_be_made_later_and_is_not_checked_then(path: Path) -> None:
    files = read_files(path)
    edit_manifest(files, lambda manifest: manifest["files"].pop(DCP_METADATA))
    write_files(path, files)
    found = examine(path)
    assert (found.good, found.unchecked) == (True, [DCP_METADATA])
    (path / DCP_METADATA).unlink()
    assert examine(path).unchecked == []
    (path / DCP_METADATA).mkdir()
    assert only(verify(path)).file == DCP_METADATA
    (path / DCP_METADATA).rmdir()
    (path / DCP_METADATA).symlink_to(path / STATE)
    assert only(verify(path)).found == "a symbolic link"


@pytest.mark.parametrize("name", [STATE, DCP_METADATA, LIGHTNING_META, PLACEMENT, MANIFEST])
def test_a_changed_byte_of_another_file_is_found(path: Path, name: str) -> None:
    flip(path / name, 100)
    assert only(verify(path)).file == name


def test_no_changed_bit_goes_unseen(path: Path) -> None:
    draw = random.Random(3)
    files = sorted(path.iterdir())
    for _ in range(150):
        file = draw.choices(files, [it.stat().st_size for it in files])[0]
        before = file.read_bytes()
        flip(file, position := draw.randrange(len(before)))
        assert [damage.file for damage in verify(path)] == [file.name], position
        file.write_bytes(before)
    assert verify(path) == []


def cut(path: Path) -> None:
    data = (path / DATA).read_bytes()
    (path / DATA).write_bytes(data[: len(data) // 2])


def replace_by_link(path: Path) -> None:
    os.rename(path / DATA, path.parent / "elsewhere")
    os.symlink(path.parent / "elsewhere", path / DATA)


CHANGES: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda path: os.unlink(path / DATA), DATA, "no such file"),
    (replace_by_link, DATA, "symbolic link"),
    (lambda path: (path / "__1_0.distcp").write_bytes(b"x"), "__1_0.distcp", "an ordinary file"),
    (lambda path: (path / "notes").mkdir(), "notes", "a directory"),
    (lambda path: (path / STATE).write_bytes(b"{}"), STATE, "2 bytes"),
]


@pytest.mark.parametrize(("change", "file", "found"), CHANGES)
def test_a_file_that_does_not_belong_or_is_not_there_is_named(
    path: Path, change: Callable[[Path], object], file: str, found: str
) -> None:
    change(path)
    damage = only(verify(path))
    assert damage.file == file
    assert found in damage.found


def test_of_a_file_that_was_cut_short_the_tensors_that_are_lost_are_named(path: Path) -> None:
    manifest = read_manifest(path)
    cut(path)
    whole = manifest.files[DATA].nbytes
    first, lost = verify(path)
    assert (first.expected, first.found) == (f"a file of {whole:,} bytes", f"{whole // 2:,} bytes")
    assert lost.expected == "a table of its 9 pieces"
    assert "the end of the file" in lost.found
    named = "model.net.embed.weight, model.net.scale, model.net.count and 6 more"
    assert f"What it has of {named} cannot be checked" in lost.found


@pytest.mark.parametrize("name", ["nothing", "file", "empty"])
def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=f"{name} is no sharded checkpoint"):
        verify(tmp_path / name)


# -- checkpoints of another tool


def stock(path: Path) -> Path:
    dcp.save(
        {"model": {"weight": torch.randn(30, 5), "bias": torch.ones(5)}, "lr": 0.1},
        checkpoint_id=path,
        no_dist=True,
    )
    return path


def test_a_stock_checkpoint_is_checked_by_the_crcs_in_it(tmp_path: Path) -> None:
    found = examine(stock(tmp_path / "stock"))
    assert (found.good, found.unchecked) == (True, [DCP_METADATA])
    content = (found.path / DATA).read_bytes()
    flip(found.path / DATA, content.index(torch.ones(5).numpy().tobytes()) + 2)
    damage = only(verify(found.path))
    assert (damage.file, damage.tensor) == (DATA, "model.bias")
    assert damage.where is not None
    assert "CRC" in damage.found


def test_a_stock_checkpoint_whose_index_is_damaged_is_damaged(tmp_path: Path) -> None:
    path = stock(tmp_path / "stock")
    (path / DCP_METADATA).write_bytes((path / DCP_METADATA).read_bytes()[:-20])
    assert only(verify(path)).file == DCP_METADATA


def test_what_was_written_without_crcs_is_said_to_be_unchecked(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = stock(tmp_path / "stock")
    finally:
        torch.serialization.set_crc32_options(True)
    found = examine(path)
    assert found.good
    assert "model.weight" in found.unchecked


# -- several


def several(folder: Path) -> dict[int, Path]:
    return {step: put(folder / f"step={step}.ckpt", checkpoint(step)) for step in (1, 2, 3)}


def test_the_newest_checkpoint_that_verifies_is_found(tmp_path: Path) -> None:
    paths = several(tmp_path)
    assert newest_verified(tmp_path) == paths[3]
    flip(paths[3] / DATA, 700)
    assert newest_verified(tmp_path) == paths[2]
    assert newest_verified(tmp_path / "nowhere") is None


def test_a_search_that_takes_too_long_ends_in_all_threads(tmp_path: Path) -> None:
    several(tmp_path)
    before = threading.active_count()
    with pytest.raises(TimeoutError, match=r"not all checkpoints in .* in 0\.0 s"):
        newest_verified(tmp_path, within_s=0.0)
    assert threading.active_count() == before


def test_checkpoints_are_listed_newest_first_and_broken_ones_last(tmp_path: Path) -> None:
    paths = several(tmp_path)
    os.utime(paths[1])
    os.unlink(paths[2] / DATA)
    stock(tmp_path / "a stock one")
    (tmp_path / "no checkpoint").mkdir()
    assert checkpoints_in(tmp_path) == [paths[3], paths[1], tmp_path / "a stock one", paths[2]]


def test_a_checkpoint_without_its_manifest_is_damaged(path: Path) -> None:
    (path / MANIFEST).unlink()
    (found,) = verify(path)
    assert (found.file, found.found) == (MANIFEST, "nothing")
    assert newest_verified(path.parent) is None
