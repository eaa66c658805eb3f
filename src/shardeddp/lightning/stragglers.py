"""Stragglers: ranks that all others wait for, found by each rank's report of its own time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist, mean, median
from typing import Any

WINDOW = 5
"""Steps per window; after each window ranks gather their times per step."""
WINDOWS = 3
"""Minimum number of consecutive slow windows for a straggler."""
MOST_WINDOWS = 40
"""Maximum number of consecutive slow windows for a straggler, under any disturbance."""
SLOWER = 0.08
"""Relative slowdown of a straggler against the other ranks."""
BY_CHANCE = 2e-3
"""Probability that a temporary disturbance lasts long enough to count as a straggler."""
FALSE_NAMES = 0.01
"""Probability that a rank is named in 200 windows in which all ranks are equally fast."""
_USUAL_NOISE, _USUAL_COUNT = 0.02, 8
"""Relative deviation of a rank's time in a window on quiet machines, and its degrees of freedom."""
_MOST_NOISE = 0.035
"""Deviation from which a machine is not quiet: what is measured counts alone."""
_LEAST_WINDOWS, _MOST_TIMES = 8, 2000
"""Windows from which deviations are known at least, and times of ranks at most beyond these."""


class Stragglers:
    """Detector of ranks that are slower than the others over several windows of steps.

    Other load on a machine makes ranks slow for a few windows, after which they recover. From these
    follows the required number of consecutive slow windows: if a fraction q of slow windows was
    followed by another one, it is the n with ``q ** n == BY_CHANCE``. On a quiet machine it is
    ``WINDOWS``. Where times vary from step to step (sequences of different lengths), a rank has to be
    slower than that explains. Each rank is reported once.
    """

    def __init__(self) -> None:
        self._windows: deque[Sequence[tuple[float, float]]] = deque(maxlen=MOST_WINDOWS)
        self._slow: dict[int, int] = {}  # consecutive slow windows, by rank
        self._followed, self._ended = 0, 0  # slow windows of recovered ranks: not last, last
        self._chances: dict[int, float] = {}  # slowdowns by chance, by consecutive windows
        self.named: list[int] = []
        """Stragglers reported so far."""

    @property
    def needed(self) -> int:
        """Number of consecutive slow windows after which a rank is reported."""
        # Prior: one slow window, followed by another one with a probability of an eighth.
        share = (0.125 + self._followed) / (1 + self._followed + self._ended)
        return min(MOST_WINDOWS, max(WINDOWS, math.ceil(math.log(BY_CHANCE, share) - 1e-9)))

    def add(self, window: Sequence[tuple[float, float]]) -> str:
        """Add a window; return a message on a new straggler, or an empty string.

        Args:
            window: Typical seconds of data and of compute per step, by rank; zeros for ranks
                without measurements.
        """
        if len(window) < 2 or not all(map(sum, window)):
            return ""
        self._windows.append(window)
        self._chances = {}
        own = [*map(sum, window)]
        order = sorted(own)
        least = (1 + SLOWER / 2) * order[(len(order) - 2) // 2]  # lower bound for every rank
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
            if self._slow[rank] >= self.needed and (
                said := self._message_about(rank, self._slow[rank])
            ):
                self.named.append(rank)
                return said
        return ""

    def _message_about(self, rank: int, count: int) -> str:
        """Return the message on a rank after ``count`` slow windows; empty below ``SLOWER``."""
        windows = [*self._windows][-count:]
        own = mean(sum(it[rank]) for it in windows)
        usual = mean(median(map(sum, _without(it, rank))) for it in windows)
        slower = own / usual - 1
        if slower < SLOWER or slower < self._by_chance(count):
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

    def _by_chance(self, count: int) -> float:
        """Return the relative slowdown in the last ``count`` windows that chance may give a rank."""
        if count not in self._chances:
            ranks = len(self._windows[0])
            noise, freedom = self._deviation(count)
            likely = NormalDist().inv_cdf(1 - FALSE_NAMES / (200 * ranks))
            self._chances[count] = math.expm1(
                min(noise * _of_student(likely, freedom) / math.sqrt(count), 10.0)
            )
        return self._chances[count]

    def _deviation(self, count: int) -> tuple[float, int]:
        """Return the deviation of the logarithm of a rank's time in a window, and its degrees of freedom.

        Deviations are those from the mean of a rank in the last ``count`` windows, and from that in
        the windows before.
        """
        ranks = len(self._windows[0])
        last = [*self._windows][-max(_LEAST_WINDOWS, _MOST_TIMES // ranks) :]
        by_window = [[*map(math.log, _ratios([*map(sum, window)]))] for window in last]
        parts = [it for it in (by_window[:-count], by_window[-count:]) if it]
        deviations = [
            abs(it - usual)
            for part in parts
            for ratios in zip(*part, strict=True)
            for usual in [mean(ratios)]
            for it in ratios
        ]
        # Of normal times the median is 0.67 of the standard deviation, and the mean is 0.80.
        most = 4 * median(deviations) / 0.6745
        found = mean(min(it, most) for it in deviations) / 0.7979
        known = len(last) - len(parts)
        freedom = known * (ranks - 1)  # of two ranks both deviate alike
        found *= math.sqrt(len(last) / known)
        if found > _MOST_NOISE:
            return found, freedom
        squares = freedom * found**2 + _USUAL_COUNT * _USUAL_NOISE**2
        return math.sqrt(squares / (freedom + _USUAL_COUNT)), freedom + _USUAL_COUNT


def _of_student(likely: float, freedom: int) -> float:
    """Return the quantile of Student's distribution for one of the normal one (Wallace, 1959)."""
    scaled = likely * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(min(scaled**2 / freedom, 100.0)))


def _ratios(own: Sequence[float]) -> list[float]:
    """Return each rank's time as a multiple of the median of the others'."""
    order = sorted(own)
    return [took / _median_of_others(order, took) for took in own]


def _median_of_others(order: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one occurrence of a value."""
    place, count = bisect_left(order, value), len(order) - 1
    low, high = (count - 1) // 2, count // 2
    return sum(order[it + (it >= place)] for it in (low, high)) / 2


def _without(values: Sequence[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]
