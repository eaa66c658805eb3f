"""Parameters in the user's hands: used outside their unit, replaced, kept too long, written to at every moment.

Each test trains the sharded model beside the same model in one process, see ``tests/training.py``.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardeddp.errors import ConfigurationError
from training import (
    RUNTIMES,
    WIDTH,
    Sharding,
    Trial,
    batch,
    close,
    full,
    linears,
    square,
)
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


class Helper(nn.Module):
    """Uses its parameters in a method that is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight.t(), self.linear.bias)


def autoencoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Helper(), Helper(), nn.Linear(WIDTH, WIDTH))


def penalize_first(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    penalty = sum(p.pow(2).sum() for p in model.parameters())
    return square(model, rank, step) + 0.1 * penalty


def reconstruct(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step, 4, WIDTH)
    decoded = model[0].decode(model[1].decode(model(x)))
    return (decoded - x).pow(2).mean() + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


@pytest.mark.parametrize("before", [True, False])
@every_strategy
@on_ranks(2)
def test_parameters_used_outside_their_unit_get_right_gradients_and_one_warning_each(
    strategy: str, before: bool
) -> None:
    trial = Trial(autoencoder(), Sharding(strategy=strategy, units=("0", "1")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trial.train(penalize_first if before else reconstruct)
    assert all(
        "is used outside the forward of the unit" in str(warning.message) for warning in caught
    )
    names = sorted(str(warning.message).split()[1] for warning in caught)
    if (
        before or strategy != "shard_grad_op"
    ):  # which keeps units unsharded from the forward to the backward
        assert names == ["0.linear.bias", "0.linear.weight", "1.linear.bias", "1.linear.weight"]
    else:
        assert names == []


@every_strategy
@on_ranks(2)
def test_gradients_of_parameters_used_outside_accumulate(strategy: str) -> None:
    trial = Trial(autoencoder(), Sharding(strategy=strategy, units=("0", "1")))
    with pytest.warns(UserWarning, match="is used outside"):
        for step in range(3):
            trial.runtime.sync_gradients = step != 1
            trial.backward(penalize_first, step)
            if step != 1:
                trial.check_gradients()
    trial.step()
    trial.check_parameters()


@every_strategy
@on_ranks(2)
def test_a_parameter_that_is_replaced_after_setup_is_refused(strategy: str) -> None:
    trial = Trial(linears(), Sharding(strategy=strategy, units=("0", "1")))
    trial.train(square, steps=1)
    kept = trial.model[1].weight
    trial.model[1].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    with pytest.raises(
        ConfigurationError, match=r"parameter 1.weight \(Linear.weight of unit 1\) was replaced"
    ):
        trial.forward(square)
    trial.model[1].weight = kept
    trial.train(square, steps=2)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_an_unsharded_parameter_that_was_kept_is_the_sharded_one_after_its_release(
    strategy: str,
) -> None:
    kept: list[torch.Tensor] = []

    class Keeper(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.weight)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Keeper(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1")))
    trial.forward(square).backward()
    expected = trial.reference.get_parameter("0.weight").detach()
    uses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.Tensor.sum,
        lambda weight: weight + 1,
        lambda weight: weight.data,
        lambda weight: torch.cat([torch.ones(1, WIDTH), weight]),
        lambda weight: torch.stack(tensors=(weight, weight)),
        lambda weight: torch.nn.utils.parameters_to_vector([weight]),
        lambda weight: torch.linalg.multi_dot([torch.ones(WIDTH, WIDTH), weight]),
        lambda weight: torch.einsum("ij,jk", [torch.ones(WIDTH, WIDTH), weight]),
    ]
    with torch.no_grad():
        for use in uses:
            close(full(use(kept[0])), use(expected), "a use of what was kept")
        assert kept[0].tolist() == expected.tolist()
    assert "0.weight" in repr(kept[0])
    assert kept[0].grad is trial.model.get_parameter("0.weight").grad
    trial.model.zero_grad()
    trial.train(square)


@every_strategy
@pytest.mark.parametrize("name", ["1.weight", "2.weight"])
@on_ranks(2)
def test_a_parameter_must_not_change_between_forward_and_a_backward_that_needs_it(
    strategy: str, name: str
) -> None:
    trial = Trial(linears(), Sharding(strategy=strategy, units=("0", "1")))
    trial.train(square, steps=1)
    loss = trial.forward(square)
    with torch.no_grad():
        trial.model.get_parameter(name).mul_(2)
        trial.reference.get_parameter(name).mul_(2)
    with pytest.raises(
        RuntimeError, match=rf"parameter {name} was (changed|written to) between its forward and"
    ):
        loss.backward()
    trial.runtime.reset()
    trial.optimizer.zero_grad()
    trial.train(square)


@every_strategy
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
@on_ranks(2)
def test_a_parameter_may_change_before_a_backward_that_does_not_need_it(
    strategy: str, name: str
) -> None:
    trial = Trial(linears(), Sharding(strategy=strategy, units=("0", "1")))
    losses = [trial.forward(square), trial.reference_loss(square)]
    with torch.no_grad():
        trial.model.get_parameter(name).mul_(2)
        trial.reference.get_parameter(name).mul_(2)
    for loss in losses:
        loss.backward()
    trial.check_gradients()
    trial.step()
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_values_that_are_written_between_steps_are_used_in_the_next(strategy: str) -> None:
    trial = Trial(linears(), Sharding(strategy=strategy, units=("0", "1")))
    for step in range(3):
        trial.train(square, steps=1)
        with torch.no_grad():
            for each in (trial.model, trial.reference):
                for parameter in each.parameters():
                    parameter.mul_(0.9).add_(0.01 * step)
        trial.check_parameters()


@every_strategy
@on_ranks(2)
def test_a_step_after_a_forward_without_backward_is_seen_by_the_next_forward(strategy: str) -> None:
    trial = Trial(linears(), Sharding(strategy=strategy, units=("0", "1")))
    trial.train(square, steps=1)
    trial.backward(square, 1)
    unused = trial.forward(square, 2)
    trial.step()
    trial.backward(square, 3)
    trial.check_gradients()
    trial.step()
    trial.check_parameters()
    del unused


def write_in_place(weight: torch.Tensor) -> None:
    weight.mul_(0.9)


def write_to_data(weight: torch.Tensor) -> None:
    weight.data.mul_(0.9)


def assign_data(weight: torch.Tensor) -> None:
    weight.data = weight.data * 0.9


def copy_into(weight: torch.Tensor) -> None:
    weight.copy_(F.normalize(weight, dim=0))


WRITES = [write_in_place, write_to_data, assign_data, copy_into]


class Writing(nn.Module):
    """Writes to its weight in its forward, before using it."""

    def __init__(self, write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.write(self.linear.weight)
        return self.linear(x).tanh()


@pytest.mark.loop(1)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@pytest.mark.parametrize("write", WRITES)
@on_ranks(2)
def test_values_that_a_forward_writes_are_kept(
    strategy: str, write: Callable[[torch.Tensor], None]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Writing(write), Writing(write), nn.Linear(WIDTH, 2))
    trial = Trial(model, Sharding(strategy=strategy, units=("0",)))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        model.train(
            rank == 0 or model is trial.model
        )  # the reference writes once, as each rank does
        return square(model, rank, step)

    trial.train(loss)


class Student(nn.Module):
    """A model and a moving average of it that teaches it; a step moves the average first."""

    def __init__(self, write_data: bool) -> None:
        super().__init__()
        self.student, self.teacher = linears(2), linears(2)
        self.teacher.requires_grad_(False)
        self.write_data = write_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x) - self.teacher(x + 1)

    @torch.no_grad()
    def follow(self) -> None:
        for average, parameter in zip(
            self.teacher.parameters(), self.student.parameters(), strict=True
        ):
            if self.write_data:
                average.data = average.data * 0.5 + parameter.data * 0.5
            else:
                average.lerp_(parameter, 0.5)


@every_strategy
@pytest.mark.parametrize("units", [(), ("student.*", "teacher.*"), ("student", "teacher.0")])
@on_ranks(2)
def test_a_moving_average_is_kept_by_the_step_itself(strategy: str, units: tuple[str, ...]) -> None:
    trial = Trial(Student(write_data=not units), Sharding(strategy=strategy, units=units))

    def loss(model: Student, rank: int, step: int) -> torch.Tensor:
        if rank == 0 or model is trial.model:
            model.follow()
        return square(model, rank, step)

    trial.train(loss)
