"""Runtime: schedule of unsharding, resharding and prefetching.

Hooks on modules and gradients (``hooks.py``) call it. It gathers and releases units itself, through
:class:`OrderAgreement` if ranks may use different units, and leaves their gradients to
:class:`Reducer`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from typing_extensions import override

from shardeddp.comm import Mesh
from shardeddp.comm.desync import refuse_traced
from shardeddp.comm.propagation import is_transfer_error
from shardeddp.config import Options
from shardeddp.engine.buffers import BufferBroadcast
from shardeddp.engine.calls import CallHook, Listener
from shardeddp.engine.hooks import (
    EncoderHook,
    attach_hooks,
    call_when_complete,
    find_tensors,
)
from shardeddp.engine.order import OrderAgreement, PassKind
from shardeddp.engine.progress import UnitProgress
from shardeddp.engine.reducer import Reducer
from shardeddp.engine.saved_tensors import SavedTensors
from shardeddp.engine.split_layers import SplitLayer, split_layers_of
from shardeddp.engine.states import EVENTS, Phase, UnitState, state_after
from shardeddp.engine.storage import RELEASED_MEMORY, SavedView
from shardeddp.engine.unit import Unit
from shardeddp.errors import first_three
from shardeddp.tensor.autograd import node_for_engine
from shardeddp.tensor.backward import graph_is_retained, running_backward
from shardeddp.tensor.gradient_hooks import weakly
from shardeddp.tensor.shard_tensor import ShardTensor, increment_versions, meshes_of_units
from shardeddp.torch_private import (
    are_transforms_active,
    engine,
    is_in_backward,
    outside_selective_checkpoints,
    temporarily_clear_interpreter_stack,
)


class _NotedUse(NamedTuple):
    """Forward of a unit, noted in a node of the graph around it."""

    unit: int
    """Index of the unit."""
    use: object
    """Token of the forward."""
    number: int | None
    """Number of the input that comes from the node; None: the node makes an output."""


_OUTSIDE = PassKind("forward")
"""Kind of forwards outside of steps."""


class Runtime:
    """Drives the units of one model through forwards and backwards.

    A unit is gathered when its forward begins and released when the forward ends. Hooks on its
    outputs gather it again for the backward; it is released when its gradients are complete.
    The :class:`Reducer` decides when they are reduced. :meth:`step` enters the root unit around the
    user's whole step. Recomputation by activation checkpointing is a forward that begins during a
    backward: it neither prefetches nor reshards.

    ``states.py`` has the states of units, of buffers and of the model, and who changes them.

    Args:
        units: Units of the model, the root unit first.
        mesh: Process groups of the ranks that share the model.
        options: Options of the strategy.
        precision: Choice of the dtypes, compared when the model is set up again.
        guard: Context manager around the first step of each kind.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        options: Options,
        *,
        precision: object = None,
        guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.progresses = [UnitProgress(unit=unit, index=index) for index, unit in enumerate(units)]
        self.phase = Phase.IDLE
        self.sync_gradients = True
        """False while micro-batches accumulate: gradients stay on a rank or in its shard group."""

        self.optimizes_after_step = True
        """False if training steps run backward and optimizers themselves (manual optimization)."""

        self._root = self.progresses[0]
        self.mesh = mesh
        self.options = options
        self.sharding = sharding = options.sharding
        self._reducer = Reducer(self.progresses, mesh, sharding)
        self.agreement = OrderAgreement(
            self.progresses,
            mesh,
            sharding,
            self._reducer,
            uses_different_units=options.uneven_units,
        )
        self._keeps_graph = False  # the running backward records a graph (create_graph)
        self._has_warned = False  # of the graph that gradients lose
        self._forward = _OUTSIDE
        self._backwards = 0  # count since the last forward of the root began
        self._in_nodes = object()  # key of this runtime's entry in the metadata of graph nodes
        self._backward = PassKind(backward=0)
        self._phase_backward: int | None = None  # number of the backward that set the phase
        self._entering = threading.Lock()
        self._forwards, self._thread = 0, 0  # running forwards of units, and their thread
        self._buffers = BufferBroadcast(self.root_module)
        self.buffers_are_due = True
        """Whether the next training step begins with a broadcast of rank 0's buffers."""
        self._saved = SavedTensors(self._restore)
        self._saves_views = sharding.reshard.in_turn and mesh.gather.size > 1
        for progress in self.progresses:
            progress.find_inner(self.progresses)
            # The root's parameters stay in memory until the backward ends anyway: views that graphs
            # hold of them cost nothing.
            for group in progress.unit.groups if self._saves_views and progress.index else ():
                group.buffer.enter_in(self._saved.buffers)
        self._progress_of = {
            id(group.buffer): progress
            for progress in self.progresses
            for group in progress.unit.groups
        }
        self.is_passthrough = not any(progress.unit.groups for progress in self.progresses)
        """Whether no unit gathers or reduces: training on one rank."""

        # By module: of units, of split layers, and of compiled modules around these.
        self._hooks: dict[int, CallHook] = {}
        self._encoder_hooks: list[EncoderHook] = []
        self._split_layers: list[SplitLayer] = []
        if not self.is_passthrough:
            self._attach()

        self.precision = precision
        self._guard = guard
        self._seen_steps: set[str] = set()  # kinds of steps that have run once
        # The objects are kept alive, so that their ids are not used again.
        self._structure, self._objects = _structure_of(self.root_module, {})
        _RUNTIMES[id(self.root_module)] = self

    def _attach(self) -> None:
        """Hook the modules and parameters of the units."""
        self._hooks = {
            # Weak: autograd's references to hooks are hidden from the garbage collector, and would
            # keep the model alive for ever.
            id(progress.unit.spec.module): attach_hooks(
                progress,
                Listener(partial(self.enter, progress), partial(self.leave, progress)),
                partial(weakly, self, Runtime.gradient_ready, progress.index),
                partial(weakly, self, Runtime.outside_gradient_ready, progress.index),
            )
            for progress in self.progresses
        }
        self._encoder_hooks = [*self._hooks_of_encoders()]
        units = [progress.unit for progress in self.progresses]
        self._split_layers = [*split_layers_of(self.root_module, units)]
        self._follow_calls()

    @property
    def is_current(self) -> bool:
        """Whether the model still has the modules, parameters and buffers that were sharded."""
        stands_for = {
            id(tensor): sharded
            for progress in self.progresses
            for tensor, sharded in progress.unit.overrides()
        }
        structure, _ = _structure_of(self.root_module, stands_for)
        return structure == self._structure

    def go_on_from(self, former: Runtime) -> None:
        """Continue the run that another runtime of the module has begun."""
        self.optimizes_after_step = former.optimizes_after_step
        self.sync_gradients = former.sync_gradients
        self.buffers_are_due = former.buffers_are_due
        # Buffers of the setup: ranks may have registered buffers of their own since.
        self._buffers = former._buffers

    def check_rest(self, action: str) -> None:
        """Raise an error if sharding the module anew with another strategy would lose state."""
        # If the step runs backwards itself, a backward of its outputs may never come.
        awaits = self._root.awaiting_backward and self.optimizes_after_step
        overridden = any(each.unit.is_overridden for each in self.progresses)
        if self._root.active or awaits or overridden:
            raise RuntimeError(
                f"{action} inside of a step or of summon_full_params: call it between two optimizer "
                f"steps, from on_train_batch_start for instance"
            )
        if self.mesh.run.incomplete:
            raise RuntimeError(
                f"{action} between micro-batches: gradients that a later one is to complete would "
                f"be lost. Call it where an optimizer has stepped, before the next batch"
            )
        viewed = [each.unit.label for each in self.progresses if each.unit.is_viewed]
        if viewed:
            raise RuntimeError(
                f"{action} while something holds views of parameters that were taken in a step, of "
                f"{first_three(viewed)}: they would no longer follow the parameters. Drop them, or "
                f"clone() those to be kept"
            )
        known = [
            sharded.spec.fqn
            for progress in self.progresses
            for sharded in progress.unit.sharded_parameters()
            if sharded.node_is_known
        ]
        if known:
            raise RuntimeError(
                f"{action} with hooks on nodes of the graph of {first_three(known)} "
                f"(get_gradient_edge, register_multi_grad_hook): they would not be called any more. "
                f"Set hooks on parameters: parameter.register_hook(...)"
            )

    def dissolve(self) -> None:
        """Detach hooks and dissolve the units; parameters stay sharded."""
        if self._root.active or any(each.unit.is_overridden for each in self.progresses):
            raise RuntimeError(
                f"{type(self.root_module).__name__} cannot be sharded anew inside of a step or of "
                f"summon_full_params of an earlier run: it has been changed since that run has set "
                f"it up, or parts of it belong to another module now. Let the step or the context "
                f"end first"
            )
        if not self.is_passthrough:
            self.reset()
            self._reducer.close()
        for hook in (*self._split_layers, *self._hooks.values(), *self._encoder_hooks):
            hook.detach()
        for progress in self.progresses:
            progress.unit.dissolve()
        self._hooks.clear()
        self._encoder_hooks, self._split_layers, self.progresses = [], [], []
        self._progress_of.clear()
        _RUNTIMES.pop(id(self.root_module), None)

    @property
    def root_module(self) -> nn.Module:
        """Module of the root unit."""
        return self._root.unit.spec.module

    # -- Interface of the strategy

    @contextmanager
    def step(
        self, name: str = "step", *, optimizes_after: bool | None = None
    ) -> Generator[list[Any]]:
        """Surround a user's step: root parameters are usable in all methods.

        Args:
            name: Kind of step; steps of one kind are expected to use units in the same order.
            optimizes_after: False if the step runs backward and optimizers itself; None: as in the
                step before.

        Yields:
            List for the step's outputs, appended by the caller; hooks on them announce a backward.
        """
        outputs: list[Any] = []
        if optimizes_after is not None:
            self.optimizes_after_step = optimizes_after
        guard = nullcontext() if name in self._seen_steps else self._guard()
        self._seen_steps.add(name)
        if self.is_passthrough:
            with guard:
                yield outputs
            return
        self._forward = PassKind(name)
        if untied := self.mesh.run.take_untied():
            self._warn_of_untied(untied)
        try:
            self._enter(self._root)
            with self.mesh.run.step(), guard:
                yield outputs
            self.leave(self._root, (), outputs)
        except BaseException as error:
            # After a transfer error no collective completes: a wait would last until its timeout.
            if not is_transfer_error(error):
                self.reset()
            raise
        self._forward = _OUTSIDE

    @property
    def agrees_on_units(self) -> bool:
        """Whether ranks send messages about the units of the running step's forward."""
        return self.agreement.agrees(self._forward)

    def _warn_of_untied(self, untied: Mapping[str, str]) -> None:
        pairs = [f"{name} that of {other}" for name, other in untied.items()]
        if self.mesh.rank == 0:
            warnings.warn(
                f"parameters were assigned the memory of others by `.data = ...`: {first_three(pairs)}. "
                f"They have taken the values and stay in memory of their own: what is written to one "
                f"does not reach the other, as it would if they were not sharded. Let parameters share "
                f"memory before the model is sharded; to take values alone, assign a clone()",
                stacklevel=3,
            )

    def follow_step(self) -> None:
        """Gather units in use anew after an optimizer step; the others are at their next use."""
        for progress in self.progresses:
            if progress.unit.state is UnitState.UNSHARDED and progress.unit.stale:
                if progress.active:
                    progress.unit.refresh()
                else:
                    # Kept for a backward that has not come, which must not read former values.
                    progress.unit.reshard()
            if progress.unit.has_views:
                progress.unit.renew_views()
        # On the host the block of the last release lives until the next gather takes it. Units
        # resharded here may have left one, and the next step takes time to come to a gather.
        RELEASED_MEMORY.clear()

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's module buffers to all ranks."""
        self._buffers.broadcast(self.mesh)

    def reset(self) -> None:
        """Return to the idle phase after a failure.

        Finishes collectives in flight, reshards, and drops gradients that were not reduced.
        """
        self._reducer.abort()
        self.agreement.reset()
        self._saved.clear()
        for hook in (*self._hooks.values(), *self._split_layers):
            hook.reset()
        for progress in self.progresses:
            progress.reset()
            for group in progress.unit.groups:
                group.gradients.drop_waiting()
        self._forwards = 0  # torch calls no hook after a KeyboardInterrupt
        self._enter_phase("a failure")
        self._forward = _OUTSIDE
        self._reshard_unused()

    def start_over(self, *, buffers_are_due: bool) -> None:
        """Return to the begin of a step that has failed on all ranks.

        Args:
            buffers_are_due: Value of the attribute at the step's begin.
        """
        self.reset()
        self._reducer.close()
        self.buffers_are_due = buffers_are_due

    @contextmanager
    def without_sync(self) -> Generator[None]:
        """Surround micro-batches whose gradients a later one completes; may be nested."""
        former, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            # A repeated step may have gone on in another runtime of the module.
            for runtime in (self, runtime_of(self.root_module) or self):
                runtime.sync_gradients = former

    # -- Forward

    def enter(self, progress: UnitProgress) -> None:
        """Begin a forward of the unit's module."""
        if not (self._root.active or is_in_backward()) and progress.unit.needs_all_gather:
            # Outside of steps a single rank may call the module.
            self.mesh.fingerprints.call(f"the forward of {progress.unit.label}")
        with outside_selective_checkpoints():
            self._enter(progress)

    def _enter(self, progress: UnitProgress) -> None:
        """Gather the unit and prefetch the next ones."""
        if progress.unit.needs_all_gather:
            refuse_traced(f"the forward of {progress.unit.label}")
        if are_transforms_active():
            self._enter_transformed(progress)
            return
        in_backward = is_in_backward()
        if not in_backward and self.phase is Phase.BACKWARD:
            # The backward that set the phase has failed.
            self._abort_backward() if self._root.active else self.reset()
        saves = self._saves_views and progress is not self._root
        if saves:
            self._saved.enter()
        try:
            if in_backward:
                self.agreement.revisit(progress, self._backward)
                self._ensure_unsharded(progress)
                if graph_is_retained():
                    progress.unit.add_up_gradients()  # a later backward may run both graphs
            else:
                self._enter_forward(progress)
        except BaseException:
            if saves:
                self._saved.leave()  # leave() is not called for a forward that was not entered
            raise

    def _enter_forward(self, progress: UnitProgress) -> None:
        self._count(progress)
        try:
            if progress is self._root and progress.active == 1:
                self._begin_pass()
            self._make_usable(progress)
        except BaseException:
            self._uncount(progress)
            raise

    def unshard_ahead(self, progresses: Sequence[UnitProgress]) -> None:
        """Gather units before their forwards; called on all ranks."""
        for progress in progresses:
            if not self._root.active and progress.unit.needs_all_gather:
                self.mesh.fingerprints.call(f"the forward of {progress.unit.label}")
            with outside_selective_checkpoints():
                self._make_usable(progress)

    def _make_usable(self, progress: UnitProgress) -> None:
        if self._root.active:
            self._visit(progress, self._forward)
        else:
            self._ensure_unsharded(progress)

    def _follow_calls(self) -> None:
        """Attach hooks to modules' current calls, which users may compile after sharding."""
        for hook in self._hooks.values():
            hook.follow()
        for layer in self._split_layers:
            layer.follow(self._hooks)
        for key in [key for key, hook in self._hooks.items() if not hook.is_heard]:
            self._hooks.pop(key).detach()  # of a layer that is inside of compiled code now

    def _hooks_of_encoders(self) -> Iterator[EncoderHook]:
        for encoder in self.root_module.modules():
            if isinstance(encoder, nn.TransformerEncoder):
                layer = set(encoder.layers[0].modules())
                first = [it for it in self.progresses if it.unit.spec.module in layer]
                if first:
                    yield EncoderHook(encoder, partial(self.unshard_ahead, first))

    def _count(self, progress: UnitProgress) -> None:
        """Count the unit's forward as running; refuse that of a second thread."""
        if progress is not self._root:
            with self._entering:
                thread = threading.get_ident()
                if self._forwards and self._thread != thread and self.mesh.gather.size > 1:
                    raise RuntimeError(
                        f"the forward of {progress.unit.label} begins while another thread of this "
                        f"process is in the forward of a unit: each gathers its parameters from the "
                        f"other ranks, which would be asked in another order. Run units one after the "
                        f"other, or let one unit hold all that threads run at the same time "
                        f"(auto_wrap_policy)"
                    )
                self._thread = thread
                self._forwards += 1
        progress.begin_forward()

    def _uncount(self, progress: UnitProgress) -> None:
        progress.end_forward()
        if progress is not self._root:
            with self._entering:
                self._forwards = max(0, self._forwards - 1)

    def _visit(self, progress: UnitProgress, kind: PassKind) -> None:
        """Gather a unit that a forward or backward has reached, and prefetch the next ones.

        ``FlatGroup.unshard`` of flat_group.py says what that allocates, and who frees it. A unit
        is resharded in ``leave`` or ``_reshard_after_backward``, and in ``_reshard_unused`` if it
        was prefetched but not used.
        """
        self.agreement.visit(progress, kind)
        self._ensure_unsharded(progress)
        options = self.options
        depth = options.backward_prefetch if kind.is_backward else options.forward_prefetch
        for index in self.agreement.upcoming(kind, depth):
            unit = self.progresses[index].unit
            if unit.state is UnitState.SHARDED:
                unit.unshard()

    def leave(self, progress: UnitProgress, inputs: Any, outputs: Any) -> None:
        """End a forward of the unit: set hooks for its backward, and reshard it."""
        with outside_selective_checkpoints():
            self._leave(progress, inputs, outputs)

    def _leave(self, progress: UnitProgress, inputs: Any, outputs: Any) -> None:
        if are_transforms_active():
            self._leave_transformed(progress)
            return
        if self._saves_views and progress is not self._root:
            self._saved.leave()
        if is_in_backward():
            # This backward uses the unit next: it is released when its gradients are complete.
            if torch.is_grad_enabled() and not progress.awaiting_backward:
                # Reentrant checkpointing: only the recomputation has a graph; its backward is next.
                self._announce_backward(progress, inputs, outputs)
            return
        self._uncount(progress)
        if torch.is_grad_enabled():
            self._announce_backward(progress, inputs, outputs)
        if progress is self._root:
            if progress.active == 0:
                self.agreement.end(self._forward)
                self._enter_phase("the end of the root's forward")
                self._reshard_unused()
        elif progress.active == 0 and self._reshards_after_forward(progress):
            progress.unit.reshard(before_backward=progress.awaiting_backward)

    def _enter_transformed(self, progress: UnitProgress) -> None:
        # torch.func.grad, vmap and other transforms take no saved-tensor hooks: their graphs hold
        # the memory.
        with temporarily_clear_interpreter_stack():
            self._ensure_unsharded(progress)
        progress.begin_forward()

    def _leave_transformed(self, progress: UnitProgress) -> None:
        progress.end_forward()
        if (
            not progress.active
            and not progress.awaiting_backward
            and progress.unit.state is UnitState.UNSHARDED
        ):
            with temporarily_clear_interpreter_stack():
                progress.unit.reshard()

    def _begin_pass(self) -> None:
        if self.sharding.retains and self.mesh.run.written.pending:
            # Only changed parameters are gathered anew, so all ranks must have changed them.
            self.mesh.world_fingerprints.call(
                f"the first step since {', '.join(self.mesh.run.written.pending)} was written to"
            )
        self._enter_phase("the root's forward")
        self._saved.clear()
        self._backwards = 0
        for progress in self.progresses:
            progress.begin_pass()
        for progress in self.progresses:
            if progress.unit.has_views and progress.unit.stale:
                progress.unit.renew_views()  # after writes between steps
        self.agreement.begin(self._forward)
        self._follow_calls()
        if self.root_module.training:
            if self.buffers_are_due:
                self.broadcast_buffers()
            # Ranks keep their own buffers in later micro-batches and in manual optimization, as
            # DistributedDataParallel does in Lightning.
            self.buffers_are_due = (
                self.sync_gradients and self.optimizes_after_step and torch.is_grad_enabled()
            )

    def _reshards_after_forward(self, progress: UnitProgress) -> bool:
        if progress.unit.state is not UnitState.UNSHARDED:
            return False
        return self.sharding.reshard.ends_forward(
            awaits_backward=progress.awaiting_backward,
            begins_backward=self.agreement.at_end(self._forward),
        )

    def _announce_backward(self, progress: UnitProgress, inputs: Any, outputs: Any) -> None:
        differentiable = [tensor for tensor in find_tensors(outputs) if tensor.requires_grad]
        if not differentiable:
            return
        use = progress.add_use()
        unit, leaves = progress.unit, list[torch.Tensor]()
        has_frozen = len(unit.trainable_indices()) < len(unit.unsharded_parameters())
        counts = progress.counts_inputs and progress is not self._root
        if has_frozen or counts:
            leaves = [tensor for tensor in find_tensors(inputs) if tensor.requires_grad]
        if counts:
            # The gradient of a parameter may be requested, and then comes to no node.
            is_any = any(isinstance(tensor, nn.Parameter) for tensor in leaves)
            nodes = set() if is_any else set(map(node_for_engine, leaves))
            progress.count_inputs(use, len(nodes))
            for number, node in enumerate(nodes):
                self._note_in(node, progress, use, number)
        for node in set(map(node_for_engine, differentiable)):
            self._note_in(node, progress, use)
        if has_frozen and leaves:
            progress.open_use()
            call_when_complete(leaves, self._node_hook(Runtime._use_finished, progress))

    def _note_in(
        self, node: Node, progress: UnitProgress, use: object, number: int | None = None
    ) -> None:
        """Note a use in the node of one of its outputs, or of an input by its number.

        On nodes and not on tensors: torch crashes where a tensor with a hook is changed in place by
        a view of it and gets another hook.
        """
        known = cast(Any, node).metadata
        uses: list[_NotedUse] | None = known.get(self._in_nodes)
        if uses is None:
            uses = known[self._in_nodes] = []
            node.register_prehook(self._node_hook(Runtime._pass_uses, progress, uses, among=uses))
        else:  # the accumulation node of a parameter that a unit returns persists over steps
            living = progress.unreached_uses | progress.inputs_left.keys()
            uses[:] = [it for it in uses if it.unit != progress.index or it.use in living]
        uses.append(_NotedUse(progress.index, use, number))

    def _node_hook(
        self,
        method: Callable[..., None],
        progress: UnitProgress,
        *args: object,
        among: Sequence[_NotedUse] | None = None,
    ) -> Callable[[Any], None]:
        """Return a hook for a graph node that calls a method, with a weak reference to the runtime.

        A module may keep an output, and with it the graph, hidden from the garbage collector. A
        backward that passes inputs alone ``among`` noted uses needs no model.
        """
        reference, unit, label = weakref.ref(self), progress.index, progress.unit.label

        def call(gradients: Any) -> None:
            runtime = reference()
            if runtime is None or not runtime.progresses:
                if among and all(it.number is not None for it in among):
                    return
                raise RuntimeError(
                    f"backward comes to {label}, and the sharded model that it belongs to is gone, "
                    f"or has been sharded anew: its gradients would reach no parameter. Keep a "
                    f"reference to the model, and set up no other run of it, until backward has run"
                )
            method(runtime, runtime.progresses[unit], *args)

        return call

    # -- Backward

    def _pass_uses(self, _first: UnitProgress, uses: list[_NotedUse]) -> None:
        """Leave all units that share an input in the backward, and reach those of which it is an output.

        The last noted first. The forwards of outer units began before those of inner ones. Reached
        last, an outer unit would end the backward of the inner ones before it has begun. A unit
        that has got the output of another one is left, and released, before that one is reached.
        """
        for index, use, number in reversed(uses):
            progress = self.progresses[index]
            if number is None:
                self._reach(progress, use)
            elif progress.leave_input(use, number):
                self._reshard_after_backward(progress)

    def _reach(self, progress: UnitProgress, use: object = None) -> None:
        """Gather a unit that a backward reaches, by an announced use or by another one."""
        self._begin_backward()
        first = not progress.reached
        if first or use in progress.unreached_uses:
            if not self.agreement.agrees(self._backward):
                self._reducer.reduce_finished(progress)
            self._reducer.reach(progress)
        if first or progress.unit.state is not UnitState.UNSHARDED:
            self._visit(progress, self._backward)
        progress.reach_use(use)

    def _restore(self, saved: SavedView) -> torch.Tensor:
        """Return a view of a parameter that a graph has saved; gathers its unit if necessary."""
        progress = self._progress_of.get(id(saved.buffer))
        if progress is None:
            raise RuntimeError(
                "this graph was recorded before its model was sharded anew, and the memory that it "
                "refers to is gone. Run its backward before another run of the model is set up"
            )
        if progress.unit.state is not UnitState.UNSHARDED:
            if is_in_backward():
                self._reach(progress)
            else:
                self._ensure_unsharded(progress)  # users inspect the graph
        return saved.buffer.restore(saved)

    def outside_gradient_ready(self, unit: int, first: int, index: int) -> None:
        """Record that autograd has left a gradient of a parameter's use outside of its unit.

        ``first`` is the index in the unit of the first parameter of its group, ``index`` that of
        the parameter in the group.
        """
        self._begin_backward()
        self._reducer.note_gradient()
        self.progresses[unit].arrive_from_outside(first + index)

    def _begin_backward(self) -> None:
        if self.phase is Phase.BACKWARD:
            if running_backward() == self._phase_backward:
                return
            self._abort_backward()
        self._phase_backward = running_backward()
        self._enter_phase("a backward")
        engine.queue_callback(self._end_backward)
        self._backward = PassKind(backward=self._backwards)
        self._backwards += 1
        self.agreement.begin(self._backward)
        self._keeps_graph = torch.is_grad_enabled()
        for progress in self.progresses:
            progress.begin_backward()
        self._reducer.begin(self.sync_gradients)

    def gradient_ready(self, unit: int, index: int, parameter: torch.Tensor) -> None:
        """Record that autograd has left a gradient on a parameter of the unit."""
        progress = self.progresses[unit]
        if self.phase is not Phase.BACKWARD or running_backward() != self._phase_backward:
            self._begin_backward()
        if not self._reducer.leaves_gradients:
            self._reducer.note_gradient()
        if index not in progress.missing and index not in progress.unit.trainable_indices():
            return  # frozen since its forward: torch calls hooks but leaves no gradient
        progress.arrive(index)
        if progress.is_counted or not progress.missing:
            self._reshard_after_backward(progress)

    def _use_finished(self, progress: UnitProgress) -> None:
        progress.close_use()
        self._reshard_after_backward(progress)

    def _reshard_after_backward(self, progress: UnitProgress) -> None:
        if progress is self._root or progress.active or self._keeps_graph:
            return
        if progress.unit.state is UnitState.UNSHARDED and progress.backward_is_over():
            progress.unit.reshard()

    def _end_backward(self) -> None:
        self.agreement.end(self._backward)
        self._reducer.end()
        if self._root.active:
            self._enter_phase("the end of a backward inside of a step")
        else:
            self._enter_phase("the end of a backward")
        if self._keeps_graph:
            if not self._reducer.leaves_gradients:
                return  # `autograd.grad` for another backward, whose graph needs the parameters
            self._warn_of_lost_graph()
        for progress in self.progresses:
            progress.forget_forwards()
        self._reshard_unused(also_root=True)

    def _warn_of_lost_graph(self) -> None:
        if self._has_warned or self.mesh.rank:
            return
        self._has_warned = True
        warnings.warn(
            "backward(create_graph=True): .grad of sharded parameters is the average of all ranks "
            "and has no graph, so a penalty on it is a constant, and its derivative an error. Take "
            "gradients that can be differentiated from torch.autograd.grad(loss, parameters, "
            "create_graph=True): they are those of this rank",
            stacklevel=2,
        )

    def _abort_backward(self) -> None:
        """Leave the phase of a failed backward; its gradients stay, as in any backward."""
        self._reducer.abort()
        if self._root.active:
            self._enter_phase("a failed backward inside of a step")
        else:
            self._enter_phase("a failed backward")

    # -- Shared by forward and backward

    def _enter_phase(self, event: str) -> None:
        self.phase = state_after(EVENTS, event, self.phase, self)

    @override
    def __str__(self) -> str:
        return f"the phase of {type(self.root_module).__name__}"

    def _ensure_unsharded(self, progress: UnitProgress) -> None:
        unit = progress.unit
        unit.make_unsharded()
        if unit.registration_pending:
            unit.restore_registration()
        if unit.stale:
            unit.refresh()

    def _reshard_unused(self, also_root: bool = False) -> None:
        """Reshard units that were prefetched but not used, or kept for a backward that is over."""
        for progress in self.progresses:
            unit = progress.unit
            if unit.state is UnitState.UNSHARDING:
                unit.wait()
            busy = progress.awaiting_backward or (
                progress.active and not (also_root and progress is self._root)
            )
            if unit.state is UnitState.UNSHARDED and not busy:
                unit.reshard()
            if unit.registration_pending:
                unit.restore_registration()
        # The forward or backward is over, so no gather takes the block that the last release has
        # left: its memory is for the loss, the gradients or the optimizer now.
        RELEASED_MEMORY.clear()


