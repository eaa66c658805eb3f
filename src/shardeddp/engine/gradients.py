"""Gradients of a flat group: packed after autograd, reduced, and kept as a gradient shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from shardeddp.comm import CollectiveHandle, Mesh, StreamHandle
from shardeddp.comm.collectives import ReduceKind
from shardeddp.engine.storage import RELEASED_MEMORY, allocate, empty_on_host, local_view, release
from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.memory import HeldMemory
from shardeddp.tensor.backward import (
    running_backward,
    store_gradient,
    store_gradients,
    stored_gradient,
    stored_gradients,
)
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.tensor.unsharded import accumulate_in
from shardeddp.torch_private import foreach_copy_, foreach_zero_, storage_of, without_torch_function

# -- GradientMemory: the flat gradient tensors of one group


class GradientMemory:
    """One gradient buffer, one gradient shard, and partial sums.

    Args:
        layout: Layout of the parameters in the buffer.
        mesh: Process groups and streams of the reductions.
        main_shard: Main shard; the gradient shard has its dtype and device.
        reduce_dtype: Dtype of the gradient buffer and of the reduce-scatter.
    """

    def __init__(
        self, layout: FlatLayout, mesh: Mesh, main_shard: torch.Tensor, reduce_dtype: torch.dtype
    ) -> None:
        self.mesh = mesh
        self.shard: torch.Tensor | None = None
        """Gradient shard: 1D, shard_numel; made at the first reduction, and replaced when
        anything else holds a gradient in it."""

        self.partial: torch.Tensor | None = None
        """Sums of earlier micro-batches before the reduction across replicas; 1D, shard_numel."""

        # A rank that owns the whole buffer can pack straight into its gradient shard.
        self.packs_into_shard = (
            layout.num_slices == 1
            and reduce_dtype is main_shard.dtype
            and main_shard.device == mesh.device
        )
        self._layout = layout
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
                if self.is_on_host
                else torch.empty_like(self._main_shard)
            )
            self.shard.zero_()
            if self.packs_into_shard:
                self._shard_slots = self._slots_of(self.shard)
        return self.shard, self._shard_slots

    def open_buffer(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the gradient buffer, with memory, and its slots."""
        # The root unit's gradient buffer may set the peak of memory.
        RELEASED_MEMORY.clear(for_nbytes=self._layout.padded_numel * self._reduce_dtype.itemsize)
        if self._buffer is None:
            self._buffer = torch.empty(
                self._layout.padded_numel, dtype=self._reduce_dtype, device=self.mesh.device
            )
            self._buffer_slots = self._slots_of(self._buffer)
        allocate(self._buffer)
        return self._buffer, self._buffer_slots

    def close_buffer(self) -> None:
        """Release the gradient buffer's memory."""
        if self._buffer is not None:
            # Allocated on compute's stream, which waits for the collective that read the buffer
            # (`Reduction._advance`): the next tensor in this memory is written after that read.
            release(self._buffer)

    @property
    def is_on_host(self) -> bool:
        """Whether the gradient shard is in host memory while another device computes."""
        return self._main_shard.device != self.mesh.device

    def leave_buffer(self, output: torch.Tensor) -> torch.Tensor:
        """Copy the output of a reduce-scatter, so that the buffer does not wait for replicas."""
        return output if output is self.shard else output.clone()

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

    def drop_partial_of(self, index: int) -> None:
        """Zero the partial sums of one parameter."""
        assert self.partial is not None
        pieces = self.mesh.replicate.size if self.mesh.topology.split_replicas else 1
        first = self.mesh.slice_rank // pieces * pieces
        for offset, piece in enumerate(self.partial.view(pieces, -1)):
            local_view(piece, self._layout, index, first + offset).zero_()

    def absorb(self, output: torch.Tensor, kept: Sequence[bool]) -> None:
        """Write averaged gradients to the gradient shard, or add them to it.

        Args:
            output: Averaged gradients; 1D, shard_numel.
            kept: Flag per parameter: True to add, False to overwrite.
        """
        shard, _ = self.open_shard()
        if output is shard:
            return
        if not any(kept):
            shard.copy_(output, non_blocking=True)
            return
        # The shard itself, unless it is offloaded to the host.
        total = shard.to(output.device, non_blocking=True)
        if all(kept):
            total.add_(output)
        else:
            for i, keep in enumerate(kept):
                mine, arrived = (
                    local_view(flat, self._layout, i, self.mesh.slice_rank)
                    for flat in (total, output)
                )
                mine.add_(arrived) if keep else mine.copy_(arrived)
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


