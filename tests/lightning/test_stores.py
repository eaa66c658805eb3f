"""Object stores under a Trainer: what is saved there, what a run goes on from, and what is refused before training."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from shardeddp import (
    CheckpointError,
    CheckpointOptions,
    ConfigurationError,
    ShardedDP,
    load_from_checkpoint,
)
from shardeddp.checkpoint.find import find_checkpoints
from shardeddp.checkpoint.remote import RemotePath, require_writable
from shardeddp.checkpoint.verify import verify
from shardeddp.lightning.preemption import FILE_NAME
from shardeddp_cli import main
from support.object_stores import Shelf, gs_server, s3_server, use_gs, use_s3, use_shelf
from support.resuming import fit, losses_and_weights
from support.tasks import Block, TinyGpt
from world import Worlds

pytestmark = pytest.mark.timeout(90)

KINDS: dict[str, dict[str, Any]] = {
    "sharded": {"state_dict_type": "sharded"},
    "full": {"state_dict_type": "full"},
    "too large for a file": {"checkpoint_options": CheckpointOptions(max_file_gb=0)},
    "asynchronous": {"checkpoint_options": CheckpointOptions(asynchronous=True)},
}


def train(
    folder: str, kind: str, epochs: int, resumes: str | None = None, address: str = ""
) -> dict[str, Any]:
    use_shelf()
    if address:
        (use_gs if folder.startswith("gs:") else use_s3)(address)
    strategy = ShardedDP(auto_wrap_policy={Block}, **KINDS[kind])
    callback = ModelCheckpoint(
        folder, "{epoch}", monitor="epoch", mode="max", save_top_k=2, save_last=True
    )
    options: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True}
    model = fit(strategy, epochs, resumes, **options)
    return {
        **losses_and_weights(model),
        "best": callback.best_model_path,
        "from": model.trainer.ckpt_path,
    }


def names(folder: str) -> set[str]:
    return {it.name for it in find_checkpoints(RemotePath(folder)).checkpoints}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_exactly_from_the_last_checkpoint_of_a_store(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    use_shelf()
    folder = f"shelf://{tmp_path}/run"
    whole = world(2).run(train, str(tmp_path / "local"), kind, 3)[0]
    world(2).run(train, folder, kind, 2)
    assert names(folder) == {"epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"}
    assert all(verify(it.path) == [] for it in find_checkpoints(RemotePath(folder)).checkpoints)
    resumed = world(2).run(train, folder, kind, 3, "last")[0]
    assert resumed["from"] == f"{folder}/last.ckpt"
    assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
    assert all(resumed["weights"][name].equal(it) for name, it in whole["weights"].items())
    assert names(folder) == {"epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"}  # one was deleted
    if kind != "full":
        module = load_from_checkpoint(TinyGpt, f"{folder}/last.ckpt")
        assert all(module.state_dict()[name].equal(it) for name, it in whole["weights"].items())


def refusal(folder: str) -> str:
    use_shelf()
    try:
        train(folder, "sharded", 1)
    except (ConfigurationError, ValueError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("memory://run", "checkpoints of 2 processes cannot be saved to memory://run"),
        ("s4://bucket/run", "Protocol not known: s4"),
        ("shelf:///proc/self/run", "cannot be saved to shelf:///proc/self/run"),
    ],
)
def test_a_store_that_cannot_be_saved_to_is_refused_before_training(
    world: Worlds, folder: str, why: str
) -> None:
    assert all(why in said for said in world(2).run(refusal, folder))


def fit_alone(
    folder: str,
    answers: bool = True,
    saves: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, list[str]]:
    """The error of a fit on one rank, and the operations that the store was asked for."""
    use_shelf()
    asked: list[str] = []

    def fault(name: str, path: str) -> str:
        asked.append(name)
        return "" if answers else "before"

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_model_summary=False,
        callbacks=[] if saves is None else [ModelCheckpoint(**saves)],
        default_root_dir=folder,
        strategy=ShardedDP(),
        **options,
    )
    exists = Shelf.exists if answers else mock.Mock(side_effect=RuntimeError("no answer"))
    with (
        mock.patch.object(Shelf, "fault", fault),
        mock.patch.object(Shelf, "exists", exists),
        mock.patch("time.sleep"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            trainer.fit(BoringModel(), ckpt_path=ckpt_path)
        except (ConfigurationError, CheckpointError) as error:
            return str(error), asked
    return "", asked


@pytest.mark.parametrize("given", [True, False])
def test_a_store_that_does_not_answer_is_refused_before_callbacks_look_into_it(
    world: Worlds, tmp_path: Path, given: bool
) -> None:
    folder = f"shelf://{tmp_path}/run"
    saves = {"dirpath": folder} if given else {}
    ((error, _),) = world(1).run(fit_alone, folder, False, saves)
    assert error.startswith(f"checkpoints cannot be saved to {folder}")


@pytest.mark.parametrize(
    ("saves", "options"),
    [
        ({}, {"fast_dev_run": True}),
        ({"save_top_k": 0}, {}),
        (None, {"enable_checkpointing": False}),
    ],
    ids=["fast_dev_run", "nothing kept", "no checkpoints"],
)
def test_a_store_in_which_nothing_will_be_saved_is_not_asked(
    world: Worlds, tmp_path: Path, saves: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    ((error, asked),) = world(1).run(fit_alone, f"shelf://{tmp_path}", True, saves, None, options)
    assert (error, "put" in asked) == ("", False)


def test_looking_for_the_last_checkpoint_of_a_store_that_does_not_answer_names_it(
    world: Worlds, tmp_path: Path
) -> None:
    folder = f"shelf://{tmp_path}/run"
    ((error, _),) = world(1).run(fit_alone, folder, False, {"dirpath": folder}, "last")
    assert error.startswith(f"looking for checkpoints in {folder} failed")


def go_on_from_a_signal(folder: str) -> tuple[Any, int]:
    use_shelf()
    for ckpt_path in (None, "last"):
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=1 if ckpt_path is None else 3,
            limit_val_batches=0,
            logger=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            strategy=ShardedDP(state_dict_type="sharded"),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(BoringModel(), ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(f"{folder}/{FILE_NAME}")  # as a signal would
    return trainer.ckpt_path, trainer.global_step


def test_the_last_checkpoint_is_what_a_signal_has_saved_in_a_store_without_callbacks(
    world: Worlds, tmp_path: Path
) -> None:
    folder = f"shelf://{tmp_path}"
    assert world(1).run(go_on_from_a_signal, folder) == [(f"{folder}/{FILE_NAME}", 3)]


def test_a_checkpoint_of_a_store_that_has_lost_its_manifest_is_named_by_load_from_checkpoint(
    world: Worlds, tmp_path: Path
) -> None:
    use_shelf()
    folder = f"shelf://{tmp_path}/run"
    world(2).run(train, folder, "sharded", 1)
    (tmp_path / "run" / "last.ckpt" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"{folder}/last.ckpt"):
        TinyGpt.load_from_checkpoint(f"{folder}/last.ckpt")


def test_a_web_server_is_refused_as_a_place_to_save_to() -> None:
    with pytest.raises(ConfigurationError, match=r"https is for reading\. Save to s3://"):
        require_writable(RemotePath("https://host/run"), 1)


def test_commands_read_checkpoints_of_a_store(
    world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_shelf()
    folder = f"shelf://{tmp_path}/run"
    world(2).run(train, folder, "sharded", 1)
    output = tmp_path / "whole.ckpt"
    assert main(["verify", folder]) == 0
    assert f"newest good checkpoint in {folder}: {folder}/last.ckpt" in capsys.readouterr().out
    assert main(["inspect", f"{folder}/last.ckpt"]) == 0
    assert "optimizer_0 exp_avg" in capsys.readouterr().out
    assert main(["consolidate", f"{folder}/last.ckpt", "-o", str(output)]) == 0
    assert main(["diff", f"{folder}/last.ckpt", str(output)]) == 0
    assert torch.load(output, weights_only=True)["epoch"] == 0
    assert main(["inspect", folder]) == 1
    assert f"{folder}/last.ckpt is one" in capsys.readouterr().err


@pytest.mark.stores
@pytest.mark.parametrize("kind", ["sharded", "full", "asynchronous"])
@pytest.mark.parametrize("store", ["s3", "gs"])
def test_a_run_goes_on_from_a_server(world: Worlds, store: str, kind: str) -> None:
    folder = f"{store}://bucket/run"
    with {"s3": s3_server, "gs": gs_server}[store]() as address:
        first = world(2).run(train, folder, kind, 1, None, address)[0]
        second = world(2).run(train, folder, kind, 2, "last", address)[0]
        assert second["from"] == f"{folder}/last.ckpt"
        assert len(second["losses"]) == len(first["losses"])
        assert names(folder) == {"epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"}
        assert verify(RemotePath(folder) / "last.ckpt") == []


@pytest.mark.stores
def test_a_kind_takes_the_place_of_the_other_in_a_server_of_s3(world: Worlds) -> None:
    folder = "s3://bucket/run"
    with s3_server() as address:
        for epochs, kind in ((1, "sharded"), (2, "full"), (3, "sharded")):
            world(2).run(train, folder, kind, epochs, "last" if epochs > 1 else None, address)
            last = RemotePath(folder) / "last.ckpt"
            found = {it.path: it for it in find_checkpoints(RemotePath(folder)).checkpoints}
            assert found[last].epoch == epochs - 1
            assert last.is_file() == (kind == "full")


def test_verifying_a_checkpoint_of_a_store_reads_each_file_once(
    world: Worlds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_shelf()
    folder = f"shelf://{tmp_path}/run"
    world(2).run(train, folder, "sharded", 1)
    read: list[str] = []
    monkeypatch.setattr(
        Shelf, "fault", lambda name, path: read.append(Path(path).name) if name == "cat" else ""
    )
    assert verify(RemotePath(f"{folder}/last.ckpt")) == []
    counts = {name: read.count(name) for name in read}
    assert counts.pop("manifest.json") <= 3
    assert max(counts.values()) <= 2  # a data file's table is read before its pieces
