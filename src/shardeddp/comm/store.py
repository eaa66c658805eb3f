"""Store: small notes between ranks without a collective, and a barrier with a timeout on them."""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from shardeddp.torch_private import default_store

# -- Notes: messages between ranks in the store

T = TypeVar("T")
Question = tuple[Callable[[], Any], "Future[Any]"]  # and where its answer goes

ANSWER_S = 1.0
"""How long the store may take to answer a question, which it does in a thousandth of that."""

_END_S = 0.2
_FIRST_POLL_S = 0.001
_POLL_S = 0.05
"""How long a rank pauses at most before it asks again. Pauses begin short, and double: what is there
soon is found soon, and many ranks that wait long do not keep the store busy."""


class DefaultStore(Protocol):
    """What every store of a process group has besides what its type says."""

    timeout: timedelta
    clone: Callable[[], dist.Store]
    """Another connection."""


class LostStoreError(RuntimeError):
    """The store has gone with the process that hosts it."""


class SilentStoreError(LostStoreError):
    """The store does not answer: the process that hosts it is frozen."""


class StoreClient:
    """Client of the process group's store, with a key prefix that no other client has.

    Every call ends soon, whatever has become of the store, unless it is to be patient.

    All ranks make clients of a topic equally often: the third of each rank share a prefix. Making
    one waits as long as the store itself does, since nothing goes on without.

    Args:
        topic: What they are about.
        rank: This rank.
        patient: Whether calls wait as long as the store itself does, where nothing goes on without.
    """

    def __init__(self, topic: str, rank: int, *, patient: bool = False) -> None:
        default = default_store()
        self._desk = _DESKS.get(default) or _StoreWorker(default)
        _DESKS[default] = self._desk
        store = dist.PrefixStore(f"shardeddp/{topic}", self._desk.store)
        # Counted there: the store outlives who makes them.
        made = self._desk.ask(lambda: store.add(f"made/{rank}", 1), waits_full_timeout=True)
        self._patient = patient
        self.number = made
        """How many of the topic this rank has made in this store, this one with them."""

        self._store: dist.Store = dist.PrefixStore(str(made), store)

    def is_over(self) -> bool:
        """Whether the process group has ended whose store it is; there may be another."""
        return not dist.is_initialized() or _DESKS.get(default_store()) is not self._desk

    def write(self, name: str, text: str) -> None:
        """Leave a text, over what was there."""
        self._ask(lambda: self._store.set(name, text))

    def claim(self, name: str, text: str) -> str:
        """Set a text where there is none yet; gives the one that is there now.

        The text must not be empty.
        """
        return self._ask(lambda: self._store.compare_set(name, "", text)).decode()

    def read(self, name: str) -> str | None:
        """The text; None: there is none."""
        return self.read_all([name]).get(name)

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        """The texts that exist, by name: two calls if all do, a few more for each that does not."""
        missing = set(self.missing(names))
        found = [name for name in names if name not in missing]
        texts = self._ask(lambda: self._store.multi_get(found)) if found else []
        return {name: text.decode() for name, text in zip(found, texts, strict=True)}

    def has(self, names: Sequence[str]) -> bool:
        """Whether there is a text under every one of these names."""
        return self._ask(lambda: self._store.check(list(names)))

    def wait_for(self, names: Sequence[str], within_s: float) -> dict[str, str]:
        """The texts under these names, as soon as all are there; after a time, those that are."""
        self.wait_until(names, time.monotonic() + within_s)
        return self.read_all(names)

    def wait_until(self, names: Sequence[str], deadline: float) -> None:
        """Return when there are texts under these names, or the monotonic clock says so."""
        pause = _FIRST_POLL_S
        while not self.has(names) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)

    def missing(self, names: Sequence[str]) -> list[str]:
        """The names without a text; where they are few, it asks for many at once."""
        if not names or self.has(names):
            return []
        if len(names) == 1:
            return list(names)
        half = len(names) // 2
        return self.missing(names[:half]) + self.missing(names[half:])

    def count(self, name: str, more: int = 1) -> int:
        """Add to a number, which begins with 0; what it is now."""
        return self._ask(lambda: self._store.add(name, more))

    def _ask(self, question: Callable[[], T]) -> T:
        return self._desk.ask(question, waits_full_timeout=self._patient)


