"""Layout of a flat buffer: offsets of a unit's parameters, intervals of ranks, boxes of a shape."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import overload

# -- Intervals of elements, and boxes of a shape


@dataclass(frozen=True)
class Interval:
    """Elements ``start <= i < stop`` of a 1D range; ``start == stop`` is empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"expected 0 <= start <= stop, found start={self.start}, stop={self.stop}"
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def intersect(self, other: "Interval") -> "Interval":
        """Return the intersection; if it is empty, an empty interval at the nearer edge.

        >>> Interval(0, 6).intersect(Interval(4, 9))
        Interval(start=4, stop=6)
        """
        start = min(max(self.start, other.start), self.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> "Interval":
        """Add an offset to both ends."""
        return Interval(self.start + offset, self.stop + offset)


@dataclass(frozen=True)
class Box:
    """Hyper-rectangle of a tensor: ``sizes[d]`` elements from ``offsets[d]`` on, per dim ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the intersection; None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, _ends(self), _ends(other))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, other: "Box") -> "Box":
        """Return the box in coordinates relative to the first element of an enclosing box."""
        offsets = (at - origin for at, origin in zip(self.offsets, other.offsets, strict=True))
        return Box(tuple(offsets), self.sizes)

    def outside(self, other: "Box") -> "Box":
        """Return the box in the coordinates of the tensor; the inverse of :meth:`inside`."""
        offsets = (at + origin for at, origin in zip(self.offsets, other.offsets, strict=True))
        return Box(tuple(offsets), self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that index these elements in the tensor, one per dim."""
        return tuple(map(slice, self.offsets, _ends(self)))


def whole_of(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(at + size for at, size in zip(box.offsets, box.sizes, strict=True))


def boxes(interval: Interval, shape: Sequence[int]) -> list[Box]:
    """Cut a row-major interval of a tensor into boxes, in the order of their elements.

    Elements 2..11 of a 4 x 4 tensor are a tail, a body and a head, so an interval of a tensor with
    ``n`` dims needs at most ``2 n - 1`` boxes (one when ``n`` is 0 or 1), and each of them is
    contiguous in the interval::

        . . 2 3      Box((0, 2), (1, 2))
        4 5 6 7      Box((1, 0), (1, 4))
        8 9 . .      Box((2, 0), (1, 2))
        . . . .
    """
    numel = math.prod(shape)
    if interval.stop > numel:
        raise ValueError(
            f"expected an interval inside the {numel} elements of shape {tuple(shape)}, found "
            f"{interval}"
        )
    return list(_boxes(interval, tuple(shape)))


def _boxes(interval: Interval, shape: tuple[int, ...]) -> Iterator[Box]:
    if interval.numel == 0:
        return
    if len(shape) <= 1:
        yield Box((interval.start,) * len(shape), (interval.numel,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = interval.start // row, (interval.stop - 1) // row
    if first == last:
        yield from _inside_row(interval.shift(-first * row), first, shape)
        return
    body_start, body_stop = -(-interval.start // row), interval.stop // row
    if interval.start < body_start * row:
        yield from _inside_row(Interval(interval.start - first * row, row), first, shape)
    if body_start < body_stop:
        yield Box((body_start, *(0,) * (len(shape) - 1)), (body_stop - body_start, *shape[1:]))
    if interval.stop > body_stop * row:
        yield from _inside_row(Interval(0, interval.stop - body_stop * row), body_stop, shape)


def _inside_row(interval: Interval, index: int, shape: tuple[int, ...]) -> Iterator[Box]:
    for box in _boxes(interval, shape[1:]):
        yield Box((index, *box.offsets), (1, *box.sizes))


def interval_of(box: Box, shape: Sequence[int]) -> Interval:
    """Return the row-major interval of a contiguous box; the inverse of :func:`boxes`.

    Raises:
        ValueError: The box exceeds the tensor, or its elements are not contiguous.
    """
    inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
        0 <= offset <= offset + size <= dim
        for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"expected a box inside of shape {tuple(shape)}, found {box}")
    start, stride, whole = 0, 1, True
    for offset, size, dim in zip(
        reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True
    ):
        if not whole and size != 1:
            raise ValueError(
                f"the elements of {box} do not follow each other in a tensor of shape "
                f"{tuple(shape)}"
            )
        start += offset * stride
        stride *= dim
        whole = whole and size == dim
    return Interval(start, start + box.numel)


MAX_CUT_DIMS = 6
"""Maximum number of dims along which boxes cut a tensor; a device mesh has fewer dims."""


def check_cover(name: str, shape: tuple[int, ...], found: Sequence[Box]) -> None:
    """Check that every element of a tensor is in exactly one of the boxes, none of which is empty.

    The sum of the boxes' indicator functions counts the cover of each element. A function is
    determined by its differences along all dims, which for a box are its corners with alternating
    signs. So the corners of all boxes must add up to those of the tensor. One pass suffices for
    boxes in any order.

    Raises:
        ValueError: Elements are in no box or several, or more than ``MAX_CUT_DIMS`` dims are cut.
    """
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in found)]
    if len(cut) > MAX_CUT_DIMS:
        raise ValueError(f"{name} is cut along {len(cut)} dims, expected at most {MAX_CUT_DIMS}")
    whole = [whole_of(shape)] if 0 not in shape else []
    # Keys are bytes, with a randomized hash: a crafted file cannot force collisions.
    as_bytes = Struct(f"{len(cut)}q").pack
    corners: Counter[bytes] = Counter()
    for box, sign in [*((box, 1) for box in found), *((box, -1) for box in whole)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            at = (box.offsets[d] + end * box.sizes[d] for d, end in zip(cut, ends, strict=True))
            corners[as_bytes(*at)] += sign * (-1) ** sum(ends)
    if any(corners.values()):
        raise ValueError(
            f"the {len(found):,} boxes of {name} do not cover its shape {shape}: elements "
            f"are missing, or in more than one box"
        )


# -- FlatLayout: offsets of a unit's parameters in its flat buffer

ALIGNMENT_NBYTES = 16
"""Alignment in bytes of every slot and of every rank's slice.

Vector loads and NCCL's fast path need it (https://github.com/pytorch/pytorch/issues/195450).
"""


@dataclass(frozen=True, kw_only=True)
class ParameterSlot:
    """Offset and shape of one parameter in a flat buffer; ``offset`` counts elements."""

    fqn: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def interval(self) -> Interval:
        """Interval of the parameter's elements in the flat buffer."""
        return Interval(self.offset, self.offset + self.numel)


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Layout of parameters in a flat buffer that ``num_slices`` ranks own in equal slices.

    Parameters keep their order, and each starts on an aligned element. The end is padded so that
    every rank's slice has the same length and is aligned as well. Two float32 parameters of 6 and 5
    elements over 2 ranks (16 bytes are 4 elements)::

        flat buffer   a a a a a a - - | b b b b b - - -     padded_numel = 16
        rank          0 0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1     slice_numel  = 8

    Use :meth:`build` to make one. It is pure arithmetic, without tensors and process groups.
    """

    itemsize: int
    """Bytes of one element in the buffer of the narrowest dtype.

    Alignment is computed for it, and so holds for the wider dtypes too.
    """

    num_slices: int
    slots: tuple[ParameterSlot, ...]
    padded_numel: int

    def __post_init__(self) -> None:
        if self.num_slices < 1:
            raise ValueError(f"expected at least one slice, found num_slices={self.num_slices}")
        if self.padded_numel % self.num_slices:
            raise ValueError(
                f"expected a padded_numel that num_slices={self.num_slices} divides, found "
                f"{self.padded_numel}"
            )
        end = 0
        for slot in self.slots:
            if slot.offset < end:
                raise ValueError(
                    f"slot {slot.fqn} starts at {slot.offset}, before the end {end} of the one "
                    f"before it"
                )
            end = slot.interval.stop
        if end > self.padded_numel:
            raise ValueError(f"the slots end at {end}, behind padded_numel={self.padded_numel}")

    @classmethod
    def build(
        cls,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        itemsize: int,
        num_slices: int,
    ) -> "FlatLayout":
        """Lay out parameters one after the other.

        Args:
            names: Fqn of each parameter, in module order.
            shapes: Shape of each parameter.
            itemsize: Bytes of one element in the buffer of the narrowest dtype.
            num_slices: Number of ranks that own a slice of the buffer each: ``Topology.num_slices``.
        """
        alignment = ALIGNMENT_NBYTES // math.gcd(ALIGNMENT_NBYTES, itemsize)
        slots: list[ParameterSlot] = []
        end = 0
        for fqn, shape in zip(names, shapes, strict=True):
            slot = ParameterSlot(fqn=fqn, shape=tuple(shape), offset=_round_up(end, alignment))
            slots.append(slot)
            end = slot.interval.stop
        # The constructor refuses less than one slice; avoid a division by zero before that.
        padded_numel = _round_up(end, alignment * max(1, num_slices))
        return cls(
            itemsize=itemsize, num_slices=num_slices, slots=tuple(slots), padded_numel=padded_numel
        )

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def slice_numel(self) -> int:
        """Number of elements of each rank's slice, with padding."""
        return self.padded_numel // self.num_slices

    @property
    def padding_numel(self) -> int:
        """Number of padding elements in the flat buffer."""
        return self.padded_numel - self.numel

    @cached_property
    def padding_intervals(self) -> tuple[Interval, ...]:
        """Non-empty intervals of padding in the flat buffer, in order."""
        edges = [
            0,
            *(edge for slot in self.slots for edge in (slot.interval.start, slot.interval.stop)),
        ]
        edges.append(self.padded_numel)
        between = (
            Interval(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)
        )
        return tuple(padding for padding in between if padding.numel)

    def slice_interval(self, slice_rank: int) -> Interval:
        """Return the interval of the flat buffer that ``slice_rank`` owns.

        >>> FlatLayout.build(["w"], [(3, 4)], itemsize=4, num_slices=2).slice_interval(1)
        Interval(start=8, stop=16)
        """
        if not 0 <= slice_rank < self.num_slices:
            raise ValueError(f"expected a slice rank in [0, {self.num_slices}), found {slice_rank}")
        return Interval(slice_rank * self.slice_numel, (slice_rank + 1) * self.slice_numel)

    def parameter_interval(self, slot: ParameterSlot, slice_rank: int) -> Interval:
        """Return the interval of a parameter that ``slice_rank`` owns, relative to its start.

        The interval may be empty.

        >>> layout = FlatLayout.build(["v", "w"], [(2,), (3, 4)], itemsize=4, num_slices=2)
        >>> layout.slots[1].interval, layout.slice_interval(1)  # two elements of padding before it
        (Interval(start=4, stop=16), Interval(start=8, stop=16))
        >>> layout.parameter_interval(layout.slots[1], slice_rank=1)
        Interval(start=4, stop=12)
        """
        owned = slot.interval.intersect(self.slice_interval(slice_rank))
        if owned.numel == 0:
            return Interval(0, 0)
        return owned.shift(-slot.offset)

    def local_interval(self, slot: ParameterSlot, slice_rank: int) -> Interval:
        """Return the elements of :meth:`parameter_interval` relative to the start of the slice.

        Without elements it is an empty interval at the nearer end of the slice, so that neighbours
        in the flat buffer are neighbours in every slice.

        >>> layout = FlatLayout.build(["v", "w"], [(2,), (3, 4)], itemsize=4, num_slices=2)
        >>> layout.local_interval(layout.slots[1], slice_rank=1)
        Interval(start=0, stop=8)
        """
        owned = self.slice_interval(slice_rank)
        return owned.intersect(slot.interval).shift(-owned.start)


class OwnedIntervals(Sequence[Interval]):
    """Intervals of a parameter for each rank with a slice, computed on access.

    Stored intervals of thousands of ranks for thousands of parameters would take gigabytes.
    Compares equal to any sequence of equal intervals.
    """

    def __init__(self, layout: FlatLayout, slot: ParameterSlot, slice_ranks: Sequence[int]) -> None:
        self._layout = layout
        self._slot = slot
        self._slice_ranks = slice_ranks

    def __len__(self) -> int:
        return len(self._slice_ranks)

    @overload
    def __getitem__(self, index: int) -> Interval: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Interval, ...]: ...

    def __getitem__(self, index: int | slice) -> Interval | tuple[Interval, ...]:
        if isinstance(index, slice):
            return tuple(
                self._layout.parameter_interval(self._slot, rank)
                for rank in self._slice_ranks[index]
            )
        return self._layout.parameter_interval(self._slot, self._slice_ranks[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self is other or (
            len(self) == len(other)
            and all(own == its for own, its in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
