"""Checkpoints of a sharded run: ordinary Lightning files that resume exactly, in any world and under any strategy."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from shardeddp import RankError, ShardedDP, ShardTensor
from support.tasks import Block, EvaluatedGpt, TinyGpt, token_loader
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

Make = Callable[[], Any]
SAMPLES = 48
GLOBAL_BATCH = 12  # divides among 1, 2 and 3 ranks


def full_shard() -> ShardedDP:
    return ShardedDP(auto_wrap_policy={Block})


def one_unit() -> ShardedDP:
    return ShardedDP(auto_wrap_policy=None)


def shard_grad_op() -> ShardedDP:
    return ShardedDP("shard_grad_op", auto_wrap_policy={Block})


def hybrid_shard() -> ShardedDP:
    return ShardedDP("hybrid_shard", 1, {Block})


def no_shard() -> ShardedDP:
    return ShardedDP("no_shard", auto_wrap_policy={Block})


def same_batches() -> DataLoader[Tensor]:
    """This rank's part of the same global batches in every world; Lightning would shuffle among several ranks only."""
    tokens = token_loader(SAMPLES).dataset
    return DataLoader(tokens, GLOBAL_BATCH // dist.get_world_size(), sampler=DistributedSampler(tokens, shuffle=False))


def fit(strategy: Any, epochs: int, path: str | None = None, save_to: str | None = None, **options: Any) -> TinyGpt:
    """Train a model over all samples."""
    seed_everything(1, verbose=False)
    model = TinyGpt()
    trainer = make_trainer(strategy, max_epochs=epochs, gradient_clip_val=0.5, **options)
    trainer.fit(model, same_batches(), ckpt_path=path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return model


def losses_and_weights(model: TinyGpt) -> dict[str, Any]:
    return {"losses": model.losses, "weights": full_weights(model)}


def train(make: Make, epochs: int, path: str | None = None, save_to: str | None = None) -> dict[str, Any]:
    return losses_and_weights(fit(make(), epochs, path, save_to))


# -- the file


@pytest.fixture(scope="module")
def after_two_epochs(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint that two ranks wrote after training, and the weights that they had."""
    path = tmp_path_factory.mktemp("checkpoints") / "two.ckpt"
    return path, world(2).run(train, full_shard, 2, None, str(path))[0]["weights"]


def test_a_file_loads_without_this_package_and_has_the_keys_of_the_plain_module(
    after_two_epochs: tuple[Path, dict[str, Tensor]],
) -> None:
    path, weights = after_two_epochs
    checkpoint = torch.load(path, weights_only=True)
    assert list(checkpoint["state_dict"]) == list(TinyGpt().state_dict())
    assert all(type(tensor) is Tensor for tensor in checkpoint["state_dict"].values())
    assert all(torch.equal(checkpoint["state_dict"][name], weights[name]) for name in weights)
    states = checkpoint["optimizer_states"][0]["state"]
    assert all(type(tensor) is Tensor for state in states.values() for tensor in state.values())
    shapes = {tuple(state["exp_avg"].shape) for state in states.values()}
    assert shapes == {tuple(p.shape) for p in TinyGpt().parameters()}


def test_a_file_loads_as_lightning_loads_any(after_two_epochs: tuple[Path, dict[str, Tensor]]) -> None:
    path, weights = after_two_epochs
    model = TinyGpt.load_from_checkpoint(path)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.embed.weight


def optimizer_states(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)["optimizer_states"][0]


def test_a_file_has_the_contents_of_one_that_ddp_writes(
    world: Worlds, tmp_path: Path, after_two_epochs: tuple[Path, dict[str, Tensor]]
) -> None:
    world(2).run(train, DDPStrategy, 2, None, str(tmp_path / "ddp.ckpt"))
    ours, theirs = (torch.load(path, weights_only=True) for path in (after_two_epochs[0], tmp_path / "ddp.ckpt"))
    assert ours.keys() == theirs.keys()
    assert_same_weights(ours["state_dict"], theirs["state_dict"])
    assert ours["loops"] == theirs["loops"]
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]
    for index, expected in theirs["optimizer_states"][0]["state"].items():
        assert_same_weights(ours["optimizer_states"][0]["state"][index], expected)


# -- resuming


@pytest.fixture(scope="module")
def four_epochs(world: Worlds) -> Callable[[Make], list[dict[str, Any]]]:
    """An uninterrupted run over two ranks."""
    done: dict[Make, list[dict[str, Any]]] = {}

    def run(make: Make) -> list[dict[str, Any]]:
        if make not in done:
            done[make] = world(2).run(train, make, 4)
        return done[make]

    return run


@pytest.mark.parametrize("make", [full_shard, no_shard])
def test_resuming_is_exact(
    world: Worlds, tmp_path: Path, four_epochs: Callable[[Make], list[dict[str, Any]]], make: Make
) -> None:
    path = str(tmp_path / "half.ckpt")
    first = world(2).run(train, make, 2, None, path)
    second = world(2).run(train, make, 4, path)
    for straight, before, after in zip(four_epochs(make), first, second, strict=True):
        assert straight["losses"] == before["losses"] + after["losses"]
        assert all(torch.equal(straight["weights"][name], after["weights"][name]) for name in straight["weights"])


@pytest.mark.parametrize(
    ("size", "make"),
    [(1, full_shard), (3, full_shard), (2, one_unit), (2, shard_grad_op), (2, hybrid_shard), (2, DDPStrategy)],
)
def test_a_run_resumes_in_another_world_and_under_another_strategy(
    world: Worlds,
    after_two_epochs: tuple[Path, dict[str, Tensor]],
    four_epochs: Callable[[Make], list[dict[str, Any]]],
    size: int,
    make: Make,
) -> None:
    resumed = world(size).run(train, make, 4, str(after_two_epochs[0]))
    for rank in range(size):
        assert_same_weights(resumed[rank]["weights"], four_epochs(full_shard)[0]["weights"])


def test_a_run_resumes_from_a_checkpoint_of_ddp(
    world: Worlds, tmp_path: Path, four_epochs: Callable[[Make], list[dict[str, Any]]]
) -> None:
    path = str(tmp_path / "ddp.ckpt")
    world(2).run(train, DDPStrategy, 2, None, path)
    resumed = world(2).run(train, full_shard, 4, path)
    assert_same_weights(resumed[0]["weights"], four_epochs(full_shard)[0]["weights"])


class NotesRestoredWeights(EvaluatedGpt):
    def on_fit_start(self) -> None:
        self.at_fit_start = full_weights(self)


def weights_at_fit_start(path: str) -> dict[str, Tensor]:
    model = NotesRestoredWeights()
    make_trainer(full_shard(), max_epochs=3).fit(model, token_loader(8), ckpt_path=path)
    return model.at_fit_start


def test_on_fit_start_sees_the_restored_weights(
    world: Worlds, after_two_epochs: tuple[Path, dict[str, Tensor]]
) -> None:
    path, weights = after_two_epochs
    for found in world(2).run(weights_at_fit_start, str(path)):
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def resume_a_module_that_is_sharded(path: str) -> dict[str, Any]:
    model = fit(full_shard(), 1)
    model.losses.clear()
    trainer = make_trainer(full_shard(), max_epochs=4, gradient_clip_val=0.5)
    trainer.fit(model, same_batches(), ckpt_path=path)
    return losses_and_weights(model)


def test_a_checkpoint_loads_into_a_module_that_has_been_trained_before(
    world: Worlds,
    after_two_epochs: tuple[Path, dict[str, Tensor]],
    four_epochs: Callable[[Make], list[dict[str, Any]]],
) -> None:
    for rank, resumed in enumerate(world(2).run(resume_a_module_that_is_sharded, str(after_two_epochs[0]))):
        straight = four_epochs(full_shard)[rank]
        assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :]
        assert all(torch.equal(straight["weights"][name], resumed["weights"][name]) for name in straight["weights"])


# -- when and how a checkpoint is written


def save_at_any_time(folder: str) -> dict[str, bool]:
    """Whether what is saved is what the module holds at that time."""
    model, found = EvaluatedGpt(), {}

    def save(moment: str) -> None:
        trainer.save_checkpoint(f"{folder}/{moment}.ckpt", weights_only=moment == "weights_only")
        saved = torch.load(f"{folder}/{moment}.ckpt", weights_only=True)
        weights = full_weights(model)
        found[moment] = all(torch.equal(saved["state_dict"][name], weights[name]) for name in weights)
        found[f"{moment} with optimizer"] = bool(saved.get("optimizer_states"))

    trainer = make_trainer(full_shard(), max_epochs=1)
    trainer.validate(model, token_loader(8), verbose=False)
    save("validate")
    trainer.fit(model, token_loader(16))
    save("fit")
    trainer.test(model, token_loader(8), verbose=False)
    save("test")
    save("weights_only")
    return found


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
        checkpoint["mine"] = {"average": [self.blocks[1].up.weight.detach().clone()], "note": "text", "number": 3}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen = checkpoint["mine"]
        state["blocks.0.norm.weight"] = state.pop("renamed")
        state["head.weight"] = state["embed.weight"]


def edit_and_resume(path: str) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = EditsItsCheckpoint()
    trainer = make_trainer(full_shard(), max_epochs=1)
    trainer.fit(model, token_loader(16))
    trainer.save_checkpoint(path)
    resumed = EditsItsCheckpoint()
    make_trainer(full_shard(), max_epochs=1).fit(resumed, token_loader(16), ckpt_path=path)
    return {"weights": full_weights(model), "resumed": full_weights(resumed), "seen": resumed.seen}


def test_what_the_module_changes_in_its_checkpoint_is_saved_and_loaded(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "edited.ckpt"
    found = world(2).run(edit_and_resume, str(path))
    saved = torch.load(path, weights_only=True)
    assert "head.weight" not in saved["state_dict"]
    for answers in found:
        weights = answers["weights"]
        assert torch.equal(saved["state_dict"]["renamed"], weights["blocks.0.norm.weight"])
        assert torch.equal(answers["seen"]["average"][0], weights["blocks.1.up.weight"])
        assert (answers["seen"]["note"], answers["seen"]["number"]) == ("text", 3)
        assert all(torch.equal(answers["resumed"][name], weights[name]) for name in weights)


class FailsToWrite(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        raise OSError(f"no space left for {Path(path).name}")


def save_to_a_full_disk(folder: str) -> tuple[str, bool]:
    strategy = full_shard()
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
    fit(full_shard(), 1, callbacks=[checkpoints], enable_checkpointing=True)
    return sorted(path.name for path in Path(folder).iterdir())


def test_checkpoints_in_the_middle_of_an_epoch_are_whole(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(checkpoint_by_callback, str(tmp_path / "new"))[0] == ["step=2.ckpt", "step=4.ckpt"]
    loaded = [torch.load(tmp_path / "new" / f"step={step}.ckpt", weights_only=True) for step in (2, 4)]
    for name, shape in {name: tensor.shape for name, tensor in TinyGpt().state_dict().items()}.items():
        first, second = (checkpoint["state_dict"][name] for checkpoint in loaded)
        assert first.shape == second.shape == shape
        assert not torch.equal(first, second)


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
        "copy is unchanged": all(torch.equal(weight, before[name]) for name, weight in full_weights(frozen).items()),
        "original has changed": not any(torch.equal(after[name], before[name]) for name in before),
        "copy computes": torch.allclose(logits, expected, atol=1e-6),
        "copy is sharded": all(isinstance(p, ShardTensor) for p in frozen.parameters()),
    }


def test_a_sharded_module_can_be_copied_and_the_copy_is_independent(world: Worlds) -> None:
    assert {key for answers in world(2).run(copy_and_train_on) for key, value in answers.items() if not value} == set()
