"""Notes end soon, whatever has become of the store; who waits by them does not wait for a frozen host."""

import time
from collections.abc import Iterator

import pytest
from torch.distributed import distributed_c10d

from shardeddp.comm.failures import Failures
from shardeddp.comm.lookout import Lookout
from shardeddp.comm.muster import Muster
from shardeddp.comm.notes import ANSWER_S, Notes, SilentStoreError
from shardeddp.errors import LostRankError
from support.stores import MemoryStore

BROKEN = "[gloo] Timed out waiting 8000ms for recv operation to complete"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    store = MemoryStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    yield store
    store.runs.set()


def test_those_made_by_ranks_alike_share_names_and_no_others(store: MemoryStore) -> None:
    mine, others = [Notes("topic", 0), Notes("topic", 0)], [Notes("topic", 1), Notes("topic", 1)]
    mine[0].write("word", "first")
    assert others[0].read("word") == "first" and others[1].read("word") is None
    assert [notes.claim("claim", text) for notes, text in ((mine[1], "a"), (others[1], "b"))] == ["a", "a"]
    assert [notes.count("number") for notes in (mine[1], others[1], mine[0])] == [1, 2, 1]
    assert mine[1].has(["claim"]) and not mine[1].has(["claim", "word"])


def test_a_store_whose_host_is_frozen_is_waited_for_once_and_for_as_long_as_it_is_frozen(store: MemoryStore) -> None:
    notes = Notes("topic", 0)
    store.runs.clear()
    began = time.monotonic()
    with pytest.raises(SilentStoreError):
        notes.count("number")
    assert time.monotonic() - began < ANSWER_S + 0.5
    began = time.monotonic()
    with pytest.raises(SilentStoreError):
        notes.count("number")
    assert time.monotonic() - began < 0.2
    store.runs.set()
    time.sleep(0.1)
    assert notes.count("number") == 2


def test_a_muster_and_an_explanation_do_not_wait_for_a_frozen_host(store: MemoryStore) -> None:
    muster, failures = Muster(1, 2), Failures(1, 2, Lookout(1))
    store.runs.clear()
    began = time.monotonic()
    broken = RuntimeError(BROKEN)
    failures.explain(broken)
    assert isinstance(broken.__cause__, LostRankError) and broken.__cause__.ranks == [0]
    assert not muster.all_here("batch 1")
    assert time.monotonic() - began < ANSWER_S + 0.5


@pytest.mark.parametrize("size", [8, 512])
def test_what_is_asked_does_not_grow_with_the_ranks_and_a_slow_store_is_no_lost_rank(
    store: MemoryStore, size: int
) -> None:
    failures = Failures(1, size, Lookout(1))
    for rank in range(size):
        if rank not in (1, 5):
            store.values[f"shardeddp/failures/1/interrupted/{rank}"] = b"1"
    store.calls, store.delay_s = 0, 0.05
    broken = RuntimeError(BROKEN)
    failures.explain(broken)
    assert isinstance(broken.__cause__, LostRankError) and broken.__cause__.ranks == [5]
    assert store.calls < 45
