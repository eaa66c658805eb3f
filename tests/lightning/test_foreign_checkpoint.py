"""A run goes on from a checkpoint of Lightning's ModelParallelStrategy, when it is told that it may."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from shardeddp import CheckpointError, CheckpointOptions, ShardedDP
from shardeddp.checkpoint.full_write import gather_full
from support.foreign import Small, train_model_parallel
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


class SmallOfOurs(Small):
    """The same module, for a strategy that shards by itself."""

    def configure_model(self) -> None:
        """Nothing."""


def resume(folder: str, foreign: bool) -> dict[str, Any]:
    model = SmallOfOurs()
    callbacks = [
        EarlyStopping("loss"),
        ModelCheckpoint(dirpath=Path(folder).parent / "top", monitor="loss"),
    ]
    strategy = ShardedDP(
        auto_wrap_policy=None, checkpoint_options=CheckpointOptions(foreign=foreign)
    )
    trainer = make_trainer(strategy, max_epochs=2, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(
        model, torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=4), ckpt_path=folder
    )
    names = [name for name, _ in model.named_parameters()]
    states = gather_full(trainer.optimizers[0].state_dict()["state"], keep=True)
    found = {f"model.{name}": weight for name, weight in full_weights(model).items()}
    return found | {
        f"optimizer_0.state.{names[i]}.exp_avg": state["exp_avg"] for i, state in states.items()
    }


@pytest.mark.slow
def test_weights_and_optimizer_states_come_over(world: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path / "theirs.ckpt")
    expected = world(2).run(train_model_parallel, folder)[0]
    for size in (1, 2, 3):
        found = world(size).run(resume, folder, True)[0]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    with pytest.raises(
        CheckpointError, match=r"written by another tool.*CheckpointOptions\(foreign=True\)"
    ):
        world(2).run(resume, folder, False)
