"""Run an element-wise optimizer on plain local tensors; outside of its step it shows sharded tensors.

An element-wise optimizer does the same to every element whatever surrounds it, so a step on this rank's elements, held
in plain 1D tensors, is the step on the whole parameters. Any other optimizer steps on the sharded tensors themselves,
whose operations give global answers: right, and slower.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import optim

from shardeddp.errors import ConfigurationError
from shardeddp.sharding.group_gradients import local_part
from shardeddp.sharding.shard_tensor import ShardTensor
from shardeddp.sharding.stand_ins import HostCopies, StandIns

# Exact types: a subclass may do anything.
ELEMENTWISE: set[type[optim.Optimizer]] = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}

# Those with a fused kernel for the CPU, several times as fast as the others there.
_FUSED_ON_HOST = {optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad}

# States that are one number per parameter, whatever the parameter's shape.
SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})

State = dict[str, Any]


class LocalStep:
    """Swaps an optimizer's parameters, gradients and states for local ones while it steps.

    Args:
        optimizer: An element-wise optimizer over (some) sharded parameters.
        on_step: Called after each step.
        offload: Step in host memory, on copies of parameters and gradients, and keep the states there.
    """

    def __init__(self, optimizer: optim.Optimizer, on_step: Callable[[], None], offload: bool = False) -> None:
        self._optimizer = optimizer
        self._on_step = on_step
        self._offload = offload
        self._stand_ins = HostCopies() if offload else StandIns()
        self._sharded: list[list[torch.Tensor]] | None = None  # the groups' own lists while local ones are in place
        self._twins: list[_Twins] = []  # by parameter group
        self._adopt_state(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(_plain_state_dict)
        optimizer.register_load_state_dict_post_hook(self._adopt_state)

    def _before_step(
        self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.pop("closure", None) or (args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:
            # Before the swap: what the closure calls (clipping, user hooks) is to see the sharded parameters.
            with torch.enable_grad():
                loss = closure()
        self._enter()
        return None if closure is None else ((optimizer, lambda: loss), kwargs)

    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leave()
        self._stand_ins.depart()
        self._on_step()

    def _enter(self) -> None:
        self._leave()  # an earlier step may have failed half-way
        self._sharded = [group["params"] for group in self._optimizer.param_groups]
        if len(self._twins) != len(self._sharded):
            self._twins = [_Twins(self._stand_ins) for _ in self._sharded]
            self._prefer_fused()
        for group, twins in zip(self._optimizer.param_groups, self._twins, strict=True):
            group["params"] = twins.follow(group["params"])
        self._stand_ins.arrive()
        self._optimizer.state = self._states().local

    def _prefer_fused(self) -> None:
        """Let an optimizer that has been taken off the device use torch's fused kernel for the host, unless told."""
        for group in self._optimizer.param_groups:
            untold = group.get("foreach") is None and not group.get("fused") and not group.get("differentiable")
            taken_off = any(parameter.device != self._stand_ins.of(parameter).device for parameter in group["params"])
            if type(self._optimizer) in _FUSED_ON_HOST and untold and (self._offload or taken_off):
                group["fused"] = True

    def _leave(self) -> None:
        if self._sharded is None:
            return
        for group, sharded in zip(self._optimizer.param_groups, self._sharded, strict=True):
            group["params"] = sharded
        self._sharded = None
        self._adopted.local = self._optimizer.state  # type: ignore[assignment]
        self._optimizer.state = self._adopted  # type: ignore[assignment]

    def _states(self) -> ShardedStates:
        if not isinstance(self._optimizer.state, ShardedStates):
            self._adopt_state(self._optimizer)  # somebody has assigned another mapping
        return self._adopted

    def _adopt_state(self, optimizer: optim.Optimizer) -> None:
        """Take over a mapping of states that are sharded, or full as they come from a checkpoint."""
        adopted = ShardedStates(optimizer, self._stand_ins)
        for parameter, state in optimizer.state.items():
            adopted[parameter] = state
        self._adopted = adopted
        optimizer.state = adopted  # type: ignore[assignment]


