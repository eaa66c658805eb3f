"""Activation checkpointing by torch's own ``checkpoint``: results of one process, and no gather more than without."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from training import RUNTIMES, WIDTH, Sharding, Trial, batch
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


class Checkpointed(nn.Module):
    """Blocks of which none, each, or all at once are recomputed in backward."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, WIDTH))
                for _ in range(blocks)
            ]
        )
        self.mode = "plain"
        self.reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.mode == "together":
            return checkpoint(self.run_blocks, x, use_reentrant=self.reentrant)
        return self.run_blocks(x)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (
                checkpoint(block, x, use_reentrant=self.reentrant)
                if self.mode == "each"
                else block(x)
            )
        return x


def make_trial(strategy: str, mode: str, reentrant: bool, prefetch: int = 1) -> Trial:
    trial = Trial(
        Checkpointed(), Sharding(strategy=strategy, units=("blocks.*",), prefetch=prefetch)
    )
    trial.model.mode, trial.model.reentrant = mode, reentrant
    return trial


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)  # the same dropout in both
    return model(batch(rank, step, 4, WIDTH)).pow(2).mean()


@pytest.mark.loop(1)
@every_strategy
@pytest.mark.parametrize("mode", ["each", "together"])
@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_recomputed_blocks_train_like_plain_ones(strategy: str, mode: str, reentrant: bool) -> None:
    make_trial(strategy, mode, reentrant, prefetch=int(reentrant)).train(square)


def collectives(strategy: str, mode: str, reentrant: bool) -> Counter[str]:
    """What the third step communicates."""
    trial = make_trial(strategy, mode, reentrant)
    trial.train(square, steps=2)
    trial.runtime.mesh.traffic.reset()
    trial.forward(square).backward()
    return trial.runtime.mesh.traffic.calls


@pytest.mark.loop(1)
@every_strategy
@pytest.mark.parametrize("mode", ["each", "together"])
@on_ranks(2)
def test_recomputation_communicates_nothing_more(strategy: str, mode: str) -> None:
    assert collectives(strategy, mode, reentrant=False) == collectives(
        strategy, "plain", reentrant=False
    )


@pytest.mark.loop(1)
@pytest.mark.parametrize("mode", ["each", "together"])
@on_ranks(2)
def test_reentrant_recomputation_reduces_every_unit_once(mode: str) -> None:
    found, plain = (
        collectives("full_shard", mode, reentrant=True),
        collectives("full_shard", "plain", reentrant=True),
    )
    assert found["reduce_scatter"] == plain["reduce_scatter"]


@pytest.mark.loop(1)
@every_strategy
@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_frozen_blocks_are_recomputed(strategy: str, reentrant: bool) -> None:
    trial = make_trial(strategy, "each", reentrant)
    for model in (trial.model, trial.reference):
        model.blocks[1].requires_grad_(False)
        model.blocks[2][0].requires_grad_(False)
    trial.train(square)


@on_ranks(2)
def test_blocks_are_recomputed_one_at_a_time() -> None:
    trial = make_trial("full_shard", "each", reentrant=False, prefetch=0)
    seen: list[str] = []

    def watch(*_: object) -> None:
        unsharded = (
            t.unit.label[-1]
            for t in trial.runtime.progresses[1:]
            if t.unit.state.value != "sharded"
        )
        seen.append("".join(unsharded))

    for block in trial.model.blocks:
        block[1].register_forward_hook(watch)
    for step in range(2):
        seen.clear()
        trial.forward(square, step).backward()
    assert seen[:2] + seen[3:] == ["0", "1", "2", "1", "0"]
