"""What a training step communicates is each strategy's textbook volume, to the byte.

Bytes are those that a ring sends from one rank: (F - 1) / F of the buffer for an all-gather or a reduce-scatter over a
shard group of F, twice (R - 1) / R of the shard for an all-reduce over R replicas. Of P bytes of parameters in all, the
root unit is gathered once per step and the last block once (it ends the forward and begins the backward); neither is in
the textbook, where both count twice.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardeddp.config import choose_sharding
from shardeddp.errors import ConfigurationError
from training import Sharding, Trial, batch
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)

WIDTH = 16
BLOCKS = 4


class Model(nn.Module):
    """Blocks of one size behind a stem that the root unit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


UNIT_NBYTES = 4 * WIDTH * WIDTH  # every unit has one parameter of this size
ALL_NBYTES = (BLOCKS + 1) * UNIT_NBYTES


def mean_square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 4, WIDTH)).pow(2).mean()


def communicated(sharding: Sharding, micro_batches: int) -> Counter[str]:
    """What one rank sends in the third step, by kind."""
    trial = Trial(Model(), sharding)
    trial.train(mean_square, steps=2)
    traffic = trial.runtime.mesh.traffic
    traffic.reset()
    for micro_batch in range(micro_batches):
        trial.runtime.sync_gradients = micro_batch == micro_batches - 1
        trial.forward(mean_square, micro_batch).backward()
    trial.optimizer.step()
    return traffic.nbytes


def ring(nbytes: int, size: int, passes: int = 1) -> int:
    """Bytes that one rank of a ring sends."""
    return passes * nbytes * (size - 1) // size


BOTH_WAYS = 2 * ALL_NBYTES - 2 * UNIT_NBYTES  # forward and backward, less root unit and last block
ONE_WAY = ALL_NBYTES


@pytest.mark.loop(1)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_full_shard_gathers_twice_and_reduces_once_each_time(
    world: Worlds, size: int, micro_batches: int
) -> None:
    # ZeRO-3: 3 P (F - 1) / F
    expected = {
        "all_gather": micro_batches * ring(BOTH_WAYS, size),
        "reduce_scatter": micro_batches * ring(ALL_NBYTES, size),
    }
    for found in world(size).run(communicated, Sharding(units=("blocks.*",)), micro_batches):
        assert +found == expected


@pytest.mark.parametrize("size", [2, 4])
def test_shard_grad_op_gathers_once_and_reduces_once(world: Worlds, size: int) -> None:
    # ZeRO-2: 2 P (F - 1) / F
    expected = {"all_gather": ring(ONE_WAY, size), "reduce_scatter": ring(ALL_NBYTES, size)}
    for found in world(size).run(
        communicated, Sharding(strategy="shard_grad_op", units=("blocks.*",)), 1
    ):
        assert +found == expected


@pytest.mark.loop(1)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_shard_optimizer_gathers_and_reduces_once_per_step(
    world: Worlds, size: int, micro_batches: int
) -> None:
    # ZeRO-1: 2 P (F - 1) / F, whatever the number of micro-batches
    expected = {"all_gather": ring(ONE_WAY, size), "reduce_scatter": ring(ALL_NBYTES, size)}
    sharding = Sharding(strategy="shard_optimizer", units=("blocks.*",))
    for found in world(size).run(communicated, sharding, micro_batches):
        assert +found == expected


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_no_shard_all_reduces_once_per_step(world: Worlds, size: int, micro_batches: int) -> None:
    # DDP: 2 P (R - 1) / R
    expected = {"all_reduce": ring(ALL_NBYTES, size, passes=2)}
    sharding = Sharding(strategy="no_shard", units=("blocks.*",))
    for found in world(size).run(communicated, sharding, micro_batches):
        assert +found == expected


