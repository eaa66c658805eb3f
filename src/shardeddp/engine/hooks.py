"""Hooks of units: report forwards of modules and gradients of parameters to a runtime."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from shardeddp.engine.gradients import GroupGradients
from shardeddp.engine.progress import UnitProgress
from shardeddp.engine.unit import Unit
from shardeddp.tensor.unsharded import taking_hooks
from shardeddp.torch_private import (
    OptimizedModule,
    are_transforms_active,
    current_backward,
    never_traced,
    will_execute,
    without_torch_function,
)


class _Listener(Protocol):
    """Receiver of forwards and gradients from hooks: a runtime."""

    progresses: list[UnitProgress]

    def enter(self, progress: UnitProgress) -> None: ...
    def leave(self, progress: UnitProgress, inputs: Any, outputs: Any) -> None: ...
    def gather_ahead(self, progresses: Sequence[UnitProgress]) -> None: ...
    def gradient_ready(self, progress: UnitProgress, index: int) -> None: ...
    def outside_gradient_ready(self, progress: UnitProgress, index: int) -> None: ...


# -- Hooks of units: forwards and gradients

_never_traced = never_traced(
    "a unit of ShardedDP begins or ends here, and its parameters are gathered or released. "
    "Compile units one by one (block.compile()) to have each in one graph, or compile what "
    "contains units without fullgraph=True"
)


_eager_inside = never_traced(
    "a module of experts begins or ends here, and its parameters are registered for its forward"
)


class UnitHook:
    """Reports calls and returns of a unit's module to the runtime, outside of compiled code.

    Dynamo could specialize on traced hooks, or skip them: it replaces a module without hooks by its
    ``forward``, and a module that ``torch.compile`` has wrapped by the inner module. So every
    function here is a graph break, set at a point that every call passes:

    - A module that is not compiled has module hooks. Compiled code around it breaks there and is
      compiled again inside.
    - A module compiled in place (``module.compile()``) has its module hooks *inside* of the
      compiled code, so the compiled call itself is replaced by one with hooks around it.
    - So is the forward of the ``OptimizedModule`` that ``torch.compile(module)`` returns.
    """

    def __init__(self, runtime: _Listener, progress: UnitProgress) -> None:
        self.runtime = runtime
        self._unit_progress = progress
        # Handles of module hooks; None before the first follow().
        self._handles: list[RemovableHandle] | None = None
        # Replacement of the compiled call, with hooks around it.
        self._bracketed: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] | None = None  # the compiled call
        # One entry for each call that has reached `enter`; False if `enter` raised an error.
        self._calls: list[bool] = []

    @_never_traced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        if self.belongs_to(module):
            has_entered = False
            try:
                self.runtime.enter(self._unit_progress)  # may reset the list of calls
                has_entered = True
            finally:
                self._calls.append(has_entered)

    @_never_traced
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook, also called after an exception in the forward or in a pre-hook."""
        if self.belongs_to(module) and self._calls and self._calls.pop():
            self.runtime.leave(self._unit_progress, (args, kwargs), output)

    def reset(self) -> None:
        """Drop calls that have not returned: torch calls no hook after a KeyboardInterrupt."""
        self._calls.clear()

    def belongs_to(self, module: nn.Module) -> bool:
        """Return whether this is the unit's module; a deep copy keeps the hook without a unit."""
        return module is self._unit_progress.unit.spec.module

    def follow(self) -> None:
        """Attach to the module's current call, which users may compile after sharding."""
        module = self._unit_progress.unit.spec.module
        compiled = _compiled_call(module)
        if self._handles is not None and compiled is self._bracketed:
            return
        for handle in self._handles or ():
            handle.remove()
        self._compiled = compiled
        self._bracketed = None if compiled is None else self._bracket(compiled)
        if self._bracketed is None:
            self._handles = [
                module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
            ]
        elif module._compiled_call_impl is None:
            self._handles = []
            module.forward = self._bracketed
        else:
            self._handles = [module.register_forward_pre_hook(_not_only_forward)]
            module._compiled_call_impl = self._bracketed

    def detach(self) -> None:
        """Restore the module's call from before :meth:`follow`."""
        module = self._unit_progress.unit.spec.module
        for handle in self._handles or ():
            handle.remove()
        if self._bracketed is not None and _compiled_call(module) is self._bracketed:
            if module._compiled_call_impl is None:
                module.forward = self._compiled  # type: ignore[assignment]
            else:
                module._compiled_call_impl = self._compiled
        self._handles = self._bracketed = self._compiled = None

    def _bracket(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @_never_traced
        def call(*args: Any, **kwargs: Any) -> Any:
            self.runtime.enter(self._unit_progress)
            output = None
            try:
                output = compiled(*args, **kwargs)
            finally:
                self.runtime.leave(self._unit_progress, (args, kwargs), output)
            return output

        return call

    def __deepcopy__(self, memo: Any) -> UnitHook:
        return self

    def __reduce__(self) -> Any:
        return NoopUnitHook, ()


class ScopeHook:
    """Registers a unit's parameters with their modules for the forward of one module alone.

    Args:
        unit: Unit with the parameters.
        scope: Module whose forward computes with them; see ``Distribution.scope``.
    """

    def __init__(self, unit: Unit, scope: nn.Module) -> None:
        self._unit, self._scope = unit, scope
        self._calls = 0  # of the module that have not returned
        unit.set_scope(scope, False)
        self._handles = [
            scope.register_forward_pre_hook(self.enter),
            scope.register_forward_hook(self.leave, prepend=True, always_call=True),
        ]

    @_eager_inside
    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook, called after those that gather the unit."""
        if module is self._scope:
            self._calls += 1
            self._unit.set_scope(module, True)

    @_eager_inside
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook, also called after an exception in the forward or in a pre-hook."""
        if module is self._scope and self._calls:
            self._calls -= 1
            self._unit.set_scope(module, self._calls > 0)

    def reset(self) -> None:
        """Drop calls that have not returned: torch calls no hook after a KeyboardInterrupt."""
        self._calls = 0
        self._unit.set_scope(self._scope, False)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: Any) -> ScopeHook:
        return self

    def __reduce__(self) -> Any:
        return NoopUnitHook, ()


