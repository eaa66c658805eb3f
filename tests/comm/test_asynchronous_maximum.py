"""The asynchronous maximum and the store barrier: the highest number of all ranks, and whether all have come."""

import time

import pytest
import torch.distributed as dist

from shardeddp.comm.agreement import AsyncMaximum
from shardeddp.comm.store import StoreBarrier
from support.host_groups import all_ranks
from world import on_ranks


@on_ranks(3)
def test_the_highest_number_counts_and_only_once() -> None:
    maximum = AsyncMaximum(all_ranks())
    assert maximum.result() == 0
    maximum.contribute(2 if dist.get_rank() == 1 else 0)
    assert maximum.result() == 2
    assert maximum.result() == 0
    maximum.contribute(0)
    assert maximum.result() == 0


@on_ranks(1)
def test_a_rank_that_is_alone_asks_nobody() -> None:
    maximum = AsyncMaximum(all_ranks())
    maximum.contribute(1)
    maximum.contribute(2)
    assert maximum.result() == 2
    assert maximum.result() == 0


@on_ranks(3)
def test_ranks_that_come_to_one_place_are_together() -> None:
    barrier = StoreBarrier(dist.get_rank(), 3)
    time.sleep(0.2 * dist.get_rank())
    assert barrier.wait_for_all("batch 1", patience_s=10)
    assert not barrier.wait_for_all(f"batch {dist.get_rank()}", patience_s=10)
    assert barrier.wait_for_all("batch 3", patience_s=10)
    assert StoreBarrier(dist.get_rank(), 3).wait_for_all("batch 3", patience_s=10)


@pytest.mark.slow
@on_ranks(3)
def test_a_rank_that_comes_too_late_finds_it_decided() -> None:
    barrier = StoreBarrier(dist.get_rank(), 3)
    late = dist.get_rank() == 2
    if late:
        time.sleep(1.0)
    began = time.monotonic()
    assert not barrier.wait_for_all("batch 1", patience_s=60 if late else 0.3)
    assert time.monotonic() - began < 30, "the late rank has waited"
