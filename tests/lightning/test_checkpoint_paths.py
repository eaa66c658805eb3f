"""Checkpoint paths of callbacks: a run goes on where its directory is now, and links go with their checkpoint."""

import os
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from shardeddp.lightning.checkpoint_paths import unlink_last
from support.resuming import Make, full_shard, in_one_file
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)


class Scored(TinyGpt):
    def on_train_epoch_end(self) -> None:
        self.log("score", float(self.current_epoch), sync_dist=False)


def train(make: Make, folder: str, epochs: int, resumes: str | None) -> tuple[Any, list[str]]:
    callback = ModelCheckpoint(
        folder, "{epoch}", monitor="score", mode="max", save_top_k=2, save_last=True
    )
    trainer = make_trainer(
        make(), max_epochs=epochs, callbacks=[callback], enable_checkpointing=True
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Scored(), token_loader(8), ckpt_path=resumes)
    paths = [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
    return sorted(paths), [str(each.message) for each in said]


def _contents(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(each), each.stat().st_mtime_ns) for each in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("make", [full_shard, pytest.param(in_one_file, marks=pytest.mark.slow)])
@pytest.mark.parametrize("by", ["move", pytest.param("copy", marks=pytest.mark.slow)])
def test_a_run_goes_on_where_its_directory_is_now(
    world: Worlds, tmp_path: Path, make: Make, by: str
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    world(2).run(train, make, str(old), 2, None)
    shutil.move(old, new) if by == "move" else shutil.copytree(old, new)
    before = _contents(old)
    resumes = "last" if by == "move" else str(new / "last.ckpt")
    (paths, said), other = world(2).run(train, make, str(new), 4, resumes)
    assert other[0] == paths
    names = ["epoch=2.ckpt", "epoch=3.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert paths == [str(new / name) for name in names]
    assert sorted(os.listdir(new)) == sorted({*names})
    assert not [each for each in said if "dirpath has changed" in each or "not deleted" in each]
    assert _contents(old) == before


@pytest.mark.slow
def test_of_a_checkpoint_that_was_copied_alone_only_what_is_there_is_kept(
    world: Worlds, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    world(2).run(train, full_shard, str(old), 2, None)
    shutil.copytree(old / "epoch=1.ckpt", new / "epoch=1.ckpt")
    before = _contents(old)
    (paths, _), _ = world(2).run(train, full_shard, str(new), 4, str(new / "epoch=1.ckpt"))
    assert paths == [
        str(new / name) for name in ("epoch=2.ckpt", "epoch=3.ckpt", "epoch=3.ckpt", "last.ckpt")
    ]
    # Lightning keeps what a run was resumed from.
    assert sorted(os.listdir(new)) == ["epoch=1.ckpt", "epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert _contents(old) == before


@pytest.mark.slow
def test_a_run_that_keeps_its_checkpoints_elsewhere_names_the_best_where_it_is_now(
    world: Worlds, tmp_path: Path
) -> None:
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other"
    world(2).run(train, full_shard, str(old), 2, None)
    shutil.move(old, new)
    (paths, _), _ = world(2).run(train, full_shard, str(other), 2, str(new / "last.ckpt"))
    assert str(new / "epoch=1.ckpt") in paths


def test_links_to_a_deleted_checkpoint_go_in_the_directories_of_callbacks_alone(
    tmp_path: Path,
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        (folder / "deeper").mkdir(parents=True)
        (folder / "last.ckpt").symlink_to("deeper/step=1.ckpt")
    (own / "last-v1.ckpt").symlink_to("deeper/step=2.ckpt")
    (other / "deeper" / "last.ckpt").symlink_to("step=1.ckpt")
    (own / "last-v2.ckpt").symlink_to("deeper/step=1.ckpt")
    mine = [own / name for name in ("last-release.ckpt", "last-v.ckpt", "last.pt", "latest.ckpt")]
    for link in mine:
        link.symlink_to("deeper/step=1.ckpt")
    saves = ModelCheckpoint(own, save_last="link")
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[saves])
    for folder in (own, other):
        unlink_last(str(folder / "deeper" / "step=1.ckpt"), trainer)
    assert {*own.glob("la*")} == {own / "last-v1.ckpt", *mine}
    assert (other / "last.ckpt").is_symlink()
    assert (other / "deeper" / "last.ckpt").is_symlink()
