"""On one rank there is nothing to share: parameters stay what they are, and everything works as on several."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import nn

from shardeddp import ShardedDP, ShardTensor
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

CHOICES: list[dict[str, Any]] = [
    {"sharding_strategy": "full_shard"},
    {"sharding_strategy": "no_shard", "activation_checkpointing": {Block}},
]


def train(strategy: Strategy, **options: Any) -> tuple[TinyGpt, list[float]]:
    torch.manual_seed(0)
    model = TinyGpt()
    make_trainer(strategy, max_epochs=2, accumulate_grad_batches=2, **options).fit(
        model, token_loader(16)
    )
    return model, model.losses


def compare() -> None:
    expected, losses = train(SingleDeviceStrategy("cpu"))
    for arguments in CHOICES:
        found, ours = train(ShardedDP(auto_wrap_policy={Block}, **arguments))
        assert ours == pytest.approx(losses, rel=1e-6)
        assert all(type(parameter) is nn.Parameter for parameter in found.parameters())
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)
        if "activation_checkpointing" not in arguments:
            assert not any(
                child._forward_hooks or child._forward_pre_hooks for child in found.modules()
            )


@pytest.mark.slow
def test_training_is_that_of_a_single_device_and_parameters_stay_what_they_are(
    world: Worlds,
) -> None:
    world(1).run(compare)


def cast_or_offloaded() -> None:
    for arguments, options in ({}, {"precision": "bf16-mixed"}), ({"cpu_offload": True}, {}):
        model, losses = train(ShardedDP(auto_wrap_policy={Block}, **arguments), **options)
        assert any(isinstance(parameter, ShardTensor) for parameter in model.parameters())
        assert losses[-1] < losses[0]


def test_what_is_cast_or_offloaded_is_the_engines_on_one_rank_too(world: Worlds) -> None:
    world(1).run(cast_or_offloaded)


def save(folder: str) -> dict[str, Any]:
    strategy = ShardedDP(auto_wrap_policy={Block})
    torch.manual_seed(0)
    model = TinyGpt()
    trainer = make_trainer(strategy, max_steps=3)
    trainer.fit(model, token_loader(16))
    trainer.save_checkpoint(folder)
    plan = strategy.memory_plan
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert plan.main_shard_nbytes == total
    return full_weights(model)


def load(folder: str) -> tuple[dict[str, Any], int]:
    model = TinyGpt()
    trainer = make_trainer(ShardedDP(auto_wrap_policy={Block}), max_steps=3)
    trainer.fit(model, token_loader(16), ckpt_path=folder)
    return full_weights(model), trainer.global_step


@pytest.mark.slow
def test_its_checkpoints_are_those_of_any_number_of_ranks(world: Worlds, tmp_path: Path) -> None:
    expected = world(1).run(save, str(tmp_path / "one.ckpt"))[0]
    for size in (1, 2):
        for weights, step in world(size).run(load, str(tmp_path / "one.ckpt")):
            assert step == 3
            assert all(torch.equal(weights[name], value) for name, value in expected.items())


def summon() -> None:
    strategy = ShardedDP()
    model = TinyGpt()
    make_trainer(strategy, max_steps=1).fit(model, token_loader(4))
    weight = next(model.parameters())
    before = weight.detach().clone()
    with strategy.summon_full_params(writeback=False), torch.no_grad():
        weight.add_(1)
    assert torch.equal(weight, before)
    with strategy.summon_full_params(offload_to_cpu=True), torch.no_grad():
        weight.add_(1)
    assert torch.equal(weight, before + 1)
    with (
        pytest.raises(ZeroDivisionError),
        strategy.summon_full_params(offload_to_cpu=True),
        torch.no_grad(),
    ):
        weight.add_(1)
        raise ZeroDivisionError
    assert torch.equal(weight, before + 1)


def test_whole_parameters_can_be_asked_for_all_the_same(world: Worlds) -> None:
    world(1).run(summon)


# What srun tells each of its tasks; a batch script of one task has less, a script run by hand nothing.
OF_SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
}


def train_under_slurm(told: list[str]) -> tuple[list[int], str, int]:
    strategy = ShardedDP()
    with mock.patch.dict(os.environ, {name: OF_SLURM[name] for name in told}):
        for name in OF_SLURM.keys() - {*told}:
            os.environ.pop(name, None)
        trainer = make_trainer(strategy, max_steps=1, plugins=[SLURMEnvironment()])
        trainer.fit(TinyGpt(), token_loader(4))
        ranks = [strategy.global_rank, strategy.local_rank, strategy.node_rank]
        ranks.append(strategy.world_size)
    return ranks, type(strategy.cluster_environment).__name__, trainer.global_step


@pytest.mark.parametrize("told", [[], ["SLURM_PROCID", "SLURM_LOCALID"], [*OF_SLURM]])
def test_slurm_need_not_say_a_rank_to_the_only_one(world: Worlds, told: list[str]) -> None:
    assert world(1).run(train_under_slurm, told) == [([0, 0, 0, 1], "SLURMEnvironment", 1)]


def test_several_ranks_that_slurm_does_not_tell_apart_are_its_error(world: Worlds) -> None:
    with pytest.raises(KeyError, match="SLURM_"):
        world(2).run(train_under_slurm, [])
