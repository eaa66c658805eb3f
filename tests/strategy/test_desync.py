"""Where one rank enters a collective and the others another one or none, all end within seconds and are told of both."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import MeanMetric

from shardeddp import ShardedDP
from support.tasks import Block, EvaluatedGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)

SOON_S = 15.0
"""Seconds where the timeout is minutes: two or three, and what a busy machine adds."""

Action = Callable[[LightningModule], object]


def save(module: LightningModule) -> None:
    module.trainer.save_checkpoint("/dev/null/nowhere/file.ckpt")


def log_everywhere(module: LightningModule) -> None:
    module.log("odd", 1.0, sync_dist=True, on_step=True, on_epoch=False)


def barrier(module: LightningModule) -> None:
    module.trainer.strategy.barrier("mine")


def gather(module: LightningModule) -> None:
    module.all_gather(torch.zeros(2))


def broadcast(module: LightningModule) -> None:
    module.trainer.strategy.broadcast("found")


def read_a_weight(module: LightningModule) -> None:
    module.blocks[1].up.weight.data.sum().item()


def barrier_of_torch(module: LightningModule) -> None:
    dist.barrier()


def reduce_by_torch(module: LightningModule) -> None:
    dist.all_reduce(torch.zeros(3))


def describe_optimizer(module: LightningModule) -> None:
    module.trainer.optimizers[0].state_dict()
    module.trainer.strategy.lightning_module_state_dict()
    [parameter.data.norm().item() for parameter in module.parameters()]


def summon(module: LightningModule) -> None:
    with module.trainer.strategy.summon_full_params():
        pass


class Odd(EvaluatedGpt):
    """Does something on one rank in one step.

    Args:
        action: What.
        rank: Which.
        step: When; steps are counted from 0.
    """

    def __init__(self, action: Action, rank: int, step: int) -> None:
        super().__init__()
        self.action, self.rank, self.step = action, rank, step
        self.began = time.monotonic()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """One loss."""
        if batch_index == self.step:
            self.began = time.monotonic()
            if self.global_rank == self.rank:
                self.action(self)
        return super().training_step(batch, batch_index)


def train(strategy: str, action: Action, rank: int = 0, step: int = 2) -> tuple[str, str, float]:
    """The type and the text of what it ends with, and after which seconds."""
    options = {"shard_size": 2} if strategy == "hybrid_shard" else {}
    model = Odd(action, rank, step)
    trainer = make_trainer(ShardedDP(strategy, auto_wrap_policy={Block}, **options), max_steps=6)
    try:
        trainer.fit(model, token_loader(24 * dist.get_world_size()), token_loader(8))
    except RuntimeError as error:
        return type(error.__cause__ or error).__name__, str(error), time.monotonic() - model.began
    return "", "trained", time.monotonic() - model.began


def check(answers: list[tuple[str, str, float]], action: Action) -> None:
    lines, first = inspect.getsourcelines(action)
    places = [f"{__file__}:{number}" for number in range(first, first + len(lines))]
    for kind, said, seconds in answers:
        assert kind == "DesyncError", said
        assert seconds < SOON_S
        assert any(place in said for place in places), said
        assert "rank 0" in said and "rank 1" in said
        assert "All ranks have to communicate alike" in said or "has to be asked by all ranks alike" in said


IN_STEPS = [
    save,
    log_everywhere,
    barrier,
    gather,
    broadcast,
    read_a_weight,
    barrier_of_torch,
    reduce_by_torch,
    describe_optimizer,
    summon,
]


@pytest.mark.parametrize("action", IN_STEPS)
def test_what_one_rank_does_alone_ends_all_of_them(world: Worlds, action: Action) -> None:
    check(world(2).run(train, "full_shard", action), action)
