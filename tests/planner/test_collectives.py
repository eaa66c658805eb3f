"""The plan's collectives are those that the engine issues, in calls and bytes, under every strategy."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg as _registers_fake  # noqa: F401 - the backend

from shardeddp.comm import Mesh
from shardeddp.config import MixedPrecision, parse_options
from shardeddp.engine.shard_model import shard_model
from shardeddp.lightning.precision import assign_dtypes, cast_at_boundaries
from shardeddp.optim.attach import attach_optimizer
from shardeddp.planner.collectives import Collective, collectives_of_step
from shardeddp.wrap import NamePolicy, build_units
from shardeddp.wrap.flat_buffers import costs_of

pytestmark = pytest.mark.timeout(60)

WIDTH = 12


def sent_by_kind(collectives: Sequence[Collective]) -> tuple[Counter[str], Counter[str]]:
    """Bytes and calls by kind, as the engine's `Traffic` has them."""
    nbytes, calls = Counter[str](), Counter[str]()
    for it in collectives:
        nbytes[it.kind] += it.sent_nbytes * it.times
        calls[it.kind] += it.times
    return nbytes, calls


class Block(nn.Module):
    """Two matrices and a norm, whose sizes need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH) to the same."""
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    """Blocks between two layers of the root; one of the blocks may be frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.input = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.output = nn.Linear(WIDTH, 5)
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 3) to (rows, 5)."""
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Rank 0 of ranks that are not there: what it sends is true, what it receives is not."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("frozen", "dtype"), [(False, None), (True, "bfloat16")])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("full_shard", {}),
        ("full_shard", {"reshard_after_forward": 4}),
        ("full_shard", {"reduce_every_backward": False}),
        ("shard_grad_op", {}),
        ("shard_optimizer", {}),
        ("no_shard", {}),
        ("hybrid_shard", {}),
        ("hybrid_shard", {"shard_size": 2}),
        ("hybrid_shard", {"optimizer_shard": "world"}),
    ],
)
def test_the_plan_lists_what_the_engine_sends(
    strategy: str,
    options: dict[str, Any],
    dtype: str | None,
    frozen: bool,
    micro_batches: int,
) -> None:
    asked = parse_options({"sharding_strategy": strategy, **options})
    sharding = asked.sharding
    topology = sharding.topology(2, 4)
    model = Stack(frozen)
    precision = MixedPrecision(param_dtype=dtype) if dtype else None
    units = assign_dtypes(model, build_units(model, NamePolicy(("blocks.*",))), precision, None)
    expected = sent_by_kind(
        collectives_of_step([costs_of(unit, topology) for unit in units], sharding, micro_batches)
    )
    with fake_world(8):
        cast_at_boundaries(model, units, precision)
        mesh = Mesh(topology, torch.device("cpu"), timedelta(seconds=30), sharding.regather_size)
        runtime = shard_model(units, mesh, asked)
        trained = [it for it in model.parameters() if it.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        attach_optimizer(optimizer)
        for _ in range(3):
            mesh.traffic.reset()
            for micro_batch in range(micro_batches):
                runtime.sync_gradients = micro_batch == micro_batches - 1
                with runtime.step("training_step") as outputs:
                    outputs.append(model(torch.ones(2, 3)).float().square().mean())
                outputs[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        found = mesh.traffic
    assert (+found.nbytes, +found.calls) == expected
