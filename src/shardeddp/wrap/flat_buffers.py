"""Flat buffers of a unit: which parameters share one, where they lie in it, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.memory import GroupCost, GroupPlan
from shardeddp.plan.topology import Topology
from shardeddp.wrap.tree import ParameterSpec, UnitSpec


def by_buffer(specs: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Group the parameters that can share a flat buffer, in order of first appearance.

    A parameter that shares memory with another has a group of its own.
    """
    users = Counter(spec.memory for spec in specs)
    groups: dict[tuple[object, ...], list[ParameterSpec]] = {}
    for spec in specs:
        alone = id(spec) if users[spec.memory] > 1 else None
        dtypes = spec.dtype, spec.param_dtype, spec.reduce_dtype
        of_experts = spec.is_of_experts  # gathered in the mesh of experts
        key = (*dtypes, spec.parameter.requires_grad, alone, of_experts)
        groups.setdefault(key, []).append(spec)
    return list(groups.values())


def plan_of(specs: Sequence[ParameterSpec], num_slices: int, *, on_host: bool) -> GroupPlan:
    """Plan the flat buffers of parameters that share their dtypes."""
    first = specs[0]
    return GroupPlan(
        layout=_layout_of(specs, num_slices),
        casts_params=first.param_dtype is not first.dtype,
        casts_gradients=first.reduce_dtype is not first.dtype,
        on_host=on_host,
    )


def _layout_of(specs: Sequence[ParameterSpec], num_slices: int) -> FlatLayout:
    """Build the flat layout of parameters that share their dtypes."""
    first = specs[0]
    return FlatLayout.build(
        [spec.fqn for spec in specs],
        [tuple(spec.parameter.shape) for spec in specs],
        itemsize=min(
            dtype.itemsize for dtype in (first.dtype, first.param_dtype, first.reduce_dtype)
        ),
        num_slices=num_slices,
    )


def costs_of(spec: UnitSpec, topology: Topology, *, on_host: bool = False) -> list[GroupCost]:
    """Return the costs of the flat buffers that a unit would have, without making them.

    Args:
        spec: Module and parameters of the unit.
        topology: Mesh of ranks.
        on_host: True if main shards and gradient shards are in host memory.
    """
    costs: list[GroupCost] = []
    for specs in by_buffer(spec.parameters):
        split = specs[0].distribution
        experts = len(split.boxes) if split is not None and split.of_experts else 0
        own = topology.over_experts(experts) if experts else topology
        costs.append(cost_of(specs, plan_of(specs, own.num_slices, on_host=on_host), own))
    return costs


def cost_of(
    specs: Sequence[ParameterSpec],
    plan: GroupPlan,
    topology: Topology,
    *,
    trainable: bool | None = None,
) -> GroupCost:
    """Return the cost of a flat buffer.

    Args:
        specs: Parameters in it.
        plan: Decisions about the buffer.
        topology: Ranks that share it.
        trainable: Whether it gets gradients; None: if one of the parameters requires a gradient.
    """
    if trainable is None:
        trainable = any(it.parameter.requires_grad for it in specs)
    return GroupCost(
        plan=plan,
        trainable=trainable,
        main_itemsize=specs[0].dtype.itemsize,
        param_itemsize=specs[0].param_dtype.itemsize,
        reduce_itemsize=specs[0].reduce_dtype.itemsize,
        split=topology.num_slices // topology.shard_size,
        replicas=topology.replicate_size,
        parts=topology.tensor_size,
    )


def passthrough_costs(spec: UnitSpec) -> list[GroupCost]:
    """Return the costs of passthrough parameters, as if in buffers of one rank.

    They are reduced in their own dtype.
    """
    return [
        cost_of(specs, GroupPlan(layout=_layout_of(specs, 1)), _ONE_RANK)
        for specs in by_buffer(spec.passthrough)
    ]


_ONE_RANK = Topology(world_size=1, shard_size=1)
