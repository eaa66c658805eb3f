"""Sharded checkpoints under a Trainer: from any sharding to any other, kept by callbacks, written behind training."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardeddp import (
    CheckpointError,
    CheckpointOptions,
    ConfigurationError,
    ShardedDP,
    load_from_checkpoint,
)
from shardeddp.checkpoint.contents import open_checkpoint
from shardeddp.checkpoint.find import find_checkpoints, read_manifest
from shardeddp.checkpoint.full_write import gather_full
from support.resuming import fit, same_batches
from support.tables import pieces_of
from support.tasks import Block, EvaluatedGpt, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)


# -- from any to any


def whole_state(model: TinyGpt) -> dict[str, Any]:
    """Weights and optimizer states, whole."""
    states = gather_full(model.trainer.optimizers[0].state_dict()["state"], keep=True)
    return {"model": full_weights(model), "optimizer": states}


def strategy_of(name: str) -> ShardedDP:
    """``hybrid_shard/2/world`` is hybrid sharding in groups of two, whose replicas split the optimizer's share."""
    strategy, *rest = name.split("/")
    size = int(rest[0]) if rest else None
    return ShardedDP(
        strategy,
        size,
        {Block},
        optimizer_shard="world" if rest[1:] else "group",
        state_dict_type="sharded",
    )


def save_as(strategy: str, path: str) -> dict[str, Any]:
    return whole_state(fit(strategy_of(strategy), 1, None, path))


def load_as(strategy: str, path: str) -> dict[str, Any]:
    # The epoch that was trained is all that is asked for: nothing is trained after the load.
    return whole_state(fit(strategy_of(strategy), 1, path))


