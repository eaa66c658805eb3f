"""Checkpoints of other tools are read as they were written, or refused: whole and without running anything."""

import io
import itertools
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardeddp.checkpoint.import_foreign import ForeignCheckpoint, parse_index
from shardeddp.checkpoint.verify import verify
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval
from support import foreign
from support.hostile import Bait
from support.hostile_directories import (
    CASES,
    DATA,
    OBJECT,
    WEIGHT,
    edit,
    info_of,
    replace_item,
    write_honest,
)
from world import Worlds

TESTS = Path(__file__).resolve().parents[1]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.contiguous().flatten().view(torch.uint8))


def check_intervals(
    checkpoint: ForeignCheckpoint, name: str, expected: torch.Tensor, count: int = 40
) -> None:
    """Random intervals of a tensor are the slices of the whole one."""
    tensor = checkpoint.tensors[name]
    assert (tensor.shape, tensor.dtype, tensor.name) == (
        tuple(expected.shape),
        expected.dtype,
        name,
    )
    flat = expected.contiguous().flatten()
    picks = [sorted(random.choices(range(flat.numel() + 1), k=2)) for _ in range(count)]
    for start, stop in [(0, flat.numel()), (0, 0), (flat.numel(), flat.numel()), *picks]:
        assert_same(checkpoint.read(name, Interval(start, stop)), flat[start:stop])
    assert verify(checkpoint.path) == []


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """A small checkpoint that nobody has touched."""
    write_honest(tmp_path / "honest")
    return tmp_path / "honest"


# -- as others write them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("root", "dim"), [("model", None), ("model", 0), ("model", 1), ("state_dict", 0), (None, 1)]
)
def test_what_two_ranks_saved_is_read_in_any_interval(
    world: Worlds, tmp_path: Path, root: str | None, dim: int | None
) -> None:
    world(2).run(foreign.save_tensors, str(tmp_path), root, dim)
    checkpoint = ForeignCheckpoint(tmp_path)
    expected = foreign.tensors()
    assert set(checkpoint.tensors) == {f"model.{name}" for name in expected}
    for name, tensor in expected.items():
        check_intervals(checkpoint, f"model.{name}", tensor)
    if dim is not None:
        assert len(checkpoint.tensors["model.cube"].pieces) == 2
    if root:
        assert checkpoint.read_object("optimizer_0.param_groups.0.betas") == (0.9, 0.99)
    assert checkpoint.meta == {}


def test_what_lightning_saved_from_a_sharded_model_is_read(world: Worlds, tmp_path: Path) -> None:
    expected = world(2).run(foreign.train_model_parallel, str(tmp_path / "it"))[0]
    checkpoint = ForeignCheckpoint(tmp_path / "it")
    assert set(expected) <= set(checkpoint.tensors)
    assert len(checkpoint.tensors["model.layers.0.weight"].pieces) == 2
    for name, tensor in expected.items():
        check_intervals(checkpoint, name, tensor)
    lr = {checkpoint.read_object(name) for name in checkpoint.objects if name.endswith(".lr")}
    assert lr == {1e-2}
    assert (checkpoint.meta["epoch"], checkpoint.meta["hyper_parameters"]) == (
        2,
        {"width": 5, "names": ["a"]},
    )
    stock = torch.load(tmp_path / "it" / "meta.pt", weights_only=True)
    assert repr(checkpoint.meta) == repr(stock)
    assert any("ModelCheckpoint" in name for name in checkpoint.meta["callbacks"])


def test_a_checkpoint_as_fsdp_strategy_writes_it_is_read(honest: Path) -> None:
    checkpoint = ForeignCheckpoint(honest)
    assert list(checkpoint.tensors) == [
        "model.weight",
        "model.bias",
        "optimizer_0.state.weight.exp_avg",
    ]
    assert checkpoint.tensors["optimizer_0.state.weight.exp_avg"].path == (
        "optimizer_0",
        "state",
        "weight",
        "exp_avg",
    )
    assert {name: checkpoint.read_object(name) for name in checkpoint.objects} == {
        "optimizer_0.param_groups.0.lr": 0.1,
        "optimizer_0.param_groups.0.eps": 1e-8,
    }
    assert checkpoint.meta == {"epoch": 1, "callbacks": {"early": {"best": torch.tensor(0.5)}}}
    check_intervals(checkpoint, "model.weight", torch.arange(24.0).reshape(6, 4))


def test_a_link_to_a_directory_may_be_opened(honest: Path) -> None:
    (honest.parent / "last.ckpt").symlink_to(honest)
    assert ForeignCheckpoint(honest.parent / "last.ckpt").meta["epoch"] == 1


