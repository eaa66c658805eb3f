"""Desync check: fingerprints of calls that all ranks make, and the reason why a rank waits."""

from __future__ import annotations

import dis
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardeddp.comm.agreement import ABOUT_COLLECTIVES, ADVICE, HostReduction
from shardeddp.comm.collectives import in_forked_process
from shardeddp.comm.host_group import HostGroup
from shardeddp.comm.liveness import LIGHTNING, LivenessProbe, code_line_of
from shardeddp.comm.propagation import ErrorPropagation, break_off, waits_on_device
from shardeddp.comm.transfers import count_begun, wait_for
from shardeddp.errors import DesyncError
from shardeddp.torch_private import (
    COLLECTIVES_FILE,
    OPERATORS_FILE,
    are_operations_traced,
    default_store,
    is_in_backward,
    process_groups,
)

# -- CallFingerprints: check of calls that need all ranks

WARNING_S = 10.0
"""Time after which a waiting rank prints a warning."""

_ALONE: dict[CodeType, str] = {}  # code of a function that runs on one rank only -> explanation


def note_that_runs_alone(function: Callable[..., Any], explanation: str) -> None:
    """Register a function that runs on one rank only.

    Args:
        function: Function, or any result of its decorator; all functions that a decorator returns
            share their code.
        explanation: Text for the user, with ``{name}`` for the name of the decorated function.
    """
    _ALONE[function.__code__] = explanation


def refuse_traced(operation: str) -> None:
    """Refuse to gather parameters for traced operations: the graph would refer to freed memory.

    Raises:
        RuntimeError: Operations are traced, on all ranks that come here; training may go on.
    """
    if are_operations_traced():
        raise RuntimeError(
            f"{operation} is traced (torch.func.linearize, torch.export, make_fx or "
            f"torch.jit.trace), and a graph would refer to gathered parameters, whose memory is "
            f"given back: expected a module that is not sharded. Trace it before it is set up, or "
            f"one that has loaded a full checkpoint. torch.func.jvp and vjp take sharded modules"
        )


class CallFingerprints:
    """Fingerprints of calls, compared in a small host message before operations outside a step.

    Ranks that reach different operations raise; ranks that reach none at all are found by
    :class:`~shardeddp.comm.desync.DesyncCheck`.

    Args:
        group: Host group of the ranks that have to come; None: no others.
        ranks: Global ranks of the group.
        rank: Global rank of this process.
        error_propagation: Explains why a rank that has come waits in vain.
        name: Name of this desync check among several.
        advice: Remedy for ranks that do not come, for messages.
    """

    def __init__(
        self,
        group: HostGroup | None,
        *,
        ranks: Sequence[int],
        rank: int,
        error_propagation: ErrorPropagation,
        name: str,
        advice: str,
    ) -> None:
        self.advice = advice
        self.group = group
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._error_propagation, self._kind = error_propagation, f"desync check of {name}"
        self._failure = ""  # error of an earlier call; ranks are out of step from then on
        self._is_inherited = False
        self._thread: int | None = None  # the one that may call; None: any may

    def leave_to_parent(self) -> None:
        """Refuse all further calls, in a process that was forked from the rank."""
        self._is_inherited = True

    def restrict_to(self, thread: int | None) -> None:
        """Refuse calls on threads other than the training thread; None: allow any."""
        self._thread = thread

    def call(self, operation: str, advice: str = "") -> None:
        """Return when all ranks have reached the operation.

        Args:
            operation: Operation that needs them and its tensor, the same text on all ranks.
            advice: Remedy for ranks that do not come; empty: ``self.advice``.

        Raises:
            DesyncError: Some ranks have reached another operation, now or earlier, or this call is
                made on another thread or in a function that runs on one rank only.
            RuntimeError: Some ranks do not come, this process was forked, or torch is tracing.
        """
        if self.group is None:
            return
        if self._is_inherited:
            ranks = sorted([self._rank, *self._others])
            raise in_forked_process(f"{operation} at {code_line_of(sys._getframe())}", ranks)
        if self._thread not in (None, threading.get_ident()) and not is_in_backward():
            raise DesyncError(
                f"{self._describe(operation)}, on thread {threading.current_thread().name!r} while "
                f"another thread trains: each of them would start collectives in an order of its own. "
                f"Take the values in the training thread (full_tensor()) and hand them over"
            )
        advice = advice or self.advice
        decorated = _decorated_caller()
        if decorated:
            here = self._describe(operation)
            raise DesyncError(
                f"{here}, which never reach it: it is inside of {decorated}. {advice}"
            )
        refuse_traced(operation)
        if self._failure:
            raise DesyncError(
                f"{self._describe(operation)}, and ranks have been out of step since: {self._failure}"
            )
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._wait(
            HostReduction(
                nothing, operation, self.group, kind=self._kind, advice=advice, ahead=True
            )
        )

    def _wait(self, call: HostReduction) -> None:
        if not call.is_there_within(WARNING_S):
            sys.stderr.write(
                f"rank {self._rank} waits: {self._describe(call.operation)}. {call.advice}\n"
            )
        try:
            call.wait()
        except DesyncError as error:
            self._failure = str(error)
            raise
        except RuntimeError as error:
            self._error_propagation.explain(error, call.operation)
            if isinstance(error.__cause__, DesyncError):
                self._failure = str(error.__cause__)
                raise
            self._failure = f"{self._describe(call.operation)}: some have ended, or do not come"
            raise RuntimeError(f"{self._failure}. {error}") from error.__cause__

    def _describe(self, operation: str) -> str:
        where = code_line_of(sys._getframe())
        return (
            f"{operation} at {where} on rank {self._rank} needs ranks {self._others} to do the same"
        )


