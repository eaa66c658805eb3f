"""Attendance: before an operation that needs all ranks and that a user may call anywhere, see that they all come."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardeddp.comm.failures import Failures
from shardeddp.comm.lookout import place_of
from shardeddp.comm.notes import LostStoreError, Notes
from shardeddp.comm.sequence import begin, begun
from shardeddp.errors import DesyncError

WARNING_S = 10.0
"""After how long a rank tells its user that it waits."""

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
    """A roll call of a small host message before operations that are no part of a step.

    Ranks that come together and to different operations raise; those that do not come at all are found by
    :class:`~shardeddp.comm.desync.DesyncCheck`.

    Args:
        group: The ranks that have to come, on the host; None: no others.
        ranks: Their global ranks.
        rank: This rank.
        failures: Says why a rank that has come waits in vain.
        notes: Where ranks say what they have come to; of all roll calls.
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
        notes: Notes,
        name: str,
        advice: str,
    ) -> None:
        self.advice = advice
        self.group = group
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._failures, self._kind = failures, f"roll call of {name}"
        self._failure = ""  # what a former call has ended with; the ranks are not together any more
        self._notes = notes

    def call(self, operation: str) -> None:
        """Return when all ranks have come to the operation.

        Args:
            operation: What needs them, the same on all ranks, and of whom.

        Raises:
            DesyncError: Some ranks have come to another operation.
            RuntimeError: Some ranks do not come.
        """
        if self.group is None:
            return
        decorated = _decorated_caller()
        if decorated:
            here = self._describe(operation)
            raise DesyncError(f"{here}, who never come: it is inside of {decorated}. {self.advice}")
        if self._failure:
            raise DesyncError(f"{self._describe(operation)}, which were not together before: {self._failure}")
        code = zlib.crc32(operation.encode())
        begin(self.group, self._kind)
        ballot = torch.tensor([code, -code])
        work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        if work is not None:
            self._wait(work, operation)
        if ballot[0] != -ballot[1]:
            others = self._find_others(operation, self.group)
            self._failure = f"{self._describe(operation)}, and others do something else: {others}"
            raise DesyncError(f"{self._failure}. {self.advice}")

    def _wait(self, work: dist.Work, operation: str) -> None:
        try:
            work.wait(timedelta(seconds=WARNING_S))
        except RuntimeError:
            if not work.is_completed():
                sys.stderr.write(f"rank {self._rank} waits: {self._describe(operation)}. {self.advice}\n")
        try:
            work.wait()  # which says why it failed, if it did
        except RuntimeError as error:
            self._failures.explain(error)
            self._failure = f"{self._describe(operation)}: some have ended, or do not come"
            raise RuntimeError(f"{self._failure}. {error}") from error.__cause__

    def _find_others(self, operation: str, group: dist.ProcessGroup) -> str:
        call = f"{group.group_name}/{sum(begun(group).values())}"  # equal on all ranks that have met there
        names = {rank: f"{call}/{rank}" for rank in self._others}
        try:
            self._notes.write(f"{call}/{self._rank}", f"{operation} at {place_of(sys._getframe())}")
            texts = self._notes.wait_for([*names.values()], _OTHERS_S)
        except LostStoreError:
            return ""  # it goes without saying to what
        return ", ".join(f"rank {rank} to {texts.get(name, '?')}" for rank, name in names.items())

    def _describe(self, operation: str) -> str:
        where = place_of(sys._getframe())
        return f"{operation} at {where} on rank {self._rank} needs ranks {self._others} to do the same"


ABOUT_PARAMETERS = (
    "A sharded parameter has to be asked by all ranks alike. Move this out of rank_zero_only functions and out of "
    "conditions that only some ranks fulfil, or put it inside of strategy.summon_full_params(), which all ranks enter: "
    "there parameters are whole, and each rank may do what it likes"
)
ABOUT_COLLECTIVES = (
    "All ranks have to communicate alike, in one order: move this out of conditions that only some ranks fulfil, and "
    "give tensors one shape and dtype on all ranks. Barriers, gathers, self.log(sync_dist=True), saving a checkpoint "
    "(trainer.save_checkpoint) and whatever reads a sharded parameter are for all ranks"
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
