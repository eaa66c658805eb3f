"""Checkpoints resume exactly, in any world and under any strategy; in one file they are ordinary Lightning files."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from shardeddp import ShardedDP
from support.resuming import (
    Make,
    fit,
    full_shard,
    hybrid_shard,
    in_one_file,
    losses_and_weights,
    no_shard,
    one_unit,
    same_batches,
    shard_grad_op,
    train,
)
from support.tasks import Block, EvaluatedGpt, HasAnOptimizerOfItsOwn, TinyGpt, token_loader
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


# -- the file


@pytest.fixture(scope="module")
def after_two_epochs(
    world: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint that two ranks wrote after training, and the weights that they had."""
    path = tmp_path_factory.mktemp("checkpoints") / "two.ckpt"
    return path, world(2).run(train, in_one_file, 2, None, str(path))[0]["weights"]


@pytest.mark.slow
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


def test_a_file_loads_as_lightning_loads_any(
    after_two_epochs: tuple[Path, dict[str, Tensor]],
) -> None:
    path, weights = after_two_epochs
    model = TinyGpt.load_from_checkpoint(path)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.embed.weight


def test_a_file_has_the_contents_of_one_that_ddp_writes(
    world: Worlds, tmp_path: Path, after_two_epochs: tuple[Path, dict[str, Tensor]]
) -> None:
    world(2).run(train, DDPStrategy, 2, None, str(tmp_path / "ddp.ckpt"))
    ours, theirs = (
        torch.load(path, weights_only=True) for path in (after_two_epochs[0], tmp_path / "ddp.ckpt")
    )
    assert ours.keys() == theirs.keys() | {"shardeddp"}
    assert_same_weights(ours["state_dict"], theirs["state_dict"])
    assert ours["loops"] == theirs["loops"]
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    assert (
        ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]
    )
    for index, expected in theirs["optimizer_states"][0]["state"].items():
        assert_same_weights(ours["optimizer_states"][0]["state"][index], expected)


# -- resuming


@pytest.fixture(scope="module")
def after_two_epochs_in_shards(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a directory."""
    path = tmp_path_factory.mktemp("checkpoints") / "shards.ckpt"
    world(2).run(train, full_shard, 2, None, str(path))
    return path


@pytest.fixture(scope="module")
def four_epochs(world: Worlds) -> Callable[[Make], list[dict[str, Any]]]:
    """An uninterrupted run over two ranks."""
    done: dict[Make, list[dict[str, Any]]] = {}

    def run(make: Make) -> list[dict[str, Any]]:
        if make not in done:
            done[make] = world(2).run(train, make, 4)
        return done[make]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("make", [in_one_file, full_shard, no_shard])
def test_resuming_is_exact(
    world: Worlds, tmp_path: Path, four_epochs: Callable[[Make], list[dict[str, Any]]], make: Make
) -> None:
    path = str(tmp_path / "half.ckpt")
    first = world(2).run(train, make, 2, None, path)
    second = world(2).run(train, make, 4, path)
    for straight, before, after in zip(four_epochs(make), first, second, strict=True):
        assert straight["losses"] == before["losses"] + after["losses"]
        assert all(
            torch.equal(straight["weights"][name], after["weights"][name])
            for name in straight["weights"]
        )


def on_whole_parameters() -> ShardedDP:
    """Each rank steps some of the parameters, and keeps and saves their states."""
    return ShardedDP(auto_wrap_policy={Block}, optimizer_scope={"NormalizedDescent": "parameter"})


@pytest.mark.slow
@pytest.mark.parametrize(("make", "size"), [(full_shard, 2), (on_whole_parameters, 3)])
def test_an_optimizer_that_is_not_elementwise_resumes_as_well(
    world: Worlds, tmp_path: Path, make: Make, size: int
) -> None:
    path = str(tmp_path / "half.ckpt")
    straight = world(2).run(train, make, 2, None, None, HasAnOptimizerOfItsOwn)
    world(2).run(train, make, 1, None, path, HasAnOptimizerOfItsOwn)
    resumed = world(size).run(train, make, 2, path, None, HasAnOptimizerOfItsOwn)
    for each in resumed:
        assert_same_weights(
            each["weights"], straight[0]["weights"], rtol=1e-6 if size == 2 else 1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "make"),
    [
        (1, full_shard),
        (3, full_shard),
        (2, one_unit),
        (2, shard_grad_op),
        (2, hybrid_shard),
        (2, DDPStrategy),
    ],
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "make"),
    [
        (1, full_shard),
        (3, full_shard),
        (2, one_unit),
        (2, shard_grad_op),
        (2, hybrid_shard),
        (4, no_shard),
    ],
)
def test_shards_resume_in_another_world_and_under_another_strategy(
    world: Worlds,
    after_two_epochs_in_shards: Path,
    four_epochs: Callable[[Make], list[dict[str, Any]]],
    size: int,
    make: Make,
) -> None:
    resumed = world(size).run(train, make, 4, str(after_two_epochs_in_shards))
    for rank in range(size):
        assert_same_weights(resumed[rank]["weights"], four_epochs(full_shard)[0]["weights"])


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_checkpoint_loads_into_a_module_that_has_been_trained_before(
    world: Worlds,
    after_two_epochs: tuple[Path, dict[str, Tensor]],
    four_epochs: Callable[[Make], list[dict[str, Any]]],
) -> None:
    for rank, resumed in enumerate(
        world(2).run(resume_a_module_that_is_sharded, str(after_two_epochs[0]))
    ):
        straight = four_epochs(full_shard)[rank]
        assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :]
        assert all(
            torch.equal(straight["weights"][name], resumed["weights"][name])
            for name in straight["weights"]
        )


def read_before_a_run(path: str) -> tuple[int, bool]:
    model = fit(full_shard(), 1)
    before = full_weights(model)
    trainer = make_trainer(full_shard())
    trainer.strategy.connect(model)
    step = trainer.strategy.load_checkpoint(path)["global_step"]
    after = full_weights(model)
    return step, all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_can_be_read_for_a_sharded_module_before_its_new_trainer_runs(
    world: Worlds, after_two_epochs: tuple[Path, dict[str, Tensor]]
) -> None:
    assert world(2).run(read_before_a_run, str(after_two_epochs[0])) == [(8, True)] * 2


def resume_without_states(path: str) -> tuple[int, bool]:
    """The first step, and whether the weights of the file were there then."""
    saved = torch.load(path)["state_dict"]
    model = NotesRestoredWeights()
    trainer = make_trainer(full_shard(), max_steps=1)
    with (
        pytest.warns(UserWarning, match="no optimizer states")
        if dist.get_rank() == 0
        else nullcontext()
    ):
        trainer.fit(model, token_loader(8), ckpt_path=path)
    found = model.at_fit_start
    return trainer.global_step, all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_file_with_empty_mappings_for_states_resumes_with_new_optimizers(
    world: Worlds, tmp_path: Path, after_two_epochs: tuple[Path, dict[str, Tensor]]
) -> None:
    path = tmp_path / "put-together.ckpt"
    content = {"state_dict": after_two_epochs[1], "optimizer_states": {}, "lr_schedulers": {}}
    torch.save({**content, "pytorch-lightning_version": "2.0.0"}, path)
    assert world(2).run(resume_without_states, str(path)) == [(1, True)] * 2
