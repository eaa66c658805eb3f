"""Flat group: flat buffers of a unit's parameters of equal dtypes and ``requires_grad``."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from shardeddp.comm import CollectiveHandle, Mesh, StreamHandle
from shardeddp.engine.gradients import GroupGradients
from shardeddp.engine.states import BufferState
from shardeddp.engine.storage import GatheredBuffer, empty_on_host, local_view
from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.gather import GatherStage
from shardeddp.plan.layout import OwnedIntervals
from shardeddp.plan.memory import HeldMemory
from shardeddp.tensor.gradient_hooks import take_hooks
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor
from shardeddp.tensor.unsharded import SHARDED, derived_class, divide_gradients, swap_bodies
from shardeddp.torch_private import without_torch_function
from shardeddp.wrap.flat_buffers import PlannedGroup
from shardeddp.wrap.tree import ParameterSpec


class FlatGroup:
    """One main shard, one gathered buffer, their parameters, and the gradients of these.

    Each parameter of the plan becomes a ``ShardTensor`` in place. ``lender`` is the group that the
    plan names.
    """

    def __init__(self, planned: PlannedGroup, mesh: Mesh, lender: FlatGroup | None = None) -> None:
        if planned.topology != mesh.topology:
            raise ValueError(
                f"expected a plan for {mesh.topology}, found one for {planned.topology}"
            )
        specs, plan, layout = planned.parameters, planned.plan, planned.plan.layout
        self.planned, self.plan, self.layout = planned, plan, layout
        self._gathers = planned.gathers
        self._lender = lender
        self._borrowers: list[FlatGroup] = []
        if lender is not None:
            lender.lend_to(self)
        self._mesh = mesh
        param_dtype = specs[0].param_dtype
        self.main_shard = lender.main_shard if lender else _make_shard(plan, specs[0].dtype, mesh)
        """1D, slice_numel; lives as long as the unit."""
        self.buffer = GatheredBuffer(
            specs,
            layout,
            param_dtype,
            mesh.device,
            memory=self.main_shard if plan.resident else None,
            lender=lender and lender.buffer,
            in_turn=planned.reshard.in_turn,
        )
        """Buffer of whole parameters: 1D, padded_numel, in ``param_dtype``.

        :meth:`unshard` says when it has memory; a resident one keeps it.
        """
        self.unsharded = self.buffer.parameters
        if mesh is not mesh.dense:
            # An expert's gradient sums the tokens of all expert ranks. Divided here, it has the
            # scale of other parameters' gradients, that of one rank, wherever it is read.
            for unsharded in self.unsharded:
                divide_gradients(unsharded, mesh.tensor.size)
        self._replica_shard = (
            torch.empty(
                layout.padded_numel // mesh.gather.size, dtype=param_dtype, device=mesh.device
            )
            if self._gathers.splits_replicas and lender is None
            else None
        )
        """Shard of one replica, of which each replica has a slice as main shard; ``param_dtype``.

        1D, padded_numel // shard_size. Filled when the main shard has changed.
        """
        # 1D, slice_numel; device copy of a main shard in host memory, and the event of the copy ->
        # awaited by the gather stream, and by the host before it writes to the main shard.
        self._arriving: torch.Tensor | None = None
        self._copying: StreamHandle | None = None
        # 1D; this rank's part of the gathered buffer, kept from forward to backward.
        self._kept_part: torch.Tensor | None = None
        self.local = (
            self._local_parameters()
            if lender is None
            else [local.detach() for local in lender.local]
        )
        """This rank's elements of each parameter; 1D."""
        self.sharded = [self._shard(spec, i) for i, spec in enumerate(specs)]
        if lender is not None:
            [own], [other] = self.sharded, lender.sharded
            own.share_memory_with(other)
        self.was_trained = False
        """Whether any parameter required a gradient in a backward that may not be reduced yet."""
        self.has_views = False
        """Whether code outside of the engine, on any rank, referred to gathered memory at the end
        of the last backward."""
        # Versions of local parameters at the last gather; empty: gather again.
        self._gathered_versions: list[int] = []
        # Versions of local parameters that the unsharded ones already account for.
        self._known_versions = self._versions()
        self._seen_writes = self._writes()
        self._kept_writes = 0  # calls of `keep_writes` that have found some
        self.gradients = GroupGradients(
            plan,
            mesh,
            main_shard=self.main_shard,
            param_dtype=param_dtype,
            reduce_dtype=specs[0].reduce_dtype,
            unsharded=self.unsharded,
            sharded=self.sharded,
        )

    @property
    def stale(self) -> bool:
        """Whether the main shard has changed since it was last gathered."""
        return self._versions() != self._gathered_versions

    @property
    def needs_all_gather(self) -> bool:
        """Whether unsharding has to fill the buffer, because it does not hold the values already."""
        # Asked in each forward of a unit: only a retained one has to look at its versions.
        gathers = self._gathers
        return gathers.is_due(main_has_changed=gathers.is_retained and self.stale)

    @property
    def trainable(self) -> bool:
        """Whether any of the parameters requires a gradient now."""
        with without_torch_function():
            return any(unsharded.requires_grad for unsharded in self.unsharded)

    def held(self) -> HeldMemory:
        """Return the bytes now held on the device."""
        owns = self._lender is None
        gathered = self.buffer.flat if owns and not self.plan.resident else None
        parts = [
            it
            for it in (gathered, self._replica_shard, self._kept_part, self._arriving)
            if it is not None
        ]
        return self.gradients.held() + HeldMemory(
            main_nbytes=self.main_shard.nbytes if owns and not self.plan.on_host else 0,
            in_flight_nbytes=sum(it.nbytes for it in parts),
        )

    # -- Gathering

    def unshard(self) -> StreamHandle:
        """Allocate the gathered buffer if necessary, and issue the all-gather into it.

        ``Runtime._visit`` calls this for a unit that a forward or backward has reached and for the
        next ones (prefetch), by ``Unit.unshard``; ``Unit.reshard`` calls :meth:`release`. A unit in
        use whose main shard has changed is gathered anew (``Unit.refresh``), and so is memory that
        only views hold (:meth:`refill_views`). Memory:

        ================  ==================================  =====================================
        buffer            allocated                           freed
        ================  ==================================  =====================================
        gathered buffer   here, on the gather stream, by      :meth:`release`, by its ``release``,
                          ``GatheredBuffer.allocate``         once the gather stream follows compute
        the same under    as above, by the first gather; the  with the unit: :meth:`release` only
        Reshard.NEVER     next ones fill the same memory      does ``unbind``
        the same, while   not at all: the next gather fills   with the last view or graph, after the
        views hold it     the memory that they hold           ``release`` here
        the same of a     not at all: :meth:`activate` takes  by the lender
        borrower          the lender's
        ``_arriving``     here, on the copy stream, if the    ``_copy_main_shard``, once the copy
                          main shard is on the host           stream follows the gather stream
        ``_kept_part``    :meth:`release` before a backward,  the :meth:`release` after it, or
                          on compute's stream (hpZ)           :meth:`forget`: compute has waited for
                                                              the gather that read it
        replica shard     at setup, if replicas split shards  with the unit (``Unit.dissolve``)
        ================  ==================================  =====================================

        A released block of host memory is kept for the next gather of its size
        (``RELEASED_MEMORY`` of storage.py); device allocators do that themselves.
        """
        self.keep_writes()
        stages = self._gathers.stages(
            main_has_changed=self.stale, has_kept_part=self._kept_part is not None
        )
        if GatherStage.FROM_HOST in stages:
            # Allocated on the copy stream, so that the copy waits for no earlier gather.
            self._copying = self._mesh.copy_in_stream.issue(self._copy_in, behind_compute=False)
        if stages:
            handle = self._mesh.gather_stream.issue(partial(self._gather, stages))
        else:
            handle = StreamHandle(CollectiveHandle(), None)
        if self.buffer.fills_outlived_memory:
            handle.wait()  # users may read or write their views at any time
        self.note_all_gather()
        return handle

    def note_views(self, has_views: bool) -> None:
        """Set ``has_views`` to the maximum over all ranks."""
        self.has_views = has_views

    def begin_backward(self) -> None:
        """Reset what a backward counts."""
        self.was_trained |= self.trainable
        self.gradients.begin_backward()

    def install_gradients(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of the sharded parameters that any rank has used, once all are reduced."""
        self.gradients.install(used)
        self.was_trained = self.trainable

    def finish_copies(self) -> None:
        """Wait until a main shard in host memory is copied, so that the host may write to it."""
        if self._copying is not None:
            self._copying.synchronize()
            self._copying = None

    def forget(self) -> None:
        """Let the next :meth:`unshard` gather the whole buffer, as on ranks without any of it."""
        self.keep_writes()
        self._gathered_versions = []
        # Compute allocated it, and has waited for a gather that read it: `Unit.unshard_with_others`
        # waits before it calls this.
        self._kept_part = None

    def refill_views(self) -> None:
        """Gather into memory that modules or views hold; a collective.

        Nothing happens if there is no such memory, or if the main shard has not changed.
        """
        if self._lender is not None:
            self._lender.refill_views()
            return
        is_used = self.buffer.state is BufferState.BOUND or any(
            group.has_views for group in self._sharing()
        )
        if not (is_used and self.stale):
            return
        if not self.plan.resident:
            self._mesh.fingerprints.call(
                f"a write to a parameter that its unit uses, or of which something holds a view, "
                f"{self.layout.slots[0].fqn} or one beside it"
            )
        is_released = self.buffer.state is BufferState.RELEASED
        self.unshard().wait()
        for group in self._borrowers:
            group.note_all_gather()
        self.finish_copies()
        if is_released:
            self.release(before_backward=self._kept_part is not None)

    def _gather(self, stages: Sequence[GatherStage]) -> CollectiveHandle:
        # Allocation and copies run on the gather stream, after compute's last use of the buffer.
        flat, handle = self.buffer.allocate(), CollectiveHandle()
        for stage in stages:
            if stage is not GatherStage.FROM_HOST:  # on a stream of its own
                handle = handle.then(partial(self._all_gather, stage, flat))
        return handle

    def _all_gather(self, stage: GatherStage, flat: torch.Tensor) -> CollectiveHandle:
        """Copy what this rank has to its place, and issue the all-gather."""
        mesh, shard = self._mesh, self._replica_shard
        if stage is GatherStage.IN_REGATHER_GROUP:
            assert self._kept_part is not None
            self._part_of_gathered().copy_(self._kept_part)
            return mesh.regather.all_gather_(flat)
        if stage is GatherStage.AMONG_REPLICAS:
            assert shard is not None
            slices = mesh.gather_slices
            self._copy_main_shard(shard.view(slices.size, -1)[slices.rank])
            return slices.all_gather_(shard)
        own = self.buffer.part_of(mesh.shard_rank, mesh.gather.size)
        self._copy_main_shard(own) if shard is None else own.copy_(shard)
        return mesh.gather.all_gather_(flat)

    def _copy_in(self) -> CollectiveHandle:
        self._arriving = self.main_shard.to(self._mesh.device, non_blocking=True)
        return CollectiveHandle()

    def _copy_main_shard(self, target: torch.Tensor) -> None:
        """Copy the main shard into its slice of the gathered buffer, cast; on the gather stream."""
        if self._copying is None or self._arriving is None:
            target.copy_(self.main_shard)
            return
        self._copying.wait()
        target.copy_(self._arriving)
        # The copy stream allocated `_arriving`; it may reuse the memory after this stream's read.
        self._mesh.copy_in_stream.follow_compute()
        self._arriving = None

    def _part_of_gathered(self) -> torch.Tensor:
        return self.buffer.part_of(self._mesh.regather.rank, self._mesh.regather.size)

    def activate(self) -> None:
        """Make the unsharded parameters usable."""
        if not self.plan.resident:
            if self._lender is not None:
                self.buffer.allocate()
            self.buffer.bind()
        self.buffer.wrap()

    def release(self, before_backward: bool) -> None:
        """Drop the gathered buffer's memory, unless it is retained.

        Unsharded parameters stand for the sharded ones then; those of a resident buffer are the
        sharded ones' memory.

        Before a backward they are gathered again before they change: this rank keeps a part if the
        plan says so.
        """
        self.keep_writes()
        self._keep_requires_grad()
        if self._gathers.is_retained:
            if not self.plan.resident:
                self.buffer.unbind()
            return
        keep = before_backward and self._gathers.kept_numel
        # Compute allocated the former part, and has waited for the gather that read it.
        self._kept_part = self._part_of_gathered().clone() if keep else None
        if self.buffer.flat is not None:
            # Kernels that read the buffer may still be queued: the gather stream, which allocated
            # the buffer and may reuse or unmap it, waits for them first.
            self._mesh.gather_stream.follow_compute()
        self.buffer.release()

    # -- Versions and writes

    def _versions(self) -> list[int]:
        return [local._version for local in self.local]

    def note_all_gather(self) -> None:
        """Record the gathered versions; graphs that need former values fail, as unsharded."""
        versions = self._versions()
        changed = [
            index
            for index, version in enumerate(versions)
            if version != self._known_versions[index]
        ]
        if changed:
            torch.autograd.graph.increment_version([self.unsharded[index] for index in changed])
            self._seen_writes = self._writes()
        self._gathered_versions = self._known_versions = versions

    def _writes(self) -> list[int]:
        with without_torch_function():
            return [unsharded._version for unsharded in self.unsharded]

    def writes(self) -> list[int]:
        """Return numbers that change when a parameter is written to, by an optimizer or user code."""
        pending = self._writes() != self._seen_writes
        return [*self._versions(), self._kept_writes + pending]

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Copy in-place writes to unsharded parameters, or to views of them, to the main shard."""
        writes = self._writes()
        if writes == self._seen_writes:
            return
        written = [
            i
            for i, (now, seen) in enumerate(zip(writes, self._seen_writes, strict=True))
            if now != seen
        ]
        self._seen_writes = writes
        self._kept_writes += 1
        if self.plan.resident:
            return
        fqns = ", ".join(self.layout.slots[i].fqn for i in written)
        if any(self.local[i]._version != self._known_versions[i] for i in written):
            raise RuntimeError(
                f"{fqns}: written to in place inside a step, and their shards were changed in the "
                f"same step (by an optimizer): one of the two would be lost. Write to parameters "
                f"before the forward or after the optimizer's step"
            )
        flat, outlived = self.buffer.flat, self.buffer.outlived()
        for index in written:
            found = outlived.get(index) if flat is None else self._values(flat, index)
            if found is None:
                raise RuntimeError(
                    f"{self.layout.slots[index].fqn}: written to through a view that was made "
                    f"inside of its unit's forward, after the unit was resharded, and the view is "
                    f"gone, with what was written. Write to the parameter itself"
                )
            self._keep_write(index, found)
            # Graphs detect the write by the version of the unsharded parameter.
            for group in self._sharing():
                group.note_known(index)

    def note_known(self, index: int) -> None:
        """Note that a parameter's elements equal what its unsharded parameter holds."""
        self._known_versions[index] = self.local[index]._version

    def keep_write_of(self, index: int) -> None:
        """Copy writes to the main shard if this parameter was written to, before a read of it."""
        with without_torch_function():
            is_written = self.unsharded[index]._version != self._seen_writes[index]
        if is_written:
            self.keep_writes()

    def is_held(self, index: int) -> bool:
        """Return whether code outside of the engine refers to gathered memory of a parameter."""
        return any(group.buffer.is_held(index) for group in self._sharing())

    def _sharing(self) -> list[FlatGroup]:
        """Return the groups with this group's memory, itself included."""
        return [self, *self._borrowers] if self._lender is None else self._lender._sharing()

    def lend_to(self, borrower: FlatGroup) -> None:
        """Let another group use this group's memory."""
        self._borrowers.append(borrower)

    def _values(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return a view of one parameter's elements in a gathered buffer; 1D."""
        slot = self.layout.slots[index]
        return flat[slot.interval.start : slot.interval.stop]

    def _keep_write(self, index: int, written: torch.Tensor) -> None:
        """Copy the elements of a whole written parameter, 1D, that differ to the main shard."""
        fqn, local, dtype = self.layout.slots[index].fqn, self.local[index], written.dtype
        known = local.to(self._mesh.device)
        if dtype is not local.dtype and self.sharded[index].spec.is_first("rounded"):
            warnings.warn(
                f"parameter {fqn} is written to inside of a step, where it is a copy in "
                f"{dtype} (MixedPrecision(param_dtype=...)): what is written is rounded "
                f"before it reaches the parameter, which is in {local.dtype}. Write to it outside "
                f"of the step, or use Trainer(precision='bf16-mixed'), where modules read and "
                f"write the parameters themselves",
                stacklevel=2,
            )
        self._mesh.run.written.note_state(fqn, written)
        own = self.sharded[index].spec.interval
        found = written[own.start : own.stop]
        # Elements that were not written equal the main shard rounded to the gathered dtype.
        local.copy_(torch.where(found != known.to(dtype), found.to(known.dtype), known))

    def _keep_requires_grad(self) -> None:
        """Copy ``requires_grad``, which a step may have changed, to the sharded parameters."""
        with without_torch_function():
            for sharded, unsharded in zip(self.sharded, self.unsharded, strict=True):
                if torch.Tensor.requires_grad.__get__(sharded) != unsharded.requires_grad:  # type: ignore[attr-defined]
                    sharded.requires_grad_(unsharded.requires_grad)

    # -- Construction of parameters

    def _local_parameters(self) -> list[torch.Tensor]:
        count = range(len(self.layout.slots))
        # .data: each has a version counter of its own, as in an unsharded model.
        return [
            local_view(self.main_shard, self.layout, index, self._mesh.slice_rank).data
            for index in count
        ]

    def _shard(self, spec: ParameterSpec, index: int) -> ShardTensor:
        """Turn the user's parameter into a ``ShardTensor`` over its view of the main shard."""
        parameter, slot, local = spec.parameter, self.layout.slots[index], self.local[index]
        distribution = spec.distribution
        shard_spec = ShardSpec(
            fqn=spec.fqn,
            shape=parameter.shape if distribution is None else distribution.shape,
            intervals=OwnedIntervals(self.layout, slot, self._mesh.slice_ranks),
            mesh=self._mesh,
            offloaded=local.device != self._mesh.device,
            boxes=() if distribution is None else distribution.boxes,
            tensor_rank=self._mesh.tensor.rank,
        )
        if not parameter.is_meta:
            own = shard_spec.interval
            local.copy_(parameter.detach().reshape(-1)[own.start : own.stop])
        gradient, parameter.grad = parameter.grad, None
        hooks = take_hooks(parameter)
        kind = derived_class(ShardTensor, "Sharded", type(parameter))
        sharded = kind(local, shard_spec, parameter.requires_grad)
        vars(sharded).update(parameter.__dict__, _is_param=True)  # isinstance(_, nn.Parameter)
        sharded.join_unit(self.unsharded[index], self, index)
        try:
            swap_bodies(parameter, sharded)
            sharded = parameter
        except RuntimeError as error:
            warnings.warn(
                f"parameter {spec.fqn} cannot be sharded in place ({error}); it was registered "
                f"anew: references that were taken before, other than its module's, are to a copy "
                f"that is not trained",
                stacklevel=2,
            )
        # Weak: autograd's references to unsharded parameters are hidden from the garbage collector.
        vars(self.unsharded[index])[SHARDED] = weakref.ref(sharded)
        if any(hooks):
            sharded.adopt_hooks(*hooks)  # type: ignore[attr-defined]
        if gradient is not None:
            sharded.grad = ShardTensor(
                shard_spec.localize(gradient).to(local.device, copy=True), shard_spec
            )
        return sharded  # type: ignore[return-value]  # its body is a ShardTensor now


def _make_shard(plan: BufferPlan, dtype: torch.dtype, mesh: Mesh) -> torch.Tensor:
    """Allocate a main shard: zero in padding, uninitialised elsewhere."""
    layout = plan.layout
    if plan.on_host:
        like = torch.empty(layout.slice_numel, dtype=dtype, device="meta")
        shard = empty_on_host(like, mesh.device)
    else:
        shard = torch.empty(layout.slice_numel, dtype=dtype, device=mesh.device)
    own = layout.slice_interval(mesh.slice_rank)
    for padding in layout.padding_intervals:
        mine = own.intersect(padding).shift(-own.start)
        shard[mine.start : mine.stop].zero_()
    return shard
