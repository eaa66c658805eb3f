"""The first rank that fails is heard by those whose transfers break because of it."""

import atexit
import contextlib
import gc
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardeddp.comm import Mesh, failures
from shardeddp.errors import DesyncError, LostRankError, RankError
from shardeddp.plan.topology import Topology
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


def make_mesh() -> Mesh:
    size = dist.get_world_size()
    return Mesh(Topology(world_size=size, shard_size=size), torch.device("cpu"), timedelta(seconds=20))


def break_down(mesh: Mesh) -> BaseException | None:
    """The cause of a transfer that broke."""
    broken = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
    mesh.failures.explain(broken)
    return broken.__cause__


@on_ranks(2)
def test_a_broken_transfer_gets_the_traceback_of_the_rank_that_failed_as_its_cause_in_this_run_only() -> None:
    mesh, own = make_mesh(), ValueError("no such token")
    if dist.get_rank() == 1:
        mesh.failures.explain(own)
    dist.barrier()
    if dist.get_rank() == 0:
        cause = break_down(mesh)
        assert isinstance(cause, RankError)
        assert "training failed on rank 1" in str(cause) and "ValueError: no such token" in str(cause)
    assert own.__cause__ is None
    mesh.failures.begin_run()
    if dist.get_rank() == 0:
        assert not isinstance(break_down(mesh), RankError)
    dist.barrier()


@on_ranks(3)
def test_only_a_rank_that_does_not_run_is_lost_and_where_there_is_none_others_are_said_to_run() -> None:
    mesh = make_mesh()
    if dist.get_rank() == 1:
        mesh.lookout.stop()  # as if it were frozen; rank 2 is only late
    dist.barrier()
    if dist.get_rank() == 0:
        cause = break_down(mesh)
        assert isinstance(cause, LostRankError) and cause.ranks == [1]
        assert "no word from rank 1:" in str(cause)
    dist.barrier()
    mesh = make_mesh()
    if dist.get_rank() < 2:
        cause = break_down(mesh)
        assert isinstance(cause, LostRankError) and cause.ranks == [2]
        assert "rank 2 (at " in str(cause) and "test_failures.py:" in str(cause)
    dist.barrier()


def break_without_a_reason() -> tuple[object, float]:
    """A transfer breaks on all ranks and nobody has left an error."""
    mesh = make_mesh()
    began = time.monotonic()
    return break_down(mesh), time.monotonic() - began


def test_a_broken_transfer_without_an_origin_says_where_all_ranks_were(world: Worlds) -> None:
    assert world(1).run(break_without_a_reason)[0][0] is None
    for cause, seconds in world(2).run(break_without_a_reason):
        assert seconds < 0.8, "waited, though all ranks have said that they were not the first"
        assert isinstance(cause, DesyncError) and "no rank has an error of its own: rank 0 was at " in str(cause)


@contextlib.contextmanager
def held_by_another_thread() -> Iterator[io.BufferedWriter]:
    """A file whose lock is held by somebody who waits."""
    reads, writes = os.pipe()
    os.set_blocking(writes, True)
    with os.fdopen(reads, "rb") as reader, os.fdopen(writes, "wb", buffering=1 << 20) as held:
        held.write(b"x" * (1 << 19))  # more than a pipe takes
        thread = threading.Thread(target=held.flush, daemon=True)
        thread.start()
        yield held
        reader.read(1 << 19)
        thread.join()


def test_a_process_that_ends_because_of_another_leaves_its_garbage_to_the_system_but_no_text_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[None] = []
    planned: list[Callable[[], None]] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(None))
    monkeypatch.setattr(atexit, "register", lambda function, *arguments: planned.append(partial(function, *arguments)))
    failures._plan_to_leave_garbage()
    with (tmp_path / "log").open("w") as log:
        log.write("the last line")
        planned.pop()()
        assert (tmp_path / "log").read_text() == "the last line" and frozen == [None]
    failures._plan_to_leave_garbage()
    began = time.monotonic()
    with held_by_another_thread():
        planned.pop()()
    assert time.monotonic() - began < 2.0 and frozen == [None, None]