@pytest.mark.loop(1)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_hybrid_shard_crosses_replicas_once_per_step_with_a_shard(
    world: Worlds, micro_batches: int
) -> None:
    expected = {
        "all_gather": micro_batches * ring(BOTH_WAYS, 2),
        "reduce_scatter": micro_batches * ring(ALL_NBYTES, 2),
        "all_reduce": ring(ALL_NBYTES // 2, 2, passes=2),
    }
    sharding = Sharding(strategy="hybrid_shard", shard_size=2, units=("blocks.*",))
    for found in world(4).run(communicated, sharding, micro_batches):
        assert +found == expected


def test_replicas_that_split_the_optimizer_scatter_their_sums_and_gather_once_per_step(
    world: Worlds,
) -> None:
    expected = {
        # In the shard group as always, and of each shard across replicas after the step.
        "all_gather": ring(BOTH_WAYS, 2) + ring(ALL_NBYTES // 2, 2),
        "reduce_scatter": ring(ALL_NBYTES, 2) + ring(ALL_NBYTES // 2, 2),
    }
    sharding = Sharding(strategy="hybrid_shard", shard_size=2, units=("blocks.*",), split=True)
    for found in world(4).run(communicated, sharding, 1):
        assert +found == expected


def test_parts_that_were_kept_are_gathered_among_fewer_ranks(world: Worlds) -> None:
    forward, backward = ALL_NBYTES, BOTH_WAYS - ALL_NBYTES
    expected = {
        "all_gather": ring(forward, 4) + ring(backward, 2),
        "reduce_scatter": ring(ALL_NBYTES, 4),
    }
    for found in world(4).run(communicated, Sharding(units=("blocks.*",), regather=2), 1):
        assert +found == expected


# -- gathering among fewer ranks


@pytest.mark.slow
@pytest.mark.parametrize("regather", [2, 4])
@on_ranks(4)
def test_training_on_parts_that_were_kept_equals_one_process(regather: int) -> None:
    trial = Trial(Model(), Sharding(units=("blocks.*",), regather=regather))
    trial.train(mean_square)
    with_grad = trial.forward(mean_square)  # a forward without backward leaves parts behind
    del with_grad
    trial.train(mean_square)


@on_ranks(4)
def test_a_part_is_held_from_forward_to_backward_and_not_longer() -> None:
    trial = Trial(Model(), Sharding(units=("blocks.*",), regather=2))
    groups = [progress.unit.groups[0] for progress in trial.runtime.progresses[1:]]
    trial.train(mean_square, steps=1)
    loss = trial.forward(mean_square)
    held = [group.held().in_flight_nbytes for group in groups]
    assert held == [UNIT_NBYTES // 2] * (BLOCKS - 1) + [UNIT_NBYTES]  # the last is gathered
    loss.backward()
    assert [group.held().in_flight_nbytes for group in groups] == [0] * BLOCKS


@pytest.mark.parametrize(
    ("strategy", "value", "message"),
    [
        (
            "full_shard",
            3,
            "groups of 3 ranks do not divide the 4 ranks of a shard group; use one of \\[2\\]",
        ),
        (
            "full_shard",
            1,
            "reshard_after_forward=1: expected True, False, or a number of ranks of at least 2",
        ),
        (
            "no_shard",
            True,
            "reshard_after_forward=True does not go with sharding_strategy='no_shard'",
        ),
    ],
)
def test_a_resharding_that_cannot_be_is_refused(strategy: str, value: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_sharding(strategy, reshard_after_forward=value).topology(
            num_nodes=1, ranks_per_node=4
        )


def test_resharding_by_hand_turns_one_strategy_into_another() -> None:
    zero_3, zero_2 = choose_sharding("full_shard"), choose_sharding("shard_grad_op")
    assert choose_sharding("full_shard", reshard_after_forward=False) == zero_2
    assert choose_sharding("shard_grad_op", reshard_after_forward=True) == zero_3
    assert choose_sharding("full_shard", reshard_after_forward=2) == replace(
        zero_3, regather_size=2
    )
