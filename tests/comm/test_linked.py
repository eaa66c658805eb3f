"""Collectives of ranks on several nodes: the same results, and each slice crosses a link once per node."""

import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from comm.test_collectives import DTYPES, FLOATS, LENGTHS, check, values
from shardeddp.comm.failures import is_transfer_error
from shardeddp.comm.gloo import MEAN_BLOCK_NUMEL, GlooCollectives
from shardeddp.comm.linked import LinkedCollectives
from shardeddp.comm.relay import Relay
from shardeddp.comm.traffic import Traffic
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)

Nodes = Sequence[Sequence[int]]
PAIRS: Nodes = ((0, 1), (2, 3))
LAYOUTS: tuple[Nodes, ...] = (PAIRS, ((0, 2), (1, 3)))
LARGER_LAYOUTS: tuple[Nodes, ...] = (((0, 1, 2), (3, 4, 5)), ((0, 1), (2, 3), (4, 5)), ((0, 3), (1, 4), (2, 5)))


def make_group(nodes: Nodes, traffic: Traffic | None = None) -> GlooCollectives:
    """The collectives of all ranks, on several nodes or on one."""
    ranks, traffic = range(dist.get_world_size()), traffic or Traffic()
    if len(nodes) == 1:
        return GlooCollectives(dist.group.WORLD, ranks, traffic)  # type: ignore[arg-type]  # exists on a rank
    return LinkedCollectives(dist.group.WORLD, ranks, traffic, nodes)  # type: ignore[arg-type]


@contextlib.contextmanager
def counted(nodes: Nodes) -> Generator[Counter[str]]:
    """Bytes that this rank sends on its node and across."""
    own = next(members for members in nodes if dist.get_rank() in members)
    sent, isend = Counter[str](), dist.isend

    def counting(piece: torch.Tensor, group: Any, group_dst: int, tag: int = 0) -> Any:
        sent["on the node" if group_dst in own else "across"] += piece.nbytes
        return isend(piece, group=group, group_dst=group_dst, tag=tag)

    with mock.patch.object(dist, "isend", new=counting):
        yield sent


# -- results


def gather_and_reduce(layouts: Sequence[Nodes]) -> None:
    for nodes in layouts:
        group = make_group(nodes)
        all_dtypes = nodes == PAIRS
        for dtype in DTYPES if all_dtypes else (torch.float32,):
            for length in LENGTHS:
                gather(group, [length] * group.size, dtype)
                gather(group, [length * (rank % 3) + rank % 2 for rank in range(group.size)], dtype)
        for dtype in (*FLOATS, torch.complex64) if all_dtypes else (torch.float32,):
            for length in (*LENGTHS, MEAN_BLOCK_NUMEL + 3) if dtype is torch.float32 else LENGTHS:
                average(group, length, dtype)


def gather(group: GlooCollectives, lengths: Sequence[int], dtype: torch.dtype) -> None:
    full = torch.zeros(sum(lengths), dtype=dtype)
    pieces = full.split(list(lengths))
    pieces[group.rank].copy_(values(group.rank, lengths[group.rank], dtype))
    pending = group.all_gather_(full) if len(set(lengths)) == 1 else group.all_gather_uneven_(pieces)
    pending.wait()
    expected = torch.cat([values(rank, length, dtype) for rank, length in enumerate(lengths)])
    assert torch.equal(full, expected), (dtype, lengths)


def average(group: GlooCollectives, length: int, dtype: torch.dtype) -> None:
    inputs = [values(rank, group.size * length, dtype) for rank in range(group.size)]
    expected = torch.stack(inputs).mean(0).view(group.size, -1)[group.rank]
    buffer = inputs[group.rank].clone()
    for output in (torch.full((length,), 7.0).to(dtype), buffer.view(group.size, -1)[group.rank]):
        group.reduce_scatter(output, buffer).wait()
        check(output, expected, f"{dtype}, {length} elements", roundings=group.size)


@pytest.mark.parametrize("layouts", [LAYOUTS, LARGER_LAYOUTS])
def test_gathers_and_reductions_equal_their_definition_on_any_nodes(world: Worlds, layouts: Sequence[Nodes]) -> None:
    world(sum(map(len, layouts[0]))).run(gather_and_reduce, layouts)


