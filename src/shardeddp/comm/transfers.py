"""Transfers: waits for other ranks on the host that end soon after a connection has closed.

gloo tells of a closed connection those transfers that have not begun. One that is under way, or
queued behind one, is told nothing and waits for its whole timeout
(``gloo/transport/tcp/pair.cc``, ``signalException``), and no wait of gloo's can be broken off. So
such waits are made on a thread, while who needs the result looks whether connections are there.
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
"""A tag that no transfer has."""

LOOK_S = 1.0
"""How often who waits looks whether connections are there."""

_END_S = 0.2
_Question = tuple[Callable[[], Any], Future[Any]]


class TransferThread:
    """Carries out what waits for other ranks, one after the other, on a thread of its own."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, action: Callable[[], T]) -> Future[T]:
        """Carry out an action behind this thread's back; at once if it is that one's own.

        Args:
            action: Whatever it raises is raised where the result is asked for.
        """
        result: Future[T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_carry_out, args=(self._questions,), name="shardeddp-transfers", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._questions.put, None).atexit = False
            _STARTED.add(self)
        if threading.current_thread() is self._thread:
            _answer(action, result)
        else:
            self._questions.put((action, result))
        return result

    def end(self) -> None:
        """End the thread before the interpreter ends, unless it waits for what may never come."""
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join(_END_S)


def wait_for(
    result: Future[T], axes: Sequence[dist.ProcessGroup], patience: timedelta | None = None
) -> T:
    """What an action on a :class:`TransferThread` gives.

    Args:
        result: Of the action.
        axes: In which it waits for other ranks.
        patience: After how long to give up; None: when its transfers do.

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
    """How many operations this rank has begun in a group, not counting :func:`raise_if_closed`'s.

    None: its backend does not count them.
    """
    begun = sequence_number(group)
    return None if begun is None else begun - _LOOKS.get(group, 0)


_LOOKS: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
"""By axis, how many transfers were begun by looking."""


@torch.inference_mode()  # what is asked there may lie in tensors that nothing else may write to
def _carry_out(questions: SimpleQueue[_Question | None]) -> None:
    while (asked := questions.get()) is not None:
        _answer(*asked)
        del asked


def _answer(action: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(action())
    except Exception as error:  # noqa: BLE001 - raised where the result is asked for
        result.set_exception(error)


_STARTED: weakref.WeakSet[TransferThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for thread in list(_STARTED):
        thread.end()
