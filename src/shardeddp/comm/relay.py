"""Relay: a thread that passes on what has arrived, so that no rank has to come back for it while it computes."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist

from shardeddp.comm.collectives import Work

GRACE_S = 0.2
"""How long a process that ends waits for what is still on its way."""

END_S = 2.0
"""How long a thread may take to end when it has been told to."""

_NEVER_SENT = 0x7FFFFFFF


class Relayed:
    """Transfers that begin when others have arrived.

    Args:
        arriving: What has to arrive. Nobody else may wait for it: gloo lets one thread know.
        begin: Begins the transfers, on the thread of the relay.
    """

    def __init__(self, arriving: Sequence[Work], begin: Callable[[], list[Work]]) -> None:
        self._arriving, self._begin = arriving, begin
        self.begun = threading.Event()
        """Set when the relay is done with it, well or not."""

        self._works: list[Work] = []
        self._error: BaseException | None = None

    def run(self, give_up: Callable[[], None]) -> None:
        """Wait for what arrives, then begin.

        Args:
            give_up: What follows if either fails.
        """
        try:
            for work in self._arriving:
                work.wait()
            self._works = self._begin()
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            self._error = error
            give_up()
        self._arriving, self._begin = (), list[Work]  # and with them the buffers, before anybody takes it as done
        self.begun.set()

    def wait(self) -> None:
        """Block until all of it is done."""
        self.begun.wait()
        if self._error is not None:
            raise self._error
        works, self._works = self._works, []
        for work in works:
            work.wait()


class Relay(threading.Thread):
    """Begins transfers in the order in which they were asked for, each when what it passes on is there.

    Args:
        group: The gloo group of all these transfers.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(name="shardeddp-relay", daemon=True)
        self._group = group
        self._queue: SimpleQueue[Relayed | None] = SimpleQueue()
        self._last = threading.Event()  # of what was asked for last

    def then(self, arriving: Sequence[Work], begin: Callable[[], list[Work]]) -> Relayed:
        """Let ``begin`` follow when all of ``arriving`` is there; see :class:`Relayed`."""
        if self.ident is None:
            _RELAYS.add(self)
            self.start()
        relayed = Relayed(arriving, begin)
        self._last = relayed.begun
        self._queue.put(relayed)
        return relayed

    def run(self) -> None:  # noqa: D102
        while (relayed := self._queue.get()) is not None:
            relayed.run(partial(disconnect, self._group))
            del relayed  # and its error, which holds the frames in which it was raised

    def end(self) -> None:
        """Let the thread end: nobody needs it any more, and what has not arrived by now is given up."""
        if self.ident is None:
            return
        self._queue.put(None)
        if not self._last.is_set():
            disconnect(self._group)
        if threading.current_thread() is not self:  # a garbage collector may run on any thread
            self.join(END_S)
            if not self.is_alive():
                _RELAYS.discard(self)

    def stop(self) -> None:
        """End the thread because the process ends; what is on its way has a moment to arrive."""
        self._queue.put(None)
        self.join(GRACE_S)
        self.end()


def disconnect(group: dist.ProcessGroup) -> None:
    """Fail all transfers of this rank in a gloo group, and with them those of ranks that wait for it.

    A time-out is what makes gloo do that. Ranks that get from this one what another sends would else learn of the
    other's end only from this one's.
    """
    for other in range(group.size()):
        if other != group.rank():
            try:
                group.recv([torch.empty(1)], other, _NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue  # as intended, or the other one is gone already


_RELAYS: set[Relay] = set()
"""Those whose threads run. A thread must not be the last to hold its group: it would close connections when it ends,
and a thread that does that while the interpreter ends aborts the process."""


@atexit.register
def _stop_all() -> None:
    for relay in list(_RELAYS):
        relay.stop()
