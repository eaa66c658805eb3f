"""Parameters of every kind: tied, scalar, empty, few, of mixed dtypes, parametrized, flat in an LSTM; buffers.

Each test trains the sharded model beside the same model in one process, see ``tests/training.py``.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.utils import parametrizations, parametrize

from shardeddp.tensor.shard_tensor import ShardTensor
from training import RUNTIMES, WIDTH, Sharding, Trial, batch, full, linears, square, unit_of
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


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
    warnings.filterwarnings("ignore", ".*a parameter that was not contiguous")
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
    dtypes = {group.main_shard.dtype for group in unit_of(trial.runtime, "0").groups}
    assert dtypes == {torch.float32, torch.float64, torch.int64}
    assert trial.model[0].second.weight.dtype == torch.float64


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        )
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
    warnings.filterwarnings("ignore", ".*a parameter that was not contiguous")
    model = nn.Sequential(Odds(), Mixed(), Tied())
    before = {
        name: (id(p), p.shape, p.dtype, p.requires_grad, p.ndim)
        for name, p in model.named_parameters()
    }
    Sharding(strategy=strategy, units=("0", "1", "2.layers.*")).apply(model)
    after = {
        name: (id(p), p.shape, p.dtype, p.requires_grad, p.ndim)
        for name, p in model.named_parameters()
    }
    assert after == before
    assert list(after) == list(before)
    assert all(
        isinstance(p, nn.Parameter) and isinstance(p, ShardTensor) for p in model.parameters()
    )


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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.loop(1)
@every_strategy
@pytest.mark.parametrize("units", [(), ("lstm",)])
@on_ranks(2)
def test_the_flat_weights_of_an_lstm_stay_its_parameters(
    strategy: str, units: tuple[str, ...]
) -> None:
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


@pytest.mark.loop(1)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
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
        # Rank 0's statistics go into every forward, and each rank's own batch into what comes out of it.
        square(trial.reference, 0 if step < 2 else dist.get_rank(), step)
    buffers, expected = dict(trial.model.named_buffers()), dict(trial.reference.named_buffers())
    assert all(torch.equal(buffers[name], values) for name, values in expected.items())
    trial.model.eval()
    with torch.no_grad():
        trial.forward(square, 9)
    assert all(torch.equal(buffers[name], values) for name, values in expected.items())
    trial.runtime.broadcast_buffers()
    follows = [
        torch.equal(buffers[name], values) for name, values in expected.items() if values.ndim
    ]
    assert all(follows) if dist.get_rank() == 0 else not any(follows)


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
    trial = Trial(
        model, Sharding(strategy=strategy, units=("0", "1")), lambda p: optim.SGD(p, lr=0.1)
    )
    for mine, reference in zip(trial.model.parameters(), trial.reference.parameters(), strict=True):
        reference.grad = full(mine.grad).clone()
    trial.train(square)
