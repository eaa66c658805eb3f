"""Steps on plain tensors in the place of sharded ones: that they fail, and what hooks and subclasses see of them."""

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

from shardeddp.optim.whole_parameter import OwnerTransfers
from shardeddp.tensor.shard_tensor import ShardTensor
from support.optimizers import Closure, Lamb, Lion, owned_step_of
from training import WIDTH, Sharding, Trial, linears, square
from world import on_ranks

pytestmark = pytest.mark.timeout(60)


class Refusing(Lamb):
    """Raises when told to, before it has done anything or after it has added a state."""

    refuses = ""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        if self.refuses == "late":
            for parameter in (it for group in self.param_groups for it in group["params"]):
                self.state[parameter]["more"] = 1
        if self.refuses:
            raise ValueError("refused")
        super().step()


@pytest.mark.parametrize("scope", ["element", "parameter", "model"])
@on_ranks(2)
def test_a_step_that_fails_gives_the_optimizer_its_parameters_back_at_once(scope: Any) -> None:
    trial = Trial(linears(2), Sharding(units=("1",)), Refusing, {"Refusing": scope})
    parameters = list(trial.model.parameters())
    for failing in ("early", ""):
        trial.backward(square)
        for optimizer in (trial.optimizer, trial.reference_optimizer):
            optimizer.refuses = failing
            if failing:
                with pytest.raises(ValueError, match="refused"):
                    optimizer.step()
                optimizer.zero_grad()
        assert trial.optimizer.param_groups[0]["params"] == parameters or scope == "model"
        assert not failing or all(parameter.grad is None for parameter in parameters)
    if scope != "element":  # a norm of a part would be another
        trial.step()
        trial.check_parameters()
        trial.train(square, steps=1)


@on_ranks(2)
def test_a_step_on_whole_parameters_that_fails_keeps_no_memory_and_loses_no_states() -> None:
    trial = Trial(linears(4), Sharding(), Refusing, {"Refusing": "parameter"})
    trial.train(square, steps=1)
    names = [state.keys() for state in trial.optimizer.state_dict()["state"].values()]
    trial.optimizer.load_state_dict(trial.optimizer.state_dict())
    wholes = list(map(owned_step_of(trial.optimizer).wholes.of, trial.model.parameters()))
    held = [
        whole.tensor for whole in wholes if whole.tensor is not None and not whole.owner_has_all
    ]

    def fails(error: type[Exception]) -> None:
        trial.backward(square)
        with pytest.raises(error):
            trial.optimizer.step()
        assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * len(held)
        assert all(whole.tensor is None or whole.tensor.grad is None for whole in wholes)
        assert [state.keys() for state in trial.optimizer.state_dict()["state"].values()] == names
        for each in (trial.optimizer, trial.reference_optimizer):
            each.zero_grad()

    for calls in ([MemoryError], [mock.DEFAULT, MemoryError]):  # for values, for gradients
        with mock.patch.object(OwnerTransfers, "gather_to_owners", side_effect=calls):
            fails(MemoryError)
    trial.optimizer.refuses = "early"
    fails(ValueError)
    trial.optimizer.refuses = ""
    trial.train(square, steps=2)
    with mock.patch.object(OwnerTransfers, "scatter_from_owners", side_effect=MemoryError):
        fails(MemoryError)
    for refuses in ("", "late"):
        trial.backward(square)
        trial.optimizer.refuses = refuses
        with pytest.raises(ValueError, match="refused") if refuses else nullcontext():
            trial.optimizer.step()
    mine = next(whole.parameter for whole in wholes if whole.tensor is not None)
    with pytest.raises(
        RuntimeError, match=r"a step of Refusing has failed and left states of .* Step again"
    ):
        trial.optimizer.state[mine]


@on_ranks(2)
def test_hooks_of_users_see_sharded_parameters_whenever_they_were_set() -> None:
    seen: list[bool] = []

    def look(optimizer: optim.Optimizer, *_: Any) -> None:
        seen.append(
            all(
                isinstance(it, ShardTensor)
                for group in optimizer.param_groups
                for it in group["params"]
            )
        )

    def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        optimizer = Lion(parameters)
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        return optimizer

    for scope in ("element", "parameter"):
        trial = Trial(linears(2), Sharding(), make, {"Lion": scope})
        trial.optimizer.register_step_pre_hook(look)
        trial.optimizer.register_step_post_hook(look)
        trial.forward(square).backward()
        seen.clear()
        trial.optimizer.step()
        assert seen == [True] * 4


