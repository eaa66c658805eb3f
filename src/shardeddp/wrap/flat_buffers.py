"""Flat buffers of a unit: which parameters share one, where they lie in it, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.gather import GatherPlan
from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.memory import GroupCost
from shardeddp.plan.sharding_strategy import Reshard
from shardeddp.plan.topology import Topology
from shardeddp.wrap.tree import ParameterSpec, UnitSpec


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """Parameters that share flat buffers, the plan of these, and the mesh that divides them."""

    parameters: tuple[ParameterSpec, ...]
    """Parameters of equal dtypes, in layout order."""

    plan: BufferPlan
    topology: Topology
    reshard: Reshard = Reshard.AFTER_FORWARD
    """Time of resharding; costs of the buffers do not depend on it."""

    regather_size: int | None = None
    """Number of ranks in the backward's all-gather; None: the shard group."""

    lender: int | None = None
    """Index in the unit of the group that lends its memory to the only parameter of this group.

    Each of the two has gradients and optimizer states of its own.
    """

    @property
    def gathers(self) -> GatherPlan:
        """Decisions about the gathers."""
        return GatherPlan(
            buffers=self.plan,
            reshard=self.reshard,
            shard_size=self.topology.shard_size,
            regather_size=self.regather_size,
        )

    def __post_init__(self) -> None:
        planned = [(slot.fqn, slot.shape) for slot in self.plan.layout.slots]
        if planned != [(it.fqn, tuple(it.parameter.shape)) for it in self.parameters]:
            raise ValueError(f"expected slots for {[it.fqn for it in self.parameters]}, in order")
        if self.plan.layout.num_slices != self.topology.num_slices:
            raise ValueError(
                f"expected a slice for each of {self.topology.num_slices} ranks, found "
                f"{self.plan.layout.num_slices} slices"
            )
        if self.plan.borrows != (self.lender is not None):
            raise ValueError("expected a lender for a group that borrows its memory, and only then")

    def cost(self, *, trainable: bool) -> GroupCost:
        """Return the cost of the flat buffers."""
        first, topology = self.parameters[0], self.topology
        casts = self.plan.casts_gradients
        return GroupCost(
            plan=self.plan,
            trainable=trainable,
            main_itemsize=first.dtype.itemsize,
            param_itemsize=first.param_dtype.itemsize,
            reduce_itemsize=(first.reduce_dtype if casts else first.dtype).itemsize,
            splitting_replicas=topology.num_slices // topology.shard_size,
            replicas=topology.replicate_size,
            tensor_size=topology.tensor_size,
        )


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Flat buffers of a unit: the engine makes them, and costs are read from them."""

    spec: UnitSpec
    groups: tuple[PlannedGroup, ...]
    passthrough: tuple[PlannedGroup, ...]
    """Passthrough parameters, as if in buffers of one rank; they are reduced in their own dtype."""

    def __post_init__(self) -> None:
        planned = Counter(id(it.parameter) for group in self.groups for it in group.parameters)
        if planned != Counter(id(it.parameter) for it in self.spec.parameters):
            raise ValueError(f"expected each parameter of unit {self.spec.label} in one group")
        for index, group in enumerate(self.groups):
            first = index if group.lender is None else group.lender
            alone = [it.parameters[0].memory for it in (group, self.groups[first])]
            if first > index or self.groups[first].plan.borrows or alone[0] != alone[1]:
                raise ValueError(f"expected a lender before group {index}, of the same memory")


def plan_unit(
    spec: UnitSpec,
    topology: Topology,
    *,
    reshard: Reshard = Reshard.AFTER_FORWARD,
    regather_size: int | None = None,
    on_host: bool = False,
) -> UnitPlan:
    """Plan the flat buffers of a unit, without making them.

    Args:
        spec: Module and parameters of the unit.
        topology: Mesh of ranks; experts are divided by the mesh over it.
        reshard: Time of resharding.
        regather_size: Number of ranks in the backward's all-gather; None: the shard group.
        on_host: True if main shards and gradient shards are in host memory.
    """
    groups: list[PlannedGroup] = []
    lenders: dict[int, int] = {}  # by memory: index of the group of its first parameter
    for specs in _by_buffer(spec.parameters):
        first, split = specs[0], specs[0].distribution
        experts = len(split.boxes) if split is not None and split.of_experts else 0
        own = topology.over_experts(experts) if experts else topology
        plan = BufferPlan(
            layout=_layout_of(specs, own.num_slices),
            casts_params=first.param_dtype is not first.dtype,
            casts_gradients=first.reduce_dtype is not first.dtype,
            on_host=on_host,
            borrows=first.memory in lenders,
        )
        group = PlannedGroup(
            parameters=tuple(specs),
            plan=plan,
            topology=own,
            reshard=reshard,
            regather_size=None if experts else regather_size,
            lender=lenders.get(first.memory),
        )
        lenders.setdefault(first.memory, len(groups))
        groups.append(group)
    passthrough = [
        PlannedGroup(
            parameters=tuple(specs),
            plan=BufferPlan(layout=_layout_of(specs, 1)),
            topology=Topology(world_size=1, shard_size=1),
        )
        for specs in _by_buffer(spec.passthrough)
    ]
    return UnitPlan(spec=spec, groups=tuple(groups), passthrough=tuple(passthrough))


def costs_of(spec: UnitSpec, topology: Topology, *, on_host: bool = False) -> list[GroupCost]:
    """Return the costs of the flat buffers that :func:`plan_unit` plans; arguments as there."""
    groups = plan_unit(spec, topology, on_host=on_host).groups
    return [group.cost(trainable=require_gradients(group.parameters)) for group in groups]


def require_gradients(specs: Sequence[ParameterSpec]) -> bool:
    """Return whether any of the parameters requires a gradient now."""
    return any(it.parameter.requires_grad for it in specs)


def _by_buffer(specs: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
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
