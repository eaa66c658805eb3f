"""What is saved by default: one ordinary file while it is small, a directory beyond; both keep the same promises."""

import logging
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from shardeddp import CheckpointError, CheckpointOptions, ConfigurationError, ShardedDP
from shardeddp.checkpoint.clean import remove_leftovers
from shardeddp.checkpoint.directory import new_files
from shardeddp.checkpoint.find import find_checkpoints, read_manifest
from shardeddp.checkpoint.items import records_of
from shardeddp.checkpoint.manifest import Item
from shardeddp.checkpoint.verify import verify
from shardeddp_cli import main
from support.resuming import fit, same_batches
from support.tasks import Block, TinyGpt
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)


def save(
    path: str, strategy: str = "full_shard", size: int | None = None, **options: Any
) -> dict[str, Any]:
    """Train, save, and say the weights and what was told."""
    told: list[str] = []

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Listens()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = fit(
            ShardedDP(strategy, size, {Block}, checkpoint_options=CheckpointOptions(**options)),
            1,
            None,
            path,
        )
        model.trainer.save_checkpoint(path)  # once more, over it
    finally:
        logger.removeHandler(handler)
    return {
        "weights": full_weights(model),
        "told": [text for text in told if "directories" in text],
    }


def save_by(options: dict[str, Any], path: str, *arguments: Any) -> dict[str, Any]:
    return save(path, *arguments, **options)


ALL = [
    ("full_shard", None),
    ("shard_grad_op", None),
    ("shard_optimizer", None),
    ("no_shard", None),
    ("hybrid_shard", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), ALL)
def test_a_small_checkpoint_is_one_file_that_lightning_and_torch_read(
    world: Worlds, tmp_path: Path, strategy: str, size: int | None
) -> None:
    path = tmp_path / "state.ckpt"
    answers = world(4 if size else 2).run(save_by, {}, str(path), strategy, size)
    assert path.is_file() and os.listdir(tmp_path) == ["state.ckpt"]
    assert not any(answer["told"] for answer in answers)
    saved = torch.load(path, weights_only=True)
    model = TinyGpt.load_from_checkpoint(path)
    for name, weight in answers[0]["weights"].items():
        assert torch.equal(saved["state_dict"][name], weight) and torch.equal(
            model.state_dict()[name], weight
        )
    assert len(saved["optimizer_states"][0]["state"])
    assert len(saved["shardeddp"]["random_states"]["torch"]) == len(answers)
    assert read_manifest(path).run.step == 4
    assert verify(path) == []


