"""Failures: the first rank that fails leaves its traceback where the others find it when their transfers break."""

import atexit
import contextlib
import gc
import io
import json
import time
import traceback

import torch.distributed as dist

from shardeddp.comm.lookout import Lookout
from shardeddp.comm.notes import LostStoreError, Notes
from shardeddp.errors import LostRankError, RankError

LOOKUP_S = 1.0
"""How long a rank whose transfer broke waits for the explanation: long enough for every rank that runs to say so."""

_FIRST, _INTERRUPTED = "first failure", "interrupted"
_POLL_S, _SLOWEST_POLL_S = 0.02, 0.2
_NOBODY = json.dumps(None)
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class Failures:
    """A note board for errors, in the store of the process group: no collective, so it works when those don't.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        lookout: Tells which of the others run.
    """

    def __init__(self, rank: int, world_size: int, lookout: Lookout) -> None:
        self._rank = rank
        self._world_size = world_size
        self._lookout = lookout
        self._notes = Notes("failures", rank)

    def begin_run(self) -> None:
        """Forget what ranks have left in an earlier run; all ranks call it when one begins."""
        self._notes = Notes("failures", self._rank)

    def explain(self, error: BaseException) -> None:
        """Make known what happened: a rank's own error is left for the others; a broken transfer gets its origin.

        Args:
            error: What this rank is about to end with. If it only says that a transfer broke, its cause becomes the
                first error that another rank has left, with that rank's traceback; or which ranks have not said
                anything, because they were killed or do not run.
        """
        try:
            if not is_transfer_error(error):
                self._report(error)
            elif error.__cause__ is None:
                error.__cause__ = self._origin()
        except LostStoreError:
            # Rank 0 hosts the store, or it is on the machine of who does.
            if is_transfer_error(error) and self._rank:
                error.__cause__ = LostRankError([0])

    def _report(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._notes.claim(_FIRST, json.dumps({"rank": self._rank, "traceback": text}))

    def _origin(self) -> Exception | None:
        self._notes.write(f"{_INTERRUPTED}/{self._rank}", "1")
        if self._notes.count(_INTERRUPTED) == self._world_size:
            self._notes.claim(_FIRST, _NOBODY)
        question = self._lookout.ask()
        if not self._is_known_soon():
            return self._find_lost(question)
        note = json.loads(self._notes.read(_FIRST) or _NOBODY)
        if note is None or note["rank"] == self._rank:
            return None
        return RankError("training", {note["rank"]: note["traceback"]})

    def _is_known_soon(self) -> bool:
        """Whether anybody says who was first, or all ranks say that they were not. One call per look for all ranks."""
        deadline, pause = time.monotonic() + LOOKUP_S, _POLL_S
        while not self._notes.has([_FIRST]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _SLOWEST_POLL_S)
        return True

    def _find_lost(self, question: int) -> LostRankError | None:
        """Who neither was interrupted nor runs; where there is nobody, those that run and were not interrupted."""
        silent = self._silent(range(self._world_size))
        running = {rank: answer["where"] for rank, answer in self._lookout.answers(silent, question).items()}
        lost = [rank for rank in silent if rank not in running]
        if not silent:
            return None
        return LostRankError(lost) if lost else LostRankError(silent, running)

    def _silent(self, ranks: range) -> list[int]:
        """The ranks that have not said that they were interrupted: a few, so it asks for many ranks at once."""
        if self._notes.has([f"{_INTERRUPTED}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return self._silent(ranks[:half]) + self._silent(ranks[half:])


def is_transfer_error(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another rank is gone, and not a rank's own."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))


def end_quickly() -> None:
    """Spare this process, when it ends, the interpreter's last collections of garbage.

    They take a second or two, in which others wait for what it holds open, for memory that goes with it anyway.
    """
    atexit.unregister(_leave_garbage)
    atexit.register(_leave_garbage)


def _leave_garbage() -> None:
    for each in gc.get_objects():
        if issubclass(type(each), _FILES):  # what is written to them would be lost
            with contextlib.suppress(OSError, ValueError):
                each.flush()
    gc.freeze()
