"""Deferred initialization never has the whole model on one rank: shards, and one unit beside them."""

from itertools import accumulate
from unittest import mock

import pytest
from torch import nn

from shardeddp.comm import CollectiveHandle
from shardeddp.comm.backends import GlooCollectives
from shardeddp.engine.shard_model import shard_model
from shardeddp.wrap import NamePolicy, build_units
from support.allocations import ATTEMPTS, all_complete, record_allocations
from support.deferred import Build, recorded
from training import Sharding
from world import Worlds

pytestmark = pytest.mark.timeout(60)

WIDTH = 256


def wide_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


class Wide(nn.Module):
    """Blocks that their parent initialises again, and scales in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([wide_block() for _ in range(8)])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of all blocks at once."""
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        for parameter in self.parameters():
            parameter.data.mul_(0.5)


def wide() -> nn.Module:
    return nn.Sequential(*(wide_block() for _ in range(8)))


def check_peak(sharding: Sharding, build: Build, load: bool) -> None:
    full_nbytes = sum(parameter.nbytes for parameter in build().parameters())
    block = sum(parameter.nbytes for parameter in wide_block().parameters())
    for _ in range(ATTEMPTS):
        sizes, shards = record_setup(sharding, build, load)
        if all_complete(sizes, shards):
            break
    assert abs(sum(sizes) - shards) < 0.01 * full_nbytes, (
        f"{sum(sizes):,} bytes stay, shards {shards:,}"
    )
    peak = max(accumulate(sizes))
    assert peak <= shards + block + 0.01 * full_nbytes, (
        f"{peak:,} bytes, shards {shards:,}, a block {block:,}"
    )


def record_setup(sharding: Sharding, build: Build, load: bool) -> tuple[list[int], float]:
    """What setting up a model on the meta device allocates and frees, and the bytes of this rank's shards."""
    state = build().state_dict()
    model, recording = recorded(build)
    units = build_units(model, NamePolicy(sharding.units))
    mesh = sharding.mesh()

    def restore() -> None:
        model.load_state_dict(state)

    # What the transport's threads let go of is freed where the profiler does not look; here all ranks draw alike.
    silent = mock.patch.object(
        GlooCollectives, "broadcast_", new=lambda *arguments: CollectiveHandle()
    )
    with silent, record_allocations() as sizes:
        shard_model(
            units,
            mesh,
            sharding.asked,
            recording=recording,
            load=restore if load else None,
        )
    return sizes, sum(
        parameter.nbytes for parameter in build().parameters()
    ) / mesh.topology.shard_size


@pytest.mark.slow
@pytest.mark.parametrize("build", [wide, Wide])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_shards_and_one_unit_at_most(
    world: Worlds, size: int, build: Build
) -> None:
    units = ("*",) if build is wide else ("blocks.*",)
    world(size).run(check_peak, Sharding(units=units), build, False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_it_does_while_a_checkpoint_is_loaded(world: Worlds, size: int) -> None:
    world(size).run(check_peak, Sharding(units=("*",)), wide, True)