def _decorated_caller() -> str:
    """Return a text on the calling function that runs on one rank only; empty if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        for code, explanation in _ALONE.items():
            if code is frame.f_code:  # compiled code may have constants that cannot be hashed
                decorated: Any = frame.f_locals.get("fn")
                name = decorated.__qualname__ if callable(decorated) else code.co_name
                return explanation.format(name=name)
        frame = frame.f_back
    return ""


# -- Desync: ranks that wait for different operations
#
# Every rank counts the operations it begins: agreements and calls on the host by group and kind
# (:mod:`shardeddp.comm.agreement`), gathers and reductions by stream. All ranks begin them in one
# order, so of two ranks that are in step none is ahead of the other in one count and behind it in
# another. Where that is so and both stand still, neither can ever go on: it is an error on both,
# however long the timeout is. A rank that is merely late is behind in all counts, and waited for.
#
# Nothing is sent while ranks go on. A rank that has stood still in communication for a second asks
# its neighbours in each of its groups, some six ranks at any world size: between ranks that have
# reached one operation and ranks that have reached another there is always a pair of neighbours.
#
# Operations that a user asks of torch directly are seen in the stack of the waiting thread and
# counted by torch.

ALARM_S = 1.0
"""Time without progress after which a waiting rank asks its neighbours.

From then on it counts as standing still.
"""

BUSY_S = 5.0
"""The same for a rank that waits in no known communication: it may be about to go on."""

TRANSFER_S = 8.0
"""The same for a rank that waits for a user's transfer, where no other rank goes on.

Tests set a shorter time.
"""

_NAMED = 8
"""Maximum number of ranks in a message."""

_PYTHON, _WAIT = "Python", "the wait() of a handle"

_COMM = str(Path(__file__).parent)
_TENSOR = str(Path(__file__).parents[1] / "tensor")
_TORCH_FILES = str(Path(torch.__file__).parent)
_STANDARD = str(Path(threading.__file__).parent)
_OF_TORCH = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
}  # fmt: skip
"""Collectives that block; point-to-point calls wait for one other rank alone."""

_WAITS = {"monitored_barrier", "wait_tensor"}
"""Functions of torch that wait, besides a handle's ``wait()``."""

_SENDS = {"send", "isend", "send_object_list"}

BegunOperations = dict[str, dict[str, int]]
"""Number of operations that a rank has begun, by group and kind.

Operations of groups with the prefix ``STREAMS`` have no fixed order among each other.
"""

STREAMS = "streams"


@dataclass(frozen=True, kw_only=True, eq=False)
class Watched:
    """State of one mesh that a check watches, for as long as the mesh keeps it."""

    neighbours: set[int]
    """Ranks to ask."""

    progress: Callable[[], BegunOperations]
    """Returns the operations that this rank has begun."""

    own: set[str]
    """Names of the groups that ``progress`` counts."""


