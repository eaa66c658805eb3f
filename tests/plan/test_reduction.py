"""Plans of reductions: their stages and what follows from their facts; impossible ones are refused."""

from dataclasses import replace
from typing import Any

import pytest

from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.reduction import ReduceOver, ReductionPlan
from shardeddp.plan.topology import Topology

pytestmark = pytest.mark.timeout(30)


def plan_of(
    shard_size: int,
    replicas: int = 1,
    *,
    splits: bool = False,
    buffers: dict[str, bool] | None = None,
    **facts: Any,
) -> ReductionPlan:
    topology = Topology(
        world_size=shard_size * replicas, shard_size=shard_size, split_replicas=splits
    )
    layout = FlatLayout.build(
        ["a", "b"], [(4, 2), (3,)], itemsize=2, num_slices=topology.num_slices
    )
    facts = {
        "over": ReduceOver.ALL,
        "adds_to": (False, False),
        "has_replicas": replicas > 1,
    } | facts
    return ReductionPlan(
        buffers=BufferPlan(layout=layout, **(buffers or {})), topology=topology, **facts
    )


HOST = {"on_host": True}
ADDS = {"adds_to": (True, False)}
EARLY = {"over": ReduceOver.SHARD_GROUP}


@pytest.mark.parametrize(
    ("plan", "stages"),
    [
        (plan_of(4), ["in_shard_group"]),
        (plan_of(4, buffers=HOST), ["in_shard_group", "to_host"]),
        # Compute adds to gradients in the shard, so that no stage copies to the host.
        (plan_of(4, buffers=HOST, **ADDS), ["in_shard_group"]),
        (plan_of(4, **EARLY), ["in_shard_group"]),
        (plan_of(2, 2), ["in_shard_group", "across_replicas"]),
        (plan_of(2, 2, buffers=HOST), ["in_shard_group", "across_replicas", "to_host"]),
        (plan_of(2, 2, buffers=HOST, **ADDS), ["in_shard_group", "across_replicas"]),
        (plan_of(2, 2, buffers=HOST, **EARLY), ["in_shard_group"]),
        # Experts that no other rank has follow the other parameters.
        (plan_of(1, has_replicas=True), ["in_shard_group", "across_replicas"]),
    ],
)
def test_a_plan_says_its_stages(plan: ReductionPlan, stages: list[str]) -> None:
    assert [stage.value for stage in plan.stages] == stages


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("changes", [{}, {"casts_gradients": True}, HOST])
@pytest.mark.parametrize(
    ("shard_size", "replicas", "splits"), [(4, 1, 0), (2, 2, 0), (2, 2, 1), (1, 4, 0)]
)
def test_gradients_in_the_shard_are_overwritten_only_by_results(
    shard_size: int, replicas: int, splits: int, changes: dict[str, bool], adds: bool, early: bool
) -> None:
    facts: dict[str, Any] = {"adds_to": (adds, False)} | (EARLY if early else {})
    plan = plan_of(shard_size, replicas, splits=bool(splits), buffers=changes, **facts)
    assert plan.keeps_partial == (early and replicas > 1)
    assert plan.adds == (adds and not plan.keeps_partial)
    accumulates = plan.keeps_partial or plan.adds
    # Memory of the gradient shard is written by a reduction that neither adds to it nor leaves it.
    assert not (accumulates and plan.packs_into_shard)
    assert plan.output_in_buffer or not accumulates
    # The output has the shard's dtype, device and length where it is the shard.
    assert plan.output_in_buffer or not (changes or plan.divides_output)
    assert plan.packs_into_shard == (shard_size == 1 and not (changes or accumulates))


def test_the_division_of_an_average_is_fused_with_packing_where_collectives_add_up() -> None:
    sums = plan_of(1, 4, averages=False)
    assert sums.scale == 0.25
    for same in (
        replace(sums, averages=True),
        replace(sums, adds_partial=True),
        replace(sums, adds_to=(True, False)),
        replace(sums, over=ReduceOver.SHARD_GROUP),
        replace(sums, buffers=replace(sums.buffers, casts_params=True)),
        plan_of(2, 2, averages=False),
        plan_of(4, averages=False),
    ):
        assert same.scale is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"over": ReduceOver.NONE}, "a reduction over ranks"),
        ({"adds_to": (True,)}, "one flag for each of 2 parameters, found 1"),
        ({"has_replicas": False}, "a stage across replicas"),
    ],
)
def test_an_impossible_plan_is_refused(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(2, 2, **facts)
    with pytest.raises(ValueError, match="a stage across replicas"):
        plan_of(2, adds_partial=True)
