"""Shard a model: agree on the plan, cut every parameter, and put the runtime in charge."""

from collections.abc import Sequence

from shardeddp.comm import Mesh, agree_on_layout, together
from shardeddp.plan.placement import Placement, Reshard
from shardeddp.sharding.runtime import Prefetch, Runtime
from shardeddp.sharding.spec import UnitSpec
from shardeddp.sharding.unit import Unit


def shard_model(specs: Sequence[UnitSpec], mesh: Mesh, placement: Placement, prefetch: Prefetch) -> Runtime:
    """Shard every unit in place and attach the runtime's hooks; a collective of all ranks.

    Args:
        specs: The model's units, the root first.
        mesh: The ranks that share it.
        placement: When to reshard and to reduce.
        prefetch: How far ahead to gather.

    Raises:
        LayoutMismatchError: The ranks do not hold the same model; nothing has been touched.
        RankError: Some rank failed while it cut its parameters.
    """
    agree_on_layout(fingerprint(specs, mesh, placement), mesh.control)
    retain = placement.reshard is Reshard.NEVER
    units = together("sharding the model", lambda: [Unit(spec, mesh, retain) for spec in specs], mesh.control)
    return Runtime(units, mesh, placement, prefetch)


def fingerprint(specs: Sequence[UnitSpec], mesh: Mesh, placement: Placement) -> list[str]:
    """What all ranks must have in common, a line each: the mesh, the placement, every parameter."""
    lines = [f"mesh {mesh.topology}", f"placement {placement}"]
    for unit in specs:
        lines.append(f"unit {unit.label}")
        lines += [
            f"parameter {spec.fqn}: {spec.parameter.dtype}, shape {tuple(spec.parameter.shape)}, "
            f"{'trainable' if spec.parameter.requires_grad else 'frozen'}, registered {len(spec.owners)} times"
            for spec in unit.parameters
        ]
    return lines
