"""Element-wise optimizers: they step on this rank's elements, in plain 1D tensors."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import optim

from shardeddp.engine.storage import empty_on_host
from shardeddp.optim.scope import ELEMENTWISE, SCALAR_STATES
from shardeddp.optim.swap import Gradients, OnStep, OutsideStates, State, SwappedStep
from shardeddp.tensor.shard_tensor import ShardTensor, gather
from shardeddp.tensor.unsharded import outside_of

# -- Local parameters: tensors that an element-wise optimizer steps on, on the device or in host
#    memory


class LocalParameters(ABC):
    """Tensors that an optimizer steps on instead of sharded parameters: this rank's elements."""

    @abstractmethod
    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The local parameter; always the same object for a parameter."""

    @abstractmethod
    def gradient_of(
        self, local: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The gradient of a local parameter, from this rank's part of the sharded one's."""

    @abstractmethod
    def begin_step(self) -> None:
        """Bring what the step needs to where it runs."""

    @abstractmethod
    def end_step(self) -> None:
        """Bring the new values to the shards."""


class DeviceShards(LocalParameters):
    """The main shards themselves."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return parameter.raw_local if isinstance(parameter, ShardTensor) else parameter

    def gradient_of(  # noqa: D102
        self, local: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        return gradient

    def begin_step(self) -> None:  # noqa: D102
        return

    def end_step(self) -> None:  # noqa: D102
        return


class HostCopies(LocalParameters):
    """Copies in host memory: gradients are copied there before a step, parameters back after it.

    DeepSpeed's ZeRO-Offload (https://arxiv.org/abs/2101.06840) keeps the states there in the same
    way. Copies are pinned where there is a device that copies from them, and all of a step's travel
    before one wait for them.
    """

    def __init__(self) -> None:
        self._copies: dict[
            torch.Tensor, tuple[torch.Tensor, int]
        ] = {}  # by local parameter; with its version
        self._gradients: dict[
            torch.Tensor, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # by copy: (there, here)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:  # noqa: D102
        if not isinstance(parameter, ShardTensor):
            return parameter
        local = parameter.raw_local
        if local not in self._copies:
            self._copies[local] = (empty_on_host(local, local.device), -1)
        return self._copies[local][0]

    def gradient_of(  # noqa: D102
        self, local: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        if gradient is None:
            self._gradients.pop(local, None)
            return None
        known = self._gradients.get(local)
        host = empty_on_host(gradient, gradient.device) if known is None else known[1]
        self._gradients[local] = (gradient, host)
        return host

    @torch.no_grad()
    def begin_step(self) -> None:  # noqa: D102
        for device, host in self._gradients.values():
            host.copy_(device, non_blocking=True)
        for local, (copy, version) in self._copies.items():
            if version != local._version:  # changed by something else than a step
                copy.copy_(local, non_blocking=True)
        self._wait()

    @torch.no_grad()
    def end_step(self) -> None:  # noqa: D102
        for local, (copy, _) in self._copies.items():
            if copy in self._gradients:
                local.copy_(copy, non_blocking=True)
                self._copies[local] = (
                    copy,
                    local._version + 1,
                )  # `parameters_changed` counts one more version

    def _wait(self) -> None:
        if any(local.is_cuda for local in self._copies):
            torch.cuda.current_stream().synchronize()


# -- LocalStep: an element-wise optimizer steps on this rank's elements, in plain 1D tensors
#
# It does the same to every element whatever surrounds it, so all ranks' steps together are the step
# on the parameters. It steps on the *local parameter* of a sharded one: a 1D view of the main
# shard, or a copy of that in host memory.

# Those with a fused kernel for the CPU, several times as fast as the others there.
_FUSED_ON_HOST = {optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad}


class LocalStep(SwappedStep):
    """Lets an element-wise optimizer step on local parameters.

    Args:
        optimizer: An element-wise optimizer over (some) sharded parameters.
        on_step: Called after each step.
        offload: Step in host memory, on copies of parameters and gradients, and keep the states
            there.
    """

    _states: LocalStates

    def __init__(self, optimizer: optim.Optimizer, on_step: OnStep, offload: bool = False) -> None:
        self._offload = offload
        self._local_parameters = HostCopies() if offload else DeviceShards()
        self._groups: list[_GroupLocalParameters] = []
        # torch's own do not ask whether a parameter requires a gradient; others may leave out one
        # that does not.
        self._marks_trained = type(optimizer) not in ELEMENTWISE
        super().__init__(optimizer, on_step)

    def _forget(self) -> None:
        self._local_parameters = HostCopies() if self._offload else DeviceShards()
        self._groups = []

    def _swap_in(
        self, groups: list[list[torch.Tensor]], gradients: list[Gradients]
    ) -> list[list[torch.Tensor]]:
        if len(self._groups) != len(groups):
            self._groups = [_GroupLocalParameters(self._local_parameters) for _ in groups]
            self._prefer_fused()
        found = [
            each.follow(its, known)
            for each, its, known in zip(self._groups, groups, gradients, strict=True)
        ]
        self._local_parameters.begin_step()
        if self._marks_trained:
            self._require_grad(groups, True)
        return found

    def _bring_back(self) -> None:
        self._local_parameters.end_step()

    def _let_go(self) -> None:
        if self._marks_trained:
            self._require_grad([group["params"] for group in self._optimizer.param_groups], False)

    def _outside(self, optimizer: optim.Optimizer) -> LocalStates:
        return LocalStates(optimizer, self._local_parameters)

    def _require_grad(self, groups: list[list[torch.Tensor]], required: bool) -> None:
        for parameter in (it for group in groups for it in group):
            if isinstance(parameter, ShardTensor):
                self._local_parameters.of(parameter).requires_grad_(
                    required and parameter.requires_grad
                )

    def _prefer_fused(self) -> None:
        """Use torch's fused host kernel for an optimizer taken off the device, unless told."""
        for group in self._optimizer.param_groups:
            untold = (
                group.get("foreach") is None
                and not group.get("fused")
                and not group.get("differentiable")
            )
            taken_off = any(
                parameter.device != self._local_parameters.of(parameter).device
                for parameter in group["params"]
            )
            if type(self._optimizer) in _FUSED_ON_HOST and untold and (self._offload or taken_off):
                group["fused"] = True


