"""Vote: the highest of a number that every rank casts, asked for in one batch and known in the next."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardeddp.comm.sequence import reduce_highest

_LET_GO_S = 1.0


class Vote:
    """One small maximum over all ranks in flight at a time, on the host, so that nobody waits for it.

    Every rank has to call the methods in the same order.

    Args:
        group: The host group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._alone = group.size() == 1
        self._ballot = torch.zeros(1, dtype=torch.uint8)
        self._cast: Callable[[], int] | None = None  # gives the highest number of those that are under way

    def cast(self, number: int) -> None:
        """Send this rank's number on its way; what was under way is dropped.

        Args:
            number: From 0 to 255.
        """
        self.count()
        if self._alone:
            self._cast = lambda: number
            return
        reduction = reduce_highest(torch.tensor([number], dtype=torch.uint8), "vote on signals", self._group)
        self._ballot = reduction.message
        self._cast = lambda: int(reduction.wait())

    def count(self) -> int:
        """The highest number of those cast; 0 if none were since the last count. Waits for what is not there yet."""
        cast, self._cast = self._cast, None
        return 0 if cast is None else cast()

    def close(self) -> int:
        """The last count, after which nothing is on its way.

        A process may end right after it, so this also waits until gloo's thread has let go of the ballot: to do that it
        needs the interpreter, and a thread that asks for one that is ending aborts the process.
        """
        highest = self.count()
        deadline = time.monotonic() + _LET_GO_S
        while self._ballot._use_count() > 1 and time.monotonic() < deadline:  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(0.0005)
        return highest
