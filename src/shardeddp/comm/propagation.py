"""Error propagation: the first failure of a rank reaches the others, and how processes end."""

import atexit
import contextlib
import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardeddp.comm.backends import disconnect
from shardeddp.comm.liveness import LivenessProbe, code_line_of
from shardeddp.comm.rendezvous import has_agent_store
from shardeddp.comm.store import LostStoreError, SilentStoreError, StoreClient
from shardeddp.errors import DesyncError, LostRankError, RankError
from shardeddp.torch_private import backend_config, process_groups

# -- Failures: the traceback of the first rank that failed

LOOKUP_S = 1.0
"""Time for which a rank with a broken transfer waits for the explanation.

It is long enough for every running rank to report.
"""

_MISMATCH = "Detected mismatch between collectives on ranks"
"""Text of torch's error where it compares collectives (see ``ShardedDP(debug=True)``)."""

_FIRST, _INTERRUPTED, _EXPLAINED = "first failure", "interrupted", "explained"
_BROKEN_BEFORE = "transfers of an earlier run"
_SEARCH, _FOUND = "search for lost ranks", "lost ranks"
_OF_TRANSFERS = ("gloo", "NCCL", "closed by peer", "caused pair closure")

_LISTED = 8
"""Maximum number of ranks in a message."""

_POLL_S, _SLOWEST_POLL_S = 0.02, 0.2
_NOBODY = json.dumps(None)


