"""Ranks that are placed on nodes in any order train as those that count node by node, and so do their checkpoints."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardeddp import ShardedDP
from shardeddp.plan.sharding_strategy import ShardingStrategy
from shardeddp.report import print_units
from shardeddp.tensor.shard_tensor import ShardTensor
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from training import Chain, Sharding, Trial, square
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(120)

SWAPPED = (0, 3, 1, 2)
"""Nodes of ranks 0 and 3, and of 1 and 2: rank 2 is before rank 3, and its replica behind that one's."""


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 2, 1, 3), SWAPPED])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "hybrid_shard", "shard_size": 2},
        {"strategy": "hybrid_shard", "shard_size": 2, "split": True},
    ],
)
@on_ranks(4)
def test_replicas_in_any_order_train_as_one_process(
    order: tuple[int, ...], options: dict[str, Any]
) -> None:
    sharding = Sharding(units=("blocks.*",), order=order, **options)
    trial = Trial(Chain(), sharding)
    trial.train(square)
    with redirect_stdout(StringIO()) as shown:
        print_units("hybrid_shard", trial.runtime)
    assert f"(replicate x shard), the first of ranks 0, {order[1]}" in shown.getvalue()
    mesh = trial.runtime.mesh
    assert {dist.get_rank(), *mesh.gather.ranks} in ({0, 2}, {1, 3}, {0, 3}, {1, 2})


@pytest.mark.slow
@on_ranks(4)
def test_ranks_near_each_other_gather_for_the_backward() -> None:
    sharding = Sharding(units=("blocks.*",), regather=2, nearest=(0, 2, 1, 3))
    topology = sharding.sharding.topology(2, 2, (0, 2, 1, 3))
    assert topology.shard_groups() == [[0, 1, 2, 3]]
    assert topology.subgroups(2) == [[0, 2], [1, 3]]
    trial = Trial(Chain(), sharding)
    trial.train(square)
    assert set(trial.runtime.mesh.regather.ranks) in ({0, 2}, {1, 3})


def fit(folder: str, order: tuple[int, ...] | None, steps: int, load: str | None = None) -> Any:
    """Parameters after some steps of ranks in that order, which save what they have."""
    original = ShardingStrategy.topology
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ShardingStrategy,
            "topology",
            lambda self, nodes, ranks, _=None, *sizes, **more: original(
                self, nodes, ranks, order, *sizes, **more
            ),
        )
        strategy = ShardedDP(
            "hybrid_shard", 2, {"Block"}, optimizer_shard="world", state_dict_type="sharded"
        )
        trainer = make_trainer(strategy, max_steps=steps, default_root_dir=folder)
        torch.manual_seed(0)
        task = TinyGpt()
        trainer.fit(task, token_loader(32), ckpt_path=load)
        trainer.save_checkpoint(f"{folder}/{steps}.ckpt")
    groups = strategy.mesh.topology.shard_groups()
    assert (groups == [[0, 3], [1, 2]]) == (order is not None), groups
    return {
        name: (it.full_tensor() if isinstance(it, ShardTensor) else it).detach().clone()
        for name, it in task.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(SWAPPED, None), (None, SWAPPED)])
def test_a_checkpoint_does_not_depend_on_the_order_of_ranks(
    world: Worlds, tmp_path: Path, first: Any, then: Any
) -> None:
    ranks = world(4)
    (expected, *_) = ranks.run(fit, f"{tmp_path}/whole", None, 4)
    ranks.run(fit, f"{tmp_path}/parts", first, 2)
    for found in ranks.run(fit, f"{tmp_path}/parts", then, 4, f"{tmp_path}/parts/2.ckpt"):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name)
