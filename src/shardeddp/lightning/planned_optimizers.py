"""Optimizers of a dry run: those of ``configure_optimizers`` on parameters without memory."""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from typing import Any

import torch
from torch import nn, optim

from shardeddp.lightning.api import (
    GradientAccumulationScheduler,
    LightningModule,
    StochasticWeightAveraging,
    Strategy,
    Trainer,
    WeightAveraging,
    callbacks_of,
)
from shardeddp.optim.scope import scope_of
from shardeddp.planner.memory import OPTIMIZER_STATES
from shardeddp.planner.trace import without_memory
from shardeddp.torch_private import FakeTensorMode

UNKNOWN_STEPS = 1000
"""Number of optimizer steps that a dry run tells schedules of a training without ``max_steps``."""


def dry_trainer(trainer: Trainer) -> Trainer:
    """Copy a Trainer with a copy of its strategy: optimizers of the copies are not those of the run.

    The copy has no loggers, and asks no loader for the number of steps.
    """
    strategy, steps = copy(trainer.strategy), trainer.max_steps
    made = copy(trainer)
    made.__class__ = type(
        type(trainer).__name__,
        (type(trainer),),
        {
            "strategy": property(lambda _: strategy),
            "estimated_stepping_batches": property(lambda _: steps if steps > 0 else UNKNOWN_STEPS),
        },
    )
    made.loggers = []
    return made


def set_optimizers(trainer: Trainer, module: Any) -> None:
    """Give a Trainer of :func:`dry_trainer` the optimizers and schedulers of a module.

    The module's tensors are replaced by ones without memory.
    """
    without_memory(module, FakeTensorMode(), None)
    for it in module.modules():
        if isinstance(it, LightningModule):
            it.trainer = trainer
    Strategy.connect(trainer.strategy, module)
    Strategy.setup_optimizers(trainer.strategy, trainer)


def states_of(optimizers: list[optim.Optimizer]) -> tuple[int, list[str]]:
    """Return the states of a parameter's size per parameter, and optimizers that have others.

    Of several optimizers or parameter groups, the largest number counts.
    """
    found, unknown = [0], list[str]()
    for it in optimizers:
        states = None if scope_of(type(it)) == "model" else _states(it)
        if states is None:
            states = OPTIMIZER_STATES
            unknown.append(f"the states of {type(it).__name__} (those of AdamW are taken)")
        found.append(states)
    return max(found), unknown


def _states(optimizer: optim.Optimizer) -> int | None:
    """Step a copy of an optimizer on one small parameter of each group; None: it cannot be stepped.

    States that the constructor has made are counted as they are.
    """
    if optimizer.state:
        return max(_count(state, key) for key, state in optimizer.state.items())
    try:
        tried = copy(optimizer)
        tried.state = defaultdict(dict)
        tried.param_groups = [{**it, **_small(it)} for it in optimizer.param_groups]
        tried.step()
        return max((_count(state, key) for key, state in tried.state.items()), default=0)
    except Exception:  # noqa: BLE001 - code of an optimizer that is not known
        return None


def _small(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group for a small parameter of the host."""
    parameter = nn.Parameter(torch.zeros(2, 3, device="cpu"))
    parameter.grad = torch.ones(2, 3, device="cpu")
    others = {it: False for it in ("fused", "foreach", "capturable") if it in group}
    return {"params": [parameter], **others}


def _count(state: dict[str, Any], parameter: torch.Tensor) -> int:
    tensors = [it for it in state.values() if isinstance(it, torch.Tensor)]
    return sum(it.shape == parameter.shape for it in tensors)


def unplanned_callbacks(trainer: Trainer) -> list[str]:
    """Return callbacks that take memory or change the batch of a step, which plans do not know."""
    found = list[str]()
    for it in callbacks_of(trainer):
        name = type(it).__name__
        if isinstance(it, (StochasticWeightAveraging, WeightAveraging)):
            found.append(f"{name} (a copy of the weights)")
        elif isinstance(it, GradientAccumulationScheduler):
            found.append(f"{name} (accumulate_grad_batches={trainer.accumulate_grad_batches})")
    return found
