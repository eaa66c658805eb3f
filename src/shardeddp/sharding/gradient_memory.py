"""GradientMemory: the flat tensors that the gradients of one flat group lie in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardeddp.comm import Mesh
from shardeddp.plan.layout import FlatLayout
from shardeddp.sharding.memory import allocate, empty_on_host, local_view, release


class GradientMemory:
    """One gradient buffer, one gradient shard, and partial sums.

    Args:
        layout: Where parameters lie in the buffer.
        mesh: Through which gradients are reduced.
        main_shard: Of whose dtype, and on whose device, the gradient shard is.
        reduce_dtype: Of the gradient buffer, in which gradients travel.
    """

    def __init__(self, layout: FlatLayout, mesh: Mesh, main_shard: torch.Tensor, reduce_dtype: torch.dtype) -> None:
        self.mesh = mesh
        self.shard: torch.Tensor | None = None
        """1D, shard_numel; made at the first reduction, then kept."""

        self.partial: torch.Tensor | None = None
        """1D, shard_numel; sums of earlier micro-batches that replicas do not share yet."""

        # A rank that owns the whole buffer can pack straight into its gradient shard.
        self.packs_into_shard = (
            layout.shard_size == 1 and reduce_dtype is main_shard.dtype and main_shard.device == mesh.device
        )
        self._layout = layout
        self._main_shard = main_shard
        self._reduce_dtype = reduce_dtype
        self._buffer: torch.Tensor | None = None  # 1D, padded_numel; storage emptied between reductions
        self._buffer_slots: list[torch.Tensor] = []
        self._shard_slots: list[torch.Tensor] = []

    def open_shard(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The gradient shard, and its slots where it is packed into."""
        if self.shard is None:
            on_host = self._main_shard.device != self.mesh.device
            self.shard = (
                empty_on_host(self._main_shard, self.mesh.device) if on_host else torch.empty_like(self._main_shard)
            )
            self.shard.zero_()
            if self.packs_into_shard:
                self._shard_slots = self._slots_of(self.shard)
        return self.shard, self._shard_slots

    def open_buffer(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The gradient buffer, with memory, and its slots."""
        if self._buffer is None:
            self._buffer = torch.empty(self._layout.padded_numel, dtype=self._reduce_dtype, device=self.mesh.device)
            self._buffer_slots = self._slots_of(self._buffer)
        allocate(self._buffer)
        return self._buffer, self._buffer_slots

    def close_buffer(self) -> None:
        """Give the gradient buffer's memory back."""
        if self._buffer is not None:
            release(self._buffer)

    def leave_buffer(self, output: torch.Tensor) -> torch.Tensor:
        """The same elements outside of the gradient buffer, so that it need not wait for the replicas."""
        return output if output is self.shard else output.clone()

    def keep_partial(self, output: torch.Tensor) -> None:
        """Put what has been averaged in the shard group by for a later micro-batch to share."""
        if self.partial is None:
            self.partial = output.to(self._main_shard.dtype, copy=True)
        else:
            self.partial.add_(output)

    def partial_of(self, index: int) -> torch.Tensor:
        """This rank's elements of one parameter in the partial sums, which are zero where nothing was put by; 1D."""
        if self.mesh.topology.split_replicas:
            raise RuntimeError(
                f"the gradient of {self._layout.slots[index].fqn} is not complete before the step's last micro-batch: "
                f'with optimizer_shard="world" and reduce_every_backward=True ranks keep sums of other parts than they '
                f"own until then. Look at it there, or set reduce_every_backward=False"
            )
        if self.partial is None:
            self.partial = torch.zeros_like(self._main_shard, device=self.mesh.device)
        return local_view(self.partial, self._layout, index, self.mesh.slice_rank)

    def holds(self, local: torch.Tensor) -> bool:
        """Whether a tensor is a view of the partial sums."""
        return self.partial is not None and local.untyped_storage()._cdata == self.partial.untyped_storage()._cdata

    def drop_partial_of(self, index: int) -> None:
        """Forget the partial sums of one parameter."""
        if self.partial is not None:
            pieces = self.mesh.replicate.size if self.mesh.topology.split_replicas else 1
            first = self.mesh.slice_rank // pieces * pieces
            for place, piece in enumerate(self.partial.view(pieces, -1)):
                local_view(piece, self._layout, index, first + place).zero_()

    def absorb(self, output: torch.Tensor, kept: Sequence[bool]) -> None:
        """Bring averaged gradients to the gradient shard.

        Args:
            output: 1D, shard_numel.
            kept: By parameter, whether they are added to what is there.
        """
        shard, _ = self.open_shard()
        if output is shard:
            return
        if not any(kept):
            shard.copy_(output, non_blocking=True)
            return
        total = shard.to(output.device, non_blocking=True)  # the shard itself, unless it lives on the host
        if all(kept):
            total.add_(output)
        else:
            for i, keep in enumerate(kept):
                mine, arrived = (local_view(flat, self._layout, i, self.mesh.slice_rank) for flat in (total, output))
                mine.add_(arrived) if keep else mine.copy_(arrived)
        if total is not shard:
            shard.copy_(total, non_blocking=True)

    def _slots_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of every parameter's slot in its shape, then of every stretch of padding."""
        views = [flat[slot.interval.start : slot.interval.stop].view(slot.shape) for slot in self._layout.slots]
        return views + [flat[gap.start : gap.stop] for gap in self._layout.padding_intervals]