@dataclass(frozen=True, kw_only=True)
class WaitReport:
    """State of a rank's training thread at its last sample; other ranks get it as JSON."""

    begun: BegunOperations = field(default_factory=dict[str, dict[str, int]])
    still_s: float = 0.0
    """Seconds without progress."""

    waits: bool = False
    """True if the thread waits in communication; False too if it may, by a handle."""

    torch_group: str = ""
    """Name of the group of the collective that it waits in; empty: none, or one of ours."""

    source: int | None = None
    """Rank from which it waits to receive."""

    target: int | None = None
    """Rank to which it is about to send."""

    needed: list[int] = field(default_factory=list[int])
    """Ranks that have to reach the call in which it waits."""

    handle: bool = False
    """True if it waits in native code for a transfer, as by the handle of a collective."""

    operation: str = ""
    """Operation and its line."""

    advice: str = ABOUT_COLLECTIVES

    @staticmethod
    def of_answer(answer: dict[str, Any]) -> WaitReport:
        """Return the report in an answer; one without a wait for a rank that has ended."""
        return WaitReport(**answer["reports"].get("desync", {}))

    @property
    def stands(self) -> bool:
        """True if the rank waits for others, and has done so for long enough."""
        if self.waits:
            return self.still_s >= ALARM_S
        return self.handle and self.still_s >= TRANSFER_S


class DesyncCheck:
    """Check of one rank for waits that never end, on the thread of its liveness probe.

    There is one for all meshes of a process group (:meth:`of_group`): a rank waits in one
    operation, however many Trainers it has, and the first check that finds the wait in vain closes
    all connections.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self.liveness_probe = LivenessProbe(rank)
        """Asks other ranks, and answers for this one."""
        self.error_propagation = ErrorPropagation(rank, world_size, self.liveness_probe)
        """Publishes the error for the other ranks."""
        # Replaced as a whole, since the probe's thread reads it. All ranks make meshes in one
        # order, so the index of a mesh is its name on all of them.
        self._watched: tuple[weakref.ref[Watched], ...] = ()
        self._neighbours: set[int] = set()
        self._seen: tuple[int, int, BegunOperations] | None = None
        self._since = time.monotonic()
        self._report = WaitReport()
        self._asked = 0  # number of the request to which answers are expected; 0: none
        self._over = False
        self.liveness_probe.attach(self)

    @classmethod
    def of_group(cls) -> DesyncCheck:
        """Return the check of the default process group, which lives as long as its store."""
        store = default_store()
        found = _CHECKS.get(store)
        if found is None:
            found = _CHECKS[store] = cls(dist.get_rank(), dist.get_world_size())
        return found

    def watch(self, mesh: Watched) -> None:
        """Add a mesh to those watched; all ranks call this for it."""
        self._watched = (*self._watched, weakref.ref(mesh))

    def begin_run(self) -> None:
        """Begin a run on the calling thread; all ranks call it."""
        self.liveness_probe.begin_run()
        self.error_propagation.begin_run()
        self._over = False

    def report(self) -> dict[str, Any]:
        """Return the fields of this rank's :class:`WaitReport`."""
        return vars(self._report)

    def on_sample(self, frame: FrameType | None) -> None:
        """Note from its innermost frame whether the training thread has gone on."""
        meshes = {n: mesh for n, each in enumerate(self._watched) if (mesh := each()) is not None}
        own = set[str]().union(*(mesh.own for mesh in meshes.values()))
        self._neighbours = set[int]().union(*(mesh.neighbours for mesh in meshes.values()))
        progress = counted_by_torch(own) | {
            f"{name} of mesh {number}": counts
            for number, mesh in meshes.items()
            for name, counts in mesh.progress().items()
        }
        # A rank that prints its warning has not gone on.
        looks = _frame_of(wait_for.__code__, frame)  # loops within one wait
        at = _call(frame) or looks or frame
        seen = (id(at), 0 if at is None or at is looks else at.f_lasti, progress)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        waits, torch_group = _waiting(frame, own)
        handle, (operation, advice) = _awaits_handle(frame), _describe(frame)
        operation = _WAIT if handle and operation == _PYTHON else operation
        self._report = WaitReport(
            begun=progress,
            still_s=time.monotonic() - self._since,
            waits=waits,
            torch_group=torch_group,
            source=_source_of_receive(frame),
            target=_target_of_send(frame),
            needed=_needed(frame),
            handle=handle,
            operation=f"{operation} at {code_line_of(frame)}",
            advice=advice,
        )

    def on_tick(self) -> None:
        """Break off this rank's wait if it has failed already, or can never end."""
        report = self._report
        if self._over or not report.waits or report.still_s < ALARM_S:
            self._asked = 0
            # A wait for the device (`.item()`) looks like any other slow code, and a handle may
            # belong to a transfer with a rank that does not end.
            is_still = not self._over and report.still_s >= ALARM_S
            if is_still and (
                (waits_on_device() and self.error_propagation.has_failed())
                or (report.handle and self.error_propagation.is_known())
            ):
                self._break_off()
            return
        if self.error_propagation.is_known():
            self._break_off()
            return
        if self._asked:
            target = set() if report.target is None else {report.target}
            reports = self._reports(self._neighbours | target)
            odd = {
                rank: other
                for rank, other in reports.items()
                if _crossed(report, other)
                or (rank in report.needed and self._is_awaited_by(rank, other))
            }
            odd = odd or self._transfers_in_vain(reports)
            if odd:
                self._fail(odd)
                return
        self._asked = self.liveness_probe.ask()

    def _reports(self, ranks: Collection[int]) -> dict[int, WaitReport]:
        """Return the reports of those ranks that have answered the last request."""
        answers = self.liveness_probe.answers(ranks, self._asked)
        return {rank: WaitReport.of_answer(answer) for rank, answer in answers.items()}

    def _transfers_in_vain(self, neighbours: dict[int, WaitReport]) -> dict[int, WaitReport]:
        """Return ranks in transfers of a user's that no rank can match any more.

        Torch does not say to which transfer a handle belongs. All ranks are asked, once no
        neighbour goes on either, by the lowest neighbour that waits for others to come.
        """
        report = self._report
        first = not any(each.needed for rank, each in neighbours.items() if rank < self._rank)
        if not report.needed or report.still_s < TRANSFER_S or not first:
            return {}
        if not all(each.stands for each in neighbours.values()):
            return {}
        reports = self._reports(self._others)
        if len(reports) < len(self._others) or not all(each.stands for each in reports.values()):
            return {}
        found = [rank for rank, each in sorted(reports.items()) if not each.waits]
        return {rank: reports[rank] for rank in found[:_NAMED]}

    def _is_awaited_by(self, rank: int, other: WaitReport) -> bool:
        """Return whether ``rank`` waits for a message that this one sends only after it comes."""
        sends = self._report.target == rank
        has_begun_more = _is_ahead_in_torch(other, self._report)
        if other.source == self._rank:
            return other.still_s >= ALARM_S and (sends or has_begun_more)
        # Its handle may belong to a transfer with a third rank, which is merely late.
        certain = sends or self._neighbours == {rank}
        return certain and has_begun_more and other.handle and other.still_s >= BUSY_S

    def _fail(self, odd: dict[int, WaitReport]) -> None:
        reports = dict(sorted((odd | {self._rank: self._report}).items()))
        places = "; ".join(
            f"rank {rank} waits in {report.operation}" for rank, report in reports.items()
        )
        advice = max((report.advice for report in reports.values()), key=ADVICE.index)
        self.error_propagation.report_desync(
            f"ranks have come to different operations, each of which needs the other ranks, and "
            f"none of them can go on: {places}. {advice}"
        )
        self._break_off()

    def _break_off(self) -> None:
        """Fail all operations in which this rank waits, by closing its connections."""
        self._over = True
        break_off()


