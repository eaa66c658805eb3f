"""Ranks that exchange bytes on the host: log2 N hops, on queues between threads and on gloo's connections."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardeddp.comm import agree_on_any, all_gather_bytes, gather_to_first
from shardeddp.comm.agreement import HostReduction, broadcast_bytes
from shardeddp.comm.host_group import HostGroup, grid_of
from shardeddp.comm.transfers import NEVER_SENT
from shardeddp.errors import DesyncError

pytestmark = pytest.mark.timeout(60)

TIMEOUT = timedelta(seconds=30)


def count_hops(size: int) -> int:
    """Messages one after the other until each rank has heard of all others."""
    return sum((length - 1).bit_length() for length in grid_of(size))


class Letter:
    """A transfer between threads."""

    def __init__(self, arrives: Callable[[], torch.Tensor], target: torch.Tensor | None) -> None:
        self._arrives, self._target = arrives, target

    def wait(self, timeout: timedelta) -> bool:
        if self._target is not None:
            self._target.copy_(self._arrives())
        return True


class Threads:
    """An axis whose ranks are threads; it counts what each of them waits for.

    Args:
        boxes: Of the axis, by sender, receiver and tag.
        place: Of this thread.
        size: Number of threads.
    """

    def __init__(self, boxes: dict[Any, Queue[torch.Tensor]], place: int, size: int) -> None:
        self._boxes, self._place, self._size = boxes, place, size
        self.received: list[int] = []  # from whom, in order
        self.partners: set[int] = set()

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Letter:
        self.partners.add(target)
        self._boxes.setdefault((self._place, target, tag), Queue()).put(tensors[0].clone())
        return Letter(Queue[torch.Tensor]().get, None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Letter:
        if tag == NEVER_SENT:
            return Letter(Queue[torch.Tensor]().get, None)
        self.received.append(source)
        box = self._boxes.setdefault((source, self._place, tag), Queue())
        return Letter(lambda: box.get(timeout=20), tensors[0])


def groups_of_threads(size: int) -> tuple[list[HostGroup], list[list[Threads]]]:
    """The group and the axes of each of that many ranks."""
    rows, columns = grid_of(size)
    of_rows: list[dict[Any, Queue[torch.Tensor]]] = [{} for _ in range(rows)]
    of_columns: list[dict[Any, Queue[torch.Tensor]]] = [{} for _ in range(columns)]
    axes = [
        [Threads(of_rows[rank // columns], rank % columns, columns)] * (columns > 1)
        + [Threads(of_columns[rank % columns], rank // columns, rows)] * (rows > 1)
        for rank in range(size)
    ]
    groups = [HostGroup(each, range(size), name="test", timeout=TIMEOUT) for each in axes]
    return groups, axes


def on_threads(groups: list[HostGroup], action: Callable[[HostGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return [each.result() for each in [pool.submit(action, group) for group in groups]]


SIZES = [1, 2, 3, 7, 64, 66, 96, 256]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_hears_the_highest_of_all_in_log_n_hops(size: int) -> None:
    groups, axes = groups_of_threads(size)

    def agree(group: HostGroup) -> list[int]:
        numbers = torch.zeros(size, dtype=torch.uint8)
        numbers[group.rank] = 1 + group.rank % 255
        return HostReduction(numbers, "agreement", group).wait().tolist()

    expected = [1 + rank % 255 for rank in range(size)]
    assert on_threads(groups, agree) == [expected] * size
    hops = {sum(len(axis.received) for axis in each) for each in axes}
    assert hops == {count_hops(size)}
    assert count_hops(size) <= max(0, size - 1).bit_length() + 1


@pytest.mark.loop(1)
@pytest.mark.long
@pytest.mark.parametrize("size", [*SIZES[:-1], pytest.param(256, marks=pytest.mark.slow)])
def test_bytes_of_any_length_reach_all_ranks_or_the_first(size: int) -> None:
    groups, axes = groups_of_threads(size)

    def exchange(group: HostGroup) -> tuple[list[bytes], list[bytes], bytes]:
        mine = bytes([group.rank % 256]) * (group.rank * 37 % 300)
        return (
            all_gather_bytes(mine, group),
            gather_to_first("sending", lambda: mine, group),
            broadcast_bytes(mine, size // 2, group),
        )

    payloads = [bytes([rank % 256]) * (rank * 37 % 300) for rank in range(size)]
    for rank, found in enumerate(on_threads(groups, exchange)):
        assert found == (payloads, [] if rank else payloads, payloads[size // 2])
    hops = count_hops(size)
    assert max(sum(len(axis.received) for axis in each) for each in axes) <= 6 * hops
    assert max(sum(len(axis.partners) for axis in each) for each in axes) <= 4 * hops


@pytest.mark.parametrize("size", [2, 66, 256])
def test_a_rank_that_comes_to_something_else_is_noticed_by_all(size: int) -> None:
    groups, _ = groups_of_threads(size)

    def meet(group: HostGroup) -> str:
        try:
            HostReduction(torch.zeros(3, dtype=torch.uint8), f"{group.rank == 1}", group).wait()
        except DesyncError as error:
            return str(error)
        return "together"

    assert all("have to communicate alike" in each for each in on_threads(groups, meet))


def test_what_is_asked_ahead_goes_on_beside_what_is_waited_for() -> None:
    groups, _ = groups_of_threads(66)
    late = threading.Event()

    def ask(group: HostGroup) -> tuple[int, bool]:
        if group.rank == 5:
            assert late.wait(20)
        ahead = HostReduction(
            torch.tensor([group.rank], dtype=torch.uint8), "question", group, ahead=True
        )
        if group.rank == 7:
            assert not ahead.is_there_within(0.01)
            late.set()
        alike = agree_on_any([group.rank == 3], group)[0]
        return int(ahead.wait()), alike

    assert on_threads(groups, ask) == [(65, True)] * 66


@pytest.mark.slow
def test_in_a_grid_over_gloo_a_rank_holds_few_descriptors() -> None:
    size = 66
    rows, columns = grid_of(size)
    store = dist.HashStore()
    before = len(os.listdir("/proc/self/fd"))

    def connect(rank: int) -> HostGroup:
        axes = [
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), place, length, TIMEOUT)
            for name, place, length in (
                (f"row {rank // columns}", rank % columns, columns),
                (f"column {rank % columns}", rank // columns, rows),
            )
        ]
        return HostGroup(axes, range(size), name="test", timeout=TIMEOUT)

    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(connect, range(size)))
    each = (len(os.listdir("/proc/self/fd")) - before) / size
    assert each <= rows + columns + 2 * 3 + 1

    def speak(group: HostGroup) -> list[bytes]:
        return all_gather_bytes(str(group.rank).encode(), group)

    assert on_threads(groups, speak) == [[str(rank).encode() for rank in range(size)]] * size


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        (1, (1, 1)),
        (64, (1, 64)),
        (72, (8, 9)),
        (1024, (32, 32)),
        (4096, (64, 64)),
        (1016, (8, 127)),
    ],
)
def test_ranks_are_laid_into_a_grid_as_square_as_their_number_allows(
    size: int, grid: tuple[int, int]
) -> None:
    assert grid_of(size) == grid
