"""Mixtures of experts of transformers, divided over ranks without a change to them, lose what one process does."""

import warnings

import pytest
import torch

from shardeddp import ShardedDP
from shardeddp.planner.plan import make_plan
from support.tensor_parallel import Family, difference, train_alone
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)

STEPS = 20


def train(kind: str, size: int) -> list[float]:
    """Losses of ranks with experts of their own; one step after each batch."""
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "unit .* holds .* of .* parameters")
    strategy = ShardedDP("full_shard", expert_parallel_size=size)
    trainer = make_trainer(
        strategy, max_steps=STEPS, gradient_clip_val=1.0, use_distributed_sampler=False
    )
    module = Family(kind, {}, STEPS)
    trainer.fit(module)
    experts = [it for name, it in module.named_parameters() if "experts." in name]
    assert experts and all(it.shape[0] == 4 and it.spec.boxes for it in experts)
    return module.losses


@pytest.mark.parametrize(
    ("kind", "ranks", "size"), [("mixtral", 4, 2), ("qwen3_moe", 2, 2), ("olmoe", 2, 2)]
)
def test_losses_of_twenty_steps_are_those_of_one_process(
    world: Worlds, kind: str, ranks: int, size: int
) -> None:
    expected = train_alone(kind, {}, STEPS)
    for found in world(ranks).run(train, kind, size):
        assert difference(found, expected) < 1e-5


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe"])
def test_plans_count_the_same_products_however_experts_are_computed_and_divided(kind: str) -> None:
    products = set[float]()
    for name in ("eager", "grouped_mm", "batched_mm"):
        plans = make_plan(
            Family(kind, {"experts_implementation": name}, STEPS),
            batch=lambda samples: [torch.empty(samples, 16, dtype=torch.long)],
            length=16,
            strategies=["full_shard"],
            recomputes=["none"],
            micro_batches=[1],
            expert_parallel_sizes=[1, 2],
        ).plans
        assert {it.choice.expert_parallel_size for it in plans} == {1, 2}
        products |= {it.task.work.matmul_flops for it in plans}
    assert len(products) == 1
