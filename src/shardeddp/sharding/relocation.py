"""Relocation: parameters and gradients on their way from shards to whole tensors at an owner, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardeddp.comm import Mesh
from shardeddp.sharding.shard_tensor import ShardTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Relocated:
    """One sharded tensor that travels between its shards and a whole tensor at its owner."""

    sharded: ShardTensor
    owner: int
    """Among ``mesh.owners``."""

    whole: torch.Tensor | None
    """Of the parameter's shape and dtype; at the owner only."""


def bring(tensors: Sequence[Relocated], mesh: Mesh) -> None:
    """Fill the whole tensors with what the shards hold: one all-to-all, in which each rank sends its shards.

    Args:
        tensors: The same on every rank of ``mesh.owners``, in the same order.
        mesh: Theirs.
    """
    _Exchange(tensors, mesh).bring()


def take_back(tensors: Sequence[Relocated], mesh: Mesh) -> None:
    """Bring what the owners have made of the whole tensors to the shards; the way back of :func:`bring`."""
    _Exchange(tensors, mesh).take_back()


class _Exchange:
    """The pieces that one rank sends to and gets from each other, as bytes, so that dtypes need not be told apart."""

    def __init__(self, tensors: Sequence[Relocated], mesh: Mesh) -> None:
        self._group, self._lane = mesh.owners, mesh.gather_lane
        me, size = self._group.rank, self._group.size
        # By peer: what of its tensors is here, and what of this rank's tensors is there.
        self._here: list[list[torch.Tensor]] = [[] for _ in range(size)]
        self._there: list[list[torch.Tensor]] = [[] for _ in range(size)]
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []  # (of a shard, of a whole), both on this rank
        self._locals = [each.sharded.to_local() for each in tensors]
        for each, local in zip(tensors, self._locals, strict=True):
            if each.owner != me:
                self._here[each.owner].append(local)
                continue
            if each.whole is None:
                raise RuntimeError(f"{each.sharded.spec.fqn} has no whole tensor at its owner")
            flat = each.whole.detach().view(-1)
            for peer, interval in enumerate(each.sharded.spec.intervals):
                part = flat[interval.start : interval.stop]
                if peer != me:
                    self._there[peer].append(part)
                elif part.data_ptr() != local.data_ptr():
                    self._own.append((local, part))

    @torch.no_grad()
    def bring(self) -> None:
        self._run(self._here, self._there)
        for local, part in self._own:
            part.copy_(local)

    @torch.no_grad()
    def take_back(self) -> None:
        self._run(self._there, self._here)
        for local, part in self._own:
            local.copy_(part)

    def _run(self, sources: Sequence[Sequence[torch.Tensor]], targets: Sequence[Sequence[torch.Tensor]]) -> None:
        device = self._locals[0].device if self._locals else torch.device("cpu")
        leaving = [_joined(pieces, device) for pieces in sources]
        arriving = [
            torch.empty(sum(it.nbytes for it in pieces), dtype=torch.uint8, device=device) for pieces in targets
        ]
        self._lane.issue(lambda: self._group.all_to_all(arriving, leaving)).wait()
        for buffer, pieces in zip(arriving, targets, strict=True):
            for arrived, piece in zip(buffer.split([piece.nbytes for piece in pieces]), pieces, strict=True):
                _bytes_of(piece).copy_(arrived)


def _joined(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return (
        torch.cat([_bytes_of(piece) for piece in pieces])
        if pieces
        else torch.empty(0, dtype=torch.uint8, device=device)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)
    )
