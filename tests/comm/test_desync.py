"""Operations that need all ranks and get only some: they fail with a hint, and soon."""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from shardeddp.comm import Mesh, desync
from shardeddp.comm.desync import DesyncCheck, note_that_runs_alone
from shardeddp.comm.transfers import TransferThread, wait_for
from shardeddp.errors import DesyncError
from shardeddp.plan.topology import Topology
from support.waiting import until
from world import on_ranks

pytestmark = pytest.mark.timeout(60)


def make_mesh() -> Mesh:
    size = dist.get_world_size()
    return Mesh(
        Topology(world_size=size, shard_size=size), torch.device("cpu"), timedelta(seconds=20)
    )


def for_one_rank(fn: Callable[[], Any]) -> Callable[[], Any]:
    def wrapped() -> Any:
        return fn()

    return wrapped


@pytest.mark.slow
@on_ranks(2)
def test_ranks_that_come_late_are_waited_for() -> None:
    mesh = make_mesh()
    for late in range(2):
        if dist.get_rank() == late:
            time.sleep(2.5)  # longer than it takes until the other asks
        mesh.fingerprints.call("sum of weight")
        mesh.user_fingerprints.call("barrier()")


@on_ranks(2)
def test_what_runs_on_one_rank_only_is_refused_at_once_and_does_no_harm() -> None:
    mesh = make_mesh()
    note_that_runs_alone(for_one_rank(print), "{name}, which is for one rank")

    def save_weight() -> None:
        mesh.fingerprints.call("sum of weight")

    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"sum of weight at .*test_desync.py:\d+ .*save_weight, which is for"
        ):
            for_one_rank(save_weight)()
    mesh.fingerprints.call("sum of weight")


@on_ranks(2)
def test_ranks_that_come_to_different_operations_are_told_of_both() -> None:
    mesh = make_mesh()
    mine, other = ("sum", "max")[:: 1 if dist.get_rank() == 0 else -1]
    with pytest.raises(
        RuntimeError,
        match=rf"{mine} of weight at .*others do something else.* to {other} of weight at",
    ):
        mesh.fingerprints.call(f"{mine} of weight")
    with pytest.raises(RuntimeError, match="out of step since"):
        mesh.fingerprints.call("sum of weight")


@on_ranks(2)
def test_a_rank_that_comes_to_a_barrier_and_one_that_reads_a_parameter_are_told_of_both() -> None:
    mesh = make_mesh()
    started = time.monotonic()
    with pytest.raises(DesyncError) as caught:
        mesh.fingerprints.call(
            "sum of weight"
        ) if dist.get_rank() == 0 else mesh.user_fingerprints.call("barrier()")
    assert time.monotonic() - started < 5
    for operation in ("sum of weight at ", "barrier() at "):
        assert operation in str(caught.value)
    assert str(caught.value).count("test_desync.py:") == 2
    if dist.get_rank() == 0:
        assert "strategy.summon_full_params()" in str(caught.value)


@pytest.mark.slow
@on_ranks(2)
def test_a_parameter_that_is_sent_to_one_rank_cannot_be_gathered_by_the_other() -> None:
    mesh = make_mesh()
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        try:
            if dist.get_rank() == 0:
                mesh.fingerprints.call("send of weight")
            else:
                dist.recv(torch.empty(2), 0)
        except RuntimeError as error:
            mesh.error_propagation.explain(error)
            raise
    assert time.monotonic() - started < 6
    assert "rank 0 waits in send of weight at " in str(caught.value)
    assert "rank 1 waits in torch.distributed.recv at " in str(caught.value)


# -- Ranks that wait for transfers of a user's


def wait_for_handle(group: dist.ProcessGroup) -> None:
    handle = dist.irecv(torch.empty(2), 0, group)
    assert handle
    handle.wait()


def wait_for_any(group: dist.ProcessGroup) -> None:
    handle = dist.irecv(torch.empty(2), group=group)
    assert handle
    handle.wait()


def receive_from_any(group: dist.ProcessGroup) -> None:
    dist.recv(torch.empty(2), group=group)


def wait_for_batch(group: dist.ProcessGroup) -> None:
    (handle,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.empty(2), 0, group)])
    handle.wait()


