"""Mixtures of experts of transformers, divided over ranks without a change to them, lose what one process does."""

import warnings

import pytest

from shardeddp import ShardedDP
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
