"""The plan's peak of a step, activations among it, is what the engine allocates: counted on the CPU in a fake world."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg as _registers_fake  # noqa: F401 - the backend

from shardeddp.config import resolve_activation_checkpointing
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.unit import costs_of
from shardeddp.lightning.activation_checkpointing import checkpoint_activations
from shardeddp.optim.attach import attach_optimizer
from shardeddp.plan.memory import backward_moments, plan_memory
from shardeddp.planner.search import at_loss, memory_of
from shardeddp.planner.trace import profile
from shardeddp.planner.transformer import Decoder, Dimensions
from shardeddp.wrap import build_units, resolve_policy
from support.allocations import record_allocations
from training import STRATEGIES, Sharding

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

DIMENSIONS = Dimensions(layers=6, width=128, heads=4, vocabulary=512, hidden=384)
LENGTH, SAMPLES, RANKS = 64, 4, 4
TOO_LOW, TOO_HIGH = -0.015, 0.035
"""Bounds of errors; the plan is to say too much rather than too little."""


def loss_of(model: torch.nn.Module, samples: int) -> torch.Tensor:
    return model(torch.zeros(samples, LENGTH, dtype=torch.long))


def added_at_worst(model: Decoder, runtime: Runtime, micro_batches: int) -> int:
    """Most bytes that a step holds beside those that are there between steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    attach_optimizer(optimizer, runtime.parameters_changed)

    def step() -> None:
        for micro_batch in range(micro_batches):
            runtime.sync_gradients = micro_batch == micro_batches - 1
            with runtime.step("training_step") as outputs:
                outputs.append(loss_of(model, SAMPLES))
            outputs.pop().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with record_allocations() as sizes:
        step()
    return max(accumulate(sizes))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("strategy", "micro_batches"),
    [*((name, 1) for name in STRATEGIES), *((name, 2) for name in STRATEGIES)],
)
def test_the_planned_peak_is_what_the_engine_allocates(
    strategy: str, recompute: str, micro_batches: int
) -> None:
    policy = resolve_policy("auto")
    traced = profile(
        Decoder(DIMENSIONS, LENGTH),
        loss_of,
        policy=policy,
        precision="32-true",
        micro_batch=SAMPLES,
        tokens=SAMPLES * LENGTH,
    )
    names = tuple(unit.name for unit in build_units(Decoder(DIMENSIONS, LENGTH), policy)[1:])
    sharding = Sharding(
        strategy=strategy, units=names, shard_size=2 if strategy == "hybrid_shard" else None
    )
    model = Decoder(DIMENSIONS, LENGTH)
    if recompute == "full":
        checkpoint_activations(model, resolve_activation_checkpointing("auto"))  # type: ignore[arg-type]
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    try:
        runtime = sharding.apply(model)
        topology = runtime.mesh.topology
        added = added_at_worst(model, runtime, micro_batches)
    finally:
        dist.destroy_process_group()
    units = [costs_of(unit, topology) for unit in traced.units]
    options = {"staged": False, "accumulates": micro_batches > 1}
    resting = plan_memory(units, sharding.sharding, prefetch=1, **options)
    planned = memory_of(
        traced,
        recompute,
        resting,
        at_loss(units, sharding.sharding, accumulates=micro_batches > 1),
        backward_moments(units, sharding.sharding, prefetch=1, **options),
    )
    moving = planned.in_flight + planned.activations + planned.logits
    error = (resting.resting_nbytes + moving) / (resting.resting_nbytes + added) - 1
    assert TOO_LOW < error < TOO_HIGH, f"{error:+.2%}: {added:,} bytes, {moving:,} planned"