KINDS = [
    (1, "full_shard"),
    (2, "no_shard"),
    (2, "shard_optimizer"),
    (3, "full_shard"),
    (4, "hybrid_shard/2"),
    (4, "hybrid_shard/2/world"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy"), KINDS)
def test_what_is_saved_under_one_sharding_is_the_same_under_every_other(
    world: Worlds, tmp_path: Path, size: int, strategy: str
) -> None:
    path = str(tmp_path / "state.ckpt")
    saved = world(size).run(save_as, strategy, path)[0]
    assert set(saved["optimizer"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    for other_size, other in KINDS:
        for loaded in world(other_size).run(load_as, other, path)[:1]:
            for name, weight in saved["model"].items():
                assert torch.equal(loaded["model"][name], weight), (other, name)
            for index, state in saved["optimizer"].items():
                assert all(
                    torch.equal(loaded["optimizer"][index][key], state[key]) for key in state
                ), (other, index)


@pytest.mark.slow
def test_every_element_is_written_once_and_by_all_ranks_in_equal_parts(
    world: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "state.ckpt"
    world(4).run(save_as, "hybrid_shard/2", str(path))
    manifest = read_manifest(path)
    tied = [manifest.tensors[f"model.{name}.weight"] for name in ("embed", "head")]
    assert tied[0].sections == tied[1].sections
    sharded = [
        it
        for it in manifest.tensors.values()
        if it.path[0] != "extra" and it.numel > 1 and it is not tied[1]
    ]
    written = dict.fromkeys(manifest.files, 0)
    for piece in (piece for tensor in sharded for piece in pieces_of(path, tensor.name)):
        written[piece.item.file] += piece.interval.numel * torch.float32.itemsize
    parts = [written[f"__{rank}_0.distcp"] for rank in range(4)]
    assert sum(parts) == sum(tensor.nbytes for tensor in sharded)
    assert max(parts) < 1.2 * min(parts)


# -- kept by callbacks


def keep_checkpoints(folder: str, asynchronous: bool, save_last: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    options: dict[str, Any] = {
        "monitor": "train_loss",
        "mode": "max",
        "save_top_k": 2,
        "every_n_train_steps": 1,
    }
    if save_last == "link":
        options["save_top_k"] = -1  # Lightning links to the last of the best
    keeper = ModelCheckpoint(folder, "{step}", save_last=save_last, **options)
    options_of_saves = CheckpointOptions(asynchronous=asynchronous)
    strategy = ShardedDP(
        auto_wrap_policy={Block}, state_dict_type="sharded", checkpoint_options=options_of_saves
    )
    model = LogsItsLoss()
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[keeper], enable_checkpointing=True)
    trainer.fit(model, same_batches())
    weights, best = (
        full_weights(model),
        open_checkpoint(Path(keeper.best_model_path), None)["state_dict"],
    )
    best = {name: tensor + 0 for name, tensor in best.items()}
    trainer.test(model, token_loader(8), ckpt_path="best", verbose=False)
    tested = full_weights(model)
    kept = sorted(os.listdir(folder)), os.path.islink(f"{folder}/last.ckpt")
    assert not find_checkpoints(folder).skipped
    dist.barrier()
    resumed = LogsItsLoss()
    keeper = ModelCheckpoint(folder, **options)
    again = make_trainer(
        strategy_of("full_shard"), max_epochs=2, callbacks=[keeper], enable_checkpointing=True
    )
    again.fit(resumed, same_batches(), ckpt_path="last")
    return {
        "kept": kept,
        "best": best,
        "weights": weights,
        "tested": tested,
        "resumed": full_weights(resumed),
    }


class LogsItsLoss(EvaluatedGpt):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss.detach(), sync_dist=True)
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("save_last", [True, "link"])
def test_callbacks_keep_the_best_and_the_last(
    world: Worlds, tmp_path: Path, asynchronous: bool, save_last: Any
) -> None:
    folder = tmp_path / "kept"
    for answers in world(2).run(keep_checkpoints, str(folder), asynchronous, save_last):
        names, linked = answers["kept"]
        assert "last.ckpt" in names
        assert len(names) == (9 if linked else 3)
        assert linked == (save_last == "link")
        for name, weight in answers["weights"].items():
            assert torch.equal(answers["tested"][name], answers["best"][name]), name
            assert torch.equal(answers["resumed"][name], weight), name


def links_after_a_resume(folder: str, asynchronous: bool) -> list[dict[str, str]]:
    """In each of three runs of two steps, the first is better than all before."""
    scores, found = [0.5, 0.1, 0.6, 0.2, 0.7, 0.3], []
    for steps, path in ((2, None), (4, "last"), (6, "last")):
        keeper = ModelCheckpoint(
            folder,
            "{step}",
            monitor="score",
            mode="max",
            save_top_k=1,
            save_last="link",
            every_n_train_steps=1,
        )
        strategy = ShardedDP(
            state_dict_type="sharded",
            checkpoint_options=CheckpointOptions(asynchronous=asynchronous),
        )
        trainer = make_trainer(
            strategy, max_steps=steps, callbacks=[keeper], enable_checkpointing=True
        )
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        trainer.fit(LogsScores(scores), same_batches(), ckpt_path=path)
        assert Path(keeper.last_model_path).exists()
        links = (path for path in Path(folder).iterdir() if path.is_symlink())
        found.append({link.name: os.readlink(link) for link in links})
    return found


class LogsScores(EvaluatedGpt):
    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("score", self.scores[self.global_step])
        return super().training_step(batch, batch_idx)


@pytest.mark.loop(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_link_to_the_last_goes_with_what_it_leads_to(
    world: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    (tmp_path / "mine").symlink_to("step=1.ckpt")  # of the user
    (found,) = world(1).run(links_after_a_resume, str(tmp_path), asynchronous)
    assert [it.pop("mine") for it in found] == ["step=1.ckpt"] * 3
    assert found == [{"last.ckpt": f"step={step}.ckpt"} for step in (1, 3, 5)]


# -- the last one


def resume_last(folder: str) -> int:
    model = TinyGpt()
    keeper = ModelCheckpoint(folder, every_n_train_steps=1)
    trainer = make_trainer(
        strategy_of("full_shard"), max_epochs=0, callbacks=[keeper], enable_checkpointing=True
    )
    trainer.fit_loop.epoch_loop.max_steps = 0
    trainer.fit(model, same_batches(), ckpt_path="last")
    return trainer.global_step


def train_some(folder: str) -> None:
    keeper = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_last=True, every_n_train_steps=1)
    fit(strategy_of("full_shard"), 1, callbacks=[keeper], enable_checkpointing=True)


def resume_without_save_last(folder: str, form: Any, weights_only: bool = False) -> list[int]:
    """Steps at which two runs begin, of a callback that keeps no "last" checkpoint."""
    warnings.filterwarnings("ignore", ".*there is no last checkpoint available")
    warnings.filterwarnings("ignore", ".*exists and is not empty")
    begun: list[int] = []
    for epochs in (1, 2):
        strategy = ShardedDP(auto_wrap_policy={Block}, state_dict_type=form)
        keeper = ModelCheckpoint(
            folder,
            "{step}",
            save_top_k=-1,
            every_n_train_steps=1,
            save_weights_only=weights_only,
        )
        trainer = make_trainer(
            strategy,
            max_epochs=epochs,
            callbacks=[
                keeper,
                LambdaCallback(on_train_start=lambda it, _: begun.append(it.global_step)),
            ],
            enable_checkpointing=True,
        )
        trainer.fit(TinyGpt(), same_batches(), ckpt_path="last")
    return begun


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_the_last_checkpoint_need_not_be_called_so(
    world: Worlds, tmp_path: Path, form: str
) -> None:
    folder = tmp_path / "there is no such directory yet"
    assert world(2).run(resume_without_save_last, str(folder), form) == [[0, 4]] * 2


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_checkpoints_that_cannot_be_resumed_are_no_last_ones(
    world: Worlds, tmp_path: Path, form: str
) -> None:
    (tmp_path / "of fsdp.ckpt").mkdir()
    (tmp_path / "of fsdp.ckpt" / ".metadata").touch()
    assert world(2).run(resume_without_save_last, str(tmp_path), form, True) == [[0, 0]] * 2


@pytest.mark.slow
def test_the_last_checkpoint_is_that_of_the_highest_step_whatever_the_clock_says(
    world: Worlds, tmp_path: Path
) -> None:
    world(1).run(train_some, str(tmp_path))
    shutil.copytree(tmp_path / "step=2.ckpt", tmp_path / "last-v1.ckpt")
    for name, days in (("last.ckpt", -1), ("last-v1.ckpt", 1)):
        os.utime(tmp_path / name, times=(2e9 + days * 86400,) * 2)
    assert world(1).run(resume_last, str(tmp_path)) == [4]


def resume_last_with_a_warning(folder: str) -> int:
    with pytest.warns(UserWarning, match="not whole, left aside.*last.ckpt"):
        return resume_last(folder)


def test_a_last_checkpoint_that_is_not_whole_is_left_aside(world: Worlds, tmp_path: Path) -> None:
    world(1).run(train_some, str(tmp_path))
    (tmp_path / "last.ckpt" / "__0_0.distcp").unlink()
    shutil.rmtree(tmp_path / "step=4.ckpt")
    assert world(1).run(resume_last_with_a_warning, str(tmp_path)) == [3]


# -- refused


def load_damaged(path: str) -> list[str]:
    model = fit(strategy_of("full_shard"), 1)
    before = full_weights(model)
    trainer = make_trainer(strategy_of("full_shard"), max_epochs=2)
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(model, same_batches(), ckpt_path=path)
    dist.barrier()
    assert all(torch.equal(weight, before[name]) for name, weight in full_weights(model).items())
    return [str(caught.value)]


@pytest.mark.slow
def test_damage_is_found_before_anything_changes_and_all_ranks_say_the_same(
    world: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "state.ckpt"
    world(2).run(save_as, "full_shard", str(path))
    tensor = read_manifest(path).tensors["optimizer_0.state.blocks.2.down.weight.exp_avg"]
    piece = pieces_of(path, tensor.name)[-1]
    with open(path / piece.item.file, "r+b") as file:
        file.seek(piece.payload + 3)
        byte = file.read(1)[0]
        file.seek(piece.payload + 3)
        file.write(bytes([byte ^ 1]))
    first, second = world(2).run(load_damaged, str(path))
    assert first == second
    for part in (
        piece.item.file,
        tensor.name,
        f"bytes {piece.payload:,} to",
        piece.checksums[0],
        "found",
    ):
        assert part in first[0]


def load_again_after(path: str) -> None:
    make_trainer(strategy_of("full_shard"), max_epochs=1).fit(
        TinyGpt(), same_batches(), ckpt_path=path
    )


def test_the_error_names_the_newest_checkpoint_that_is_whole(world: Worlds, tmp_path: Path) -> None:
    world(1).run(train_some, str(tmp_path))
    for name in ("last.ckpt", "step=4.ckpt"):
        (tmp_path / name / "state.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"state.json has 2 bytes.*The newest that is whole is .*step=3.ckpt"
    ):
        world(1).run(load_again_after, str(tmp_path / "last.ckpt"))


class Wider(TinyGpt):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(2))
        self.embed.double()


def load_what_does_not_fit(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_trainer(strategy_of("full_shard"), max_epochs=1).fit(
            Wider(), same_batches(), ckpt_path=path
        )
    return str(caught.value)


@pytest.mark.slow
def test_what_does_not_fit_is_listed_and_not_loaded(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "state.ckpt")
    world(2).run(save_as, "full_shard", path)
    first, second = world(2).run(load_what_does_not_fit, path)
    assert first == second
    assert 'Missing key(s) in the checkpoint: "more"' in first
    assert (
        "embed.weight is torch.float32, expected torch.float64 (checkpoint_options: cast=True"
        in first
    )


def flip_a_bit_and_save(path: str, rank: int, fqn: str) -> str:
    model = fit(strategy_of("hybrid_shard/2"), 1)
    local = model.get_parameter(fqn).to_local()
    if dist.get_rank() == rank:
        local.view(torch.int32)[-1] ^= 1
    with pytest.raises(CheckpointError) as caught:
        model.trainer.save_checkpoint(path)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "fqn"), [(0, "blocks.1.up.weight"), (3, "head.weight"), (2, "blocks.0.norm.bias")]
)
def test_replicas_that_differ_in_one_bit_are_named_and_not_saved(
    world: Worlds, tmp_path: Path, rank: int, fqn: str
) -> None:
    messages = set(world(4).run(flip_a_bit_and_save, str(tmp_path / "state.ckpt"), rank, fqn))
    assert len(messages) == 1
    message = messages.pop()
    other = (rank + 2) % 4
    assert "replicas differ: model." in message
    assert (
        f"on rank {rank} as on rank {other}" in message
        or f"on rank {other} as on rank {rank}" in message
    )
    assert os.listdir(tmp_path) == []


def train_with_a_plugin_of_files() -> None:
    strategy = strategy_of("full_shard")
    strategy.checkpoint_io = AsyncCheckpointIO()
    with pytest.raises(
        ConfigurationError, match=r"checkpoint_io=AsyncCheckpointIO .*state_dict_type='full'"
    ):
        make_trainer(strategy, max_epochs=1).fit(TinyGpt(), same_batches())


@pytest.mark.slow
def test_a_plugin_that_writes_files_is_refused(world: Worlds) -> None:
    world(2).run(train_with_a_plugin_of_files)


# -- written behind training


def save_where_nothing_can_be(folder: str) -> tuple[int, str]:
    strategy = ShardedDP(
        auto_wrap_policy={Block}, checkpoint_options=CheckpointOptions(asynchronous=True)
    )
    trainer = make_trainer(strategy, max_epochs=4)
    steps: list[int] = []

    class SavesOnce(TinyGpt):
        def on_train_batch_end(self, *_: Any) -> None:
            steps.append(trainer.global_step)
            if len(steps) == 1:
                trainer.save_checkpoint(f"{folder}/taken.ckpt")

    with pytest.raises(CheckpointError) as caught:
        trainer.fit(SavesOnce(), same_batches())
    return len(steps), str(caught.value)


def test_an_error_of_the_thread_ends_training_on_all_ranks_in_the_same_batch(
    world: Worlds, tmp_path: Path
) -> None:
    (tmp_path / "taken.ckpt").mkdir()
    (tmp_path / "taken.ckpt" / "notes.txt").write_text("not a checkpoint")
    first, second = world(2).run(save_where_nothing_can_be, str(tmp_path))
    assert first == second
    assert first[0] < 16
    assert "taken.ckpt is a directory that is no checkpoint" in first[1]
    assert sorted(os.listdir(tmp_path)) == ["taken.ckpt"]


# -- elsewhere


@pytest.mark.slow
def test_a_module_is_made_of_a_directory_without_ranks(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "state.ckpt"
    weights = world(2).run(save_as, "full_shard", str(path))[0]["model"]
    model = load_from_checkpoint(TinyGpt, path)
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_tools_that_do_not_know_this_package_read_the_directory(
    world: Worlds, tmp_path: Path
) -> None:
    path, plain = tmp_path / "state.ckpt", tmp_path / "plain.pt"
    saved = world(2).run(save_as, "full_shard", str(path))[0]
    dcp_to_torch_save(path, plain)
    by_torch = torch.load(plain, weights_only=True)
    by_lightning = _format_checkpoint(_load_distributed_checkpoint(path))
    for name, weight in saved["model"].items():
        assert torch.equal(by_torch["model"][name], weight)
        assert torch.equal(by_lightning["state_dict"][name], weight)
    names = [name for group in by_torch["optimizer_0"]["param_groups"] for name in group["params"]]
    for index, state in saved["optimizer"].items():
        for key, value in state.items():
            assert torch.equal(by_torch["optimizer_0"]["state"][names[index]][key], value)
            assert torch.equal(
                by_lightning["optimizer_states"][0]["state"][names[index]][key], value
            )
    assert by_lightning["global_step"] == 4 and by_lightning["loops"]
