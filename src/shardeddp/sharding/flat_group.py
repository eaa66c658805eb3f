"""FlatGroup: the flat buffers of those parameters of a unit that share dtypes and trainability."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from shardeddp.comm import Mesh, Pending, Ticket
from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.memory import GroupCost
from shardeddp.plan.placement import Placement, Reshard
from shardeddp.sharding.gradient_hooks import take_hooks
from shardeddp.sharding.group_gradients import GroupGradients
from shardeddp.sharding.identity import swap_bodies
from shardeddp.sharding.memory import allocate, empty_on_host, local_view, release
from shardeddp.sharding.shard_tensor import ShardSpec, ShardTensor
from shardeddp.sharding.spec import ParameterSpec
from shardeddp.sharding.unsharded import ReleasedParameter, UnshardedParameter


class FlatGroup:
    """One main shard and one gathered flat buffer, the views into them, and what holds their gradients.

    Args:
        specs: The parameters, in layout order; each becomes a ``ShardTensor`` in place.
        layout: Where they lie.
        mesh: Through which they are gathered and reduced.
        placement: Where main shards live, and whether gathered buffers keep their memory when the unit is resharded.
    """

    def __init__(self, specs: Sequence[ParameterSpec], layout: FlatLayout, mesh: Mesh, placement: Placement) -> None:
        self.layout = layout
        self._mesh = mesh
        dtype, param_dtype, reduce_dtype = specs[0].dtype, specs[0].param_dtype, specs[0].reduce_dtype
        on_host = placement.offload_params and mesh.device.type != "cpu"
        self._resident = layout.shard_size == 1 and param_dtype is dtype and not on_host
        """The main shard is the whole flat buffer: nothing is ever gathered or released."""
        self._retain = self._resident or placement.reshard is Reshard.NEVER

        empty = torch.empty(layout.shard_numel, dtype=dtype, device="meta" if on_host else mesh.device)
        self.main_shard = (empty_on_host(empty, mesh.device) if on_host else empty).zero_()
        """1D, shard_numel; lives as long as the model."""
        self._gathered = (
            self.main_shard
            if self._resident
            else torch.empty(layout.padded_numel, dtype=param_dtype, device=mesh.device)
        )
        self._own_slice = self._gathered.view(mesh.gather.size, -1)[mesh.shard_rank]
        split = mesh.topology.split_replicas
        self._part = torch.empty_like(self._own_slice) if split else None
        """1D; where replicas split the main shard, all of it in the dtype that travels. Filled when it has changed."""
        self._kept_part: torch.Tensor | None = None  # 1D; this rank's part of the gathered buffer, forward -> backward
        self.unsharded = [
            self._view_parameter(spec, slot.offset) for spec, slot in zip(specs, layout.slots, strict=True)
        ]
        self.local = [local_view(self.main_shard, layout, i, mesh.slice_rank) for i in range(len(specs))]  # each 1D
        self.sharded = [self._shard(spec, i) for i, spec in enumerate(specs)]
        self._gathered_version = -1
        self._seen_writes = self._writes()
        self._kept_writes = 0  # versions of the main shard that only brought it up to what was known
        if not self._resident:
            self._release_memory()
        self.gradients = GroupGradients(
            layout,
            mesh,
            main_shard=self.main_shard,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            unsharded=self.unsharded,
            sharded=self.sharded,
        )
        self._reduce_dtype = reduce_dtype

    @property
    def stale(self) -> bool:
        """Whether the main shard has changed since it was last gathered."""
        return self.main_shard._version != self._gathered_version

    @property
    def gathers(self) -> bool:
        """Whether unsharding it takes other ranks: its buffer does not hold the values already."""
        return not (self._resident or (self._retain and not self.stale))

    @property
    def version(self) -> int:
        """Grows with every change of the parameters that is not the engine's own."""
        return self.main_shard._version + self._writes() - self._kept_writes

    @property
    def trainable(self) -> bool:
        """Whether any of the parameters requires a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(unsharded.requires_grad for unsharded in self.unsharded)

    def cost(self) -> GroupCost:
        """What the cost model needs to know."""
        return GroupCost(
            layout=self.layout,
            trainable=self.trainable,
            main_itemsize=self.main_shard.itemsize,
            param_itemsize=self._gathered.itemsize,
            reduce_itemsize=self._reduce_dtype.itemsize,
            split=self._mesh.collect.size,
        )

    # -- gathering

    def unshard(self) -> Ticket:
        """Allocate the gathered buffer if need be, and issue the all-gather into it."""
        self._keep_writes()
        if not self.gathers:
            ticket = Ticket(Pending(), None)
        elif self._kept_part is not None and not self.stale:
            ticket = self._mesh.gather_lane.issue(self._gather_parts)
        else:
            ticket = self._mesh.gather_lane.issue(self._gather_shards)
        self._gathered_version = self.main_shard._version
        return ticket

    def forget(self) -> None:
        """Let the next :meth:`unshard` gather all of it, as it does on ranks that hold nothing of it."""
        self._keep_writes()
        self._gathered_version = -1
        self._kept_part = None

    def _gather_shards(self) -> Pending:
        # Storage and copy belong to the lane: its allocator stream, and behind compute's last use of the buffer.
        allocate(self._gathered)
        main = self.main_shard.to(self._mesh.device, non_blocking=True)
        if self._part is None:
            self._own_slice.copy_(main)
            return self._mesh.gather.all_gather_(self._gathered)
        if not self.stale:
            return self._gather_split(self._part)
        self._part.view(self._mesh.collect.size, -1)[self._mesh.collect.rank].copy_(main)
        return self._mesh.collect.all_gather_(self._part).then(partial(self._gather_split, self._part))

    def _gather_split(self, part: torch.Tensor) -> Pending:
        self._own_slice.copy_(part)
        return self._mesh.gather.all_gather_(self._gathered)

    def _gather_parts(self) -> Pending:
        part = self._kept_part
        if part is None:
            raise RuntimeError(f"no part of {self.layout.slots[0].fqn} was kept for its backward")
        allocate(self._gathered)
        self._part_of_gathered().copy_(part)
        return self._mesh.regather.all_gather_(self._gathered)

    def _part_of_gathered(self) -> torch.Tensor:
        regather = self._mesh.regather
        return self._gathered.view(regather.size, -1)[regather.rank]

    def activate(self) -> None:
        """Make the unsharded parameters usable."""
        for unsharded in self.unsharded:
            unsharded.__class__ = UnshardedParameter

    def retain(self) -> None:
        """Keep the gathered buffer's memory and content from now on when the unit is resharded."""
        self._retain = True

    def release(self, before_backward: bool) -> None:
        """Give the gathered buffer's memory back; the unsharded parameters raise from here on.

        Args:
            before_backward: They are needed once more, before they change: a part stays, if the mesh has smaller groups
                to gather parts from (ZeRO++'s hpZ, https://arxiv.org/abs/2306.10209).
        """
        self._keep_writes()
        self._keep_requires_grad()
        if self._retain:
            return
        keep = before_backward and self._mesh.regather.size < self._mesh.gather.size
        self._kept_part = self._part_of_gathered().clone() if keep else None
        self._release_memory()

    def _release_memory(self) -> None:
        release(self._gathered)
        for unsharded in self.unsharded:
            unsharded.__class__ = ReleasedParameter

    # -- writes by others

    def renew(self) -> None:
        """Note that the gathered values have changed: a graph that needs the former ones must fail, as always."""
        torch.autograd.graph.increment_version(self.unsharded)
        self._seen_writes = self._writes()

    def invalidate(self) -> None:
        """Note that something wrote to the main shard that does not bump version counters (fused optimizers)."""
        torch.autograd.graph.increment_version(self.main_shard)

    def _writes(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return sum(unsharded._version for unsharded in self.unsharded)

    @torch.no_grad()
    def _keep_writes(self) -> None:
        """Bring what was written in place to unsharded parameters, in a forward or a step, to the main shard."""
        writes = self._writes()
        if writes == self._seen_writes:
            return
        if not self._resident:
            if self.stale:
                raise RuntimeError(
                    f"parameters around {self.layout.slots[0].fqn} were written to in place inside a step, and their "
                    f"shards were changed in the same step (by an optimizer): one of the two would be lost. Write to "
                    f"parameters before the forward or after the optimizer's step"
                )
            before = self.main_shard._version
            main = self.main_shard.to(self._mesh.device)
            # Where nothing was written, what is gathered is the main shard rounded to the gathered dtype.
            written = self._own_slice != main.to(self._own_slice.dtype)
            self.main_shard.copy_(torch.where(written, self._own_slice.to(main.dtype), main))
            self._kept_writes += self.main_shard._version - before
        self._seen_writes = writes

    def _keep_requires_grad(self) -> None:
        """Freeze or unfreeze sharded parameters whose unsharded ones were frozen or unfrozen inside a step."""
        with torch._C.DisableTorchFunctionSubclass():
            for sharded, unsharded in zip(self.sharded, self.unsharded, strict=True):
                if torch.Tensor.requires_grad.__get__(sharded) != unsharded.requires_grad:  # type: ignore[attr-defined]
                    sharded.requires_grad_(unsharded.requires_grad)

    # -- making the parameters

    def _view_parameter(self, spec: ParameterSpec, offset: int) -> nn.Parameter:
        shape = spec.parameter.shape
        stride = torch.empty(shape, device="meta").stride()
        # set_ and not a slice: each parameter has a version counter of its own, as in an unsharded model.
        view = self._gathered.new_empty(0).set_(self._gathered.untyped_storage(), offset, shape, stride)
        unsharded = UnshardedParameter(view, requires_grad=spec.parameter.requires_grad)
        vars(unsharded).update(spec.parameter.__dict__, fqn=spec.fqn, sharded_dtype=spec.dtype)
        return unsharded

    def _shard(self, spec: ParameterSpec, index: int) -> ShardTensor:
        """Turn the user's parameter into a ``ShardTensor`` over its part of the main shard."""
        parameter, slot, local = spec.parameter, self.layout.slots[index], self.local[index]
        shard_spec = ShardSpec(
            fqn=spec.fqn,
            shape=parameter.shape,
            intervals=tuple(
                self.layout.parameter_interval(slot, self._mesh.topology.slice_rank(rank))
                for rank in self._mesh.owners.ranks
            ),
            mesh=self._mesh,
            offloaded=local.device != self._mesh.device,
        )
        if not parameter.is_meta:
            local.copy_(shard_spec.localize(parameter.detach()))
        gradient, parameter.grad = parameter.grad, None
        hooks = take_hooks(parameter)
        sharded = ShardTensor(local, shard_spec, parameter.requires_grad)
        vars(sharded).update(
            parameter.__dict__, _unsharded=self.unsharded[index], _is_param=True
        )  # isinstance(p, nn.Parameter) holds
        try:
            swap_bodies(parameter, sharded)
            sharded = parameter
        except RuntimeError as error:
            warnings.warn(
                f"parameter {spec.fqn} cannot be sharded in place ({error}); it was registered anew: references that "
                f"were taken before, other than its module's, are to a copy that is not trained",
                stacklevel=2,
            )
        if any(hooks):
            sharded.adopt_hooks(*hooks)  # type: ignore[attr-defined]
        if gradient is not None:
            sharded.grad = ShardTensor(shard_spec.localize(gradient).to(local.device, copy=True), shard_spec)
        return sharded  # type: ignore[return-value]  # its body is a ShardTensor now
