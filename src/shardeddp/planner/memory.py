"""Memory of a rank at the peak of a step, by kind and by unit: of traced activations and planned buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, repeat
from operator import add

from shardeddp.plan.hardware import GIB, GPU
from shardeddp.plan.memory import (
    BackwardMemory,
    GroupCost,
    MemoryPlan,
    backward_moments,
    kept_parts,
    memory_between_steps,
    pinned,
    unit_sums,
    waiting_gradients,
)
from shardeddp.plan.sharding_strategy import ShardingStrategy
from shardeddp.planner.work import ModelProfile, SavedMemory, sums_to_end

CONTEXT_NBYTES = int(1.5 * GIB)
"""GPU memory outside of the allocator: CUDA context, NCCL buffers, library workspaces."""
OPTIMIZER_STATES = 2
"""Optimizer states per trainable parameter element if none are given: those of AdamW."""
SLACK = 0.08
"""Fragmentation of the allocator, as a fraction of memory allocated and freed within a step."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank at the peak of a step, by kind; all but ``host`` sum to the device's peak."""

    parameters: int
    gradients: int
    optimizer: int
    in_flight: int
    """Bytes of unsharded parameters and gradients, including communication buffers."""
    activations: int
    logits: int
    """Bytes of the root's activations after the last inner unit: logits, loss, their gradient."""
    slack: int
    context: int
    host: int
    buffers: int = 0
    """Buffers of the module, which are not sharded."""

    @property
    def peak(self) -> int:
        """Peak bytes of the device."""
        return sum(vars(self).values()) - self.host

    @property
    def reserved(self) -> int:
        """Bytes that the allocator reserves (``torch.cuda.max_memory_reserved``) if it can.

        The first optimizer step puts its states where activations were before, so those of the next
        step take new blocks.
        """
        freed = self.in_flight + self.activations + self.logits
        return self.peak - self.context + min(self.optimizer, freed)

    def shortage(self, gpu: GPU) -> float:
        """Return 0 if a GPU has what the allocator would reserve, 1 if it lacks 5 % or more."""
        wanted = self.reserved + self.context
        return min(1.0, max(0.0, wanted / (gpu.memory_gb * 1e9) - 1) / 0.05)


@dataclass(frozen=True, kw_only=True)
class BufferMemory:
    """Bytes of flat buffers in a step: unsharded parameters, and gradients that are not reduced yet."""

    units: Sequence[Sequence[GroupCost]]
    """Flat buffers of each unit, the root unit first."""
    sharding: ShardingStrategy
    unsharded: Sequence[range]
    """Inner units that are unsharded in the forward of each one, and at the loss."""
    in_forward: Sequence[int]
    """Bytes in the forward of each inner unit, and at the loss."""
    in_backward: Sequence[BackwardMemory]

    @staticmethod
    def of(
        units: Sequence[Sequence[GroupCost]],
        visits: Sequence[int],
        sharding: ShardingStrategy,
        *,
        has_backward: Sequence[bool] | None = None,
        prefetch: tuple[int, int],
        accumulates: bool,
        keeps_last: bool = True,
        needs_receive_buffer: bool = False,
    ) -> BufferMemory:
        """Plan the buffers of a step.

        Args:
            units: Flat buffers of each unit, the root unit first. Units that no forward gathers
                take none.
            visits: Unit of each forward.
            has_backward: Whether each forward has a backward; None: all have.
            sharding: Strategy: times of resharding and reduction.
            prefetch: Depths of the forward and of the backward prefetch.
            accumulates: True if a step has several micro-batches.
            keeps_last: False if the last unit is released as all others are.
            needs_receive_buffer: True if a reduce-scatter needs a receive buffer (gloo).
        """
        gathered = {0, *visits}
        used = [unit if at in gathered else [] for at, unit in enumerate(units)]
        unsharded = _unsharded_in_forward(len(units), sharding, prefetch, keeps_last)
        nbytes = unit_sums(used, lambda it: it.gathered_nbytes)
        root = 0 if sharding.retains else nbytes[0]
        waiting = waiting_gradients(used, sharding, accumulates=accumulates)
        # A unit keeps its part before it is released.
        order = range(1, len(units))
        kept = [*accumulate(kept_parts(used, sharding, order, keeps_last=keeps_last))]
        flags = [True] * len(visits) if has_backward is None else has_backward
        places = [at for at, has in enumerate(flags) if has]
        moments = backward_moments(
            used,
            sharding,
            prefetch=prefetch[1],
            needs_receive_buffer=needs_receive_buffer,
            accumulates=accumulates,
            uses=[visits[it] for it in places],
            keeps_last=keeps_last,
        )
        if len(places) < len(visits):
            moments = [
                replace(it, position=places[it.position]) if it.unit else it for it in moments
            ]
        return BufferMemory(
            units=units,
            sharding=sharding,
            unsharded=unsharded,
            in_forward=[
                waiting + root + sum(nbytes[it.start : it.stop]) + parts
                for it, parts in zip(unsharded, (*kept[1:], kept[-1]), strict=True)
            ],
            in_backward=moments,
        )


