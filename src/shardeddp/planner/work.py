"""Work of a micro-batch by unit of the engine, and its extrapolation to other batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

from shardeddp.planner.backward import RootMemory, UnitMemory, extrapolated
from shardeddp.planner.collectives import Exchange, UnitUsage
from shardeddp.wrap.tree import UnitSpec


@dataclass(kw_only=True)
class UnitWork:
    """Counted work of a forward; that of backward and recomputation is derived from it."""

    matmul_flops: float = 0.0
    matmul_nbytes: float = 0.0
    """Bytes of matmuls' operands and results."""
    attention_flops: float = 0.0
    """FLOPs of fused attention; half as many if it is causal."""
    moved_nbytes: float = 0.0
    """Bytes that all other operations read and write."""
    kernels: int = 0
    saved_nbytes: int = 0
    """Bytes saved for the backward: each storage once, without parameters and their copies."""
    kept_matmul_flops: float = 0.0
    """Part of ``matmul_flops`` whose results selective checkpointing keeps."""
    kept_attention_flops: float = 0.0
    """The same of ``attention_flops``."""
    kept_moved_nbytes: float = 0.0
    """The same of ``moved_nbytes``."""

    def add(self, other: UnitWork, times: int = 1) -> None:
        """Add other work ``times`` times."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + times * value)


RECOMPUTES = ("none", "selective", "full")
"""Kinds of recomputation."""


@dataclass(kw_only=True)
class KeptMemory:
    """Bytes that forwards keep for their backwards: each storage once, in the first one with it."""

    root_nbytes: int = 0
    """Bytes that the root keeps."""
    head_nbytes: int = 0
    """Part of it that its head keeps."""
    kept: list[int]
    """Bytes that each forward keeps on the device."""
    given: list[int]
    """Part of it that are inputs of a forward that is recomputed."""
    on_host: list[int]
    """Bytes of such inputs that are in host memory from the forward to its backward."""
    again: list[int]
    """Bytes that are recomputed."""
    held: list[int]
    """Bytes of each forward, and of the root's head, that attributes of modules hold after its
    backward, until the module's next forward."""
    in_graph: list[int]
    """Bytes of each forward that its graph holds until the loss is freed: attributes of functions'
    contexts, which no backward frees."""
    for_step: list[int]
    """Bytes of each forward that something else holds until the step's forward is over, as the
    cache of autocast does; without those that it keeps."""
    graphs: list[int] = field(default_factory=list[int])
    """Forwards whose unsharded parameters are held with it, by the graph of their recomputation."""

    @staticmethod
    def of(count: int) -> KeptMemory:
        """Return that of ``count`` forwards that keep nothing."""
        by_forward: dict[str, Any] = {name: [0] * count for name in _BY_FORWARD}
        by_forward["held"].append(0)
        return KeptMemory(**by_forward)

    def extrapolate(self, two: KeptMemory, micro_batch: int) -> KeptMemory:
        """Extrapolate to ``micro_batch`` samples; this one is of one sample, ``two`` of two."""
        root, head = extrapolated(
            (self.root_nbytes, self.head_nbytes), (two.root_nbytes, two.head_nbytes), micro_batch
        )
        by_forward: dict[str, Any] = {
            name: extrapolated(vars(self)[name], vars(two)[name], micro_batch)
            for name in _BY_FORWARD
        }
        return KeptMemory(root_nbytes=root, head_nbytes=head, graphs=self.graphs, **by_forward)


_BY_FORWARD = "kept", "given", "on_host", "again", "held", "in_graph", "for_step"
"""Numbers of :class:`KeptMemory` that each forward has."""


