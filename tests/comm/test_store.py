"""Notes end soon, whatever has become of the store; who waits by them does not wait for a frozen host."""

import atexit
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from shardeddp.comm.liveness import LivenessProbe
from shardeddp.comm.propagation import ErrorPropagation, is_transfer_error
from shardeddp.comm.store import (
    ANSWER_S,
    LostStoreError,
    SilentStoreError,
    StoreBarrier,
    StoreClient,
)
from shardeddp.errors import LostRankError
from support.stores import MemoryStore

BROKEN = "[gloo] Timed out waiting 8000ms for recv operation to complete"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    store = MemoryStore()
    monkeypatch.setattr("shardeddp.comm.store.default_store", lambda: store)
    yield store
    store.runs.set()


def test_those_made_by_ranks_alike_share_names_and_no_others(store: MemoryStore) -> None:
    mine, others = (
        [StoreClient("topic", 0), StoreClient("topic", 0)],
        [StoreClient("topic", 1), StoreClient("topic", 1)],
    )
    mine[0].write("word", "first")
    assert others[0].read("word") == "first" and others[1].read("word") is None
    assert [client.claim("claim", text) for client, text in ((mine[1], "a"), (others[1], "b"))] == [
        "a",
        "a",
    ]
    assert [client.count("number") for client in (mine[1], others[1], mine[0])] == [1, 2, 1]
    assert mine[1].has(["claim"]) and not mine[1].has(["claim", "word"])


@pytest.mark.slow
def test_a_store_whose_host_is_frozen_is_waited_for_once_and_for_as_long_as_it_is_frozen(
    store: MemoryStore,
) -> None:
    client = StoreClient("topic", 0)
    store.runs.clear()
    began = time.monotonic()
    with pytest.raises(SilentStoreError):
        client.count("number")
    assert time.monotonic() - began < ANSWER_S + 0.5
    began = time.monotonic()
    with pytest.raises(SilentStoreError):
        client.count("number")
    assert time.monotonic() - began < 0.2
    store.runs.set()
    time.sleep(0.1)
    assert client.count("number") == 2


@pytest.mark.slow
def test_a_hiccup_of_the_store_does_not_keep_notes_from_being_made(store: MemoryStore) -> None:
    store.delay_s = ANSWER_S + 0.1
    client = StoreClient("topic", 0)
    store.delay_s = 0.0
    assert client.count("number") == 1


@pytest.mark.slow
def test_what_nothing_goes_on_without_is_waited_for(store: MemoryStore) -> None:
    client, others = StoreClient("topic", 0, patient=True), StoreClient("topic", 1)
    store.delay_s = ANSWER_S + 0.1
    assert client.count("number") == 1
    with pytest.raises(SilentStoreError):
        others.count("number")


def test_a_store_that_another_thread_keeps_busy_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    monkeypatch.setattr("shardeddp.comm.store.default_store", lambda: busy)
    client, others = StoreClient("topic", 0), StoreClient("topic", 1)
    waits = threading.Thread(target=busy.wait, args=(["missing"], timedelta(seconds=20)))
    waits.start()
    time.sleep(0.1)
    assert client.count("number") == 1 and others.read_all(["number", "no"]) == {"number": "1"}
    dist.TCPStore("127.0.0.1", busy.port, is_master=False).set("missing", "")
    waits.join()


def test_all_requests_of_a_process_are_asked_by_one_thread(store: MemoryStore) -> None:
    first, second = StoreClient("topic", 0), StoreClient("other topic", 0)
    for client in (first, second, first):
        client.count("number")
    assert len(store.asked_by) == 1


@pytest.mark.slow
def test_an_explanation_does_not_wait_for_a_frozen_host_and_a_muster_not_much_longer_than_for_ranks(
    store: MemoryStore,
) -> None:
    barrier, error_propagation = StoreBarrier(1, 2), ErrorPropagation(1, 2, LivenessProbe(1))
    store.runs.clear()
    began = time.monotonic()
    broken = RuntimeError(BROKEN)
    error_propagation.explain(broken)
    assert isinstance(broken.__cause__, LostRankError) and broken.__cause__.ranks == [0]
    assert not broken.__cause__.ended
    assert time.monotonic() - began < ANSWER_S + 0.5
    assert not barrier.wait_for_all("batch 1", patience_s=0.3)
    assert time.monotonic() - began < 2 * ANSWER_S + 0.8


@pytest.mark.slow
def test_a_muster_of_a_rank_that_finds_the_store_silent_for_a_while_is_that_of_the_others(
    store: MemoryStore,
) -> None:
    barrier = StoreBarrier(0, 2)
    store.values["shardeddp/barrier/1/1/here/1"] = b"1"
    store.values["shardeddp/barrier/1/1/decision"] = b"all"
    store.runs.clear()
    threading.Timer(ANSWER_S + 0.2, store.runs.set).start()
    assert barrier.wait_for_all("batch 1")


