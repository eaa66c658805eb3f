"""Experts that ranks divide among them train as in one process, under every strategy; the rest is refused."""

import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardeddp import ShardedDP, ShardTensor, TokenDispatch
from support.trainers import make_trainer
from world import Worlds

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
STEPS, FEWER_STEPS, BATCH, EXPERTS, CHOSEN = 20, 6, 8, 4, 2


def data() -> torch.Tensor:
    """(batches * batch, sequence, features)."""
    return torch.randn(2 * STEPS * BATCH, 4, 8, generator=torch.Generator().manual_seed(3))


class Router(nn.Module):
    """Experts and weights of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = self.gate(x).softmax(-1).topk(CHOSEN)
        return index, weights


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class ListBlock(nn.Module):
    """Experts in a list, to which the model sends tokens."""

    mesh: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), Router()
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, -2)
        index, weights = self.router(flat)
        routed = TokenDispatch(index, EXPERTS, self.mesh)
        parts = routed.dispatch(flat).split(routed.counts)
        rows = torch.cat(
            [self.experts[it](part) for it, part in zip(routed.experts, parts, strict=True)]
        )
        return x + (routed.combine(rows) * weights.unsqueeze(-1)).sum(1).view_as(x)


class StackedExperts(nn.Module):
    """Experts in one parameter, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 12, 8) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, 12) / 3)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if token.numel():
                row = torch.relu(hidden_states[token] @ self.up[expert].T) @ self.down[expert].T
                out = out.index_add(0, token, row * top_k_weights[token, place, None])
        return out


class StackedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(8), Router(), StackedExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, -2)
        index, weights = self.router(flat)
        return x + self.experts(flat, index, weights).view_as(x)


class Mixture(LightningModule):
    block: type[nn.Module] = ListBlock

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(self.block() for _ in range(2)))
        self.head = nn.Linear(8, 1)
        self.seen: list[float] = []

    def setup(self, stage: str) -> None:
        for block in self.blocks:
            block.mesh = self.trainer.strategy.device_mesh["expert_parallel"]

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


class Stacked(Mixture):
    block = StackedBlock


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    every = list(module.parameters())
    return torch.optim.AdamW(
        [
            {"params": [it for it in every if it.ndim > 1], "weight_decay": 0.1},
            {"params": [it for it in every if it.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


@cache
def reference(
    kind: type[Mixture], clips: str = "norm", steps: int = STEPS
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What one process trains on the whole batches, and its losses."""
    module, losses = kind(), list[float]()
    optimizer = optimizer_of(module)
    for number, batch in enumerate(data().split(BATCH)[: 2 * steps]):
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
    return {name: it.detach() for name, it in module.named_parameters()}, losses


def train(
    name: str,
    size: int,
    kind: type[Mixture] = Mixture,
    clips: str = "norm",
    path: str = "",
    ckpt_path: str | None = None,
    steps: int = STEPS,
    trainer_options: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The parameters that ranks have trained together, and logged means."""
    if name == "hybrid_shard":
        more["shard_size"] = max(1, dist.get_world_size() // 2)
    more = {"experts": None if kind is Stacked else Expert, "auto_wrap_policy": {kind.block}, **more}
    strategy = ShardedDP(name, expert_parallel_size=size, **more)
    trainer = make_trainer(
        strategy,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5 if clips == "norm" else 0.05,
        gradient_clip_algorithm=clips,
        use_distributed_sampler=False,
        **trainer_options or {},
    )
    warnings.simplefilter("ignore")
    module = kind()
    trainer.fit(module, ckpt_path=ckpt_path)
    if path:
        trainer.save_checkpoint(path)
    assert all(isinstance(it, ShardTensor) for it in module.parameters())
    # A state dict and a summoned model are whole, and what rank 0 writes to it reaches all ranks.
    state = {key: value.full_tensor() for key, value in module.state_dict().items()}
    with strategy.summon_full_params(module):
        for key, whole in module.named_parameters():
            assert torch.equal(whole, state[key])
            if dist.get_rank() == 0:
                whole.data.add_(1)
    for key, value in module.state_dict().items():
        assert torch.equal(value.full_tensor(), state[key] + 1)
    return state, module.seen


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def train_all(size: int, kind: type[Mixture], names: tuple[str, ...]) -> list[Any]:
    return [train(it, size, kind) for it in names]


@pytest.mark.parametrize("kind", [Mixture, Stacked], ids=["list", "stacked"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_experts_train_as_in_one_process_under_every_strategy(
    world: Worlds, ranks: int, size: int, kind: type[Mixture]
) -> None:
    expected, losses = reference(kind)
    for answers in world(ranks).run(train_all, size, kind, STRATEGIES):
        for found, seen in answers:
            assert distance(found, expected) < 1e-5
            assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-5


def one(names, size, kind, steps):
    return [train(name, size, kind, steps=steps) for name in names]


def test_dbg(world: Worlds) -> None:
    for ranks, size, kind in [(2, 2, Stacked), (4, 2, Stacked), (4, 2, Mixture), (4, 4, Mixture)]:
        expected, losses = reference(kind, steps=4)
        for answers in world(ranks).run(one, STRATEGIES[1:2], size, kind, 4):
            for name, (found, seen) in zip(STRATEGIES[1:2], answers):
                d = {k: float((found[k] - expected[k]).abs().max()) for k in expected}
                print(ranks, size, kind.__name__, name, max(d.values()))
                print({k: v for k, v in d.items() if v > 1e-6})
                print([f"{a - b:.1e}" for a, b in zip(seen, losses, strict=True)])
