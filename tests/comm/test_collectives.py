"""Collectives equal their definition, computed in one process, for any number of ranks, any sizes and dtypes."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardeddp.comm import CollectiveHandle, Collectives, Traffic
from shardeddp.comm.backends import MEAN_BLOCK_NUMEL, GlooCollectives, NativeCollectives, disconnect
from shardeddp.comm.collectives import ReduceKind, SoloCollectives
from shardeddp.comm.propagation import is_transfer_error
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)
on_all_sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64)
LENGTHS = (0, 1, 5, 64)


def make_group(traffic: Traffic | None = None) -> Collectives:
    """The collectives of all ranks."""
    ranks, traffic = range(dist.get_world_size()), traffic or Traffic()
    if len(ranks) == 1:
        return SoloCollectives(ranks, 0, traffic)
    return GlooCollectives(dist.group.WORLD, ranks, traffic)  # type: ignore[arg-type]  # exists on a rank


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank brings along, known to all."""
    random = torch.Generator().manual_seed(100 * rank + numel)
    return (torch.randn(numel, generator=random) * 4).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, about: str, roundings: int = 1) -> None:
    """Equal, up to some roundings of numbers of about the size of `values`."""
    error = (
        8 * roundings * torch.finfo(found.dtype).eps
        if found.is_floating_point() or found.is_complex()
        else 0.0
    )
    message: Callable[[str], str] = lambda text: f"{about}, rank {dist.get_rank()}: {text}"  # noqa: E731
    torch.testing.assert_close(found, expected, rtol=error, atol=error, msg=message)


# -- each equals its definition


def gather_slices() -> None:
    group = make_group()
    for dtype in DTYPES:
        for length in LENGTHS:
            expected = torch.cat([values(rank, length, dtype) for rank in range(group.size)])
            buffer = torch.zeros(group.size * length, dtype=dtype)
            buffer.view(group.size, -1)[group.rank] = values(group.rank, length, dtype)
            group.all_gather_(buffer).wait()
            assert torch.equal(buffer, expected), (dtype, length)


@on_all_sizes
def test_all_gather_fills_every_slice(world: Worlds, size: int) -> None:
    world(size).run(gather_slices)


def gather_pieces(lengths: tuple[int, ...]) -> None:
    group = make_group()
    for dtype in DTYPES:
        own = lengths[: group.size]
        full = torch.zeros(sum(own), dtype=dtype)
        pieces = list(full.split(own))
        pieces[group.rank].copy_(values(group.rank, own[group.rank], dtype))
        group.all_gather_uneven_(pieces).wait()
        assert torch.equal(
            full, torch.cat([values(rank, own[rank], dtype) for rank in range(group.size)])
        ), dtype


@on_all_sizes
@pytest.mark.parametrize("lengths", [(3, 1, 4, 1), (0, 7, 0, 2), (5, 0, 0, 0), (0, 0, 0, 0)])
def test_all_gather_of_uneven_pieces_fills_every_piece(
    world: Worlds, size: int, lengths: tuple[int, ...]
) -> None:
    world(size).run(gather_pieces, lengths)


