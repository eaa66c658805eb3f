"""EarlySync: flushes a file in a thread while it is written, so that its end has little left to wait for."""

from __future__ import annotations

import os
import queue
import threading
from types import TracebackType

from shardeddp.checkpoint.disk.durable import Durability


class EarlySync:
    """A file that is flushed as it grows, for as long as the ``with`` block lasts. A flush at its end has to follow.

    Args:
        descriptor: Of the file.
        durability: ``process`` flushes nothing.
        every: After so many bytes.
    """

    def __init__(self, descriptor: int, durability: Durability, every: int = 32 * 2**20) -> None:
        self._descriptor = descriptor
        self._every = every
        self._unflushed = 0
        self._due: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None  # from the first flush on
        self._needed = durability == "disk"

    def wrote(self, nbytes: int) -> None:
        """To be told of what was written."""
        self._unflushed += nbytes
        if not self._needed or self._unflushed < self._every:
            return
        self._unflushed = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._flush, name="shardeddp-sync", daemon=True)
            self._thread.start()
        self._due.put(True)

    def __enter__(self) -> EarlySync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._due.put(False)
            self._thread.join()
        if self._error is not None and error is None:
            raise self._error  # the system tells of a lost page once: the flush at the end would not hear of it

    def _flush(self) -> None:
        while self._due.get():
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self._error = error