def test_a_host_that_has_ended_is_said_to_have_ended(store: MemoryStore) -> None:
    barrier, error_propagation = StoreBarrier(1, 2), ErrorPropagation(1, 2, LivenessProbe(1))
    store.gone = True
    broken = LostStoreError("the store of the process group is gone")
    assert is_transfer_error(broken)
    error_propagation.explain(broken)
    assert isinstance(broken.__cause__, LostRankError)
    text = str(pickle.loads(pickle.dumps(broken.__cause__)))
    assert (
        "no word from rank 0" in text
        and "has ended or was killed. Look for the reason in the output of rank 0" in text
    )
    assert not barrier.wait_for_all("batch 1")


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    """What is registered for the end of the process, by name."""
    registered: dict[str, Callable[[], None]] = {}

    def register(function: Callable[..., None], *arguments: Any) -> None:
        registered[function.__name__] = partial(function, *arguments)

    monkeypatch.setattr(atexit, "register", register)
    monkeypatch.setattr(
        atexit, "unregister", lambda function: registered.pop(function.__name__, None)
    )
    return registered


def test_rank_0_stays_with_its_store_until_the_others_have_read_why_it_ends(
    store: MemoryStore, at_exit: dict[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        ErrorPropagation(0, 2, LivenessProbe(0)),
        ErrorPropagation(1, 2, LivenessProbe(1)),
    )
    first.explain(ValueError("no such token"))
    assert list(at_exit) == ["leave_store"]
    threading.Timer(0.3, second.explain, [RuntimeError(BROKEN)]).start()
    began = time.monotonic()
    at_exit["leave_store"]()
    assert 0.2 < time.monotonic() - began < 0.9
    first.begin_run()
    assert not at_exit
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first.explain(ValueError("no such token"))
    began = time.monotonic()
    at_exit["leave_store"]()
    assert time.monotonic() - began < 0.2, "waited, though another process hosts the store"


def test_an_error_reaches_the_others_at_the_exit_if_what_ran_until_then_has_failed_too(
    store: MemoryStore, at_exit: dict[str, Callable[[], None]]
) -> None:
    first, second = (
        ErrorPropagation(0, 2, LivenessProbe(0)),
        ErrorPropagation(1, 2, LivenessProbe(1)),
    )
    second.explain_at_exit(LookupError("no such token"))
    assert list(at_exit) == ["explain_and_leave"]
    at_exit["explain_and_leave"]()
    interrupted = RuntimeError(BROKEN)
    first.explain(interrupted)
    assert str(interrupted).startswith("rank 1 failed: LookupError: no such token")
    second.explain_at_exit(LookupError("another one"))
    second.explain(LookupError("another one"))
    assert list(at_exit) == ["leave_store"]
    second.begin_run()
    second.explain_at_exit(LookupError("handled, and torn down"))
    second.forget_error()
    ErrorPropagation(0, 1, LivenessProbe(0)).explain_at_exit(LookupError())
    assert not at_exit


def test_a_rank_that_ends_because_of_others_lets_them_read_why_and_one_that_is_alone_does_nothing(
    store: MemoryStore, at_exit: dict[str, Callable[[], None]]
) -> None:
    for size, expected in ((1, []), (2, ["leave_store"])):
        error_propagation = ErrorPropagation(size - 1, size, LivenessProbe(size - 1))
        store.gone = True
        error_propagation.explain(RuntimeError(BROKEN))
        assert list(at_exit) == expected
        store.gone = False
        error_propagation.begin_run()
        assert not at_exit


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 512])
def test_what_is_asked_does_not_grow_with_the_ranks_and_a_slow_store_is_no_lost_rank(
    store: MemoryStore, size: int
) -> None:
    error_propagation = ErrorPropagation(1, size, LivenessProbe(1))
    for rank in range(size):
        if rank not in (1, 5):
            store.values[f"shardeddp/failures/1/interrupted/{rank}"] = b"1"
    store.calls, store.delay_s = 0, 0.05
    broken = RuntimeError(BROKEN)
    error_propagation.explain(broken)
    assert isinstance(broken.__cause__, LostRankError) and broken.__cause__.ranks == [5]
    assert store.calls < 45


def test_a_request_counts_as_answered_when_the_answer_is_written(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    liveness_probe = LivenessProbe(0)
    request = liveness_probe.ask()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "set", refuse)
        liveness_probe.poll()
    assert not liveness_probe.answers([0], request)
    liveness_probe.poll()
    assert list(liveness_probe.answers([0], request)) == [0]


def refuse(store: MemoryStore, key: str, value: bytes | str) -> None:
    """Instead of setting it."""
    raise RuntimeError("Connection reset by peer")


def test_answers_of_all_ranks_are_read_at_once(store: MemoryStore) -> None:
    liveness_probe = LivenessProbe(0)
    for rank in range(512):
        answer = {"request": rank % 2, "where": f"line {rank}", "reports": {}}
        store.values[f"shardeddp/liveness/1/answer/{rank}"] = json.dumps(answer).encode()
    store.calls = 0
    answers = liveness_probe.answers(range(512))
    assert len(answers) == 256 and answers[511]["where"] == "line 511"
    assert store.calls == 2


def test_several_ranks_that_run_are_listed() -> None:
    error = LostRankError([1, 2], {1: "a.py:1", 2: "b.py:2"})
    assert (
        "ranks that are still running, while the others were interrupted: rank 1 (at a.py:1), rank 2 (at b.py:2). They"
        in (str(pickle.loads(pickle.dumps(error))))
    )
