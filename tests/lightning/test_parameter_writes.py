"""Parameters that user code writes to between steps: collectives on gradients, resets of layers, noise; beside DDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from support.parity import Run, assert_same_training
from support.tasks import VOCABULARY, Recorded, TinyGpt, token_loader
from world import Worlds

pytestmark = pytest.mark.timeout(120)

STRATEGIES = {
    "full_shard": (2, {}),
    "shard_grad_op": (2, {}),
    "shard_optimizer": (2, {}),
    "no_shard": (2, {}),
    "hybrid_shard": (4, {"shard_size": 2}),
}


def assert_equals_ddp(
    world: Worlds,
    reference: Callable[..., list[Any]],
    run: Run,
    strategy: str = "full_shard",
    **options: Any,
) -> None:
    ranks, more = STRATEGIES[strategy]
    found = world(ranks).run(run.sharded_by, {"sharding_strategy": strategy, **more, **options})
    assert_same_training(found, reference(ranks, run.under_ddp))


# -- collectives

# torch 2.13 renamed it, and warns about the name that 2.11 knows.
reduce_scatter = vars(dist).get("reduce_scatter_single") or vars(dist)["reduce_scatter_tensor"]


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


class Gossips(TinyGpt):
    """Reads and averages by the other collectives, and by copies and vectors of parameters."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        dist.all_reduce(self.head.weight.grad.clone())  # which changes nothing
        dist.all_reduce(self.blocks[0].up.weight.grad.view(-1)[:3], op=dist.ReduceOp.MAX)

    def on_train_batch_end(self, *arguments: Any) -> None:
        ranks = dist.get_world_size()
        with torch.no_grad():
            weight = self.blocks[0].up.weight
            pieces = [torch.empty(weight.shape) for _ in range(ranks)]
            dist.all_gather(pieces, weight.detach())
            weight.copy_(0.9 * torch.stack(pieces).mean(0))
            vector = nn.utils.parameters_to_vector([self.head.weight])
            dist.all_reduce(vector)
            nn.utils.vector_to_parameters(0.9 * vector / ranks, [self.head.weight])
            other = self.blocks[1].up.weight
            part = torch.empty(other.shape[0] // ranks, other.shape[1])
            reduce_scatter(part, other.detach())
            dist.broadcast(part, 0)
            other.mul_(1 + 0.01 * part.tanh().mean())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", [ReducesByHand, AveragesInItsStep, Gossips])
def test_collectives_on_gradients_and_parameters_are_those_of_ddp(
    world: Worlds, reference: Callable[..., list[Any]], model: type[Recorded], strategy: str
) -> None:
    run = Run(
        model=model,
        loader=token_loader,
        options={} if model is AveragesInItsStep else {"gradient_clip_val": 0.5},
    )
    assert_equals_ddp(world, reference, run, strategy)


# -- resets


class Resets(TinyGpt):
    """Begins every epoch with other weights, by what torch has for it."""

    def reset(self) -> None:
        raise NotImplementedError

    def on_train_epoch_start(self) -> None:
        self.reset()


class ResetsLayers(Resets):
    """As those of most layers are reset."""

    def reset(self) -> None:
        self.head.reset_parameters()
        for module in self.blocks[1].modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()


class AppliesAnInitializer(Resets):
    """As transformers and detectors do it."""

    def reset(self) -> None:
        self.blocks.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.bias, 0.1)
            nn.init.ones_(module.weight)


class DrawsFromEverything(Resets):
    """All of nn.init that fits a matrix, in turn over blocks."""

    def reset(self) -> None:
        nn.init.orthogonal_(self.blocks[0].up.weight)
        nn.init.sparse_(self.blocks[0].down.weight, 0.3)
        nn.init.eye_(self.blocks[1].up.weight)
        nn.init.xavier_uniform_(self.blocks[1].down.weight)
        nn.init.xavier_normal_(self.blocks[2].up.weight)
        nn.init.kaiming_normal_(self.blocks[2].down.weight, nonlinearity="relu")
        nn.init.uniform_(self.blocks[0].up.bias, -0.1, 0.1)
        nn.init.normal_(self.blocks[0].down.bias)
        nn.init.kaiming_uniform_(self.embed.weight, a=2.0)


class DrawsInPlace(Resets):
    """Without nn.init: whole parameters, rows, columns and elements of them, also with a generator."""

    def reset(self) -> None:
        generator = torch.Generator().manual_seed(self.current_epoch)
        with torch.no_grad():
            self.blocks[0].up.weight.normal_(0, 0.1)
            self.blocks[0].up.bias.uniform_(-0.1, 0.1, generator=generator)
            self.blocks[1].up.weight[3:5].normal_(0, 0.1)
            self.blocks[1].down.weight[:, 0].uniform_(-1, 1)
            self.blocks[1].norm.weight.bernoulli_(0.9)
            self.blocks[2].up.weight.view(-1)[::3].exponential_().mul_(0.01)
            self.blocks[2].down.weight[torch.rand(8) < 0.5] = 0.0
            self.embed.weight[torch.randint(VOCABULARY, (2,))] = 0.1 * torch.randn(2, 8)
            F.dropout(self.blocks[0].down.weight, 0.2, inplace=True)
            self.blocks[2].up.weight.add_(torch.randn_like(self.blocks[2].up.weight), alpha=0.01)
            torch.randn(8, out=self.blocks[2].norm.bias.data)
            torch.rand(8, out=self.blocks[2].up.weight[0])
        self.blocks[1].up.bias.data.random_(0, 2)
        self.blocks[1].up.bias.data.copy_(
            torch.zeros_like(self.blocks[1].up.bias).log_normal_().clamp_(max=2)
        )


class ResetsWhileItTrains(Resets):
    """In all hooks around a step, and in the step."""

    def reset(self) -> None:
        nn.init.normal_(self.head.weight, std=0.3)

    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        self.blocks[0].up.reset_parameters()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        nn.init.uniform_(self.embed.weight, -0.2, 0.2)
        return super().training_step(batch, batch_index)

    def on_after_backward(self) -> None:
        nn.init.normal_(self.blocks[2].norm.bias, std=0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.init.normal_(self.blocks[2].up.weight.grad, std=0.01)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.blocks[1].norm.reset_parameters()
        with torch.no_grad():
            self.blocks[1].down.weight[batch_index_of(self)].normal_()


def batch_index_of(model: TinyGpt) -> int:
    return model.global_step % 8


RESETS = [
    ResetsLayers,
    AppliesAnInitializer,
    DrawsFromEverything,
    DrawsInPlace,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *((ResetsWhileItTrains, strategy) for strategy in STRATEGIES),
        *((model, strategy) for model in RESETS for strategy in ("full_shard", "no_shard")),
    ],
)
def test_resets_between_steps_have_the_values_of_ddp(
    world: Worlds, reference: Callable[..., list[Any]], model: type[Recorded], strategy: str
) -> None:
    assert_equals_ddp(world, reference, Run(model=model, loader=token_loader), strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("model", [AveragesInItsStep, ResetsWhileItTrains])
def test_writes_inside_of_a_step_have_the_values_of_ddp_in_bf16(
    world: Worlds, reference: Callable[..., list[Any]], model: type[Recorded], strategy: str
) -> None:
    run = Run(model=model, loader=token_loader, options={"precision": "bf16-mixed"})
    assert_equals_ddp(world, reference, run, strategy)
