"""Plans of reductions that would overwrite gradients, or scale them twice, are refused."""

from dataclasses import replace
from typing import Any

import pytest

from shardeddp.engine.reduction import ReduceTarget, ReductionPlan

pytestmark = pytest.mark.timeout(30)

DIRECT = ReductionPlan(
    target=ReduceTarget.ACROSS_REPLICAS,
    kept=[False, False],
    packs_into_shard=True,
    output_in_buffer=False,
    divides_output=False,
    to_host=False,
    scale=0.5,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept": [False, True]}, "beside the gradient shard"),
        ({"kept": [False, True], "output_in_buffer": True}, "beside the gradient shard"),
        ({"target": ReduceTarget.IN_PARTIAL_SUMS}, "beside the gradient shard"),
        ({"target": ReduceTarget.IN_SHARD}, "no scale"),
        ({"packs_into_shard": False}, "no scale"),
    ],
)
def test_an_impossible_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(DIRECT, **changes)


def test_gradients_that_are_kept_go_through_the_buffer() -> None:
    plan = replace(
        DIRECT, kept=[True, False], packs_into_shard=False, output_in_buffer=True, scale=None
    )
    assert plan.adds and plan.kind == "mean"
