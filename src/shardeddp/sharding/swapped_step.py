"""SwappedStep: for the time of its step, an optimizer holds plain tensors in place of sharded parameters."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import optim

State = dict[str, Any]


class OutsideStates(MutableMapping[torch.Tensor, State]):
    """What an optimizer's states look like outside of its step: by sharded parameter, as sharded tensors."""

    inside: MutableMapping[Any, State]
    """What the optimizer itself keeps, by the plain tensor that it steps on."""

    def __init__(self) -> None:
        self.inside = defaultdict(dict)


class SwappedStep(ABC):
    """Swaps an optimizer's parameters, gradients and states while it steps; outside of it nobody sees other ones.

    Args:
        optimizer: An optimizer over (some) sharded parameters.
        on_step: Called after each step.
    """

    def __init__(self, optimizer: optim.Optimizer, on_step: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._on_step = on_step
        self._sharded: list[list[torch.Tensor]] | None = None  # the groups' own lists while plain ones are in place
        self._adopt_state(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(lambda _: self._leave())  # a step may have failed half-way
        optimizer.register_state_dict_post_hook(_plain_state_dict)
        optimizer.register_load_state_dict_post_hook(self._adopt_state)

    @abstractmethod
    def _swap_in(self, groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The plain tensors that the parameters of every group stand for, filled, with their gradients."""

    @abstractmethod
    def _bring_back(self) -> None:
        """Give the sharded parameters what the step has made of the plain tensors."""

    @abstractmethod
    def _outside(self, optimizer: optim.Optimizer) -> OutsideStates:
        """An empty mapping of states."""

    def _before_step(
        self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if _is_inner_step(optimizer):
            return None
        closure = kwargs.pop("closure", None) or (args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:
            # Before the swap: what the closure calls (clipping, user hooks) is to see the sharded parameters.
            with torch.enable_grad():
                loss = closure()
        self._enter()
        return None if closure is None else ((optimizer, lambda: loss), kwargs)

    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _is_inner_step(optimizer):
            return
        self._leave()
        self._bring_back()
        self._on_step()

    def _enter(self) -> None:
        self._leave()  # an earlier step may have failed half-way
        if self._optimizer.state is not self._states:
            self._adopt_state(self._optimizer)  # somebody has assigned another mapping
        groups = [group["params"] for group in self._optimizer.param_groups]
        plain = self._swap_in(groups)
        self._sharded = groups
        for group, parameters in zip(self._optimizer.param_groups, plain, strict=True):
            group["params"] = parameters
        self._optimizer.state = self._states.inside  # type: ignore[assignment]

    def _leave(self) -> None:
        if self._sharded is None:
            return
        for group, sharded in zip(self._optimizer.param_groups, self._sharded, strict=True):
            group["params"] = sharded
        self._sharded = None
        self._states.inside = self._optimizer.state
        self._optimizer.state = self._states  # type: ignore[assignment]

    def _adopt_state(self, optimizer: optim.Optimizer) -> None:
        """Take over a mapping of states that are sharded, or full as they come from a checkpoint."""
        adopted = self._outside(optimizer)
        for parameter, state in optimizer.state.items():
            adopted[parameter] = state
        self._states = adopted
        optimizer.state = adopted  # type: ignore[assignment]


# What torch makes of every optimizer's `step`, to call hooks before and after it.
_HOOKED_STEP = optim.Optimizer.profile_hook_step(optim.Optimizer.step).__code__


def _is_inner_step(optimizer: optim.Optimizer) -> bool:
    """Whether the step whose hooks are called was called by a step of the same optimizer, a subclass's.

    The stack knows; a flag would not be taken back by a step that fails.
    """
    frame, steps = sys._getframe(), 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps == 2


def _plain_state_dict(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": {index: dict(state) for index, state in state_dict["state"].items()}}
