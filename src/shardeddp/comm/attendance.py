"""Attendance: before an operation that needs all ranks and that a user may call anywhere, see that they all come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardeddp.comm.failures import Failures
from shardeddp.comm.lookout import place_of
from shardeddp.comm.sequence import Reduction, reduce_highest
from shardeddp.errors import DesyncError

WARNING_S = 10.0
"""After how long a rank tells its user that it waits."""

_ALONE: dict[CodeType, str] = {}  # what runs on one rank only -> how to say so


def note_that_runs_alone(function: Callable[..., Any], explanation: str) -> None:
    """Note that a function runs on one rank only.

    Args:
        function: Either itself, or anything that a decorator has wrapped; all that it wraps share their code.
        explanation: For people, with ``{name}`` for the name of what was decorated.
    """
    _ALONE[function.__code__] = explanation


class Attendance:
    """A roll call of a small host message before operations that are no part of a step.

    Ranks that come together and to different operations raise; those that do not come at all are found by
    :class:`~shardeddp.comm.desync.DesyncCheck`.

    Args:
        group: The ranks that have to come, on the host; None: no others.
        ranks: Their global ranks.
        rank: This rank.
        failures: Says why a rank that has come waits in vain.
        name: Of this roll call, where there are several.
        advice: What to do about ranks that do not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks: Sequence[int],
        rank: int,
        failures: Failures,
        name: str,
        advice: str,
    ) -> None:
        self.advice = advice
        self.group = group
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._failures, self._kind = failures, f"roll call of {name}"
        self._failure = ""  # what a former call has ended with; the ranks are not together any more

    def call(self, operation: str, advice: str = "") -> None:
        """Return when all ranks have come to the operation.

        Args:
            operation: What needs them, the same on all ranks, and of whom.
            advice: What to do about ranks that do not come; empty: the usual one.

        Raises:
            DesyncError: Some ranks have come to another operation.
            RuntimeError: Some ranks do not come.
        """
        if self.group is None:
            return
        advice = advice or self.advice
        decorated = _decorated_caller()
        if decorated:
            here = self._describe(operation)
            raise DesyncError(f"{here}, who never come: it is inside of {decorated}. {advice}")
        if self._failure:
            raise DesyncError(f"{self._describe(operation)}, which were not together before: {self._failure}")
        nothing = torch.empty(0, dtype=torch.uint8)
        self._wait(reduce_highest(nothing, operation, self.group, kind=self._kind, advice=advice))

    def _wait(self, call: Reduction) -> None:
        try:
            if call.work is not None:
                call.work.wait(timedelta(seconds=WARNING_S))
        except RuntimeError:
            if call.work is not None and not call.work.is_completed():
                sys.stderr.write(f"rank {self._rank} waits: {self._describe(call.operation)}. {call.advice}\n")
        try:
            call.wait()
        except DesyncError as error:
            self._failure = str(error)
            raise
        except RuntimeError as error:
            self._failures.explain(error)
            if isinstance(error.__cause__, DesyncError):
                self._failure = str(error.__cause__)
                raise
            self._failure = f"{self._describe(call.operation)}: some have ended, or do not come"
            raise RuntimeError(f"{self._failure}. {error}") from error.__cause__

    def _describe(self, operation: str) -> str:
        where = place_of(sys._getframe())
        return f"{operation} at {where} on rank {self._rank} needs ranks {self._others} to do the same"


def _decorated_caller() -> str:
    """The function around this call that runs on one rank only, as text; empty if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _ALONE:
            decorated: Any = frame.f_locals.get("fn")
            name = decorated.__qualname__ if callable(decorated) else frame.f_code.co_name
            return _ALONE[frame.f_code].format(name=name)
        frame = frame.f_back
    return ""
