"""The state dict of a sharded model goes through torch.distributed.checkpoint as it is, in any world."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardeddp import ShardTensor
from training import Sharding, full
from world import Worlds

pytestmark = pytest.mark.timeout(60)


class Uneven(nn.Module):
    """Shapes whose shards are several boxes, and none at all on some ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"matrix": (7, 5), "cube": (3, 4, 5), "vector": (11,), "one": (1,), "number": ()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def save(folder: str, strategy: str, shard_size: int | None) -> None:
    model = Uneven(seed=1)
    Sharding(strategy=strategy, shard_size=shard_size).apply(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load(folder: str, strategy: str, shard_size: int | None) -> None:
    model = Uneven(seed=2)
    Sharding(strategy=strategy, shard_size=shard_size).apply(model)
    state = {"model": model.state_dict()}
    if dist.get_world_size() > 1:
        assert all(isinstance(value, ShardTensor) for value in state["model"].values())
    dcp.load(state, checkpoint_id=folder)
    for name, value in Uneven(seed=1).state_dict().items():
        assert torch.equal(full(model.get_parameter(name)), value), name


SHARDINGS = [("full_shard", None), ("hybrid_shard", 2), ("no_shard", None)]


@pytest.mark.parametrize(("strategy", "shard_size"), SHARDINGS)
def test_what_is_saved_loads_into_any_other_sharding(
    world: Worlds, tmp_path: Path, strategy: str, shard_size: int | None
) -> None:
    folder = str(tmp_path / "dcp")
    world(4 if shard_size else 3).run(save, folder, strategy, shard_size)
    world(2).run(load, folder, "full_shard", None)
    world(1).run(load, folder, "no_shard", None)
    world(4).run(load, folder, "hybrid_shard", 2)


def test_torch_alone_reads_what_is_saved(world: Worlds, tmp_path: Path) -> None:
    world(3).run(save, str(tmp_path / "dcp"), "full_shard", None)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "plain.pt")
    loaded = torch.load(tmp_path / "plain.pt", weights_only=True)["model"]
    expected = Uneven(seed=1).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
