"""A regression that ranks train on parts of each batch, beside one process that trains on the whole batches."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardeddp import ShardedDP, ShardTensor
from support.trainers import make_trainer
from world import Worlds

STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
STEPS, FEWER_STEPS, BATCH = 20, 6, 8
"""Over all of them where strategies and plans are compared, over fewer where an option is."""


def data() -> torch.Tensor:
    """(batches * batch, sequence, features)."""
    return torch.randn(2 * STEPS * BATCH, 4, 8, generator=torch.Generator().manual_seed(3))


class Regression(LightningModule):
    """Learns sums of features; its blocks are a subclass's."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8, 1)
        self.seen: list[float] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.blocks(x)) - x.sum(-1, keepdim=True)).pow(2).mean()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.loss(batch[0])
        self.log("mean", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["mean"]))

    def train_dataloader(self) -> Any:
        ranks = self.trainer.strategy.distributed_sampler_kwargs
        own = DistributedSampler(dataset := TensorDataset(data()), shuffle=False, **ranks)
        return DataLoader(dataset, batch_size=BATCH // ranks["num_replicas"], sampler=own)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def descent_of(module: nn.Module) -> torch.optim.Optimizer:
    """Steps that are as far off as the gradients are, in any precision."""
    return torch.optim.SGD(module.parameters(), lr=2e-2, momentum=0.9)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups of decay, by number of dims."""
    every = list(module.parameters())
    return torch.optim.AdamW(
        [
            {"params": [it for it in every if it.ndim > 1], "weight_decay": 0.1},
            {"params": [it for it in every if it.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


class Overflow:
    """A hook that makes one gradient infinite, once."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """Each of them."""
        self.calls += 1
        return gradient * float("inf") if self.calls == 3 else gradient


@cache
def train_whole(
    kind: type[Regression],
    clips: str = "norm",
    decay: float = 0.0,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What one process trains on the whole batches, or the moving average of it, and its losses."""
    module, losses = kind(), list[float]()
    optimizer = module.configure_optimizers()
    averages: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(data().split(BATCH)[: 2 * steps]):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = module.loss(batch)
        losses.append(loss.item())
        (loss / 2).backward()
        if number % 2:
            if clips == "norm":
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            else:
                nn.utils.clip_grad_value_(module.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            for name, it in module.named_parameters():
                former = averages.get(name, it.detach())
                averages[name] = former.lerp(it.detach(), 1.0 - decay)
    return averages, losses


def whole_state(
    module: LightningModule, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Whole weights, and whole states of an optimizer by key and parameter; every rank calls it."""
    states = {
        f"{key} of {name}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {
        name: it.full_tensor() if isinstance(it, ShardTensor) else torch.as_tensor(it).clone()
        for name, it in {**module.state_dict(), **states}.items()
    }


def load_run(
    path: str, kind: type[Regression], options: Mapping[str, Any] | None
) -> dict[str, torch.Tensor]:
    """What a run that has ended finds in its checkpoint.

    Args:
        path: The checkpoint, at ``FEWER_STEPS``.
        kind: The module.
        options: Of the strategy; None: Lightning's own ``ddp``.
    """
    trainer = make_trainer(
        "ddp" if options is None else ShardedDP(**options),
        max_steps=FEWER_STEPS,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
    )
    module = kind()
    trainer.fit(module, ckpt_path=path, weights_only=False)
    return whole_state(module, *trainer.optimizers)


def same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether all tensors of both are equal."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], it) for name, it in expected.items()
    )


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The greatest difference of an element."""
    assert found.keys() == expected.keys()
    return max(float((found[name].cpu() - expected[name].cpu()).abs().max()) for name in expected)


def check_precision(
    world: Worlds,
    descend: Callable[[str, int, str], dict[str, torch.Tensor]],
    precision: str,
    clips: str,
) -> None:
    """Four ranks, of which two have one model's parts, end where four with whole ones do.

    Args:
        world: The pools.
        descend: Trains with a precision, a size of the axis and a kind of clipping; returns weights.
        precision: Of the Trainer. Its own rounding is the bound, but for float64.
        clips: By norm or by value.
    """
    exact, *_ = world(4).run(descend, "32-true", 1, clips)
    rounded, *_ = world(4).run(descend, precision, 1, clips)
    for found in world(4).run(descend, precision, 2, clips):
        if precision == "64-true":
            assert distance(found, rounded) < 1e-12
        else:
            assert distance(found, rounded) < 2 * distance(rounded, exact)