class ErrorPropagation:
    """Publishes the first error of any rank in the store of the process group.

    It uses no collective, so it works when collectives do not.
    """

    def __init__(self, rank: int, world_size: int, liveness_probe: LivenessProbe) -> None:
        self._rank = rank
        self._world_size = world_size
        self._liveness_probe = liveness_probe
        self._client = StoreClient("failures", rank)
        self._explained = False
        self._has_broken = self._has_broken_before = False  # a transfer, in this run or before

    def begin_run(self) -> None:
        """Forget the errors of an earlier run; all ranks call it when a run begins."""
        self._client = StoreClient("failures", self._rank)
        self._explained, self._has_broken_before = False, self._has_broken
        self._forget_exit()

    def _forget_exit(self) -> None:
        atexit.unregister(leave_store)
        atexit.unregister(self.explain_and_leave)

    def leave_to_parent(self) -> None:
        """Publish nothing any more, in a process that was forked from the rank."""
        self._world_size = 1
        self._forget_exit()

    def is_known(self) -> bool:
        """Return whether a rank has published an error in this run, while this one has none."""
        return not self._explained and self._client.has([_FIRST])

    def has_failed(self) -> bool:
        """Return whether any rank has published an error in this run, or the store is gone."""
        try:
            return self._explained or self._client.has([_FIRST])
        except SilentStoreError:
            return False
        except LostStoreError:
            return True

    def report_desync(self, text: str) -> None:
        """Publish that ranks, this one among them, wait for each other in different operations."""
        self._client.claim(_FIRST, json.dumps({"desync": text}))

    def explain(self, error: BaseException, operation: str = "") -> None:
        """Publish this rank's own error, or give a broken transfer the error that caused it.

        If the process ends without another run, the others see that at once, and rank 0, where it
        hosts the store, stays until they have read the explanation.

        Args:
            error: Error with which this rank is about to end. If it only says that a transfer
                broke, its text and cause become the first failure: another rank's error, with its
                traceback; a desync; or the ranks that have not reported, because they were killed
                or do not run.
            operation: Name of this rank's operation, if it has one.
        """
        if self._world_size == 1:
            return
        broken = is_transfer_error(error)
        self._has_broken |= broken
        try:
            if error.__cause__ is None and _MISMATCH in str(error):
                error.__cause__ = RuntimeError(self._find_places(error))
            if not broken:
                self._report(error)
            elif not _is_explained(error):
                _explain_by(error, self._origin(error, operation))
            self._client.count(_EXPLAINED)
        except LostStoreError as lost:
            # Rank 0 hosts the store, or runs on the machine that does.
            if broken and self._rank and not _is_explained(error):
                _explain_by(error, LostRankError([0], ended=not isinstance(lost, SilentStoreError)))
        self._explained = True
        self._forget_exit()
        lost_ranks = error.__cause__.ranks if isinstance(error.__cause__, LostRankError) else []
        hosts = self._rank == 0 and not has_agent_store()
        atexit.register(
            leave_store, self._client, self._world_size - len(lost_ranks) if hosts else 0
        )

    def explain_at_exit(self, error: BaseException) -> None:
        """Call :meth:`explain` when the process exits, unless it is called or a run begins before.

        Code that runs until then may fail itself: callbacks are told of an error first.
        """
        self._forget_exit()
        if self._world_size > 1:
            atexit.register(self.explain_and_leave, error)

    def forget_error(self) -> None:
        """Undo :meth:`explain_at_exit`: the run has ended in order."""
        atexit.unregister(self.explain_and_leave)

    def explain_and_leave(self, error: BaseException) -> None:
        """Call :meth:`explain` and :meth:`leave`; handlers set during the exit are not called."""
        self.explain(error)
        self.leave()

    def leave(self) -> None:
        """Do now the work that :meth:`explain` has registered for the exit of the process.

        For a process that ends without its exit handlers.
        """
        atexit.unregister(leave_store)
        leave_store(
            self._client, self._world_size if self._rank == 0 and not has_agent_store() else 0
        )

    def _report(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        said = "".join(traceback.format_exception_only(type(error), error)).strip()
        self._client.claim(
            _FIRST, json.dumps({"rank": self._rank, "error": said, "traceback": text})
        )

    def _find_places(self, error: BaseException) -> str:
        """Return the line at which each rank has issued the mismatched collective."""
        names = [f"mismatch/{rank}" for rank in range(self._world_size)]
        self._client.write(names[self._rank], _place_of_error(error))
        places = self._client.wait_for(names, LOOKUP_S)
        found = [places.get(name, "an unknown line") for name in names]
        return ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(found))

    def _origin(self, error: BaseException, operation: str) -> Exception | None:
        place = _place_of_error(error)
        self._client.write(f"{_INTERRUPTED}/{self._rank}", place)
        if self._has_broken_before:
            self._client.write(_BROKEN_BEFORE, place)
        if self._client.count(_INTERRUPTED) == self._world_size:
            self._client.claim(_FIRST, _NOBODY)
        request = self._liveness_probe.ask()
        # A rank publishes the first error, or all ranks publish that it was none of theirs.
        if not self._is_there_soon(_FIRST):
            return self._await_lost(request, f"{operation or 'something'} at {place}")
        note = json.loads(self._client.read(_FIRST) or _NOBODY)
        if note is None:
            return self._compare_places()
        if "desync" in note:
            return DesyncError(note["desync"])
        if note["rank"] == self._rank:
            return None
        return RankError(
            "training",
            {note["rank"]: note["traceback"]},
            f"rank {note['rank']} failed: {note['error']}",
        )

    def _compare_places(self) -> DesyncError:
        """Return an error with some ranks' lines: transfers broke, and no rank has its own error."""
        ranks = sorted({self._rank, *range(min(self._world_size, _LISTED))})
        places = self._client.read_all([f"{_INTERRUPTED}/{rank}" for rank in ranks])
        listed = ", ".join(
            f"rank {rank} was at {places.get(f'{_INTERRUPTED}/{rank}', '?')}" for rank in ranks
        )
        if self._client.has([_BROKEN_BEFORE]):
            return DesyncError(
                f"an earlier run of these processes has failed in the middle of a collective, and "
                f"their process group does not work since then: {listed}. Start new processes for "
                f"another run"
            )
        return DesyncError(
            f"data that ranks sent each other did not match or did not arrive, and no rank has "
            f"an error of its own: {listed}. If these are different lines, move the call that only "
            f"some ranks reach out of its condition; if it is one line, tensors differ in shape or "
            f"dtype between ranks, or the network has failed"
        )

    def _is_there_soon(self, name: str) -> bool:
        deadline, pause = time.monotonic() + LOOKUP_S, _POLL_S
        while not self._client.has([name]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _SLOWEST_POLL_S)
        return True

    def _await_lost(self, request: int, here: str) -> LostRankError | DesyncError | None:
        """Return the result of the search for lost ranks, which one rank makes and all read.

        The first that asks searches and publishes the result: if each did, the store would be asked
        about as many names as there are pairs of ranks, and would answer too late.
        """
        mine = self._client.claim(_SEARCH, str(self._rank)) == str(self._rank)
        if mine or not self._is_there_soon(_FOUND):
            found = self._find_lost(request)
            self._client.claim(_FOUND, json.dumps(found))
        else:
            found = json.loads(self._client.read(_FOUND) or _NOBODY)
        if found is None:
            return None
        if "ended" in found:
            return DesyncError(
                f"ranks {found['ended']} have come to the end of their program without an error, "
                f"and this rank to {here}, which needs them: all ranks have to communicate alike. "
                f"Move it out of conditions that only some ranks fulfil"
            )
        return LostRankError(
            found["lost"], {int(rank): where for rank, where in found["running"].items()}
        )

    def _find_lost(self, request: int) -> dict[str, Any] | None:
        """Return the ranks that neither were interrupted nor run, as a JSON object.

        Without such ranks, those that run but were not interrupted; None if there are none.
        """
        names = {f"{_INTERRUPTED}/{rank}": rank for rank in range(self._world_size)}
        silent = [names[name] for name in self._client.missing(list(names))]
        running = {
            rank: answer["where"]
            for rank, answer in self._liveness_probe.answers(silent, request).items()
        }
        lost = [rank for rank in silent if rank not in running]
        ended = self._liveness_probe.ended(silent)
        if not silent:
            return None
        if ended and not lost:
            return {"ended": ended}
        return {"lost": lost, "running": {}} if lost else {"lost": silent, "running": running}


