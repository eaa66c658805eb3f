"""Parameters that a step does not use: on all ranks, on some of them, in turns, without any flag."""

import pytest
import torch
from torch import nn

from training import RUNTIMES, WIDTH, Loss, Sharding, Trial, square
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
