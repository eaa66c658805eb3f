"""Stragglers: ranks for which all others wait, found by what each says of its own time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

WINDOW = 5
"""Steps after which ranks tell each other how long their own part of a step takes."""
WINDOWS = 3
"""That have to agree on a slow rank, at least."""
MOST_WINDOWS = 40
"""The same at most, however long ranks are disturbed that recover."""
SLOWER = 0.08
"""By how much, in shares of what the others take."""
BY_CHANCE = 2e-3
"""Share of slow windows after which disturbed ranks are slow for as long as one that is named."""


class Stragglers:
    """Finds ranks that are slower than the others over several windows of steps; each once.

    Where something else takes a rank's processor now and then, ranks are slow for some windows and
    recover. How often a slow window of those was followed by another one says how many have to
    follow each other until that is no disturbance: with a share of q, as many as make q to that
    power ``BY_CHANCE``. On a quiet machine it is ``WINDOWS``.
    """

    def __init__(self) -> None:
        self._windows: deque[Sequence[tuple[float, float]]] = deque(maxlen=MOST_WINDOWS)
        self._slow: dict[int, int] = {}  # by rank, windows in a row
        self._followed, self._ended = 0, 0  # of slow windows whose ranks have recovered
        self.named: list[int] = []
        """Ranks that have been found."""

    @property
    def needed(self) -> int:
        """Windows in a row after which a slow rank is named."""
        # As if one slow window had been seen that another follows in an eighth of all cases.
        share = (0.125 + self._followed) / (1 + self._followed + self._ended)
        return min(MOST_WINDOWS, max(WINDOWS, math.ceil(math.log(BY_CHANCE, share) - 1e-9)))

    def add(self, window: Sequence[tuple[float, float]]) -> str:
        """Take a window; a sentence on the rank that is slow, or nothing.

        Args:
            window: By rank, seconds of data and of compute that are typical of its steps; zeros
                where a rank cannot tell yet.
        """
        if len(window) < 2 or not all(map(sum, window)):
            return ""
        self._windows.append(window)
        own = [*map(sum, window)]
        order = sorted(own)
        least = (1 + SLOWER / 2) * order[(len(order) - 2) // 2]  # whichever rank is left out
        slow = {
            rank
            for rank, took in enumerate(own)
            if took >= least and took >= (1 + SLOWER / 2) * _median_of_others(order, took)
        }
        for rank in self._slow.keys() - slow:
            self._ended += 1
            self._followed += self._slow[rank] - 1
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        for rank in sorted(slow - {*self.named}, key=lambda it: -own[it]):
            if self._slow[rank] >= self.needed and (said := self._judge(rank, self._slow[rank])):
                self.named.append(rank)
                return said
        return ""

    def _judge(self, rank: int, count: int) -> str:
        """What to say of a rank that was slow for so many windows; nothing if it is slow by little."""
        windows = [*self._windows][-count:]
        own = mean(sum(it[rank]) for it in windows)
        usual = mean(median(map(sum, _without(it, rank))) for it in windows)
        if own < (1 + SLOWER) * usual:
            return ""
        data, compute = (
            mean(
                it[rank][part] - median(other[part] for other in _without(it, rank))
                for it in windows
            )
            for part in (0, 1)
        )
        part = "loading data" if data > compute else "computing"
        return (
            f"rank {rank} is slower than the others, and all of them wait for it: loading data and "
            f"computing take it {1e3 * own:.4g} ms a step where {1e3 * usual:.4g} ms are usual "
            f"({100 * (own / usual - 1):.0f} % more over {WINDOW * len(windows)} steps), most of "
            f"that {part}"
        )


def _median_of_others(order: Sequence[float], value: float) -> float:
    """Median of sorted values without one of them."""
    place, count = bisect_left(order, value), len(order) - 1
    low, high = (count - 1) // 2, count // 2
    return sum(order[it + (it >= place)] for it in (low, high)) / 2


def _without(values: Sequence[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]
