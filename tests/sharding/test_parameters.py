"""Parameters of every kind: frozen, tied, scalar, empty, few, of mixed dtypes, parametrized, flat in an LSTM; buffers.

Each test trains the sharded model beside the same model in one process, see ``tests/training.py``.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils import parametrizations, parametrize

from shardeddp.errors import ConfigurationError, ReleasedParameterError
from shardeddp.sharding.shard_tensor import ShardTensor
from training import RUNTIMES, Sharding, Trial, another_order, batch, full, unit_of
from world import on_ranks

WIDTH = 6
every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 4, WIDTH)).pow(2).mean()


def linears(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


# -- frozen parameters


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
    for track in trial.runtime.tracks[1:]:
        for group in track.unit.groups:
            assert (group.gradient_shard is not None) == group.trainable


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
def test_a_step_freezes_and_unfreezes_what_it_does_not_train(strategy: str, units: tuple[str, ...]) -> None:
    def alternating(model: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        model[0].requires_grad_(step % 3 != 1)
        model[1].requires_grad_(step % 3 != 2)
        return square(model, rank, step)

    trial = Trial(linears(3), Sharding(strategy=strategy, units=units))
    with another_order():
        trial.train(alternating, steps=6)
    expected = {name: parameter.requires_grad for name, parameter in trial.reference.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in trial.model.named_parameters()} == expected


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


# -- shapes, dtypes, ties


class Odds(nn.Module):
    """Parameters that are easily forgotten."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused_empty = nn.Parameter(torch.empty(0))
        self.one = nn.Parameter(torch.ones(1, 1, 1))
        self.transposed = nn.Parameter(torch.randn(2, WIDTH).t())  # not contiguous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.scale + self.one.squeeze()
        return x @ self.transposed + self.empty.sum()


@every_strategy
@pytest.mark.parametrize("units", [(), ("0", "1")])
@on_ranks(3)
def test_scalar_empty_and_transposed_parameters(strategy: str, units: tuple[str, ...]) -> None:
    model = nn.Sequential(Odds(), nn.Linear(2, 2))
    Trial(model, Sharding(strategy=strategy, units=units)).train(square)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@every_strategy
@on_ranks(3)
def test_fewer_elements_than_ranks(strategy: str) -> None:
    model = nn.Sequential(Scale(), nn.Sequential(Scale(), nn.Tanh(), Scale()))
    Trial(model, Sharding(strategy=strategy, units=("0", "1"))).train(square)


class Mixed(nn.Module):
    """Single and double precision and integers in one module."""

    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH).double()
        self.codes = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts += 1
        x = self.second(self.first(x).double()).float()
        return x[:, self.codes] * self.codes


@every_strategy
@on_ranks(2)
def test_dtypes_are_mixed_in_one_unit(strategy: str) -> None:
    trial = Trial(nn.Sequential(Mixed(), Mixed()), Sharding(strategy=strategy, units=("0", "1")))
    trial.train(square)
    assert {group.layout.dtype for group in unit_of(trial.runtime, "0").groups} == {"float32", "float64", "int64"}
    assert trial.model[0].second.weight.dtype == torch.float64


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)])
        self.layers[0][0].weight = self.layers[0][1].weight  # inside one unit
        self.layers[1][0].weight = self.layers[2][0].weight  # across units
        self.layers[2][1].bias = self.layers[2][0].bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@every_strategy
@on_ranks(2)
def test_weights_are_tied_inside_a_unit_and_across_units(strategy: str) -> None:
    trial = Trial(Tied(), Sharding(strategy=strategy, units=("layers.*",)))
    trial.train(square)
    layers = trial.model.layers
    assert layers[0][0].weight is layers[0][1].weight
    assert layers[1][0].weight is layers[2][0].weight
    assert len(list(trial.model.parameters())) == len(list(trial.reference.parameters()))


@every_strategy
@on_ranks(2)
def test_parameters_keep_identity_names_shapes_and_order(strategy: str) -> None:
    model = nn.Sequential(Odds(), Mixed(), Tied())
    before = {name: (id(p), p.shape, p.dtype, p.requires_grad, p.ndim) for name, p in model.named_parameters()}
    Sharding(strategy=strategy, units=("0", "1", "2.layers.*")).apply(model)
    after = {name: (id(p), p.shape, p.dtype, p.requires_grad, p.ndim) for name, p in model.named_parameters()}
    assert after == before
    assert list(after) == list(before)
    assert all(isinstance(p, nn.Parameter) and isinstance(p, ShardTensor) for p in model.parameters())


@every_strategy
@on_ranks(2)
def test_ranks_start_with_the_values_of_rank_zero(strategy: str) -> None:
    model = linears()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    if dist.get_rank() != 0:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7.0)
    Sharding(strategy=strategy, units=("0",)).apply(model)
    for parameter, values in zip(model.parameters(), expected, strict=True):
        assert torch.equal(full(parameter), values)


