"""Plans of reductions: their stages; those that would overwrite gradients are refused."""

from dataclasses import replace
from typing import Any

import pytest

from shardeddp.engine.reduction import ReduceTarget, ReductionPlan, ReductionStage

pytestmark = pytest.mark.timeout(30)

DIRECT = ReductionPlan(
    target=ReduceTarget.ACROSS_REPLICAS,
    kept=[False, False],
    packs_into_shard=True,
    output_in_buffer=False,
    divides_output=False,
    on_host=False,
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


@pytest.mark.parametrize(
    ("target", "on_host", "adds", "stages"),
    [
        ("IN_SHARD", False, False, ["IN_SHARD_GROUP"]),
        ("IN_SHARD", True, False, ["IN_SHARD_GROUP", "TO_HOST"]),
        ("IN_SHARD", True, True, ["IN_SHARD_GROUP"]),
        ("ACROSS_REPLICAS", False, False, ["IN_SHARD_GROUP", "ACROSS_REPLICAS"]),
        ("ACROSS_REPLICAS", True, False, ["IN_SHARD_GROUP", "ACROSS_REPLICAS", "TO_HOST"]),
        ("ACROSS_REPLICAS", True, True, ["IN_SHARD_GROUP", "ACROSS_REPLICAS"]),
        ("IN_PARTIAL_SUMS", True, False, ["IN_SHARD_GROUP"]),
    ],
)
def test_a_plan_says_its_stages(target: str, on_host: bool, adds: bool, stages: list[str]) -> None:
    plan = ReductionPlan(
        target=ReduceTarget[target],
        kept=[adds, False],
        packs_into_shard=False,
        output_in_buffer=True,
        divides_output=False,
        on_host=on_host,
        scale=None,
    )
    # Compute adds to gradients in the shard, so that no stage copies to the host.
    assert plan.stages == tuple(ReductionStage[stage] for stage in stages)
