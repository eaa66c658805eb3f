"""Checkpoints that a run deletes: those that it has written and those of its callbacks' directories, nothing else."""

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from shardeddp import ShardedDP
from support.resuming import Make, full_shard, in_one_file
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


def train(strategy: ShardedDP, folder: Path, epochs: int, resumes: str | None = None) -> None:
    callback = ModelCheckpoint(folder / "own", "{epoch}", save_top_k=1)
    trainer = make_trainer(
        strategy,
        max_epochs=epochs,
        callbacks=[callback],
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    trainer.fit(TinyGpt(), token_loader(16), ckpt_path=resumes)


def forge(path: Path, names: str) -> None:
    """Let a checkpoint's callback say that something else is the one to delete next."""
    content = torch.load(path, weights_only=True)
    for state in content["callbacks"].values():
        if "best_model_path" in state:
            state["best_model_path"] = names
    torch.save(content, path)


def resume_a_forged_one(folder: str, names: str) -> list[str]:
    own = Path(folder) / "own"
    train(in_one_file(), Path(folder), 1)
    if torch.distributed.get_rank() == 0:
        forge(own / "epoch=0.ckpt", names)
    torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(in_one_file(), Path(folder), 2, str(own / "epoch=0.ckpt"))
    return [str(each.message) for each in said]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("own/../train.py", "it lies outside of .*own"),
        ("own/../other/run.ckpt", "it lies outside of .*own"),
        ("own/link/run.ckpt", "it lies outside of .*own"),
        ("own/link", "a symbolic link that this run has not written, and no checkpoint"),
        ("own/train.py", "an ordinary file that this run has not written, and no checkpoint"),
    ],
)
def test_a_forged_checkpoint_deletes_nothing(
    world: Worlds, tmp_path: Path, names: str, why: str
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("train.py", "own/train.py", "other/run.ckpt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "own" / "link").symlink_to("../other")
    said, others = world(2).run(resume_a_forged_one, str(tmp_path), str(tmp_path / names))
    assert any(re.search(f"was not deleted: .*{why}", each) for each in said)
    assert not [each for each in others if "was not deleted" in each]
    for name in ("train.py", "own/train.py", "other/run.ckpt"):
        assert (tmp_path / name).read_text() == "mine"
    assert (tmp_path / "own" / "link").is_symlink()
    assert {"epoch=0.ckpt", "epoch=1.ckpt"} <= {each.name for each in (tmp_path / "own").iterdir()}


def train_and_resume(make: Make, folder: str) -> None:
    train(make(), Path(folder), 2)
    train(make(), Path(folder), 4, str(Path(folder) / "own" / "epoch=1.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("make", [in_one_file, full_shard])
def test_a_run_deletes_what_it_and_its_former_process_have_written(
    world: Worlds, tmp_path: Path, make: Make
) -> None:
    world(2).run(train_and_resume, make, str(tmp_path))
    # Lightning keeps what a run was resumed from.
    assert sorted(each.name for each in (tmp_path / "own").iterdir()) == [
        "epoch=1.ckpt",
        "epoch=3.ckpt",
    ]


class NotingIO(TorchCheckpointIO):
    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove_checkpoint(self, path: Any) -> None:
        self.removed.append(str(path))


@on_ranks(2)
def test_a_plugin_deletes_no_more_either() -> None:
    io = NotingIO()
    strategy = in_one_file()
    strategy.checkpoint_io = io
    callbacks = [
        ModelCheckpoint("/kept/here"),
        ModelCheckpoint("memory://kept/there", every_n_epochs=2),
    ]
    trainer = make_trainer(strategy, max_steps=1, callbacks=callbacks, enable_checkpointing=True)
    strategy._lightning_module = TinyGpt()
    strategy.lightning_module.trainer = trainer
    for path in ("/kept/here/x.ckpt", "memory://kept/there/x.ckpt"):
        strategy.remove_checkpoint(path)
    refused = [
        "/kept/here/../x.ckpt",
        "memory://kept/there/../x.ckpt",
        "memory://kept/elsewhere/x.ckpt",
    ]
    is_first = torch.distributed.get_rank() == 0
    for path in refused:
        with (
            pytest.warns(UserWarning, match="was not deleted: this run has not written it")
            if is_first
            else contextlib.nullcontext()
        ):
            strategy.remove_checkpoint(path)
    expected = ["/kept/here/x.ckpt", "memory://kept/there/x.ckpt"] if is_first else []
    assert io.removed == expected