class _StoreWorker:
    """The process's own connection to the store, and the thread that calls it.

    A call cannot be interrupted, and never ends if the store's host is frozen.
    """

    def __init__(self, default: dist.Store) -> None:
        described = cast(DefaultStore, default)
        self._patience_s = described.timeout.total_seconds()
        self._questions: SimpleQueue[Question | None] = SimpleQueue()
        # An operation past its timeout, which may still be running.
        self._overdue: Future[Any] | None = None
        # A single rank is the host of its store. The other ranks of a fake process group are not
        # there, and its store may keep nothing.
        self._thread: threading.Thread | None = None
        is_fake = dist.is_initialized() and dist.get_backend() == "fake"
        if not is_fake and (not dist.is_initialized() or dist.get_world_size() > 1):
            self._thread = threading.Thread(
                target=_serve, args=(self._questions,), name="shardeddp-notes", daemon=True
            )
            self._thread.start()
        weakref.finalize(self, self._questions.put, None).atexit = False
        self.store: dist.Store = (
            dist.HashStore() if is_fake else self.ask(described.clone, waits_full_timeout=True)
        )

    def ask(self, question: Callable[[], T], *, waits_full_timeout: bool = False) -> T:
        """What the store answers, soon; or as late as the store itself allows.

        Raises:
            LostStoreError: It is gone, or silent. Who asks while an earlier question waits is not
                kept waiting as well.
        """
        if self._thread is None:
            return question()
        if not self._thread.is_alive():
            raise LostStoreError("this process is about to end")
        answer: Future[T] = Future()
        patience_s = self._patience_s if waits_full_timeout else ANSWER_S
        if waits_full_timeout or self._overdue is None or self._overdue.done():
            self._questions.put((question, answer))
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

    def end(self) -> None:
        """End the thread before the interpreter ends, unless it waits for what may never come."""
        self._questions.put(None)
        if self._thread is not None:
            self._thread.join(_END_S)


def _serve(questions: SimpleQueue[Question | None]) -> None:
    while (asked := questions.get()) is not None:
        question, answer = asked
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(question())
            except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
                answer.set_exception(error)
        del asked, question, answer  # and with them whose notes these are


_DESKS: weakref.WeakKeyDictionary[dist.Store, _StoreWorker] = weakref.WeakKeyDictionary()
"""By the store of the process group: one connection and one thread for all notes of a process."""


@atexit.register
def _end_all() -> None:
    for desk in list(_DESKS.values()):
        desk.end()


# -- StoreBarrier: a barrier with a timeout, without a collective

PATIENCE_S = 5.0
"""How long a rank waits for the others."""

_ALL, _SOME = "all", "some"


class StoreBarrier:
    """Names in the store of the process group; whatever is decided first holds for all ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._calls = 0
        self._client = StoreClient("barrier", rank)

    def wait_for_all(self, place: str, patience_s: float = PATIENCE_S) -> bool:
        """Whether every rank calls this in time, from one place; all that do get the same answer.

        A rank that comes later, or finds the store gone, gets False; one that finds it silent asks
        on, since others may have had their answer.

        Args:
            place: Where this rank is; ranks in different places are not together.
            patience_s: How long to wait for the others.
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
        """What is decided; it may be asked again, which changes nothing."""
        decision, here = f"{self._calls}/decision", f"{self._calls}/here/{{}}".format
        if self._client.claim(f"{self._calls}/place", place) != place:
            return self._client.claim(decision, _SOME)
        self._client.write(here(self._rank), "1")
        if self._client.has([here(rank) for rank in range(self._world_size)]):
            return self._client.claim(decision, _ALL)
        self._client.wait_until([decision], deadline)
        return self._client.claim(decision, _SOME)