# -- Reduction: one group's gradients in flight
#
# First in the shard group, then across replicas.


class ReduceTarget(Enum):
    """Destination of the gradients of a reduction."""

    IN_SHARD = "in_shard"
    """Gradient shard; there are no replicas."""

    ACROSS_REPLICAS = "across_replicas"
    """Gradient shard, after an average over replicas."""

    IN_PARTIAL_SUMS = "in_partial_sums"
    """Partial sums, which a later micro-batch reduces across replicas."""


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """Decisions about one reduction, made before its gradients are packed."""

    target: ReduceTarget
    kept: Sequence[bool]
    """Flag per parameter: True to add to its gradient in the gradient shard, False to overwrite."""

    packs_into_shard: bool
    """True if gradients are packed into the gradient shard; False: into the gradient buffer."""

    leaves_output: bool
    """True if the output of the reduce-scatter stays in this rank's slice of the buffer.

    It is added to the shard, changes dtype or device, or is divided among replicas. False: the
    output is the gradient shard.
    """

    scale: float | None
    """Factor of gradients while they are packed, so that a sum over replicas is their average.

    None: no factor; replicas average.
    """

    @property
    def adds(self) -> bool:
        """True if averages are added to gradients in the shard.

        Compute may add to the shard at any time (gradients of parameters used outside of their
        unit). Additions of a reduction run on compute's stream, too: on the reduce stream they
        would race.
        """
        return self.target is not ReduceTarget.IN_PARTIAL_SUMS and any(self.kept)

    @property
    def kind(self) -> ReduceKind:
        """Reduction operation across replicas."""
        return "mean" if self.scale is None else "sum"


