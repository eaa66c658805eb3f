"""Where the runtime hears of forwards and gradients: hooks around a unit's call and on its unsharded parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils.hooks import RemovableHandle

from shardeddp.sharding.shard_tensor import ShardTensor
from shardeddp.sharding.track import UnitTrack
from shardeddp.sharding.untraced import never_traced

if TYPE_CHECKING:
    from shardeddp.sharding.runtime import Runtime

_never_traced = never_traced(
    "a unit of ShardedDP begins or ends here, and its parameters are gathered or released. Compile units one by one "
    "(block.compile()) to have each in one graph, or compile what contains units without fullgraph=True"
)


class UnitHook:
    """Tells the runtime when a unit's module is called and has returned, outside of whatever is compiled.

    What dynamo traces it could specialize on, or leave out: it takes a module without hooks for its ``forward``, and a
    module that ``torch.compile`` has wrapped for what is inside. So everything here is an end of a graph for dynamo,
    and stands where a call is sure to pass:

    - a module that is not compiled has module hooks; compiled code around it breaks there, and goes on inside;
    - one compiled in place (``module.compile()``) has module hooks *inside* of the compiled code, so the compiled call
      itself is put in brackets;
    - the same for the forward of the ``OptimizedModule`` that ``torch.compile(module)`` returns.

    Args:
        runtime: Whom to tell.
        track: The unit.
    """

    def __init__(self, runtime: Runtime, track: UnitTrack) -> None:
        self.runtime = runtime
        self._track = track
        self._handles: list[RemovableHandle] | None = None  # of module hooks; None before the first follow()
        self._bracketed: Callable[..., Any] | None = None  # what has taken the place of the compiled call

    @_never_traced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        if self.belongs_to(module):
            self.runtime.enter(self._track)

    @_never_traced
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook, called after an exception as well."""
        if self.belongs_to(module):
            self.runtime.leave(self._track, (args, kwargs), output)

    def belongs_to(self, module: nn.Module) -> bool:
        """False for a deep copy, which keeps the hook and computes with sharded parameters of its own."""
        return module is self._track.unit.spec.module

    def follow(self) -> None:
        """Take the place that belongs to the module's call as it is now; users may compile after sharding."""
        module = self._track.unit.spec.module
        compiled = _compiled_call(module)
        if self._handles is not None and compiled is self._bracketed:
            return
        for handle in self._handles or ():
            handle.remove()
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

    def _bracket(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @_never_traced
        def call(*args: Any, **kwargs: Any) -> Any:
            self.runtime.enter(self._track)
            output = None
            try:
                output = compiled(*args, **kwargs)
            finally:
                self.runtime.leave(self._track, (args, kwargs), output)
            return output

        return call

    def __deepcopy__(self, memo: Any) -> UnitHook:
        return self

    def __reduce__(self) -> Any:
        return FormerUnitHook, ()


class FormerUnitHook:
    """What is left of a unit's hooks in a module that was pickled: its parameters are whole, nothing is gathered."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Do nothing."""

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Do nothing."""


def _compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What a call of a compiled module runs; None for a module that is not compiled itself."""
    if module._compiled_call_impl is not None:
        return module._compiled_call_impl
    return module.forward if isinstance(module, OptimizedModule) else None


def _not_only_forward(module: nn.Module, args: Any) -> None:
    """Nothing but a hook: code that dynamo traces around a module without hooks goes straight to its ``forward``.

    With one it asks for the module's compiled call, which is in brackets that it cannot trace.
    """


_RUNTIMES: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()
"""By identity of the root module; it is the module's hooks that keep a runtime alive."""


def runtime_of(module: nn.Module) -> Runtime | None:
    """The runtime in charge of a module that has been sharded as a root; None for any other module."""
    runtime = _RUNTIMES.get(id(module))
    return runtime if runtime is not None and runtime.root_module is module else None


def take_charge(runtime: Runtime) -> None:
    """Let a runtime be found by the module that it drives."""
    _RUNTIMES[id(runtime.root_module)] = runtime


def parameters_changed(stepped: Sequence[ShardTensor]) -> None:
    """Let all runtimes take note that an optimizer has stepped, each of its own parameters."""
    for runtime in list(_RUNTIMES.values()):
        mine = [each for each in stepped if each.is_of_a_unit and each.spec.mesh is runtime.mesh]
        if mine:
            runtime.parameters_changed(mine)


def make_plain(module: nn.Module) -> None:
    """Let the deep copy of a sharded module be a module like any other; a collective of all ranks.

    Its parameters become whole ones. What else is sharded, because a setup has failed half way, stays as it is.

    Args:
        module: Any module that is not sharded as a root.
    """
    whole: dict[int, torch.Tensor] = {}
    for each in module.modules():
        for name, parameter in [*each._parameters.items()]:
            if isinstance(parameter, ShardTensor) and parameter.is_copy:
                if id(parameter) not in whole:
                    whole[id(parameter)] = parameter.whole("setting up a copy of")
                each._parameters[name] = cast("nn.Parameter", whole[id(parameter)])
        for key, hook in [*each._forward_pre_hooks.items(), *each._forward_hooks.items()]:
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, UnitHook) and not owner.belongs_to(each):
                for hooks in (each._forward_pre_hooks, each._forward_pre_hooks_with_kwargs, each._forward_hooks):
                    hooks.pop(key, None)
                for flags in (each._forward_hooks_with_kwargs, each._forward_hooks_always_called):
                    flags.pop(key, None)


def attach_hooks(runtime: Runtime, track: UnitTrack) -> UnitHook:
    """Let the runtime hear of every forward of a unit's module, and of every gradient of its parameters."""
    hook = UnitHook(runtime, track)
    hook.follow()
    parameters = track.unit.unsharded_parameters()
    track.expected = set(range(len(parameters)))
    with torch._C.DisableTorchFunctionSubclass():
        for index, parameter in enumerate(parameters):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            # A frozen parameter takes no hook, and may be unfrozen later.
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)
            torch.Tensor.register_post_accumulate_grad_hook(parameter, _gradient_hook(runtime, track.index, index))
            view: Any = parameter.view_as(parameter)
            track.accumulators.append(view.grad_fn.next_functions[0][0])
            parameter.requires_grad_(trainable)
    for group in track.unit.groups:
        group.buffer.count_references()
        group.gradients.attach(_outside_hook(runtime))
    return hook


def _outside_hook(runtime: Runtime) -> Callable[[], None]:
    reference = weakref.ref(runtime)

    def ready() -> None:
        runtime = reference()
        if runtime is not None:
            runtime.outside_gradient_ready()

    return ready


def _gradient_hook(runtime: Runtime, unit: int, index: int) -> Callable[[torch.Tensor], None]:
    # Weak: autograd holds the hook where the garbage collector cannot see it, and would keep the model for ever.
    reference = weakref.ref(runtime)

    def ready(parameter: torch.Tensor) -> None:
        runtime = reference()
        if runtime is not None:
            runtime.gradient_ready(runtime.tracks[unit], index)

    return ready