def receive_objects(group: dist.ProcessGroup) -> None:
    dist.recv_object_list([None], 0, group)


def wait_for_collective(group: dist.ProcessGroup) -> None:
    handle = dist.all_reduce(torch.empty(2), group=group, async_op=True)
    assert handle
    handle.wait()


def use_functional_collective(group: dist.ProcessGroup) -> None:
    functional.all_reduce(torch.empty(2), "sum", group).sum()


def enter_monitored_barrier(group: dist.ProcessGroup) -> None:
    dist.monitored_barrier(group, timedelta(seconds=20))


def soon(told: pytest.MonkeyPatch) -> None:
    told.setattr(desync, "TRANSFER_S", 1.5)
    told.setattr(desync, "BUSY_S", 1.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait",
    [
        wait_for_handle,
        wait_for_any,
        receive_from_any,
        wait_for_batch,
        receive_objects,
        wait_for_collective,
        use_functional_collective,
        enter_monitored_barrier,
    ],
)
@pytest.mark.parametrize("former", [0, 1])
@on_ranks(3)
def test_a_rank_that_asks_ranks_which_wait_for_transfers_is_told_by_name(
    wait: Callable[[dist.ProcessGroup], None], former: int
) -> None:
    formers = [make_mesh() for _ in range(former)]  # as of a Trainer that is still referred to
    mesh = make_mesh()
    # Gloo wakes nobody who receives from any rank when connections are closed.
    group = dist.new_group(timeout=timedelta(seconds=7 if "any" in wait.__name__ else 30))
    assert group
    with pytest.MonkeyPatch.context() as told, pytest.raises(RuntimeError) as caught:
        soon(told)
        started = time.monotonic()
        try:
            wait(group) if dist.get_rank() else mesh.fingerprints.call("sum of weight")
        except RuntimeError as error:
            mesh.error_propagation.explain(error)
            raise
    assert time.monotonic() - started < (10 if dist.get_rank() else 7)
    assert "rank 0 waits in sum of weight at " in str(caught.value)
    assert "rank 1 waits in " in str(caught.value)
    assert len(formers) == former


@pytest.mark.slow
@on_ranks(3)
def test_a_transfer_with_a_rank_that_goes_on_is_waited_for() -> None:
    mesh, rank = make_mesh(), dist.get_rank()
    with pytest.MonkeyPatch.context() as told:
        soon(told)
        if rank == 2:
            time.sleep(4.0)
            dist.send(torch.ones(2), 1)
        elif rank == 1:
            wait_for_any(dist.group.WORLD)
        mesh.fingerprints.call("sum of weight")


@on_ranks(2)
def test_a_mesh_that_nobody_refers_to_is_not_kept_by_the_thread_of_its_process_group() -> None:
    mesh = make_mesh()
    gone, thread_gone = weakref.ref(mesh), weakref.ref(mesh.liveness_probe)
    dist.barrier()
    del mesh
    assert until(lambda: gc.collect() >= 0 and gone() is None)
    assert thread_gone() is not None
    dist.destroy_process_group()
    assert until(lambda: gc.collect() >= 0 and thread_gone() is None)


@on_ranks(2)
def test_a_mesh_that_outlives_its_process_group_has_no_thread_that_looks_at_later_groups() -> None:
    mesh = make_mesh()
    dist.barrier()
    dist.destroy_process_group()
    assert until(lambda: "shardeddp-liveness" not in [each.name for each in threading.enumerate()])
    assert mesh.liveness_probe


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_whose_wait_looks_at_its_connections_has_not_gone_on() -> None:
    mesh = make_mesh()
    check = DesyncCheck.of_group()
    mesh.liveness_probe.stop()  # looked at from here
    thread, arrived = TransferThread(), threading.Event()
    result = thread.begin(arrived.wait)
    axis = dist.new_group()
    waiting = threading.Thread(target=lambda: wait_for(result, [axis]))
    waiting.start()
    assert waiting.ident is not None
    for _ in range(14):
        time.sleep(0.2)
        check.on_sample(sys._current_frames()[waiting.ident])
    report = check.report()
    arrived.set()
    waiting.join()
    thread.end()
    assert report["waits"] and report["still_s"] > 2.0, report
