"""``torch.autograd.grad`` with respect to parameters: each rank's own gradients, whole, as under DDP."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from training import WIDTH, Sharding, Trial, batch, close, square
from world import on_ranks

pytestmark = pytest.mark.timeout(60)
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")


def make_trial(strategy: str) -> Trial:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    return Trial(model, Sharding(strategy=strategy, units=("0", "1")))


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is used outside the forward")
        warnings.filterwarnings("ignore", message="units run in another order")
        yield


@on_ranks(2)
def test_gradients_are_those_of_the_ranks_own_loss_and_leave_nothing_behind() -> None:
    for strategy in STRATEGIES:
        trial = make_trial(strategy)
        found = torch.autograd.grad(trial.forward(square), list(trial.model.parameters()))
        expected = torch.autograd.grad(
            square(trial.reference, dist.get_rank(), 0), list(trial.reference.parameters())
        )
        for (name, p), mine, plain in zip(
            trial.model.named_parameters(), found, expected, strict=True
        ):
            assert type(mine) is torch.Tensor and p.grad is None
            close(mine, plain, name)
        trial.check_rest()
        trial.train(square, steps=1)


def penalize_gradients(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    loss = square(model, rank, step) + sum(
        (p**3).sum() for p in model.parameters()
    )  # in units and outside of them
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients)


def learn_to_learn(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(
        square(model, rank, step), list(parameters.values()), create_graph=True
    )
    fast = {
        name: p - 0.1 * gradient
        for (name, p), gradient in zip(parameters.items(), gradients, strict=True)
    }
    return (
        torch.func.functional_call(model, fast, (batch(rank, step + 9, 4, WIDTH),)).square().mean()
    )


@pytest.mark.slow
@on_ranks(2)
def test_losses_of_gradients_are_trained_as_in_one_process() -> None:
    with quietly():
        for strategy in STRATEGIES:
            for loss in (penalize_gradients, learn_to_learn):
                make_trial(strategy).train(loss, steps=2)


@on_ranks(2)
def test_what_was_not_used_is_none_zero_or_an_error_as_it_was_asked_for() -> None:
    trial = make_trial("full_shard")
    first, last = trial.model[0][0].weight, trial.model[2][0].weight
    output = trial.model[0](batch(0, 0, 4, WIDTH)).sum()
    used, unused = torch.autograd.grad(output, [first, last], allow_unused=True, retain_graph=True)
    assert used.shape == first.shape and unused is None
    used, unused = torch.autograd.grad(
        output, [first, last], materialize_grads=True, retain_graph=True
    )
    assert unused.shape == last.shape and not unused.any()
    with pytest.raises(
        RuntimeError, match=r"\(2\.0\.weight\) appears to not have been used in the graph"
    ):
        torch.autograd.grad(output, [first, last])


@on_ranks(2)
def test_a_backward_leaves_gradients_on_chosen_parameters_only() -> None:
    for strategy in STRATEGIES:
        trial = make_trial(strategy)
        losses = trial.forward(square), trial.reference_loss(square)
        for loss, model in zip(losses, (trial.model, trial.reference), strict=True):
            loss.backward(inputs=[model[1][0].weight, model[0][0].bias])
        trial.check_gradients()
