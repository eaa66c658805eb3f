"""What ranks write is put together by rank 0, which refuses what does not make whole tensors once."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardeddp.checkpoint.snapshot import HostMemory, Share, Snapshot
from shardeddp.checkpoint.write import write_checkpoint
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval
from support.host_groups import all_ranks
from support.tables import pieces_of
from support.torture_saves import ROW, run_of, snapshot_of, step_of
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def moved(snapshot: Snapshot, start: int, stop: int) -> Snapshot:
    """Another interval of the first tensor, on this rank."""
    elements = torch.zeros(stop - start, dtype=torch.float64)
    first = Share(0, Interval(start, stop), elements, True)
    return replace(snapshot, shares=[first, *snapshot.shares[1:]])


CASES: dict[str, tuple[Any, str]] = {
    "another layout": (
        lambda it: replace(it, layout=b"other"),
        r"the ranks do not save the same sharded tensors: others than rank 0 on ranks 1\. ",
    ),
    "elements twice": (
        lambda it: moved(it, ROW, 4 * ROW),
        r"elements of model\.weight_0 are stored twice or not at all: those from 64 to 256 of 256",
    ),
    "a gap": (lambda it: moved(it, 2 * ROW + 3, 4 * ROW), r"those from 131 to 256 of 256 follow"),
    "no end": (lambda it: moved(it, 2 * ROW, 3 * ROW), r"those from 128 to 192 of 256 follow"),
    "too many": (lambda it: moved(it, 2 * ROW, 5 * ROW), r"expected an interval inside"),
}


def save_wrong(path: str, case: str) -> str:
    rank, group = dist.get_rank(), all_ranks()
    snapshot = snapshot_of(1, rank, 2)
    if rank == 1:
        snapshot = CASES[case][0](snapshot)
    with pytest.raises((CheckpointError, RuntimeError)) as caught:
        write_checkpoint(snapshot, Path(path), run_of(1, 2), group, CheckpointOptions())
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_make_whole_tensors_is_not_saved(
    world: Worlds, tmp_path: Path, case: str
) -> None:
    first, second = world(2).run(save_wrong, str(tmp_path / "a.ckpt"), case)
    assert first == second
    assert re.search(CASES[case][1], first), first
    assert os.listdir(tmp_path) == []


def save_replicas(path: str, differs: bool) -> str:
    """Two replicas of all elements; each writes one of two tensors."""
    rank, group = dist.get_rank(), all_ranks()
    snapshot = snapshot_of(3, 0, 1)
    shares = [replace(it, written=it.section == rank) for it in snapshot.shares]
    if differs and rank == 1:
        shares[0].elements[70] += 1
    snapshot = replace(snapshot, shares=shares, part=0)
    try:
        write_checkpoint(snapshot, Path(path), run_of(3, 2), group, CheckpointOptions())
    except CheckpointError as error:
        return str(error)
    return ""


def test_replicas_write_in_turn_and_are_compared(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    assert world(2).run(save_replicas, str(path), False) == ["", ""]
    assert step_of(path) == 3
    files = [{it.item.file for it in pieces_of(path, f"model.weight_{n}")} for n in range(2)]
    assert files == [{"__0_0.distcp"}, {"__1_0.distcp"}]
    first, second = world(2).run(save_replicas, str(tmp_path / "b.ckpt"), True)
    assert first == second
    expected = "replicas differ: model.weight_0, elements from 0 to 256, is not the same on rank 1"
    assert first.startswith(f"{expected} as on rank 0")
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_copies_lie_in_chunks_and_their_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardeddp.checkpoint.snapshot.CHUNK_NBYTES", 256)
    memory = HostMemory()
    tensors = [torch.randn(numel) for numel in (10, 30, 0, 100, 7, 50)]
    copies = memory.copies(tensors)
    torch.testing.assert_close(copies, tensors, rtol=0, atol=0)
    storages = {
        copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in copies
    }
    assert sorted(storages.values()) == [64, 192, 256, 448]
    again = memory.copies([tensor + 1 for tensor in tensors[:4]])
    assert [it.data_ptr() for it in again] == [it.data_ptr() for it in copies[:4]]
    larger = [torch.randn(200), *tensors]
    torch.testing.assert_close(memory.copies(larger), larger, rtol=0, atol=0)
