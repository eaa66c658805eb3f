"""Reduction of one group's gradients: the tensors they lie in, and the stages in flight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardeddp.comm import CollectiveHandle, CommStream, Mesh, StreamHandle
from shardeddp.engine.storage import (
    RELEASED_MEMORY,
    allocate_storage,
    empty_on_host,
    local_view,
    release_storage,
)
from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.reduction import ReductionPlan, ReductionStage
from shardeddp.torch_private import storage_of


class GradientMemory:
    """One gradient buffer, one gradient shard, and partial sums.

    The gradient shard has the dtype and device of the main shard; the buffer, and the
    reduce-scatter, have ``reduce_dtype``.
    """

    def __init__(
        self, plan: BufferPlan, mesh: Mesh, main_shard: torch.Tensor, reduce_dtype: torch.dtype
    ) -> None:
        self.plan, self.mesh = plan, mesh
        self.shard: torch.Tensor | None = None
        """Gradient shard: 1D, slice_numel; made at the first reduction, and replaced
        (:meth:`drop_shard`) when anything else holds a gradient in it."""

        self.partial: torch.Tensor | None = None
        """Sums of earlier micro-batches before the reduction across replicas.

        1D, padded_numel // shard_size.
        """

        self._layout = plan.layout
        self._main_shard = main_shard
        self._reduce_dtype = reduce_dtype
        # 1D, padded_numel; storage emptied between reductions
        self._buffer: torch.Tensor | None = None
        self._buffer_slots: list[torch.Tensor] = []
        self._shard_slots: list[torch.Tensor] = []

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the gradient buffer's memory; 0 while it is released."""
        return 0 if self._buffer is None else self._buffer.untyped_storage().nbytes()

    def open_shard(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the gradient shard, zero if new, and its slots if gradients are packed into it."""
        if self.shard is None:
            self.shard = (
                empty_on_host(self._main_shard, self.mesh.device)
                if self.plan.on_host
                else torch.empty_like(self._main_shard)
            )
            self.shard.zero_()
            if self.plan.packs_into_shard:
                self._shard_slots = self._slots_of(self.shard)
        return self.shard, self._shard_slots

    def drop_shard(self) -> None:
        """Leave the gradient shard to those who hold gradients in it.

        Compute allocated it, and has waited for all reductions into it at the end of the last
        backward (`ReductionQueue.finish`).
        """
        self.shard = None

    def open_buffer(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the gradient buffer, with memory, and its slots."""
        # The root unit's gradient buffer may set the peak of memory.
        RELEASED_MEMORY.clear(for_nbytes=self._layout.padded_numel * self._reduce_dtype.itemsize)
        if self._buffer is None:
            self._buffer = torch.empty(
                self._layout.padded_numel, dtype=self._reduce_dtype, device=self.mesh.device
            )
            self._buffer_slots = self._slots_of(self._buffer)
        allocate_storage(self._buffer)
        return self._buffer, self._buffer_slots

    def close_buffer(self) -> None:
        """Release the gradient buffer's memory."""
        if self._buffer is not None:
            # Allocated on compute's stream, which waits for the collective that read the buffer
            # (`Reduction._finish_shard_group`): the next tensor in this memory is written after
            # that read.
            release_storage(self._buffer)

    def keep_partial(self, output: torch.Tensor) -> None:
        """Add averages of the shard group to the partial sums, reduced by a later micro-batch."""
        if self.partial is None:
            self.partial = output.to(self._main_shard.dtype, copy=True)
        else:
            self.partial.add_(output)

    def partial_of(self, index: int) -> torch.Tensor:
        """Return this rank's elements of one parameter in the partial sums, 1D; zero if unset.

        Raises:
            RuntimeError: Replicas split shards: the sums are not of the slice that a rank owns.
        """
        if self.mesh.topology.split_replicas:
            raise RuntimeError(
                f"the gradient of {self._layout.slots[index].fqn} is not complete before the "
                f"step's last micro-batch: "
                f'with optimizer_shard="world" and reduce_every_backward=True ranks keep sums of other parts than they '
                f"own until then. Read it after that micro-batch, or set reduce_every_backward=False"
            )
        if self.partial is None:
            self.partial = torch.zeros_like(self._main_shard, device=self.mesh.device)
        return local_view(self.partial, self._layout, index, self.mesh.slice_rank)

    def holds(self, local: torch.Tensor) -> bool:
        """Return whether a tensor is a view of the partial sums."""
        return self.partial is not None and storage_of(local) == storage_of(self.partial)

    def take_partial(self) -> torch.Tensor | None:
        """Return the partial sums and forget them."""
        partial, self.partial = self.partial, None
        return partial

    def drop_partial_of(self, index: int) -> None:
        """Zero the partial sums of one parameter."""
        assert self.partial is not None
        pieces = self.mesh.replicate.size if self.mesh.topology.split_replicas else 1
        first = self.mesh.slice_rank // pieces * pieces
        for offset, piece in enumerate(self.partial.view(pieces, -1)):
            local_view(piece, self._layout, index, first + offset).zero_()

    def absorb(self, output: torch.Tensor, adds_to: Sequence[bool]) -> None:
        """Write averaged gradients to the gradient shard, or add them to it.

        Args:
            output: Averaged gradients; 1D, slice_numel.
            adds_to: Flag per parameter: True to add, False to overwrite.
        """
        shard, _ = self.open_shard()
        if not any(adds_to):
            shard.copy_(output, non_blocking=True)
            return
        # The shard itself; or, if it is on the host, a copy in compute's stream, which adds, copies
        # back and frees it, in that order.
        total = shard.to(output.device, non_blocking=True)
        if all(adds_to):
            total.add_(output)
        else:
            for i, adds in enumerate(adds_to):
                mine, arrived = (
                    local_view(flat, self._layout, i, self.mesh.slice_rank)
                    for flat in (total, output)
                )
                mine.add_(arrived) if adds else mine.copy_(arrived)
        if total is not shard:
            shard.copy_(total, non_blocking=True)

    def _slots_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of every parameter's slot in its shape, then of every padding interval."""
        views = [
            flat[slot.interval.start : slot.interval.stop].view(slot.shape)
            for slot in self._layout.slots
        ]
        return views + [
            flat[padding.start : padding.stop] for padding in self._layout.padding_intervals
        ]


# -- Reductions in flight


class Reduction:
    """Gradient reduction in flight: the stages of its plan; compute waits for each.

    If streams keep the order (:attr:`is_queued`), the constructor issues all stages; else the wait
    for a stage issues the next. The last one writes the gradient shard or the partial sums, unless
    averages are added to gradients in the shard: compute does that once it has waited.

    The wait for the first stage releases the gradient buffer and the earlier partial sums. The wait
    for the last lets the reduce stream, which allocated the output, follow.

    Args:
        plan: Decisions about the reduction.
        memory: Gradient tensors of the group.
        buffer: Packed gradients; 1D, padded_numel.
        output: Output of the reduce-scatter, 1D, padded_numel // shard_size: the gradient shard,
            or a part of the buffer.
        partial: Sums of earlier micro-batches that are reduced across replicas with these
            gradients; 1D, padded_numel // shard_size.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        memory: GradientMemory,
        buffer: torch.Tensor,
        output: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> None:
        self._plan, self._memory, self._output, self._partial = plan, memory, output, partial
        self._stages = plan.stages
        self._buffer: torch.Tensor | None = buffer  # until the shard group has reduced it
        self._issued: dict[ReductionStage, StreamHandle] = {}
        self._issue(0)

    def advance(self) -> bool:
        """Wait for the collective and issue the next; True when the gradient shard is complete.

        If streams keep the order, compute waits for the shard group only. It waits in
        :meth:`finish` for replicas, by far the slowest between nodes, and for copies to the host.
        """
        were_issued = len(self._issued) > 1
        self._finish_shard_group()  # may issue the next stage
        if len(self._stages) == 1:
            return True
        if self.is_queued or not were_issued:
            return False
        self._finish_later_stages()
        return True

    @property
    def is_queued(self) -> bool:
        """Whether all remaining stages are enqueued, in stream order."""
        return len(self._issued) == len(self._stages) > 1 and all(
            handle.is_ordered for handle in self._issued.values()
        )

    @property
    def waiting_nbytes(self) -> int:
        """Bytes besides the gradient shard that wait for replicas or for a copy to the host."""
        waits = len(self._stages) > 1 and self._plan.output_in_buffer
        return self._output.untyped_storage().nbytes() if waits else 0

    def finish(self) -> None:
        """Wait for all stages."""
        self._finish_shard_group()
        if len(self._stages) > 1:
            self._finish_later_stages()

    # -- Stages

    def _issue(self, index: int) -> None:
        stage = self._stages[index]

        def action() -> CollectiveHandle:
            return self._transfer(stage).then(lambda: self._after(index))

        self._issued[stage] = self._stream(stage).issue(action)

    def _stream(self, stage: ReductionStage) -> CommStream:
        mesh = self._memory.mesh
        match stage:
            case ReductionStage.IN_SHARD_GROUP:
                return mesh.reduce_stream
            case ReductionStage.ACROSS_REPLICAS:
                return mesh.replicate_stream
            case ReductionStage.TO_HOST:
                return mesh.copy_out_stream

    def _transfer(self, stage: ReductionStage) -> CollectiveHandle:
        """Issue the collective of a stage; the copy to the host has none."""
        mesh, reduced = self._memory.mesh, self._output
        match stage:
            case ReductionStage.IN_SHARD_GROUP:
                assert self._buffer is not None
                return mesh.reduce.reduce_scatter(reduced, self._buffer)
            case ReductionStage.ACROSS_REPLICAS:
                if not self._plan.divides_output:
                    kind = "mean" if self._plan.scale is None else "sum"
                    return mesh.replicate.all_reduce_(reduced, kind)
                self._output = reduced.view(mesh.replicate.size, -1)[mesh.replicate.rank]
                return mesh.replicate.reduce_scatter(self._output, reduced)
            case ReductionStage.TO_HOST:
                return CollectiveHandle()

    def _after(self, index: int) -> CollectiveHandle:
        """Issue the stage that follows, or write the result of the last one."""
        memory, plan = self._memory, self._plan
        if self._partial is not None and index == 0:
            self._output.add_(self._partial)
        if index + 1 < len(self._stages):
            if index == 0 and plan.output_in_buffer:
                self._output = self._output.clone()  # the buffer does not wait for later stages
            self._issue(index + 1)
        elif plan.keeps_partial:
            memory.keep_partial(self._output)
        elif plan.output_in_buffer and not plan.adds:
            memory.absorb(self._output, plan.adds_to)
        return CollectiveHandle()

    def _finish_shard_group(self) -> None:
        """Wait for the first stage; further calls do nothing."""
        if self._buffer is None:
            return
        self._issued[ReductionStage.IN_SHARD_GROUP].wait()
        if self._plan.adds and len(self._stages) == 1:
            self._memory.absorb(self._output, self._plan.adds_to)
        # Only this collective needed the buffer, and the next reduction may open it. The wait has
        # completed the collective or made compute's stream wait for it, so the next tensor in this
        # memory is written after the read.
        self._buffer = None
        self._memory.close_buffer()
        # Compute may have allocated them (`GradientMemory.partial_of`), and has waited for the
        # reduce stream's read of them now. Or the reduce stream has (`keep_partial`), which
        # followed what compute did with them when this reduction was issued.
        self._partial = None

    def _finish_later_stages(self) -> None:
        """Wait for replicas and for the copy to host memory."""
        for stage in self._stages[1:]:  # the wait for one may issue the next
            self._issued[stage].wait()
        if self._plan.adds:
            self._memory.absorb(self._output, self._plan.adds_to)
        # The reduce stream allocated memory that other streams and compute have used.
        self._memory.mesh.reduce_stream.follow_compute()
