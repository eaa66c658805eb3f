"""FlatLayout: where every parameter of a unit lies in the unit's flat buffer, and which part of it a rank owns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardeddp.plan.intervals import Interval

ALIGNMENT_NBYTES = 16
"""Every slot and every rank's slice starts on a multiple of this, as vector loads and NCCL's fast path want
(https://github.com/pytorch/pytorch/issues/195450)."""


@dataclass(frozen=True, kw_only=True)
class ParameterSlot:
    """The place of one parameter in a flat buffer; ``offset`` and ``numel`` count elements."""

    fqn: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def interval(self) -> Interval:
        """The parameter's elements, counted from the start of the flat buffer."""
        return Interval(self.offset, self.offset + self.numel)


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Places parameters in flat buffers that ``shard_size`` ranks divide evenly.

    Parameters keep the order they come in; each starts on an aligned element; the end is padded so that every rank's
    slice is equally long and aligned as well. Two float32 parameters of 6 and 5 elements over 2 ranks (16 bytes are 4
    elements)::

        flat buffer   a a a a a a - - | b b b b b - - -     padded_numel = 16
        rank          0 0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1     shard_numel  = 8

    Build it with :meth:`build`. The layout is arithmetic: it holds no tensor and knows no process group.
    """

    itemsize: int
    """Bytes of one element in the narrowest of the buffers; alignment is by it, so it holds in the wider ones too."""

    shard_size: int
    slots: tuple[ParameterSlot, ...]
    padded_numel: int

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise ValueError(f"expected a shard_size of at least 1, found {self.shard_size}")
        if self.padded_numel % self.shard_size:
            raise ValueError(
                f"expected a padded_numel that shard_size={self.shard_size} divides, found {self.padded_numel}"
            )
        end = 0
        for slot in self.slots:
            if slot.offset < end:
                raise ValueError(f"slot {slot.fqn} starts at {slot.offset}, before the end {end} of the one before it")
            end = slot.interval.stop
        if end > self.padded_numel:
            raise ValueError(f"the slots end at {end}, behind padded_numel={self.padded_numel}")

    @classmethod
    def build(
        cls, names: Sequence[str], shapes: Sequence[Sequence[int]], *, itemsize: int, shard_size: int
    ) -> "FlatLayout":
        """Lay parameters out one behind the other.

        Args:
            names: Fqn of each parameter, in module order.
            shapes: Shape of each parameter.
            itemsize: Bytes of one element in the narrowest buffer.
            shard_size: Number of ranks that share the buffer.
        """
        alignment = ALIGNMENT_NBYTES // math.gcd(ALIGNMENT_NBYTES, itemsize)
        slots: list[ParameterSlot] = []
        end = 0
        for fqn, shape in zip(names, shapes, strict=True):
            slot = ParameterSlot(fqn=fqn, shape=tuple(shape), offset=_round_up(end, alignment))
            slots.append(slot)
            end = slot.interval.stop
        # The constructor refuses a shard_size below 1; until then it must not divide.
        padded_numel = _round_up(end, alignment * max(1, shard_size))
        return cls(itemsize=itemsize, shard_size=shard_size, slots=tuple(slots), padded_numel=padded_numel)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's slice, with padding."""
        return self.padded_numel // self.shard_size

    @property
    def padding_numel(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.padded_numel - self.numel

    @cached_property
    def padding_intervals(self) -> tuple[Interval, ...]:
        """The stretches of the flat buffer that belong to no parameter, in order."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.interval.start, slot.interval.stop))]
        edges.append(self.padded_numel)
        gaps = (Interval(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))
        return tuple(gap for gap in gaps if gap.numel)

    def shard_interval(self, shard_rank: int) -> Interval:
        """The slice of the flat buffer that ``shard_rank`` owns."""
        if not 0 <= shard_rank < self.shard_size:
            raise ValueError(f"expected a shard rank in [0, {self.shard_size}), found {shard_rank}")
        return Interval(shard_rank * self.shard_numel, (shard_rank + 1) * self.shard_numel)

    def parameter_interval(self, slot: ParameterSlot, shard_rank: int) -> Interval:
        """The elements of the parameter, counted from its own start, that ``shard_rank`` owns; may be empty."""
        owned = slot.interval.intersect(self.shard_interval(shard_rank))
        if owned.numel == 0:
            return Interval(0, 0)
        return owned.shift(-slot.offset)

    def local_interval(self, slot: ParameterSlot, shard_rank: int) -> Interval:
        """The same elements as :meth:`parameter_interval`, counted from the start of the rank's slice."""
        owned = self.parameter_interval(slot, shard_rank)
        if owned.numel == 0:
            return owned
        return owned.shift(slot.offset - self.shard_interval(shard_rank).start)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
