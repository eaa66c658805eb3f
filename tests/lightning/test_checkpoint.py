"""When and how a checkpoint is written: after any stage, with the module's own changes, and if the disk is full."""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from shardeddp import CheckpointError, RankError, ShardTensor
from shardeddp.checkpoint.contents import open_checkpoint
from support.resuming import Make, fit, full_shard, in_one_file
from support.tasks import EvaluatedGpt, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def save_at_any_time(folder: str) -> dict[str, bool]:
    """Whether what is saved is what the module holds at that time."""
    model, found = EvaluatedGpt(), {}

    def save(moment: str) -> None:
        trainer.save_checkpoint(f"{folder}/{moment}.ckpt", weights_only=moment == "weights_only")
        saved = torch.load(f"{folder}/{moment}.ckpt", weights_only=True)
        weights = full_weights(model)
        found[moment] = all(
            torch.equal(saved["state_dict"][name], weights[name]) for name in weights
        )
        found[f"{moment} with optimizer"] = bool(saved.get("optimizer_states"))

    trainer = make_trainer(in_one_file(), max_epochs=1)
    trainer.validate(model, token_loader(8), verbose=False)
    save("validate")
    trainer.fit(model, token_loader(16))
    save("fit")
    trainer.test(model, token_loader(8), verbose=False)
    save("test")
    save("weights_only")
    return found


@pytest.mark.slow
def test_a_checkpoint_can_be_saved_after_any_stage(world: Worlds, tmp_path: Path) -> None:
    found = world(2).run(save_at_any_time, str(tmp_path))
    assert found[0] == found[1]
    assert found[0] == {
        "validate": True,
        "validate with optimizer": False,
        "fit": True,
        "fit with optimizer": True,
        "test": True,
        "test with optimizer": found[0]["test with optimizer"],
        "weights_only": True,
        "weights_only with optimizer": False,
    }