@dataclass(kw_only=True)
class ModelProfile:
    """Work of one micro-batch, by unit of the engine."""

    units: list[UnitSpec]
    """Units in the order of their first forwards, after the root unit and those without any."""
    usages: list[UnitUsage]
    """Use of each unit."""
    work: list[UnitWork]
    """Work of each unit, the root unit first."""
    trained: list[UnitWork]
    """Part of each unit's work that has a backward: all if no parameter is frozen, as half of its
    FLOPs in the backward are for the gradients of parameters."""
    head: UnitWork
    """Root's work after the last inner unit: logits and loss; included in ``work[0]``."""
    tokens: int
    """Tokens of a micro-batch; samples if inputs are not sequences."""
    buffers_nbytes: int
    """Bytes of the module's buffers, which every rank has whole."""
    broadcast_nbytes: list[int]
    """Bytes of the buffers of each dtype that follow those of rank 0."""
    exchanges: list[list[Exchange]]
    """Exchanges of each unit between the ranks that have parts of its layers."""
    memory: list[UnitMemory]
    """Memory of the root's ``head``, and of each forward in ``visits`` while it runs."""
    kept: Mapping[str, KeptMemory]
    """What forwards keep under each kind of recomputation."""
    root_memory: RootMemory
    """Memory of the root's forward around those of units."""
    visits: list[int]
    """Unit of each forward, as a place in ``units``, in their order."""
    has_backward: list[bool]
    """Whether each forward has a backward."""
    recomputed: list[bool]
    """True for units that activation checkpointing recomputes."""
    others_recomputed: list[str] = field(default_factory=list[str])
    """Names of other modules than units that it recomputes, which is not planned."""
    leaking: list[str] = field(default_factory=list[str])
    """Names of recomputed units that leave tensors with a graph in attributes or arguments."""
    is_routed: bool = False
    """True if shapes depend on choices by scores, which are assumed to be even."""
    is_even: bool = True
    """True if these choices are even without a remainder."""

    @cached_property
    def total(self) -> UnitWork:
        """Sum over all units."""
        return total_of(self.work)

    @cached_property
    def inner(self) -> UnitWork:
        """Sum over all inner units."""
        return total_of(self.work[1:])

    @cached_property
    def alike(self) -> Sequence[int]:
        """Place of the first unit with equal flat buffers, for each unit."""
        first: dict[object, int] = {}
        return [first.setdefault(_form(unit), place) for place, unit in enumerate(self.units)]

    @cached_property
    def trained_shares(self) -> tuple[float, float, float]:
        """Fractions of matmuls, attention and other kernels that have a backward."""
        return _shares(total_of(self.trained), self.total)

    @cached_property
    def recomputed_shares(self) -> Mapping[str, tuple[float, float, float]]:
        """The same of inner units, as far as each kind of recomputation repeats them."""
        flags = zip(self.work, self.usages, self.recomputed, strict=True)
        again = total_of([it for it, use, is_again in flags if is_again and use.has_backward])
        shares = _shares(again, self.inner)
        kept = again.kept_matmul_flops, again.kept_attention_flops, again.kept_moved_nbytes
        whole = self.inner.matmul_flops, self.inner.attention_flops, self.inner.moved_nbytes
        parts = zip(shares, kept, whole, strict=True)
        matmul, attention, moved = (share - part / of if of else 0.0 for share, part, of in parts)
        return {"none": (0.0, 0.0, 0.0), "selective": (matmul, attention, moved), "full": shares}

    @cached_property
    def saved(self) -> Mapping[str, SavedMemory]:
        """Bytes that units keep for their backward, under each kind of recomputation."""
        return {it: SavedMemory.of(self, it) for it in RECOMPUTES}

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of a forward and a backward, without recomputation; attention counts as matmuls."""
        whole, trained = self.total, total_of(self.trained)
        return (
            whole.matmul_flops
            + whole.attention_flops
            + 2 * (trained.matmul_flops + trained.attention_flops)
        )

    def is_like(self, other: ModelProfile) -> bool:
        """Return whether another number of samples has run the same operations of the same units."""
        return self._form() == other._form()

    def is_close(self, other: ModelProfile) -> bool:
        """Return whether another profile has the same work and memory, at every moment."""
        return self.is_like(other) and all(
            math.isclose(*pair, rel_tol=1e-12)
            for pair in zip(self._figures(), other._figures(), strict=True)
        )

    def _form(self) -> object:
        """Return units, their uses, and lengths of all lists."""
        return (
            [unit.name for unit in self.units],
            self.usages,
            self.visits,
            self.has_backward,
            [*map(len, self.exchanges)],
            [(len(it.forward), len(it.backward.activations)) for it in self.memory],
            [*map(len, self.root_memory.between)],
        )

    def _figures(self) -> Iterator[float]:
        """Yield all that depends on the number of samples."""
        for work in (*self.work, *self.trained, self.head):
            yield from vars(work).values()
        for exchange in (it for exchanges in self.exchanges for it in exchanges):
            yield exchange.nbytes
        for memory in self.memory:
            yield from (*memory.forward, *memory.backward.activations, *memory.backward.gradients)
        for kept in self.kept.values():
            yield from (kept.root_nbytes, kept.head_nbytes)
            yield from (nbytes for name in _BY_FORWARD for nbytes in vars(kept)[name])
        root = self.root_memory
        yield from (root.at_begin, *root.at_forward, root.held_nbytes)
        for between in root.between:
            yield from between

    def extrapolate(self, two: ModelProfile, micro_batch: int) -> ModelProfile:
        """Extrapolate to ``micro_batch`` samples; this profile has one sample, ``two`` has two."""

        def at(one: UnitWork, other: UnitWork) -> UnitWork:
            first, second = vars(one), vars(other)
            return UnitWork(
                **{
                    name: first[name] + (micro_batch - 1) * (second[name] - first[name])
                    for name in first
                }
            )

        # Equal forwards share one object.
        pairs = {id(one): (one, other) for one, other in zip(self.memory, two.memory, strict=True)}
        made = {key: one.extrapolate(other, micro_batch) for key, (one, other) in pairs.items()}
        return ModelProfile(
            units=self.units,
            usages=self.usages,
            trained=[at(*pair) for pair in zip(self.trained, two.trained, strict=True)],
            work=[at(*pair) for pair in zip(self.work, two.work, strict=True)],
            head=at(self.head, two.head),
            tokens=self.tokens * micro_batch,
            exchanges=[
                [
                    replace(it, nbytes=it.nbytes + (micro_batch - 1) * (other.nbytes - it.nbytes))
                    for it, other in zip(*pair, strict=True)
                ]
                for pair in zip(self.exchanges, two.exchanges, strict=True)
            ],
            memory=[made[id(one)] for one in self.memory],
            kept={it: one.extrapolate(two.kept[it], micro_batch) for it, one in self.kept.items()},
            root_memory=self.root_memory.extrapolate(two.root_memory, micro_batch),
            visits=self.visits,
            has_backward=self.has_backward,
            recomputed=self.recomputed,
            others_recomputed=self.others_recomputed,
            leaking=self.leaking,
            buffers_nbytes=self.buffers_nbytes,
            broadcast_nbytes=self.broadcast_nbytes,
            is_routed=self.is_routed,
        )


@dataclass(frozen=True, kw_only=True)
class SavedMemory:
    """Bytes that units keep from forward to backward, and that their backwards take."""

    below: Sequence[int]
    """Bytes kept by the forwards before each one, and by all; without the root's head."""

    in_forward: Sequence[int]
    """Bytes in each forward: kept by those before it, of the root, and its own."""

    before_forward: Sequence[int]
    """The same before each forward: at the root's peak since the one before."""

    on_host: Sequence[int]
    """Bytes of each forward that are in host memory from then to its backward."""

    held: Sequence[int]
    """Bytes that attributes hold of forwards from each one on, and of the root's head: after these
    backwards, and before these forwards of the next step."""

    in_graph: Sequence[int]
    """Bytes that graphs hold of forwards from each one on, after these backwards."""

    for_step: int
    """Bytes of all forwards that something else holds until the step's forward is over."""

    graphs: Sequence[int]
    """Forwards whose unsharded parameters are held with them, if they are sharded."""

    in_backward: Mapping[bool, Sequence[int]]
    """Bytes that the backwards of the root and of each forward take, with those kept and recomputed
    for it; True: of one whose gradients are added to earlier ones."""

    @staticmethod
    def of(profile: ModelProfile, recompute: str) -> SavedMemory:
        """Return the bytes under a kind of recomputation."""
        its, of_root = profile.kept[recompute], profile.root_memory
        root = its.root_nbytes - its.head_nbytes

        def in_backward(accumulates: bool) -> list[int]:
            of = [it.backward for it in profile.memory]
            peaks = [it.accumulating_peak if accumulates else it.peak for it in of]
            found = [its.root_nbytes + peaks[0]]
            for at, (peak, memory) in enumerate(zip(peaks[1:], profile.memory[1:], strict=True)):
                running = its.kept[at] + its.on_host[at] + its.again[at] + peak
                if its.again[at]:
                    given = its.given[at] + its.on_host[at]
                    running = max(running, given + memory.forward_nbytes)
                found.append(running)
            return found

        below = [*accumulate([root, *its.kept])]
        for_step = [*accumulate([0, *its.for_step])]
        of_units = [nbytes - root for nbytes in map(add, below, for_step)]
        own = [it.forward_nbytes for it in profile.memory[1:]]
        return SavedMemory(
            below=below,
            in_forward=[*map(sum, zip(of_units, of_root.at_forward, own, strict=False))],
            before_forward=[*map(sum, zip(of_units[:-1], of_root.peaks[:-1], strict=True))],
            on_host=its.on_host,
            held=sums_to_end(its.held),
            in_graph=sums_to_end([*its.in_graph, 0]),
            for_step=for_step[-1],
            graphs=its.graphs,
            in_backward={it: in_backward(it) for it in (False, True)},
        )


def sums_to_end(nbytes: Sequence[int]) -> list[int]:
    """Return the sum from each entry on."""
    return [*accumulate(reversed(nbytes))][::-1]


def _form(unit: UnitSpec) -> object:
    """Return what the flat buffers of a unit follow from, without its names."""
    memory: dict[int, int] = {}
    return tuple(
        (
            it.parameter.shape,
            it.parameter.requires_grad,
            (it.dtype, it.param_dtype, it.reduce_dtype),
            memory.setdefault(it.memory, place),
            len(it.distribution.boxes) if it.distribution and it.is_of_experts else 0,
        )
        for place, it in enumerate(unit.parameters)
    )


def total_of(works: Sequence[UnitWork]) -> UnitWork:
    """Return the sum of works."""
    result = UnitWork()
    for work in works:
        result.add(work)
    return result


def _shares(part: UnitWork, whole: UnitWork) -> tuple[float, float, float]:
    """Return fractions of matmuls, attention and other work; 1 of what there is none of."""

    def share(name: str) -> float:
        return vars(part)[name] / vars(whole)[name] if vars(whole)[name] else 1.0

    return share("matmul_flops"), share("attention_flops"), share("moved_nbytes")