@pytest.mark.loop(1)
@pytest.mark.parametrize(
    "options", [{"max_file_gb": 5e-6}, {"asynchronous": True}, {"zip_crc": False}]
)
def test_what_is_larger_or_takes_a_directory_is_one_and_rank_0_says_so_once(
    world: Worlds, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = tmp_path / "state.ckpt"
    first, second = world(2).run(save_by, options, str(path))
    assert path.is_dir() and verify(path) == []
    assert len(first["told"]) == 1 and next(iter(options)) in first["told"][0]
    assert second["told"] == []
    model = TinyGpt.load_from_checkpoint(str(path))
    assert all(
        torch.equal(model.state_dict()[name], weight) for name, weight in first["weights"].items()
    )


@pytest.mark.slow
def test_either_kind_replaces_the_other_in_one_step(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for limit in (4.0, 0.0, 4.0):
        world(2).run(save_by, {"max_file_gb": limit}, str(path))
        assert path.is_file() == (limit > 0) and verify(path) == []
        assert os.listdir(tmp_path) == ["last.ckpt"]


class Numbers(LightningDataModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return same_batches()


def save_with_data(path: str) -> None:
    model = TinyGpt(dim=4)
    trainer = make_trainer(
        ShardedDP(auto_wrap_policy={Block}, state_dict_type="sharded"), max_epochs=1
    )
    trainer.fit(model, Numbers(seed=3))
    trainer.save_checkpoint(path)


def test_modules_and_data_modules_load_themselves_from_a_directory(
    world: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "state.ckpt"
    world(2).run(save_with_data, str(path))
    assert path.is_dir()
    model = TinyGpt.load_from_checkpoint(
        f"file://{path}", map_location=lambda storage, place: storage
    )
    assert model.hparams["dim"] == 4 and model.embed.weight.shape == (11, 4)
    assert Numbers.load_from_checkpoint(path).hparams["seed"] == 3


# -- the promises of directories


def keep_and_resume(folder: str) -> dict[str, Any]:
    def keeper() -> ModelCheckpoint:
        return ModelCheckpoint(
            folder,
            "{step}",
            save_top_k=2,
            save_last=True,
            every_n_train_steps=1,
            monitor="step",
            mode="max",
        )

    model = TinyGpt()
    trainer = make_trainer(
        ShardedDP(), max_epochs=1, callbacks=[keeper()], enable_checkpointing=True
    )
    trainer.fit(model, same_batches())
    kept = sorted(os.listdir(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copy(
            f"{folder}/step=3.ckpt", f"{folder}/last.ckpt"
        )  # as if killed between two saves of a step
    dist.barrier()
    resumed = TinyGpt()
    again = make_trainer(ShardedDP(), max_epochs=1, callbacks=[keeper()], enable_checkpointing=True)
    again.fit(resumed, same_batches(), ckpt_path="last")
    mine, theirs = full_weights(model), full_weights(resumed)
    return {
        "kept": kept,
        "step": again.global_step,
        "same": all(torch.equal(mine[name], theirs[name]) for name in mine),
    }


@pytest.mark.slow
def test_callbacks_keep_files_and_the_last_is_that_of_the_highest_step(
    world: Worlds, tmp_path: Path
) -> None:
    for answer in world(2).run(keep_and_resume, str(tmp_path)):
        assert answer == {
            "kept": ["last.ckpt", "step=3.ckpt", "step=4.ckpt"],
            "step": 4,
            "same": True,
        }
    assert [it.step for it in find_checkpoints(tmp_path).checkpoints] == [3, 4, 4]


def load_damaged(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_trainer(ShardedDP(auto_wrap_policy={Block}), max_epochs=2).fit(
            TinyGpt(), same_batches(), ckpt_path=path
        )
    return str(caught.value)


@pytest.mark.slow
def test_damage_of_a_file_is_found_before_it_is_loaded_and_another_is_named(
    world: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "state.ckpt"
    world(2).run(save_by, {}, str(path))
    shutil.copy(path, tmp_path / "older.ckpt")
    tensor = read_manifest(path).tensors["optimizer_0.state.blocks.2.down.weight.exp_avg"]
    with open(path, "r+b") as file:
        whole = Item(file=path.name, offset=0, nbytes=path.stat().st_size)
        records = records_of(file.fileno(), whole)
        record = next(it for it in records if it.name.endswith(f"/data/{tensor.sections[0]}"))
        file.seek(record.offset + 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    (damage,) = verify(path)
    assert damage.tensor == tensor.name
    first, second = world(2).run(load_damaged, str(path))
    assert first == second
    assert (
        tensor.name in first
        and str(path) in first
        and "newest that is whole is" in first
        and "older.ckpt" in first
    )
    assert main(["verify", str(path)]) == 1 and main(["verify", str(tmp_path / "older.ckpt")]) == 0
    assert main(["consolidate", str(path), "-o", str(tmp_path / "x.safetensors")]) == 1


@pytest.mark.slow
def test_the_tools_take_a_file_as_they_take_a_directory(
    world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "state.ckpt", tmp_path / "weights.ckpt"
    world(2).run(save_by, {}, str(path))
    assert main(["inspect", str(path), "--all"]) == 0
    assert "optimizer_0.state.blocks.0.up.weight.exp_avg" in capsys.readouterr().out
    assert main(["consolidate", str(path), "-o", str(out), "--weights-only"]) == 0
    assert torch.equal(
        torch.load(out)["state_dict"]["head.weight"], torch.load(path)["state_dict"]["head.weight"]
    )


def flip_a_bit_and_save(path: str) -> str:
    model = fit(ShardedDP("hybrid_shard", 2, {Block}), 1)
    if dist.get_rank() == 2:
        model.blocks[1].up.weight.to_local().view(torch.int32)[-1] ^= 1
    with pytest.raises(CheckpointError) as caught:
        model.trainer.save_checkpoint(path)
    return str(caught.value)


@pytest.mark.slow
def test_replicas_that_differ_are_named_and_no_file_is_saved(world: Worlds, tmp_path: Path) -> None:
    (message,) = set(world(4).run(flip_a_bit_and_save, str(tmp_path / "state.ckpt")))
    assert "replicas differ: model.blocks.1.up.weight" in message and "rank 2" in message
    assert os.listdir(tmp_path) == []


def test_a_cleanup_leaves_a_file_that_is_being_written_and_takes_one_that_was_left(
    tmp_path: Path,
) -> None:
    (tmp_path / f".tmp-file-{0:032x}").write_text("left by a killed run")
    with new_files([tmp_path / "a.ckpt"]) as [file]:
        file.write(b"new")
        assert remove_leftovers(tmp_path) == ()
        assert not (tmp_path / f".tmp-file-{0:032x}").exists()
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize(
    ("permissions", "mode"), [(None, 0o640), ("umask", 0o640), ("private", 0o600)]
)
def test_permissions_hold_for_files(
    world: Worlds, tmp_path: Path, permissions: Any, mode: int
) -> None:
    world(1).run(
        save_with_umask,
        {"permissions": permissions, "durability": "process"},
        str(tmp_path / "x.ckpt"),
    )
    assert (tmp_path / "x.ckpt").stat().st_mode & 0o777 == mode


def save_with_umask(options: dict[str, Any], path: str) -> None:
    before = os.umask(0o027)
    try:
        save(path, **options)
    finally:
        os.umask(before)


class CountingIO(TorchCheckpointIO):
    saved = 0

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        CountingIO.saved += 1
        super().save_checkpoint(*arguments, **options)


def save_by_plugin(path: str) -> list[int]:
    CountingIO.saved = 0
    strategy = ShardedDP(
        auto_wrap_policy={Block}, checkpoint_options=CheckpointOptions(max_file_gb=0)
    )
    strategy.checkpoint_io = CountingIO()
    fit(strategy, 1, None, path)
    refused = ShardedDP(checkpoint_options=CheckpointOptions(asynchronous=True))
    refused.checkpoint_io = CountingIO()
    with pytest.raises(ConfigurationError, match="checkpoint_io=CountingIO"):
        make_trainer(refused, max_epochs=1).fit(TinyGpt(), same_batches())
    return [CountingIO.saved]


@pytest.mark.slow
def test_a_plugin_for_files_is_asked_to_write_them_however_large(
    world: Worlds, tmp_path: Path
) -> None:
    assert world(2).run(save_by_plugin, str(tmp_path / "x.ckpt")) == [[1], [0]]
    assert torch.load(tmp_path / "x.ckpt")["global_step"] == 4


def save_and_resume_by_address(folder: str, kind: Any) -> int:
    fit(
        ShardedDP(auto_wrap_policy={Block}, state_dict_type=kind),
        1,
        None,
        f"file://{folder}/x.ckpt",
    )
    model = fit(
        ShardedDP(auto_wrap_policy={Block}, state_dict_type=kind), 2, f"file://{folder}/x.ckpt"
    )
    model.trainer.save_checkpoint(f"file://{folder}/y.ckpt")
    return model.trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "sharded"])
def test_the_address_of_a_local_file_is_its_path(world: Worlds, tmp_path: Path, kind: str) -> None:
    assert world(2).run(save_and_resume_by_address, str(tmp_path), kind) == [8, 8]
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt", "y.ckpt"]


def save_over(folder: str) -> dict[str, str]:
    """What a save says of each thing that is already there; empty: it was replaced."""
    trainer = make_trainer(ShardedDP(state_dict_type="full"), max_steps=1)
    trainer.fit(TinyGpt(), same_batches())
    found: dict[str, str] = {}
    for name in ("train.csv", "thesis.docx", "pipe", "empty", "former.pt", "any.ckpt"):
        try:
            trainer.save_checkpoint(os.path.join(folder, name))
            found[name] = ""
        except CheckpointError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_a_file_that_is_no_checkpoint_is_not_replaced(world: Worlds, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("1, 2")
    with zipfile.ZipFile(tmp_path / "thesis.docx", "w") as document:
        document.writestr("word/document.xml", "<all/>")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    torch.save({"x": 1}, tmp_path / "former.pt")
    (tmp_path / "any.ckpt").write_text("cut off")
    for found in world(2).run(save_over, str(tmp_path)):
        refused = {
            name for name, said in found.items() if "that is no checkpoint of this package" in said
        }
        assert refused == {"train.csv", "thesis.docx", "pipe"}
        assert not any(said for name, said in found.items() if name not in refused)
    assert (tmp_path / "train.csv").read_text() == "1, 2"