class EditsItsCheckpoint(TinyGpt):
    """Drops a key, renames another, and adds sharded and other values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["head.weight"]
        state["renamed"] = state.pop("blocks.0.norm.weight")
        checkpoint["mine"] = {
            "average": [self.blocks[1].up.weight.detach().clone()],
            "note": "text",
            "number": 3,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen = checkpoint["mine"]
        state["blocks.0.norm.weight"] = state.pop("renamed")
        state["head.weight"] = state["embed.weight"]


def edit_and_resume(make: Make, path: str) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = EditsItsCheckpoint()
    trainer = make_trainer(make(), max_epochs=1)
    trainer.fit(model, token_loader(16))
    trainer.save_checkpoint(path)
    resumed = EditsItsCheckpoint()
    make_trainer(full_shard(), max_epochs=1).fit(resumed, token_loader(16), ckpt_path=path)
    return {"weights": full_weights(model), "resumed": full_weights(resumed), "seen": resumed.seen}


@pytest.mark.loop(1)
@pytest.mark.parametrize("make", [in_one_file, full_shard])
def test_what_the_module_changes_in_its_checkpoint_is_saved_and_loaded(
    world: Worlds, tmp_path: Path, make: Make
) -> None:
    path = tmp_path / "edited.ckpt"
    found = world(2).run(edit_and_resume, make, str(path))
    saved = open_checkpoint(path, None) if path.is_dir() else torch.load(path, weights_only=True)
    assert "head.weight" not in saved["state_dict"]
    for answers in found:
        weights = answers["weights"]
        assert torch.equal(saved["state_dict"]["renamed"], weights["blocks.0.norm.weight"])
        assert torch.equal(answers["seen"]["average"][0], weights["blocks.1.up.weight"])
        assert (answers["seen"]["note"], answers["seen"]["number"]) == ("text", 3)
        assert all(torch.equal(answers["resumed"][name], weights[name]) for name in weights)


class FailsToWrite(TorchCheckpointIO):
    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        raise OSError(f"no space left for {Path(path).name}")


def save_to_a_full_disk(folder: str) -> tuple[str, bool]:
    strategy = in_one_file()
    strategy.checkpoint_io = FailsToWrite()
    trainer, model = make_trainer(strategy, max_epochs=1), TinyGpt()
    trainer.fit(model, token_loader(16))
    try:
        trainer.save_checkpoint(f"{folder}/lost.ckpt")
    except RankError as error:
        strategy.checkpoint_io = TorchCheckpointIO()
        trainer.save_checkpoint(f"{folder}/found.ckpt")
        return str(error), bool(torch.load(f"{folder}/found.ckpt", weights_only=True))
    return "nothing was raised", False


def test_a_write_that_fails_on_rank_zero_raises_everywhere_and_can_be_tried_again(
    world: Worlds, tmp_path: Path
) -> None:
    for message, saved_then in world(2).run(save_to_a_full_disk, str(tmp_path)):
        assert "writing" in message
        assert "failed on rank 0" in message
        assert "OSError: no space left for lost.ckpt" in message
        assert saved_then


def checkpoint_by_callback(folder: str) -> list[str]:
    checkpoints = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(in_one_file(), 1, callbacks=[checkpoints], enable_checkpointing=True)
    return sorted(path.name for path in Path(folder).iterdir())


def test_checkpoints_in_the_middle_of_an_epoch_are_whole(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(checkpoint_by_callback, str(tmp_path / "new"))[0] == [
        "step=2.ckpt",
        "step=4.ckpt",
    ]
    loaded = [
        torch.load(tmp_path / "new" / f"step={step}.ckpt", weights_only=True) for step in (2, 4)
    ]
    for name, shape in {
        name: tensor.shape for name, tensor in TinyGpt().state_dict().items()
    }.items():
        first, second = (checkpoint["state_dict"][name] for checkpoint in loaded)
        assert first.shape == second.shape == shape
        assert not torch.equal(first, second)


class SavesBeforeTraining(Callback):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(f"{self._folder}/before.ckpt")


class FailsInItsThirdStep(TinyGpt):
    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if self.global_step == 2:
            raise LookupError("a bad batch")
        return super().training_step(batch, batch_index)


def save_before_and_after_an_error(folder: str) -> list[int]:
    trainer = make_trainer(full_shard(), max_steps=4, callbacks=[SavesBeforeTraining(folder)])
    with pytest.raises(LookupError):
        trainer.fit(FailsInItsThirdStep(), token_loader(32))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    steps = []
    for name in ("before", "after"):
        model, trainer = TinyGpt(), make_trainer(full_shard(), max_steps=3)
        warnings.filterwarnings(
            "ignore", "You're resuming from a checkpoint that ended before the epoch"
        )
        trainer.fit(model, token_loader(32), ckpt_path=f"{folder}/{name}.ckpt")
        steps.append(len(model.losses))
    return steps


@pytest.mark.slow
def test_a_checkpoint_can_be_saved_before_training_and_after_it_has_failed(
    world: Worlds, tmp_path: Path
) -> None:
    assert world(2).run(save_before_and_after_an_error, str(tmp_path)) == [[3, 1]] * 2


def resume_from_what_is_no_checkpoint(folder: str) -> list[str]:
    texts: list[str] = []
    for path in ("ckpt/step=8.ckpt", "absent/step=8.ckpt", "ckpt", "empty/step=8.ckpt"):
        with pytest.raises((FileNotFoundError, CheckpointError)) as caught:
            make_trainer(full_shard(), max_steps=2).fit(
                TinyGpt(), token_loader(16), ckpt_path=f"{folder}/{path}"
            )
        texts.append(str(caught.value).replace(folder, "..."))
    return texts


def save_a_step(path: str) -> None:
    trainer = make_trainer(full_shard(), max_steps=1)
    trainer.fit(TinyGpt(), token_loader(16))
    trainer.save_checkpoint(path)


@pytest.mark.slow
def test_a_path_that_is_no_checkpoint_is_an_error_with_those_that_are(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(save_a_step, str(tmp_path / "ckpt" / "step=1.ckpt"))
    (tmp_path / "ckpt" / "of-ddp.ckpt").touch()
    (tmp_path / "empty").mkdir()
    for missing, absent, folder, empty in world(2).run(
        resume_from_what_is_no_checkpoint, str(tmp_path)
    ):
        start = "Checkpoint file not found: .../{}/step=8.ckpt"
        assert missing == (f"{start.format('ckpt')}; beside it there are step=1.ckpt, of-ddp.ckpt")
        assert (
            absent == f"{start.format('absent')}, nor is there the directory that it would lie in"
        )
        assert folder.endswith("The newest that is whole is .../ckpt/step=1.ckpt")
        assert empty == f"{start.format('empty')}; beside it there are none"


# -- copies


def copy_and_train_on() -> dict[str, Any]:
    model = fit(full_shard(), 1)
    frozen = copy.deepcopy(model)
    before = full_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model.loss(torch.arange(12).view(2, 6) % 11)
    loss.backward()
    optimizer.step()
    tokens = torch.arange(12).view(2, 6) % 11
    with torch.no_grad():
        logits = frozen(tokens)
        plain = TinyGpt()
        plain.load_state_dict(before)
        expected = plain(tokens)
    after = full_weights(model)
    return {
        "copy is unchanged": all(
            torch.equal(weight, before[name]) for name, weight in full_weights(frozen).items()
        ),
        "original has changed": not any(torch.equal(after[name], before[name]) for name in before),
        "copy computes": torch.allclose(logits, expected, atol=1e-6),
        "copy is sharded": all(isinstance(p, ShardTensor) for p in frozen.parameters()),
    }


def test_a_sharded_module_can_be_copied_and_the_copy_is_independent(world: Worlds) -> None:
    assert {
        key
        for answers in world(2).run(copy_and_train_on)
        for key, value in answers.items()
        if not value
    } == set()
