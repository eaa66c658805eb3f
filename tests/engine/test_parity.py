"""Sharded training equals one process on the whole batch.

Strategies x ranks x precision x activation checkpointing x accumulation: 20 AdamW steps with clipping by norm, two
decay groups picked by ``ndim``, a scheduler and tied embeddings, on a transformer in miniature. All cases of a strategy
and a number of ranks share their processes.

In float32 weights agree within 1e-5. Under bf16-mixed each rank rounds the products of its part of a batch, where one
process rounds those of the whole, so no two numbers of ranks give the same bits; the error that this adds must stay
below the one that bfloat16 itself makes: the distance between one process in bf16-mixed and one in float32.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

from shardeddp.config import ActivationCheckpointing
from shardeddp.engine.activation_checkpointing import checkpoint_activations
from shardeddp.optim.attach import attach_optimizer
from shardeddp.optim.clip import clip_grad_norm_
from training import STRATEGIES, Sharding, full
from world import Worlds

PRECISIONS: dict[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16}
ACCUMULATIONS = (1, 3)
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


def make_optimizer(
    parameters: Iterable[nn.Parameter],
) -> tuple[optim.AdamW, optim.lr_scheduler.LRScheduler]:
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


@dataclass(frozen=True)
class Case:
    """One way to train."""

    precision: str = "32-true"
    recomputes: bool = False
    accumulation: int = 1

    def autocast(self) -> torch.autocast:
        """What Lightning's precision plugin puts around a step."""
        dtype = PRECISIONS[self.precision]
        return torch.autocast(
            "cpu", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False
        )


CASES = [Case(*options) for options in itertools.product(PRECISIONS, (False, True), ACCUMULATIONS)]
PAIRS = [CASES[index] for index in (0, 3, 5, 6)]
"""Every two of the three options meet in each combination of theirs."""

Trained = tuple[State, list[float]]
"""Weights after training, and the gradient norm of every step."""


def one_process(case: Case) -> Trained:
    """The reference; activation checkpointing changes nothing there."""
    model, norms = make_model(), []
    optimizer, scheduler = make_optimizer(model.parameters())
    for step in range(STEPS):
        for micro_batch in range(case.accumulation):
            with case.autocast():
                loss = model.loss(tokens_of(step, micro_batch)) / case.accumulation
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


@pytest.fixture(scope="module")
def expected(world: Worlds) -> dict[Case, Trained]:
    """What one process gets."""
    cases = [
        Case(precision, False, accumulation)
        for precision in PRECISIONS
        for accumulation in ACCUMULATIONS
    ]
    return {case: world(1).run(one_process, case)[0] for case in cases}


def train(sharding: Sharding, case: Case) -> Trained:
    """The same on this rank's part of every batch; the weights are whole."""
    model, norms = make_model(), []
    if case.recomputes:
        checkpoint_activations(model, ActivationCheckpointing(modules={Block}))
    runtime = sharding.apply(model, autocast=PRECISIONS[case.precision])
    optimizer, scheduler = make_optimizer(model.parameters())
    attach_optimizer(optimizer)
    rank, part = dist.get_rank(), BATCH // dist.get_world_size()
    for step in range(STEPS):
        for micro_batch in range(case.accumulation):
            runtime.sync_gradients = micro_batch == case.accumulation - 1
            tokens = tokens_of(step, micro_batch)[rank * part : (rank + 1) * part]
            with case.autocast(), runtime.step("training_step") as outputs:
                outputs.append(model.loss(tokens) / case.accumulation)
            outputs[0].backward()
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: full(parameter) for name, parameter in model.named_parameters()}, norms


def train_all(sharding: Sharding, cases: list[Case]) -> dict[Case, Trained]:
    return {case: train(sharding, case) for case in cases}


def train_twice(sharding: Sharding) -> tuple[State, State]:
    case = Case(accumulation=2)
    return train(sharding, case)[0], train(sharding, case)[0]


