"""Hooks that users set on parameters, before and after sharding, beside those of the same model in one process."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.tensor.shard_tensor import ShardTensor
from training import Sharding, Trial, batch, full, linears, square
from world import on_ranks

pytestmark = pytest.mark.timeout(60)
STRATEGIES = ("full_shard", "no_shard")


def make_trial(strategy: str, model: nn.Module | None = None) -> Trial:
    return Trial(
        linears() if model is None else model, Sharding(strategy=strategy, units=("0", "1"))
    )


def square_and_decay(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Uses every parameter in its unit and outside of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is used outside the forward")
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return square(model, rank, step) + 0.1 * penalty


@pytest.mark.slow
@on_ranks(2)
def test_hooks_set_after_sharding_change_gradients_until_they_are_removed() -> None:
    for strategy in STRATEGIES:
        trial = make_trial(strategy)
        for loss in (square, square_and_decay):
            models = (trial.model, trial.reference)
            handles = [
                p.register_hook(lambda gradient: gradient * 2)
                for model in models
                for p in model.parameters()
            ]
            trial.train(loss, steps=2)
            for handle in handles:
                handle.remove()
            trial.train(loss, steps=1)


@on_ranks(2)
def test_a_hook_may_mix_the_gradient_with_its_sharded_parameter() -> None:
    trial = make_trial("full_shard")
    for model in (trial.model, trial.reference):
        for p in model.parameters():
            p.register_hook(lambda gradient, p=p: gradient + 0.1 * p.detach())
    trial.train(square, steps=2)


@on_ranks(2)
def test_hooks_of_completion_see_the_whole_gradient_once_per_backward_wherever_the_parameter_was_used() -> (
    None
):
    for strategy in STRATEGIES:
        for loss in (square, square_and_decay):
            trial = make_trial(strategy)
            seen: list[dict[str, list[torch.Tensor]]] = []
            for model in (trial.model, trial.reference):
                seen.append({name: [] for name, _ in model.named_parameters()})
                for name, p in model.named_parameters():
                    p.register_post_accumulate_grad_hook(
                        lambda p, to=seen[-1][name]: to.append(full(p.grad).clone())
                    )
            for step in range(2):
                trial.backward(loss, step)
            for name, expected in seen[1].items():
                torch.testing.assert_close(seen[0][name], expected)


@on_ranks(2)
def test_a_backward_that_fails_does_not_keep_hooks_of_completion_from_later_ones() -> None:
    trial = make_trial("full_shard")
    seen: list[torch.Tensor] = []
    trial.model[0].weight.register_post_accumulate_grad_hook(seen.append)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    for step, fails in enumerate((False, True, False)):
        x = batch(0, step, 4, 6).requires_grad_()
        with trial.runtime.step("training_step") as outputs:
            outputs.append(trial.model(x).square().mean())
        if fails:
            x.register_hook(fail)  # when everything else has arrived
            with pytest.raises(ZeroDivisionError):
                outputs[0].backward()
            trial.runtime.reset()
        else:
            outputs[0].backward()
    assert len(seen) == 2


@on_ranks(2)
def test_an_optimizer_steps_in_hooks_of_completion() -> None:
    for strategy in STRATEGIES:
        trial = make_trial(strategy)
        for model in (trial.model, trial.reference):
            for p in model.parameters():

                def step(p: torch.Tensor) -> None:
                    p.sub_(0.1 * p.grad)
                    p.grad = None

                p.register_post_accumulate_grad_hook(step)
        for number in range(3):
            trial.backward(square, number)
            trial.check_parameters()
            assert all(p.grad is None for p in trial.model.parameters())


@on_ranks(2)
def test_hooks_set_before_sharding_are_taken_over_with_their_handles() -> None:
    model = linears()
    weight, seen = model[0].weight, []
    doubling = weight.register_hook(lambda gradient: gradient * 2)
    completing = weight.register_post_accumulate_grad_hook(
        lambda p: seen.append((type(p), p is weight, type(p.grad)))
    )
    trial = make_trial("full_shard", model)
    handle = trial.reference[0].weight.register_hook(lambda gradient: gradient * 2)
    trial.backward(square)
    trial.check_gradients()
    assert seen == [(ShardTensor, True, ShardTensor)]
    for each in (doubling, completing, handle):
        each.remove()
    trial.step()
    trial.train(square, steps=1)
    assert len(seen) == 1


@on_ranks(2)
def test_hooks_need_a_parameter_that_is_trained_and_are_not_copied() -> None:
    frozen = linears().requires_grad_(False)
    trial = make_trial("full_shard", frozen)
    for register in (
        trial.model[0].weight.register_hook,
        trial.model[0].weight.register_post_accumulate_grad_hook,
    ):
        with pytest.raises(RuntimeError, match="doesn't require gradient"):
            register(print)


@on_ranks(2)
def test_a_hook_that_knows_the_model_does_not_keep_it() -> None:
    model = linears()
    Sharding().apply(model)
    for p in model.parameters():
        p.register_hook(lambda gradient, model=model: None)
        p.register_post_accumulate_grad_hook(lambda p, model=model: None)
    model(torch.ones(1, 6)).sum().backward()
    gone = weakref.ref(model)
    del model, p
    gc.collect()
    assert gone() is None and dist.is_initialized()
