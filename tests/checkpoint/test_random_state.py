"""Random states come back to the very next number, travel between ranks as bytes, and are refused if they are none."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardeddp.checkpoint.random_state import (
    ResumeRandomness,
    capture_random_state,
    gather_random_states,
    restore_random_state,
)
from shardeddp.checkpoint.read import LazyTensor
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval
from support.host_groups import all_ranks
from world import on_ranks

CPU = torch.device("cpu")


def numbers() -> list[float]:
    """The next of every generator, with those of which two are drawn at a time."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        *torch.randn(3).tolist(),
    ]


def test_every_generator_goes_on_where_it_was() -> None:
    numbers()
    random.gauss(0, 1)  # leaves one of a pair over
    np.random.randn()
    state = capture_random_state(CPU)
    expected = [numbers() for _ in range(3)]
    numbers()
    restore_random_state(state, CPU)
    assert [numbers() for _ in range(3)] == expected


def test_a_state_is_small_and_made_of_bytes_only() -> None:
    state = capture_random_state(CPU)
    assert list(state) == ["python", "numpy", "torch"]
    assert all(tensor.dtype == torch.uint8 and tensor.ndim == 1 for tensor in state.values())
    assert sum(tensor.numel() for tensor in state.values()) < 12_000


@on_ranks(3)
def test_the_first_rank_gets_the_states_of_all_and_each_takes_its_own() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    mine = capture_random_state(CPU)
    if rank == 1:
        del mine["numpy"]
        mine["before_fetch.torch"] = mine["torch"]
    states = gather_random_states(mine, all_ranks())
    assert bool(states) == (rank == 0)
    states = states if rank == 0 else {}
    shared: list[object] = [states]
    dist.broadcast_object_list(shared)
    assert {len(rows) for rows in shared[0].values()} == {3}  # type: ignore[attr-defined]
    randomness = ResumeRandomness()
    randomness.hold(shared[0], rank, 3)
    found = randomness.capture(CPU)
    assert found.keys() == mine.keys()
    assert all(torch.equal(found[name], mine[name]) for name in mine)


@on_ranks(1)
def test_of_lazy_states_a_rank_reads_its_row() -> None:
    (rows,) = gather_random_states({"torch": torch.get_rng_state()}, all_ranks()).values()
    three, asked = rows.repeat(3, 1), list[Interval]()

    def read(interval: Interval) -> torch.Tensor:
        asked.append(interval)
        return three.reshape(-1)[interval.start : interval.stop]

    lazy = LazyTensor(("x",), tuple(three.shape), torch.uint8, read)
    randomness = ResumeRandomness()
    randomness.hold({"torch": lazy}, 1, 3)
    assert torch.equal(randomness.capture(CPU)["torch"], torch.get_rng_state())
    assert asked == [Interval(three.shape[1], 2 * three.shape[1])]


def test_rows_too_short_for_a_state_are_damage() -> None:
    states = {
        "torch": torch.zeros(1, 5012, dtype=torch.uint8),
        "python": torch.zeros(2513, 1, dtype=torch.uint8),
    }
    with pytest.raises(CheckpointError, match="expected one row of bytes for each rank"):
        ResumeRandomness().hold(states, 0, 1)


def test_states_are_restored_once_and_not_before_training_begins() -> None:
    randomness = ResumeRandomness()
    state = capture_random_state(CPU)
    expected = numbers()
    randomness.hold([state], 0, 1)
    assert numbers() != expected
    assert all(torch.equal(tensor, state[name]) for name, tensor in randomness.capture(CPU).items())
    randomness.begin(CPU)
    assert numbers() == expected
    randomness.begin(CPU)
    assert numbers() != expected


def test_states_of_other_ranks_are_not_used() -> None:
    randomness = ResumeRandomness()
    with pytest.warns(
        UserWarning, match=r"random states of 1 rank and this run has 2.*Resume with 1 rank for"
    ):
        randomness.hold([capture_random_state(CPU)], 0, 2)
    randomness.hold([capture_random_state(CPU)], 1, 2)
    assert not randomness.holds


def test_a_checkpoint_without_states_changes_nothing() -> None:
    randomness = ResumeRandomness()
    randomness.hold(None, 0, 1)
    assert not randomness.holds


@pytest.mark.parametrize(
    "states",
    [
        3,
        [3],
        [{"torch": 3}],
        [{"torch": torch.zeros(4)}],
        [{"python": torch.zeros(4, dtype=torch.uint8)}],
        [{"x": 1}],
        {},
        {"torch": torch.zeros(4)},
        {"torch": torch.zeros(4, dtype=torch.uint8)},
        {"torch": torch.zeros(1, 3, dtype=torch.uint8)},
        {"torch": torch.tensor([[8, 0, 0, 0, 1, 2]], dtype=torch.uint8)},
        {"torch": torch.tensor([[2, 0, 0, 0, 1, 2]], dtype=torch.uint8)},
        {"x": torch.tensor([[2, 0, 0, 0, 1, 2]], dtype=torch.uint8)},
        {
            "torch": torch.zeros(1, 9, dtype=torch.uint8),
            "numpy": torch.zeros(2, 9, dtype=torch.uint8),
        },
    ],
)
def test_what_is_no_state_is_refused_when_it_is_read(states: object) -> None:
    with pytest.raises(CheckpointError, match="random states"):
        ResumeRandomness().hold(states, 0, 1)  # type: ignore[arg-type]
