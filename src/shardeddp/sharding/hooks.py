"""Where the runtime hears of forwards and gradients: the hooks on a unit's module and on its unsharded parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from shardeddp.sharding.track import UnitTrack

if TYPE_CHECKING:
    from shardeddp.sharding.runtime import Runtime


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


def attach_hooks(runtime: Runtime, track: UnitTrack) -> None:
    """Let the runtime hear of every forward of a unit's module, and of every gradient of its parameters."""
    hook = UnitHook(runtime, track)
    module = track.unit.spec.module
    module.register_forward_pre_hook(hook.enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(hook.leave, with_kwargs=True, always_call=True)
    parameters = track.unit.unsharded_parameters()
    track.expected = set(range(len(parameters)))
    with torch._C.DisableTorchFunctionSubclass():
        for index, parameter in enumerate(parameters):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            # A frozen parameter takes no hook, and may be unfrozen later.
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(_gradient_hook(runtime, track.index, index))
            track.accumulators.append(get_gradient_edge(parameter).node)
            parameter.requires_grad_(trainable)


def _gradient_hook(runtime: Runtime, unit: int, index: int) -> Callable[[torch.Tensor], None]:
    # Weak: autograd holds the hook where the garbage collector cannot see it, and would keep the model for ever.
    reference = weakref.ref(runtime)

    def ready(parameter: torch.Tensor) -> None:
        runtime = reference()
        if runtime is not None:
            runtime.gradient_ready(runtime.tracks[unit], index)

    return ready
