"""Runtime: when units are unsharded, resharded and reduced; the hooks, the order, the prefetch. The units' only caller."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from shardeddp.comm import Mesh, agree_on_any
from shardeddp.plan.order import ExecutionOrder, OrderChange
from shardeddp.plan.placement import Placement, Reshard
from shardeddp.sharding.buffers import BufferSync
from shardeddp.sharding.flat_group import Reduction
from shardeddp.sharding.outputs import find_tensors
from shardeddp.sharding.track import UnitTrack
from shardeddp.sharding.unit import Unit, UnitState


class Phase(Enum):
    """What the model is doing; known to the runtime alone."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """How many units ahead of the one at work are gathered."""

    forward: int = 1
    backward: int = 1

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}_prefetch={getattr(self, name)}: expected 0 (none) or a number of units")


class UnitHook:
    """Tells the runtime when a unit's module is entered and left.

    Args:
        runtime: Whom to tell.
        track: The unit.
    """

    def __init__(self, runtime: Runtime, track: UnitTrack) -> None:
        self.runtime = runtime
        self._track = track

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        if self.belongs_to(module):
            self.runtime.enter(self._track)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook, called after an exception as well."""
        if self.belongs_to(module):
            self.runtime.leave(self._track, (args, kwargs), output)

    def belongs_to(self, module: nn.Module) -> bool:
        """False for a deep copy, which keeps the hook and computes with sharded parameters of its own."""
        return module is self._track.unit.spec.module

    def __deepcopy__(self, memo: Any) -> UnitHook:
        return self


def runtime_of(module: nn.Module) -> Runtime | None:
    """The runtime in charge of a module that has been sharded as a root; None for any other module."""
    for hook in module._forward_pre_hooks.values():
        owner = hook.__self__ if isinstance(hook, MethodType) else None
        if isinstance(owner, UnitHook) and owner.belongs_to(module) and owner.runtime.root_module is module:
            return owner.runtime
    return None