_CHECKS: weakref.WeakKeyDictionary[dist.Store, DesyncCheck] = weakref.WeakKeyDictionary()
"""Desync checks by the store of the process group."""


def _crossed(mine: WaitReport, other: WaitReport) -> bool:
    """Return whether both of two ranks stand still, each of them ahead of the other."""
    if other.still_s < (ALARM_S if other.waits else BUSY_S):
        return False
    here, there = _ahead(mine, other), _ahead(other, mine)
    # Gathers and reductions alone prove nothing: their order among each other is not fixed.
    return bool(here and there and not all(each.startswith(STREAMS) for each in here | there))


def _ahead(one: WaitReport, other: WaitReport) -> set[str]:
    """Return the common groups in which one rank has begun operations that the other has not."""
    return {
        group
        for group, counts in one.begun.items()
        # Torch counts messages between two ranks as well: its groups count only for a rank that
        # waits in one of their collectives.
        if group in other.begun and (not group.startswith(_TORCH) or one.torch_group == group)
        if any(count > other.begun[group].get(kind, 0) for kind, count in counts.items())
    }


def _is_ahead_in_torch(one: WaitReport, other: WaitReport) -> bool:
    """Return whether a rank has begun more than another in a group that is not ours."""
    return any(
        counts["operations"] > other.begun[group]["operations"]
        for group, counts in one.begun.items()
        if group.startswith(_TORCH) and group in other.begun
    )


