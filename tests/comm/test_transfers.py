"""Waits for another rank that dies in the middle of a transfer end soon, and not with the timeout."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardeddp.comm.transfers import TransferThread, count_looks, wait_for

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 40

PROGRAM = """
    import os, sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from shardeddp.comm.backends import GlooCollectives
    from shardeddp.comm.collectives import Traffic

    rank, operation, store = int(sys.argv[1]), sys.argv[2], dist.FileStore(sys.argv[3], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.new_group(timeout=timedelta(seconds={timeout}))
    collectives = GlooCollectives(group, [0, 1], Traffic())
    buffer = torch.zeros(2 << 26)
    small = torch.zeros(4)
    for _ in range(2):
        collectives.all_gather_(small).wait()  # connected
    operations = {{
        "all_gather": lambda: collectives.all_gather_(buffer),
        "reduce_scatter": lambda: collectives.reduce_scatter(torch.zeros(1 << 26), buffer),
        "all_to_all": lambda: collectives.all_to_all([small, buffer][::1 - 2 * rank], [small, buffer][::1 - 2 * rank]),
        "broadcast": lambda: collectives.broadcast_(buffer, 0),
        "all_reduce": lambda: collectives.all_reduce_(buffer),
    }}
    print("ready", flush=True)
    sys.stdin.readline()
    handle = operations[operation]()
    print("begun", flush=True)
    began = time.monotonic()
    try:
        handle.wait()
    except RuntimeError as error:
        print(f"{{time.monotonic() - began:.2f}} {{error}}", flush=True)
    else:
        print("done", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    "operation", ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce"]
)
def test_a_rank_that_dies_in_a_large_transfer_ends_the_wait_of_the_other(
    tmp_path: Path, operation: str
) -> None:
    program = textwrap.dedent(PROGRAM).format(timeout=TIMEOUT_S)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), operation, str(tmp_path / "store")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.stdout for rank in ranks if rank.stdout is not None]
        assert [output.readline() for output in outputs] == ["ready\n"] * 2
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        assert [output.readline() for output in outputs] == ["begun\n"] * 2
        time.sleep(0.01)
        os.kill(ranks[1].pid, signal.SIGKILL)
        said = outputs[0].readline()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    if said != "done\n":  # it was over before
        seconds, _, error = said.partition(" ")
        assert float(seconds) < TIMEOUT_S / 4
        assert "peer" in error or "GLHF" in error


class Closes:
    """An axis of two ranks whose connection is there until it is told otherwise."""

    def __init__(self) -> None:
        self.closed = False

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> None:
        raise AssertionError("nothing is sent")

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        if self.closed:
            raise RuntimeError("Connection closed by peer (gloo)")


def test_who_waits_looks_now_and_then_and_goes_on_waiting_while_the_connection_is_there() -> None:
    thread, axis, arrived = TransferThread(), Closes(), threading.Event()
    result = thread.begin(lambda: arrived.wait() and "there")
    threading.Timer(2.5, arrived.set).start()
    assert wait_for(result, [axis]) == "there"
    assert count_looks(axis) == 2
    thread.end()


def test_who_waits_for_a_closed_connection_is_told_although_the_transfer_is_not() -> None:
    thread, axis, arrived = TransferThread(), Closes(), threading.Event()
    results = [thread.begin(arrived.wait) for _ in range(2)]
    axis.closed = True
    for result in results:
        with pytest.raises(RuntimeError, match="closed by peer"):
            wait_for(result, [axis])
    arrived.set()
    thread.end()


def test_actions_are_carried_out_in_order_and_their_errors_reach_who_asks() -> None:
    thread, done = TransferThread(), list[int]()

    def fail() -> None:
        raise ValueError("of the action")

    def note(number: int) -> Callable[[], int]:
        return lambda: done.append(number) or number

    results = [thread.begin(note(number)) for number in range(5)]
    failed = thread.begin(fail)
    inside = thread.begin(lambda: wait_for(thread.begin(note(9)), []))
    with pytest.raises(ValueError, match="of the action"):
        wait_for(failed, [])
    assert [wait_for(result, []) for result in results] == done[:5] == list(range(5))
    assert wait_for(inside, []) == 9  # what it begins itself does not wait for itself
    thread.end()
