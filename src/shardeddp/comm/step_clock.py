"""Step clock: on which parts of a training step its time goes, by the host's clock or by events on compute's stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from shardeddp.torch_private import is_in_backward

PARTS = (
    "compute",
    "gather",
    "reduction",
    "ranks",
    "data",
    "optimizer",
    "checkpoint",
    "rest",
)
"""Parts that sum to a step; gathers and reductions count while compute waits for them."""

EVALUATION = "evaluation"
"""Part outside of all steps."""


class Span(NamedTuple):
    """Time in which one part of a step was at work, without the parts inside of it."""

    part: str
    unit: str
    """Label of the unit, for gathers and reductions; else empty."""
    begin: float
    """Seconds since the step began."""
    seconds: float


class HostTimer:
    """Timer with readings of the host's clock, in seconds, as marks."""

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self.mark: Callable[[], Any] = read

    def is_past(self, mark: Any) -> bool:
        """Return True: every mark can be read."""
        return True

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds from one mark to another."""
        return end - begin


class CudaTimer:
    """Timer with events on compute's stream as marks: a part has the time it holds that up."""

    def mark(self) -> Any:
        """Record an event after all work that compute has enqueued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Return whether the stream has reached the event."""
        return mark.query()

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds from one mark to another."""
        return begin.elapsed_time(end) / 1e3


_MOST_MARKS = 100_000
"""Marks of one step at most: some trainings never tell that a step has ended."""


class StepClock:
    """Divides the time of steps among parts; each moment belongs to the innermost part begun.

    So the parts always sum to the step. Nothing blocks: marks are read once they are past. The
    begin of a step with more than 100,000 marks is forgotten.
    """

    def __init__(self, timer: HostTimer | CudaTimer) -> None:
        self._timer, self._thread = timer, threading.get_ident()
        self._open: list[tuple[str, str]] = [("rest", "")]
        self._marks: list[tuple[str, str, Any]] = [("rest", "", timer.mark())]
        # Marks of steps that have ended, each with the one that ends it.
        self._ended: deque[tuple[list[tuple[str, str, Any]], Any]] = deque()

    def during(self, part: str, unit: str = "") -> StepClock:
        """Begin a part, which ends with the ``with`` statement around this call."""
        if self._counts():
            inside = self._open[-1][0] == EVALUATION
            self._open.append((EVALUATION, "") if inside else (part, unit))
            if not inside:
                self._mark()
        return self

    def __enter__(self) -> None:
        """Do nothing: :meth:`during` has begun the part."""

    def __exit__(self, *_: object) -> None:
        """End the part begun last."""
        if self._counts():
            inside = self._open[-2][0] == EVALUATION
            self._open.pop()
            if not inside:
                self._mark()

    def end_step(self) -> None:
        """End the step and begin the next one."""
        end = self._timer.mark()
        self._ended.append((self._marks, end))
        self._marks = [(*self._open[-1], end)]

    def take(self) -> list[list[Span]]:
        """Return the steps that have ended and can be read, each once."""
        steps: list[list[Span]] = []
        while self._ended and self._timer.is_past(self._ended[0][1]):
            marks, end = self._ended.popleft()
            following = [*(mark for _, _, mark in marks[1:]), end]
            spans, begin = list[Span](), 0.0
            for (part, unit, mark), after in zip(marks, following, strict=True):
                spans.append(Span(part, unit, begin, self._timer.between(mark, after)))
                begin += spans[-1].seconds
            steps.append(spans)
        return steps

    def _mark(self) -> None:
        self._marks.append((*self._open[-1], self._timer.mark()))
        if len(self._marks) > _MOST_MARKS:
            del self._marks[: _MOST_MARKS // 2]

    def _counts(self) -> bool:
        # A backward on CUDA calls this on autograd's thread, while the training thread waits.
        return threading.get_ident() == self._thread or is_in_backward()


def during(clock: StepClock | None, part: str, unit: str = "") -> AbstractContextManager[None]:
    """Measure a part of a step with a clock, if there is one."""
    return _NOTHING if clock is None else clock.during(part, unit)


_NOTHING = nullcontext()
