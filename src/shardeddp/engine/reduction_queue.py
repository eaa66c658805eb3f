"""Reduction queue: gradient reductions in flight, with a bound on their memory."""

from __future__ import annotations

from collections import deque

import torch

from shardeddp.comm import Mesh, during
from shardeddp.engine.progress import UnitProgress
from shardeddp.engine.reduction import Reduction
from shardeddp.plan.memory import WAITING_UNITS
from shardeddp.plan.reduction import ReduceOver


class ReductionQueue:
    """Issues the reductions of units and finishes them in the order in which they were issued."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # Label of the unit and reduction; issued -> advanced before the next unit packs
        self._in_flight: deque[tuple[str, Reduction]] = deque()
        # Reductions left to their streams, the earliest first, and the bytes that they hold.
        self._queued: deque[tuple[str, Reduction]] = deque()
        self._queued_nbytes = self._most_nbytes = 0

    @torch.no_grad()  # a backward that keeps its graph for another one enables gradients
    def issue(self, progress: UnitProgress, over: ReduceOver) -> None:
        """Reduce the gradients of one unit.

        A reduce-scatter has the gradients of one unit, one at a time: this bounds memory, and the
        backward of the next unit overlaps with it.
        """
        for _ in range(len(self._in_flight)):
            unit, reduction = self._in_flight[0]
            with during(self._mesh.run.clock, "reduction", unit):
                is_done = reduction.advance()
            self._in_flight.popleft()
            if reduction.is_queued and not is_done:
                self._leave_to_stream(unit, reduction)
            elif not is_done:
                self._in_flight.append((unit, reduction))
        issued = progress.reduce_gradients(over)
        self._in_flight.extend((progress.unit.label, reduction) for reduction in issued)

    @torch.no_grad()
    def finish(self) -> None:
        """Complete all reductions."""
        while self._queued:
            self._finish_first()
        for unit, reduction in self._in_flight:
            with during(self._mesh.run.clock, "reduction", unit):
                reduction.finish()
        self._in_flight.clear()

    def _leave_to_stream(self, unit: str, reduction: Reduction) -> None:
        """Leave a reduction to its streams; finish the first ones if they hold too much memory.

        Without a bound they would hold a copy of all gradients. ``WAITING_UNITS`` of the largest
        units keep the network busy.
        """
        self._queued.append((unit, reduction))
        self._queued_nbytes += reduction.waiting_nbytes
        self._most_nbytes = max(self._most_nbytes, reduction.waiting_nbytes)
        while self._queued_nbytes > WAITING_UNITS * self._most_nbytes:
            self._finish_first()

    def _finish_first(self) -> None:
        unit, reduction = self._queued.popleft()
        self._queued_nbytes -= reduction.waiting_nbytes
        with during(self._mesh.run.clock, "reduction", unit):
            reduction.finish()
