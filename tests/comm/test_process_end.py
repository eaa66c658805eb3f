"""A process that ends waits for threads that are about to let go of something, and for no others."""

import threading
import time
from hashlib import sha256

import pytest

from shardeddp.comm import propagation
from shardeddp.comm.propagation import wait_until_idle

pytestmark = pytest.mark.timeout(60)

NBYTES = 1 << 28


def test_it_waits_for_a_thread_that_runs_and_not_for_one_that_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(propagation, "LIMIT_S", 30.0)
    over = threading.Event()
    sleeper = threading.Thread(target=over.wait, daemon=True)
    sleeper.start()
    data = bytes(NBYTES)
    began, ended = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        sha256(data)  # without the interpreter's lock
        ended.set()

    worker = threading.Thread(target=run)
    worker.start()
    began.wait()
    wait_until_idle()
    assert ended.is_set()
    started = time.monotonic()
    wait_until_idle()
    assert time.monotonic() - started < 15.0
    assert sleeper.is_alive()
    over.set()
    worker.join()
    sleeper.join()


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagation, "LIMIT_S", 0.1)
    over = threading.Event()

    def run() -> None:
        data = bytes(1 << 20)
        while not over.is_set():
            sha256(data)

    worker = threading.Thread(target=run)
    worker.start()
    started = time.monotonic()
    wait_until_idle()
    passed = time.monotonic() - started
    over.set()
    worker.join()
    assert 0.1 <= passed < 10.0
