"""Backends of collectives: gloo's and NCCL's."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist

from shardeddp.comm.collectives import (
    REDUCE_OPS,
    CollectiveHandle,
    Collectives,
    ReduceKind,
    Traffic,
    Work,
    split_mean_factor,
)
from shardeddp.comm.transfers import NEVER_SENT, TransferThread, wait_for
from shardeddp.torch_private import past_the_front

# Kernels in front of collectives look for users' sharded parameters; none arrives here.

# -- Collectives of gloo
#
# Slices travel point to point, straight to the rank that needs them: gloo's own all-gather and
# reduce-scatter copy everything through internal buffers. ``benchmarks/collectives.py`` compares
# the compositions.

MEAN_BLOCK_NUMEL = 1 << 16

_WATCHED_NBYTES = 1 << 18
"""Size from which a transfer may be under way for a while: see :mod:`shardeddp.comm.transfers`.

Smaller transfers leave and arrive at once.
"""


class GlooCollectives(Collectives):
    """Collectives among the ranks of a gloo group, on CPU tensors."""

    averages = False

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], traffic: Traffic) -> None:
        super().__init__(ranks, dist.get_rank(group), traffic)
        self._group = group
        self._thread = TransferThread()
        # With debug level DETAIL torch compares the operations of ranks, and counts those of
        # `raise_if_closed`, which one rank issues alone.
        is_compared = dist.get_debug_level() is dist.DebugLevel.DETAIL
        self._watches = group is not dist.group.WORLD and not is_compared

    @past_the_front
    def all_gather_(self, buffer: torch.Tensor) -> CollectiveHandle:  # noqa: D102
        self.count("all_gather", buffer.nbytes)
        return self._handle(self._send_own(self._slices(buffer)), keep=(buffer,))

    @past_the_front
    def all_gather_uneven_(self, pieces: Sequence[torch.Tensor]) -> CollectiveHandle:  # noqa: D102
        self.count("all_gather", sum(piece.nbytes for piece in pieces))
        return self._handle(self._send_own(pieces), keep=pieces)

    @past_the_front
    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> CollectiveHandle:  # noqa: D102
        self.count("reduce_scatter", buffer.nbytes)
        before, after = split_mean_factor(buffer, self.size)
        if before != 1.0:
            buffer.mul_(before)
        slices = self._slices(buffer)
        own = slices[self.rank]
        arrived = own.new_empty(self.size - 1, own.numel())  # (peers, numel of a slice)
        works: list[Work] = []
        for row, (target, source) in zip(arrived.unbind(), self._peers(), strict=True):
            works += self._transfer(slices[target], target, row, source)
        return self._handle(
            works, lambda: _scaled_sum(output, own, arrived, after), keep=(*slices, arrived)
        )

    @past_the_front
    def all_reduce_(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> CollectiveHandle:  # noqa: D102
        self.count("all_reduce", tensor.nbytes, passes=2)
        # gloo has no average.
        op = REDUCE_OPS["sum" if kind == "mean" else kind]
        before, after = split_mean_factor(tensor, self.size)
        if kind == "mean" and before != 1.0:
            tensor.mul_(before)
        work = dist.all_reduce(tensor, op=op, group=self._group, async_op=True)

        def divide() -> None:
            tensor.mul_(after)

        return self._handle(_works(work), divide if kind == "mean" else None, keep=(tensor,))

    @past_the_front
    def all_to_all(  # noqa: D102
        self, arriving: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]
    ) -> CollectiveHandle:
        self.count_leaving(leaving)
        works: list[Work] = []
        for target, source in self._peers():
            works += self._transfer(leaving[target], target, arriving[source], source)
        return self._handle(works, keep=(*arriving, *leaving))

    @past_the_front
    def broadcast_(self, tensor: torch.Tensor, source: int) -> CollectiveHandle:  # noqa: D102
        self.count("broadcast", tensor.nbytes)
        work = dist.broadcast(tensor, src=self.ranks[source], group=self._group, async_op=True)
        return self._handle(_works(work), keep=(tensor,))

    def _handle(
        self,
        works: list[Work],
        finish: Callable[[], None] | None = None,
        *,
        keep: Sequence[torch.Tensor],
    ) -> CollectiveHandle:
        is_long = any(tensor.nbytes >= _WATCHED_NBYTES for tensor in keep)
        if works and is_long and self._watches:
            works = [_FailingTransfers(works, self._group, self._thread)]
        return CollectiveHandle(works, finish, keep)

    def _slices(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return buffer.view(self.size, -1).unbind()

    def _peers(self) -> Iterator[tuple[int, int]]:
        """Yield group ranks (to send to, to receive from), a new pair each round: no hot spots."""
        for distance in range(1, self.size):
            yield (self.rank + distance) % self.size, (self.rank - distance) % self.size

    def _send_own(self, slices: Sequence[torch.Tensor]) -> list[Work]:
        works: list[Work] = []
        for target, source in self._peers():
            works += self._transfer(slices[self.rank], target, slices[source], source)
        return works

    def _transfer(
        self, sent: torch.Tensor, target: int, received: torch.Tensor, source: int
    ) -> list[Work]:
        """Send to one group rank and receive from another; empty tensors are skipped."""
        works: list[Work] = []
        if received.numel():
            works += _works(dist.irecv(received, group=self._group, group_src=source))
        if sent.numel():
            works += _works(dist.isend(sent, group=self._group, group_dst=target))
        return works


class _FailingTransfers:
    """Handle of transfers that fail soon after a connection of their group has closed."""

    def __init__(self, works: list[Work], group: dist.ProcessGroup, thread: TransferThread) -> None:
        self._group = group
        self._result: Future[None] = thread.begin(lambda: _wait_for_all(works))

    def wait(self) -> None:
        wait_for(self._result, [self._group])


def _wait_for_all(works: list[Work]) -> None:
    while works:  # each is released on the thread, before a waiter sees the result
        works.pop(0).wait()


def disconnect(group: dist.ProcessGroup) -> None:
    """Fail this rank's transfers in a gloo group, and so those of ranks that wait for it.

    A receive that times out makes gloo do that. Ranks that wait for another rank's transfer would
    otherwise wait until their own timeout.
    """
    for other in range(group.size()):
        if other != group.rank():
            try:
                group.recv([torch.empty(1, device="cpu")], other, NEVER_SENT).wait(
                    timedelta(milliseconds=1)
                )
            except RuntimeError:
                continue  # as intended, or the other one is gone already


def _scaled_sum(
    output: torch.Tensor, own: torch.Tensor, others: torch.Tensor, scale: float
) -> None:
    """Write the sum of 1D ``own`` and the rows of ``others``, times a scale, into ``output``.

    ``output`` may be ``own``. Blocks stay in the processor's cache, so that the sum and the product
    cost one pass over memory.
    """
    for start in range(0, own.numel(), MEAN_BLOCK_NUMEL):
        block = slice(start, start + MEAN_BLOCK_NUMEL)
        total = torch.add(own[block], others[0, block], out=output[block])
        for row in others[1:]:
            total.add_(row[block])
        total.mul_(scale)


def _works(work: Work | None) -> list[Work]:
    return [] if work is None else [work]


# -- Collectives of NCCL

# torch 2.13 renamed both and deprecated the names that 2.11 knows.
_NAMES = vars(dist)
all_gather_single: Callable[..., Work | None] = (
    _NAMES.get("all_gather_single") or _NAMES["all_gather_into_tensor"]
)
reduce_scatter_single: Callable[..., Work | None] = (
    _NAMES.get("reduce_scatter_single") or _NAMES["reduce_scatter_tensor"]
)


class NativeCollectives(Collectives):
    """Collectives of a group with a backend that orders them on streams, as NCCL does.

    They are issued on the current stream and complete in its order, so nothing is left to wait for
    on the host.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], traffic: Traffic) -> None:
        super().__init__(ranks, dist.get_rank(group), traffic)
        self._group = group

    @past_the_front
    def all_gather_(self, buffer: torch.Tensor) -> CollectiveHandle:  # noqa: D102
        self.count("all_gather", buffer.nbytes)
        own = buffer.view(self.size, -1)[self.rank]
        all_gather_single(buffer, own, group=self._group)
        return CollectiveHandle(keep=(buffer,))

    @past_the_front
    def all_gather_uneven_(self, pieces: Sequence[torch.Tensor]) -> CollectiveHandle:  # noqa: D102
        self.count("all_gather", sum(piece.nbytes for piece in pieces))
        # NCCL's all-gather of unequal pieces is a set of broadcasts in one launch.
        dist.all_gather([*pieces], pieces[self.rank], group=self._group)
        return CollectiveHandle(keep=pieces)

    @past_the_front
    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> CollectiveHandle:  # noqa: D102
        self.count("reduce_scatter", buffer.nbytes)
        before, after = split_mean_factor(buffer, self.size)
        if before == 1.0:
            reduce_scatter_single(output, buffer, op=REDUCE_OPS["mean"], group=self._group)
        else:
            reduce_scatter_single(
                output, buffer.mul_(before), op=REDUCE_OPS["sum"], group=self._group
            )
            output.mul_(after)
        return CollectiveHandle(keep=(buffer,))

    @past_the_front
    def all_reduce_(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> CollectiveHandle:  # noqa: D102
        self.count("all_reduce", tensor.nbytes, passes=2)
        before, after = split_mean_factor(tensor, self.size)
        if kind != "mean" or before == 1.0:
            dist.all_reduce(tensor, op=REDUCE_OPS[kind], group=self._group)
        else:
            dist.all_reduce(tensor.mul_(before), op=REDUCE_OPS["sum"], group=self._group)
            tensor.mul_(after)
        return CollectiveHandle(keep=(tensor,))

    @past_the_front
    def all_to_all(  # noqa: D102
        self, arriving: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]
    ) -> CollectiveHandle:
        self.count_leaving(leaving)
        transfers: list[dist.P2POp] = []
        for rank, (here, there) in enumerate(zip(arriving, leaving, strict=True)):
            if rank == self.rank:
                continue
            if here.numel():
                transfers.append(dist.P2POp(dist.irecv, here, group=self._group, group_peer=rank))
            if there.numel():
                transfers.append(dist.P2POp(dist.isend, there, group=self._group, group_peer=rank))
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()  # on the stream, not on the host
        return CollectiveHandle(keep=(*arriving, *leaving))

    @past_the_front
    def broadcast_(self, tensor: torch.Tensor, source: int) -> CollectiveHandle:  # noqa: D102
        self.count("broadcast", tensor.nbytes)
        dist.broadcast(tensor, src=self.ranks[source], group=self._group)
        return CollectiveHandle(keep=(tensor,))