@on_ranks(4)
def test_collectives_of_both_kinds_may_be_under_way_at_once_and_be_waited_for_in_any_order() -> None:
    group = make_group(PAIRS)
    inputs = [values(rank, 40) for rank in range(4)]
    buffers = [torch.zeros(40 * group.size) for _ in range(6)]
    pendings, outputs = [], []
    for number, buffer in enumerate(buffers):
        buffer.view(4, -1)[group.rank] = inputs[group.rank] + number
        pendings.append(group.all_gather_(buffer))
        outputs.append(torch.empty(10))
        pendings.append(group.reduce_scatter(outputs[-1], inputs[group.rank] * (number + 1)))
    for pending in reversed(pendings) if group.rank % 2 else pendings:
        pending.wait()
    mean = torch.stack(inputs).mean(0).view(4, -1)[group.rank]
    for number, (buffer, output) in enumerate(zip(buffers, outputs, strict=True)):
        assert torch.equal(buffer, torch.cat(inputs) + number)
        check(output, mean * (number + 1), f"reduction {number}", roundings=8 * (number + 1))


@on_ranks(4)
def test_what_arrives_is_passed_on_while_nobody_waits_for_it() -> None:
    group, store = make_group(PAIRS), dist.distributed_c10d._get_default_store()
    buffer, output = torch.ones(40), torch.empty(10)
    pendings = [group.all_gather_(buffer), group.reduce_scatter(output, torch.ones(40))]
    for waiting in range(4):  # one after the other
        if group.rank == waiting:
            for pending in pendings:
                pending.wait()
            store.set(f"has/{waiting}", "1")
        store.wait([f"has/{waiting}"])
    assert output.eq(1).all() and buffer.eq(1).all()


# -- what crosses


@pytest.mark.parametrize("nodes", LAYOUTS)
@on_ranks(4)
def test_each_slice_crosses_once_per_node_and_the_traffic_stays_that_of_a_ring(nodes: Nodes) -> None:
    own, numel = 40, 160
    expected = {"on the node": 2 * own * 4, "across": own * 4}  # half of the buffer by both ranks of a node
    for kind in ("all_gather", "reduce_scatter"):
        traffic = Traffic()
        group = make_group(nodes, traffic)
        with counted(nodes) as sent:
            buffer = torch.ones(numel)
            (group.all_gather_(buffer) if kind == "all_gather" else group.reduce_scatter(buffer[:own], buffer)).wait()
        assert sent == expected, kind
        assert traffic.nbytes == {kind: 3 * own * 4}
    with counted(nodes) as sent:
        make_group((range(4),)).all_gather_(torch.ones(numel)).wait()
    assert sent["across"] == 2 * own * 4, "point to point it is twice as much"


# -- the end


class Broken:
    """A transfer that fails."""

    def wait(self) -> None:
        raise RuntimeError("gloo: broken")


def relays() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, Relay)]


@on_ranks(4)
def test_a_rank_that_cannot_pass_on_fails_for_those_that_wait_for_it() -> None:
    group: Any = dist.new_group([0, 1, 2, 3])
    dist.barrier()  # all are connected
    linked, started = LinkedCollectives(group, range(4), Traffic(), PAIRS), time.monotonic()
    pending: Any = linked._relay.then([Broken()], list) if linked.rank == 3 else linked.all_gather_(torch.ones(40))
    with pytest.raises(RuntimeError, match="broken" if linked.rank == 3 else None) as caught:
        pending.wait()
    assert is_transfer_error(caught.value), caught.value
    assert time.monotonic() - started < 20


@on_ranks(2)
def test_a_relay_that_waits_in_vain_can_be_ended() -> None:
    group: Any = dist.new_group([0, 1])
    dist.barrier()
    relay = Relay(group)
    relay.end()  # nothing has begun
    arriving: Any = dist.irecv(torch.empty(1), group=group, group_src=1 - dist.get_rank())
    relayed = relay.then([arriving], list)
    relay.stop()
    assert not relay.is_alive()
    with pytest.raises(RuntimeError):
        relayed.wait()


@on_ranks(4)
def test_threads_are_there_when_they_are_needed_and_end_with_their_collectives() -> None:
    group: Any = make_group(PAIRS)
    assert not relays()
    group.all_reduce_(torch.ones(1)).wait()
    assert not relays()
    group.all_gather_(torch.ones(8)).wait()
    assert len(relays()) == 1
    del group
    gc.collect()
    assert not relays()
