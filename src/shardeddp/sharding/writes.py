"""What an operation writes to whole tensors, brought back to the shards that they were gathered from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree

from shardeddp.sharding.questions import RECEIVES, communicates, is_random, tells_what_it_writes
from shardeddp.sharding.shard_tensor import ShardTensor

if TYPE_CHECKING:
    from shardeddp.sharding.gathered import Gathered


def run_on_whole(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gathered: Sequence[Gathered], targets: Sequence[Gathered]
) -> Any:
    """Run an operation on whole tensors, and bring what it writes to them back to their shards.

    A sharded tensor has one value for all ranks. So random numbers are those of rank 0, and what a collective writes is
    refused where it differs between ranks.

    Args:
        func: The operation.
        args: Its arguments, plain.
        kwargs: The same.
        gathered: Whole tensors among them.
        targets: Those that it is known to write to.

    Raises:
        NotImplementedError: Nobody could tell when something has arrived.
        RuntimeError: What was written differs between ranks; shards are unchanged.
    """
    refuse_overlapping(func, targets)
    talks = communicates(func)
    if talks and gathered:
        _refuse_late(func, gathered[0], targets)
    suspects = [] if tells_what_it_writes(func) else [home for home in gathered if home not in targets]
    before = [home.digest() for home in suspects]
    result = func(*args, **kwargs)
    if talks and targets:
        _finish(func, result, targets)
        for home in targets:
            home.check_alike(func)
    for home, digest in zip(suspects, before, strict=True):
        changed = home.digest() != digest
        if home.check_alike(func, changed=changed):
            home.write_back()
    for home in targets:
        if is_random(func):
            home.follow_rank_zero(func)
        home.write_back()
    return result


def refuse_overlapping(func: Any, targets: Sequence[Gathered], also: Iterable[ShardTensor] = ()) -> None:
    """Refuse to write to one shard by way of several copies of it.

    Args:
        func: The operation.
        targets: Whole tensors that it writes to.
        also: Sharded tensors that it writes to, without gathering them.
    """
    sharded = [*(home.sharded for home in targets), *also]
    if targets and len({id(each.to_local()) for each in sharded}) < len(sharded):
        fqns = ", ".join(sorted({each.spec.fqn for each in sharded}))
        raise NotImplementedError(f"{func} would write to several views of {fqns} at once: write to one at a time")


def _refuse_late(func: Any, asked: Gathered, targets: Sequence[Gathered]) -> None:
    """Refuse operations whose result arrives when nothing of ours runs."""
    if asked.sharded.spec.mesh.world.size == 1:
        return
    if distributed_c10d._world.pg_coalesce_state:
        raise NotImplementedError(
            f"{func} on {asked.sharded.spec.fqn}, which is sharded, inside of a block that coalesces collectives: "
            f"expected one that runs by itself. Communicate a copy of it (full_tensor()) or leave the block"
        )
    if targets and func.overloadpacket.__name__ in RECEIVES:
        raise NotImplementedError(
            f"{func} would receive into {targets[0].sharded.spec.fqn}, which is sharded and has one value for all "
            f"ranks: expected a collective that leaves the same on all of them. Receive into a tensor of your own, and "
            f"copy_() to the parameter what all ranks agree on; it is unchanged"
        )


def _finish(func: Any, result: Any, targets: Sequence[Gathered]) -> None:
    """Wait for what a collective writes, also where its caller wants to wait later: ``wait()`` finds it done."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            dist.Work.unbox(leaf).wait()
    if func.namespace == "_c10d_functional":
        for home in targets:
            torch.ops._c10d_functional.wait_tensor(home.full)
