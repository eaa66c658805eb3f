"""Attendance: before an operation that needs all ranks and that a user may call anywhere, see that they all come."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

ALARM_S = 1.0
"""After how long a rank that waits asks where the others are, and how often."""

WARNING_S = 10.0
"""After how long it tells its user that it waits."""

_ENGINE = ("shardeddp", "torch", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning")
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
    """

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int, begun: Callable[[], int]
    ) -> None:
        self._group, self._ranks, self._rank, self._begun = group, ranks, rank, begun
        self._lookout: Lookout | None = None
        self._calls = 0
        self._failure = ""  # what a former call has ended with; the ranks are not together any more
        store = dist.PrefixStore("shardeddp/attendance", distributed_c10d._get_default_store())
        # All ranks make the same ones in the same order; what they leave in the store outlives them.
        self._store = dist.PrefixStore(str(store.add(f"made/{rank}", 1)), store)

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
            raise RuntimeError(f"{self._describe(operation)}, who never come: it is inside of {decorated}. {_HINT}")
        if self._failure:
            raise RuntimeError(f"{self._describe(operation)}, which were not together before: {self._failure}")
        self._calls += 1
        code = zlib.crc32(operation.encode())
        ballot = torch.tensor([code, -code])
        work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if work is not None:
            self._wait(work, operation)
        if ballot[0] != -ballot[1]:
            self._fail(f"{self._describe(operation)}, and others do something else: {self._others(operation)}")

    def watch(self) -> None:
        """Let a thread answer ranks that wait for this one, from now on."""
        if self._group is not None and self._lookout is None:
            self._lookout = Lookout(self)

    def look_out(self) -> None:
        """Say where this rank is if another one waits; called now and then by a thread."""
        if self._group is not None and self._store.check(["alarm"]):
            place = {"calls": self._calls, "begun": self._begun(), "where": _place(_main_frame())}
            self._store.set(f"at/{self._rank}", json.dumps(place))

    def _wait(self, work: dist.Work, operation: str) -> None:
        begun, started, warned = self._begun(), time.monotonic(), False
        while not self._is_over(work, operation):
            passed = self._passed_by(begun)
            if passed:
                self._fail(f"{self._describe(operation)}, and {passed}")
            if not warned and time.monotonic() - started > WARNING_S:
                warned = True
                sys.stderr.write(f"rank {self._rank} waits: {self._describe(operation)}. {_HINT}\n")
        if time.monotonic() - started > ALARM_S:
            self._store.delete_key("alarm")  # another rank that waits still gives it again

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
        self._store.set("alarm", "1")
        keys = {rank: f"at/{rank}" for rank in self._ranks if rank != self._rank}
        found = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        passed = [
            f"rank {rank} has passed by and is at {place['where']}"
            for rank, place in found.items()
            if place["calls"] < self._calls and place["begun"] > begun
        ]
        return ", ".join(passed)

    def _others(self, operation: str) -> str:
        for rank in self._ranks:
            if rank == self._rank:
                self._store.set(f"call/{self._calls}/{rank}", f"{operation} at {_place(sys._getframe())}")
        keys = {rank: f"call/{self._calls}/{rank}" for rank in self._ranks if rank != self._rank}
        self._store.wait(list(keys.values()), timedelta(seconds=10))
        return ", ".join(f"rank {rank} to {self._store.get(key).decode()}" for rank, key in keys.items())

    def _describe(self, operation: str) -> str:
        others = [rank for rank in self._ranks if rank != self._rank]
        return f"{operation} at {_place(sys._getframe())} on rank {self._rank} needs ranks {others} to do the same"

    def _fail(self, text: str) -> None:
        self._failure = text
        raise RuntimeError(f"{text}. {_HINT}")


_HINT = (
    "A sharded parameter has to be asked by all ranks alike. Move this out of rank_zero_only functions and out of "
    "conditions that only some ranks fulfil, or put it inside of strategy.summon_full_params(), which all ranks enter: "
    "there parameters are whole, and each rank may do what it likes"
)


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


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _place(frame: FrameType | None) -> str:
    """The innermost line of the user's own code, or of what is there instead."""
    innermost = frame
    foreign = tuple(place for name in _ENGINE if name in sys.modules for place in sys.modules[name].__path__)
    standard = os.path.dirname(threading.__file__)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(foreign) and ("site-packages" in file or not file.startswith(standard)):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line" if innermost is None else f"{innermost.f_code.co_filename}:{innermost.f_lineno}"


class Lookout:
    """The thread that answers for a rank whose main thread waits somewhere else; it ends with what it answers for.

    Args:
        attendance: Whose calls it answers.
    """

    def __init__(self, attendance: Attendance) -> None:
        self._over = threading.Event()
        self._attendance = weakref.ref(attendance, lambda _: self._over.set())
        self._thread = threading.Thread(target=self._run, name="shardeddp-lookout", daemon=True)
        self._thread.start()
        _LOOKOUTS.add(self)

    def stop(self) -> None:
        """End the thread, before the interpreter ends under its feet."""
        self._over.set()
        self._thread.join(timeout=ALARM_S)

    def _run(self) -> None:
        while not self._over.wait(ALARM_S):
            attendance = self._attendance()
            if attendance is None:
                return
            try:
                attendance.look_out()
            except (RuntimeError, ValueError):
                return  # the store went with the rank that hosts it
            del attendance


_LOOKOUTS: weakref.WeakSet[Lookout] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for lookout in list(_LOOKOUTS):
        lookout.stop()