class Runtime:
    """Drives the units of one model through forwards and backwards.

    A unit is gathered when its forward is entered and released when it is left; its outputs announce its backward, which
    gathers it again; when its gradients are complete they are reduced and it is released. The root unit is entered by
    :meth:`step`, around everything that the user's step does. Recomputation by activation checkpointing is a forward that
    is entered during a backward: it neither prefetches nor reshards.

    Reductions are issued in the reverse of the order in which forwards were entered, so that ranks which use different
    parameters still issue the same collectives; what is left over at the end of a backward is agreed on.

    Args:
        units: The root unit first.
        mesh: Through which ranks agree.
        placement: When to reshard and to reduce.
        prefetch: How far ahead to gather.
    """

    def __init__(self, units: Sequence[Unit], mesh: Mesh, placement: Placement, prefetch: Prefetch) -> None:
        self.tracks = [UnitTrack(unit=unit, index=index) for index, unit in enumerate(units)]
        self.phase = Phase.IDLE
        self.sync_gradients = True
        """False while micro-batches accumulate without communication."""

        self._root = self.tracks[0]
        self.mesh = mesh
        self.placement = placement
        self._prefetch = prefetch
        self._forward_orders = {True: ExecutionOrder(), False: ExecutionOrder()}  # by whether gradients are enabled
        self._forward_order = self._forward_orders[True]
        self._backward_order = ExecutionOrder()
        self._entered_with_grad: list[int] = []  # units, by their first forward since the last backward
        self._reduce_queue: list[UnitTrack] = []  # units still to be reduced in this backward, in order
        self._in_flight: list[Reduction] = []  # issued -> finished before the next unit packs
        self._order_warned = False
        self._buffers = BufferSync(self.root_module, mesh)
        for track in self.tracks:
            self._attach(track)

    @property
    def root_module(self) -> nn.Module:
        """The module that the root unit belongs to."""
        return self._root.unit.spec.module

    # -- what the strategy calls

    @contextmanager
    def step(self) -> Iterator[list[Any]]:
        """Surround a user's step: parameters of the root unit are usable, whatever method reads them.

        Yields:
            A list to append the step's outputs to, from which their backward is announced.
        """
        outputs: list[Any] = []
        self.enter(self._root)
        try:
            yield outputs
        except BaseException:
            self.reset()
            raise
        self.leave(self._root, (), outputs)

    def parameters_changed(self) -> None:
        """Take note that an optimizer has stepped: whatever is unsharded is gathered anew before its next use."""
        for track in self.tracks:
            for group in track.unit.groups:
                group.invalidate()
            if track.active and track.unit.state is UnitState.UNSHARDED:
                track.unit.refresh()

    def sync_buffers(self) -> None:
        """Give rank 0's buffers to all ranks."""
        self._buffers.sync()

    def reset(self) -> None:
        """Back to rest after a failure: finish what is in flight, reshard, drop gradients that were not reduced."""
        for reduction in self._in_flight:
            reduction.finish()
        self._in_flight = []
        for track in self.tracks:
            track.active, track.awaiting_backward, track.open_uses = 0, False, 0
            for group in track.unit.groups:
                group.drop_unsharded_gradients()
        self.phase = Phase.IDLE
        self._entered_with_grad.clear()
        self._reduce_queue.clear()
        self._reshard_idle()

    # -- forward

    def _attach(self, track: UnitTrack) -> None:
        hook = UnitHook(self, track)
        module = track.unit.spec.module
        module.register_forward_pre_hook(hook.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook.leave, with_kwargs=True, always_call=True)
        parameters = track.unit.unsharded_parameters()
        track.expected = set(range(len(parameters)))
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, track, index))

    def enter(self, track: UnitTrack) -> None:
        """A forward of the unit begins: gather it, and what comes next."""
        if self._in_backward():
            self._ensure_unsharded(track)
            return
        if self.phase is Phase.BACKWARD:
            self.reset()  # the backward that set it never came to its end
        track.active += 1
        if track is self._root and track.active == 1:
            self._begin_pass()
        if self._root.active:
            self._warn_once(self._forward_order.visit(track.index))
        if torch.is_grad_enabled() and track.index not in self._entered_with_grad:
            self._entered_with_grad.append(track.index)
        self._ensure_unsharded(track)
        if self._root.active:
            self._prefetch_units(self._forward_order.upcoming(self._prefetch.forward))

    def leave(self, track: UnitTrack, inputs: Any, outputs: Any) -> None:
        """A forward of the unit has ended: announce its backward, and reshard it."""
        if self._in_backward():
            return
        track.active -= 1
        if torch.is_grad_enabled():
            self._announce_backward(track, inputs, outputs)
        if track is self._root:
            if track.active == 0:
                self.phase = Phase.IDLE
                self._reshard_idle()
        elif track.active == 0 and self._reshards_after_forward(track):
            track.unit.reshard()

    def _begin_pass(self) -> None:
        self.phase = Phase.FORWARD
        self._forward_order = self._forward_orders[torch.is_grad_enabled()]
        self._forward_order.begin()
        if self.root_module.training:
            self.sync_buffers()

    def _reshards_after_forward(self, track: UnitTrack) -> bool:
        if track.pinned or track.unit.state is not UnitState.UNSHARDED:
            return False
        if not track.awaiting_backward:
            return True
        # What ends the forward begins the backward: to reshard it would be to gather it again at once.
        return self.placement.reshard is not Reshard.AFTER_BACKWARD and not self._forward_order.at_end()

    def _announce_backward(self, track: UnitTrack, inputs: Any, outputs: Any) -> None:
        found = find_tensors(outputs)
        differentiable = [tensor for tensor in found.tensors if tensor.requires_grad]
        if found.opaque is not None and track is not self._root and not track.pinned:
            track.pinned = True
            warnings.warn(
                f"unit {track.unit.label} returns a {type(found.opaque).__qualname__}, whose tensors cannot be seen: the "
                f"unit stays unsharded from now on. Return tensors, mappings, sequences or dataclasses to avoid it",
                stacklevel=2,
            )
        if not differentiable:
            return
        track.awaiting_backward = True
        track.forward_version = track.unit.version
        for tensor in differentiable:
            tensor.register_hook(partial(self._pre_backward, track))
        if track.has_frozen_parameters():
            leaves = [tensor for tensor in find_tensors(inputs).tensors if tensor.requires_grad]
            if leaves:
                track.open_uses += 1
                torch.autograd.graph.register_multi_grad_hook(leaves, partial(self._use_finished, track))

    # -- backward

    def _pre_backward(self, track: UnitTrack, gradient: torch.Tensor) -> None:
        self._begin_backward()
        if track.forward_version != track.unit.version:
            raise RuntimeError(
                f"parameters of unit {track.unit.label} were changed between its forward and its backward (by an "
                f"optimizer step or a copy): the gradients would belong to neither state. Run backward first"
            )
        if not track.entered or track.unit.state is not UnitState.UNSHARDED:
            track.entered = True
            self._warn_once(self._backward_order.visit(track.index))
            self._ensure_unsharded(track)
            self._prefetch_units(self._backward_order.upcoming(self._prefetch.backward))

    def _begin_backward(self) -> None:
        if self.phase is Phase.BACKWARD:
            return
        self.phase = Phase.BACKWARD
        Variable._execution_engine.queue_callback(self._end_backward)
        self._backward_order.begin()
        for track in self.tracks:
            track.begin_backward()
        entered = [self.tracks[index] for index in reversed(self._entered_with_grad)]
        self._reduce_queue = [track for track in entered if track.missing]

    def _gradient_ready(self, track: UnitTrack, index: int, parameter: torch.Tensor) -> None:
        self._begin_backward()
        track.missing.discard(index)
        if track.gradients_complete():
            self._advance_reductions()
            self._reshard_after_backward(track)

    def _use_finished(self, track: UnitTrack, gradients: Any) -> None:
        track.open_uses -= 1
        self._reshard_after_backward(track)

    def _reshard_after_backward(self, track: UnitTrack) -> None:
        if track is self._root or track.active or track.pinned:
            return
        if track.unit.state is UnitState.UNSHARDED and track.backward_is_over():
            track.unit.reshard()

    def _advance_reductions(self) -> None:
        if not self.sync_gradients:
            return
        while self._reduce_queue and self._reduce_queue[0].gradients_complete():
            self._issue_reduction(self._reduce_queue.pop(0))

    def _issue_reduction(self, track: UnitTrack) -> None:
        # One unit's gradients are in flight at a time: that bounds memory, and a backward of one unit hides it.
        self._finish_reductions()
        track.issued = True
        self._in_flight = track.unit.reduce_gradients()

    def _finish_reductions(self) -> None:
        for reduction in self._in_flight:
            reduction.finish()
        self._in_flight = []

    def _end_backward(self) -> None:
        if self.sync_gradients:
            self._reduce_leftovers()
        for track in self.tracks:
            track.awaiting_backward, track.open_uses = False, 0
        self._entered_with_grad.clear()
        self.phase = Phase.FORWARD if self._root.active else Phase.IDLE
        self._reshard_idle(also_root=True)

    def _reduce_leftovers(self) -> None:
        """Reduce what the backward has left: parameters that some ranks use and others don't, or use out of order."""
        tracks = self.tracks
        leftover = [track.unit.has_unsharded_gradient() for track in tracks]
        issued = [track.issued for track in tracks]
        late = [there and done for there, done in zip(leftover, issued, strict=True)]
        used = [track.unit.used() for track in tracks]
        agreed = iter(agree_on_any([*leftover, *issued, *late, *(flag for flags in used for flag in flags)], self.mesh.control))
        any_leftover, any_issued, any_late = ([next(agreed) for _ in tracks] for _ in range(3))
        any_used = [[next(agreed) for _ in flags] for flags in used]
        queued = [track.index for track in self._reduce_queue]
        for index in [*queued, *(index for index in range(len(tracks)) if index not in queued)]:
            if (any_issued[index] or any_leftover[index]) and not tracks[index].issued:
                self._issue_reduction(tracks[index])
        for track, again in zip(tracks, any_late, strict=True):
            if again:
                self._issue_reduction(track)
        self._finish_reductions()
        self._reduce_queue.clear()
        for track, flags in zip(tracks, any_used, strict=True):
            track.unit.install_gradients(flags)
            track.end_backward(flags)

    # -- shared

    def _in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def _ensure_unsharded(self, track: UnitTrack) -> None:
        unit = track.unit
        if unit.state is UnitState.SHARDED:
            unit.unshard()
        if unit.state is UnitState.UNSHARDING:
            unit.wait()
        if unit.stale:
            unit.refresh()

    def _prefetch_units(self, indices: Sequence[int]) -> None:
        for index in indices:
            unit = self.tracks[index].unit
            if unit.state is UnitState.SHARDED:
                unit.unshard()

    def _reshard_idle(self, also_root: bool = False) -> None:
        """Reshard every unit that nothing needs: prefetched in vain, or kept for a backward that is over."""
        for track in self.tracks:
            unit = track.unit
            if unit.state is UnitState.UNSHARDING:
                unit.wait()
            busy = track.awaiting_backward or (track.active and not (also_root and track is self._root))
            if unit.state is UnitState.UNSHARDED and not busy and not track.pinned:
                unit.reshard()

    def _warn_once(self, change: OrderChange | None) -> None:
        if change is None or self._order_warned:
            return
        self._order_warned = True
        expected = "the end of the pass" if change.expected is None else self.tracks[change.expected].unit.label
        warnings.warn(
            f"units run in another order than in the first pass: expected {expected}, found "
            f"{self.tracks[change.found].unit.label}. The result is right; gathers that could not be foreseen are not "
            f"overlapped. Said once",
            stacklevel=2,
        )
