"""Frozen parameters: beside trainable ones, in units of their own, frozen and unfrozen after setup or inside a step.

Each test trains the sharded model beside the same model in one process, see ``tests/training.py``.
"""

import pytest
import torch
from torch import nn

from training import RUNTIMES, WIDTH, Sharding, Trial, another_order, linears, square, unit_of
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


class Adapted(nn.Module):
    """A frozen linear layer beside two small trainable factors; which of them is applied first decides what is last."""

    def __init__(self, adapter_first: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.adapter_first = adapter_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.adapter_first:
            return self.frozen(x + self.up(self.down(x))).tanh()
        x = self.frozen(x).tanh()
        return x + self.up(self.down(x))


@every_strategy
@pytest.mark.parametrize("adapter_first", [True, False])
@on_ranks(2)
def test_frozen_and_trainable_parameters_share_a_unit(strategy: str, adapter_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(adapter_first) for _ in range(3)))
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1", "2")))
    trial.train(square)
    for progress in trial.runtime.progresses[1:]:
        for group in progress.unit.groups:
            assert (group.gradients.shard is not None) == group.trainable


def states_seen_at(module: nn.Module, trial: Trial, name: str) -> list[str]:
    """The state of a unit each time that the backward comes to the input of a module."""
    seen: list[str] = []

    def watch(*_: object) -> None:
        seen.append(unit_of(trial.runtime, name).state.value)

    module.register_full_backward_hook(watch)
    return seen


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_a_frozen_unit_is_resharded_during_the_backward_and_not_at_its_end(strategy: str) -> None:
    model = linears(5)
    model[2].requires_grad_(False)
    trial = Trial(model, Sharding(strategy=strategy, units=("1", "2", "3"), prefetch=0))
    seen = states_seen_at(model[1], trial, "2")
    trial.train(square)
    assert seen == ["sharded"] * 3


@every_strategy
@on_ranks(2)
def test_the_first_units_are_frozen_and_have_no_backward(strategy: str) -> None:
    model = linears(4)
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1", "2", "3")))
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_parameters_are_unfrozen_and_frozen_after_setup(strategy: str) -> None:
    model = nn.Sequential(linears(2), linears(2))
    model[0].requires_grad_(False)
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1")))
    trial.train(square, steps=2)
    for thawed, frozen in ((0, 1), (1, 0)):
        for each in (trial.model, trial.reference):
            each[thawed].requires_grad_(True)
            each[frozen].requires_grad_(False)
        with another_order():
            trial.train(square, steps=2)


@every_strategy
@pytest.mark.parametrize("units", [(), ("0", "1")])
@on_ranks(2)
def test_a_step_freezes_and_unfreezes_what_it_does_not_train(
    strategy: str, units: tuple[str, ...]
) -> None:
    def alternating(model: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        model[0].requires_grad_(step % 3 != 1)
        model[1].requires_grad_(step % 3 != 2)
        return square(model, rank, step)

    trial = Trial(linears(3), Sharding(strategy=strategy, units=units))
    with another_order():
        trial.train(alternating, steps=6)
    expected = {
        name: parameter.requires_grad for name, parameter in trial.reference.named_parameters()
    }
    assert {
        name: parameter.requires_grad for name, parameter in trial.model.named_parameters()
    } == expected


@every_strategy
@on_ranks(2)
def test_one_parameter_of_a_buffer_is_frozen_after_setup(strategy: str) -> None:
    trial = Trial(linears(3), Sharding(strategy=strategy, units=("0", "1")))
    trial.train(square, steps=1)
    for each in (trial.model, trial.reference):
        each[0].weight.requires_grad = False
        each[1].requires_grad_(False)
    trial.train(square, steps=2)
    for each in (trial.model, trial.reference):
        each.requires_grad_(True)
    trial.train(square, steps=2)
