"""Failures: the first rank that fails leaves its traceback where the others find it when their transfers break."""

import json
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardeddp.errors import LostRankError, RankError

_KEY = "first_failure"
LOOKUP_S = 1.5
"""How long a rank whose transfer broke waits for the explanation, and for others whose transfers broke too."""

_ANSWER_S = 0.4
"""How long the store may take to answer."""

_POLL_S = 0.02


class Failures:
    """A note board for errors, in the store of the process group: no collective, so it works when those don't.

    Args:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = dist.PrefixStore("shardeddp/failures", distributed_c10d._get_default_store())

    def explain(self, error: BaseException) -> None:
        """Make known what happened: a rank's own error is left for the others; a broken transfer gets its origin.

        Args:
            error: What this rank is about to end with. If it only says that a transfer broke, its cause becomes the
                first error that another rank has left, with that rank's traceback; or which ranks have not said
                anything, because they were killed or do not run.
        """
        if not is_transfer_error(error):
            self._ask_store(lambda: self._report(error))
        elif error.__cause__ is None:
            error.__cause__ = self._ask_store(self._origin)

    def _ask_store(self, question: Callable[[], Exception | None]) -> Exception | None:
        """The answer; where there is none, because the rank that hosts the store does not run, what that means."""
        answers: list[Exception | None] = []
        # A thread of its own: what waits for the store cannot be interrupted, and never ends if its host is frozen.
        asking = threading.Thread(target=lambda: answers.append(question()), name="shardeddp-failures", daemon=True)
        asking.start()
        asking.join(LOOKUP_S + _ANSWER_S)
        return answers[0] if answers else LostRankError([0])

    def _report(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        note = json.dumps({"rank": self._rank, "traceback": text})
        try:
            self._store.compare_set(_KEY, "", note)  # the first stays
        except (RuntimeError, ValueError):
            return  # the store went with the rank that hosts it: nobody is left to read

    def _origin(self) -> Exception | None:
        try:
            self._store.set(f"interrupted/{self._rank}", "1")
            others = {rank: f"interrupted/{rank}" for rank in range(self._world_size) if rank != self._rank}
            deadline = time.monotonic() + LOOKUP_S
            while not self._store.check([_KEY]):
                silent = [rank for rank, key in others.items() if not self._store.check([key])]
                if not silent or time.monotonic() > deadline:
                    return LostRankError(silent) if silent else None
                time.sleep(_POLL_S)
            note = json.loads(self._store.get(_KEY))
        except (RuntimeError, ValueError):
            return LostRankError([0]) if self._rank else None  # the store went with the rank that hosts it
        return None if note["rank"] == self._rank else RankError("training", {note["rank"]: note["traceback"]})


def is_transfer_error(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another rank is gone, and not a rank's own."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))