def _unsharded_in_forward(
    count: int, sharding: ShardingStrategy, prefetch: tuple[int, int], keeps_last: bool
) -> list[range]:
    """Return the inner units of ``count`` units that are gathered in each forward, and at the loss.

    At the loss the last unit is still unsharded, and those before it are prefetched. Units that are
    unsharded between steps are not gathered.
    """
    ahead, back = prefetch
    inner = range(1, count)
    if sharding.retains:
        return [range(0)] * count
    if sharding.reshard.in_turn:
        at_loss = range(max(1, count - max(int(keeps_last), back)), count)
        return [*(range(it, min(count, it + 1 + ahead)) for it in inner), at_loss]
    return [*(range(1, min(count, it + 1 + ahead)) for it in inner), inner]


def _held_by_attributes(
    work: ModelProfile, saved: SavedMemory, buffers: BufferMemory
) -> Sequence[int]:
    """Return ``saved.held`` with the unsharded parameters that graphs hold."""
    if not saved.graphs or buffers.sharding.retains:
        return saved.held
    gathered = unit_sums(buffers.units, lambda it: it.gathered_nbytes)
    graphs = [0] * len(saved.held)
    for at in saved.graphs:
        graphs[at] = gathered[work.visits[at]]
    return [*map(add, saved.held, sums_to_end(graphs))]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Moment of a step at which a rank holds most, beside shards and optimizer states.

    Candidates are the broadcast of buffers, the forwards of the root and of each unit, the backward
    of the loss, when all saved activations exist, and the recomputation and backward of each unit.
    """

    work: ModelProfile
    recompute: str
    buffers: BufferMemory
    in_flight: int
    activations: int
    logits: int
    moment: int
    """Place among the candidates."""

    @staticmethod
    def of(work: ModelProfile, recompute: str, buffers: BufferMemory) -> Peak:
        """Find the peak of a micro-batch under a kind of recomputation."""
        of_loss, saved = work.memory[0].backward, work.saved[recompute]
        at_head = max(of_loss.gradients, default=0)
        # What forwards have saved is not freed yet in the backward of the last one of them.
        below, running = saved.below, saved.in_backward
        of_root, held = work.root_memory, work.root_memory.held_nbytes
        moments = buffers.in_backward
        loss = of_loss.accumulating_peak if moments[0].accumulates else of_loss.peak
        # Before the first gather; the copy of one dtype lives until that of the next one is made.
        copies = max(map(sum, pairwise([0, *work.broadcast_nbytes])), default=0)
        flat, at_loss = [buffers.in_forward[it - 1] for it in work.visits], buffers.in_forward[-1]
        # Before a forward are no more units than in it, and no more than in the one before.
        before = map(min, flat, [*flat[:1], *flat])
        by_attributes = _held_by_attributes(work, saved, buffers)
        after = [*map(add, by_attributes, saved.in_graph)]
        in_forward, before_forward = (
            [*map(add, each, by_attributes)] if by_attributes[0] else each
            for each in (saved.in_forward, saved.before_forward)
        )
        # Bytes in flight, of activations and of logits; _at_peak knows the order.
        candidates = [
            (at_loss, below[-1] + held, work.kept[recompute].head_nbytes + loss),
            (copies, of_root.at_begin, 0),
            (at_loss, below[-1] + saved.for_step, of_root.peaks[-1] - below[0]),
            *zip(flat, in_forward, repeat(0), strict=False),
            *zip(before, before_forward, repeat(0), strict=False),
        ]
        candidates += [
            (
                it.nbytes - max(0, it.root_nbytes - at_head),
                below[it.position]
                + (0 if it.is_over else running[it.accumulates][it.unit and 1 + it.position])
                + after[it.position + (it.unit > 0 and not it.is_over)]
                - it.own_nbytes
                + held,
                0,
            )
            for it in moments
        ]
        totals = [*map(sum, candidates)]
        moment = totals.index(max(totals))
        in_flight, activations, logits = candidates[moment]
        return Peak(
            work=work,
            recompute=recompute,
            buffers=buffers,
            in_flight=in_flight,
            activations=activations,
            logits=logits,
            moment=moment,
        )

    def memory(self, between_steps: MemoryPlan) -> Memory:
        """Return all memory at the peak."""
        moving = self.in_flight + self.activations + self.logits
        return Memory(
            parameters=between_steps.main_shard_nbytes + between_steps.retained_nbytes,
            gradients=between_steps.gradient_shard_nbytes,
            optimizer=between_steps.optimizer_nbytes,
            in_flight=self.in_flight,
            activations=self.activations,
            logits=self.logits,
            slack=int(SLACK * moving),
            context=CONTEXT_NBYTES,
            host=between_steps.host_nbytes
            + sum(map(pinned, self.work.saved[self.recompute].on_host)),
            buffers=self.work.buffers_nbytes,
        )

    def by_unit(
        self, *, optimizer_states: int = OPTIMIZER_STATES, offload_optimizer: bool = False
    ) -> dict[str, dict[str, int]]:
        """Divide the memory at the peak by kind and unit; what belongs to no unit has another name.

        Kinds are those of :class:`Memory`, without memory of the host.
        """
        units, sharding = self.buffers.units, self.buffers.sharding
        labels = [it.label for it in self.work.units]

        def between_steps(some: Sequence[Sequence[GroupCost]]) -> MemoryPlan:
            return memory_between_steps(
                some,
                sharding,
                states_per_element=optimizer_states,
                offload_optimizer=offload_optimizer,
            )

        total = vars(self.memory(between_steps(units)))
        found: dict[str, dict[str, int]] = {
            kind: {"": nbytes} for kind, nbytes in total.items() if kind != "host"
        }
        each = [vars(between_steps([unit])) for unit in units]
        for kind, names in (
            ("parameters", ("main_shard_nbytes", "retained_nbytes")),
            ("gradients", ("gradient_shard_nbytes",)),
            ("optimizer", ("optimizer_nbytes",)),
        ):
            sums = [sum(it[name] for name in names) for it in each]
            found[kind] = dict(zip(labels, sums, strict=True))
        position, running, own, unsharded = self._at_peak()
        gathered = unit_sums(units, lambda it: it.gathered_nbytes)
        visited = {0, *self.work.visits}  # no other unit is ever unsharded
        found["in_flight"] = {labels[it]: gathered[it] for it in unsharded if it in visited}
        rest = self.in_flight - sum(found["in_flight"].values())
        found["in_flight"]["gradients and buffers of communication"] = rest
        below = self.work.saved[self.recompute].below
        kept: Counter[str] = Counter()
        for unit, before, after in zip(self.work.visits[:position], below, below[1:], strict=False):
            kept[labels[unit]] += after - before
        kept[labels[running]] += own
        found["activations"] = {
            **kept,
            labels[0]: self.activations - sum(kept.values()) + kept[labels[0]],
        }
        return found

    def _at_peak(self) -> tuple[int, int, int, Sequence[int]]:
        """Return what runs at the peak.

        Number of forwards whose activations are kept, running unit, bytes of activations that it
        takes itself, and units that are unsharded.
        """
        work, buffers = self.work, self.buffers
        visits, in_backward = work.visits, work.saved[self.recompute].in_backward
        root = () if buffers.sharding.retains else (0,)
        inner = [buffers.unsharded[unit - 1] for unit in visits]

        def running(it: BackwardMemory) -> int:
            if it.is_over or not it.unit:
                return 0
            return max(0, in_backward[it.accumulates][1 + it.position] - it.own_nbytes)

        def ahead(it: BackwardMemory) -> Collection[int]:
            if it.unsharded is not None:
                return it.unsharded
            flags = zip(visits[: it.position + 1], work.has_backward, strict=False)
            return {unit for unit, has_backward in flags if has_backward}

        at_loss = len(visits), 0, 0, (*root, *buffers.unsharded[-1])
        places = [  # in the order of the candidates
            at_loss,
            (0, 0, 0, ()),
            at_loss,
            *(
                (at, unit, work.memory[1 + at].forward_nbytes, (*root, *inner[at]))
                for at, unit in enumerate(visits)
            ),
            *(
                (at, 0, 0, (*root, *(it for it in inner[max(0, at - 1)] if it in inner[at])))
                for at in range(len(visits))
            ),
            *(
                (it.position, it.unit, running(it), (*root, *ahead(it)))
                for it in buffers.in_backward
            ),
        ]
        return places[self.moment]