def test_an_interval_outside_of_the_tensor_is_the_callers_mistake(honest: Path) -> None:
    with pytest.raises(ValueError, match="inside the 24 elements"):
        ForeignCheckpoint(honest).read(WEIGHT, Interval(0, 25))


# -- damage


def test_only_the_pieces_that_overlap_are_read(world: Worlds, tmp_path: Path) -> None:
    world(2).run(foreign.save_tensors, str(tmp_path), "model", 0)
    checkpoint = ForeignCheckpoint(tmp_path)
    (tmp_path / "__1_0.distcp").write_bytes(bytes((tmp_path / "__1_0.distcp").stat().st_size))
    cube = foreign.tensors()["cube"].flatten()
    assert torch.equal(
        checkpoint.read("model.cube", Interval(3, 60)), cube[3:60]
    )  # 4 of 7 rows: elements 0 to 59
    with pytest.raises(
        CheckpointError, match=r"piece of 'model\.cube', bytes [\d,]+ to [\d,]+ of __1_0\.distcp"
    ):
        checkpoint.read("model.cube", Interval(3, 61))


@pytest.mark.slow
def test_a_flipped_bit_is_refused_or_changes_nothing(honest: Path) -> None:
    random.seed(0)
    clean = (honest / DATA).read_bytes()
    checkpoint = ForeignCheckpoint(honest)
    expected = {
        name: checkpoint.read(name, Interval(0, math.prod(it.shape)))
        for name, it in checkpoint.tensors.items()
    }
    refused = 0
    for _ in range(400):
        data = bytearray(clean)
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        (honest / DATA).write_bytes(data)
        try:
            checkpoint = ForeignCheckpoint(honest)
            for name, tensor in expected.items():
                assert_same(checkpoint.read(name, Interval(0, len(tensor))), tensor)
        except CheckpointError:
            refused += 1
    assert (
        refused > 20
    )  # most bytes of so small a checkpoint are padding, and objects, which are not read here


def test_damage_names_the_directory_the_tensor_the_bytes_and_both_checksums(honest: Path) -> None:
    CASES["archive: a flipped bit"](honest, honest)
    with pytest.raises(CheckpointError) as caught:
        ForeignCheckpoint(honest).read(WEIGHT, Interval(0, 1))
    text = str(caught.value)
    assert all(
        part in text
        for part in (str(honest), WEIGHT, DATA, "expected CRC 6edc4182", "found ", "96 bytes")
    )


def test_a_checkpoint_without_crcs_is_read(honest: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        stream = io.BytesIO()
        torch.save(torch.arange(24.0).reshape(6, 4) + 1, stream)
    finally:
        torch.serialization.set_crc32_options(True)
    replace_item(honest, WEIGHT, stream.getvalue())
    assert ForeignCheckpoint(honest).read(WEIGHT, Interval(0, 2)).tolist() == [1.0, 2.0]


def test_a_file_that_changes_while_it_is_read_is_refused(honest: Path) -> None:
    checkpoint = ForeignCheckpoint(honest)
    os.truncate(honest / DATA, 100)
    with pytest.raises(CheckpointError, match="has changed since"):
        checkpoint.read(WEIGHT, Interval(0, 1))


# -- what the index says


def index_of(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bytes:
    """The index of one tensor in these boxes, with bytes for each."""
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.uint8), torch.Size(shape), chunks)
    keys = [MetadataIndex("x", chunk.offsets, number) for number, chunk in enumerate(chunks)]
    stored = {key: _StorageInfo(DATA, 10_000 * number, 10_000) for number, key in enumerate(keys)}
    return pickle.dumps(Metadata({"x": entry}, planner_data={"x": ("x",)}, storage_data=stored))