class EncoderHook:
    """Gathers the first layer of an ``nn.TransformerEncoder`` in evaluation, before its forward.

    The encoder inspects weights of its first layer. If they are plain tensors, it skips padded
    positions and writes zeros there.
    """

    def __init__(
        self, runtime: _Listener, encoder: nn.Module, first: Sequence[UnitProgress]
    ) -> None:
        self.runtime, self._encoder, self._first = runtime, encoder, first
        self._handle = encoder.register_forward_pre_hook(self.enter, with_kwargs=True)

    @_never_traced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        if (
            module is self._encoder
            and not (module.training or torch.is_grad_enabled())
            and not are_transforms_active()
        ):
            self.runtime.gather_ahead(self._first)

    def detach(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def __deepcopy__(self, memo: Any) -> EncoderHook:
        return self

    def __reduce__(self) -> Any:
        return NoopUnitHook, ()


class NoopUnitHook:
    """Hook of an unpickled module, without effect because its parameters are whole."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Do nothing."""

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Do nothing."""


def _compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that a compiled module's call runs; None if it is not compiled."""
    if module._compiled_call_impl is not None:
        return module._compiled_call_impl
    return module.forward if isinstance(module, OptimizedModule) else None


def _not_only_forward(module: nn.Module, args: Any) -> None:
    """Do nothing; the presence of a hook changes the tracing of code around the module.

    Without hooks, dynamo traces the module's ``forward``. With one, it uses the module's compiled
    call, which has a graph break around it.
    """


def drop_forward_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> None:
    """Remove forward hooks from a module, not from its children, without their handles.

    A deep copy of a module keeps the hooks but has no handles.
    """
    before = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    after = module._forward_hooks, module._forward_hooks_with_kwargs
    for hooks, *flags in (before, (*after, module._forward_hooks_always_called)):
        for key in [key for key, hook in hooks.items() if is_ours(hook)]:
            for each in (hooks, *flags):
                each.pop(key, None)


def is_unit_hook(hook: Any) -> bool:
    """Return whether a hook reports to a runtime: the module's own, or a deep copy's original."""
    return isinstance(getattr(hook, "__self__", None), UnitHook | EncoderHook | ScopeHook)


def attach_hooks(runtime: _Listener, progress: UnitProgress) -> UnitHook:
    """Report forwards of a unit's module and gradients of its parameters to the runtime."""
    hook = UnitHook(runtime, progress)
    hook.follow()
    parameters = progress.unit.unsharded_parameters()
    progress.expected = set(range(len(parameters)))
    places = [
        (group.gradients, index)
        for group in progress.unit.groups
        for index in range(len(group.unsharded))
    ]
    with without_torch_function():
        for index, parameter in enumerate(parameters):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            with taking_hooks(parameter):
                torch.Tensor.register_post_accumulate_grad_hook(
                    parameter, _gradient_hook(runtime, progress.index, index)
                )
                view: Any = parameter.view_as(parameter)
                accumulator = view.grad_fn.next_functions[0][0]
                progress.accumulators.append(accumulator)
                gradients, place = places[index]
                if gradients.adds_up_wider:
                    accumulator.register_prehook(_arrival_hook(gradients, place))
                del view  # it refers to the parameter, whose references are counted below
    first = 0
    for group in progress.unit.groups:
        group.buffer.count_references()
        group.gradients.attach(_outside_hook(runtime, progress.index, first))
        first += len(group.unsharded)
    return hook


def _outside_hook(runtime: _Listener, unit: int, first: int) -> Callable[[int], None]:
    reference = weakref.ref(runtime)

    def ready(index: int) -> None:
        runtime = reference()
        if runtime is not None:
            runtime.outside_gradient_ready(runtime.progresses[unit], first + index)

    return ready


def _gradient_hook(runtime: _Listener, unit: int, index: int) -> Callable[[torch.Tensor], None]:
    # Weak: autograd's reference to the hook is hidden from the garbage collector, and would keep
    # the model alive for ever.
    reference = weakref.ref(runtime)

    def ready(parameter: torch.Tensor) -> None:
        runtime = reference()
        if runtime is not None:
            runtime.gradient_ready(runtime.progresses[unit], index)

    return ready


def _arrival_hook(gradients: GroupGradients, index: int) -> Callable[[Any], None]:
    reference = weakref.ref(gradients)

    def arrives(_: Any) -> None:
        gradients = reference()
        if gradients is not None:
            gradients.arrives(index)

    return arrives


# -- Hooks of a graph


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield tensors in mappings, sequences, sets and dataclasses; skip other objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (str, bytes)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, (Sequence, Set)):
        for item in value:
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from find_tensors(getattr(value, field.name))


