"""Collectives of a training step: which, over how many ranks, how large."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shardeddp.plan.gather import GatherStage
from shardeddp.plan.memory import GroupCost
from shardeddp.plan.sharding_strategy import ShardingStrategy

IssuedIn = Literal["begin", "forward", "backward", "step", "layer"]
"""Time of issue. ``begin``: once per optimizer step, before its first forward, which waits for it;
``step``: once, overlapped with the last backward or the first forward; ``layer``: inside of layers
that are split or have experts, which wait for it."""


Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective on a flat buffer or on activations."""

    kind: Kind
    phase: IssuedIn
    unit: int
    nbytes: int
    """Bytes of the whole buffer, not of one rank's shard."""
    ranks: int
    stride: int = 1
    """Difference between the ranks of neighbours in the group. In a shard group: size of the
    tensor- or expert-parallel group, which has consecutive ranks. In a replicate group: number of
    ranks of a replica."""
    times: int = 1
    """Number of calls per optimizer step."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes that one rank sends; as the engine's ``Traffic`` counts them."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * self.nbytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True, kw_only=True)
class UnitUsage:
    """Use of a unit in a micro-batch."""

    calls: int = 1
    """Number of forwards; a unit without any is not gathered."""
    has_backward: bool = True
    """True if results of its forwards require a gradient, of its own parameters or earlier ones."""
    ends_forward: bool = False
    """True if it is unsharded at the end of the forward, and stays so until its backward."""


def collectives_of_step(
    units: Sequence[Sequence[GroupCost]],
    sharding: ShardingStrategy,
    micro_batches: int = 1,
    usages: Sequence[UnitUsage] | None = None,
) -> list[Collective]:
    """Return the collectives that a rank issues in one optimizer step, in steady state.

    ``usages`` has the use of each unit; None: inner units run one after the other, and the last one
    ends the forward and begins the backward. The root stays unsharded through both.
    """
    if usages is None:
        usages = [UnitUsage(ends_forward=it == len(units) - 1) for it in range(len(units))]
    found: list[Collective] = []
    reductions = micro_batches if sharding.reduce_every_backward else 1

    def add(kind: Kind, phase: IssuedIn, unit: int, nbytes: int, ranks: int, **more: int) -> None:
        if ranks > 1 and nbytes:
            found.append(
                Collective(kind=kind, phase=phase, unit=unit, nbytes=nbytes, ranks=ranks, **more)
            )

    phase: IssuedIn
    for index, (groups, usage) in enumerate(zip(units, usages, strict=True)):
        ends = partial(sharding.reshard.ends_forward, awaits_backward=usage.has_backward)
        calls = usage.calls if ends() else min(usage.calls, 1)
        again = index > 0 and usage.has_backward and ends(begins_backward=usage.ends_forward)
        for group in groups:
            shard, replicas, near = group.shard_size, group.replicas, group.tensor_size
            far = near * shard
            full = group.layout.padded_numel * group.param_itemsize
            is_trained = group.trainable and usage.has_backward
            gathers = group.gathers(sharding)
            keeps = gathers.kept_numel > 0 and index > 0 and usage.has_backward
            uses: list[tuple[IssuedIn, bool, bool, int]] = [
                # phase, main shard has changed, a part is kept, count of gathers
                ("forward", is_trained, False, min(calls, 1)),
                ("forward", False, False, min(calls, 1) * (micro_batches - 1)),
                ("forward", False, keeps, max(0, calls - 1) * micro_batches),
                ("backward", False, keeps, again * micro_batches),
            ]
            for phase, changed, kept, times in uses:
                stages = gathers.stages(main_has_changed=changed, has_kept_part=kept)
                for stage in stages if times else ():
                    if stage is GatherStage.AMONG_REPLICAS:
                        add("all_gather", "step", index, full // shard, replicas, stride=far)
                    elif stage is GatherStage.IN_SHARD_GROUP:
                        issued = "step" if gathers.is_retained else phase
                        add("all_gather", issued, index, full, shard, stride=near, times=times)
                    elif stage is GatherStage.IN_REGATHER_GROUP:
                        size = sharding.regather_size or shard
                        add("all_gather", phase, index, full, size, stride=near, times=times)
            # Without gathers in the backward ranks do not tell each other which units they have used.
            if not (is_trained or (group.trainable and sharding.retains)):
                continue
            reduced = group.layout.padded_numel * group.reduce_itemsize
            phase = "backward" if reductions == micro_batches else "step"
            add("reduce_scatter", phase, index, reduced, shard, stride=near, times=reductions)
            across = "reduce_scatter" if group.splitting_replicas > 1 else "all_reduce"
            add(across, "step", index, reduced // shard, replicas, stride=far)
    return found


def broadcasts_of_step(buffers_nbytes: Sequence[int], ranks: int, stride: int) -> list[Collective]:
    """Return the broadcasts of module buffers that ranks issue in one optimizer step.

    ``buffers_nbytes`` has the bytes of those of each dtype; ``ranks`` and ``stride`` are of ranks
    with different batches.
    """
    return [
        Collective(
            kind="broadcast", phase="begin", unit=0, nbytes=nbytes, ranks=ranks, stride=stride
        )
        for nbytes in buffers_nbytes
        if ranks > 1
    ]


@dataclass(kw_only=True)
class Exchange:
    """Collective of a micro-batch on activations or their gradients, in split layers or experts."""

    kind: Kind
    nbytes: int
    """Bytes of the whole buffer, not of one rank's shard."""
    is_redone: bool = False
    """True if a recomputation of the unit issues it again."""


def exchanges_of_step(
    units: Sequence[Sequence[Exchange]],
    ranks: int,
    micro_batches: int = 1,
    *,
    recomputed: Sequence[bool],
) -> list[Collective]:
    """Return the exchanges of activations that a rank issues in one optimizer step.

    ``units`` has those of each unit, ``recomputed`` a flag for each that is recomputed.
    """
    return [
        Collective(
            kind=it.kind,
            phase="layer",
            unit=index,
            nbytes=it.nbytes,
            ranks=ranks,
            times=micro_batches * (1 + (recomputed[index] and it.is_redone)),
        )
        for index, exchanges in enumerate(units)
        for it in exchanges
    ]