def divisions(
    shape: tuple[int, ...], count: int
) -> Iterator[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Random ways to cut a tensor into boxes: one of them is cut in two, several times."""
    for _ in range(count):
        found = [((0,) * len(shape), shape)]
        for _ in range(random.randint(0, 12)):
            at, sizes = found.pop(random.randrange(len(found)))
            dim = random.randrange(len(shape))
            cut = random.randint(1, max(1, sizes[dim] - 1))
            lower = (*sizes[:dim], min(cut, sizes[dim]), *sizes[dim + 1 :])
            upper = (*sizes[:dim], sizes[dim] - lower[dim], *sizes[dim + 1 :])
            found += (
                [(at, lower), ((*at[:dim], at[dim] + cut, *at[dim + 1 :]), upper)]
                if upper[dim]
                else [(at, lower)]
            )
        yield found


def test_boxes_are_accepted_exactly_if_they_cover_the_tensor_once() -> None:
    random.seed(0)
    files = {DATA: 1_000_000}
    for shape in ((9,), (5, 6), (3, 4, 5), (2, 3, 2, 3)):
        for division in divisions(shape, 40):
            tensor = parse_index(index_of(shape, division), files).tensors["x"]
            assert [(piece.box.offsets, piece.box.sizes) for piece in tensor.pieces] == division
            changed = list(division)
            _, sizes = changed.pop(random.randrange(len(changed)))
            if random.random() < 0.5:  # another box of as many elements, or none
                spots = itertools.product(
                    *(range(n - size + 1) for n, size in zip(shape, sizes, strict=True))
                )
                taken = {at for at, _ in division}
                changed += [(spot, sizes) for spot in spots if spot not in taken][:1]
            with pytest.raises(CheckpointError, match="do not cover its shape"):
                parse_index(index_of(shape, changed), files)


def test_the_index_is_read_as_if_it_had_been_run(honest: Path) -> None:
    data, files = (honest / ".metadata").read_bytes(), {DATA: (honest / DATA).stat().st_size}
    assert parse_index(data, files) == parse_index(data, files, trust_pickle=True)


def test_an_empty_box_beside_the_others_is_no_overlap() -> None:
    tensor = parse_index(
        index_of((2, 3), [((0, 0), (2, 3)), ((2, 0), (0, 3))]), {DATA: 20_000}
    ).tensors["x"]
    assert len(tensor.pieces) == 1


def test_a_directory_without_an_index_is_none_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"has no \.metadata: expected a directory that torch"
    ):
        ForeignCheckpoint(tmp_path)


def test_two_values_of_one_name_are_refused(honest: Path) -> None:
    def change(metadata: Metadata) -> None:
        _rename(metadata, WEIGHT, ("state_dict", "x"))
        _rename(metadata, "model.bias", ("model.x",))

    edit(honest, change)
    with pytest.raises(CheckpointError, match="same name under 'model'"):
        ForeignCheckpoint(honest)


def _rename(metadata: Metadata, old: str, path: tuple[str, ...]) -> None:
    new = ".".join(path)
    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
    del metadata.planner_data[old]
    metadata.planner_data[new] = path
    info = info_of(metadata, old)
    key = next(key for key in metadata.storage_data if key.fqn == old)
    del metadata.storage_data[key]
    metadata.storage_data[MetadataIndex(new, key.offset)] = info


# -- what runs code


def test_a_pickle_that_needs_trust_is_run_only_with_trust_and_says_so(
    honest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(honest, lambda metadata: setattr(metadata, "storage_meta", tmp_path.joinpath))
    with pytest.raises(
        CheckpointError, match=r"\.metadata asks for the global '.*trust_pickle=True"
    ):
        ForeignCheckpoint(honest)
    assert caplog.records == []
    checkpoint = ForeignCheckpoint(honest, trust_pickle=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(honest) in caplog.text and "are run" in caplog.text
    assert checkpoint.read_object(OBJECT) == 0.1
    assert checkpoint.meta["epoch"] == 1


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_with_trust_the_objects_and_meta_are_run_too(honest: Path, tmp_path: Path) -> None:
    torch.save({"x": Bait(tmp_path / "marker")}, honest / "meta.pt")
    assert set(ForeignCheckpoint(honest, trust_pickle=True).meta) == {"x"}
    assert (tmp_path / "marker").exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_every_hostile_checkpoint_is_refused_at_little_cost_and_runs_nothing(
    tmp_path: Path,
) -> None:
    write_honest(tmp_path / "honest")
    (tmp_path / "markers").mkdir()
    folders = {f"{number:03d}": name for number, name in enumerate(CASES)}
    for folder, name in folders.items():
        shutil.copytree(tmp_path / "honest", tmp_path / "all" / folder)
        CASES[name](tmp_path / "all" / folder, tmp_path / "markers" / folder)
    # The first reading makes what is made once in a process.
    shutil.copytree(tmp_path / "honest", tmp_path / "all" / "!honest")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(TESTS / "support" / "hostile_reader.py"), str(tmp_path / "all")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    first, *reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert (first["name"], first["outcome"]) == ("!honest", "read")
    assert [report["name"] for report in reports] == list(folders)
    assert len(reports) > 100
    read = [
        folders[it["name"]]
        for it in reports
        if not it["outcome"].startswith("refused: " + str(tmp_path / "all"))
    ]
    assert read == []
    assert [
        folders[it["name"]] for it in reports if it["seconds"] > 1 or it["nbytes"] > 100e6
    ] == []
    assert list((tmp_path / "markers").iterdir()) == []
