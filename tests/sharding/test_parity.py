"""Sharded training equals one process on the whole batch: strategies x ranks x accumulation.

20 AdamW steps with clipping by norm, two decay groups picked by ``ndim``, a scheduler and tied embeddings, on a
transformer in miniature.
"""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

from shardeddp.plan.placement import PLACEMENTS
from shardeddp.sharding.gradients import clip_grad_norm_
from shardeddp.sharding.optimizer import attach_optimizer
from training import STRATEGIES, Sharding, full
from world import Worlds

STEPS = 20
BATCH = 12  # divides among 1, 2, 3 and 4 ranks
LENGTH, VOCABULARY, WIDTH = 7, 11, 16
MAX_NORM = 0.5
RELATIVE_TOLERANCE = 1e-5

HYBRID_SHARD_SIZE = {1: 1, 2: 2, 3: 1, 4: 2}

State = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x.cumsum(dim=1)))))


class TinyLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_model() -> TinyLanguageModel:
    torch.manual_seed(0)
    return TinyLanguageModel()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> tuple[optim.AdamW, optim.lr_scheduler.LRScheduler]:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = optim.AdamW(groups, lr=1e-2)
    return optimizer, optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-3)


def tokens_of(step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def one_process(accumulation: int) -> tuple[State, list[float]]:
    """Weights after training, and the gradient norm of every step."""
    model, norms = make_model(), []
    optimizer, scheduler = make_optimizer(model.parameters())
    for step in range(STEPS):
        for micro_batch in range(accumulation):
            (model.loss(tokens_of(step, micro_batch)) / accumulation).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


@pytest.fixture(scope="module")
def expected(world: Worlds) -> dict[int, tuple[State, list[float]]]:
    """What one process gets, by accumulation."""
    return {accumulation: world(1).run(one_process, accumulation)[0] for accumulation in (1, 2)}


def train(sharding: Sharding, accumulation: int) -> tuple[State, list[float]]:
    """The same on this rank's part of every batch; the weights are whole."""
    model, norms = make_model(), []
    runtime = sharding.apply(model)
    optimizer, scheduler = make_optimizer(model.parameters())
    attach_optimizer(optimizer, runtime.parameters_changed)
    each_time = PLACEMENTS[sharding.strategy].reduce_every_backward
    rank, part = dist.get_rank(), BATCH // dist.get_world_size()
    for step in range(STEPS):
        for micro_batch in range(accumulation):
            runtime.sync_gradients = each_time or micro_batch == accumulation - 1
            tokens = tokens_of(step, micro_batch)[rank * part : (rank + 1) * part]
            with runtime.step("training_step") as outputs:
                outputs.append(model.loss(tokens) / accumulation)
            outputs[0].backward()
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: full(parameter) for name, parameter in model.named_parameters()}, norms


def train_twice(sharding: Sharding) -> tuple[State, State]:
    return train(sharding, 2)[0], train(sharding, 2)[0]


def sharding_of(strategy: str, size: int) -> Sharding:
    shard_size = HYBRID_SHARD_SIZE[size] if strategy == "hybrid_shard" else None
    return Sharding(strategy=strategy, shard_size=shard_size, units=("blocks.*",))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_one_process(
    world: Worlds, expected: dict[int, tuple[State, list[float]]], strategy: str, size: int, accumulation: int
) -> None:
    weights, expected_norms = expected[accumulation]
    for found, norms in world(size).run(train, sharding_of(strategy, size), accumulation):
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        assert max(expected_norms) > MAX_NORM
        for name, weight in weights.items():
            error = float((found[name] - weight).norm() / weight.norm())
            assert error < RELATIVE_TOLERANCE, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize(("strategy", "size"), [(strategy, 3) for strategy in STRATEGIES] + [("hybrid_shard", 4)])
def test_two_runs_on_the_same_ranks_are_bit_identical_on_all_ranks(world: Worlds, strategy: str, size: int) -> None:
    results = world(size).run(train_twice, sharding_of(strategy, size))
    first = results[0][0]
    for state in (state for pair in results for state in pair):
        assert all(torch.equal(state[name], weight) for name, weight in first.items())
