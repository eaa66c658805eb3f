"""Parameters that a step does not use: on all ranks, on some of them, in turns, without any flag."""

import random
from functools import partial

import pytest
import torch
from torch import nn

from training import RUNTIMES, WIDTH, Loss, Sharding, Trial, another_order, square
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


class Optional(nn.Module):
    """A layer with a second weight that is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.use = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use:
            x = x + self.sometimes(x)  # so its backward is the unit's last
        return x + self.always(x).tanh()


class Layers(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Optional() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def use(self, *layers: int) -> None:
        for index, layer in enumerate(self.layers):
            layer.use = index in layers


@every_strategy
@on_ranks(2)
def test_what_no_rank_uses_has_no_gradient_and_is_not_decayed(strategy: str) -> None:
    trial = Trial(Layers(), Sharding(strategy=strategy, units=("layers.*",)))
    trial.model.use(1)
    trial.reference.use(1)
    before = trial.reference.layers[0].sometimes.weight.detach().clone()
    trial.train(square)
    assert torch.equal(before, trial.reference.layers[0].sometimes.weight)


def used_by_some(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Rank 1 uses the first, the last and a middle layer's second weight, rank 0 none."""
    model.use(*((0, 2, 4) if rank == 1 else ()))
    return square(model, rank, step)


def used_in_turns(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    model.use(*range((rank + step) % 3, 5, 2))
    return square(model, rank, step)


@pytest.mark.slow
@every_strategy
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("loss", [used_by_some, used_in_turns])
@on_ranks(2, timeout_s=30)
def test_what_some_ranks_use_gets_the_mean_over_all_ranks(
    strategy: str, prefetch: int, loss: Loss
) -> None:
    trial = Trial(Layers(), Sharding(strategy=strategy, units=("layers.*",), prefetch=prefetch))
    trial.train(loss, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [used_by_some, used_in_turns])
@on_ranks(4)
def test_replicas_use_different_parameters(loss: Loss) -> None:
    Trial(Layers(), Sharding(strategy="hybrid_shard", shard_size=2, units=("layers.*",))).train(
        loss, steps=5
    )


@every_strategy
@pytest.mark.parametrize("reduce_each_time", [True, False])
@on_ranks(2)
def test_micro_batches_use_different_parameters(strategy: str, reduce_each_time: bool) -> None:
    accumulate(
        Sharding(strategy=strategy, units=("layers.*",), reduce_every_backward=reduce_each_time)
    )


@pytest.mark.slow
@pytest.mark.parametrize("reduce_each_time", [True, False])
@pytest.mark.parametrize(("shard_size", "split"), [(1, False), (2, False), (2, True)])
@on_ranks(4)
def test_replicas_share_what_any_micro_batch_of_any_replica_has_used(
    shard_size: int, split: bool, reduce_each_time: bool
) -> None:
    accumulate(
        Sharding(
            strategy="hybrid_shard",
            shard_size=shard_size,
            units=("layers.*",),
            reduce_every_backward=reduce_each_time,
            split=split,
        )
    )


def accumulate(sharding: Sharding) -> None:
    """Steps of three micro-batches, in which ranks use different parameters."""
    trial = Trial(Layers(), sharding)
    for step in range(9):
        trial.runtime.sync_gradients = step % 3 == 2
        trial.backward(used_in_turns, step)
        if step % 3 == 2:
            trial.check_gradients()
            trial.step()
            trial.check_parameters()


# -- Drawn steps


class Skipping(Layers):
    """Layers of which some are left out."""

    skipped: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index in self.skipped else layer(x)
        return x


def drawn(seed: int, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Layers that all ranks leave out, and second weights that each of them uses; half of the steps are alike."""
    common = random.Random(f"{seed} {step}")
    own = random.Random(f"{seed} {step} {rank}")
    usual = common.random() < 0.5
    model.skipped = frozenset() if usual else frozenset(common.sample(range(5), 2))
    model.use(*(() if usual or own.random() < 0.4 else own.sample(range(5), 2)))
    return square(model, rank, step)


def train_drawn(seed: int, sharding: Sharding) -> None:
    draws = random.Random(seed)
    trial = Trial(Skipping(), sharding)
    with another_order():
        for number in range(40):
            last = draws.random() < 0.4
            trial.runtime.sync_gradients = last
            trial.backward(partial(drawn, seed), number)
            if last and draws.random() < 0.2:
                trial.check_gradients()
            if last:
                trial.step()
                trial.check_parameters()
            elif number > 20 and draws.random() < 0.2:
                index = draws.randrange(
                    20
                )  # whose gradient is replaced before the next micro-batch
                for model in (trial.model, trial.reference):
                    parameter = [*model.parameters()][index]
                    parameter.grad = parameter.detach() * 0.1


@every_strategy
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))]
)
@on_ranks(2)
def test_drawn_steps_are_those_of_the_whole_model(strategy: str, seed: int) -> None:
    train_drawn(seed, Sharding(strategy=strategy, units=("layers.*",)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("split", [False, True])
@on_ranks(4)
def test_drawn_steps_of_replicas_are_those_of_the_whole_model(seed: int, split: bool) -> None:
    sharding = Sharding(strategy="hybrid_shard", shard_size=2, units=("layers.*",), split=split)
    train_drawn(seed, sharding)