def _structure_of(
    root: nn.Module, stands_for: Mapping[int, torch.Tensor]
) -> tuple[list[tuple[str, int, dict[str, int], list[str]]], list[object]]:
    """Return what a model consists of, and the objects whose ids that contains.

    Each module has a name, an ``id``, the ids of its parameters and the names of its buffers: equal
    if nothing has changed. ``stands_for`` has the sharded parameters by ``id`` of the temporary
    ones that replace them.
    """
    places: list[tuple[str, int, dict[str, int], list[str]]] = []
    objects: list[object] = []
    for name, module in root.named_modules(remove_duplicate=False):
        own = {key: stands_for.get(id(it), it) for key, it in module._parameters.items()}
        objects += [module, *own.values()]
        identities = {key: id(it) for key, it in own.items()}
        places.append((name, id(module), identities, [*module._buffers.keys()]))
    return places, objects


# -- All runtimes of this process

_RUNTIMES: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()
"""Runtimes by ``id`` of the root module; the strategy keeps a runtime alive, and so do hooks."""


def all_runtimes() -> list[Runtime]:
    """Return the runtimes of this process, in an order that is the same on all ranks."""
    return list(_RUNTIMES.values())


def runtime_of(module: nn.Module) -> Runtime | None:
    """Return the runtime of a module that was sharded as a root; None for any other module."""
    runtime = _RUNTIMES.get(id(module))
    return runtime if runtime is not None and runtime.root_module is module else None


def parameters_changed(stepped: Sequence[ShardTensor]) -> None:
    """Mark sharded parameters as changed by an optimizer step: those with a gradient.

    They are the same on all ranks.
    """
    increment_versions(stepped)  # fused optimizers do not
    meshes = {mesh.dense for mesh in meshes_of_units(stepped)}
    for runtime in all_runtimes():
        if runtime.mesh in meshes:
            runtime.follow_step()


def runtimes_around(module: nn.Module) -> list[Runtime]:
    """Return the runtimes of a module, of its submodules, and of modules that contain it."""
    modules = {id(each) for each in module.modules()}
    parameters = {id(each) for each in module.parameters()}

    def meets(runtime: Runtime) -> bool:
        specs = [progress.unit.spec for progress in runtime.progresses]
        return any(id(spec.module) in modules for spec in specs) or any(
            id(each.parameter) in parameters
            for spec in specs
            for each in (*spec.parameters, *spec.passthrough)
        )

    return [runtime for runtime in all_runtimes() if meets(runtime)]


def units_of_all() -> list[Unit]:
    """Return the units of all runtimes, in an order that is the same on all ranks."""
    return [each.unit for runtime in all_runtimes() for each in runtime.progresses]
