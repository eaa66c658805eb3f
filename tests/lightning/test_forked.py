"""Calls in a forked process: what they change is not changed here, and no failure of theirs ends the run."""

import contextlib
import functools
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardeddp import ConfigurationError
from shardeddp.lightning import forked
from shardeddp.lightning.forked import call_in_fork
from world import on_ranks

pytestmark = pytest.mark.timeout(60)

NUMBERS = np.random.default_rng(0)
COUNT = itertools.count()
TABLE, LISTS, MEAN = np.zeros(1 << 20), [[0] for _ in range(2000)], {"mean": torch.zeros(1 << 16)}


class Alone:
    """An object of which a copy is the object itself."""

    steps = 0

    def __deepcopy__(self, memo: object) -> "Alone":
        return self


ALONE = Alone()


@functools.cache
def made() -> object:
    return object()


def closure() -> Callable[[], int]:
    count = 0

    def move() -> int:
        nonlocal count
        count += 1
        return count

    return move


MOVE = closure()


def state() -> list[Any]:
    """All that a step may change outside of its module."""
    return [
        *(TABLE.sum(), sum(map(sum, LISTS)), float(MEAN["mean"].sum()), vars(ALONE)),
        *(NUMBERS.bit_generator.state["state"], repr(COUNT), made.cache_info().currsize),
        *(os.environ.get("FORKED"), os.getcwd(), vars(Alone).get("steps"), torch.initial_seed()),
    ]


def change() -> list[Any]:
    """Change all of it."""
    TABLE[:] += 1
    MEAN["mean"].data.add_(1)
    for it in LISTS:
        it[0] += 1
    ALONE.steps += 1
    Alone.steps += 1
    os.environ["FORKED"] = "1"
    os.chdir("/")
    torch.manual_seed(5)
    made()
    print("printed by the fork")
    logging.getLogger("forked").critical("logged by the fork")
    sys.stderr.write("written by the fork\n")
    os.write(1, b"written by the fork\n")
    return [MOVE(), next(COUNT), NUMBERS.integers(9), state()]


def test_whatever_a_call_changes_is_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = str(state())
    sys.stdout.write("buffered")
    first = call_in_fork(change)
    assert str(state()) == before != str(first[-1])
    assert str(call_in_fork(change)) == str(first)
    sys.stdout.flush()
    assert capfd.readouterr() == ("buffered", "")


def fails() -> None:
    raise LookupError("no such thing")


def refuses() -> None:
    raise ConfigurationError("this cannot be planned")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def waits() -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, "LookupError: no such thing"),
        (refuses, "this cannot be planned"),
        (sys.exit, "SystemExit: "),
        (is_killed, "its process was ended by SIGKILL"),
        (waits, "it took longer than 1 s"),
        (lambda: os._exit(0), "its process ended without a result"),
        (lambda: lambda: None, "its process ended without a result"),  # it cannot be pickled
    ],
)
def test_a_call_that_fails_is_an_error_that_says_why(
    function: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "TIMEOUT_S", 1)
    with pytest.raises(ConfigurationError) as found:
        call_in_fork(function)
    assert str(found.value) == message


def test_a_system_that_forks_no_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(ConfigurationError, match="no process could be forked: Resource temp"):
        call_in_fork(refuses)
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ConfigurationError, match="linux cannot fork a process"):
        call_in_fork(refuses)


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_no_process_and_no_file_is_left() -> None:
    before = open_files()
    for function in (open_files, is_killed):
        for _ in range(3):
            with contextlib.suppress(ConfigurationError):
                call_in_fork(function)
    assert open_files() == before
    with contextlib.suppress(ChildProcessError):  # there may be other children, none of which ends
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)


def trained() -> float:
    weight = torch.randn(300, 300, requires_grad=True)
    (weight @ weight).square().mean().backward()
    assert weight.grad is not None
    return float(weight.grad.norm())


@on_ranks(2)
def test_a_call_computes_after_ranks_and_threads_have() -> None:
    torch.set_num_threads(2)
    trained()
    dist.all_reduce(torch.ones(1000))
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, daemon=True)
    thread.start()
    try:
        torch.manual_seed(0)
        found = call_in_fork(trained)
        dist.all_reduce(torch.ones(1000))
        assert found == pytest.approx(trained())
    finally:
        ends.set()
        torch.set_num_threads(1)
