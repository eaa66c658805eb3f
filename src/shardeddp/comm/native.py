"""Collectives that a backend does best by itself (NCCL)."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardeddp.comm.collectives import REDUCE_OPS, Collectives, Pending, ReduceKind, Work
from shardeddp.comm.traffic import Traffic

# torch 2.13 renamed both and deprecated the names that 2.11 knows.
_NAMES = vars(dist)
_all_gather: Callable[..., Work | None] = _NAMES.get("all_gather_single") or _NAMES["all_gather_into_tensor"]
_reduce_scatter: Callable[..., Work | None] = _NAMES.get("reduce_scatter_single") or _NAMES["reduce_scatter_tensor"]


class NativeCollectives(Collectives):
    """Collectives among the ranks of a group whose backend orders them on streams.

    They are issued on the current stream and complete in its order, so nothing is left to wait for on the host.

    Args:
        group: The process group.
        ranks: Its global ranks, ascending.
        traffic: Where bytes are counted.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], traffic: Traffic) -> None:
        super().__init__(ranks, dist.get_rank(group), traffic)
        self._group = group

    def all_gather_(self, buffer: torch.Tensor) -> Pending:  # noqa: D102
        self.count("all_gather", buffer.nbytes)
        own = buffer.view(self.size, -1)[self.rank]
        _all_gather(buffer, own, group=self._group)
        return Pending(keep=(buffer,))

    def all_gather_uneven_(self, pieces: Sequence[torch.Tensor]) -> Pending:  # noqa: D102
        self.count("all_gather", sum(piece.nbytes for piece in pieces))
        for source, piece in enumerate(pieces):
            if piece.numel():
                dist.broadcast(piece, src=self.ranks[source], group=self._group)
        return Pending(keep=pieces)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:  # noqa: D102
        self.count("reduce_scatter", buffer.nbytes)
        _reduce_scatter(output, buffer, op=REDUCE_OPS["mean"], group=self._group)
        return Pending(keep=(buffer,))

    def all_reduce_(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> Pending:  # noqa: D102
        self.count("all_reduce", tensor.nbytes, passes=2)
        dist.all_reduce(tensor, op=REDUCE_OPS[kind], group=self._group)
        return Pending(keep=(tensor,))

    def all_to_all(self, arriving: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]) -> Pending:  # noqa: D102
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
        return Pending(keep=(*arriving, *leaving))

    def broadcast_(self, tensor: torch.Tensor, source: int) -> Pending:  # noqa: D102
        self.count("broadcast", tensor.nbytes)
        dist.broadcast(tensor, src=self.ranks[source], group=self._group)
        return Pending(keep=(tensor,))
