"""Visits of units in a pass: which a rank expects, in which order ranks plan them.

A visit is a number: of the unit, plus the number of units for each visit that the rank has made to
it before in the same pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

_FEWEST = 4
"""Visits in a plan after one that a rank could not follow."""

MOST_REPEATS = 16
"""Visits to one unit in a pass that are told apart; later ones are asked about one by one."""


class Coming(IntEnum):
    """What a rank says of a visit; the highest of all ranks holds."""

    NOT = 0
    """It expects none."""

    LATER = 1
    """It expects to come to it after the visit to which it has come."""

    OUT_OF_ORDER = 2
    """It has come to it, after others that are behind it in the order of ranks."""

    NOW = 3
    """It has come to it."""


@dataclass
class _Made:
    """When a rank has made a visit last."""

    run: int
    """In which pass of the kind."""

    part: int
    """How many passes had begun inside of that one: of backwards, inside of a step."""

    needed: bool
    """Whether it had to gather the unit."""


class VisitOrder:
    """Order of the visits of all ranks in one kind of pass: the same on each of them.

    A visit that is new, or to which a rank comes out of order, moves to the end.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # in order; ascending
        self._next = 0
        self._length = _FEWEST

    def place(self, visit: int | None) -> int:
        """The place of a visit; -1 if it has none."""
        return -1 if visit is None else self._places.get(visit, -1)

    def after(self, visit: int) -> Iterator[int]:
        """The visits behind one that is in the order."""
        start = self._places[visit]
        return (other for other, place in self._places.items() if place > start)

    def plan(self, said: Mapping[int, Coming], newest: Iterable[int]) -> list[int]:
        """The visits of which ranks have said something, in order.

        Args:
            said: By visit, the highest of all ranks.
            newest: Those that are out of order, in the order in which units were found.
        """
        for visit in newest:
            self._places.pop(visit, None)
            self._places[visit] = self._next
            self._next += 1
        return [visit for visit in self._places if said.get(visit)]

    def length(self, *, strayed: bool) -> int:
        """How many visits to plan.

        Twice as many each time, so that a pass takes one plan, and few again when a rank has come
        to something else: what is left of a plan then is gathered in vain.
        """
        self._length = _FEWEST if strayed else min(2 * self._length, max(_FEWEST, self._next))
        return self._length


class Forecast:
    """Visits that this rank expects in one kind of pass: those of the last one.

    In a backward also those of units whose forward has announced it, and only those, of units that
    are announced.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self._made: dict[int, _Made] = {}
        self._run = 0
        self._begun = 0
        self._repeats: Counter[int] = Counter()
        self._latest: int | None = None
        self._uses: Callable[[int], int] | None = None
        self._announced: frozenset[int] = frozenset()

    def begin(self, begun: int, uses: Callable[[int], int] | None) -> None:
        """A pass begins.

        Args:
            begun: How many passes of any kind have begun with it.
            uses: By unit, how many uses are announced and have not been reached; None: in forwards.
        """
        self._run += 1
        self._begun = begun
        self._repeats.clear()
        self._latest = None
        self._uses = uses
        self._announced = frozenset(
            unit for unit in range(self._units if uses is not None else 0) if uses and uses(unit)
        )

    def next(self, unit: int) -> int:
        """The visit that coming to a unit makes."""
        return min(self._repeats[unit], MOST_REPEATS) * self._units + unit

    def is_in_order(self, visit: int, order: VisitOrder) -> bool:
        """Whether a visit lies behind the latest one."""
        return order.place(visit) > order.place(self._latest)

    def expected(self, visit: int, order: VisitOrder, begun: int) -> dict[int, bool | None]:
        """The visits behind one, and whether the unit is gathered for them; None: not known."""
        return {
            later: None if (made := self._made.get(later)) is None else made.needed
            for later in order.after(visit)
            if self._is_expected(later, begun)
        }

    def note(self, visit: int, *, needed: bool, begun: int) -> None:
        """This rank makes a visit."""
        self._made[visit] = _Made(self._run, begun - self._begun, needed)
        self._repeats[visit % self._units] += 1
        self._latest = visit

    def _is_expected(self, visit: int, begun: int) -> bool:
        made, unit = self._made.get(visit), visit % self._units
        again = made is not None and made.run == self._run - 1 and made.part == begun - self._begun
        if self._uses is None or unit not in self._announced:
            return again
        uses = self._uses(unit)
        before = visit // self._units - self._repeats[unit]
        return uses > 0 and before >= 0 and (again or before < uses)
