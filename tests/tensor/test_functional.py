"""Parameters that other tools compute with: ``torch.func``, parametrizations, norms, vectors of all parameters."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import (
    parameters_to_vector,
    parametrize,
    spectral_norm,
    vector_to_parameters,
    weight_norm,
)
from torch.nn.utils import parametrizations as new

from training import WIDTH, Sharding, Trial, batch, close, full, linears, sgd, square
from world import on_ranks

pytestmark = pytest.mark.timeout(60)
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
UNITS = ("0", "1")
X = batch(0, 0, 4, WIDTH)


@contextmanager
def quietly(*messages: str) -> Iterator[None]:
    with warnings.catch_warnings():
        for message in (*messages, "is used outside the forward", "units run in another order"):
            warnings.filterwarnings("ignore", message=f".*{message}")
        yield


TRACES: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], object]] = {
    "linearize": lambda function: torch.func.linearize(function, X),
    "make_fx": lambda function: make_fx(function)(X),
    "make_fx of symbols": lambda function: make_fx(function, tracing_mode="symbolic")(X),
    "torch.jit.trace": lambda function: torch.jit.trace(function, (X,), check_trace=False),
}


@pytest.mark.loop(1)
@pytest.mark.parametrize("trace", TRACES)
@on_ranks(2)
def test_what_would_trace_gathered_memory_is_refused_by_name_and_training_goes_on(
    trace: str,
) -> None:
    trial = Trial(linears(), Sharding(units=UNITS))

    def between(model: nn.Module) -> None:
        with pytest.raises(RuntimeError, match="the forward of 0 is traced"):
            TRACES[trace](model[0])

    def in_the_forward(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        if model is trial.model:
            # torch.jit looks at the memory first.
            with pytest.raises(RuntimeError, match=r"of 1\.weight is traced|not allocated"):
                TRACES[trace](lambda x: x @ model[1].weight)
            between(model)
        return square(model, rank, step)

    with quietly("`torch.jit.", "Converting a tensor"):
        between(trial.model)
        trial.train(in_the_forward, steps=2)


def scaled_beside_plain(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    scaled = {name: p * 1.5 for name, p in model.named_parameters()}
    x = batch(rank, step, 4, WIDTH)
    if step:
        return (model(x) - functional_call(model, scaled, (x,))).square().mean()
    return (functional_call(model, scaled, (x,)) - model(x)).square().mean()


@on_ranks(2)
def test_a_model_runs_with_other_tensors_in_the_place_of_its_parameters() -> None:
    with quietly():
        for strategy in STRATEGIES:
            trial = Trial(linears(), Sharding(strategy=strategy, units=UNITS))
            trial.train(scaled_beside_plain, steps=2)
            copies = [
                copy.deepcopy(model).requires_grad_(False)
                for model in (trial.model, trial.reference)
            ]
            with torch.no_grad():
                for copied in copies:
                    copied[0].weight.mul_(2)
                found, expected = (
                    functional_call(model, dict(copied.named_parameters()), (X,))
                    for model, copied in zip((trial.model, trial.reference), copies, strict=True)
                )
            close(found, expected, "with the parameters of a copy")


@pytest.mark.slow
@on_ranks(2)
def test_transforms_of_functions_work_on_parameters_and_through_units() -> None:
    for strategy in STRATEGIES:
        trial = Trial(linears(), Sharding(strategy=strategy, units=UNITS))
        found, expected = (_transform(model) for model in (trial.model, trial.reference))
        for index, (mine, plain) in enumerate(zip(found, expected, strict=True)):
            close(full(mine), plain, f"result {index}")
        with quietly("unit .* runs inside of a transform"):
            trial.train(
                lambda model, rank, step: vmap(model)(batch(rank, step, 4, WIDTH)).square().mean(),
                steps=2,
            )
            trial.train(square, steps=1)


def _transform(model: nn.Module) -> list[torch.Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x[None],)).square().mean()

    with quietly("unit .* runs inside of a transform"):
        gradients = grad(loss)(parameters, X[0])
        per_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, X)
        with torch.no_grad():
            return [*gradients.values(), *per_sample.values(), jacrev(lambda x: model(x))(X[0])]


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric(linear: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


NORMS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "a user's parametrization": symmetric,
    "weight_norm": new.weight_norm,
    "orthogonal": new.orthogonal,
    "spectral_norm": new.spectral_norm,
    "old weight_norm": weight_norm,
    "old spectral_norm": spectral_norm,
}


@pytest.mark.slow
@on_ranks(2)
def test_computed_weights_train_as_in_one_process() -> None:
    with quietly("`torch.nn.utils.weight_norm` is deprecated", "This class is deprecated"):
        for strategy in ("full_shard", "no_shard"):
            for name, norm in NORMS.items():
                _train_beside(name, norm, strategy)


def _train_beside(name: str, norm: Callable[[nn.Linear], nn.Module], strategy: str) -> None:
    models: list[nn.Module] = []
    for _ in range(2):  # not copied: a weight that the old norms have computed cannot be
        torch.manual_seed(0)
        models.append(
            nn.Sequential(
                *(norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)), nn.Linear(WIDTH, WIDTH)
            )
        )
    runtime = Sharding(strategy=strategy, units=UNITS).apply(models[0])
    optimizers = [sgd(model.parameters()) for model in models]
    for step in range(2):
        # The same batch on all ranks: each forward advances the estimate of a spectral norm.
        with runtime.step() as outputs:
            outputs.append(square(models[0], 0, step))
        outputs[0].backward()
        square(models[1], 0, step).backward()
        for (key, mine), plain in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            close(full(mine.grad), plain.grad, f"gradient of {key} under {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        close(models[0].eval()(X), models[1].eval()(X), name)


@pytest.mark.slow
@on_ranks(2)
def test_parameters_become_a_vector_and_come_back_from_one() -> None:
    trial = Trial(linears(), Sharding(units=UNITS))
    with quietly():
        for model in (trial.model, trial.reference):
            vector = parameters_to_vector(model.parameters()).detach()
            vector_to_parameters(vector * 2, model.parameters())
    trial.check_parameters()
    trial.train(square, steps=1)


class BorrowsAWeight(nn.Module):
    """Computes with a weight that another unit holds."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.linear(x), self.others[0].weight).tanh()


@pytest.mark.slow
@on_ranks(2)
def test_a_weight_of_one_unit_is_used_in_the_forward_of_another() -> None:
    with quietly():
        for strategy in STRATEGIES:
            for borrower_first in (False, True):
                torch.manual_seed(0)
                lender = nn.Linear(WIDTH, WIDTH)
                pair = [lender, BorrowsAWeight(lender)][:: -1 if borrower_first else 1]
                model = nn.Sequential(*pair, nn.Linear(WIDTH, WIDTH))
                Trial(model, Sharding(strategy=strategy, units=UNITS)).train(square, steps=2)
