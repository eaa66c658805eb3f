"""Runtime: when units are unsharded and resharded, in which order, and how far ahead. The units' only caller."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from shardeddp.comm import Mesh
from shardeddp.comm.failures import is_transfer_error
from shardeddp.plan.placement import Placement, Reshard
from shardeddp.sharding.backward import graph_is_retained
from shardeddp.sharding.buffers import BufferSync
from shardeddp.sharding.function_arguments import extend_functions
from shardeddp.sharding.gathered_buffer import SavedView
from shardeddp.sharding.hooks import attach_hooks, take_charge
from shardeddp.sharding.outputs import find_tensors
from shardeddp.sharding.reducer import Reducer
from shardeddp.sharding.saved_tensors import SavedTensors
from shardeddp.sharding.shard_tensor import ShardTensor
from shardeddp.sharding.track import UnitTrack
from shardeddp.sharding.unit import Unit, UnitState
from shardeddp.sharding.visits import Visits, backward_kind, is_backward


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


class Runtime:
    """Drives the units of one model through forwards and backwards.

    A unit is gathered when its forward is entered and released when it is left; its outputs announce its backward,
    which gathers it again; when its gradients are complete it is released. The :class:`Reducer` decides when they are
    reduced. The root unit is entered by :meth:`step`, around everything that the user's step does. Recomputation by
    activation checkpointing is a forward that is entered during a backward: it neither prefetches nor reshards.

    Args:
        units: The root unit first.
        mesh: Through which ranks agree.
        placement: When to reshard and to reduce.
        prefetch: How far ahead to gather.
        uneven: Whether ranks may use different units in a step.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        placement: Placement,
        prefetch: Prefetch,
        uneven: bool = False,
    ) -> None:
        self.tracks = [UnitTrack(unit=unit, index=index) for index, unit in enumerate(units)]
        self.phase = Phase.IDLE
        self.sync_gradients = True
        """False while micro-batches accumulate: gradients stay on their rank or in their shard group."""

        self._root = self.tracks[0]
        self.mesh = mesh
        self.placement = placement
        self._prefetch = prefetch
        self._reducer = Reducer(self.tracks, mesh, placement)
        self.visits = Visits(self.tracks, mesh, placement, self._reducer, apart=uneven)
        self._keeps_graph = False  # the backward that is running records a graph of itself
        self._step_name = "forward"
        self._backwards = 0  # since the last forward of the root began
        self._backward_kind = backward_kind(0)
        self._entering = threading.Lock()
        self._forwards, self._thread = 0, 0  # of units, under way, and the thread that they run on
        self._buffers = BufferSync(self.root_module, mesh)
        extend_functions(self.pending_writes)
        self._saved = SavedTensors(self._restore)
        self._saves_views = placement.reshard is Reshard.AFTER_FORWARD and mesh.gather.size > 1
        for track in self.tracks:
            track.find_inner(self.tracks)
            # The root's stay in memory until the backward ends anyway; what graphs hold of them costs nothing.
            for group in track.unit.groups if self._saves_views and track.index else ():
                group.buffer.watched = self._saved.buffers
        self._track_of = {id(group.buffer): track for track in self.tracks for group in track.unit.groups}
        take_charge(self)
        self.idle = not any(track.unit.groups for track in self.tracks)
        """Whether no unit has anything to do: training on one rank."""

        self._hooks = [] if self.idle else [attach_hooks(self, track) for track in self.tracks]

    @property
    def root_module(self) -> nn.Module:
        """The module that the root unit belongs to."""
        return self._root.unit.spec.module

    # -- what the strategy calls

    @contextmanager
    def step(self, name: str = "step") -> Generator[list[Any]]:
        """Surround a user's step: parameters of the root unit are usable, whatever method reads them.

        Args:
            name: The kind of step; steps of one kind are expected to visit units in one order.

        Yields:
            A list to append the step's outputs to, from which their backward is announced.
        """
        outputs: list[Any] = []
        if self.idle:
            yield outputs
            return
        self._step_name = name
        self._enter(self._root)
        try:
            yield outputs
        except BaseException as error:
            if not is_transfer_error(error):  # else nothing arrives any more, and waiting for it takes as long again
                self.reset()
            raise
        self.leave(self._root, (), outputs)
        self._step_name = "forward"

    def parameters_changed(self, stepped: Sequence[ShardTensor]) -> None:
        """Take note that an optimizer has stepped: what is in use is gathered anew, the rest when it is used.

        Args:
            stepped: The sharded parameters that had a gradient; the same on all ranks.
        """
        # Fused optimizers do not count versions.
        torch.autograd.graph.increment_version([sharded.raw_local for sharded in stepped])
        for track in self.tracks:
            if track.unit.state is UnitState.UNSHARDED and track.unit.stale:
                if track.active:
                    track.unit.refresh()
                else:
                    track.unit.reshard()  # kept for a backward that has not come: nobody is to read former values
            if track.is_viewed:
                track.unit.renew_views()

    def pending_writes(self) -> Iterator[tuple[nn.Parameter, str]]:
        """The unsharded parameters that were written to inside of their units since they were gathered, and names."""
        for track in self.tracks:
            for group in track.unit.groups:
                yield from group.pending_writes()

    def sync_buffers(self) -> None:
        """Give rank 0's buffers to all ranks."""
        self._buffers.sync()

    def reset(self) -> None:
        """Back to rest after a failure: finish what is in flight, reshard, drop gradients that were not reduced."""
        self._reducer.abort()
        self._saved.clear()
        for track in self.tracks:
            track.active = 0
            track.forget_forwards()
            track.unit.drop_unsharded_gradients()
        self.phase = Phase.IDLE
        self._step_name = "forward"
        self._reshard_idle()

    # -- forward

    def enter(self, track: UnitTrack) -> None:
        """A forward of the unit's module begins."""
        if not (self._root.active or self._in_backward()) and track.unit.gathers:
            self.mesh.attendance.call(f"the forward of {track.unit.label}")  # outside of steps: anybody may call it
        self._enter(track)

    def _enter(self, track: UnitTrack) -> None:
        """Gather the unit, and what comes next."""
        if torch._C._are_functorch_transforms_active():
            self._enter_transformed(track)
            return
        if self._saves_views and track is not self._root:
            self._saved.enter()
        if self._in_backward():
            self.visits.revisit(track, self._backward_kind)
            self._ensure_unsharded(track)
            return
        if self.phase is Phase.BACKWARD:
            self.reset()  # the backward that set it never came to its end
        if track is not self._root:
            self._take_thread(track)
        track.active += 1
        if track is self._root and track.active == 1:
            self._begin_pass()
        if self._root.active:
            self._visit(track, self._step_name)
        else:
            self._ensure_unsharded(track)

    def _take_thread(self, track: UnitTrack) -> None:
        """Refuse the forward of a unit while another thread is in that of one: ranks would gather in other orders."""
        with self._entering:
            thread = threading.get_ident()
            if self._forwards and self._thread != thread and self.mesh.gather.size > 1:
                raise RuntimeError(
                    f"the forward of {track.unit.label} begins while another thread of this process is in the forward "
                    f"of a unit: each gathers its parameters from the other ranks, which would be asked in another "
                    f"order. Run units one after the other, or let one unit hold all that threads run at the same time "
                    f"(auto_wrap_policy)"
                )
            self._thread = thread
            self._forwards += 1

    def _visit(self, track: UnitTrack, kind: str) -> None:
        """A pass comes to a unit: gather it, and what comes next."""
        self.visits.visit(track, kind)
        self._ensure_unsharded(track)
        depth = self._prefetch.backward if is_backward(kind) else self._prefetch.forward
        for index in self.visits.upcoming(kind, depth):
            unit = self.tracks[index].unit
            if unit.state is UnitState.SHARDED:
                unit.unshard()

    def leave(self, track: UnitTrack, inputs: Any, outputs: Any) -> None:
        """A forward of the unit has ended: announce its backward, and reshard it."""
        if torch._C._are_functorch_transforms_active():
            self._leave_transformed(track)
            return
        if self._saves_views and track is not self._root:
            self._saved.leave()
        if self._in_backward():
            if torch.is_grad_enabled() and not track.awaiting_backward:
                # Reentrant checkpointing: only the recomputation has a graph, which is run backward next.
                self._announce_backward(track, inputs, outputs)
            return
        track.active -= 1
        if track is not self._root:
            with self._entering:
                self._forwards = max(0, self._forwards - 1)
        if torch.is_grad_enabled():
            self._announce_backward(track, inputs, outputs)
        if track is self._root:
            if track.active == 0:
                self.visits.end(self._step_name)
                self.phase = Phase.IDLE
                self._reshard_idle()
                if self.placement.offload_params:
                    self.mesh.drain()  # the host may write to what has just been copied to the device
        elif track.active == 0 and self._reshards_after_forward(track):
            track.unit.reshard(before_backward=track.awaiting_backward)

    def _enter_transformed(self, track: UnitTrack) -> None:
        # Inside of torch.func.grad, vmap and the like, which take no saved-tensor hooks: their graphs hold the memory.
        track.active += 1
        with temporarily_clear_interpreter_stack():
            self._ensure_unsharded(track)

    def _leave_transformed(self, track: UnitTrack) -> None:
        track.active -= 1
        if not track.active and not track.awaiting_backward and track.unit.state is UnitState.UNSHARDED:
            with temporarily_clear_interpreter_stack():
                track.unit.reshard()

    def _begin_pass(self) -> None:
        if self.placement.reshard is Reshard.NEVER and self.mesh.written.pending:
            # What has changed is gathered anew, and only that: all ranks must have changed it.
            self.mesh.assembly.call(f"the first step since {', '.join(self.mesh.written.pending)} was written to")
        self.phase = Phase.FORWARD
        self._saved.clear()
        self._backwards = 0
        for track in self.tracks:
            track.was_retained = False
        self.visits.begin(self._step_name)
        for hook in self._hooks:
            hook.follow()
        if self.root_module.training:
            self.sync_buffers()

    def _reshards_after_forward(self, track: UnitTrack) -> bool:
        if track.unit.state is not UnitState.UNSHARDED:
            return False
        if not track.awaiting_backward:
            return True
        # What ends the forward begins the backward: to reshard it would be to gather it again at once.
        return self.placement.reshard is not Reshard.AFTER_BACKWARD and not self.visits.at_end(self._step_name)

    def _announce_backward(self, track: UnitTrack, inputs: Any, outputs: Any) -> None:
        differentiable = [tensor for tensor in find_tensors(outputs) if tensor.requires_grad]
        if not differentiable:
            return
        track.awaiting_backward = True
        if track.unreached_uses or track.was_retained:
            track.unit.add_up_gradients()
        use = object()
        track.unreached_uses.add(use)
        # On nodes and not on tensors: torch crashes where a tensor with a hook is changed in place by a view of it and
        # gets another hook.
        for node in {get_gradient_edge(tensor).node for tensor in differentiable}:
            node.register_prehook(partial(self._pre_backward, track, use))
        if track.has_frozen_parameters():
            leaves = [tensor for tensor in find_tensors(inputs) if tensor.requires_grad]
            if leaves:
                track.open_uses += 1
                torch.autograd.graph.register_multi_grad_hook(leaves, partial(self._use_finished, track))

    # -- backward

    def _pre_backward(self, track: UnitTrack, use: object, gradients: Any) -> None:
        self._reach(track, use)

    def _reach(self, track: UnitTrack, use: object = None) -> None:
        """A backward comes to a unit, by a use that its outputs have announced, or by one that nothing has."""
        self._begin_backward()
        first = not track.entered
        track.was_retained |= graph_is_retained()
        if first or use in track.unreached_uses:
            track.unreached_uses.discard(use)
            self._reducer.reach(track, agreed=self.visits.agrees(self._backward_kind))
        if first or track.unit.state is not UnitState.UNSHARDED:
            self._visit(track, self._backward_kind)

    def _restore(self, saved: SavedView) -> torch.Tensor:
        """A view of a parameter that a graph has saved, wherever its unit is in the meantime."""
        track = self._track_of[id(saved.buffer)]
        if track.unit.state is not UnitState.UNSHARDED:
            if self._in_backward():
                self._reach(track)
            else:
                self._ensure_unsharded(track)  # somebody looks at the graph
        return saved.buffer.restore(saved)

    def outside_gradient_ready(self) -> None:
        """Autograd has left a gradient of a use of a parameter outside of its unit."""
        self._begin_backward()
        self._reducer.note_gradient()

    def _begin_backward(self) -> None:
        if self.phase is Phase.BACKWARD:
            return
        self.phase = Phase.BACKWARD
        Variable._execution_engine.queue_callback(self._end_backward)
        self._backward_kind = backward_kind(self._backwards)
        self._backwards += 1
        self.visits.begin(self._backward_kind)
        self._keeps_graph = torch.is_grad_enabled()
        for track in self.tracks:
            track.begin_backward()
        self._reducer.begin(self.sync_gradients)

    def gradient_ready(self, track: UnitTrack, index: int) -> None:
        """Autograd has left a gradient on a parameter of the unit."""
        self._begin_backward()
        self._reducer.note_gradient()
        track.missing.discard(index)
        self._reshard_after_backward(track)

    def _use_finished(self, track: UnitTrack, gradients: Any) -> None:
        track.open_uses -= 1
        self._reshard_after_backward(track)

    def _reshard_after_backward(self, track: UnitTrack) -> None:
        if track is self._root or track.active or self._keeps_graph:
            return
        if track.unit.state is UnitState.UNSHARDED and track.backward_is_over():
            track.unit.reshard()

    def _end_backward(self) -> None:
        self.visits.end(self._backward_kind)
        self._reducer.end()
        self.phase = Phase.FORWARD if self._root.active else Phase.IDLE
        if self._keeps_graph and not self._reducer.leaves_gradients:
            return  # `autograd.grad` for another backward: the parameters are part of its graph
        for track in self.tracks:
            track.forget_forwards()
        self._reshard_idle(also_root=True)

    # -- shared

    def _in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def _ensure_unsharded(self, track: UnitTrack) -> None:
        unit = track.unit
        if unit.state is UnitState.SHARDED:
            unit.unshard()
        if unit.state is UnitState.UNSHARDING:
            unit.wait()
        if unit.untidy:
            unit.tidy()
        if unit.stale:
            unit.refresh()

    def _reshard_idle(self, also_root: bool = False) -> None:
        """Reshard every unit that nothing needs: prefetched in vain, or kept for a backward that is over."""
        for track in self.tracks:
            unit = track.unit
            if unit.state is UnitState.UNSHARDING:
                unit.wait()
            busy = track.awaiting_backward or (track.active and not (also_root and track is self._root))
            if unit.state is UnitState.UNSHARDED and not busy:
                unit.reshard()
            if unit.untidy:
                unit.tidy()
