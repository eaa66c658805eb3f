"""Stragglers: ranks for which all others wait, found by what each says of its own time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

WINDOW = 5
"""Steps after which ranks tell each other how long their own part of a step takes."""
WINDOWS = 3
"""That have to agree on a slow rank."""
SLOWER = 0.08
"""By how much, in shares of what the others take."""


class Stragglers:
    """Finds ranks that are slower than the others over several windows of steps; each once."""

    def __init__(self) -> None:
        self._windows: deque[Sequence[tuple[float, float]]] = deque(maxlen=WINDOWS)
        self.named: list[int] = []
        """Ranks that have been found."""

    def add(self, window: Sequence[tuple[float, float]]) -> str:
        """Take a window; a sentence on the rank that is slow, or nothing.

        Args:
            window: By rank, seconds of data and of compute that are typical of its steps; zeros
                where a rank cannot tell yet.
        """
        if len(window) < 2 or not all(map(sum, window)):
            return ""
        self._windows.append(window)
        if len(self._windows) < WINDOWS:
            return ""
        own = [sum(map(sum, parts)) / WINDOWS for parts in zip(*self._windows, strict=True)]
        rank = max(set(range(len(own))) - {*self.named}, key=own.__getitem__, default=None)
        if rank is None or any(
            sum(each[rank]) < (1 + SLOWER / 2) * median(map(sum, _without(each, rank)))
            for each in self._windows
        ):
            return ""
        usual = median(_without(own, rank))
        if own[rank] < (1 + SLOWER) * usual:
            return ""
        self.named.append(rank)
        data, compute = (
            mean(
                each[rank][part] - median(it[part] for it in _without(each, rank))
                for each in self._windows
            )
            for part in (0, 1)
        )
        part = "loading data" if data > compute else "computing"
        return (
            f"rank {rank} is slower than the others, and all of them wait for it: loading data and "
            f"computing take it {1e3 * own[rank]:.4g} ms a step where {1e3 * usual:.4g} ms are usual "
            f"({100 * (own[rank] / usual - 1):.0f} % more over {WINDOW * WINDOWS} steps), most of "
            f"that {part}"
        )


def _without(values: Sequence[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]