class Decaying(Lamb):
    """Does something before and after its parent's step, whose hooks are called inside its own."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        for factor in (0.9, 1.1):
            for parameter in (it for group in self.param_groups for it in group["params"]):
                parameter.mul_(factor)
                self.state[parameter].setdefault("factors", []).append(factor)
            if factor < 1:
                super().step()


@on_ranks(2)
def test_a_step_inside_of_a_step_is_one_step() -> None:
    Lamb(
        [nn.Parameter(torch.ones(1))]
    )  # from now on torch calls hooks around the step of this class
    trial = Trial(linears(2), Sharding(), Decaying, {"Decaying": "parameter"})
    trial.train(square, steps=2)
    assert trial.optimizer.state_dict()["state"][0]["factors"] == [0.9, 1.1] * 2


@on_ranks(2)
def test_gradients_of_plain_parameters_are_not_held_after_they_are_dropped() -> None:
    plain = nn.Parameter(torch.ones(8))
    model = linears(2)
    trial = Trial(model, Sharding(units=("1",)), lambda them: optim.AdamW([*them, plain]))
    for _ in range(2):
        trial.backward(square)
        plain.grad = torch.ones(8)
        alive = weakref.ref(plain.grad)
        trial.optimizer.step()
        trial.optimizer.zero_grad()
        assert alive() is None


class Assigning(optim.Optimizer):
    """A step of SGD with decay that assigns new memory to its parameters."""

    how = "data"

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        parameters = [it for group in self.param_groups for it in group["params"]]
        for it in parameters:
            if it.grad is None:
                continue
            stepped = 0.99 * it - 0.05 * it.grad
            if self.how == "set_":
                it.set_(stepped)
            elif self.how == "swap_tensors":
                gradient, it.grad = it.grad, None
                torch.utils.swap_tensors(it, nn.Parameter(stepped))
                it.grad = gradient
            elif self.how == "swap":  # the memory of another one is this one's for a while
                it.data, other = stepped, it.data
                other.zero_()
            else:
                it.data = stepped


@pytest.mark.parametrize(
    ("scope", "how"),
    [
        *product(["element", "parameter", "model"], ["data", "set_", "swap"]),
        *product(["element", "parameter"], ["swap_tensors"]),  # torch refuses it for others
    ],
)
@on_ranks(2)
def test_values_that_a_step_assigns_are_those_of_the_parameters(scope: Any, how: str) -> None:
    for sharding in (Sharding(units=("1",)), Sharding(strategy="no_shard")):
        trial = Trial(linears(3), sharding, Assigning, {"Assigning": scope})
        for optimizer in (trial.optimizer, trial.reference_optimizer):
            optimizer.how = how
        trial.train(square, steps=3)


class Swapping(Assigning):
    """Swaps the memory of its first two parameters as well."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        super().step()
        first, second = self.param_groups[0]["params"]
        first.data, second.data = second.data, first.data


class Pair(nn.Module):
    """Two weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first).tanh() @ self.second


@pytest.mark.parametrize("scope", ["element", "parameter"])
@on_ranks(2)
def test_parameters_may_swap_their_memory_in_a_step(scope: Any) -> None:
    trial = Trial(Pair(), Sharding(strategy="no_shard"), Swapping, {"Swapping": scope})
    trial.train(square, steps=3)


class Failing(Assigning):
    """Fails once it has assigned new memory."""

    fails = True

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        if self.fails:
            for it in (it for group in self.param_groups for it in group["params"]):
                it.data = torch.full_like(it, 7.0)
            raise ValueError("refused")
        super().step()


@pytest.mark.parametrize("scope", ["element", "parameter"])
@on_ranks(2)
def test_what_a_failed_step_has_assigned_is_dropped(scope: Any) -> None:
    trial = Trial(linears(3), Sharding(units=("1",)), Failing, {"Failing": scope})
    trial.backward(square)
    with pytest.raises(ValueError, match="refused"):
        trial.optimizer.step()
    for optimizer in (trial.optimizer, trial.reference_optimizer):
        optimizer.fails = False
    trial.step()
    trial.check_parameters()
    trial.train(square, steps=2)


class Growing(Assigning):
    """Assigns memory of another shape."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:
        for it in (it for group in self.param_groups for it in group["params"]):
            it.data = torch.zeros(3, 3, 3)


@pytest.mark.parametrize("scope", ["element", "parameter"])
@on_ranks(2)
def test_a_step_that_assigns_another_shape_is_refused(scope: Any) -> None:
    trial = Trial(linears(3), Sharding(units=("1",)), Growing, {"Growing": scope})
    trial.backward(square)
    with pytest.raises(ValueError, match=r"Growing assigns a tensor of shape \(3, 3, 3\) to a par"):
        trial.optimizer.step()
