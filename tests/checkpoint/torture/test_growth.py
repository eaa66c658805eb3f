"""A save takes little memory beside what it saves, and saves leave nothing behind in the process."""

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from shardeddp.checkpoint.location import LocalPath
from shardeddp.checkpoint.snapshot import Snapshot
from shardeddp.checkpoint.write import Saver
from shardeddp.comm.host_group import HostGroup
from shardeddp.config import CheckpointOptions
from support.host_groups import all_ranks
from support.hostile_reader import peak, reset_peak
from support.torture_saves import ROW, run_of, save, snapshot_of, step_of
from world import Worlds

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="memory and descriptors are read from /proc"
    ),
]

TENSORS, ROWS = 5, 80_000
CHUNK_NBYTES = ROWS * ROW * 8  # 41 MB, of which a rank of two holds half
SLACK_NBYTES = 6_000_000  # indexes, and what the allocator keeps


def peak_of(action: Callable[[], object]) -> int:
    """The most memory beyond what is in use now."""
    gc.collect()
    before = reset_peak()
    action()
    return peak() - before


def peaks(folder: str) -> tuple[int, int]:
    """Of a save that waits, and of one in a thread, of 205 MB in five tensors over two ranks."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), all_ranks()
    save(Path(folder) / "small.ckpt", 1, rows=4)  # what is loaded once only
    snapshot = snapshot_of(1, rank, size, ROWS, TENSORS)
    waits = peak_of(lambda: save_through(Saver(CheckpointOptions()), snapshot, folder, group))
    in_thread = peak_of(
        lambda: save_through(Saver(CheckpointOptions(asynchronous=True)), snapshot, folder, group)
    )
    return waits, in_thread


def save_through(saver: Saver, snapshot: Snapshot, folder: str, group: HostGroup) -> None:
    saver.save(
        snapshot, LocalPath(folder, f"{snapshot.tree['global_step']}.ckpt"), run_of(1, 2), group
    )
    saver.wait()


@pytest.mark.slow
def test_a_save_takes_less_memory_than_two_chunks_and_one_in_a_thread_one_copy_of_the_shard(
    world: Worlds, tmp_path: Path
) -> None:
    shard = TENSORS * CHUNK_NBYTES // 2
    for waits, in_thread in world(2).run(peaks, str(tmp_path)):
        print(
            f"{waits / 1e6:.1f} MB for a save, {in_thread / 1e6:.1f} MB for one in a thread, shard {shard / 1e6:.1f} MB"
        )
        assert waits <= 2 * CHUNK_NBYTES // 2
        assert in_thread <= 1.1 * shard
        assert in_thread > 0.9 * shard, (
            "a save in a thread has a copy of its own, or this measures nothing"
        )


def usage() -> tuple[int, int, int]:
    """Descriptors, threads, bytes of memory."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident


def save_often(
    folder: str, saves: int, asynchronous: bool
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """What the process uses after a few saves, and after many."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), all_ranks()
    saver = Saver(CheckpointOptions(asynchronous=asynchronous))
    target = LocalPath(folder, "last.ckpt")
    early, warm = usage(), max(20, saves // 5)
    for step in range(1, saves + warm + 1):
        saver.save(snapshot_of(step, rank, size, 64), target, run_of(step, size), group)
        if step == warm:
            saver.wait()
            early = usage()
    saver.wait()
    assert step_of(target) == saves + warm
    assert os.listdir(folder) == ["last.ckpt"]
    return early, usage()


def check_growth(world: Worlds, folder: Path, saves: int, asynchronous: bool) -> None:
    for early, late in world(2).run(save_often, str(folder), saves, asynchronous, timeout_s=250):
        print(
            f"descriptors, threads, bytes after the first saves: {early}; after {saves} more: {late}"
        )
        assert late[:2] == early[:2]
        assert late[2] <= 1.01 * early[2]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_nothing_grows_over_saves(world: Worlds, tmp_path: Path, asynchronous: bool) -> None:
    check_growth(world, tmp_path, 50, asynchronous)


@pytest.mark.torture
@pytest.mark.timeout(300)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_nothing_grows_over_500_saves(world: Worlds, tmp_path: Path, asynchronous: bool) -> None:
    check_growth(world, tmp_path, 500, asynchronous)
