"""Plans of divided experts list what the engine's ranks send and hold; routers are taken to choose evenly."""

import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from gpt.mixture import MixtureGPTModule
from lightning.pytorch import LightningModule
from torch import nn

from shardeddp import ActivationCheckpointing, ShardedDP, TokenDispatch
from shardeddp.errors import ConfigurationError, UsageError
from shardeddp.plan.hardware import Cluster, find_gpu
from shardeddp.planner.collectives import Collective
from shardeddp.planner.cost import FITTED, time_collective
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.planner.transformer import Dimensions
from support.planned_traffic import LENGTH, check, counted_and_planned
from world import Worlds

pytestmark = pytest.mark.timeout(300)

WIDTH, VOCABULARY, EXPERTS, CHOSEN = 8, 24, 4, 2


class Expert(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH) to the same."""
        return self.down(self.up(x).relu())


class Router(nn.Module):
    """Scores by which tokens get the experts in turn, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights of tokens, (rows, CHOSEN) both."""
        turns = torch.arange(x.shape[0] * CHOSEN) % EXPERTS
        turns = F.one_hot(turns.view(-1, CHOSEN), EXPERTS).sum(1)
        weights, index = (self.gate(x).softmax(-1) + turns).topk(CHOSEN)
        return index, weights


class Block(nn.Module):
    """Experts in a list, to which the model sends tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), Router(), self.make_experts()

    def make_experts(self) -> nn.Module:
        """A list."""
        return nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, WIDTH) to the same."""
        flat = self.norm(x).flatten(0, 1)
        index, weights = self.router(flat)
        return x + self.mix(flat, index, weights).view_as(x)

    def mix(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what experts make of each token."""
        routed = TokenDispatch(index, self.experts)
        parts = routed.dispatch(x).split(routed.counts)
        experts: Any = self.experts
        rows = [experts[it](part) for it, part in zip(routed.experts, parts, strict=True)]
        return (routed.combine(torch.cat(rows)) * weights.unsqueeze(-1)).sum(1)


class StackedExperts(nn.Module):
    """Experts in one parameter, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12) / 3)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Shape (rows, WIDTH) to the same."""
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if token.numel():
                row = torch.relu(hidden_states[token] @ self.up[expert].T) @ self.down[expert].T
                row = row * top_k_weights[token, place, None]
                out = out.index_add(0, token, row.to(out.dtype))
        return out


class StackedBlock(Block):
    """The same with stacked experts."""

    def make_experts(self) -> nn.Module:
        """Stacked ones."""
        return StackedExperts()

    def mix(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As their module does it."""
        return self.experts(x, index, weights)


class Model(LightningModule):
    """Three blocks between an embedding and a head."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(self.block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token by itself."""
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stacked(Model):
    """The same with stacked experts."""

    block = StackedBlock


def run(
    name: str, size: int, kind: type[Model], precision: str = "32-true", **more: Any
) -> Any:
    """What a step sends and is planned to, after a look at what is held."""
    if name == "hybrid_shard":
        more["shard_size"] = 2
    strategy = ShardedDP(
        name,
        auto_wrap_policy={kind.block},
        expert_parallel_size=size,
        experts=Expert if kind is Model else None,
        **more,
    )
    counts, planned, trainer = counted_and_planned(kind, strategy, precision)
    groups = [it for each in strategy.runtime.progresses for it in each.unit.groups]
    held = sum(it.main_shard.nbytes for it in groups)
    if name in ("full_shard", "hybrid_shard"):  # others keep gathered parameters as well
        assert planned.memory.parameters == held
    assert planned.memory.gradients == held
    (optimizer,) = trainer.optimizers
    states = sum(
        it.to_local().nbytes
        for state in optimizer.state.values()
        for key, it in state.items()
        if key != "step"
    )
    padding = sum(it.layout.padding_numel for it in groups) * 4  # nothing is stepped there
    assert planned.memory.optimizer - 2 * padding <= states <= planned.memory.optimizer
    return counts


@pytest.mark.parametrize("kind", [Model, Stacked], ids=["list", "stacked"])
@pytest.mark.parametrize("name", ["full_shard", "hybrid_shard", "no_shard"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_the_plan_lists_what_ranks_with_different_experts_send_and_hold(
    world: Worlds, ranks: int, size: int, name: str, kind: type[Model]
) -> None:
    check(world, ranks, partial(run, name, size, kind))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("shard_optimizer", {}),
        ("shard_grad_op", {"precision": "bf16-mixed"}),
        ("full_shard", {"mixed_precision": "bfloat16"}),
        ("full_shard", {"activation_checkpointing": "auto"}),
        (
            "no_shard",
            {"activation_checkpointing": ActivationCheckpointing(save_ops=["matmul", "attention"])},
        ),
    ],
    ids=["float32", "autocast", "bfloat16", "recomputation", "selective recomputation"],
)
@pytest.mark.parametrize("kind", [Model, Stacked], ids=["list", "stacked"])
def test_so_it_does_in_other_precisions_and_where_units_are_recomputed(
    world: Worlds, name: str, more: dict[str, Any], kind: type[Model]
) -> None:
    check(world, 4, partial(run, name, 2, kind, **more))
