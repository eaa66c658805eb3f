"""Notes: what ranks leave for each other in the store of the process group, where collectives cannot be relied on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")

ANSWER_S = 1.0
"""How long the store may take to answer a question, which it does in a thousandth of that."""


class LostStoreError(RuntimeError):
    """The store has gone with the process that hosts it."""


class SilentStoreError(LostStoreError):
    """The store does not answer: the process that hosts it is frozen."""


class Notes:
    """Texts under names that are new; every call ends soon, whatever has become of the store.

    All ranks make those of a topic equally often: what one makes as its third are the third of every rank.

    Args:
        topic: What they are about.
        rank: This rank.
    """

    def __init__(self, topic: str, rank: int) -> None:
        store = dist.PrefixStore(f"shardeddp/{topic}", distributed_c10d._get_default_store())
        made = _ask(lambda: store.add(f"made/{rank}", 1))  # counted there: the store outlives who makes them
        self._store: dist.Store = dist.PrefixStore(str(made), store)

    def write(self, name: str, text: str) -> None:
        """Leave a text, over what was there."""
        _ask(lambda: self._store.set(name, text))

    def claim(self, name: str, text: str) -> str:
        """Leave a text where there is none yet; the one that stands there now. It must not be empty."""
        return _ask(lambda: self._store.compare_set(name, "", text)).decode()

    def read(self, name: str) -> str | None:
        """The text; None: there is none."""
        return _ask(lambda: self._store.get(name).decode() if self._store.check([name]) else None)

    def has(self, names: Sequence[str]) -> bool:
        """Whether there is a text under every one of these names."""
        return _ask(lambda: self._store.check(list(names)))

    def count(self, name: str, more: int = 1) -> int:
        """Add to a number, which begins with 0; what it is now."""
        return _ask(lambda: self._store.add(name, more))


_overdue: list[threading.Thread] = []  # those that still wait for the store


def _ask(question: Callable[[], T]) -> T:
    """What the store answers.

    Raises:
        LostStoreError: It is gone, or silent. Who asks while an earlier question waits is not kept waiting as well.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    _overdue[:] = [thread for thread in _overdue if thread.is_alive()]
    if not _overdue:
        # A thread of its own: what waits for the store cannot be interrupted, and never ends if its host is frozen.
        thread = threading.Thread(target=ask, name="shardeddp-notes", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise LostStoreError("this process is about to end") from error
        thread.join(ANSWER_S)
        if answers:
            return answers[0]
        if errors:
            raise LostStoreError(f"the store of the process group is gone ({errors[0]})") from errors[0]
        _overdue.append(thread)
    raise SilentStoreError(f"the store of the process group has not answered within {ANSWER_S:g} s")
