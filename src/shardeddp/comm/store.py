"""Store: short texts between ranks without a collective, and a barrier with a timeout on them."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from shardeddp.comm.transfers import TransferThread
from shardeddp.torch_private import default_store

# -- StoreClient: texts of ranks in the store

T = TypeVar("T")

ANSWER_S = 1.0
"""Maximum time for an answer of the store, which usually takes a thousandth of that."""

_FIRST_POLL_S = 0.001
_POLL_S = 0.05
"""Maximum pause between polls. Pauses begin short, and double: an early result is found early, and
many ranks that wait long do not keep the store busy."""


class DefaultStore(Protocol):
    """Attributes of every store of a process group that its type does not declare."""

    timeout: timedelta
    clone: Callable[[], dist.Store]
    """Returns another connection to the same store."""


class LostStoreError(RuntimeError):
    """The store is gone with the process that hosts it."""


class SilentStoreError(LostStoreError):
    """The store does not answer: the process that hosts it is frozen."""


class StoreClient:
    """Client of the process group's store, with a key prefix that no other client has.

    Every call of a client that is not patient ends within :data:`ANSWER_S`, even without a store.

    All ranks make clients of a topic equally often: the third ones of all ranks share a prefix.
    Making a client may take the store's own timeout, since nothing works without a client.
    """

    def __init__(self, topic: str, rank: int, *, patient: bool = False) -> None:
        default = default_store()
        self._worker = _WORKERS.get(default) or StoreWorker(default)
        _WORKERS[default] = self._worker
        store = dist.PrefixStore(f"shardeddp/{topic}", self._worker.store)
        # Counted in the store, which outlives the objects that make clients.
        made = self._worker.ask(lambda: store.add(f"made/{rank}", 1), waits_full_timeout=True)
        self._patient = patient
        self.number = made
        """Number of clients of the topic that this rank has made in this store, with this one."""

        self._store: dist.Store = dist.PrefixStore(str(made), store)

    def is_over(self) -> bool:
        """Return whether the process group of the store has ended; there may be another one."""
        return not dist.is_initialized() or _WORKERS.get(default_store()) is not self._worker

    def write(self, name: str, text: str) -> None:
        """Write a text, over an earlier one."""
        self._ask(lambda: self._store.set(name, text))

    def claim(self, name: str, text: str) -> str:
        """Write a text if there is none yet, and return the one that is there now.

        The text must not be empty.
        """
        return self._ask(lambda: self._store.compare_set(name, "", text)).decode()

    def read(self, name: str) -> str | None:
        """Return a text; None if there is none."""
        return self.read_all([name]).get(name)

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        """Return the texts that exist, by name: two calls, and a few more for each one missing."""
        missing = set(self.missing(names))
        found = [name for name in names if name not in missing]
        texts = self._ask(lambda: self._store.multi_get(found)) if found else []
        return {name: text.decode() for name, text in zip(found, texts, strict=True)}

    def has(self, names: Sequence[str]) -> bool:
        """Return whether there is a text under every one of these names."""
        return self._ask(lambda: self._store.check(list(names)))

    def wait_for(self, names: Sequence[str], within_s: float) -> dict[str, str]:
        """Wait for the texts under all names up to a time, and return those that exist."""
        self.wait_until(names, time.monotonic() + within_s)
        return self.read_all(names)

    def wait_until(self, names: Sequence[str], deadline: float) -> None:
        """Return once there are texts under all names, or at ``deadline`` (monotonic)."""
        pause = _FIRST_POLL_S
        while not self.has(names) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the names without a text, by bisection: few calls where few are missing."""
        if not names or self.has(names):
            return []
        if len(names) == 1:
            return list(names)
        half = len(names) // 2
        return self.missing(names[:half]) + self.missing(names[half:])

    def count(self, name: str, more: int = 1) -> int:
        """Add to a number, which begins with 0, and return the sum."""
        return self._ask(lambda: self._store.add(name, more))

    def _ask(self, call: Callable[[], T]) -> T:
        return self._worker.ask(call, waits_full_timeout=self._patient)