def is_transfer_error(error: BaseException) -> bool:
    """Return whether an error is a collective's reaction to a lost rank, not a rank's own error."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, LostStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_TRANSFERS)


def has_broken_transfers(error: BaseException) -> bool:
    """Return whether process groups are unreliable after an error: ranks may be out of step."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if not isinstance(at, Exception) or isinstance(at, (LostRankError, DesyncError)):
            return True
        if is_transfer_error(at):
            return True
        at = at.__cause__ or at.__context__
    return False


def _is_explained(error: BaseException) -> bool:
    return isinstance(error.__cause__, (RankError, LostRankError, DesyncError))


def _explain_by(error: BaseException, cause: Exception | None) -> None:
    """Set an error's cause and put it into its text, which is all that loggers and tuners show."""
    if cause is None:
        return
    error.__cause__ = cause
    headline = cause.headline if isinstance(cause, RankError) else str(cause)
    error.args = (f"{headline}\nThis rank was interrupted by that: {error}",)


def _place_of_error(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return code_line_of(*reversed(frames))


def break_off() -> None:
    """Fail all waits of this rank: close connections, abort communicators.

    A device that waits for another rank in a communicator of NCCL then goes on, and so does the
    code that waits for the device: ``.item()``, a copy to the host, the end of a process group.
    """
    for group in process_groups():
        backends = backend_config(group)
        if "gloo" in backends:
            disconnect(group)
        if "nccl" in backends:
            group.abort()


def waits_on_device() -> bool:
    """Return whether in some groups the device, and not the host, waits for other ranks."""
    return any("nccl" in backend_config(group) for group in process_groups())


def leave_store(client: StoreClient, readers: int) -> None:
    """Close connections, so that others fail now; keep the store until ``readers`` know why."""
    # The end of the process closes connections only after all other exit handlers (a logger's
    # upload may take minutes). Ranks that look for the reason must also break their wait while the
    # store exists, which ends with its host.
    break_off()
    deadline = time.monotonic() + LOOKUP_S
    with contextlib.suppress(LostStoreError):
        while readers and client.count(_EXPLAINED, 0) < readers and time.monotonic() < deadline:
            time.sleep(_POLL_S)


# -- End of the process
#
# A collective that has been waited for is held for another moment by the thread that has run it. If
# that thread drops the last reference to a tensor that Python knows, it needs the interpreter; once
# the interpreter has begun to end, the process is aborted, although all of its work is done. On a
# busy machine the moment can be long.

LIMIT_S = 0.5
"""Maximum wait in seconds; threads that compute for other purposes do not end by waiting."""

_LOOK_S = 0.005
_TASKS = Path("/proc/self/task")


def drain_threads_at_exit() -> None:
    """Let the exit of this process wait for its threads; to be called when there are groups."""
    atexit.unregister(wait_until_idle)
    atexit.register(wait_until_idle)


def wait_until_idle() -> None:
    """Return when no other thread of this process runs or is about to.

    Only Linux says so; elsewhere return after ``LIMIT_S``.
    """
    deadline, idle = time.monotonic() + LIMIT_S, 0
    # Two samples: one may fall between two steps of a thread.
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)  # gives the interpreter to other threads
        idle = 0 if _others_run() else idle + 1


def _others_run() -> bool:
    if not sys.platform.startswith("linux"):
        return True
    own = threading.get_native_id()
    return any(_state(task) == "R" for task in _TASKS.iterdir() if int(task.name) != own)


def _state(task: Path) -> str:
    try:
        text = (task / "stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
