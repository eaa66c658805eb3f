"""Parameters that user code writes to between steps: collectives on gradients, resets of layers, noise; beside DDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from support.parity import Run, assert_same_training
from support.tasks import VOCABULARY, Block, Recorded, TinyConvNet, TinyGpt, image_loader, token_loader
from world import Worlds

pytestmark = pytest.mark.timeout(120)

STRATEGIES = {
    "full_shard": (2, {}),
    "shard_grad_op": (2, {}),
    "shard_optimizer": (2, {}),
    "no_shard": (2, {}),
    "hybrid_shard": (4, {"shard_size": 2}),
}


def assert_equals_ddp(world: Worlds, run: Run, strategy: str = "full_shard", **options: Any) -> None:
    ranks, more = STRATEGIES[strategy]
    found = world(ranks).run(run.sharded_by, {"sharding_strategy": strategy, **more, **options})
    assert_same_training(found, world(ranks).run(run.under_ddp))


# -- collectives


class ReducesByHand(TinyGpt):
    """Sums gradients over ranks and averages weights itself, in all the forms that torch has for it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        works = []
        for index, parameter in enumerate(self.parameters()):
            if index % 2:
                works.append(dist.all_reduce(parameter.grad, async_op=True))
            else:
                dist.all_reduce(parameter.grad)
        for work in works:
            work.wait()

    def on_train_batch_end(self, *arguments: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                dist.all_reduce(parameter.data if parameter.ndim > 1 else parameter)
                parameter.div_(dist.get_world_size())
        dist.broadcast(self.blocks[0].up.weight.data, src=0)
        dist.all_reduce(self.embed.weight.data[1])


class AveragesInItsStep(TinyGpt):
    """The same by hand inside of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        for parameter in self.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", [ReducesByHand, AveragesInItsStep])
def test_collectives_on_gradients_and_parameters_are_those_of_ddp(
    world: Worlds, model: type[Recorded], strategy: str
) -> None:
    run = Run(model=model, loader=token_loader, options={} if model is AveragesInItsStep else {"gradient_clip_val": 0.5})
    assert_equals_ddp(world, run, strategy)
