"""Reduction: one group's packed gradients on their way, in the shard group first, then across replicas."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from shardeddp.comm import Pending, Ticket
from shardeddp.comm.collectives import ReduceKind
from shardeddp.sharding.gradient_memory import GradientMemory


class Arrival(Enum):
    """Where the gradients of a reduction go."""

    IN_SHARD = "in_shard"
    """To the gradient shard: nobody else holds an equal one."""

    SHARED = "shared"
    """To the gradient shard, averaged over replicas."""

    IN_PARTIAL_SUMS = "in_partial_sums"
    """To sums that a later micro-batch shares with the replicas."""


class Reduction:
    """A gradient reduction that has been issued: in the shard group first, then across replicas.

    Args:
        memory: Where they lie.
        buffer: 1D, padded_numel; their packed gradients.
        output: 1D, shard_numel; where averages arrive: the gradient shard, or a slice of the buffer.
        arrival: Where they go from there.
        kept: By parameter, whether earlier gradients in the gradient shard are added to.
        partial: 1D, shard_numel; sums of earlier micro-batches that are shared with these gradients.
        kind: What the replicas make of theirs.
    """

    def __init__(
        self,
        memory: GradientMemory,
        buffer: torch.Tensor,
        output: torch.Tensor,
        arrival: Arrival,
        kept: Sequence[bool],
        partial: torch.Tensor | None,
        kind: ReduceKind,
    ) -> None:
        self._partial = partial
        self._kind: ReduceKind = kind
        self._memory, self._output, self._arrival, self._kept = memory, output, arrival, kept
        # A gradient that autograd leaves on a parameter used outside its unit may be added to the shard at any time.
        # On compute's stream that is in order with what is added here, on the lane it would not be.
        self._adds = arrival is not Arrival.IN_PARTIAL_SUMS and any(kept)
        self._in_buffer = True
        mesh = memory.mesh

        def action() -> Pending:
            return mesh.reduce.reduce_scatter(output, buffer).then(self._arrived)

        self._ticket: Ticket = mesh.reduce_lane.issue(action)

    def advance(self) -> bool:
        """Wait for the collective under way and issue the next; True when the gradient shard is complete."""
        more = self._ticket.advance()
        if not more and self._adds:
            self._memory.absorb(self._output, self._kept)
        if self._in_buffer:
            # Only the first collective needed it, and another reduction may have opened it since.
            self._in_buffer = False
            self._memory.close_buffer()
        return not more

    def finish(self) -> None:
        """Wait for all of them."""
        while not self.advance():
            pass

    def _arrived(self) -> Pending:
        memory = self._memory
        if self._arrival is Arrival.IN_PARTIAL_SUMS:
            memory.keep_partial(self._output)
        elif self._arrival is Arrival.SHARED:
            if self._partial is not None:
                self._output.add_(self._partial)
                self._partial = None
            self._output = memory.leave_buffer(self._output)
            return self._share().then(self._shared)
        elif not self._adds:
            memory.absorb(self._output, self._kept)
        return Pending()

    def _share(self) -> Pending:
        mesh, shared = self._memory.mesh, self._output
        if not mesh.topology.split_replicas:
            return mesh.replicate.all_reduce_(shared, self._kind)
        self._output = shared.view(mesh.replicate.size, -1)[mesh.replicate.rank]
        return mesh.replicate.reduce_scatter(self._output, shared)

    def _shared(self) -> Pending:
        if not self._adds:
            self._memory.absorb(self._output, self._kept)
        return Pending(keep=(self._output,))