class ShardedStates(MutableMapping[torch.Tensor, State]):
    """The states of an optimizer by sharded parameter, held by local parameter.

    Args:
        optimizer: Whose parameters they belong to.
        stand_ins: The local parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self.local: defaultdict[torch.Tensor, State] = defaultdict(dict)
        self._optimizer = optimizer

    def __getitem__(self, parameter: torch.Tensor) -> State:
        return _StateView(self.local[self._stand_ins.of(parameter)], parameter)

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        local = self._stand_ins.of(parameter)
        self.local[local] = {
            name: localize_state(name, value, parameter, local.device) for name, value in state.items()
        }

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self.local[self._stand_ins.of(parameter)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return (parameter for parameter in parameters if parameter in self)

    def __len__(self) -> int:
        return len(self.local)

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and self._stand_ins.of(parameter) in self.local


class _StateView(dict[str, Any]):
    """One parameter's states as sharded tensors; what is assigned or removed here reaches the optimizer."""

    def __init__(self, state: Mapping[str, Any], parameter: torch.Tensor | None = None) -> None:
        self._state = state
        self._parameter = parameter
        super().__init__({name: globalize_state(value, parameter) for name, value in state.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if isinstance(self._state, dict):
            former = self._state.get(name)
            device = former.device if isinstance(former, torch.Tensor) else None
            self._state[name] = localize_state(name, value, self._parameter, device)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if isinstance(self._state, dict):
            del self._state[name]

    # A dict's own versions of these go past the two above.
    clear = MutableMapping.clear
    pop = MutableMapping.pop  # type: ignore[assignment]
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault  # type: ignore[assignment]
    update = MutableMapping.update  # type: ignore[assignment]


def globalize_state(value: Any, parameter: torch.Tensor | None) -> Any:
    """A state of a local parameter as a state of the sharded one."""
    if not isinstance(parameter, ShardTensor) or not isinstance(value, torch.Tensor) or isinstance(value, ShardTensor):
        return value
    is_local = value.dim() == 1 and value.numel() == parameter.spec.interval.numel
    return ShardTensor(value, parameter.spec) if is_local else value


def localize_state(name: str, value: Any, parameter: torch.Tensor | None, device: torch.device | None = None) -> Any:
    """A state of a sharded parameter, sharded itself or full, as a state of the local one.

    Args:
        name: Of the state.
        value: Of the state.
        parameter: The sharded parameter.
        device: Where the optimizer steps on it; None: where the state is.
    """
    if not isinstance(parameter, ShardTensor) or not isinstance(value, torch.Tensor) or name in SCALAR_STATES:
        return value
    if isinstance(value, ShardTensor):
        return value.to_local().to(device)
    if value.shape == parameter.shape:
        return local_part(value, parameter.spec).to(device, copy=True)
    return value


class _Twins:
    """The local parameters of one parameter group, with the gradients that the sharded ones have.

    What they were made from is remembered: in the steady state every gradient is the object that it was in the step
    before, and following a thousand parameters costs a thousand comparisons.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._parameters: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []
        self._local: list[torch.Tensor] = []

    def follow(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """The local parameters of a group, in order, in a list of their own."""
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [parameter.grad for parameter in parameters]
            if not _same_objects(parameters, self._parameters):
                self._parameters, self._gradients = list(parameters), [None] * len(parameters)
                self._local = [self._stand_ins.of(parameter) for parameter in parameters]
                for local, parameter in zip(self._local, parameters, strict=True):
                    if local is not parameter:
                        local.grad = None
            if not _same_objects(gradients, self._gradients):
                self._copy_gradients(gradients)
        return list(self._local)

    def _copy_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, local, gradient in zip(self._parameters, self._local, gradients, strict=True):
            if isinstance(parameter, ShardTensor):
                part = None if gradient is None else local_part(gradient, parameter.spec)
                local.grad = self._stand_ins.gradient_of(local, part)
        self._gradients = gradients


def _same_objects(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _plain_state_dict(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": {index: dict(state) for index, state in state_dict["state"].items()}}


class GlobalStep:
    """Lets an optimizer step on the sharded tensors themselves, and tells when it has.

    Args:
        optimizer: Any optimizer over (some) sharded parameters.
        on_step: Called after each step.
    """

    def __init__(self, optimizer: optim.Optimizer, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._on_step()


def attach_optimizer(optimizer: optim.Optimizer, on_step: Callable[[], None], offload: bool = False) -> None:
    """Prepare an optimizer over sharded parameters.

    Args:
        optimizer: Any; what it steps on depends on whether it is element-wise.
        on_step: Called after each of its steps.
        offload: Whether its states live in host memory, and it steps there.

    Raises:
        ConfigurationError: It is to be offloaded and is not element-wise.
    """
    for hook in optimizer._optimizer_step_post_hooks.values():
        if isinstance(hook, MethodType) and isinstance(hook.__self__, (LocalStep, GlobalStep)):
            return  # the user hands out the same optimizer for every fit
    if type(optimizer) in ELEMENTWISE:
        LocalStep(optimizer, on_step, offload)
        return
    if offload:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise ConfigurationError(
            f"cpu_offload cannot take the states of {type(optimizer).__name__} off the device: expected an optimizer "
            f"that is known to treat each element by itself ({known})"
        )
    GlobalStep(optimizer, on_step)
