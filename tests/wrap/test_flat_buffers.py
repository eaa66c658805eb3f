"""Plans of a unit's flat buffers: each parameter in one, and layouts that fit."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from shardeddp.plan.topology import Topology
from shardeddp.wrap import SingleUnitPolicy, build_units
from shardeddp.wrap.flat_buffers import UnitPlan, costs_of, plan_unit

pytestmark = pytest.mark.timeout(30)

TWO_RANKS = Topology(world_size=2, shard_size=2)


def planned() -> UnitPlan:
    """A unit with two flat buffers."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    (spec,) = build_units(model, SingleUnitPolicy())
    return plan_unit(spec, TWO_RANKS)


def test_costs_are_those_of_the_plan() -> None:
    plan = planned()
    assert [[it.fqn for it in group.parameters] for group in plan.groups] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]
    costs = costs_of(plan.spec, TWO_RANKS)
    assert [cost.plan for cost in costs] == [group.plan for group in plan.groups]
    assert [cost.trainable for cost in costs] == [True, False]


@pytest.mark.parametrize("times", [0, 2])
def test_a_plan_with_a_parameter_in_no_group_or_in_two_is_refused(times: int) -> None:
    plan = planned()
    with pytest.raises(ValueError, match=r"each parameter of unit \(root\) in one group"):
        replace(plan, groups=plan.groups[:1] + plan.groups[1:] * times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda group: {"parameters": group.parameters[::-1]}, "expected slots for"),
        (lambda group: {"topology": Topology(world_size=4, shard_size=4)}, "each of 4 ranks"),
    ],
)
def test_a_layout_of_other_parameters_or_ranks_is_refused(change: Any, message: str) -> None:
    group = planned().groups[0]
    with pytest.raises(ValueError, match=message):
        replace(group, **change(group))
