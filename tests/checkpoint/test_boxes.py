"""Any box of a tensor is saved by the ranks that have it, and read back by whoever wants another."""

import json
import re
from collections import OrderedDict
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardeddp.checkpoint.contents import read_contents
from shardeddp.checkpoint.import_foreign import ForeignCheckpoint
from shardeddp.checkpoint.manifest import manifest_from_bytes, manifest_to_bytes
from shardeddp.checkpoint.read import CheckpointReader
from shardeddp.checkpoint.snapshot import take_snapshot
from shardeddp.checkpoint.verify import tensor_rows, verify
from shardeddp.checkpoint.write import write_checkpoint
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Box, Interval
from shardeddp.plan.topology import Topology
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor
from support.host_groups import all_ranks
from support.torture_saves import run_of
from world import Worlds

pytestmark = pytest.mark.timeout(120)

WHOLE = {
    "columns": torch.arange(35.0).view(5, 7),
    "rows": torch.arange(100.0, 128.0).view(7, 4),
    "middle": torch.arange(200.0, 260.0).view(3, 5, 4),
}
CUT_DIM = {"columns": 1, "rows": 0, "middle": 1}


def cut_in_two(shape: tuple[int, ...], dim: int) -> tuple[Box, Box]:
    """Two boxes that are not equally large."""
    first = list(shape)
    first[dim] = shape[dim] // 2
    second, offsets = list(shape), [0] * len(shape)
    second[dim], offsets[dim] = shape[dim] - first[dim], first[dim]
    return Box((0,) * len(shape), tuple(first)), Box(tuple(offsets), tuple(second))


def part_of(name: str, rank: int, mesh: Any) -> ShardTensor:
    """What one of two ranks has: a box for itself."""
    whole = WHOLE[name]
    own = cut_in_two(tuple(whole.shape), CUT_DIM[name])
    spec = ShardSpec(
        fqn=name,
        shape=whole.shape,
        intervals=(Interval(0, own[rank].numel),),
        mesh=mesh,
        boxes=tuple((box,) for box in own),
        tensor_rank=rank,
    )
    return ShardTensor(spec.localize(whole).clone(), spec)


def save(path: str, tied: bool = False) -> None:
    rank = dist.get_rank()
    slices = SimpleNamespace(rank=0, ranks=(rank,), size=1)
    mesh: Any = SimpleNamespace(
        rank=rank, slices=slices, topology=Topology(world_size=2, shard_size=2), experts=None
    )
    model = OrderedDict((name, part_of(name, rank, mesh)) for name in WHOLE)
    if tied:
        model["tied"] = model["columns"].detach()
    checkpoint = {"global_step": 3, "epoch": 0, "state_dict": model, "optimizer_states": []}
    snapshot = take_snapshot(checkpoint, [], mesh)
    write_checkpoint(snapshot, Path(path), run_of(3, 2), all_ranks(), CheckpointOptions())


@pytest.fixture(scope="module")
def saved(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("boxes") / "a.ckpt"
    world(2).run(save, str(path))
    return path


def all_boxes(shape: tuple[int, ...]) -> list[Box]:
    sides = [
        [(at, size) for at in range(length) for size in range(1, length - at + 1)]
        for length in shape
    ]
    return [Box(*zip(*corner, strict=True)) for corner in product(*sides)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE])
def test_every_interval_of_what_was_saved_in_boxes_is_read(saved: Path, name: str) -> None:
    reader, flat = CheckpointReader(saved), WHOLE[name].reshape(-1)
    for start in range(flat.numel() + 1):
        for stop in range(start, flat.numel() + 1):
            found = reader.read(f"model.{name}", Interval(start, stop))
            assert torch.equal(found, flat[start:stop])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE])
def test_own_and_foreign_readers_read_every_box(saved: Path, name: str) -> None:
    own, foreign, whole = CheckpointReader(saved), ForeignCheckpoint(saved), WHOLE[name]
    for box in all_boxes(tuple(whole.shape))[::3]:
        expected = whole[box.slices].reshape(-1)
        part = Interval(box.numel // 3, box.numel)
        for reader in (own, foreign):
            found = reader.read(f"model.{name}", part, box)
            assert torch.equal(found, expected[part.start :]), (box, reader)


def test_tied_tensors_in_boxes_are_stored_once(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    world(2).run(save, str(path), True)
    reader = CheckpointReader(path)
    assert reader.tensors["model.tied"].sections == reader.tensors["model.columns"].sections
    assert len(reader.manifest.sections) == 2 * len(WHOLE)
    state = read_contents(path).checkpoint["state_dict"]
    assert torch.equal(state["tied"].whole(), WHOLE["columns"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_boxes_by_their_metadata(saved: Path) -> None:
    state = {"model": {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}}
    dcp.load(state, checkpoint_id=saved, no_dist=True)
    for name, whole in WHOLE.items():
        assert torch.equal(state["model"][name], whole)


def test_tools_know_boxes(saved: Path) -> None:
    assert verify(saved) == []
    rows = {row.name: row for row in tensor_rows(CheckpointReader(saved).manifest)}
    assert rows["model.columns"].shape == (5, 7)


def test_a_shard_of_a_box_is_cut_from_the_whole_and_knows_its_place() -> None:
    slices = SimpleNamespace(rank=1, ranks=(1, 3), size=2)
    mesh: Any = SimpleNamespace(rank=3, slices=slices)
    whole = WHOLE["columns"]
    own = cut_in_two((5, 7), 1)
    spec = ShardSpec(
        fqn="columns",
        shape=whole.shape,
        intervals=(Interval(0, 9), Interval(9, own[1].numel)),
        mesh=mesh,
        boxes=tuple((box,) for box in own),
        tensor_rank=1,
    )
    shard = ShardTensor(spec.localize(whole), spec)
    assert torch.equal(shard.to_local(), whole[:, 3:].reshape(-1)[9:])
    seen = torch.cat(
        [
            whole[
                tuple(map(slice, it.offsets, map(sum, zip(it.offsets, it.sizes, strict=True))))
            ].reshape(-1)
            for it in shard.__create_chunk_list__()
        ]
    )
    assert torch.equal(seen, shard.to_local())


def spoiled(saved: Path, change: Any) -> str:
    """The manifest as its reader takes it, after a change to its sections."""
    data = manifest_to_bytes(CheckpointReader(saved).manifest)
    start = data.index(b'"manifest":') + len(b'"manifest":')
    document = json.loads(data[start:-1])
    change(document["sections"])
    body = json.dumps(document, separators=(",", ":")).encode()
    digest = sha256(body).hexdigest().encode()
    with pytest.raises(CheckpointError) as caught:
        manifest_from_bytes(b'{"sha256":"%s",\n"manifest":%s}' % (digest, body))
    return str(caught.value)


def overlap(sections: list[Any]) -> None:
    sections[1][5] = [0, 2]


def leave_out(sections: list[Any]) -> None:
    sections[1][0] = []


def leave_the_tensor(sections: list[Any]) -> None:
    sections[1][5] = [0, 4]


def change_dtype(sections: list[Any]) -> None:
    sections[1][1] = "int32"


def lose_a_place(sections: list[Any]) -> None:
    del sections[1][5:]


CASES = {
    overlap: "do not cover its shape",
    leave_out: "do not cover its shape",
    leave_the_tensor: "is no box of a tensor of shape",
    change_dtype: "expected different names",
    lose_a_place: "expected different names",
}


@pytest.mark.parametrize("change", CASES)
def test_boxes_that_do_not_make_a_whole_tensor_are_refused(saved: Path, change: Any) -> None:
    assert re.search(CASES[change], spoiled(saved, change))
