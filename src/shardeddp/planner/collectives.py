"""Collectives of a training step: which, over how many ranks, how large."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardeddp.plan.memory import GroupCost
from shardeddp.plan.sharding_strategy import Reshard, ShardingStrategy
from shardeddp.plan.topology import Topology

Phase = Literal["forward", "backward", "step", "layer"]
"""Phase of a step that issues a collective. ``step``: once per optimizer step, during the last
backward or the first forward; ``layer``: inside tensor-parallel layers, which wait for it."""


Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective on a flat buffer or on activations."""

    kind: Kind
    phase: Phase
    unit: int
    nbytes: int
    """Bytes of the whole buffer, not of one rank's shard."""
    ranks: int
    stride: int = 1
    """Distance between neighbouring global ranks of the group: 1 in a tensor-parallel group, the
    size of that group in a shard group, the size of a replica across replicas."""
    times: int = 1
    """Number of calls per optimizer step."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes that one rank sends in a ring algorithm, counted as in the engine's ``Traffic``."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * self.nbytes * (self.ranks - 1) // self.ranks


def collectives_of_step(
    units: Sequence[Sequence[GroupCost]],
    sharding: ShardingStrategy,
    topology: Topology,
    micro_batches: int = 1,
) -> list[Collective]:
    """Return the collectives that a rank issues in one optimizer step, in steady state.

    Inner units are assumed to run one after the other: the last one ends the forward and begins
    the backward, and the root stays unsharded through both.

    Args:
        units: Flat buffers of every unit, the root unit first.
        sharding: Strategy: times of resharding and of gradient reduction.
        topology: Sizes of the shard, replicate and tensor-parallel groups.
        micro_batches: Number of micro-batches per optimizer step.
    """
    found: list[Collective] = []
    shard, replicas = topology.shard_size, topology.replicate_size
    near, far = topology.tensor_size, topology.tensor_size * shard
    retained = sharding.reshard is Reshard.NEVER
    reductions = micro_batches if sharding.reduce_every_backward else 1

    def add(kind: Kind, phase: Phase, unit: int, nbytes: int, ranks: int, **more: int) -> None:
        if ranks > 1 and nbytes:
            more = {"stride": near, **more}
            found.append(
                Collective(kind=kind, phase=phase, unit=unit, nbytes=nbytes, ranks=ranks, **more)
            )

    phase: Phase
    for index, groups in enumerate(units):
        again = sharding.reshard is Reshard.AFTER_FORWARD and 0 < index < len(units) - 1
        for group in groups:
            full = group.layout.padded_numel * group.param_itemsize
            times = 1 if retained else micro_batches
            # Frozen parameters do not change: retained copies of them are not gathered again.
            if topology.split_replicas and group.trainable:
                add("all_gather", "step", index, full // shard, replicas, stride=far)
            if group.trainable or not retained:
                phase = "step" if retained else "forward"
                add("all_gather", phase, index, full, shard, times=times)
            if again:
                add(
                    "all_gather",
                    "backward",
                    index,
                    full,
                    sharding.regather_size or shard,
                    times=micro_batches,
                )
            if not group.trainable:
                continue
            reduced = group.layout.padded_numel * group.reduce_itemsize
            phase = "backward" if reductions == micro_batches else "step"
            add("reduce_scatter", phase, index, reduced, shard, times=reductions)
            across = "reduce_scatter" if topology.split_replicas else "all_reduce"
            add(across, "step", index, reduced // shard, replicas, stride=far)
    return found


@dataclass(kw_only=True)
class Exchange:
    """Collective of a tensor-parallel layer on activations or their gradients, per micro-batch."""

    kind: Kind
    nbytes: int
    """Bytes of the whole buffer, not of one rank's shard."""
    is_redone: bool = False
    """True if a recomputation of the unit issues it again."""


def exchanges_of_step(
    units: Sequence[Sequence[Exchange]],
    topology: Topology,
    micro_batches: int = 1,
    *,
    recomputes: bool,
) -> list[Collective]:
    """Return the collectives of tensor-parallel layers in one optimizer step.

    Args:
        units: Exchanges of each unit, the root unit first. The root is never recomputed.
        topology: Topology with the size of the tensor-parallel group.
        micro_batches: Number of micro-batches per optimizer step.
        recomputes: True if inner units are recomputed in the backward.
    """
    return [
        Collective(
            kind=it.kind,
            phase="layer",
            unit=index,
            nbytes=it.nbytes,
            ranks=topology.tensor_size,
            times=micro_batches * (1 + (recomputes and it.is_redone and index > 0)),
        )
        for index, exchanges in enumerate(units)
        for it in exchanges
    ]