def call_when_complete(tensors: Sequence[torch.Tensor], call: Callable[[Any], None]) -> None:
    """Call a function in each backward after the last gradient that it computes for the tensors.

    torch's ``register_multi_grad_hook`` fails if ``autograd.grad`` computes the gradient of a leaf
    among them.
    """
    nodes = [get_gradient_edge(tensor).node for tensor in tensors]
    awaited: dict[int, int] = {}  # number of gradients still to come, by backward

    def arrive(gradient: torch.Tensor) -> None:
        backward = current_backward()
        rest = awaited.pop(backward, None) or sum(map(_is_reached, nodes))
        if rest > 1:
            awaited[backward] = rest - 1
        else:
            call(gradient)

    for tensor in tensors:
        tensor.register_hook(arrive)


def _is_reached(node: Node) -> bool:
    try:
        return bool(will_execute.current(node))
    except RuntimeError:
        return True  # the node of a leaf that is an input of `autograd.grad`


def weak_node_hook(
    runtime: _Listener, method: Callable[..., None], progress: UnitProgress, *args: object
) -> Callable[[Any], None]:
    """Return a hook for a graph node that calls a runtime's method, with a weak reference to it.

    A module may keep an output, and with it the graph, hidden from the garbage collector.
    """
    reference, unit, label = weakref.ref(runtime), progress.index, progress.unit.label

    def call(gradients: Any) -> None:
        runtime = reference()
        if runtime is None or not runtime.progresses:
            raise RuntimeError(
                f"backward comes to {label}, and the sharded model that it belongs to is gone, or "
                f"has been sharded anew: its gradients would reach no parameter. Keep a reference "
                f"to the model, and set up no other run of it, until backward has run"
            )
        method(runtime, runtime.progresses[unit], *args)

    return call