class Reduction:
    """Gradient reduction in flight: in the shard group first, then across replicas.

    Args:
        plan: Decisions about the reduction.
        memory: Gradient tensors of the group.
        buffer: Packed gradients; 1D, padded_numel.
        output: Output of the reduce-scatter, 1D, shard_numel: the gradient shard, or a slice of
            the buffer.
        partial: Sums of earlier micro-batches that are reduced across replicas with these
            gradients; 1D, shard_numel.
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
        self._in_buffer = True
        # Later stages in other streams, once issued: across replicas, then to host memory.
        self._following: list[StreamHandle] = []
        mesh = memory.mesh

        def action() -> CollectiveHandle:
            return mesh.reduce.reduce_scatter(output, buffer).then(self._after_shard_group)

        self._handle: StreamHandle = mesh.reduce_stream.issue(action)

    def advance(self) -> bool:
        """Wait for the collective and issue the next; True when the gradient shard is complete.

        If streams keep the order, compute waits for the shard group only. It waits in
        :meth:`finish` for replicas, by far the slowest between nodes, and for copies to the host.
        """
        return self._advance(waits=False)

    @property
    def is_queued(self) -> bool:
        """Whether all remaining stages are enqueued, in stream order."""
        return bool(self._following) and self._following[0].is_ordered

    @property
    def waiting_nbytes(self) -> int:
        """Bytes besides the gradient shard that wait for replicas or for a copy to the host."""
        waits = bool(self._following) and self._output is not self._memory.shard
        return self._output.untyped_storage().nbytes() if waits else 0

    def finish(self) -> None:
        """Wait for all stages."""
        while not self._advance(waits=True):
            pass

    def _advance(self, waits: bool) -> bool:
        following = self._following.copy()
        if self._in_buffer or not self._handle.is_ordered:  # compute waits for the first only once
            self._handle.advance()  # may issue the next stages
        if self._in_buffer and not self._following and self._plan.adds:
            self._memory.absorb(self._output, self._plan.kept)
        if self._in_buffer:
            # Only the first collective needed the buffer, and another reduction may have opened it
            # since. `advance` has completed the collective or made compute's stream wait for it, so
            # the next tensor in this memory is written after the read.
            self._in_buffer = False
            self._memory.close_buffer()
            # Compute may have allocated them (`GradientMemory.partial_of`), and has waited for the
            # reduce stream's read of them now.
            self._partial = None
        if not self._following:
            return True
        if not following or (following[0].is_ordered and not waits):
            return False
        following[0].wait()  # may issue the copy to host memory
        for copied in self._following[1:]:
            copied.wait()
        if self._plan.adds:
            self._memory.absorb(self._output, self._plan.kept)
        # The reduce stream allocated memory that other streams and compute have used.
        self._memory.mesh.reduce_stream.follow_compute()
        return True

    def _after_shard_group(self) -> CollectiveHandle:
        memory = self._memory
        if self._plan.target is ReduceTarget.IN_PARTIAL_SUMS:
            memory.keep_partial(self._output)
        elif self._plan.target is ReduceTarget.ACROSS_REPLICAS:
            if self._partial is not None:
                self._output.add_(self._partial)
            self._output = memory.leave_buffer(self._output)
            self._following.append(
                memory.mesh.replicate_stream.issue(
                    lambda: self._reduce_across_replicas().then(self._after_replicas)
                )
            )
        elif not self._plan.adds:
            if memory.is_on_host:
                self._output = memory.leave_buffer(self._output)
            self._absorb()
        return CollectiveHandle()

    def _reduce_across_replicas(self) -> CollectiveHandle:
        replicate, summed = self._memory.mesh.replicate, self._output
        if not self._memory.mesh.topology.split_replicas:
            return replicate.all_reduce_(summed, self._plan.kind)
        self._output = summed.view(replicate.size, -1)[replicate.rank]
        return replicate.reduce_scatter(self._output, summed)

    def _after_replicas(self) -> CollectiveHandle:
        if not self._plan.adds:
            self._absorb()
        return CollectiveHandle(keep=(self._output,))

    def _absorb(self) -> None:
        """Write averages to the gradient shard; on the copy stream if it is in host memory."""
        memory, output, kept = self._memory, self._output, self._plan.kept
        if not memory.is_on_host:
            memory.absorb(output, kept)
            return

        def action() -> CollectiveHandle:
            memory.absorb(output, kept)
            return CollectiveHandle()

        self._following.append(memory.mesh.copy_out_stream.issue(action))


# -- GroupGradients: packing, reduction and the gradient shard of one group


class GroupGradients:
    """Gradients of a flat group, from autograd to the parameters' ``.grad``.

    Args:
        layout: Layout of the parameters in the buffer.
        mesh: Process groups and streams of the reductions.
        main_shard: Main shard; the gradient shard has its dtype and device.
        param_dtype: Dtype of the gradients that autograd leaves.
        reduce_dtype: Dtype of the gradient buffer and of the reduce-scatter.
        unsharded: Parameters on which autograd leaves gradients, in layout order.
        sharded: User's parameters, which get a ``.grad``; in the same order.
    """

    def __init__(
        self,
        layout: FlatLayout,
        mesh: Mesh,
        *,
        main_shard: torch.Tensor,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        unsharded: Sequence[nn.Parameter],
        sharded: Sequence[ShardTensor],
    ) -> None:
        self._layout = layout
        self._mesh = mesh
        self._memory = GradientMemory(layout, mesh, main_shard, reduce_dtype)
        self._main_dtype = main_shard.dtype
        self._param_dtype = param_dtype
        self._reduce_dtype = reduce_dtype
        self._unsharded = unsharded
        self._sharded = sharded
        self._views: list[ShardTensor] = []  # over the gradient shard, in layout order
        # Whole gradients of uses outside of the unit, by parameter.
        self._outside: dict[int, torch.Tensor] = {}
        self.assigned: set[int] = set()
        """Indices of parameters with a gradient assigned by users since the last backward."""

        self.kept_by_others = False
        """Whether an optimizer may hold local gradients that no reference count shows."""
        self._on_outside: Callable[[int], None] | None = None
        # Per parameter: its gradient went into a reduction since the backward began.
        self._packed = [False] * len(unsharded)
        self._reduced = False  # whether there was a reduction since the backward began
        self._reduced_by: int | None = None  # number of the backward of the last reduction
        # Per parameter: its sum in the shard counts even without a `.grad`, until ranks agree.
        self._summed = [False] * len(unsharded)
        self._partly_used = [False] * len(unsharded)  # per parameter: it is in the partial sums
        # Whether the last backward has left gradients for a later one to complete, and whether
        # those are sums of the shard group.
        self._is_incomplete = self._sums_are_shared = False

    @property
    def shard(self) -> torch.Tensor | None:
        """Gradient shard: 1D, shard_numel; None before the first reduction."""
        return self._memory.shard

    def held(self) -> HeldMemory:
        """Return the bytes of gradients now held on the device."""
        memory = self._memory
        shards = [it for it in (memory.shard, memory.partial) if it is not None]
        left = [it for it in stored_gradients(self._unsharded) if it is not None]
        return HeldMemory(
            gradient_nbytes=0 if memory.is_on_host else sum(it.nbytes for it in shards),
            in_flight_nbytes=memory.buffer_nbytes + sum(it.nbytes for it in left),
        )

    def attach(self, on_outside: Callable[[int], None]) -> None:
        """Reduce gradients of outside uses as well, from now on.

        Args:
            on_outside: Function called with the index of the parameter when a gradient arrives.
        """
        self._on_outside = on_outside
        for index, parameter in enumerate(self._sharded):
            parameter.take_part(self, index)

    # -- Gradients of a backward

    def begin_backward(self) -> None:
        """Reset the flags of reduced gradients."""
        self._packed = [False] * len(self._packed)
        self._reduced = False

    def take_assigned(self, reduces: bool) -> None:
        """Add gradients that users have assigned to those of the running backward.

        Args:
            reduces: True if this backward's gradients are reduced; False if they stay whole and
                this rank's own.
        """
        assigned, self.assigned = sorted(self.assigned), set()
        for index in assigned:
            found = stored_gradient(self._sharded[index])
            if found is None or (self._views and found is self._views[index]):
                continue
            if not isinstance(found, ShardTensor):
                self._add_outside(index, found.to(self._mesh.device))
            elif not reduces or self._mesh.topology.split_replicas:
                self._add_outside(index, found.full_tensor())
            elif self._mesh.has_replicas:
                self._memory.partial_of(index).add_(found.to_local().to(self._mesh.device))
                self._partly_used[index] = True
            else:
                continue  # the average is added to it
            store_gradient(self._sharded[index], None)

    @property
    def adds_up_wider(self) -> bool:
        """Whether sums of gradients are kept in another dtype than single gradients."""
        return self._param_dtype not in (self._reduce_dtype, self._main_dtype)

    def add_up(self) -> None:
        """Let autograd add up gradients in their reduce dtype, as without a ``param_dtype``."""
        if self.adds_up_wider:
            for unsharded in self._unsharded:
                accumulate_in(unsharded, self._reduce_dtype)

    def arrives(self, index: int) -> None:
        """Cast an existing gradient to the reduce dtype before autograd adds another one.

        Several backwards reach a parameter one after the other (micro-batches, a retained graph) or
        one inside the other (reentrant checkpointing). Within one backward autograd adds up before
        this call, so :meth:`add_up` must have been called.
        """
        if stored_gradient(self._unsharded[index]) is not None:
            accumulate_in(self._unsharded[index], self._reduce_dtype)

    def take_local(self, index: int, gradient: torch.Tensor) -> bool:
        """Take a tensor assigned to ``.grad`` during a backward as this rank's gradient so far.

        The backward of a custom function may assign a gradient that it does not return. It replaces
        this rank's gradient, and autograd adds to it.

        Returns:
            True if it is taken: a backward is running, and has not reduced the gradients yet.
        """
        running = running_backward()
        if running is None or running == self._reduced_by:
            return False
        self.drop(index, None)
        self.add_outside(index, gradient)
        return True

    def add_outside(self, index: int, gradient: torch.Tensor) -> None:
        """Take this rank's gradient of an outside use, to reduce it with the unit's.

        Args:
            index: Index of the parameter.
            gradient: Local gradient, not averaged, in the shape of the parameter.

        Raises:
            RuntimeError: The parameter belongs to experts: each rank would count only its batch.
        """
        if self._mesh is not self._mesh.whole:
            raise RuntimeError(
                f"{self._layout.slots[index].fqn} belongs to experts that other ranks do not have, "
                f"and was used outside of its unit while gradients are recorded: its gradient would "
                f"leave out their batches. Use it under torch.no_grad(), and weight decay of the "
                f"optimizer in place of a penalty"
            )
        self._add_outside(index, gradient)
        if self._on_outside is not None:
            self._on_outside(index)

    def _add_outside(self, index: int, gradient: torch.Tensor) -> None:
        cut = self._sharded[index].spec.cut(gradient)
        self._add_own(index, cut.view(self._layout.slots[index].shape))

    def _add_own(self, index: int, gradient: torch.Tensor) -> None:
        former = self._outside.get(index)
        # Not in place: the gradient may belong to the user.
        self._outside[index] = gradient if former is None else former + gradient

    def leave_incomplete(self, reduces: bool) -> None:
        """Merge gradients of earlier steps into the incomplete gradients of a backward.

        Gradients of earlier steps are equal on all ranks, so their average is right only if every
        rank merges them, even if it neither used the parameter nor reads its gradient. If a merge
        needs a gather, it is deferred to the first read.

        Args:
            reduces: True if the backward has averaged gradients in the shard group; False if they
                are this rank's own.
        """
        topology = self._mesh.topology
        if reduces and not self._mesh.has_replicas:
            return  # the reduction has added to the gradients of earlier steps
        self._is_incomplete, self._sums_are_shared = True, reduces
        if topology.split_replicas if reduces else self._layout.num_slices > 1:
            return
        for index, former in enumerate(stored_gradients(self._sharded)):
            if former is not None and self.has_former(index):
                self.take_former(index)

    def complete(self) -> None:
        """Mark the gradients as complete."""
        self._is_incomplete = self._sums_are_shared = False

    def has_former(self, index: int) -> bool:
        """Return whether a gradient of an earlier step must be merged into an incomplete one."""
        sharded = self._sharded[index]
        if not isinstance(stored_gradient(sharded), ShardTensor):
            return False
        joins = self._is_incomplete and sharded.requires_grad and index not in self.assigned
        return joins or self.is_unreduced(index)

    def take_former(self, index: int) -> None:
        """Merge a parameter's gradient of an earlier step into its incomplete gradient.

        Both are then read, written and dropped as one. The former gradient is equal on all ranks,
        and so is its average.
        """
        former = stored_gradient(self._sharded[index])
        assert isinstance(former, ShardTensor)
        local = former.to_local().to(self._mesh.device)
        if self._sums_are_shared or self._partly_used[index]:
            self._memory.partial_of(index).add_(local)
            self._partly_used[index] = True
        elif self._layout.num_slices == 1:
            self._add_own(index, local.clone().view(self._layout.slots[index].shape))
        else:
            self._add_outside(index, former.full_tensor().to(self._mesh.device))
        store_gradient(self._sharded[index], None)
        self._summed[index] = False  # or the next reduction would count the shard's sum again

    def unreduced(self, index: int) -> torch.Tensor | None:
        """Return a parameter's gradient so far, before a later micro-batch completes it.

        It is this rank's own, whole; or, if micro-batches are reduced in the shard group, their
        average so far, sharded. None if there is neither.
        """
        gradient, outside = stored_gradient(self._unsharded[index]), self._outside.pop(index, None)
        if outside is not None:
            gradient = outside if gradient is None else gradient + outside
            accumulate_in(self._unsharded[index], gradient.dtype)
            store_gradient(self._unsharded[index], gradient)
        if gradient is not None and gradient.dtype is not self._main_dtype:
            # Gradients of autocast copies have autocast's dtype; users expect the parameter's.
            accumulate_in(self._unsharded[index], self._main_dtype)
            gradient = stored_gradient(self._unsharded[index])
        if gradient is None and self._memory.partial is not None and self._partly_used[index]:
            gradient = ShardTensor(self._memory.partial_of(index), self._sharded[index].spec)
        return gradient

    def drop(self, index: int, successor: torch.Tensor | None) -> None:
        """Drop a parameter's incomplete gradient.

        Args:
            index: Index of the parameter.
            successor: Next gradient; cloned if it is a view of the partial sums.
        """
        if isinstance(successor, ShardTensor) and self._memory.holds(successor.to_local()):
            successor.move_to(successor.to_local().clone())
        store_gradient(self._unsharded[index], None)
        self._outside.pop(index, None)
        self._summed[index] = False
        if self._memory.partial is not None:
            # Even if this rank has not used it: the sums include other ranks of the shard group.
            self._memory.drop_partial_of(index)
        self._partly_used[index] = False

    def is_unreduced(self, index: int) -> bool:
        """Return whether a parameter has a gradient that a later micro-batch completes."""
        return (
            stored_gradient(self._unsharded[index]) is not None
            or index in self._outside
            or self._partly_used[index]
        )

    def used(self) -> list[bool]:
        """Return per parameter whether this rank has a gradient.

        It awaits reduction, was packed in this backward, or is in partial sums.
        """
        return [
            packed or partly or waits
            for packed, partly, waits in zip(
                self._packed, self._partly_used, self._waiting(), strict=True
            )
        ]

    @property
    def has_partial_sums(self) -> bool:
        """Whether earlier micro-batches have left sums that are not reduced across replicas."""
        return any(self._partly_used)

    def waiting(self) -> bool:
        """Return whether autograd has left a gradient that is not in a reduction yet."""
        return any(self._waiting())

    def _waiting(self) -> list[bool]:
        left = [gradient is not None for gradient in stored_gradients(self._unsharded)]
        for index in self._outside:
            left[index] = True
        return left

    def sums(self) -> list[bool]:
        """Return per parameter whether gradients of earlier micro-batches wait for the last one."""
        return [
            summed or partly for summed, partly in zip(self._summed, self._partly_used, strict=True)
        ]

    def keep_sums(self, keep: bool) -> None:
        """Set whether the next reduction adds to this backward's sums without a ``.grad``, too."""
        if not keep:
            self._summed = [False] * len(self._summed)
        elif self._reduced and not self._mesh.has_replicas:
            # A gradient in other memory already includes the sum so far.
            found = zip(stored_gradients(self._sharded), self._views, strict=True)
            self._summed = [gradient is None or gradient is view for gradient, view in found]
            self._reduced = False  # or a late agreement would restore a sum that users dropped

    def drop_waiting(self) -> None:
        """Drop gradients that have not been reduced."""
        store_gradients(self._unsharded, [None] * len(self._unsharded))
        self._outside = {}
        self._forget_partial()

    # -- Reduction

    def reduce(self, across_replicas: bool) -> Reduction:
        """Pack and drop the unsharded gradients; issue their averaging into the gradient shard.

        Args:
            across_replicas: True to average the shard group's sums over replicas now; False to
                leave that to a later micro-batch.
        """
        with without_torch_function():
            kept = self._kept()
            if self._memory.shard is None or self._are_held(kept):
                kept = self._renew_shard()
            plan = self._plan(self._target(across_replicas), kept)
            shard, slots = self._memory.open_shard()
            self._reduced, self._reduced_by = True, running_backward()
            buffer = shard
            if not plan.packs_into_shard:
                buffer, slots = self._memory.open_buffer()
            self._pack(slots, plan.scale)
        if plan.target is ReduceTarget.IN_PARTIAL_SUMS:
            self._partly_used = [
                any(flags) for flags in zip(self._partly_used, self._packed, strict=True)
            ]
        partial = self._take_partial() if plan.target is ReduceTarget.ACROSS_REPLICAS else None
        output = shard
        if plan.leaves_output:
            output = buffer.view(self._mesh.reduce.size, -1)[self._mesh.shard_rank]
        return Reduction(plan, self._memory, buffer, output, partial)

    def _plan(self, target: ReduceTarget, kept: Sequence[bool]) -> ReductionPlan:
        memory, replicate = self._memory, self._mesh.replicate
        accumulates = any(kept) or target is ReduceTarget.IN_PARTIAL_SUMS
        packs_into_shard = memory.packs_into_shard and not accumulates
        # A shard group of one rank reduces the packed gradients across replicas directly, so the
        # division of the average can be fused with packing. In a narrower dtype the product would
        # be rounded, but a copy is exact.
        scales = (
            packs_into_shard
            and target is ReduceTarget.ACROSS_REPLICAS
            and not replicate.averages
            and not self.has_partial_sums
            and self._param_dtype is self._reduce_dtype
        )
        return ReductionPlan(
            target=target,
            kept=kept,
            packs_into_shard=packs_into_shard,
            leaves_output=accumulates
            or self._mesh.topology.split_replicas
            or self._main_dtype is not self._reduce_dtype
            or memory.is_on_host,
            scale=1.0 / replicate.size if scales else None,
        )

    def _kept(self) -> list[bool]:
        """Return per parameter whether the reduction adds to its former gradient."""
        if not self._views:
            return [False] * len(self._sharded)
        found = zip(stored_gradients(self._sharded), self._views, self._summed, strict=True)
        return [self._reduced or summed or gradient is mine for gradient, mine, summed in found]

    def _are_held(self, kept: Sequence[bool]) -> bool:
        """Return whether users or an optimizer hold a former gradient that would be overwritten."""
        if self._reduced:
            return False
        references = list(map(sys.getrefcount, self._views))
        if max(references) == _IN_A_LIST:
            return self.kept_by_others
        return self.kept_by_others or any(
            count > _IN_A_LIST and not keep for count, keep in zip(references, kept, strict=True)
        )

    def _renew_shard(self) -> list[bool]:
        """Allocate a new gradient shard; holders of gradients in the old one keep its memory.

        A gradient that is still a parameter's `.grad` stays in the old memory, too: holders of it
        or of a view of it must see later additions.

        Returns:
            Flag per parameter: True if its sum, which no `.grad` has, was copied.
        """
        self.kept_by_others = False
        self._memory.shard = None
        shard, _ = self._memory.open_shard()
        former, self._views = self._views, self._views_of(shard)
        kept = [False] * len(self._sharded)
        if any(self._summed):
            for i, gradient in enumerate(stored_gradients(self._sharded)):
                if self._summed[i] and gradient is None:
                    self._views[i].to_local().copy_(former[i].to_local())
                    kept[i] = True
        return kept

    def _take_partial(self) -> torch.Tensor | None:
        """Take the partial sums of earlier micro-batches; their parameters count as packed."""
        partial = self._memory.partial
        self._packed = [any(flags) for flags in zip(self._packed, self._partly_used, strict=True)]
        self._forget_partial()
        return partial

    def _target(self, across_replicas: bool) -> ReduceTarget:
        if not self._mesh.has_replicas:
            return ReduceTarget.IN_SHARD
        return ReduceTarget.ACROSS_REPLICAS if across_replicas else ReduceTarget.IN_PARTIAL_SUMS

    def install(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of the parameters that any rank has used, if there was a reduction."""
        if not any(used) or not (self._reduced or any(self._summed)):
            return
        gradients = stored_gradients(self._sharded)
        with without_torch_function():
            for i, (sharded, view) in enumerate(zip(self._sharded, self._views, strict=True)):
                found = gradients[i]
                if not used[i] or found is view or not (self._reduced or self._summed[i]):
                    continue
                if isinstance(found, ShardTensor) and found.spec is sharded.spec:
                    # A gradient in other memory, or one that the user assigned. Its holders see
                    # the sum, as in DDP.
                    found.to_local().add_(view.to_local())
                    continue
                if found is not None:
                    mine = view.to_local()
                    mine.add_(sharded.spec.localize(found).to(mine.device))
                gradients[i] = view
        store_gradients(self._sharded, gradients)

    def added_to(self) -> list[bool]:
        """Return per parameter whether :meth:`install` would add to a gradient in other memory."""
        if not self._reduced:
            return [False] * len(self._sharded)
        found = zip(stored_gradients(self._sharded), self._views, strict=True)
        return [gradient is not None and gradient is not view for gradient, view in found]

    def _pack(self, slots: Sequence[torch.Tensor], scale: float | None) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        empty: list[torch.Tensor] = []
        outside, self._outside = self._outside, {}
        left = stored_gradients(self._unsharded)
        for i, (slot, gradient) in enumerate(zip(slots, left, strict=False)):
            if gradient is None:
                gradient = outside.pop(i, None)
            if gradient is None:
                empty.append(slot)
                continue
            self._packed[i] = True
            targets.append(slot)
            sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        store_gradients(self._unsharded, [None] * len(left))
        empty += slots[len(self._unsharded) :]  # padding
        if empty:
            foreach_zero_(empty)
        if scale is not None:
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, scale, out=target)
        elif targets:
            foreach_copy_(targets, sources)
        for i, gradient in outside.items():
            slots[i].add_(gradient, alpha=1.0 if scale is None else scale)

    def _forget_partial(self) -> None:
        self._memory.partial = None
        self._partly_used = [False] * len(self._unsharded)

    def _views_of(self, shard: torch.Tensor) -> list[ShardTensor]:
        return [
            ShardTensor(local_view(shard, self._layout, i, self._mesh.slice_rank), sharded.spec)
            for i, sharded in enumerate(self._sharded)
        ]


_IN_A_LIST = next(map(sys.getrefcount, [torch.empty(0, device="cpu")]))
"""Python reference count of a tensor that only a list refers to."""
