"""The five sharding strategies are found by name in any case, and a wrong name gets the nearest right one."""

from collections.abc import Callable

import pytest

from shardeddp.plan.sharding_strategy import (
    SHARDING_STRATEGIES,
    Reshard,
    ShardingStrategy,
    ShardSize,
    find_sharding,
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
    assert find_sharding(name) == expected


def test_there_are_five_strategies_and_no_two_are_the_same() -> None:
    assert len(SHARDING_STRATEGIES) == len(set(SHARDING_STRATEGIES.values())) == 5


@pytest.mark.parametrize(
    "spelling", [str.lower, str.upper, str.title, str.swapcase, str.capitalize]
)
@pytest.mark.parametrize("name", SHARDING_STRATEGIES)
def test_a_name_is_found_in_any_case(name: str, spelling: Callable[[str], str]) -> None:
    assert find_sharding(spelling(name)) is SHARDING_STRATEGIES[name]


@pytest.mark.parametrize("name", SHARDING_STRATEGIES)
def test_a_name_that_lost_any_one_letter_is_recognised(name: str) -> None:
    for index in range(len(name)):
        typo = name[:index] + name[index + 1 :]
        with pytest.raises(ValueError, match=f"did you mean '{name}'"):
            find_sharding(typo)


@pytest.mark.parametrize(
    ("found", "nearest"),
    [
        ("FULLSHARD", "full_shard"),
        ("full-shard", "full_shard"),
        ("hybrid", "hybrid_shard"),
        ("grad_op", "shard_grad_op"),
        ("SHARD_OPTIM", "shard_optimizer"),
        ("noshard", "no_shard"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one_in_any_case(found: str, nearest: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"sharding_strategy='{found}' is not known; .*; did you mean '{nearest}'\?",
    ):
        find_sharding(found)


@pytest.mark.parametrize("found", ["", "zzz", "42"])
def test_a_name_that_is_near_to_none_gets_the_whole_list_and_no_guess(found: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"'{found}' is not known; expected one of {', '.join(SHARDING_STRATEGIES)}",
    ) as caught:
        find_sharding(found)
    assert "did you mean" not in str(caught.value)
