"""A vote gives every rank the highest number that any has cast; a muster finds out soon whether all have come."""

import time

import torch.distributed as dist

from shardeddp.comm.agreement import Vote
from shardeddp.comm.store import Muster
from world import on_ranks


@on_ranks(3)
def test_the_highest_number_counts_and_only_once() -> None:
    vote = Vote(dist.group.WORLD)
    assert vote.count() == 0
    vote.cast(2 if dist.get_rank() == 1 else 0)
    assert vote.count() == 2
    assert vote.count() == 0
    vote.cast(0)
    assert vote.count() == 0


@on_ranks(2)
def test_a_closed_vote_leaves_nothing_to_the_threads_of_the_transport() -> None:
    for _ in range(200):  # a process that ends while such a thread holds a tensor is aborted now and then
        vote = Vote(dist.group.WORLD)
        vote.cast(dist.get_rank())
        assert vote.close() == 1
        assert vote._ballot._use_count() == 1


@on_ranks(3)
def test_ranks_that_come_to_one_place_are_together() -> None:
    muster = Muster(dist.get_rank(), 3)
    time.sleep(0.2 * dist.get_rank())
    assert muster.all_here("batch 1", patience_s=10)
    assert not muster.all_here(f"batch {dist.get_rank()}", patience_s=10)
    assert muster.all_here("batch 3", patience_s=10)
    assert Muster(dist.get_rank(), 3).all_here("batch 3", patience_s=10)


@on_ranks(3)
def test_a_rank_that_comes_too_late_finds_it_decided() -> None:
    muster = Muster(dist.get_rank(), 3)
    if dist.get_rank() == 2:
        time.sleep(1.0)
    began = time.monotonic()
    assert not muster.all_here("batch 1", patience_s=0.3)
    assert time.monotonic() - began < 0.8
