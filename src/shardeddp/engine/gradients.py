"""Gradients of a flat group: from autograd's, packed for their reduction, to ``.grad``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardeddp.comm import Mesh
from shardeddp.engine.reduction import GradientMemory, Reduction
from shardeddp.engine.storage import local_view
from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.memory import HeldMemory
from shardeddp.plan.reduction import ReduceOver, ReductionPlan
from shardeddp.tensor.backward import (
    running_backward,
    store_gradient,
    store_gradients,
    stored_gradient,
    stored_gradients,
)
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.tensor.unsharded import accumulate_in
from shardeddp.torch_private import foreach_copy_, foreach_zero_, without_torch_function


class GroupGradients:
    """Gradients of a flat group, from autograd to the parameters' ``.grad``.

    A parameter's gradient is in one or several of these places, by the attribute in parentheses:

    ========================  =================================  ===================================
    place                     put there by                       taken from there by
    ========================  =================================  ===================================
    ``.grad`` of the          autograd, inside of the unit;      :meth:`reduce`, by ``_pack``
    unsharded parameter       :meth:`current`, from the next
    ``_outside``              :meth:`add_outside`, from uses     :meth:`reduce`, by ``_pack``;
                              outside of the unit;               :meth:`current`
                              :meth:`take_assigned`,
                              ``_take_former``
    buffer or shard, in this  :meth:`reduce`, from both above    :meth:`begin_backward` of the next:
    backward's reduction      and from partial sums              the reduction has arrived
    (``_packed``)
    partial sums              :meth:`reduce` in the shard group  :meth:`reduce` across replicas, by
    (``_partly_used``)        alone; :meth:`take_assigned`,      ``_take_partial``
                              ``_take_former``
    ``.grad``, a view of the  :meth:`install`                    users, who set it to None or to
    gradient shard                                               another; ``_take_former``
    (``_views``)              (the next reduction adds to it)
    ``.grad`` elsewhere       users (``_assigned``); a gradient  :meth:`take_assigned`,
                              that they hold keeps its memory,   ``_take_former``;
                              by ``_renew_shard``                :meth:`install` adds to it
    ========================  =================================  ===================================

    If users set ``.grad``, :meth:`assign` empties the first two and partial sums. After a failure
    :meth:`drop_waiting` empties the first two and partial sums.
    """

    def __init__(
        self,
        plan: BufferPlan,
        mesh: Mesh,
        *,
        main_shard: torch.Tensor,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        unsharded: Sequence[nn.Parameter],
        sharded: Sequence[ShardTensor],
    ) -> None:
        self._layout = plan.layout
        self._mesh = mesh
        self._memory = GradientMemory(plan, mesh, main_shard, reduce_dtype)
        self._main_dtype = main_shard.dtype
        self._param_dtype = param_dtype
        self._reduce_dtype = reduce_dtype
        self._unsharded = unsharded
        self._sharded = sharded
        self._views: list[ShardTensor] = []  # over the gradient shard, in layout order
        # Whole gradients of uses outside of the unit, by parameter.
        self._outside: dict[int, torch.Tensor] = {}
        # Indices of parameters with a gradient assigned by users since the last backward.
        self._assigned: set[int] = set()

        # Whether an optimizer may hold local gradients that no reference count shows.
        self._kept_by_others = False
        self._on_outside: Callable[[int], None] | None = None
        # Indices of parameters whose gradient went into a reduction since the backward began.
        self._packed: set[int] = set()
        self._reduced = False  # whether there was a reduction since the backward began
        self._reduced_by: int | None = None  # number of the backward of the last reduction
        self._partly_used: set[int] = set()  # indices of parameters in the partial sums
        # Ranks over which the last backward has averaged; a later one completes the average.
        self._averaged_over = ReduceOver.ALL

    @property
    def shard(self) -> torch.Tensor | None:
        """Gradient shard: 1D, slice_numel; None before the first reduction."""
        return self._memory.shard

    def held(self) -> HeldMemory:
        """Return the bytes of gradients now held on the device."""
        memory = self._memory
        shards = [it for it in (memory.shard, memory.partial) if it is not None]
        left = [it for it in stored_gradients(self._unsharded) if it is not None]
        return HeldMemory(
            gradient_nbytes=0 if memory.plan.on_host else sum(it.nbytes for it in shards),
            in_flight_nbytes=memory.buffer_nbytes + sum(it.nbytes for it in left),
        )

    def attach(self, on_outside: Callable[[int], None]) -> None:
        """Reduce gradients of outside uses as well, from now on.

        The function is called with the index of the parameter when one arrives.
        """
        self._on_outside = on_outside
        for parameter in self._sharded:
            parameter.take_part(self)

    def note_kept(self) -> None:
        """Note that an optimizer may hold local gradients that no reference count shows."""
        self._kept_by_others = True

    # -- Gradients of a backward

    def begin_backward(self) -> None:
        """Reset the flags of reduced gradients."""
        self._packed = set()
        self._reduced = False

    def take_assigned(self, over: ReduceOver) -> None:
        """Add gradients that users have assigned to those of the running backward."""
        assigned, self._assigned = sorted(self._assigned), set()
        for index in assigned:
            found = stored_gradient(self._sharded[index])
            if found is None or (self._views and found is self._views[index]):
                continue
            if not isinstance(found, ShardTensor):
                self._add_outside(index, found.to(self._mesh.device))
            elif over is ReduceOver.NONE or self._mesh.topology.split_replicas:
                self._add_outside(index, found.full_tensor())
            elif self._mesh.has_replicas:
                self._memory.partial_of(index).add_(found.to_local().to(self._mesh.device))
                self._partly_used.add(index)
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

    def arrives(self, index: int, gradients: object) -> None:
        """Cast an existing gradient to the reduce dtype before autograd adds another one.

        Several backwards reach a parameter one after the other (micro-batches, a retained graph) or
        one inside the other (reentrant checkpointing). Within one backward autograd adds up before
        this call, so :meth:`add_up` must have been called.
        """
        if stored_gradient(self._unsharded[index]) is not None:
            accumulate_in(self._unsharded[index], self._reduce_dtype)

    def assign(self, index: int, gradient: torch.Tensor | None) -> None:
        """Set ``.grad`` of a parameter, as users do.

        The backward of a custom function may assign a gradient that it does not return: of this
        rank's batch, whole. It replaces this rank's gradient, autograd adds to it, and it is
        averaged, unless the running backward has reduced the gradients already.
        """
        is_local = False
        if isinstance(gradient, ShardTensor):
            if self._memory.holds(gradient.to_local()):  # a view of the partial sums
                gradient.move_to(gradient.to_local().clone())
        elif gradient is not None:
            running = running_backward()
            is_local = running is not None and running != self._reduced_by
        # The incomplete gradient.
        store_gradient(self._unsharded[index], None)
        self._outside.pop(index, None)
        if self._memory.partial is not None:
            # Even if this rank has not used it: the sums include other ranks of the shard group.
            self._memory.drop_partial_of(index)
        self._partly_used.discard(index)
        if gradient is not None and is_local:
            self.add_outside(index, gradient)
            gradient = None
        store_gradient(self._sharded[index], gradient)
        if gradient is not None:
            self._assigned.add(index)

    def add_outside(self, index: int, gradient: torch.Tensor) -> None:
        """Take this rank's gradient of an outside use, not averaged, to reduce it with the unit's.

        Raises:
            RuntimeError: The parameter belongs to experts: each rank would count only its batch.
        """
        if self._mesh is not self._mesh.dense:
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

    def leave_incomplete(self, over: ReduceOver) -> None:
        """Merge gradients of earlier steps into the incomplete gradients of a backward.

        Gradients of earlier steps are equal on all ranks, so their average is right only if every
        rank merges them, even if it neither used the parameter nor reads its gradient. If a merge
        needs a gather, it is deferred to the first read.
        """
        in_group = over is ReduceOver.SHARD_GROUP
        if in_group and not self._mesh.has_replicas:
            return  # the reduction has added to the gradients of earlier steps
        self._averaged_over = over
        if self._mesh.topology.split_replicas if in_group else self._layout.num_slices > 1:
            return
        for index, former in enumerate(stored_gradients(self._sharded)):
            if former is not None and self._has_former(index):
                self._take_former(index)

    def complete(self) -> None:
        """Mark the gradients as complete."""
        self._averaged_over = ReduceOver.ALL

    def _has_former(self, index: int) -> bool:
        """Return whether a gradient of an earlier step must be merged into an incomplete one."""
        sharded = self._sharded[index]
        if not isinstance(stored_gradient(sharded), ShardTensor):
            return False
        is_incomplete = self._averaged_over is not ReduceOver.ALL and index not in self._assigned
        return (is_incomplete and sharded.requires_grad) or self.is_unreduced(index)

    def _take_former(self, index: int) -> None:
        """Merge a parameter's gradient of an earlier step into its incomplete gradient.

        Both are then read, written and dropped as one. The former gradient is equal on all ranks,
        and so is its average.
        """
        former = stored_gradient(self._sharded[index])
        assert isinstance(former, ShardTensor)
        local = former.to_local().to(self._mesh.device)
        if self._averaged_over is ReduceOver.SHARD_GROUP or index in self._partly_used:
            self._memory.partial_of(index).add_(local)
            self._partly_used.add(index)
        elif self._layout.num_slices == 1:
            self._add_own(index, local.clone().view(self._layout.slots[index].shape))
        else:
            self._add_outside(index, former.full_tensor().to(self._mesh.device))
        store_gradient(self._sharded[index], None)

    def current(self, index: int) -> torch.Tensor | None:
        """Return a parameter's gradient so far, before a later micro-batch completes it.

        It is this rank's own, whole; or, if micro-batches are reduced in the shard group, their
        average so far, sharded. None if there is neither. One of an earlier step is merged into it.
        """
        former = stored_gradient(self._sharded[index])
        if former is not None:
            if running_backward() is not None or not self._has_former(index):
                return former
            self._take_former(index)
        gradient, outside = stored_gradient(self._unsharded[index]), self._outside.pop(index, None)
        if outside is not None:
            gradient = outside if gradient is None else gradient + outside
            accumulate_in(self._unsharded[index], gradient.dtype)
            store_gradient(self._unsharded[index], gradient)
        if gradient is not None and gradient.dtype is not self._main_dtype:
            # Gradients of copies for autocast have autocast's dtype; users expect the parameter's.
            accumulate_in(self._unsharded[index], self._main_dtype)
            gradient = stored_gradient(self._unsharded[index])
        if gradient is None and self._memory.partial is not None and index in self._partly_used:
            gradient = ShardTensor(self._memory.partial_of(index), self._sharded[index].spec)
        return gradient

    def is_unreduced(self, index: int) -> bool:
        """Return whether a parameter has a gradient that a later micro-batch completes."""
        return (
            stored_gradient(self._unsharded[index]) is not None
            or index in self._outside
            or index in self._partly_used
        )

    def used(self) -> list[bool]:
        """Return per parameter whether this rank has a gradient.

        It awaits reduction, was packed in this backward, or is in partial sums.
        """
        found = self._packed | self._partly_used | self._waiting()
        return [index in found for index in range(len(self._unsharded))]

    @property
    def has_partial_sums(self) -> bool:
        """Whether earlier micro-batches have left sums that are not reduced across replicas."""
        return bool(self._partly_used)

    @property
    def has_waiting(self) -> bool:
        """Whether autograd has left a gradient that is not in a reduction yet."""
        return bool(self._waiting())

    def _waiting(self) -> set[int]:
        left = enumerate(stored_gradients(self._unsharded))
        return {index for index, gradient in left if gradient is not None}.union(self._outside)

    def drop_waiting(self) -> None:
        """Drop gradients that have not been reduced.

        Reductions in flight read none of them: :meth:`reduce` has packed theirs, and
        ``Reducer.abort`` has finished them before, those that read partial sums too.
        """
        store_gradients(self._unsharded, [None] * len(self._unsharded))
        self._outside = {}
        if self._memory.partial is not None:
            # The reduce stream may have allocated them, and compute has used them.
            self._memory.mesh.reduce_stream.follow_compute()
        self._take_partial()

    # -- Reduction

    def reduce(self, over: ReduceOver) -> Reduction:
        """Pack and drop the unsharded gradients; issue their averaging into the gradient shard.

        ``over`` is not ``NONE``.
        """
        with without_torch_function():
            adds_to = self._adds_to()
            if self._memory.shard is None or self._are_held(adds_to):
                self._renew_shard()
                adds_to = [False] * len(self._sharded)
            plan = ReductionPlan(
                buffers=self._memory.plan,
                topology=self._mesh.topology,
                over=over,
                adds_to=tuple(adds_to),
                has_replicas=self._mesh.has_replicas,
                adds_partial=over is ReduceOver.ALL and self.has_partial_sums,
                averages=self._mesh.replicate.averages,
            )
            shard, slots = self._memory.open_shard()
            self._reduced, self._reduced_by = True, running_backward()
            buffer = shard
            if not plan.packs_into_shard:
                buffer, slots = self._memory.open_buffer()
            self._pack(slots, plan.scale)
        if plan.keeps_partial:
            self._partly_used |= self._packed
            partial = None
        else:
            self._packed |= self._partly_used
            partial = self._take_partial()
        output = shard
        if plan.output_in_buffer:
            output = buffer.view(self._mesh.reduce.size, -1)[self._mesh.shard_rank]
        return Reduction(plan, self._memory, buffer, output, partial)

    def _adds_to(self) -> list[bool]:
        """Return per parameter whether the reduction adds to its former gradient."""
        if not self._views:
            return [False] * len(self._sharded)
        found = zip(stored_gradients(self._sharded), self._views, strict=True)
        return [self._reduced or gradient is mine for gradient, mine in found]

    def _are_held(self, adds_to: Sequence[bool]) -> bool:
        """Return whether users or an optimizer hold a former gradient that would be overwritten."""
        if self._reduced:
            return False
        references = list(map(sys.getrefcount, self._views))
        if max(references) == _IN_A_LIST:
            return self._kept_by_others
        return self._kept_by_others or any(
            count > _IN_A_LIST and not adds for count, adds in zip(references, adds_to, strict=True)
        )

    def _renew_shard(self) -> None:
        """Allocate a new gradient shard; holders of gradients in the old one keep its memory.

        A gradient that is still a parameter's `.grad` stays in the old memory, too: holders of it
        or of a view of it must see later additions.
        """
        self._kept_by_others = False
        self._memory.drop_shard()
        shard, _ = self._memory.open_shard()
        self._views = self._views_of(shard)

    def _take_partial(self) -> torch.Tensor | None:
        """Take the partial sums of earlier micro-batches."""
        self._partly_used = set()
        return self._memory.take_partial()

    def install(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of the parameters that any rank has used, if there was a reduction."""
        if not any(used) or not self._reduced:
            return
        gradients = stored_gradients(self._sharded)
        with without_torch_function():
            for i, (sharded, view) in enumerate(zip(self._sharded, self._views, strict=True)):
                found = gradients[i]
                if not used[i] or found is view:
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
            self._packed.add(i)
            targets.append(slot)
            sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        # `left` and `sources` hold them to the end of this function. They were written in the
        # stream that packs, which is that of the forward: memory freed here is written after these
        # reads. Forwards in side streams are left to their users (docs/decisions, 69).
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

    def _views_of(self, shard: torch.Tensor) -> list[ShardTensor]:
        return [
            ShardTensor(local_view(shard, self._layout, i, self._mesh.slice_rank), sharded.spec)
            for i, sharded in enumerate(self._sharded)
        ]


_IN_A_LIST = next(map(sys.getrefcount, [torch.empty(0, device="cpu")]))
"""Python reference count of a tensor that only a list refers to."""