class StoreWorker:
    """This process's own connection to the store, and the thread that calls it.

    A call cannot be interrupted, and never ends if the store's host is frozen.
    """

    def __init__(self, default: dist.Store) -> None:
        described = cast(DefaultStore, default)
        self._patience_s = described.timeout.total_seconds()
        # A call past its timeout, which may still be running.
        self._overdue: Future[Any] | None = None
        # A single rank is the host of its store. The other ranks of a fake process group do not
        # exist, and its store may keep nothing.
        is_fake = dist.is_initialized() and dist.get_backend() == "fake"
        is_single_rank = is_fake or (dist.is_initialized() and dist.get_world_size() == 1)
        self._thread = None if is_single_rank else TransferThread("shardeddp-store")
        self.store: dist.Store = (
            dist.HashStore() if is_fake else self.ask(described.clone, waits_full_timeout=True)
        )

    def ask(self, call: Callable[[], T], *, waits_full_timeout: bool = False) -> T:
        """Return the store's answer, within :data:`ANSWER_S` or the store's own timeout.

        Raises:
            LostStoreError: The store is gone, or silent. A call does not wait for an overdue one.
        """
        if self._thread is None:
            return call()
        if self._thread.has_ended:
            raise LostStoreError("this process is about to end")
        answer: Future[T] = Future()
        patience_s = self._patience_s if waits_full_timeout else ANSWER_S
        if waits_full_timeout or self._overdue is None or self._overdue.done():
            answer = self._thread.begin(call)
            wait([answer], patience_s)
        if not answer.done():
            if not answer.cancel():
                self._overdue = answer
            raise SilentStoreError(
                f"the store of the process group has not answered within {patience_s:g} s"
            )
        try:
            return answer.result()
        except (RuntimeError, ValueError) as error:
            raise LostStoreError(f"the store of the process group is gone ({error})") from error


_WORKERS: weakref.WeakKeyDictionary[dist.Store, StoreWorker] = weakref.WeakKeyDictionary()
"""Workers by the store of the process group: one connection and one thread for a process."""


# -- StoreBarrier: a barrier with a timeout, without a collective

PATIENCE_S = 5.0
"""Maximum wait for the other ranks."""

_ALL, _SOME = "all", "some"


class StoreBarrier:
    """Timed barrier on the store: True on all ranks if all arrived in time, else False."""

    def __init__(self, rank: int, world_size: int, topic: str = "barrier") -> None:
        self._rank, self._world_size = rank, world_size
        self._calls = 0
        self._client = StoreClient(topic, rank)

    def wait_for_all(self, place: str, patience_s: float = PATIENCE_S) -> bool:
        """Return whether every rank calls this in time with one ``place``; all in time agree.

        A rank that comes later, or finds the store gone, gets False; one that finds it silent asks
        again, since others may have had their answer.

        Args:
            place: Name of this call; ranks that give different names are not together.
            patience_s: Maximum wait for the other ranks in seconds.
        """
        self._calls += 1
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._decide(json.dumps(place), deadline) == _ALL
            except SilentStoreError:
                if time.monotonic() > deadline + ANSWER_S:
                    return False
                time.sleep(_POLL_S)
            except LostStoreError:
                return False

    def _decide(self, place: str, deadline: float) -> str:
        """Return the decision; asking again changes nothing."""
        decision, here = f"{self._calls}/decision", f"{self._calls}/here/{{}}".format
        if self._client.claim(f"{self._calls}/place", place) != place:
            return self._client.claim(decision, _SOME)
        self._client.write(here(self._rank), "1")
        if self._client.has([here(rank) for rank in range(self._world_size)]):
            return self._client.claim(decision, _ALL)
        self._client.wait_until([decision], deadline)
        return self._client.claim(decision, _SOME)
