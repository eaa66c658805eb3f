"""Transfers: waits for other ranks on the host that end soon after a connection has closed.

On a closed connection gloo fails those transfers that have not begun. One that is under way, or
queued after one, is not notified and waits for its whole timeout
(``gloo/transport/tcp/pair.cc``, ``signalException``), and no wait of gloo's can be broken off. So
such waits are made on a thread, while the caller checks that the connections exist.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardeddp.torch_private import sequence_number

T = TypeVar("T")

NEVER_SENT = 0x7FFFFFFF
"""Tag that no transfer has."""

LOOK_S = 1.0
"""Interval at which a waiting caller checks the connections."""

_END_S = 0.2
_Request = tuple[Callable[[], Any], Future[Any]]


class TransferThread:
    """Runs actions that wait for other ranks, one after the other, on a thread of its own.

    An action whose future is cancelled before its turn does not run.
    """

    def __init__(self, name: str = "shardeddp-transfers") -> None:
        self._name = name
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, action: Callable[[], T]) -> Future[T]:
        """Run an action on the thread; at once if the caller is that thread.

        Its exception is raised where the result is read.
        """
        result: Future[T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_carry_out, args=(self._requests,), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._requests.put, None).atexit = False
            _STARTED.add(self)
        if threading.current_thread() is self._thread:
            _answer(action, result)
        else:
            self._requests.put((action, result))
        return result

    @property
    def has_ended(self) -> bool:
        """True if actions would not run: at the end of the process, and after a fork."""
        return self._thread is not None and not self._thread.is_alive()

    def end(self) -> None:
        """End the thread before the interpreter ends, unless its wait may never end."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(_END_S)


def wait_for(
    result: Future[T], axes: Sequence[dist.ProcessGroup], patience: timedelta | None = None
) -> T:
    """Return the result of an action on a :class:`TransferThread`.

    Args:
        result: Future of the action.
        axes: Process groups in which the action waits for other ranks.
        patience: Maximum wait; None: until its transfers time out.

    Raises:
        RuntimeError: A connection has closed, or ``patience`` is over.
    """
    left = float("inf") if patience is None else patience.total_seconds()
    while not wait([result], min(LOOK_S, left)).done:
        left -= LOOK_S
        if patience is not None and left <= 0:
            raise RuntimeError(
                f"Timed out after {patience.total_seconds():g} s of waiting for other ranks on the "
                f"host (gloo)"
            )
        for axis in axes:
            raise_if_closed(axis)
    return result.result()


def raise_if_closed(axis: dist.ProcessGroup) -> None:
    """Raise gloo's error if the connection to any rank of an axis has closed."""
    for other in range(axis.size()):
        if other != axis.rank():
            _LOOKS[axis] = _LOOKS.get(axis, 0) + 1
            axis.recv([torch.empty(1, device="cpu")], other, NEVER_SENT)


def count_begun(group: dist.ProcessGroup) -> int | None:
    """Return the number of operations begun in a group, without those of :func:`raise_if_closed`.

    None if its backend does not count them.
    """
    begun = sequence_number(group)
    return None if begun is None else begun - _LOOKS.get(group, 0)


_LOOKS: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
"""Number of receives begun by :func:`raise_if_closed`, by axis."""


@torch.inference_mode()  # actions may write to inference tensors
def _carry_out(requests: SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        _answer(*request)
        del request


def _answer(action: Callable[[], T], result: Future[T]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(action())
    except Exception as error:  # noqa: BLE001 - raised where the result is asked for
        result.set_exception(error)


_STARTED: weakref.WeakSet[TransferThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for thread in list(_STARTED):
        thread.end()
