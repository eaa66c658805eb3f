"""The pool of rank processes: results, failures, hangs and deaths of ranks, and what is left behind (nothing)."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from world import GRACE_S, Pool, RankDied, Worlds, WorldTimeout, on_ranks


def total(value: float) -> float:
    number = torch.tensor(value * (1 + dist.get_rank()))
    dist.all_reduce(number)
    return float(number)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LookupError(f"rank {rank} has lost it")
    dist.barrier()


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def crash_on(rank: int) -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # as a Trainer that ends
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def warn() -> None:
    warnings.warn("mind the step", stacklevel=1)


def draw() -> tuple[int, float]:
    return os.getpid(), float(torch.rand(()))


def leave_groups_behind() -> int:
    kept = [dist.new_group() for _ in range(2)]
    return dist.get_world_size(kept[0])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_runs_the_function_and_answers_in_order(world: Worlds, size: int) -> None:
    assert world(size).run(total, 2.0) == [size * (size + 1.0)] * size


def test_processes_are_kept_and_start_every_call_with_the_same_seed(world: Worlds) -> None:
    assert world(2).run(draw) == world(2).run(draw)


def test_groups_of_one_call_are_gone_in_the_next(world: Worlds) -> None:
    assert world(2).run(leave_groups_behind) == [2, 2]
    assert world(3).run(leave_groups_behind) == [3, 3, 3]


@pytest.mark.slow
def test_what_a_rank_raises_is_raised_with_its_traceback(world: Worlds) -> None:
    start = time.monotonic()
    with pytest.raises(LookupError, match="rank 1 has lost it") as caught:
        world(2).run(fail_on, 1)
    assert "in fail_on" in str(caught.value.__cause__)
    assert "ranks [0] had not answered" in str(caught.value.__cause__)
    assert time.monotonic() - start < GRACE_S + 5
    assert world(2).run(total, 1.0) == [3.0, 3.0]


def test_warnings_are_errors_on_ranks(world: Worlds) -> None:
    with pytest.raises(UserWarning, match="mind the step"):
        world(1).run(warn)


@pytest.mark.slow
def test_a_hang_names_the_ranks_that_have_not_answered_and_where_they_are(world: Worlds) -> None:
    with pytest.raises(
        WorldTimeout, match=r"(?s)ranks \[1\] of 2 had not answered after 1 s.*in hang_on"
    ):
        world(2).run(hang_on, 1, timeout_s=1.0)
    assert world(2).run(total, 1.0) == [3.0, 3.0]


def test_the_death_of_a_rank_is_an_error_and_not_a_hang(world: Worlds) -> None:
    with pytest.raises(RankDied, match="rank-1 ended with exit code 3"):
        world(2).run(die_on, 1)


def test_a_crash_says_where_the_rank_was(world: Worlds) -> None:
    with pytest.raises(RankDied, match=r"(?s)exit code -11.*Segmentation fault.*in crash_on"):
        world(2).run(crash_on, 1)


def test_a_closed_pool_leaves_no_process_behind() -> None:
    pool = Pool()
    pids = [pid for pid, _ in pool(2).run(draw)]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("value", [2.0, 3.0])
@on_ranks(3)
def test_a_test_can_be_the_function_that_ranks_run(value: float) -> None:
    assert total(value) == 6 * value


@pytest.mark.xfail(raises=AssertionError, reason="proves that a test on ranks can fail")
@on_ranks(2)
def test_a_test_on_ranks_can_fail() -> None:
    assert dist.get_rank() == 0
