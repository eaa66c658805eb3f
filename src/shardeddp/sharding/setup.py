"""Shard a model: agree on the plan, cut every parameter, and put the runtime in charge."""

from collections.abc import Sequence

import torch

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
    follow_rank_zero(specs, mesh)
    retain = placement.reshard is Reshard.NEVER
    units = together("sharding the model", lambda: [Unit(spec, mesh, retain) for spec in specs], mesh.control)
    return Runtime(units, mesh, placement, prefetch)


@torch.no_grad()
def follow_rank_zero(specs: Sequence[UnitSpec], mesh: Mesh) -> None:
    """Give every rank the values that rank 0 has initialised its parameters to, as ``DistributedDataParallel`` does."""
    if mesh.world.size == 1:
        return
    for unit in specs:
        for spec in unit.parameters:
            if spec.parameter.numel():
                values = spec.parameter.detach().to(mesh.device).contiguous()
                mesh.world.broadcast_(values, 0).wait()
                spec.parameter.copy_(values)


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
