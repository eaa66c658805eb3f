"""What was written for other strategies ends with advice instead of an error of somebody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from shardeddp import CheckpointError, ConfigurationError, ShardedDP
from support.fabric_runs import GPTModule, batches
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(100)


class ForModelParallel(GPTModule):
    """Shards itself, as ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        """Shard each block."""
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class Wrong(GPTModule):
    """Has a mistake of its own in configure_model."""

    def configure_model(self) -> None:
        """Fail."""
        nothing: Any = None
        nothing["key"]


@on_ranks(1)
def test_a_device_mesh_in_configure_model_gets_advice() -> None:
    trainer = make_trainer(ShardedDP(), max_steps=1)
    with pytest.raises(ConfigurationError, match="Take fully_shard"):
        trainer.fit(ForModelParallel(), batches())


@on_ranks(1)
def test_another_mistake_in_configure_model_stays_what_it_is() -> None:
    trainer = make_trainer(ShardedDP(), max_steps=1)
    with pytest.raises(TypeError, match="subscriptable"):
        trainer.fit(Wrong(), batches())


def resume(path: str) -> None:
    with pytest.raises(CheckpointError, match="cut off") as refused:
        make_trainer(ShardedDP(), max_steps=1).fit(GPTModule(), batches(), ckpt_path=path)
    assert path in str(refused.value)


def test_a_truncated_file_of_another_strategy_is_named(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "ddp.ckpt"
    torch.save({"state_dict": GPTModule().state_dict(), "epoch": 0, "global_step": 0}, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    world(1).run(resume, str(path))
