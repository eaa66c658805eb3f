"""What a strategy offers its users beside training: barrier, broadcast of objects, reduction of logged values."""

from typing import TypeVar

import torch
import torch.distributed as dist

from shardeddp.comm.collectives import ReduceKind
from shardeddp.comm.mesh import Mesh
from shardeddp.comm.sequence import begin

T = TypeVar("T")

_REDUCE_KINDS: dict[str, ReduceKind] = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


def barrier(mesh: Mesh, operation: str = "barrier()") -> None:
    """Wait until every rank has come here; on the host, so no device is drained.

    Args:
        mesh: The ranks.
        operation: What this is, for ranks that have come to something else; those that have come to it meet.
    """
    mesh.users.call(operation)


def broadcast_object(mesh: Mesh, value: T, source: int) -> T:
    """Give every rank the source rank's object. It is pickled: the ranks of one job trust each other."""
    if mesh.topology.world_size == 1:
        return value
    mesh.users.call(f"broadcast(src={source})")
    box = [value]
    dist.broadcast_object_list(box, source, group=mesh.control)
    return box[0]


def reduce_tensor(mesh: Mesh, tensor: torch.Tensor, reduce_op: object) -> torch.Tensor:
    """Reduce a tensor over all ranks into a new one; an average of integers is a float, as Lightning has it.

    Args:
        mesh: The ranks.
        tensor: Any shape, on the host or on this rank's device.
        reduce_op: "mean", "avg", "sum", "max", "min" (in any case), or the ``ReduceOp`` of that name.
    """
    name = str(reduce_op).removeprefix("RedOpType.").removeprefix("ReduceOp.").lower()
    if name not in _REDUCE_KINDS:
        raise ValueError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_REDUCE_KINDS)}")
    if dist.group.WORLD is not None:
        begin(dist.group.WORLD, "reduction for users")
    kind = _REDUCE_KINDS[name]
    integral = kind == "mean" and not tensor.is_floating_point() and not tensor.is_complex()
    reduced = (tensor.float() if integral else tensor.detach().clone()).to(mesh.device).contiguous()
    mesh.world.all_reduce_(reduced, kind).wait()
    return reduced.to(tensor.device)
