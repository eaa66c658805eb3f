"""Hooks of units: report forwards of modules and gradients of parameters to a runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from shardeddp.engine.calls import CallHook, Listener, outside_of_graphs
from shardeddp.engine.gradients import GroupGradients
from shardeddp.engine.progress import UnitProgress, will_run
from shardeddp.tensor.autograd import node_for_engine
from shardeddp.tensor.gradient_hooks import weakly
from shardeddp.tensor.module_hooks import ModuleHook
from shardeddp.tensor.unsharded import taking_hooks
from shardeddp.torch_private import (
    are_transforms_active,
    current_backward,
    without_torch_function,
)

# -- Hooks of units: forwards and gradients


class EncoderHook(ModuleHook):
    """Gathers the first layer of an ``nn.TransformerEncoder`` in evaluation, before its forward.

    The encoder inspects weights of its first layer. If they are plain tensors, it skips padded
    positions and writes zeros there.
    """

    def __init__(self, encoder: nn.Module, unshard_first: Callable[[], None]) -> None:
        self.module, self._unshard_first = encoder, unshard_first
        self._handle = encoder.register_forward_pre_hook(self.enter, with_kwargs=True)

    @outside_of_graphs
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        if (
            module is self.module
            and not (module.training or torch.is_grad_enabled())
            and not are_transforms_active()
        ):
            self._unshard_first()

    def detach(self) -> None:
        """Remove the hook."""
        self._handle.remove()


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
    return isinstance(getattr(hook, "__self__", None), CallHook | EncoderHook)


def attach_hooks(
    progress: UnitProgress,
    listener: Listener,
    on_gradient: Callable[[int], Callable[[torch.Tensor], None]],
    on_outside: Callable[[int], Callable[[int], None]],
) -> CallHook:
    """Report forwards of a unit's module and gradients of its parameters.

    ``on_gradient`` returns the hook of a parameter by its index in the unit; ``on_outside`` that
    for outside uses of a group's parameters by the index of the first, called with one in the group.
    """
    hook = CallHook(progress.unit.spec.module)
    hook.listen(listener)
    hook.follow()
    parameters, accumulators = progress.unit.unsharded_parameters(), dict[int, Node]()
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
                torch.Tensor.register_post_accumulate_grad_hook(parameter, on_gradient(index))
                view: Any = parameter.view_as(parameter)
                accumulators[index] = accumulator = view.grad_fn.next_functions[0][0]
                gradients, place = places[index]
                if gradients.adds_up_wider:
                    accumulator.register_prehook(weakly(gradients, GroupGradients.arrives, place))
                del view  # it refers to the parameter, whose references are counted below
    progress.expect_all(accumulators)
    first = 0
    for group in progress.unit.groups:
        group.buffer.count_references()
        group.gradients.attach(on_outside(first))
        first += len(group.unsharded)
    return hook


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
    nodes = [node_for_engine(tensor) for tensor in tensors]
    awaited: dict[int, int] = {}  # number of gradients still to come, by backward

    def arrive(gradient: torch.Tensor) -> None:
        backward = current_backward()
        rest = awaited.pop(backward, None) or sum(will_run(node, as_input=True) for node in nodes)
        if rest > 1:
            awaited[backward] = rest - 1
        else:
            call(gradient)

    for tensor in tensors:
        tensor.register_hook(arrive)