# -- modules that do things with their parameters


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


@every_strategy
@pytest.mark.parametrize("units", [(), ("lstm",)])
@on_ranks(2)
def test_the_flat_weights_of_an_lstm_stay_its_parameters(strategy: str, units: tuple[str, ...]) -> None:
    trial = Trial(Recurrent(), Sharding(strategy=strategy, units=units))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 3, 4, WIDTH)).pow(2).mean()

    trial.train(loss)
    lstm = trial.model.lstm
    for name, flat in zip(lstm._flat_weights_names, lstm._flat_weights, strict=True):
        assert flat is getattr(lstm, name)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric(linear: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(linear, "weight", Symmetric())


PARAMETRIZATIONS: list[Callable[[nn.Linear], nn.Module]] = [
    symmetric,
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
]


@every_strategy
@pytest.mark.parametrize("parametrization", range(len(PARAMETRIZATIONS)))
@on_ranks(2)
def test_parametrized_modules(strategy: str, parametrization: int) -> None:
    model = nn.Sequential(*(PARAMETRIZATIONS[parametrization](linear) for linear in linears(2)))
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1")))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        # The state of spectral_norm belongs to the module: the reference has to step it as one rank does.
        with_state = parametrization == 2 and rank > 0 and model is trial.reference
        model.train(not with_state)
        return square(model, rank, step)

    trial.train(loss)


@every_strategy
@on_ranks(2)
def test_running_statistics_follow_rank_zero(strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1")))
    for step in range(3):
        trial.forward(square, step).backward()
        square(trial.reference, 0, step)
    buffers, expected = dict(trial.model.named_buffers()), dict(trial.reference.named_buffers())
    same = [torch.equal(buffers[name], values) for name, values in expected.items()]
    assert all(same) if dist.get_rank() == 0 else not all(same)
    trial.model.eval()
    with torch.no_grad():
        trial.forward(square, 9)
    assert [torch.equal(buffers[name], values) for name, values in expected.items()] == same
    trial.runtime.sync_buffers()
    for name, values in expected.items():
        assert torch.equal(dict(trial.model.named_buffers())[name], values)


# -- parameters outside the forward of their unit


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
    assert all("is used outside the forward of the unit" in str(warning.message) for warning in caught)
    names = sorted(str(warning.message).split()[1] for warning in caught)
    if before or strategy != "shard_grad_op":  # which keeps units unsharded from the forward to the backward
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
    with pytest.raises(ConfigurationError, match=r"Linear.weight of unit 1 was replaced"):
        trial.forward(square)
    trial.model[1].weight = kept
    trial.train(square, steps=2)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_an_unsharded_parameter_that_was_kept_cannot_be_used_after_its_release(strategy: str) -> None:
    kept: list[torch.Tensor] = []

    class Keeper(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.weight)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Keeper(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1")))
    trial.forward(square).backward()
    for use in (torch.Tensor.sum, repr, lambda weight: weight + 1, lambda weight: weight.data, lambda w: w.tolist()):
        with pytest.raises(ReleasedParameterError, match=r"parameter 0\.weight was kept"):
            use(kept[0])
    trial.model.zero_grad()
    trial.train(square)


@every_strategy
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
@on_ranks(2)
def test_a_parameter_must_not_change_between_forward_and_backward(strategy: str, name: str) -> None:
    trial = Trial(linears(), Sharding(strategy=strategy, units=("0", "1")))
    trial.train(square, steps=1)
    loss = trial.forward(square)
    with torch.no_grad():
        trial.model.get_parameter(name).mul_(2)
        trial.reference.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match=r"were changed between its forward and its backward|inplace operation"):
        loss.backward()
    trial.runtime.reset()
    trial.optimizer.zero_grad()
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


@every_strategy
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("units", [(), ("0", "1")])
@on_ranks(2)
def test_values_that_a_forward_writes_are_kept(
    strategy: str, write: Callable[[torch.Tensor], None], units: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Writing(write), Writing(write), nn.Linear(WIDTH, 2))
    trial = Trial(model, Sharding(strategy=strategy, units=units))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        model.train(rank == 0 or model is trial.model)  # the reference writes once, as each rank does
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
        for average, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
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


@every_strategy
@on_ranks(2)
def test_hooks_that_users_set_on_parameters_before_setup_see_the_gradients(strategy: str) -> None:
    model = linears()
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda gradient: gradient * 0.5)
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1")))
    for layer in (trial.reference[0], trial.reference[2]):
        layer.weight._backward_hooks = None
        layer.weight.register_hook(lambda gradient: gradient * 0.5)
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_gradients_that_exist_before_setup_are_kept(strategy: str) -> None:
    model = linears()
    square(model, 0, 7).backward()
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1")), lambda p: optim.SGD(p, lr=0.1))
    for mine, reference in zip(trial.model.parameters(), trial.reference.parameters(), strict=True):
        reference.grad = full(mine.grad).clone()
    trial.train(square)
