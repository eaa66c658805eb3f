"""Optimizers that torch does not have: right without a word about them, and fast when their scope is stated."""

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardeddp.config import resolve_optimizer_scope
from shardeddp.errors import ConfigurationError
from shardeddp.optim.elementwise import LocalStep
from shardeddp.optim.scope import scope_of
from shardeddp.optim.whole_parameter import OwnedStep
from shardeddp.tensor.shard_tensor import ShardTensor
from support.optimizers import Closure, Lamb, Lion
from training import Chain, Sharding, Trial, square
from world import on_ranks

pytestmark = pytest.mark.timeout(60)


class Lookahead(optim.Optimizer):
    """Wraps another optimizer without being initialised as one, and goes half-way back every second step."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.param_groups, self.state, self.defaults = (
            inner.param_groups,
            inner.state,
            inner.defaults,
        )
        self.slow = [[it.detach().clone() for it in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for fast, kept in zip(group["params"], slow, strict=True):
                    kept.add_(fast.data - kept, alpha=0.5)
                    fast.data.copy_(kept)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def lookahead(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return Lookahead(optim.Adam(parameters, lr=0.01))


UNKNOWN = {"Lamb": Lamb, "Lion": Lion, "Lookahead": lookahead}


@pytest.mark.slow
@on_ranks(2)
def test_an_unknown_optimizer_steps_as_in_one_process_and_its_cost_is_said_on_one_rank() -> None:
    for name, make in UNKNOWN.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trial = Trial(Chain(2), Sharding(units=("blocks.*",)), make)
        said = [str(each.message) for each in caught]
        assert len(said) == (trial.runtime.mesh.rank == 0)
        assert all(f"{name}, so its steps are made on whole values" in text for text in said)
        assert all(f"optimizer_scope={{'{name}': 'element'}}" in text for text in said)
        trial.train(square, steps=2)


@pytest.mark.slow
@on_ranks(2)
def test_stated_scopes_change_what_a_step_is_made_on_and_not_its_result() -> None:
    for make, scope, kind in (
        (Lion, "element", LocalStep),
        (Lion, "parameter", OwnedStep),
        (Lamb, "parameter", OwnedStep),
    ):
        for sharding in (Sharding(units=("blocks.*",)), Sharding(strategy="no_shard")):
            trial = Trial(Chain(2), sharding, make, {make.__name__: scope})
            hooks = trial.optimizer._optimizer_step_post_hooks.values()
            assert any(isinstance(getattr(hook, "__self__", None), kind) for hook in hooks)
            trial.train(square, steps=2)


# -- what is known of a class


class OnlyMadeOtherwise(optim.AdamW):
    """A subclass that sets defaults."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)


class StepsOtherwise(optim.AdamW):
    def step(self, closure: Closure = None) -> None:
        super().step(closure)


class InitialisesOtherwise(optim.SGD):
    def _init_group(self, *arguments: Any) -> Any:
        return super()._init_group(*arguments)


class Decorated(optim.SGD):
    step = torch.no_grad()(optim.SGD.step)


class StepsLionOtherwise(Lion):
    step = torch.no_grad()(Lion.step)


def test_the_scope_of_a_class_is_known_from_what_it_changes() -> None:
    for kind in (OnlyMadeOtherwise, StepsOtherwise, InitialisesOtherwise, Decorated):
        before = scope_of(kind)
        kind([nn.Parameter(torch.ones(1))])  # torch wraps `step` when one is made
        assert scope_of(kind) == before == ("element" if kind is OnlyMadeOtherwise else None)
    assert scope_of(optim.LBFGS) == "model"
    assert scope_of(Lamb) is None


def test_scopes_are_stated_by_class_name_or_import_path() -> None:
    path = f"{Lion.__module__}.Lion"
    for stated in ({"Lion": "element"}, {path: "element"}, {Lion: "element"}):
        assert scope_of(Lion, resolve_optimizer_scope(stated)) == "element"
    # One with a step of its own is another optimizer.
    assert scope_of(StepsLionOtherwise, resolve_optimizer_scope({"Lion": "element"})) is None
    assert scope_of(optim.SGD, resolve_optimizer_scope({"torch.optim.sgd.SGD": "model"})) == "model"
    for wrong in ({"Lion": "elementwise"}, "Lion", ["Lion"]):
        with pytest.raises(ConfigurationError, match="expected"):
            resolve_optimizer_scope(wrong)


# -- other ways to hold and to step optimizers


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_optimizers_that_step_inside_the_backward(when: str) -> None:
    def install(model: nn.Module) -> None:
        optimizers = {
            parameter: optim.AdamW([parameter], lr=0.01) for parameter in model.parameters()
        }

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    model = Chain(2)
    if when == "before":
        install(model)
    trial = Trial(model, Sharding(units=("blocks.*",)))
    for each in [trial.reference, *[trial.model] * (when == "after")]:
        install(each)
    for step in range(3):
        trial.backward(square, step)
        trial.check_parameters()
        assert all(it.grad is None for it in trial.model.parameters())


@on_ranks(2)
def test_several_optimizers_of_different_scopes_share_a_model() -> None:
    trial = Trial(
        Chain(2),
        Sharding(units=("blocks.*",)),
        lambda parameters: optim.Adafactor(list(parameters)[:3]),
    )
    from shardeddp.optim.attach import attach_optimizer

    others = [
        optim.AdamW(
            [
                {"params": list(model.parameters())[3:5]},
                {"params": list(model.parameters())[5:], "lr": 0.02},
            ]
        )
        for model in (trial.model, trial.reference)
    ]
    attach_optimizer(others[0])
    for step in range(3):
        trial.backward(square, step)
        for other in others:
            other.step()
            other.zero_grad()
        trial.step()
        trial.check_parameters()
    assert all(isinstance(it, ShardTensor) for it in trial.optimizer.param_groups[0]["params"])
