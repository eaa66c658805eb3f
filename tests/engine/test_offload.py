"""Optimizers whose states live on the host: they step on copies, and training is what it was.

Where the host is the device the copies are copies all the same, so that what is tested here is what a GPU would do.
"""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn, optim

from shardeddp.errors import ConfigurationError
from shardeddp.optim.attach import attach_optimizer
from shardeddp.optim.clip import clip_grad_norm_
from shardeddp.tensor.shard_tensor import ShardTensor
from support.optimizers import stepped_on
from training import RUNTIMES, Sharding, Trial, full, linears, sgd, square
from world import on_ranks

UNITS = ("0", "1")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def adam(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01)


def two_groups(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    parameters = list(parameters)
    return optim.Adam(
        [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.1}], lr=0.01
    )


def rprop(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.Rprop(parameters, lr=0.01)


def offloaded(make_optimizer: MakeOptimizer, strategy: str = "full_shard") -> Trial:
    """A trial whose sharded optimizer is on the host."""
    trial = Trial(linears(), Sharding(strategy=strategy, units=UNITS), make_optimizer)
    trial.optimizer = make_optimizer(trial.model.parameters())
    attach_optimizer(trial.optimizer, offload=True)
    return trial


@pytest.mark.loop(1)
@pytest.mark.parametrize("strategy", RUNTIMES)
@pytest.mark.parametrize("make_optimizer", [sgd, adam, two_groups, rprop])
@on_ranks(2)
def test_training_with_states_on_the_host_equals_one_process(
    strategy: str, make_optimizer: MakeOptimizer
) -> None:
    trial = offloaded(make_optimizer, strategy)
    trial.train(square, steps=4)
    for model, clip in (
        (trial.model, clip_grad_norm_),
        (trial.reference, nn.utils.clip_grad_norm_),
    ):
        model.get_parameter("0.weight").grad = None  # a parameter without a gradient is not stepped
        clip(model.parameters(), 1e-3)
    trial.backward(square, 5)
    for model, clip in (
        (trial.model, clip_grad_norm_),
        (trial.reference, nn.utils.clip_grad_norm_),
    ):
        model.get_parameter("0.weight").grad = None
        clip(model.parameters(), 1e-3)
    trial.step()
    trial.check_parameters()


@on_ranks(2)
def test_the_optimizer_steps_on_copies_with_the_fused_kernel() -> None:
    trial = offloaded(adam)
    seen = stepped_on(trial.optimizer)
    trial.train(square, steps=2)
    shards = [parameter.to_local().data_ptr() for parameter in trial.model.parameters()]
    assert len(seen) < 2 * len(shards)  # neighbours are one copy
    assert {parameter.data_ptr() for parameter in seen if parameter.numel()}.isdisjoint(shards)
    assert trial.optimizer.param_groups[0]["fused"]


@on_ranks(2)
def test_a_choice_of_the_users_is_left_alone() -> None:
    trial = offloaded(lambda parameters: optim.AdamW(parameters, lr=0.01, foreach=False))
    trial.train(square, steps=2)
    assert not trial.optimizer.param_groups[0]["fused"]


@on_ranks(2)
def test_what_is_written_between_steps_reaches_the_copies() -> None:
    trial = offloaded(adam)
    trial.train(square, steps=2)
    with torch.no_grad():
        for model in (trial.model, trial.reference):
            model.get_parameter("1.weight").mul_(0.5)
    trial.train(square, steps=2)


@on_ranks(2)
def test_states_are_shown_as_sharded_and_loaded_to_the_host() -> None:
    trial = offloaded(adam)
    trial.train(square, steps=2)
    weight = trial.model.get_parameter("0.weight")
    average = trial.optimizer.state[weight]["exp_avg"]
    assert isinstance(average, ShardTensor)
    expected = trial.reference_optimizer.state[trial.reference.get_parameter("0.weight")]["exp_avg"]
    torch.testing.assert_close(full(average), expected)
    again = offloaded(adam)
    again.model.load_state_dict(
        {name: full(value) for name, value in trial.model.state_dict().items()}
    )
    again.optimizer.load_state_dict(copy.deepcopy(trial.optimizer.state_dict()))  # as from a file
    for each in (trial, again):
        each.forward(square, 7).backward()
        each.optimizer.step()
    for mine, theirs in zip(again.model.parameters(), trial.model.parameters(), strict=True):
        assert torch.equal(full(mine), full(theirs))


@on_ranks(2)
def test_an_optimizer_that_looks_at_whole_matrices_cannot_be_taken_off_the_device() -> None:
    model = linears()
    Sharding(units=UNITS).apply(model)
    with pytest.raises(
        ConfigurationError, match="cpu_offload cannot take the states of Muon off the device"
    ):
        attach_optimizer(optim.Muon([p for p in model.parameters() if p.ndim == 2]), offload=True)
