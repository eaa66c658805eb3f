"""Sharding strategies: how many ranks share, when units reshard, when gradients are reduced."""

from dataclasses import dataclass
from enum import Enum

from shardeddp.errors import ConfigurationError
from shardeddp.plan.topology import Topology, divisors


class Reshard(Enum):
    """Point in a step at which a unit's unsharded parameters are released."""

    AFTER_FORWARD = "after_forward"
    """Unsharded only while the unit computes: one unit at a time, plus prefetch."""

    AFTER_BACKWARD = "after_backward"
    """Unsharded from the unit's forward to the end of its backward."""

    NEVER = "never"
    """Gathered buffers are retained; they are gathered again only after the main shard changes."""

    @property
    def in_turn(self) -> bool:
        """True if units have gathered memory in turn: each is gathered again for its backward."""
        return self is Reshard.AFTER_FORWARD

    def ends_forward(self, *, awaits_backward: bool, begins_backward: bool = False) -> bool:
        """Return whether a unit is resharded at the end of its forward.

        Args:
            awaits_backward: True if a backward of the forward is expected.
            begins_backward: True if the unit is the last of the forward: a backward begins with
                it, and would gather it again at once.
        """
        if not awaits_backward:
            return True
        return self is not Reshard.AFTER_BACKWARD and not begins_backward


class ShardSize(Enum):
    """Shard sizes that depend on the run."""

    WORLD = "world"
    NODE = "node"


@dataclass(frozen=True, kw_only=True)
class ShardingStrategy:
    """Sharding strategy of the engine: shard size, times of resharding and of reduction.

    Groups are axes of ``Topology``; ``Mesh`` (comm/mesh.py) has the collectives of each. Main
    shards, gradient shards and optimizer states are 1 / shard group without ``split_replicas``:

    ================  ============  ===============  ==================  =========================
    strategy          shard group   replicate group  gathered, released  reduced
    ================  ============  ===============  ==================  =========================
    full_shard        all ranks     this rank        F, B; f, b          each micro-batch: S
    hybrid_shard      node          one rank a node  F, B; f, b          each micro-batch: S; last
                                                                         of the step: then R
    shard_grad_op     all ranks     this rank        F; b                each micro-batch: S
    shard_optimizer   all ranks     this rank        F if changed; never last of the step: S
    no_shard          this rank     all ranks        F if changed; never last of the step: R
    ================  ============  ===============  ==================  =========================

    F, B: before a unit's forward, before its backward: ``Runtime._visit``, which also prefetches,
    lets ``FlatGroup.unshard`` issue an all-gather in the shard group (``Mesh.gather``). f, b: after
    them, ``Runtime.leave`` and ``Runtime._reshard_after_backward`` let ``FlatGroup.release`` free
    the buffer. "If changed" is ``GatherPlan.is_due``; a
    shard group of one rank only casts, or does nothing.

    S: ``Reduction`` issues a reduce-scatter in the shard group (``Mesh.reduce``).
    R: it then issues an all-reduce of the output in the replicate group (``Mesh.replicate``), as
    ``ReductionPlan.stages`` says. Earlier micro-batches of hybrid sharding wait for R as partial sums:
    ``GradientMemory.keep_partial``.

    Under ``split_replicas`` shards are 1 / (shard group x replicate group): R is a reduce-scatter,
    and a gather of a changed shard begins among its replicas (``Mesh.gather_slices``). Under
    ``regather_size`` the gather of B is in a part of the shard group (``Mesh.regather``).
    ``GatherPlan.stages`` has both.
    """

    shard_size: int | ShardSize
    reshard: Reshard
    reduce_every_backward: bool
    """True if gradients are reduced in every backward.

    False: gradients accumulate unsharded and are reduced once per optimizer step. True: each
    micro-batch is reduced in the shard group and accumulates as shards; the reduction across
    replicas follows once per optimizer step.
    """

    split_replicas: bool = False
    """True if replicas split main shards, gradient shards and optimizer states."""

    regather_size: int | None = None
    """Number of ranks in the backward's all-gather, each with a part kept from the forward's.

    None: the shard group.
    """

    offload_params: bool = False
    """True if main shards, gradient shards and optimizer states live in host memory."""

    @property
    def retains(self) -> bool:
        """True if gathered buffers are retained: steps gather only what an optimizer has changed."""
        return self.reshard is Reshard.NEVER

    def topology(
        self,
        num_nodes: int,
        ranks_per_node: int,
        order: tuple[int, ...] | None = None,
        tensor_size: int = 1,
        expert_size: int = 1,
    ) -> Topology:
        """Return the mesh of ranks for this strategy.

        Args:
            num_nodes: Number of nodes.
            ranks_per_node: Number of ranks on each node.
            order: Ranks ordered node by node; None: 0, 1, 2, ...
            tensor_size: Size of the tensor-parallel group.
            expert_size: Size of the expert-parallel group, for a check alone.

        Raises:
            ConfigurationError: The tensor size does not divide the ranks of a node; or the shard
                size or the expert size does not divide the number of ranks, or the shard size
                makes some groups cross nodes without need.
        """
        if ranks_per_node % tensor_size:
            raise ConfigurationError(
                f"tensor_parallel_size={tensor_size} does not divide the {ranks_per_node} ranks of "
                f"a node: ranks that split layers talk in every layer, and have to be on one node"
            )
        ranks_per_node //= tensor_size
        sizes = {ShardSize.WORLD: num_nodes * ranks_per_node, ShardSize.NODE: ranks_per_node}
        size = self.shard_size if isinstance(self.shard_size, int) else sizes[self.shard_size]
        if 1 < size < ranks_per_node and ranks_per_node % size:
            raise ConfigurationError(
                f"shard_size={size} does not divide the {ranks_per_node} ranks of a node, so some "
                f"ranks that share a model would be on different nodes; use one of "
                f"{divisors(ranks_per_node)}, or a multiple of {ranks_per_node} to share across "
                f"nodes ({num_nodes} nodes x {ranks_per_node} ranks)"
            )
        try:
            topology = Topology(
                world_size=sizes[ShardSize.WORLD] * tensor_size,
                tensor_size=tensor_size,
                shard_size=size,
                split_replicas=self.split_replicas,
                order=_side_by_side(order, size * tensor_size),
                nearest=order,
            )
            if self.regather_size is not None:
                topology.subgroups(self.regather_size)
            if expert_size > 1:
                topology.over_experts(expert_size)
            return topology
        except ValueError as error:
            raise ConfigurationError(
                f"{error} ({num_nodes} nodes x {ranks_per_node} ranks)"
            ) from None


