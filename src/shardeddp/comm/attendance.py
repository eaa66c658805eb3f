"""Attendance: before an operation that needs all ranks and that a user may call anywhere, see that they all come."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardeddp.comm.lookout import Lookout, place_of
from shardeddp.comm.notes import LostStoreError, Notes

ALARM_S = 1.0
"""After how long a rank that waits asks where the others are, and how often."""

WARNING_S = 10.0
"""After how long it tells its user that it waits."""

_OTHERS_S = 10.0
"""How long ranks that have come to different operations wait to hear of each other's."""

_ALONE: dict[CodeType, str] = {}  # what runs on one rank only -> how to say so


def note_that_runs_alone(function: Callable[..., Any], explanation: str) -> None:
    """Note that a function runs on one rank only.

    Args:
        function: Either itself, or anything that a decorator has wrapped; all that it wraps share their code.
        explanation: For people, with ``{name}`` for the name of what was decorated.
    """
    _ALONE[function.__code__] = explanation


class Attendance:
    """A roll call of a few host messages before operations that are no part of a step.

    Ranks that wait know which operation the others have come to. One that does not come is asked where it is: each rank
    counts the communication that it has begun, all ranks in one order. Who has begun more than the one that waits has
    passed by.

    Args:
        group: The ranks that have to come, on the host; None: no others.
        ranks: Their global ranks.
        rank: This rank.
        begun: How much communication this rank has begun.
        lookout: Tells where the other ranks are.
        name: Of this roll call, where there are several.
        advice: What to do about ranks that do not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks: Sequence[int],
        rank: int,
        begun: Callable[[], int],
        lookout: Lookout,
        name: str,
        advice: str,
    ) -> None:
        self._group, self._rank, self._begun = group, rank, begun
        self._others = [other for other in ranks if other != rank]
        self._lookout, self._name, self._advice = lookout, name, advice
        self._calls = 0
        self._failure = ""  # what a former call has ended with; the ranks are not together any more
        self._notes = Notes("attendance", rank)
        lookout.add_report(name, self.report)

    def call(self, operation: str) -> None:
        """Return when all ranks have come to the operation.

        Args:
            operation: What needs them, the same on all ranks, and of whom.

        Raises:
            RuntimeError: Some ranks do not come, or come to another operation.
        """
        if self._group is None:
            return
        decorated = _decorated_caller()
        if decorated:
            here = self._describe(operation)
            raise RuntimeError(f"{here}, who never come: it is inside of {decorated}. {self._advice}")
        if self._failure:
            raise RuntimeError(f"{self._describe(operation)}, which were not together before: {self._failure}")
        self._calls += 1
        code = zlib.crc32(operation.encode())
        ballot = torch.tensor([code, -code])
        work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if work is not None:
            self._wait(work, operation)
        if ballot[0] != -ballot[1]:
            self._fail(f"{self._describe(operation)}, and others do something else: {self._find_others(operation)}")

    def report(self) -> dict[str, int]:
        """How far this rank is, for those that wait for it."""
        begun = self._begun()  # first: a rank that comes to a call in between has not passed it by
        return {"begun": begun, "calls": self._calls}

    def _wait(self, work: dist.Work, operation: str) -> None:
        begun, started, warned = self._begun(), time.monotonic(), False
        while not self._is_over(work, operation):
            passed = self._passed_by(begun)
            if passed:
                self._fail(f"{self._describe(operation)}, and {passed}")
            if not warned and time.monotonic() - started > WARNING_S:
                warned = True
                sys.stderr.write(f"rank {self._rank} waits: {self._describe(operation)}. {self._advice}\n")

    def _is_over(self, work: dist.Work, operation: str) -> bool:
        """Whether all have come, after a while at most."""
        try:
            work.wait(timedelta(seconds=ALARM_S))
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()  # which says why it failed, if it did
        except RuntimeError as error:
            self._fail(f"{self._describe(operation)}: some have ended, or have not come in time ({error})")
        return True

    def _passed_by(self, begun: int) -> str:
        """Which ranks have begun something else after all that this one has begun, and where they are."""
        try:
            answers = self._lookout.answers(self._others)
            self._lookout.ask()  # answered until the next time
        except LostStoreError:
            return ""  # the operation ends by its own timeout
        reports = {rank: answer["reports"].get(self._name) for rank, answer in answers.items()}
        passed = [
            f"rank {rank} has passed by and is at {answers[rank]['where']}"
            for rank, report in reports.items()
            if report is not None and report["calls"] < self._calls and report["begun"] > begun
        ]
        return ", ".join(passed)

    def _find_others(self, operation: str) -> str:
        names = {rank: f"{self._calls}/{rank}" for rank in self._others}
        try:
            self._notes.write(f"{self._calls}/{self._rank}", f"{operation} at {place_of(sys._getframe())}")
            texts = self._notes.wait_for([*names.values()], _OTHERS_S)
        except LostStoreError:
            return ""  # it goes without saying to what
        return ", ".join(f"rank {rank} to {texts.get(name, '?')}" for rank, name in names.items())

    def _describe(self, operation: str) -> str:
        where = place_of(sys._getframe())
        return f"{operation} at {where} on rank {self._rank} needs ranks {self._others} to do the same"

    def _fail(self, text: str) -> None:
        self._failure = text
        raise RuntimeError(f"{text}. {self._advice}")


ABOUT_PARAMETERS = (
    "A sharded parameter has to be asked by all ranks alike. Move this out of rank_zero_only functions and out of "
    "conditions that only some ranks fulfil, or put it inside of strategy.summon_full_params(), which all ranks enter: "
    "there parameters are whole, and each rank may do what it likes"
)
ABOUT_COLLECTIVES = (
    "All ranks have to communicate alike, in one order: move this out of conditions that only some ranks fulfil, and "
    "give tensors one shape and dtype on all ranks"
)
"""Two kinds of advice."""


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
