"""Desync: finds out why a rank waits, when the others will never come to what it waits for.

Every rank counts what it begins: agreements and calls on the host by group and kind (:mod:`shardeddp.comm.sequence`),
gathers and reductions by lane. All ranks begin them in one order, so of two ranks that are in step none is ahead of the
other in one thing and behind it in another. Where that is so and both stand still, neither can ever go on: it is an
error on both, however long the timeout is. A rank that is merely late is behind in everything, and waited for.

Nothing is sent while ranks go on. One that has stood still in communication for a second asks its neighbours in each of
its groups, some six ranks however many there are: between those that have come to one place and those that have come to
another there is always a pair of neighbours.

What a user asks torch for, without us, is seen in the stack of the thread that waits for it and counted by torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardeddp.comm.attendance import Attendance
from shardeddp.comm.failures import Failures
from shardeddp.comm.gloo import disconnect
from shardeddp.comm.lookout import LIGHTNING, Lookout, place_of
from shardeddp.comm.sequence import ABOUT_COLLECTIVES, ADVICE

ALARM_S = 1.0
"""After how long without any progress a rank that waits asks its neighbours, and counts as standing still."""

_BUSY_S = 5.0
"""The same for a rank that does not wait in communication that we know of: it may be about to go on."""

_COMM = str(Path(__file__).parent)
_C10D = distributed_c10d.__file__
_STANDARD = str(Path(threading.__file__).parent)
_OF_TORCH = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
}  # fmt: skip
"""Collectives that block; a rank that sends or receives waits for one other rank alone."""

Progress = dict[str, dict[str, int]]
"""What a rank has begun: by group the operations of each kind. The group ``LANES`` comes in no order with itself."""

LANES = "lanes"


class DesyncCheck:
    """Watches over one rank, on the thread of its lookout.

    Args:
        rank: This rank.
        neighbours: Whom to ask.
        progress: What this rank has begun.
        own: The names of groups that ``progress`` counts.
        lookout: Asks and answers.
        failures: Where the error is left for the other ranks.
    """

    def __init__(
        self,
        rank: int,
        neighbours: Sequence[int],
        progress: Callable[[], Progress],
        own: set[str],
        lookout: Lookout,
        failures: Failures,
    ) -> None:
        self._rank, self._neighbours = rank, [other for other in neighbours if other != rank]
        self._progress, self._own = progress, own
        self._lookout, self._failures = lookout, failures
        self._seen: tuple[int, int, Progress] | None = None
        self._since = time.monotonic()
        self._report: dict[str, Any] = {}
        self._asked = 0  # the question that answers are expected to; 0: none
        self._over = False
        lookout.add_report("desync", self.report)
        lookout.watch(self.look, self.judge)

    def report(self) -> dict[str, Any]:
        """What this rank was doing when it was looked at last."""
        return self._report

    def look(self, frame: FrameType | None) -> None:
        """See whether the thread that trains has gone on since the last time.

        Args:
            frame: Its innermost.
        """
        progress = self._progress() | _counted_by_torch(self._own)
        seen = (id(frame), 0 if frame is None else frame.f_lasti, progress)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        waits, torch_group = _waiting(frame, self._own)
        operation, advice = _describe(frame)
        self._report = {
            "begun": progress,
            "still_s": time.monotonic() - self._since,
            "waits": waits,
            "torch": torch_group,
            "what": f"{operation} at {place_of(frame)}",
            "advice": advice,
        }

    def judge(self) -> None:
        """End the wait of this rank if it has failed already, or can never be over."""
        if self._over or not self._report["waits"] or self._report["still_s"] < ALARM_S:
            self._asked = 0
            return
        if self._failures.is_known():
            self._break_off()
            return
        if self._asked:
            answers = self._lookout.answers(self._neighbours, self._asked)
            reports = {rank: answer["reports"].get("desync") for rank, answer in answers.items()}
            odd = {rank: report for rank, report in reports.items() if report and _crossed(self._report, report)}
            if odd:
                self._fail(odd)
                return
        self._asked = self._lookout.ask()

    def _fail(self, odd: dict[int, dict[str, Any]]) -> None:
        reports = dict(sorted((odd | {self._rank: self._report}).items()))
        places = "; ".join(f"rank {rank} waits in {report['what']}" for rank, report in reports.items())
        advice = max((report["advice"] for report in reports.values()), key=ADVICE.index)
        self._failures.report_desync(
            f"ranks have come to different operations, each of which needs the other ranks, and none of them can go "
            f"on: {places}. {advice}"
        )
        self._break_off()

    def _break_off(self) -> None:
        """Let all that this rank waits for fail: its connections are closed."""
        self._over = True
        for group in list(distributed_c10d._world.pg_map):
            backends = distributed_c10d._world.pg_backend_config.get(group, "")
            if "gloo" in backends:
                disconnect(group)
            if "nccl" in backends:
                group.abort()


def _crossed(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether each of two ranks that stand still is ahead of the other."""
    if other["still_s"] < (ALARM_S if other["waits"] else _BUSY_S):
        return False
    here, there = _ahead(mine, other), _ahead(other, mine)
    # Gathers and reductions alone prove nothing: they need not be begun in one order.
    return bool(here and there and here | there != {LANES})


def _ahead(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """The groups of both in which one rank has begun what the other one has not."""
    return {
        group
        for group, counts in one["begun"].items()
        # What is sent between two ranks counts as well with torch: it takes a collective that is waited for.
        if group in other["begun"] and (not group.startswith(_TORCH) or one["torch"] == group)
        if any(count > other["begun"][group].get(kind, 0) for kind, count in counts.items())
    }


_TORCH = "torch "


def _counted_by_torch(own: set[str]) -> Progress:
    """How many operations torch has begun in the groups that are not ours."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    return {
        _TORCH + group.group_name: {"operations": group._get_sequence_number_for_group()}
        for group in groups
        if group.group_name not in own
    }


def _waiting(frame: FrameType | None, own: set[str]) -> tuple[bool, str]:
    """Whether a thread waits in communication, and in which group of torch's if that is not ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_STANDARD) and "-packages" not in _file(frame):
        frame = frame.f_back  # an event or a lock that is waited for
    if frame is None:
        return False, ""
    if frame.f_code.co_filename == _C10D and frame.f_code.co_name in _OF_TORCH:
        group: Any = frame.f_locals.get("group") or dist.group.WORLD
        return True, "" if group.group_name in own else _TORCH + group.group_name
    return _file(frame).startswith(_COMM), ""


def _describe(frame: FrameType | None) -> tuple[str, str]:
    """What a thread waits for, in the words of who has asked, and the advice that goes with it."""
    innermost, place, callee, within = frame, place_of(frame), None, None
    while frame is not None and f"{_file(frame)}:{frame.f_lineno}" != place:
        if frame.f_code is Attendance.call.__code__:
            return frame.f_locals["operation"], frame.f_locals["advice"] or frame.f_locals["self"].advice
        if within is None and _package(frame) in LIGHTNING:
            within = frame
        callee, frame = frame, frame.f_back
    if callee is None:
        return "Python", ABOUT_COLLECTIVES
    inside = "" if within is None or within is callee else _name(within)
    if innermost is not None and _file(innermost) == _C10D:
        inside = f"torch.distributed.{_name(innermost)}"
    if _package(callee) == "torch":
        return inside or "the forward of a module", ABOUT_COLLECTIVES
    return _name(callee) + (f" ({inside})" if inside else ""), ABOUT_COLLECTIVES


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _name(frame: FrameType) -> str:
    name: str = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11 on
    return name.partition(".<locals>")[0]
