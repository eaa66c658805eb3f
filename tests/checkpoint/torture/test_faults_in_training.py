"""A save that fails in a training stops it on all ranks with one text, also if it failed in a thread."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from shardeddp import ShardedDP
from shardeddp.checkpoint.clean import remove_leftovers
from shardeddp.checkpoint.find import find_checkpoints
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError
from support.tasks import Block, TinyGpt
from support.torture_saves import disk_of
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def nothing_is_left_over(folder: Path) -> bool:
    entries = sorted(folder.iterdir())
    return remove_leftovers(folder) == () and sorted(folder.iterdir()) == entries


def train(
    folder: str, asynchronous: bool, steps: int, budget: int | None, path: str | None = None
) -> tuple[str, int]:
    """Train with a save in every second step, on a disk with so much room for rank 1.

    Returns:
        The error, and how many steps were taken.
    """
    strategy = ShardedDP(
        auto_wrap_policy={Block},
        state_dict_type="sharded",
        checkpoint_options=CheckpointOptions(asynchronous=asynchronous),
    )
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)
    tokens: Any = torch.randint(0, 11, (4 * steps, 6), generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(strategy, max_steps=steps, callbacks=[saving], enable_checkpointing=True)
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable")
    limited = budget is not None and dist.get_rank() == 1
    try:
        with disk_of(budget or 0, reports_free=False) if limited else nullcontext():
            trainer.fit(
                TinyGpt(), torch.utils.data.DataLoader(tokens, batch_size=2), ckpt_path=path
            )
    except CheckpointError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_on_one_rank_stops_the_training_on_all(
    world: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    folder = tmp_path / "checkpoints"
    # Room for one checkpoint and a part of the next.
    results = world(2).run(train, str(folder), asynchronous, 40, 100_000)
    assert results[0] == results[1]
    text, steps = results[0]
    assert str(folder) in text and "No space left" in text, text
    assert 2 < steps < 40
    assert nothing_is_left_over(folder)
    path = find_checkpoints(folder).checkpoints[-1].path
    assert (
        world(2).run(train, str(folder), asynchronous, steps + 6, None, str(path))
        == [("", steps + 6)] * 2
    )
    assert nothing_is_left_over(folder)
