"""Models that people train, under every sharding strategy: each loss and the final weights are those of DDP."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from shardeddp.wrap import AutoPolicy
from support import real_models as models
from support.parity import Run, Trained
from support.trainers import assert_same_weights
from world import Worlds

pytestmark = pytest.mark.timeout(60)

UNUSED = {"find_unused_parameters": True}


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A strategy, on how many ranks."""

    ranks: int
    arguments: dict[str, Any]


STRATEGIES = {
    "full_shard": Sharded(ranks=2, arguments={}),
    "hybrid_shard": Sharded(ranks=4, arguments={"shard_size": 2}),
    "shard_grad_op": Sharded(ranks=2, arguments={}),
    "shard_optimizer": Sharded(ranks=2, arguments={}),
    "no_shard": Sharded(ranks=2, arguments={}),
}


def run_of(model: Callable[[], Any], **fields: Any) -> Run:
    return Run(model=model, loader=models.sequence_loader, batches=6, **fields)


RUNS = {
    "Llama, tied embeddings": run_of(models.TiedLlama),
    "Llama, its own activation checkpointing": run_of(
        models.CheckpointedLlama, warns=models.DEPRECATED
    ),
    "Llama, LoRA of peft": run_of(models.LoraLlama, warns=models.DEPRECATED),
    "T5, one shared embedding": run_of(models.T5),
    "Mixtral, 8 experts in two weights": run_of(models.Mixtral),
    "Switch Transformer, 16 experts as modules": run_of(models.Switch, ddp=UNUSED),
    "LSTM on flat weights, tied embeddings": run_of(models.LstmLanguageModel),
    "CNN with BatchNorm": run_of(models.BatchNormCnn),
    "GAN, two optimizers": run_of(
        models.Gan, ddp=UNUSED, steps=12
    ),  # each of the two counts its steps
}

References = Callable[[str, int], list[Trained]]


@pytest.fixture(scope="module")
def reference(world: Worlds) -> References:
    """What everybody trains a model with makes of it, by rank; once per number of ranks."""

    def train(name: str, ranks: int) -> list[Trained]:
        return world(ranks).run(RUNS[name].under_ddp)

    return cache(train)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", RUNS)
def test_every_loss_and_all_weights_are_those_of_ddp(
    world: Worlds,
    reference: References,
    compared: dict[tuple[str, str], float],
    name: str,
    strategy: str,
) -> None:
    sharded = STRATEGIES[strategy]
    # Blocks of any size are units, as those of a large model are.
    arguments = {
        "sharding_strategy": strategy,
        "auto_wrap_policy": AutoPolicy(min_numel=1),
        **sharded.arguments,
    }
    found = world(sharded.ranks).run(RUNS[name].sharded_by, arguments)
    expected = reference(name, sharded.ranks)
    compared[name, strategy] = largest_difference(
        [each.losses for each in found], [each.losses for each in expected]
    )
    assert compared[name, strategy] <= 1e-4
    # Rank 0's buffers are everybody's: those that are saved.
    assert_same_weights(found[0].weights, expected[0].weights, rtol=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_the_models_that_are_compared_change(reference: References, name: str) -> None:
    first = reference(name, 2)[0].losses
    assert largest_difference([first[:-2]], [first[2:]]) > 1e-3


def test_experts_that_nobody_uses_stay_what_they_are(world: Worlds) -> None:
    run = run_of(models.Switch, steps=1)
    before, after = (
        world(2).run(each.sharded_by, {})[0].weights for each in (replace(run, steps=0), run)
    )
    experts = [key for key in after if ".expert_" in key]
    unused = [key for key in experts if torch.equal(before[key], after[key])]
    assert 0 < len(unused) < len(experts)
    assert_same_weights(after, world(2).run(replace(run, ddp=UNUSED).under_ddp)[0].weights)


def largest_difference(found: list[list[float]], expected: list[list[float]]) -> float:
    """Of two lists of losses by rank and step, relative to the second."""
    pairs = [
        pair
        for ours, theirs in zip(found, expected, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    assert pairs, "nothing was trained"
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
