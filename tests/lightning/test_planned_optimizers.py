"""Optimizers of a dry run: their states, what the step reads of them, and what plans do not know."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import nn, optim

from shardeddp import ShardedDP
from shardeddp.lightning.planned_optimizers import states_of
from shardeddp.planner.plan import Plan
from support.tasks import TinyGpt, token_loader

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


class Steps(optim.Optimizer):
    """An optimizer whose step needs what its constructor has kept."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.kept = [*self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing, to all of them."""
        for it in self.kept:
            self.state[it] = {}


@pytest.mark.parametrize(
    ("make", "states", "unknown"),
    [
        (optim.SGD, 0, []),
        (lambda it: optim.SGD(it, momentum=0.9), 1, []),
        (optim.Adagrad, 1, []),
        (lambda it: optim.AdamW(it, fused=True), 2, []),
        (lambda it: optim.Adam(it, capturable=True, foreach=True), 2, []),
        (lambda it: optim.AdamW([{"params": [*it], "amsgrad": True}]), 3, []),
        (optim.Adafactor, 0, []),
        (optim.LBFGS, 2, ["LBFGS"]),
        (Steps, 2, ["Steps"]),
    ],
)
def test_states_of_a_parameter_s_size_are_counted(
    make: Callable[[Any], optim.Optimizer], states: int, unknown: list[str]
) -> None:
    found, unplanned = states_of([make(nn.Linear(3, 3).parameters())])
    names = [f"the states of {it} (those of AdamW are taken)" for it in unknown]
    assert (found, unplanned) == (states, names)


class Trains(TinyGpt):
    """A model with an optimizer that a test gives, and a schedule of the whole run."""

    def __init__(self, make: Callable[[Any], optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        """The optimizer, which says where it was made."""
        made = self.make(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=steps, cycle_momentum=False)
        return {"optimizer": made, "lr_scheduler": schedule}


class ReadsOptimizer(Trains):
    """A step that logs what its optimizer, schedule and Trainer say."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss."""
        self.log("lr", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        self.log("first", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("next", self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr]
        return super().loss(batch) * (1 + 0 * self.trainer.estimated_stepping_batches)


def dry_run(module: TinyGpt, *callbacks: Callback, **options: Any) -> tuple[Plan, Trainer]:
    strategy = ShardedDP("full_shard", plan_only="A100-80")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        callbacks=[*callbacks],
        **options,
    )
    trainer.fit(module, token_loader(16))
    assert strategy.planned is not None
    return strategy.planned, trainer


@pytest.mark.parametrize("options", [{"max_steps": 5}, {"max_epochs": 2}])
def test_a_step_that_reads_its_optimizers_is_planned(options: dict[str, Any]) -> None:
    module = ReadsOptimizer(lambda it: optim.SGD(it, 0.1))
    planned, trainer = dry_run(module, **options)
    assert planned.best.memory.optimizer == 0
    assert not planned.unplanned
    assert trainer.optimizers == []
    assert type(trainer) is Trainer
    assert not any(it.is_meta for it in module.parameters())


def test_states_of_a_dry_run_are_those_of_its_optimizers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned, _ = dry_run(Trains(lambda it: optim.AdamW(it, amsgrad=True)), max_steps=2)
    assert {it.memory.optimizer / it.memory.gradients for it in planned.plans} == {3.0}
    assert "Optimizer states: 3 of each trained parameter." in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_takes_memory_and_is_not_planned_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    planned, _ = dry_run(
        Trains(optim.LBFGS),
        EMAWeightAveraging(),
        StochasticWeightAveraging(0.1),
        GradientAccumulationScheduler({1: 4}),
        max_steps=2,
    )
    assert planned.unplanned == [
        "the states of LBFGS (those of AdamW are taken)",
        "EMAWeightAveraging (a copy of the weights)",
        "StochasticWeightAveraging (a copy of the weights)",
        "GradientAccumulationScheduler (accumulate_grad_batches=1)",
    ]
    said = " ".join(capsys.readouterr().out.split())
    assert f"The plan does not know {', '.join(planned.unplanned)}: memory" in said


class NeedsWeights(Trains):
    """Optimizers that depend on the values of weights."""

    def configure_optimizers(self) -> Any:
        """An optimizer of what is there."""
        return optim.SGD([self.weights[int(self.position_ids[0])]])


def test_optimizers_that_need_the_run_are_taken_as_adamw_and_the_plan_says_so() -> None:
    planned, _ = dry_run(NeedsWeights(optim.SGD), max_steps=2)
    assert {it.memory.optimizer / it.memory.gradients for it in planned.plans} == {2.0}
    assert re.match(
        r"the optimizers \(configure_optimizers fails without a run, AttributeError: .*; AdamW is taken\)",
        planned.unplanned[0],
    )
    assert torch.is_grad_enabled()
