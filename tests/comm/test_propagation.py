"""The first rank that fails is heard by those whose transfers break because of it."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardeddp.comm import Mesh, propagation
from shardeddp.comm.store import StoreClient
from shardeddp.errors import DesyncError, LostRankError, RankError
from shardeddp.plan.topology import Topology
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


def make_mesh() -> Mesh:
    size = dist.get_world_size()
    return Mesh(
        Topology(world_size=size, shard_size=size), torch.device("cpu"), timedelta(seconds=20)
    )


def break_down(mesh: Mesh) -> BaseException | None:
    """The cause of a transfer that broke."""
    broken = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
    mesh.error_propagation.explain(broken)
    return broken.__cause__


@pytest.mark.slow
@on_ranks(2)
def test_a_broken_transfer_gets_the_traceback_of_the_rank_that_failed_as_its_cause_in_this_run_only() -> (
    None
):
    mesh, own = make_mesh(), ValueError("no such token")
    if dist.get_rank() == 1:
        mesh.error_propagation.explain(own)
    dist.barrier()
    if dist.get_rank() == 0:
        cause = break_down(mesh)
        assert isinstance(cause, RankError)
        assert "training failed on rank 1" in str(cause) and "ValueError: no such token" in str(
            cause
        )
    assert own.__cause__ is None
    mesh.error_propagation.begin_run()
    if dist.get_rank() == 0:
        assert not isinstance(break_down(mesh), RankError)
    dist.barrier()


class DeviceGroup:
    """In the place of a group of NCCL: what the device does in it is never over, but for an abort."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        """Let the device go on."""
        self.aborted.set()

    def item(self) -> bool:
        """Wait for the device, as ``Tensor.item`` does; whether that came to an end."""
        return self.aborted.wait(10)


@contextmanager
def on_a_device() -> Iterator[DeviceGroup]:
    """Collectives that a device waits in, beside those of the host."""
    group, real, config = DeviceGroup(), propagation.process_groups, propagation.backend_config
    with (
        mock.patch.object(propagation, "process_groups", lambda: [*real(), group]),
        mock.patch.object(
            propagation, "backend_config", lambda it: "cuda:nccl" if it is group else config(it)
        ),
    ):
        yield group


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_waits_for_its_device_goes_on_once_another_has_failed() -> None:
    mesh = make_mesh()
    mesh.begin_run()
    dist.barrier()
    with on_a_device() as group:
        if dist.get_rank() == 1:
            mesh.error_propagation.explain(ValueError("no such token"))
            group.aborted.wait(1.2)
        else:
            assert group.item()


@on_ranks(2)
def test_a_rank_that_has_failed_aborts_its_communicators_before_it_ends() -> None:
    mesh = make_mesh()
    with on_a_device() as group:
        mesh.error_propagation.explain(ValueError("no such token"))
        mesh.error_propagation.leave()
        assert group.aborted.is_set()


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_computes_for_long_keeps_its_communicators_where_none_has_failed() -> None:
    mesh = make_mesh()
    mesh.begin_run()
    with on_a_device() as group:
        assert not group.aborted.wait(2.5)


@pytest.mark.slow
@on_ranks(3)
def test_only_a_rank_that_does_not_run_is_lost() -> None:
    mesh = make_mesh()
    if dist.get_rank() == 1:
        mesh.liveness_probe.stop()  # as if it were frozen; rank 2 is only late
    dist.barrier()
    if dist.get_rank() == 0:
        cause = break_down(mesh)
        assert isinstance(cause, LostRankError) and cause.ranks == [1]
        assert "no word from rank 1:" in str(cause)
    dist.barrier()


@pytest.mark.slow
@on_ranks(3)
def test_where_no_rank_is_lost_others_are_said_to_run() -> None:
    mesh = make_mesh()
    if dist.get_rank() < 2:
        cause = break_down(mesh)
        assert isinstance(cause, LostRankError) and cause.ranks == [2]
        assert "rank 2 (at " in str(cause) and "test_propagation.py:" in str(cause)
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_waits_for_one_whose_program_has_ended_says_for_what_and_where() -> None:
    mesh = make_mesh()
    if dist.get_rank() == 1:
        mesh.liveness_probe.end()  # as at the end of the interpreter
        mesh.liveness_probe.stop()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            try:
                raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
            except RuntimeError as broken:
                mesh.error_propagation.explain(broken, "sum of head.weight")
                raise
        said = str(caught.value)
        assert "ranks [1] have come to the end of their program" in said
        assert "this rank to sum of head.weight at " in said and "test_propagation.py:" in said
    dist.barrier()


def break_without_one_rank() -> tuple[str, int]:
    """What ranks say of one that does not run, and how often this one has looked for all ranks."""
    mesh = make_mesh()
    if dist.get_rank() == 1:
        mesh.liveness_probe.stop()
    dist.barrier()
    looks = 0

    def missing(client: StoreClient, names: Sequence[str]) -> list[str]:
        nonlocal looks
        looks += "interrupted/0" in names and "interrupted/3" in names
        return former(client, names)

    former = StoreClient.missing
    with mock.patch.object(StoreClient, "missing", missing):
        said = "" if dist.get_rank() == 1 else str(break_down(mesh))
    dist.barrier()
    return said, looks


@pytest.mark.slow
def test_one_rank_alone_looks_for_a_lost_one_and_tells_the_others(world: Worlds) -> None:
    found = world(4).run(break_without_one_rank)
    assert all("no word from rank 1:" in said for said, _ in (found[0], *found[2:]))
    assert sum(looks for _, looks in found) == 1


def break_without_a_reason() -> tuple[object, float]:
    """A transfer breaks on all ranks and nobody has left an error."""
    mesh = make_mesh()
    with mock.patch.object(propagation, "LOOKUP_S", 40.0):
        began = time.monotonic()
        return break_down(mesh), time.monotonic() - began


def test_a_broken_transfer_without_an_origin_says_where_all_ranks_were(world: Worlds) -> None:
    assert world(1).run(break_without_a_reason)[0][0] is None
    for cause, seconds in world(2).run(break_without_a_reason):
        assert seconds < 20, "waited, though all ranks have said that they were not the first"
        assert isinstance(
            cause, DesyncError
        ) and "no rank has an error of its own: rank 0 was at " in str(cause)


@on_ranks(2)
def test_a_run_after_a_failed_one_says_that_its_process_group_does_not_work() -> None:
    mesh = make_mesh()
    mesh.error_propagation.explain(ValueError("on all ranks, between collectives"))
    mesh.error_propagation.begin_run()
    assert "an earlier run" not in str(break_down(mesh))
    mesh.error_propagation.begin_run()
    said = str(break_down(mesh))
    assert "an earlier run of these processes has failed" in said and "new processes" in said


@on_ranks(2)
def test_the_line_of_a_transfer_that_breaks_in_a_thread_is_the_one_that_waits_for_it() -> None:
    mesh = make_mesh()
    if dist.get_rank() == 1:
        mesh.liveness_probe.end()
        mesh.liveness_probe.stop()
    dist.barrier()
    if dist.get_rank() == 0:
        broken = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
        with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError) as caught:
            try:
                thread.submit(mock.Mock(side_effect=broken)).result()
            except RuntimeError as error:
                mesh.error_propagation.explain(error, "fabric.save")
                raise
        said = str(caught.value)
        assert "this rank to fabric.save at " in said
        assert "test_propagation.py:" in said and "mock.py" not in said.partition("\n")[0]
    dist.barrier()
