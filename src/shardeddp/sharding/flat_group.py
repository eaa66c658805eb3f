"""FlatGroup: the flat buffers of those parameters of a unit that share dtype and trainability."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from shardeddp.comm import Mesh, Pending, Ticket
from shardeddp.plan.layout import FlatLayout
from shardeddp.sharding.identity import swap_bodies
from shardeddp.sharding.shard_tensor import ShardSpec, ShardTensor
from shardeddp.sharding.spec import ParameterSpec
from shardeddp.sharding.unsharded import ReleasedParameter, UnshardedParameter


class FlatGroup:
    """One main shard, one gathered flat buffer, one gradient buffer, one gradient shard, and the views into them.

    Args:
        specs: The parameters, in layout order; each becomes a ``ShardTensor`` in place.
        layout: Where they lie.
        mesh: Through which they are gathered and reduced.
        retain: Keep the gathered buffer's memory and content when the unit is resharded.
    """

    def __init__(self, specs: Sequence[ParameterSpec], layout: FlatLayout, mesh: Mesh, retain: bool) -> None:
        self.layout = layout
        self._mesh = mesh
        first = specs[0].parameter
        self._resident = layout.shard_size == 1
        """The main shard is the whole flat buffer: nothing is ever gathered or released."""
        self._retain = retain or self._resident

        self.main_shard = torch.zeros(
            layout.shard_numel, dtype=first.dtype, device=mesh.device
        )  # 1D, shard_numel; lives as long as the model
        self._gathered = self.main_shard if self._resident else self.main_shard.new_empty(layout.padded_numel)
        self._own_slice = self._gathered.view(layout.shard_size, -1)[mesh.shard_rank]
        self.unsharded = [
            self._view_parameter(spec, slot.offset) for spec, slot in zip(specs, layout.slots, strict=True)
        ]
        self.local = [self._local_view(self.main_shard, i) for i in range(len(specs))]  # each 1D
        self.sharded = [self._shard(spec, i) for i, spec in enumerate(specs)]
        self._gathered_version = -1
        self._seen_writes = self._writes()
        self._kept_writes = 0  # versions of the main shard that only brought it up to what was known
        if not self._resident:
            self._release_memory()

        self.gradient_shard: torch.Tensor | None = None  # 1D, shard_numel; made at the first reduction, then kept
        self.gradients: list[ShardTensor] = []  # over views of the gradient shard, in layout order
        self._buffer: torch.Tensor | None = None  # 1D, padded_numel; storage emptied between reductions
        self._buffer_slots: list[torch.Tensor] = []  # views of it in the parameters' shapes, then its padding
        self._shard_slots: list[torch.Tensor] = []  # the same of the gradient shard, where that is the whole buffer
        self._packed = [False] * len(specs)  # whose gradient went into a reduction since the backward began
        self._reduced = False  # whether there was a reduction since the backward began

    # -- parameters

    @property
    def stale(self) -> bool:
        """Whether the main shard has changed since it was last gathered."""
        return self.main_shard._version != self._gathered_version

    @property
    def version(self) -> int:
        """Grows with every change of the parameters that is not the engine's own."""
        return self.main_shard._version + self._writes() - self._kept_writes

    @property
    def trainable(self) -> bool:
        """Whether any of the parameters requires a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(unsharded.requires_grad for unsharded in self.unsharded)

    def unshard(self) -> Ticket:
        """Allocate the gathered buffer if need be, and issue the all-gather into it."""
        self._keep_writes()
        if self._resident or (self._retain and not self.stale):
            ticket = Ticket(Pending(), None)
        else:
            ticket = self._mesh.gather_lane.issue(self._gather)
        self._gathered_version = self.main_shard._version
        return ticket

    def _gather(self) -> Pending:
        # Storage and copy belong to the lane: its allocator stream, and behind compute's last use of the buffer.
        self._gathered.untyped_storage().resize_(self._gathered.nbytes)
        self._own_slice.copy_(self.main_shard)
        return self._mesh.gather.all_gather_(self._gathered)

    def activate(self) -> None:
        """Make the unsharded parameters usable."""
        for unsharded in self.unsharded:
            unsharded.__class__ = UnshardedParameter

    def retain(self) -> None:
        """Keep the gathered buffer's memory and content from now on when the unit is resharded."""
        self._retain = True

    def release(self) -> None:
        """Give the gathered buffer's memory back; the unsharded parameters raise from here on."""
        self._keep_writes()
        self._keep_requires_grad()
        if not self._retain:
            self._release_memory()

    def _release_memory(self) -> None:
        self._gathered.untyped_storage().resize_(0)
        for unsharded in self.unsharded:
            unsharded.__class__ = ReleasedParameter

    def renew(self) -> None:
        """Note that the gathered values have changed: a graph that needs the former ones must fail, as always."""
        torch.autograd.graph.increment_version(self.unsharded)
        self._seen_writes = self._writes()

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
            self.main_shard.copy_(self._own_slice)
            self._kept_writes += self.main_shard._version - before
        self._seen_writes = writes

    def _keep_requires_grad(self) -> None:
        """Freeze or unfreeze sharded parameters whose unsharded ones were frozen or unfrozen inside a step."""
        with torch._C.DisableTorchFunctionSubclass():
            for sharded, unsharded in zip(self.sharded, self.unsharded, strict=True):
                if torch.Tensor.requires_grad.__get__(sharded) != unsharded.requires_grad:  # type: ignore[attr-defined]
                    sharded.requires_grad_(unsharded.requires_grad)

    def invalidate(self) -> None:
        """Note that something wrote to the main shard that does not bump version counters (fused optimizers)."""
        torch.autograd.graph.increment_version(self.main_shard)

    # -- gradients

    def reduce_gradients(self) -> Reduction:
        """Pack the unsharded gradients, drop them, and issue their averaging into the gradient shard."""
        with torch._C.DisableTorchFunctionSubclass():
            shard = self._ensure_gradient_shard()
            kept = [
                self._reduced or sharded.grad is mine
                for sharded, mine in zip(self.sharded, self.gradients, strict=True)
            ]
            self._reduced = True
            accumulate = any(kept)
            # A rank that owns the whole buffer packs straight into its gradient shard.
            direct = self._resident and not accumulate
            buffer, slots = (shard, self._shard_slots) if direct else self._open_buffer()
            self._pack(slots)
        # Where it is to be added to the shard, the average waits for that in this rank's slice of the buffer.
        output = buffer.view(self.layout.shard_size, -1)[self._mesh.shard_rank] if accumulate else shard

        def action() -> Pending:
            scattered = self._mesh.reduce.reduce_scatter(output, buffer)
            return scattered.then(lambda: self._mesh.replicate.all_reduce_(output, "mean"))

        return Reduction(self, self._mesh.reduce_lane.issue(action), output, kept)

    def finish_reduction(self, output: torch.Tensor, kept: Sequence[bool]) -> None:
        """Bring a reduced shard to where the gradients are and give the packing buffer's memory back."""
        if self.gradient_shard is None:
            raise RuntimeError(f"no reduction of {self.layout.slots[0].fqn} has been issued")
        if output is not self.gradient_shard:
            if all(kept):
                self.gradient_shard.add_(output)
            else:
                self._merge(output, kept)
        if self._buffer is not None:
            self._buffer.untyped_storage().resize_(0)

    def install_gradients(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of the parameters that any rank has used; the others keep what they had."""
        with torch._C.DisableTorchFunctionSubclass():
            for i, sharded in enumerate(self.sharded):
                if not used[i]:
                    continue
                found = sharded.grad
                if found is not self.gradients[i]:
                    if found is not None:
                        # The parameter was also used outside its unit; that part was averaged in backward.
                        self.gradients[i].to_local().add_(local_part(found, sharded.spec))
                    sharded.grad = self.gradients[i]

    def drop_unsharded_gradients(self) -> None:
        """Forget gradients that have not been reduced."""
        with torch._C.DisableTorchFunctionSubclass():
            for unsharded in self.unsharded:
                unsharded.grad = None

    def has_unsharded_gradient(self) -> bool:
        """Whether autograd has left a gradient that no reduction has taken yet."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(unsharded.grad is not None for unsharded in self.unsharded)

    def begin_backward(self) -> None:
        """Start counting what this backward uses."""
        self._packed = [False] * len(self._packed)
        self._reduced = False

    def used(self) -> list[bool]:
        """By parameter, whether a gradient of this rank was packed or waits to be."""
        with torch._C.DisableTorchFunctionSubclass():
            waiting = [unsharded.grad is not None for unsharded in self.unsharded]
        return [packed or there for packed, there in zip(self._packed, waiting, strict=True)]

    def _pack(self, slots: Sequence[torch.Tensor]) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for i, (slot, unsharded) in enumerate(zip(slots, self.unsharded, strict=False)):
            gradient = unsharded.grad
            if gradient is None:
                slot.zero_()
                continue
            self._packed[i] = True
            targets.append(slot)
            sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
            unsharded.grad = None
        for padding in slots[len(self.unsharded) :]:
            padding.zero_()
        if targets:
            torch._foreach_copy_(targets, sources)

    def _merge(self, output: torch.Tensor, kept: Sequence[bool]) -> None:
        for i, keep in enumerate(kept):
            mine, arrived = self.gradients[i].to_local(), self._local_view(output, i)
            mine.add_(arrived) if keep else mine.copy_(arrived)

    def _ensure_gradient_shard(self) -> torch.Tensor:
        if self.gradient_shard is None:
            self.gradient_shard = torch.zeros_like(self.main_shard)
            self.gradients = [
                ShardTensor(self._local_view(self.gradient_shard, i), sharded.spec)
                for i, sharded in enumerate(self.sharded)
            ]
            if self._resident:
                self._shard_slots = self._slot_views(self.gradient_shard)
        return self.gradient_shard

    def _open_buffer(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if self._buffer is None:
            self._buffer = self.main_shard.new_empty(self.layout.padded_numel)
            self._buffer_slots = self._slot_views(self._buffer)
        self._buffer.untyped_storage().resize_(self._buffer.nbytes)
        return self._buffer, self._buffer_slots

    # -- views

    def _slot_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of every parameter's slot in its shape, then of every stretch of padding."""
        views = [flat[slot.interval.start : slot.interval.stop].view(slot.shape) for slot in self.layout.slots]
        return views + [flat[gap.start : gap.stop] for gap in self.layout.padding_intervals]

    def _local_view(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        interval = self.layout.local_interval(self.layout.slots[index], self._mesh.shard_rank)
        return shard[interval.start : interval.stop]

    def _view_parameter(self, spec: ParameterSpec, offset: int) -> nn.Parameter:
        shape = spec.parameter.shape
        stride = torch.empty(shape, device="meta").stride()
        # set_ and not a slice: each parameter has a version counter of its own, as in an unsharded model.
        view = self._gathered.new_empty(0).set_(self._gathered.untyped_storage(), offset, shape, stride)
        unsharded = UnshardedParameter(view, requires_grad=spec.parameter.requires_grad)
        vars(unsharded).update(spec.parameter.__dict__, fqn=spec.fqn)
        for hook in (spec.parameter._backward_hooks or {}).values():
            unsharded.register_hook(hook)
        return unsharded

    def _shard(self, spec: ParameterSpec, index: int) -> ShardTensor:
        """Turn the user's parameter into a ``ShardTensor`` over its part of the main shard."""
        parameter, slot, local = spec.parameter, self.layout.slots[index], self.local[index]
        shard_spec = ShardSpec(
            fqn=spec.fqn,
            shape=parameter.shape,
            intervals=tuple(self.layout.parameter_interval(slot, rank) for rank in range(self.layout.shard_size)),
            mesh=self._mesh,
        )
        local.copy_(shard_spec.localize(parameter.detach()))
        gradient, parameter.grad = parameter.grad, None
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
        if gradient is not None:
            sharded.grad = ShardTensor(shard_spec.localize(gradient).clone(), shard_spec)
        return sharded  # type: ignore[return-value]  # its body is a ShardTensor now


class Reduction:
    """A gradient reduction that has been issued.

    Args:
        group: Whose gradients.
        ticket: The collectives -> waited for in :meth:`finish`.
        output: 1D, shard_numel; where the averaged gradients arrive.
        kept: By parameter, whether earlier gradients in the gradient shard are to be added to.
    """

    def __init__(self, group: FlatGroup, ticket: Ticket, output: torch.Tensor, kept: Sequence[bool]) -> None:
        self._group, self._ticket, self._output, self._kept = group, ticket, output, kept

    def finish(self) -> None:
        """Wait for the collectives and complete the gradient shard."""
        self._ticket.wait()
        self._group.finish_reduction(self._output, self._kept)


def local_part(tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """This rank's elements of a gradient or state of a parameter, sharded or full."""
    if isinstance(tensor, ShardTensor) and tensor.spec is spec:
        return tensor.to_local()
    return spec.localize(tensor)