_TORCH = "torch "


def counted_by_torch(own: set[str]) -> BegunOperations:
    """Return the number of operations begun in groups that are not ours, by group."""
    return {
        _TORCH + group.group_name: {"operations": begun}
        for group in process_groups()
        if group.group_name not in own and (begun := count_begun(group)) is not None
    }


def _source_of_receive(frame: FrameType | None) -> int | None:
    """Return the rank from which a thread waits to receive; None: it does not, or names none."""
    if frame is None or _file(frame) != COLLECTIVES_FILE or _name(frame) != "recv":
        return None
    return _global_rank(frame, "src")


def _global_rank(frame: FrameType, argument: str) -> int | None:
    """Return the global rank given to a function of torch, as a global or a group rank."""
    given: int | None = frame.f_locals.get(argument)
    in_group: int | None = frame.f_locals.get(f"group_{argument}")
    if given is not None or in_group is None:
        return given
    group: Any = frame.f_locals.get("group") or dist.group.WORLD
    return dist.get_global_rank(group, in_group)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _needed(frame: FrameType | None) -> list[int]:
    """Return the ranks that have to reach the call in which a thread waits."""
    call = _call(frame)
    return [] if call is None else call.f_locals["self"]._others


def _call(frame: FrameType | None) -> FrameType | None:
    """Return the frame of :meth:`CallFingerprints.call` in a thread's stack, if it is in one."""
    return _frame_of(CallFingerprints.call.__code__, frame)


def _frame_of(code: CodeType, frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a function in a stack."""
    return next((each for each in _callers(frame) if each.f_code is code), None)


def _target_of_send(frame: FrameType | None) -> int | None:
    """Return the rank to which a thread is about to send; None: it does not send."""
    for each in _callers(frame):
        if _file(each) == COLLECTIVES_FILE and each.f_code.co_name in _SENDS:
            return _global_rank(each, "dst")
    return None


def _awaits_handle(frame: FrameType | None) -> bool:
    """Return whether a thread waits in native code for a transfer, as by a collective's handle."""
    if frame is None:
        return False
    callers = (each for each in _callers(frame) if _file(each) != OPERATORS_FILE)
    if _name(next(callers, frame)) in _WAITS:
        return True
    loaded = [
        each.argval
        for each in dis.get_instructions(frame.f_code)
        if each.offset <= frame.f_lasti and each.opname in ("LOAD_METHOD", "LOAD_ATTR")
    ]
    return loaded[-1:] == ["wait"]


def _waiting(frame: FrameType | None, own: set[str]) -> tuple[bool, str]:
    """Return whether a thread waits in communication, and the group if it is not ours."""
    while frame is not None and _is_passed_through(frame):
        frame = frame.f_back
    if frame is None:
        return False, ""
    if frame.f_code.co_filename == COLLECTIVES_FILE and frame.f_code.co_name in _OF_TORCH:
        group: Any = frame.f_locals.get("group") or dist.group.WORLD
        return True, "" if group.group_name in own else _TORCH + group.group_name
    return _file(frame).startswith(_COMM), ""


def _is_passed_through(frame: FrameType) -> bool:
    """Return whether the operation waited for is shown by a frame's caller, not by the frame."""
    file = _file(frame)
    if file == COLLECTIVES_FILE:
        return False
    if file.startswith((_TENSOR, _TORCH_FILES)):
        return True  # between a user's collective and the operation on whole tensors
    return file.startswith(_STANDARD) and "-packages" not in file  # an event or a lock


def _describe(frame: FrameType | None) -> tuple[str, str]:
    """Return the operation for which a thread waits, in its caller's words, and its advice."""
    place, callee, within, collective = code_line_of(frame), None, None, None
    while frame is not None and f"{_file(frame)}:{frame.f_lineno}" != place:
        if frame.f_code is CallFingerprints.call.__code__:
            return frame.f_locals["operation"], frame.f_locals["advice"] or frame.f_locals[
                "self"
            ].advice
        if within is None and _package(frame) in LIGHTNING:
            within = frame
        if collective is None and _file(frame) == COLLECTIVES_FILE:
            collective = frame
        callee, frame = frame, frame.f_back
    if callee is None:
        return _PYTHON, ABOUT_COLLECTIVES
    inside = "" if within is None or within is callee else _name(within)
    if collective is not None:
        inside = f"torch.distributed.{_name(collective)}"
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
