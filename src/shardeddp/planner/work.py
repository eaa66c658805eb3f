"""Work of a micro-batch by unit of the engine, and its extrapolation to other batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardeddp.planner.backward import UnitMemory
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
    costly_nbytes: int = 0
    """Bytes of all results that selective checkpointing keeps."""
    kept_matmul_flops: float = 0.0
    """Part of ``matmul_flops`` whose results it keeps."""
    kept_attention_flops: float = 0.0
    """The same of ``attention_flops``."""
    kept_moved_nbytes: float = 0.0
    """The same of ``moved_nbytes``."""
    input_nbytes: int = 0
    """Bytes of the module's input tensors, without those that are inputs of earlier units."""

    def add(self, other: UnitWork, times: int = 1) -> None:
        """Add other work ``times`` times."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + times * value)


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
    """Memory of each unit while it runs; that of the root unit is for its ``head``."""
    visits: list[int]
    """Unit of each forward, as a place in ``units``, in their order."""
    recomputed: list[bool]
    """True for units that activation checkpointing recomputes."""
    others_recomputed: list[str] = field(default_factory=list[str])
    """Names of other modules than units that it recomputes, which is not planned."""
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
    def trained_shares(self) -> tuple[float, float, float]:
        """Fractions of matmuls, attention and other kernels that have a backward."""
        return _shares(total_of(self.trained), self.total)

    def recomputed_shares(self, recompute: str) -> tuple[float, float, float]:
        """Return the same of inner units, as far as a recomputation repeats them."""
        if recompute == "none":
            return 0.0, 0.0, 0.0
        flags = zip(self.work, self.usages, self.recomputed, strict=True)
        again = total_of([it for it, use, is_again in flags if is_again and use.has_backward])
        shares = _shares(again, self.inner)
        if recompute == "full":
            return shares
        kept = again.kept_matmul_flops, again.kept_attention_flops, again.kept_moved_nbytes
        whole = self.inner.matmul_flops, self.inner.attention_flops, self.inner.moved_nbytes
        parts = zip(shares, kept, whole, strict=True)
        return tuple(share - part / of if of else 0.0 for share, part, of in parts)  # pyright: ignore[reportReturnType]  # of three

    @property
    def model_flops(self) -> float:
        """FLOPs of a forward and a backward, without recomputation; attention counts as matmuls."""
        whole, trained = self.total, total_of(self.trained)
        return (
            whole.matmul_flops
            + whole.attention_flops
            + 2 * (trained.matmul_flops + trained.attention_flops)
        )

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

        # Equal units share one object.
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
            visits=self.visits,
            recomputed=self.recomputed,
            others_recomputed=self.others_recomputed,
            buffers_nbytes=self.buffers_nbytes,
            broadcast_nbytes=self.broadcast_nbytes,
            is_routed=self.is_routed,
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
