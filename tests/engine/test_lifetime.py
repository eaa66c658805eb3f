"""What ends with a sharded model: everything, process groups and their threads included."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
from torch import nn

from shardeddp.comm import Mesh
from shardeddp.engine.runtime import Prefetch
from shardeddp.engine.shard_model import shard_model
from shardeddp.optim.attach import attach_optimizer
from shardeddp.plan.sharding_strategy import find_sharding
from shardeddp.plan.topology import Topology
from shardeddp.wrap import build_units, resolve_policy
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def train_and_let_go(strategy: str, ranks: int) -> list[bool]:
    """Whether runtime and communicators outlive the last reference to a model that was trained a step."""
    shard_size = ranks if strategy == "full_shard" else 1
    mesh = Mesh(
        Topology(world_size=ranks, shard_size=shard_size),
        torch.device("cpu"),
        timedelta(seconds=30),
    )
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
    specs = build_units(model, resolve_policy({nn.Sequential}))
    runtime = shard_model(specs, mesh, find_sharding(strategy), Prefetch())
    optimizer = torch.optim.AdamW(model.parameters())
    attach_optimizer(optimizer, runtime.parameters_changed)
    with runtime.step() as outputs:
        outputs.append(model(torch.ones(2, 4)).sum())
    outputs.pop().backward()
    optimizer.step()
    watched = [weakref.ref(runtime), weakref.ref(mesh), weakref.ref(model)]
    del mesh, model, specs, runtime, optimizer, outputs
    gc.collect()
    return [reference() is not None for reference in watched]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_model_that_nobody_refers_to_is_collected_with_its_runtime_and_communicators(
    strategy: str, world: Worlds
) -> None:
    assert world(2).run(train_and_let_go, strategy, 2) == [[False, False, False]] * 2