class LocalStates(OutsideStates):
    """The states of an optimizer by sharded parameter, held by local parameter.

    Args:
        optimizer: Whose parameters they belong to.
        local_parameters: Of those parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, local_parameters: LocalParameters) -> None:
        super().__init__()
        self._local_parameters = local_parameters
        self._optimizer = optimizer

    def __getitem__(self, parameter: torch.Tensor) -> State:
        parameter = outside_of(parameter)
        return _StateView(self.inside[self._local_parameters.of(parameter)], parameter)

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        parameter = outside_of(parameter)
        local = self._local_parameters.of(parameter)
        self.inside[local] = {
            name: _as_local(name, value, parameter, local.device) for name, value in state.items()
        }

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self.inside[self._local_parameters.of(outside_of(parameter))]

    def __iter__(self) -> Iterator[torch.Tensor]:
        parameters = [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]
        return (parameter for parameter in parameters if parameter in self)

    def __len__(self) -> int:
        return len(self.inside)

    def __contains__(self, parameter: object) -> bool:
        return (
            isinstance(parameter, torch.Tensor)
            and self._local_parameters.of(outside_of(parameter)) in self.inside
        )


class _StateView(dict[str, Any]):
    """One parameter's states as sharded tensors; assignments and removals reach the optimizer."""

    def __init__(self, state: Mapping[str, Any], parameter: torch.Tensor | None = None) -> None:
        self._state = state
        self._parameter = parameter
        super().__init__({name: _as_sharded(value, parameter) for name, value in state.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if isinstance(self._state, dict):
            former = self._state.get(name)
            device = former.device if isinstance(former, torch.Tensor) else None
            self._state[name] = _as_local(name, value, self._parameter, device)

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


def _as_sharded(value: Any, parameter: torch.Tensor | None) -> Any:
    """A state of a local parameter as a state of the sharded parameter."""
    if (
        not isinstance(parameter, ShardTensor)
        or not isinstance(value, torch.Tensor)
        or isinstance(value, ShardTensor)
    ):
        return value
    is_local = value.dim() == 1 and value.numel() == parameter.spec.interval.numel
    return ShardTensor(value, parameter.spec) if is_local else value


def _as_local(
    name: str, value: Any, parameter: torch.Tensor | None, device: torch.device | None = None
) -> Any:
    """A state of a sharded parameter, sharded itself or full, as a state of its local parameter.

    Args:
        name: Of the state.
        value: Of the state.
        parameter: The sharded parameter.
        device: Where the optimizer steps on it; None: where the state is.
    """
    if (
        not isinstance(parameter, ShardTensor)
        or not isinstance(value, torch.Tensor)
        or name in SCALAR_STATES
    ):
        return value
    if isinstance(value, ShardTensor):
        if value.shape == parameter.shape and not value.spec.lies_like(parameter.spec):
            whole = gather(value, f"{name}, kept from before the parameter was sharded anew, of")
            return parameter.spec.localize(whole).to(device, copy=True)
        return value.to_local().to(device)
    if value.shape == parameter.shape:
        return parameter.spec.localize(value).to(device, copy=True)
    return value


class _GroupLocalParameters:
    """The local parameters of a parameter group, with the gradients of its sharded parameters.

    What they were made from is remembered: in the steady state every gradient is the object that it
    was in the step before, and following a thousand parameters costs a thousand comparisons.
    """

    def __init__(self, local_parameters: LocalParameters) -> None:
        self._local_parameters = local_parameters
        self._parameters: list[torch.Tensor] = []
        self._parts: list[
            torch.Tensor | None
        ] = []  # of their gradients; not those themselves, see GroupGradients
        self._local: list[torch.Tensor] = []

    def follow(self, parameters: list[torch.Tensor], gradients: Gradients) -> list[torch.Tensor]:
        """The local parameters of the group's parameters, in order, in a list of their own."""
        parts = [_local_or_whole(gradient) for gradient in gradients]
        if not _same_objects(parameters, self._parameters):
            self._parameters, self._parts = list(parameters), [None] * len(parameters)
            self._local = [self._local_parameters.of(parameter) for parameter in parameters]
            for local, parameter in zip(self._local, parameters, strict=True):
                if local is not parameter:
                    local.grad = None
        if not _same_objects(parts, self._parts):
            self._copy_gradients(parts)
        return list(self._local)

    def _copy_gradients(self, parts: list[torch.Tensor | None]) -> None:
        for parameter, local, part in zip(self._parameters, self._local, parts, strict=True):
            if isinstance(parameter, ShardTensor):
                if part is not None and part.shape == parameter.shape and part.shape != local.shape:
                    part = parameter.spec.localize(part)
                local.grad = self._local_parameters.gradient_of(local, part)
        self._parts = parts


def _local_or_whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_local() if isinstance(gradient, ShardTensor) else gradient


def _same_objects(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
