"""Collectives of torch.distributed that users issue on parameters, in any form.

Most of them reach sharded tensors through ``__torch_dispatch__``, as all operations do. Two kinds
do not:

- Tensors in lists of lists, as the arguments of ``scatter``, ``gather`` and ``reduce_scatter``.
  Torch looks for subclasses in tensors and in lists of them alone.
- Unsharded parameters, which are plain tensors. Torch counts no write of a collective, so a write
  within a step would be lost with the gathered memory.

So the operations get a kernel that runs before those of the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shardeddp.tensor.operations import (
    COLLECTIVES,
    RECEIVES,
    communicates,
    tensors_in,
    writes,
    written,
)
from shardeddp.tensor.shard_tensor import NoRawMemory, ShardSpec, mark_written
from shardeddp.tensor.unsharded import (
    ReleasedParameter,
    parameter_in,
    sharded_of,
    without_released,
)
from shardeddp.torch_private import all_operation_names, coalesces, put_in_front, pytree


@cache
def patch_collectives() -> dict[str, torch.library.Library]:
    """Patch the operations of torch.distributed to see all tensors of parameters from now on.

    In the whole process; later calls change nothing.

    Returns:
        Libraries that own the kernels; cached for as long as the process lives.
    """
    libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in COLLECTIVES}
    for name in all_operation_names():
        namespace, _, operation = name.partition("::")
        if namespace not in libraries:
            continue
        func = getattr(getattr(torch.ops, namespace), operation).default
        if writes(func) or operation == "send":
            put_in_front(libraries[namespace], func, _run)
    return libraries


def _run(func: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation in which torch sees plain arguments only."""
    if any(isinstance(each, (NoRawMemory, ReleasedParameter)) for each in tensors_in(args)):
        args, kwargs = without_released(args, kwargs)
        sharded = next(each for each in tensors_in(args) if isinstance(each, NoRawMemory))
        return type(sharded).__torch_dispatch__(func, (), args, kwargs)  # type: ignore[attr-defined]
    gathered = [
        (each, sharded_of(parameter).spec)
        for each in written(func, args, kwargs)
        if (parameter := parameter_in(each)) is not None
    ]
    targets = [(each, spec) for each, spec in gathered if spec.mesh.slices.size > 1]
    if not targets:
        return run(*args, **kwargs)
    _refuse_receive(func, [spec for _, spec in targets])
    result = run(*args, **kwargs)
    finish(func, result, [each for each, _ in targets])
    for each, _ in targets:
        mark_written(each)
    return result


def refuse_unmet(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a collective on sharded tensors for which the other ranks do not come.

    Call it before anything is gathered, which would wait for them.

    Raises:
        NotImplementedError: Only one rank passes the tensor, or collectives are being coalesced, so
            that no handle says when the result has arrived.
    """
    if not communicates(func):
        return
    name = func.overloadpacket.__name__
    shared = [spec for spec in _specs((args, [*kwargs.values()])) if spec.mesh.data.size > 1]
    targets = [spec for spec in _specs(written(func, args, kwargs)) if spec in shared]
    if shared and coalesces():
        raise NotImplementedError(
            f"{func} on {shared[0].fqn}, which is sharded, inside of a block that "
            f"coalesces collectives: expected one that runs by itself. Communicate a copy of it "
            f"(full_tensor()) or leave the block"
        )
    _refuse_receive(func, targets)
    if targets and name == "gather_":
        raise NotImplementedError(
            f"{func} would write to {targets[0].fqn} on one rank alone, and it is sharded and has "
            f"one value for all ranks: expected a collective that leaves the same on all of them. "
            f"Gather into tensors of your own, or use all_gather; it is unchanged"
        )
    if name == "scatter_":
        sources = [spec for spec in _specs(args[1]) if spec.mesh.slices.size > 1]
        if sources:
            raise NotImplementedError(
                f"{func} would read {sources[0].fqn} on one rank alone, and it is sharded: its "
                f"elements are on other ranks, which do not come to send them. Expected plain "
                f"tensors: call full_tensor() on all ranks, and scatter what it returns"
            )


def _refuse_receive(func: Any, targets: Sequence[ShardSpec]) -> None:
    if targets and func.overloadpacket.__name__ in RECEIVES:
        raise NotImplementedError(
            f"{func} would receive into {targets[0].fqn}, which is sharded and has "
            f"one value for all ranks: expected a collective that leaves the same on all of them. "
            f"Receive into a tensor of your own, and copy_() to the parameter what all ranks agree "
            f"on; it is unchanged"
        )


def _specs(arguments: Any) -> list[ShardSpec]:
    return [each.spec for each in tensors_in(arguments) if isinstance(each, NoRawMemory)]  # type: ignore[attr-defined]


def finish(func: Any, result: Any, targets: Sequence[torch.Tensor]) -> None:
    """Wait for the writes of a collective, even if its caller wants to wait later.

    The caller's ``wait()`` then returns at once.
    """
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            dist.Work.unbox(leaf).wait()
    if func.namespace == "_c10d_functional":
        for target in targets:
            torch.ops._c10d_functional.wait_tensor(target)
