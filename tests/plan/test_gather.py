"""Plan of gathers: whether one is due, and its stages."""

import itertools

import pytest

from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.gather import GatherPlan, GatherStage
from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.sharding_strategy import Reshard


def plan_of(
    num_slices: int = 2,
    reshard: Reshard = Reshard.AFTER_FORWARD,
    shard_size: int | None = None,
    regather_size: int | None = None,
    **facts: bool,
) -> GatherPlan:
    layout = FlatLayout.build(["weight"], [(4, 2)], itemsize=4, num_slices=num_slices)
    return GatherPlan(
        buffers=BufferPlan(layout=layout, **facts),
        reshard=reshard,
        shard_size=shard_size or num_slices,
        regather_size=regather_size,
    )


@pytest.mark.parametrize(
    ("plan", "unchanged", "changed"),
    [
        (plan_of(), True, True),
        (plan_of(reshard=Reshard.AFTER_BACKWARD), True, True),
        (plan_of(reshard=Reshard.NEVER), False, True),
        (plan_of(reshard=Reshard.NEVER, casts_params=True, num_slices=1), False, True),
        (plan_of(num_slices=1), False, False),  # the main shard is the buffer
        (plan_of(num_slices=1, casts_params=True), True, True),
        (plan_of(borrows=True), False, False),  # the lender gathers
    ],
)
def test_a_gather_is_due_unless_the_buffer_has_the_values(
    plan: GatherPlan, unchanged: bool, changed: bool
) -> None:
    assert plan.is_due(main_has_changed=False) == unchanged
    assert plan.is_due(main_has_changed=True) == changed


HOST, REPLICAS, SHARDS, PARTS = (
    GatherStage.FROM_HOST,
    GatherStage.AMONG_REPLICAS,
    GatherStage.IN_SHARD_GROUP,
    GatherStage.IN_REGATHER_GROUP,
)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    ("splits", "changed", "has_part", "expected"),
    [
        (False, False, False, (HOST, SHARDS)),
        (False, True, False, (HOST, SHARDS)),
        (False, False, True, (PARTS,)),
        (False, True, True, (HOST, SHARDS)),  # the part has former values
        (True, False, False, (SHARDS,)),
        (True, True, False, (HOST, REPLICAS, SHARDS)),
        (True, False, True, (PARTS,)),
        (True, True, True, (HOST, REPLICAS, SHARDS)),
    ],
)
def test_a_gather_reads_what_is_nearest_and_has_the_present_values(
    splits: bool, changed: bool, has_part: bool, expected: tuple[GatherStage, ...], on_host: bool
) -> None:
    plan = plan_of(4, shard_size=2 if splits else 4, on_host=on_host)
    found = plan.stages(main_has_changed=changed, has_kept_part=has_part)
    assert found == tuple(it for it in expected if on_host or it is not HOST)


def test_a_buffer_that_has_the_values_takes_no_stage() -> None:
    assert plan_of(reshard=Reshard.NEVER).stages(main_has_changed=False, has_kept_part=False) == ()


def test_a_unit_with_a_backward_ahead_is_resharded_only_if_units_have_memory_in_turn() -> None:
    ends = {
        (reshard, awaits, begins): reshard.ends_forward(
            awaits_backward=awaits, begins_backward=begins
        )
        for reshard, awaits, begins in itertools.product(Reshard, (False, True), (False, True))
    }
    assert [key for key, resharded in ends.items() if not resharded] == [
        (Reshard.AFTER_FORWARD, True, True),
        (Reshard.AFTER_BACKWARD, True, False),
        (Reshard.AFTER_BACKWARD, True, True),
        (Reshard.NEVER, True, True),
    ]


@pytest.mark.parametrize(("size", "is_kept"), [(None, False), (2, True), (4, False)])
def test_a_rank_keeps_a_part_if_fewer_ranks_gather_for_the_backward(
    size: int | None, is_kept: bool
) -> None:
    plan = plan_of(4, regather_size=size)
    assert plan.kept_numel == (plan.buffers.layout.padded_numel // 2 if is_kept else 0)
    assert plan_of(4, regather_size=size, borrows=True).kept_numel == 0


def test_facts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="divides"):
        plan_of(4, shard_size=3)
    with pytest.raises(ValueError, match="regather"):
        plan_of(4, Reshard.NEVER, regather_size=2)