FURTHER: dict[str, dict[str, Any]] = {
    "split over replicas": {"split": True},
    "regathered by two": {"regather": 2},
    "kept from forward to backward": {"reshard_after_forward": False},
}


def sharding_of(strategy: str, size: int) -> Sharding:
    name, _, more = strategy.partition(" ")
    shard_size = HYBRID_SHARD_SIZE[size] if name == "hybrid_shard" else None
    return Sharding(
        strategy=name, shard_size=shard_size, units=("blocks.*",), **FURTHER.get(more, {})
    )


def distance(found: State, expected: State) -> float:
    """The largest relative error of a weight."""
    return max(
        float((found[name] - weight).norm() / weight.norm()) for name, weight in expected.items()
    )


WORLDS = list(itertools.product(STRATEGIES, (1, 2, 3, 4)))
WORLDS += [("full_shard regathered by two", 4), ("hybrid_shard split over replicas", 4)]
WORLDS += [("hybrid_shard kept from forward to backward", 4)]
PAIRED = [("shard_grad_op", 2), ("shard_optimizer", 2), ("no_shard", 2), ("full_shard", 3)]
PAIRED += [("hybrid_shard", 4), *WORLDS[-3:]]
"""Where pairs of options are enough for `make test-slow`."""

TWO = [Case(), Case("bf16-mixed", recomputes=True, accumulation=3)]
"""Cases of the sample of slow tests."""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("cases", "strategy", "size"),
    [
        pytest.param(TWO, "hybrid_shard", 4, id="two over 4 ranks"),
        pytest.param(TWO, WORLDS[-1][0], 4, id="two with kept parameters"),
        *(
            pytest.param(PAIRS, *world, marks=pytest.mark.long, id="-".join(map(str, world)))
            for world in PAIRED
        ),
        *(
            pytest.param(CASES, *world, marks=marks, id="-".join(["all", *map(str, world)]))
            for world in WORLDS
            for marks in [pytest.mark.long if world == ("full_shard", 2) else pytest.mark.torture]
        ),
    ],
)
def test_training_equals_one_process(
    world: Worlds, expected: dict[Case, Trained], cases: list[Case], strategy: str, size: int
) -> None:
    for found in world(size).run(train_all, sharding_of(strategy, size), cases, timeout_s=100):
        for case, (weights, norms) in found.items():
            expected_weights, expected_norms = expected[replace(case, recomputes=False)]
            exact, _ = expected[replace(case, precision="32-true", recomputes=False)]
            in_full = case.precision == "32-true"
            tolerance = RELATIVE_TOLERANCE if in_full else distance(expected_weights, exact)
            assert norms == pytest.approx(expected_norms, rel=1e-4 if in_full else 0.05), case
            assert distance(weights, expected_weights) < tolerance, case


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_resharding_after_the_forward_changes_no_bit(world: Worlds) -> None:
    case = Case("bf16-mixed", recomputes=True)
    trained = [
        world(3).run(train, sharding_of(strategy, 3), case, timeout_s=50)[0]
        for strategy in ("full_shard", "shard_grad_op")
    ]
    (weights, norms), (others, other_norms) = trained
    assert norms == other_norms
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


def test_the_trainings_that_are_compared_clip_gradients_and_round_differently(
    expected: dict[Case, Trained],
) -> None:
    assert all(max(norms) > MAX_NORM for _, norms in expected.values())
    rounded, exact = (expected[Case(precision)][0] for precision in ("bf16-mixed", "32-true"))
    assert RELATIVE_TOLERANCE < distance(rounded, exact) < 0.05


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        pytest.param("full_shard", 3, marks=pytest.mark.torture),
        ("shard_optimizer", 3),
        ("hybrid_shard", 4),
    ],
)
def test_two_runs_on_the_same_ranks_are_bit_identical_on_all_ranks(
    world: Worlds, strategy: str, size: int
) -> None:
    results = world(size).run(train_twice, sharding_of(strategy, size))
    first = results[0][0]
    for state in (state for pair in results for state in pair):
        assert all(torch.equal(state[name], weight) for name, weight in first.items())
