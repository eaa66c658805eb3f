"""A checkpoint that another run replaces while ranks open it is one and the same on all of them, or an error."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardeddp import CheckpointError, ShardedDP
from shardeddp.lightning import restore
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)


class Evaluated(TinyGpt):
    """Reads its weights before it validates."""

    found: set[float]

    def validation_step(self, batch: Any, batch_index: int) -> None:
        """Nothing."""

    def on_validation_start(self) -> None:
        """All that there is, of any parameter."""
        self.found = {
            value for each in self.parameters() for value in each.detach().unique().tolist()
        }


def save_filled(path: Path, value: float, kind: str) -> None:
    model, strategy = TinyGpt(), ShardedDP("full_shard", None, {Block}, state_dict_type=kind)
    trainer = make_trainer(strategy, max_steps=1)
    trainer.fit(model, token_loader(8 * dist.get_world_size()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    trainer.save_checkpoint(path)


def validate_while_replaced(folder: str, kind: str, times: int) -> set[float] | str:
    """Replace the checkpoint after the first rank has opened it, and before the others do."""
    place, others = Path(folder) / "last.ckpt", Path(folder) / "others"
    save_filled(place, 1.0, kind)
    others.mkdir(exist_ok=True)
    for number in range(times):
        save_filled(others / f"{number}.ckpt", number + 2.0, kind)
    name = "open_any" if kind == "sharded" else "open_file"
    read: Callable[..., Any] = getattr(restore, name)
    left = iter(range(times))

    def read_late(*arguments: Any, **options: Any) -> Any:
        number = next(left, None)
        if number is None:
            return read(*arguments, **options)
        if dist.get_rank():
            dist.barrier()
            return read(*arguments, **options)
        found = read(*arguments, **options)
        shutil.move(place, Path(folder) / f"former-{number}.ckpt")
        os.replace(others / f"{number}.ckpt", place)
        dist.barrier()
        return found

    model = Evaluated()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(restore, name, read_late)
        try:
            make_trainer(ShardedDP("full_shard", None, {Block})).validate(
                model, token_loader(8), ckpt_path=str(place), verbose=False
            )
        except CheckpointError as error:
            return str(error)
    return model.found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_what_is_replaced_once_is_read_again_by_all_ranks(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    assert world(2).run(validate_while_replaced, str(tmp_path), kind, 1) == [{2.0}] * 2


@pytest.mark.slow
def test_what_is_replaced_again_and_again_is_an_error(world: Worlds, tmp_path: Path) -> None:
    for answer in world(2).run(validate_while_replaced, str(tmp_path), "full", 3):
        assert "is being replaced again and again" in str(answer)
