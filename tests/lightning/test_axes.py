"""A rank that splits layers or divides experts holds what ``strategy.memory_plan`` says, at rest and in a step."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from shardeddp import ShardedDP, TokenDispatch
from shardeddp.comm.consistency import checksum
from shardeddp.plan.memory import MemoryPlan
from support.allocations import RecordsPeak, settled_nbytes
from support.trainers import make_trainer
from support.whole_batches import STRATEGIES
from world import Worlds

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

WIDTH, DEPTH, EXPERTS = 128, 4, 4


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Experts(nn.Module):
    """Each gets a row of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([Layers() for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = TokenDispatch(torch.arange(EXPERTS).view(-1, 1), self.experts)
        parts = routed.dispatch(self.norm(x)).split(routed.counts)
        made = [self.experts[at](part) for at, part in zip(routed.experts, parts, strict=True)]
        return x + routed.combine(torch.cat(made)).sum(1)


class Model(LightningModule):
    """Blocks for very few rows, so that activations do not count."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.input = nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(DEPTH)))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.input(x)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Weighs(RecordsPeak):
    """What there is before a step, as well."""

    resting = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.resting = settled_nbytes()
        super().on_train_batch_start(trainer, module, batch, batch_idx)


def weigh(
    name: str, block: type[nn.Module], options: dict[str, Any]
) -> tuple[MemoryPlan, int, int]:
    """The plan, bytes of all tensors between steps, and the most that a step adds."""
    loader: Any = DataLoader(torch.ones(16, 8), batch_size=EXPERTS)
    before, weighs = settled_nbytes(), Weighs()
    strategy = ShardedDP(name, auto_wrap_policy={block}, **options)
    trainer = make_trainer(strategy, max_steps=3, callbacks=[weighs], use_distributed_sampler=False)
    trainer.fit(Model(block), loader)
    return strategy.memory_plan, weighs.resting - before, max(accumulate(weighs.sizes))


def weigh_all(block: type[nn.Module], options: dict[str, Any]) -> Any:
    checksum(torch.ones(1))  # keeps a table of 2 MiB for its process
    return [weigh(name, block, options) for name in STRATEGIES]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("block", "axis", "options"),
    [
        (
            Layers,
            "tensor",
            {"tensor_parallel_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
        ),
        (Experts, "expert", {"experts": Layers}),
    ],
    ids=["layers", "experts"],
)
def test_a_rank_with_a_part_of_a_model_holds_what_was_planned(
    world: Worlds, block: type[nn.Module], axis: str, options: dict[str, Any], size: int
) -> None:
    options = {**options, f"{axis}_parallel_size": size}
    for answers in world(4).run(weigh_all, block, options):
        for name, (plan, resting, added) in zip(STRATEGIES, answers, strict=True):
            about = f"{name}: {resting:,} + {added:,} bytes, planned {plan}"
            assert abs(resting - plan.resting_nbytes) < 0.02 * plan.resting_nbytes, about
            assert abs(resting + added - plan.peak_nbytes) < 0.05 * plan.peak_nbytes, about
