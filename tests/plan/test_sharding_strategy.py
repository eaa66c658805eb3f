"""The five sharding strategies: when each reshards, when it reduces, over how many ranks."""

import pytest

from shardeddp.plan.sharding_strategy import (
    SHARDING_STRATEGIES,
    Reshard,
    ShardingStrategy,
    ShardSize,
)

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("name", "shard_size", "reshard", "reduce_every_backward"),
    [
        ("full_shard", ShardSize.WORLD, Reshard.AFTER_FORWARD, True),
        ("hybrid_shard", ShardSize.NODE, Reshard.AFTER_FORWARD, True),
        ("shard_grad_op", ShardSize.WORLD, Reshard.AFTER_BACKWARD, True),
        ("shard_optimizer", ShardSize.WORLD, Reshard.NEVER, False),
        ("no_shard", 1, Reshard.NEVER, False),
    ],
)
def test_a_strategy_sets_the_three_knobs_as_the_design_says(
    name: str, shard_size: int | ShardSize, reshard: Reshard, reduce_every_backward: bool
) -> None:
    expected = ShardingStrategy(
        shard_size=shard_size, reshard=reshard, reduce_every_backward=reduce_every_backward
    )
    assert SHARDING_STRATEGIES[name] == expected


def test_there_are_five_strategies_and_no_two_are_the_same() -> None:
    assert len(SHARDING_STRATEGIES) == len(set(SHARDING_STRATEGIES.values())) == 5
