"""Order of backwards of units, from the order of their forwards."""

from collections.abc import Sequence, Set


def backward_order(forwards: Sequence[int], inner: Sequence[Set[int]]) -> list[int]:
    """Return the positions of forwards in the order in which autograd runs their backwards.

    It visits units in the reverse order of the ends of their forwards.

    Args:
        forwards: Index of the unit of each forward, in their order.
        inner: Indices of the units of inner modules, for each unit.

    If unit 0 contains all others, and unit 1 contains unit 2:

    >>> backward_order([0, 1, 2, 3], [{1, 2, 3}, {2}, set(), set()])
    [0, 3, 1, 2]
    """
    ends = [_end(position, forwards, inner) for position in range(len(forwards))]
    return sorted(range(len(forwards)), key=lambda position: (-ends[position], position))


def _end(position: int, forwards: Sequence[int], inner: Sequence[Set[int]]) -> int:
    """Return the position of the last forward inside of another one, before its unit's next."""
    unit, end = forwards[position], position
    for later in range(position + 1, len(forwards) if inner[unit] else 0):
        if forwards[later] == unit:
            break
        if forwards[later] in inner[unit]:
            end = later
    return end
