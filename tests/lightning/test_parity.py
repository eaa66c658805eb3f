"""Training equals DistributedDataParallel in every loss and in the final weights, for all sharding strategies."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from support.parity import Run, Trained, assert_same_training
from support.tasks import Block, ConvBlock, TinyConvNet, TinyGpt, image_loader, token_loader
from world import Worlds

pytestmark = pytest.mark.timeout(60)

BATCHES = (
    7  # per rank and epoch: odd, so that with accumulation an epoch's last step is on one batch
)

STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "hybrid_shard of 1": {"shard_size": 1},
    "hybrid_shard of 2": {"shard_size": 2},
    "shard_grad_op": {},
    "shard_optimizer": {},
    "no_shard": {},
}

# Tied embeddings, two decay groups and a schedule in all of the first two.
RUNS = {
    "clipped by norm": Run(
        model=TinyGpt,
        loader=token_loader,
        steps=20,
        batches=BATCHES,
        options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    ),
    "clipped by value": Run(
        model=TinyGpt,
        loader=token_loader,
        steps=20,
        batches=BATCHES,
        options={
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.02,
            "gradient_clip_algorithm": "value",
        },
    ),
    "batch norm": Run(model=TinyConvNet, loader=image_loader, steps=20, batches=BATCHES),
}

References = Callable[[str], list[Trained]]


@pytest.fixture(scope="module")
def reference(world: Worlds) -> References:
    """What DDP makes of a run, by rank; trained once."""
    return cache(lambda name: world(2).run(RUNS[name].under_ddp))


def sharded(world: Worlds, name: str, strategy: str) -> list[Trained]:
    units = {"auto_wrap_policy": {ConvBlock if name == "batch norm" else Block}}
    arguments = {"sharding_strategy": strategy.partition(" ")[0], **STRATEGIES[strategy], **units}
    return world(2).run(RUNS[name].sharded_by, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", RUNS)
def test_every_loss_and_all_weights_equal_ddp(
    world: Worlds, reference: References, name: str, strategy: str
) -> None:
    assert_same_training(sharded(world, name, strategy), reference(name))


@pytest.mark.slow
def test_two_runs_are_identical_to_the_last_bit(world: Worlds) -> None:
    first, second = (sharded(world, "clipped by norm", "full_shard") for _ in range(2))
    for once, again in zip(first, second, strict=True):
        assert once.losses == again.losses
        assert all(torch.equal(once.weights[name], again.weights[name]) for name in once.weights)


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_that_are_compared_learn_something(reference: References, name: str) -> None:
    losses = reference(name)[0].losses
    assert sum(losses[-BATCHES:]) < 0.95 * sum(losses[:BATCHES])
