"""Half-open intervals of elements, and the boxes that an interval of a tensor is made of."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """The elements ``start <= i < stop`` of something one-dimensional; ``start == stop`` is empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"expected 0 <= start <= stop, found start={self.start}, stop={self.stop}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def intersect(self, other: "Interval") -> "Interval":
        """The common part; an empty interval at the nearer edge when there is none.

        >>> Interval(0, 6).intersect(Interval(4, 9))
        Interval(start=4, stop=6)
        """
        start = min(max(self.start, other.start), self.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> "Interval":
        """The same elements counted from another origin."""
        return Interval(self.start + offset, self.stop + offset)


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a tensor: ``sizes[d]`` elements from ``offsets[d]`` on, in every dim ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(interval: Interval, shape: Sequence[int]) -> list[Box]:
    """Cut a row-major interval of a tensor into boxes, in the order of their elements.

    Elements 2..11 of a 4 x 4 tensor are a tail, a body and a head, so an interval of a tensor with ``n`` dims needs
    at most ``2 n - 1`` boxes (one when ``n`` is 0 or 1), and each of them is contiguous in the interval::

        . . 2 3      Box((0, 2), (1, 2))
        4 5 6 7      Box((1, 0), (1, 4))
        8 9 . .      Box((2, 0), (1, 2))
        . . . .

    Args:
        interval: Elements in row-major order, inside the tensor.
        shape: The tensor's shape.

    Returns:
        The boxes; empty for an empty interval.
    """
    numel = math.prod(shape)
    if interval.stop > numel:
        raise ValueError(f"expected an interval inside the {numel} elements of shape {tuple(shape)}, found {interval}")
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
    """The row-major interval that a box of a tensor fills; what :func:`boxes` makes of it is that box.

    Raises:
        ValueError: The box does not lie in the tensor, or its elements do not follow each other.
    """
    inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
        0 <= offset <= offset + size <= dim for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"expected a box inside of shape {tuple(shape)}, found {box}")
    start, stride, whole = 0, 1, True
    for offset, size, dim in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        if not whole and size != 1:
            raise ValueError(f"the elements of {box} do not follow each other in a tensor of shape {tuple(shape)}")
        start += offset * stride
        stride *= dim
        whole = whole and size == dim
    return Interval(start, start + box.numel)
