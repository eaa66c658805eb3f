"""Attachment of optimizers to sharded parameters; the scope (`scope.py`) decides how each steps.

- ``element``: :class:`LocalStep`, on this rank's elements (`elementwise.py`).
- ``parameter``: :class:`OwnedStep`, on whole parameters, each on one rank (`whole_parameter.py`).
- ``model``, or unknown: :class:`GlobalStep`, on the sharded tensors themselves: their operations
  give global results, correct and slow.

The first two replace the optimizer's parameters by plain tensors while it steps (`swap.py`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardeddp.config import OptimizerScope
from shardeddp.engine.runtime import parameters_changed
from shardeddp.errors import ConfigurationError
from shardeddp.optim.elementwise import LocalStep
from shardeddp.optim.late_parameters import average_late_gradients, find_late_parameters
from shardeddp.optim.scope import ELEMENTWISE, refuse, scope_of
from shardeddp.optim.swap import (
    SwappedStep,
    outside_of_compiled_steps,
    stepped_parameters,
    take_sharded,
)
from shardeddp.optim.whole_parameter import OwnedStep
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import pytree


class GlobalStep:
    """Lets an optimizer step on the sharded tensors themselves, and marks them as changed."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @outside_of_compiled_steps
    def _before_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Let a compiled step call its closure, a forward and a backward, outside of the graph."""
        if (closure := kwargs.get("closure")) is not None:
            return args, {**kwargs, "closure": outside_of_compiled_steps(closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], outside_of_compiled_steps(args[1]), *args[2:]), kwargs
        return None

    @outside_of_compiled_steps
    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters_changed(stepped_parameters(optimizer))


_attached: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
_followed: list[Any] = []  # handles of the hooks of every optimizer


def follow_optimizers() -> None:
    """Follow all optimizers that are not attached, from now on; calling it again does nothing.

    An optimizer that is made within a step gets unsharded parameters. It is given the sharded ones
    instead.
    """
    if not _followed:
        _followed.append(register_optimizer_step_pre_hook(take_sharded))
        _followed.append(register_optimizer_step_pre_hook(_average_late))
        _followed.append(register_optimizer_step_post_hook(_mark_changed))


@outside_of_compiled_steps
def _average_late(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if len(args) < 2 and kwargs.get("closure") is None:  # else the closure may run the backward
        average_late_gradients([optimizer])


@outside_of_compiled_steps
def _mark_changed(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _attached:
        parameters_changed(stepped_parameters(optimizer))


def attach_optimizer(
    optimizer: optim.Optimizer,
    offload: bool = False,
    stated: Mapping[str, OptimizerScope] | None = None,
) -> None:
    """Prepare an optimizer over sharded parameters.

    Raises:
        ConfigurationError: It cannot work on sharded parameters, or is to be offloaded and is not
            element-wise.
    """
    _attached.add(optimizer)
    find_late_parameters([optimizer])
    sharded = [
        it
        for group in optimizer.param_groups
        for it in group["params"]
        if isinstance(it, ShardTensor)
    ]
    if sharded:
        refuse(optimizer)
    if "_optimizer_step_post_hooks" not in vars(optimizer):
        # A wrapper that has not called Optimizer.__init__. Its writes to sharded tensors are
        # recorded by those.
        if sharded:
            _warn_unknown(optimizer, sharded[0])
        return
    if _step_of(optimizer) is not None:
        return  # the user returns the same optimizer for every fit
    scope = scope_of(type(optimizer), stated)
    if scope == "element":
        LocalStep(optimizer, offload)
        return
    if offload:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise ConfigurationError(
            f"cpu_offload cannot take the states of {type(optimizer).__name__} off the device: "
            f"expected an optimizer that is known to treat each element by itself ({known}). If "
            f"this one does, set ShardedDP(optimizer_scope={{'{type(optimizer).__name__}': "
            f"'element'}})"
        )
    # Shards in host memory do not travel through the device's collectives, and owners would have
    # only one tensor rank's part of a split layer.
    if scope == "parameter" and sharded and not sharded[0].spec.offloaded:
        mesh = sharded[0].spec.mesh
        if mesh.tensor.size == 1:
            OwnedStep(optimizer, mesh)
            return
    if scope is None and sharded:
        _warn_unknown(optimizer, sharded[0])
    GlobalStep(optimizer)


def suspend(parameters: Iterable[torch.Tensor]) -> None:
    """Let attached optimizers keep their states while their parameters get another sharding."""
    among = {id(parameter) for parameter in parameters}
    for optimizer in list(_attached):
        step = _step_of(optimizer)
        if isinstance(step, SwappedStep) and any(
            id(it) in among for group in optimizer.param_groups for it in group["params"]
        ):
            step.suspend()


def shard_states(optimizers: Iterable[optim.Optimizer]) -> None:
    """Shard the states of attached optimizers like their parameters; a collective of all ranks.

    Without it they would keep their former memory until the next step.
    """
    for optimizer in optimizers:
        step = _step_of(optimizer)
        if isinstance(step, SwappedStep):
            step.resume()
            continue
        states = getattr(optimizer, "state", {})  # a wrapper may have none
        for parameter in (it for group in optimizer.param_groups for it in group["params"]):
            if isinstance(parameter, ShardTensor) and parameter in states:
                for value in pytree.tree_leaves(dict(states[parameter])):
                    if isinstance(value, ShardTensor) and value.shape == parameter.shape:
                        value.shard_anew(parameter.spec)


def _step_of(optimizer: optim.Optimizer) -> SwappedStep | GlobalStep | None:
    hooks = vars(optimizer).get("_optimizer_step_post_hooks", {})
    owners = (hook.__self__ for hook in hooks.values() if isinstance(hook, MethodType))
    return next((it for it in owners if isinstance(it, (SwappedStep, GlobalStep))), None)


def _warn_unknown(optimizer: optim.Optimizer, sharded: ShardTensor) -> None:
    if sharded.spec.mesh.rank != 0 or sharded.spec.mesh.slices.size == 1:
        return
    name = type(optimizer).__name__
    warnings.warn(
        f"nothing is known about the optimizer {type(optimizer).__module__}.{name}, so its steps "
        f"are made on whole values: the result is right, and each of its operations that is not "
        f"element-wise gathers its tensor, in every step, on all ranks. If the new value of an "
        f"element depends on nothing but the element, its gradient and its states, set "
        f"ShardedDP(optimizer_scope={{'{name}': 'element'}}): its step communicates nothing, as "
        f"AdamW's. If it depends on the element's parameter, but on no other parameter (a norm of "
        f"it, a factored state, a matrix product), set 'parameter': each rank then steps a part of "
        f"the parameters",
        stacklevel=2,
    )