def exchange_pieces() -> None:
    """Also as a backend with streams does it, whose transfers gloo knows as well."""
    first = make_group()
    size, rank = first.size, first.rank
    native = NativeCollectives(dist.group.WORLD, range(size), Traffic())  # type: ignore[arg-type]
    for group in (first, native) if size > 1 else (first,):
        for longest in (0, 3, 40):
            lengths = [
                [(3 * source + target) * longest // 4 for target in range(size)]
                for source in range(size)
            ]
            leaving = [
                values(size * rank + target, lengths[rank][target]) for target in range(size)
            ]
            arriving = [torch.zeros(lengths[source][rank]) for source in range(size)]
            group.all_to_all(arriving, leaving).wait()
            for source, arrived in enumerate(arriving):
                if source != rank:
                    assert torch.equal(arrived, values(size * source + rank, lengths[source][rank]))
            assert not arriving[rank].any()


@on_all_sizes
def test_all_to_all_brings_every_piece_to_its_rank(world: Worlds, size: int) -> None:
    world(size).run(exchange_pieces)


def average_slices() -> None:
    group = make_group()
    for dtype in (*FLOATS, torch.complex64):
        for length in (*LENGTHS, MEAN_BLOCK_NUMEL + 3):
            inputs = [values(rank, group.size * length, dtype) for rank in range(group.size)]
            buffer, output = inputs[group.rank].clone(), torch.full((length,), 7.0).to(dtype)
            group.reduce_scatter(output, buffer).wait()
            expected = torch.stack(inputs).mean(0).view(group.size, -1)[group.rank]
            check(output, expected, f"{dtype}, {length} elements", roundings=group.size)


@on_all_sizes
def test_reduce_scatter_averages_each_slice_where_it_belongs(world: Worlds, size: int) -> None:
    world(size).run(average_slices)


REFERENCES: dict[ReduceKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def reduce_everywhere(kind: ReduceKind) -> None:
    group = make_group()
    for dtype in FLOATS if kind == "mean" else (*FLOATS, torch.int64, torch.uint8):
        for shape in ((), (1,), (5,), (3, 4), (0,)):
            inputs = [
                values(rank, math.prod(shape), dtype).view(shape) for rank in range(group.size)
            ]
            tensor = inputs[group.rank].clone()
            group.all_reduce_(tensor, kind).wait()
            expected = REFERENCES[kind](torch.stack(inputs)).to(dtype)
            check(tensor, expected, f"{kind} of {dtype}, shape {shape}", roundings=group.size)


@on_all_sizes
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
def test_all_reduce_gives_every_rank_the_same_reduction(
    world: Worlds, size: int, kind: ReduceKind
) -> None:
    world(size).run(reduce_everywhere, kind)


def broadcast() -> None:
    group = make_group()
    for dtype in DTYPES:
        for source in range(group.size):
            tensor = values(group.rank, 6, dtype).view(2, 3)
            group.broadcast_(tensor, source).wait()
            assert torch.equal(tensor, values(source, 6, dtype).view(2, 3)), (dtype, source)


@on_all_sizes
def test_broadcast_gives_every_rank_what_the_source_has(world: Worlds, size: int) -> None:
    world(size).run(broadcast)


def same_bits_everywhere() -> list[torch.Tensor]:
    group = make_group()
    numbers = values(group.rank, 1000)
    results: list[torch.Tensor] = []
    for kind in ("sum", "mean"):
        tensor = numbers.clone()
        group.all_reduce_(tensor, kind).wait()
        results.append(tensor)
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_end_with_the_same_bits_and_so_does_a_second_run(
    world: Worlds, size: int
) -> None:
    first, second = world(size).run(same_bits_everywhere), world(size).run(same_bits_everywhere)
    for results in (*first, *second):
        assert all(
            torch.equal(found, expected) for found, expected in zip(results, first[0], strict=True)
        )


# -- memory


@on_ranks(1)
def test_a_group_of_one_leaves_everything_where_it_is() -> None:
    group = make_group()
    buffer = torch.arange(6.0)
    before = buffer.clone()
    group.all_gather_(buffer).wait()
    group.all_gather_uneven_([buffer]).wait()
    group.reduce_scatter(buffer, buffer).wait()
    group.reduce_scatter(buffer.view(6), buffer).wait()
    for kind in REFERENCES:
        group.all_reduce_(buffer, kind).wait()
    group.broadcast_(buffer, 0).wait()
    assert torch.equal(buffer, before) and buffer._version == 0
    output = torch.zeros(6)
    group.reduce_scatter(output, buffer).wait()
    assert torch.equal(output, before)


@on_ranks(3)
def test_the_result_of_a_reduce_scatter_may_lie_in_the_slice_that_it_comes_from() -> None:
    group = make_group()
    inputs = [values(rank, 30) for rank in range(group.size)]
    buffer = inputs[group.rank].clone()
    output = buffer.view(group.size, -1)[group.rank]
    group.reduce_scatter(output, buffer).wait()
    check(output, torch.stack(inputs).mean(0).view(group.size, -1)[group.rank], "in place")


@on_ranks(2)
def test_buffers_of_a_collective_are_kept_alive_until_it_is_waited_for() -> None:
    group = make_group()
    own = values(group.rank, 1 << 16)
    pendings = []
    for _ in range(4):
        output = torch.empty(1 << 15)
        pendings.append(
            (group.reduce_scatter(output, own.clone()), output)
        )  # nobody else holds the clone
        torch.full((1 << 16,), float("nan"))  # would reuse its memory
    expected = (
        torch.stack([values(rank, 1 << 16) for rank in range(2)]).mean(0).view(2, -1)[group.rank]
    )
    for pending, output in pendings:
        pending.wait()
        assert torch.equal(output, expected)


# -- waiting


class Step:
    """A transfer that notes when it is waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait(self) -> None:
        self.log.append(self.name)


def test_waiting_waits_for_all_transfers_then_finishes_and_does_so_once() -> None:
    log: list[str] = []
    pending = CollectiveHandle([Step("a", log), Step("b", log)], lambda: log.append("finish"))
    assert log == []
    pending.wait()
    pending.wait()
    assert log == ["a", "b", "finish"]


def test_what_follows_a_collective_that_is_complete_is_issued_at_once() -> None:
    log: list[str] = []

    def issue() -> CollectiveHandle:
        log.append("issued")
        return CollectiveHandle([Step("second", log)])

    following = CollectiveHandle().then(issue)
    assert log == ["issued"]
    following.wait()
    assert log == ["issued", "second"]


@pytest.mark.parametrize("first", ["transfer", "arithmetic"])
def test_what_follows_a_collective_in_flight_is_issued_when_its_result_is_there(first: str) -> None:
    log: list[str] = []
    pending = (
        CollectiveHandle([Step(first, log)])
        if first == "transfer"
        else CollectiveHandle(finish=lambda: log.append(first))
    )

    def issue() -> CollectiveHandle:
        log.append("issued")
        return CollectiveHandle([Step("second", log)], lambda: log.append("finish"))

    following = pending.then(issue)
    assert log == []
    following.wait()
    following.wait()
    assert log == [first, "issued", "second", "finish"]


@on_ranks(4)
def test_a_mean_over_shards_then_replicas_is_the_mean_over_all() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank, traffic = dist.get_rank(), Traffic()
    shard = GlooCollectives(pairs[rank // 2], [[0, 1], [2, 3]][rank // 2], traffic)
    replicate = GlooCollectives(crossed[rank % 2], [[0, 2], [1, 3]][rank % 2], traffic)
    assert (shard.rank, replicate.rank) == (rank % 2, rank // 2)
    output = torch.empty(5)
    shard.reduce_scatter(output, values(rank, 10)).then(
        lambda: replicate.all_reduce_(output, "mean")
    ).wait()
    everything = torch.stack([values(other, 10) for other in range(4)]).mean(0)
    check(output, everything.view(2, 5)[rank % 2], "mean over all")


@on_ranks(4)
def test_collectives_of_both_kinds_may_be_under_way_at_once_and_be_waited_for_in_any_order() -> (
    None
):
    group = make_group()
    inputs = [values(rank, 40) for rank in range(4)]
    buffers, outputs = [torch.zeros(160) for _ in range(6)], [torch.empty(10) for _ in range(6)]
    pendings: list[CollectiveHandle] = []
    for number, (buffer, output) in enumerate(zip(buffers, outputs, strict=True)):
        buffer.view(4, -1)[group.rank] = inputs[group.rank] + number
        pendings.append(group.all_gather_(buffer))
        pendings.append(group.reduce_scatter(output, inputs[group.rank] * (number + 1)))
    for pending in reversed(pendings) if group.rank % 2 else pendings:
        pending.wait()
    mean = torch.stack(inputs).mean(0).view(4, -1)[group.rank]
    for number, (buffer, output) in enumerate(zip(buffers, outputs, strict=True)):
        assert torch.equal(buffer, torch.cat(inputs) + number)
        check(output, mean * (number + 1), f"reduction {number}", roundings=8 * (number + 1))


@on_ranks(3)
def test_a_rank_that_disconnects_fails_the_transfers_of_those_that_wait_for_it() -> None:
    group: Any = dist.new_group([0, 1, 2])
    dist.barrier(group)  # all are connected
    started = time.monotonic()
    if dist.get_rank() == 2:
        disconnect(group)
    else:
        with pytest.raises(RuntimeError) as caught:
            GlooCollectives(group, range(3), Traffic()).all_gather_(torch.ones(30)).wait()
        assert is_transfer_error(caught.value), caught.value
        # Of a ring, only neighbours need fail: a rank further on waits for one of those.
        disconnect(group)
    assert time.monotonic() - started < 20


# -- what is counted


def count(issue: Callable[[Collectives], Any]) -> tuple[dict[str, int], dict[str, int]]:
    traffic = Traffic()
    issue(make_group(traffic)).wait()
    return dict(traffic.nbytes), dict(traffic.calls)


COUNTED: dict[str, tuple[Callable[[Collectives], CollectiveHandle], int]] = {
    "all_gather": (lambda group: group.all_gather_(torch.zeros(12 * group.size)), 1),
    "all_gather uneven": (
        lambda group: group.all_gather_uneven_([torch.zeros(12)] * group.size),
        1,
    ),
    "reduce_scatter": (
        lambda group: group.reduce_scatter(torch.zeros(12), torch.zeros(12 * group.size)),
        1,
    ),
    "all_reduce": (lambda group: group.all_reduce_(torch.zeros(12 * group.size)), 2),
    "all_reduce mean": (lambda group: group.all_reduce_(torch.zeros(12 * group.size), "mean"), 2),
    "broadcast": (lambda group: group.broadcast_(torch.zeros(12 * group.size), 0), 1),
    "all_to_all": (
        lambda group: group.all_to_all(
            [torch.zeros(12)] * group.size, [torch.zeros(12)] * group.size
        ),
        1,
    ),
}


def count_all() -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    return {name: count(issue) for name, (issue, _) in COUNTED.items()}


@on_all_sizes
def test_bytes_are_those_of_a_ring_and_a_group_of_one_counts_nothing(
    world: Worlds, size: int
) -> None:
    for found in world(size).run(count_all):
        for name, (nbytes, calls) in found.items():
            kind, passes = name.split()[0], COUNTED[name][1]
            # (size - 1) / size of a buffer of size * 12 elements of 4 bytes
            expected = {} if size == 1 else {kind: passes * (size - 1) * 12 * 4}
            assert nbytes == expected, name
            assert calls == ({} if size == 1 else {kind: 1}), name


def test_traffic_adds_up_by_kind_until_it_is_reset() -> None:
    traffic = Traffic()
    for nbytes in (10, 5):
        traffic.add("all_gather", nbytes)
    traffic.add("broadcast", 1)
    assert traffic.nbytes == {"all_gather": 15, "broadcast": 1} and traffic.calls == {
        "all_gather": 2,
        "broadcast": 1,
    }
    assert traffic.total_nbytes == 16
    traffic.reset()
    assert not traffic.nbytes and not traffic.calls and traffic.total_nbytes == 0


@pytest.mark.parametrize("kind", [GlooCollectives, NativeCollectives])
@pytest.mark.parametrize("value", [1.2e-7, 30_000.0], ids=["small", "large"])
@on_ranks(4)
def test_an_average_in_float16_loses_neither_small_numbers_nor_large_ones(
    kind: Callable[..., Collectives], value: float
) -> None:
    group = kind(dist.group.WORLD, range(4), Traffic())
    expected = torch.full((2,), value, dtype=torch.float16)
    reduced, buffer = expected.clone(), expected.repeat(4)
    group.all_reduce_(reduced, "mean").wait()
    assert torch.equal(reduced, expected)
    scattered = torch.empty_like(expected)
    group.reduce_scatter(scattered, buffer).wait()
    assert torch.equal(scattered, expected)
