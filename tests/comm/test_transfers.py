"""Waits for another rank that dies in the middle of a transfer end soon, and not with the timeout."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardeddp.comm.transfers import TransferThread, wait_for

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 40

PROGRAM = """
    import os, signal, sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from shardeddp.comm.backends import GlooCollectives
    from shardeddp.comm.collectives import Traffic

    def run(rank, operation, folder, begun):
        store = dist.FileStore(f"{{folder}}/{{operation}}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        collectives = GlooCollectives(dist.new_group(timeout=timedelta(seconds={timeout})), [0, 1], Traffic())
        buffer, shard, small = torch.zeros(1 << 26), torch.zeros(1 << 25), torch.zeros(4)
        for _ in range(2):
            collectives.all_gather_(small).wait()  # connected
        operations = {{
            "all_gather": lambda: collectives.all_gather_(buffer),
            "reduce_scatter": lambda: collectives.reduce_scatter(shard, buffer),
            "all_to_all": lambda: collectives.all_to_all(*[[small, buffer][:: 1 - 2 * rank]] * 2),
            "broadcast": lambda: collectives.broadcast_(buffer, 0),
            "all_reduce": lambda: collectives.all_reduce_(buffer),
        }}
        handle = operations[operation]()
        os.write(begun, b".")
        began = time.monotonic()
        try:
            handle.wait()
        except RuntimeError as error:
            print(operation, f"{{time.monotonic() - began:.2f}}", error, flush=True)
        else:
            print(operation, "done", flush=True)

    for operation in ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce"]:
        reader, begun = os.pipe()
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if not ranks[-1]:
                run(rank, operation, sys.argv[1], begun)
                os._exit(0)
        while len(os.read(reader, 1)) < 1:
            pass
        os.read(reader, 1)
        time.sleep(0.005)
        os.kill(ranks[1], signal.SIGKILL)
        for rank in ranks:
            os.waitpid(rank, 0)
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are forked")
@pytest.mark.timeout(200)
def test_a_rank_that_dies_in_a_large_transfer_ends_the_wait_of_the_other(tmp_path: Path) -> None:
    program = textwrap.dedent(PROGRAM).format(timeout=TIMEOUT_S)
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, timeout=190, check=False,
    )  # fmt: skip
    said = [line.split(maxsplit=2) for line in found.stdout.splitlines() if "done" not in line]
    assert found.returncode == 0, found.stderr
    assert len(said) >= 2, f"nearly all were over before: {found.stdout}"
    for operation, seconds, error in said:
        assert float(seconds) < TIMEOUT_S / 4, operation
        assert "peer" in error or "GLHF" in error, operation


class Closes:
    """An axis of two ranks whose connection is there until it is told otherwise."""

    def __init__(self) -> None:
        self.closed = False
        self.looks = 0

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> None:
        raise AssertionError("nothing is sent")

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        self.looks += 1
        if self.closed:
            raise RuntimeError("Connection closed by peer (gloo)")


@pytest.mark.slow
def test_who_waits_looks_now_and_then_and_goes_on_waiting_while_the_connection_is_there() -> None:
    thread, axis, arrived = TransferThread(), Closes(), threading.Event()
    result = thread.begin(lambda: arrived.wait() and "there")
    threading.Timer(2.5, arrived.set).start()
    assert wait_for(result, [axis]) == "there"
    assert axis.looks == 2
    thread.end()


@pytest.mark.slow
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
