"""Optimizers that torch does not have, and what holds them: to step on parameters of every scope."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn, optim

from shardeddp.optim.whole_parameter import OwnedStep

Closure = Callable[[], Any] | None


class Lamb(optim.Optimizer):
    """Looks at norms, as LAMB does (https://arxiv.org/abs/1904.00962); keeps states of every kind."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.requires_grad:
                    continue
                state = self.state[parameter]
                if "count" not in state:
                    rows = (
                        parameter.grad.reshape(parameter.shape[0], -1)
                        if parameter.dim()
                        else parameter.grad[None]
                    )
                    state.update(
                        count=0, trust=torch.ones(1), moments=[torch.zeros_like(parameter)]
                    )
                    state["rows"] = torch.zeros(rows.shape[0])
                state["count"] += 1
                moment = state["moments"][0].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["rows"].mul_(0.9).add_(
                    parameter.grad.reshape(len(state["rows"]), -1).pow(2).mean(1), alpha=0.1
                )
                scale = state["rows"].add(1e-3).sqrt().view(-1, *[1] * (parameter.dim() - 1))
                update = (
                    moment / (scale if parameter.dim() else scale[0]) / (1 - 0.9 ** state["count"])
                )
                ratio = parameter.norm().item() / max(update.norm().item(), 1e-6)
                state["trust"].fill_(min(max(ratio, 0.1), 10.0))
                parameter.add_(update, alpha=-group["lr"] * float(state["trust"]))


class Lion(optim.Optimizer):
    """Element-wise, with a state that is a number (https://arxiv.org/abs/2302.06675)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.requires_grad:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(count=0, average=torch.zeros_like(parameter))
                state["count"] += 1
                update = (state["average"] * 0.9 + parameter.grad * 0.1).tanh() / state["count"]
                state["average"].mul_(0.99).add_(parameter.grad, alpha=0.01)
                parameter.add_(update, alpha=-group["lr"])


def owned_step_of(optimizer: optim.Optimizer) -> OwnedStep:
    owners = (
        getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_post_hooks.values()
    )
    return next(it for it in owners if isinstance(it, OwnedStep))


def stepped_on(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """A list that fills with what the optimizer holds in the middle of its steps, where no hook of a user's looks."""
    seen: list[torch.Tensor] = []
    optimizer._optimizer_step_code = lambda: seen.extend(
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )
    return seen