def _side_by_side(order: tuple[int, ...] | None, size: int) -> tuple[int, ...] | None:
    """Order ranks so that groups of ``size`` span few nodes; None: the natural order.

    Ranks 0, 2, 4, 6 on one node and 1, 3, 5, 7 on the other; a group has ascending ranks of a node:

    >>> _side_by_side((0, 2, 4, 6, 1, 3, 5, 7), 2)
    (0, 2, 1, 3, 4, 6, 5, 7)
    """
    ranks = order or ()
    groups = [sorted(ranks[first : first + size]) for first in range(0, len(ranks), max(1, size))]
    order = tuple(rank for group in sorted(groups) for rank in group)
    return None if order == tuple(range(len(order))) else order


def shard_sizes(num_nodes: int, ranks_per_node: int) -> list[int]:
    """Return the shard sizes above 1 that divide a node or consist of whole nodes, ascending.

    >>> shard_sizes(2, 6)
    [2, 3, 6, 12]

    4 divides the 12 ranks, but some groups of 4 would be on both nodes.
    """
    count = num_nodes * ranks_per_node
    return [
        size
        for size in range(min(2, count), count + 1)
        if count % size == 0 and (ranks_per_node % size == 0 or size % ranks_per_node == 0)
    ]


SHARDING_STRATEGIES: dict[str, ShardingStrategy] = {
    # ZeRO-3, FSDP
    "full_shard": ShardingStrategy(
        shard_size=ShardSize.WORLD, reshard=Reshard.AFTER_FORWARD, reduce_every_backward=True
    ),
    # HSDP, MiCS
    "hybrid_shard": ShardingStrategy(
        shard_size=ShardSize.NODE, reshard=Reshard.AFTER_FORWARD, reduce_every_backward=True
    ),
    # ZeRO-2
    "shard_grad_op": ShardingStrategy(
        shard_size=ShardSize.WORLD, reshard=Reshard.AFTER_BACKWARD, reduce_every_backward=True
    ),
    # ZeRO-1
    "shard_optimizer": ShardingStrategy(
        shard_size=ShardSize.WORLD, reshard=Reshard.NEVER, reduce_every_backward=False
    ),
    # DDP: a shard group of one rank
    "no_shard": ShardingStrategy(shard_size=1, reshard=Reshard.NEVER, reduce_every_backward=False),
}
"""Strategies by name, the least memory first and the least communication last.

The order of preference for unknown hardware.
"""
