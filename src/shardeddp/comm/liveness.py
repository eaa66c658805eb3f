"""Liveness: a thread that tells waiting ranks where this rank's main thread is."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Protocol

from shardeddp.comm.store import LostStoreError, SilentStoreError, StoreClient
from shardeddp.garbage import collector_paused

PERIOD_S = 0.5
"""Interval at which the thread looks for requests."""

_POLL_S = 0.1
_LAST_REQUEST = 1 << 62

LIGHTNING = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning")
_ENGINE = ("shardeddp", "torch", *LIGHTNING)


class ProgressCheck(Protocol):
    """Judge of the training thread's progress, called on the probe's thread."""

    def report(self) -> dict[str, Any]:
        """Return its part of an answer, serializable as JSON."""
        ...

    def on_sample(self, frame: FrameType | None) -> None:
        """Sample the training thread by its innermost frame, before requests are answered."""
        ...

    def on_tick(self) -> None:
        """Act on the sample, after requests are answered."""
        ...


class LivenessProbe:
    """Asks other ranks for their line, and answers for this one on a thread that ends with it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._client = StoreClient("liveness", rank)
        self._check: Callable[[], ProgressCheck | None] = lambda: None
        self._trains = threading.get_ident()
        self._answered = -1  # below the first number: an answer can be read soon after the start
        self._over: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to answer."""
        if self._thread is None:
            over = self._over
            # A put, unlike an event's set, takes no lock: a finalizer may run on any thread, at any
            # time.
            alive = weakref.ref(self, lambda _: over.put(None))
            self._thread = threading.Thread(
                target=_answer_probes, args=(alive, over), name="shardeddp-liveness", daemon=True
            )
            self._thread.start()
            _STARTED.add(self)

    def stop(self) -> None:
        """End the thread before the interpreter ends."""
        self._over.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def end(self) -> None:
        """Publish the end of this program for ranks that wait for it."""
        with contextlib.suppress(LostStoreError):
            self._write_answer(
                {"request": _LAST_REQUEST, "where": "the end of its program", "reports": {}}
            )

    def is_over(self) -> bool:
        """Return whether the probe's process group has ended, so that no rank can ask any more."""
        return self._client.is_over()

    def begin_run(self) -> None:
        """Make the calling thread the one that trains."""
        self._trains = threading.get_ident()

    def attach(self, check: ProgressCheck) -> None:
        """Call a check on the probe's thread and add its report to answers; holds it weakly."""
        self._check = weakref.ref(check)

    def ask(self) -> int:
        """Ask all ranks, and return the request's number; running ranks answer in a period."""
        return self._client.count("request")

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Return those of the ranks that have ended their program."""
        return list(self.answers(ranks, _LAST_REQUEST))

    def answers(self, ranks: Iterable[int], request: int = 1) -> dict[int, dict[str, Any]]:
        """Return the last answers of ranks to this or a later request.

        An answer has the rank's line (``where``) and its ``reports``.
        """
        names = {f"answer/{rank}": rank for rank in ranks}
        found = {
            names[name]: json.loads(text)
            for name, text in self._client.read_all(list(names)).items()
        }
        return {rank: answer for rank, answer in found.items() if answer["request"] >= request}

    def ask_now(self, ranks: Iterable[int], within_s: float) -> dict[int, dict[str, Any]]:
        """Ask, and return the answers of these ranks that come in time."""
        ranks = list(ranks)
        request = self.ask() if ranks else 0
        deadline = time.monotonic() + within_s
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = self.answers(ranks, request)
        return found

    def poll(self) -> None:
        """Answer if a rank has asked since the last call."""
        check = self._check()
        where = self._sample(check)
        try:
            self._answer(where, check)
        except SilentStoreError:
            raise
        except LostStoreError:
            pass  # the store's host is gone: on_tick judges whether this rank waits for it
        if check is not None:
            check.on_tick()

    def _answer(self, where: str, check: ProgressCheck | None) -> None:
        request = self._client.count("request", 0)
        if request > self._answered:
            reports = {} if check is None else {"desync": check.report()}
            self._write_answer({"request": request, "where": where, "reports": reports})
            self._answered = request

    def _sample(self, check: ProgressCheck | None) -> str:
        # Finding frames of another thread and walking over them (`f_back`) makes objects. If that
        # starts a collection and a finalizer lets other threads run, as that of a process group
        # does, Python before 3.11.9 and 3.12.3 deadlocks, or reads memory that the other thread has
        # freed (https://github.com/python/cpython/issues/106883).
        # A frame keeps all locals of its function alive; none is held while waiting for the store.
        with collector_paused():
            frame = sys._current_frames().get(self._trains)
            if check is not None:
                check.on_sample(frame)
            return code_line_of(frame)

    def _write_answer(self, answer: dict[str, Any]) -> None:
        self._client.write(f"answer/{self._rank}", json.dumps(answer))


def code_line_of(*frames: FrameType | None) -> str:
    """Return the innermost line of the user's own code, else the innermost line of all.

    Args:
        frames: Innermost frames of stacks; the first stack with a line of the user's counts. A
            thread of this package has none in its stack.
    """
    for frame in frames:
        if (line := _users_line(frame)) is not None:
            return line
    innermost = next(filter(None, frames), None)
    return (
        "an unknown line"
        if innermost is None
        else f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
    )


def _users_line(frame: FrameType | None) -> str | None:
    foreign = tuple(
        place for name in _ENGINE if name in sys.modules for place in sys.modules[name].__path__
    )
    standard = os.path.dirname(threading.__file__)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(foreign) and (
            "site-packages" in file or not file.startswith(standard)
        ):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def lightning_calls() -> bool:
    """Return whether Lightning, and not the user, has called this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("shardeddp", "contextlib"):
            return package in LIGHTNING
        frame = frame.f_back
    return False


def _answer_probes(alive: weakref.ref[LivenessProbe], over: SimpleQueue[None]) -> None:
    while not _ends_within(PERIOD_S, over):
        liveness_probe = alive()
        if liveness_probe is None or liveness_probe.is_over():
            return
        try:
            liveness_probe.poll()
        except SilentStoreError:
            pass  # its host may recover
        except LostStoreError:
            return
        del liveness_probe


def _ends_within(seconds: float, over: SimpleQueue[None]) -> bool:
    with contextlib.suppress(Empty):
        over.get(timeout=seconds)
        return True
    return False


_STARTED: weakref.WeakSet[LivenessProbe] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for liveness_probe in list(_STARTED):
        liveness_probe.stop()
        liveness_probe.end()
