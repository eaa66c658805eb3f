"""What ends with a sharded model: everything, process groups and their threads included."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from shardeddp.comm import Mesh
from shardeddp.config import parse_options
from shardeddp.engine.shard_model import shard_model
from shardeddp.optim.attach import attach_optimizer
from shardeddp.plan.topology import Topology
from shardeddp.wrap import build_units, resolve_policy
from world import Worlds

pytestmark = pytest.mark.timeout(60)


class Unit(nn.Sequential):
    """A unit that may keep what it has computed, and with it the graph that led there."""

    kept: Tensor | None = None

    def __init__(self, keeps: str) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU())
        self.keeps = keeps
        self[0].bias.requires_grad_(keeps != "output of frozen")

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 4), as is its input."""
        y = super().forward(x)
        if self.keeps:
            self.kept = y * 2 if self.keeps == "feature" else y
        return y


def train_and_let_go(strategy: str, ranks: int, keeps: str, end: str) -> list[bool]:
    """Whether runtime and communicators outlive the last reference to a model that was trained a step."""
    shard_size = ranks if strategy == "full_shard" else 1
    mesh = Mesh(
        Topology(world_size=ranks, shard_size=shard_size),
        torch.device("cpu"),
        timedelta(seconds=30),
    )
    model = nn.Sequential(*[Unit(keeps) for _ in range(3)])
    specs = build_units(model, resolve_policy({Unit}))
    runtime = shard_model(specs, mesh, parse_options({"sharding_strategy": strategy}))
    optimizer = torch.optim.AdamW(model.parameters())
    attach_optimizer(optimizer)
    # From the second backward on, gradients are there before other ranks have answered.
    for _ in range(2 if end == "backward" else 1):
        with runtime.step() as outputs:
            outputs.append(model(torch.ones(2, 4)).sum())
        if end != "forward":
            outputs.pop().backward()
    if end == "step":
        optimizer.step()
    watched = [weakref.ref(runtime), weakref.ref(mesh), weakref.ref(model)]
    del mesh, model, specs, runtime, optimizer, outputs
    gc.collect()
    return [reference() is not None for reference in watched]


@pytest.mark.loop(1)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("keeps", ["", "output", "output of frozen", "feature"])
@pytest.mark.parametrize("end", ["forward", "backward", "step"])
def test_a_model_that_nobody_refers_to_is_collected_with_its_runtime_and_communicators(
    strategy: str, keeps: str, end: str, world: Worlds
) -> None:
    found = world(2).run(train_and_let_go, strategy, 2, keeps, end)
    assert found == [[False, False, False]] * 2


def backward_without_the_model(strategy: str, shard_size: int) -> None:
    mesh = Mesh(
        Topology(world_size=2, shard_size=shard_size), torch.device("cpu"), timedelta(seconds=30)
    )
    model = nn.Sequential(Unit(""), Unit(""))
    specs = build_units(model, resolve_policy({Unit}))
    runtime = shard_model(specs, mesh, parse_options({"sharding_strategy": strategy}))
    with runtime.step() as outputs:
        outputs.append(model(torch.ones(2, 4, requires_grad=True)).sum())
    del model, specs, runtime
    gc.collect()
    with pytest.raises(RuntimeError, match=r"backward comes to .*is gone.*Keep a reference"):
        outputs.pop().backward()


@pytest.mark.parametrize(("strategy", "shard_size"), [("full_shard", 2), ("no_shard", 1)])
def test_a_backward_whose_model_is_gone_says_so(
    strategy: str, shard_size: int, world: Worlds
) -> None:
    world(2).run(backward_without_the_model, strategy, shard_size)
