"""Step clock: on which parts of a training step its time goes, by the host's clock or by events on compute's stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from shardeddp.torch_private import current_backward

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
"""Of a step, which sum to it; of gathers and reductions what compute has waited for."""

EVALUATION = "evaluation"
"""Part that is in no step."""


class Span(NamedTuple):
    """Time in which one part of a step was at work, without what was inside of it."""

    part: str
    unit: str
    """Label, of gathers and reductions; else empty."""
    begin: float
    """Seconds since the step began."""
    seconds: float


class HostTimer:
    """Marks are readings of the host's clock.

    Args:
        read: Seconds.
    """

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self.mark: Callable[[], Any] = read

    def is_past(self, mark: Any) -> bool:
        """Whether a mark can be read."""
        return True

    def between(self, begin: Any, end: Any) -> float:
        """Seconds from one mark to another."""
        return end - begin


class CudaTimer:
    """Marks are events on compute's stream: a part takes the time for which it holds the stream up."""

    def mark(self) -> Any:
        """An event, behind what compute has enqueued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the stream has come to it."""
        return mark.query()

    def between(self, begin: Any, end: Any) -> float:
        """Seconds from one mark to another."""
        return begin.elapsed_time(end) / 1e3


class StepClock:
    """Divides the time of steps among parts; at each moment the innermost part that has begun has it.

    So the parts sum to the step, whatever happens. Nothing waits: marks are read when they are past.

    Args:
        timer: Makes marks.
    """

    def __init__(self, timer: HostTimer | CudaTimer) -> None:
        self._timer, self._thread = timer, threading.get_ident()
        self._open: list[tuple[str, str]] = [("rest", "")]
        self._marks: list[tuple[str, str, Any]] = [("rest", "", timer.mark())]
        # Marks of steps that have ended, each with the one that ends it.
        self._ended: deque[tuple[list[tuple[str, str, Any]], Any]] = deque()

    def during(self, part: str, unit: str = "") -> StepClock:
        """Begin a part, which ends with the ``with`` statement that this is for."""
        if self._counts():
            inside = self._open[-1][0] == EVALUATION
            self._open.append((EVALUATION, "") if inside else (part, unit))
            self._marks.append((*self._open[-1], self._timer.mark()))
        return self

    def __enter__(self) -> None:
        """It has begun already."""

    def __exit__(self, *_: object) -> None:
        """End the part that has begun last."""
        if self._counts():
            self._open.pop()
            self._marks.append((*self._open[-1], self._timer.mark()))

    def end_step(self) -> None:
        """A step ends and the next one begins."""
        end = self._timer.mark()
        self._ended.append((self._marks, end))
        self._marks = [(*self._open[-1], end)]

    def take(self) -> list[list[Span]]:
        """Steps that have ended and can be read, each once."""
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

    def _counts(self) -> bool:
        # A backward on CUDA comes here on autograd's thread, while the thread that trains waits.
        return threading.get_ident() == self._thread or current_backward() != -1


def during(clock: StepClock | None, part: str, unit: str = "") -> AbstractContextManager[None]:
    """Surround a part of a step, where somebody measures."""
    return _NOTHING if clock is None else clock.during(part, unit)


_NOTHING = nullcontext()
