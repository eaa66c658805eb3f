"""Failures: the first rank that fails leaves its traceback where the others find it when their transfers break."""

import json
import traceback
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardeddp.errors import RankError

_KEY = "first_failure"
LOOKUP = timedelta(seconds=2)
"""How long a rank whose transfer broke waits for the explanation."""


class Failures:
    """A note board for errors, in the store of the process group: no collective, so it works when those don't.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = dist.PrefixStore("shardeddp/failures", distributed_c10d._get_default_store())

    def explain(self, error: BaseException) -> None:
        """Make known what happened: a rank's own error is left for the others; a broken transfer gets its origin.

        Args:
            error: What this rank is about to end with. If it only says that a transfer broke, the first error that
                another rank has left becomes its cause, with that rank's traceback.
        """
        if not _is_transfer_error(error):
            self._report(error)
        elif error.__cause__ is None:
            error.__cause__ = self._origin()

    def _report(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        note = json.dumps({"rank": self._rank, "traceback": text})
        try:
            self._store.compare_set(_KEY, "", note)  # the first stays
        except (RuntimeError, ValueError):
            return  # the store went with the rank that hosts it: nobody is left to read

    def _origin(self) -> RankError | None:
        try:
            self._store.wait([_KEY], LOOKUP)
            note = json.loads(self._store.get(_KEY))
        except (RuntimeError, ValueError):
            return None
        return None if note["rank"] == self._rank else RankError("training", {note["rank"]: note["traceback"]})


def _is_transfer_error(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another rank is gone, and not a rank's own."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))
