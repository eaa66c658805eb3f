"""Units that a step does not use on all ranks: gathered and reduced by all, with zeros of those that skip them."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.engine.order import PassKind
from training import WIDTH, Sharding, Trial, another_order, batch
from world import on_ranks

pytestmark = pytest.mark.timeout(60)

GATHERING = ("full_shard", "shard_grad_op", "shard_optimizer")


class Experts(nn.Module):
    """A stem, experts of equal size that a step uses or leaves out, and a head."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(count)
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))
        self.order = list(range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in self.order:
            x = x + self.experts[index](x).tanh()
        return self.head(x)


def routed(model: nn.Module, rank: int, step: int, orders: list[list[list[int]]]) -> torch.Tensor:
    """The square of the output with the experts of this rank and step."""
    assert isinstance(model, Experts)
    model.order = orders[min(step, len(orders) - 1)][rank]
    return model(batch(rank, step, 4, WIDTH)).pow(2).mean()


def each_its_own(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Other experts on each rank from the first step on, in any order, one of them twice, later all or none."""
    orders = [[[0, 2], [1]], [[3, 0], [2, 2, 1]], [[], [0, 1, 2, 3]], [[2, 1], [2, 1]], [[], []]]
    return routed(model, rank, step, orders)


def some_go_cold(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The same experts on all ranks in the first steps, then one rank leaves some out."""
    every = [0, 1, 2, 3]
    return routed(model, rank, step, [[every, every], [every, every], [every, [0, 3]], [[], every]])


def change_together(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    every = [0, 1, 2, 3]
    return routed(model, rank, step, [[every] * 2, [[0, 1]] * 2, [[3, 2, 0]] * 2, [every] * 2])


def units(strategy: str, **options: Any) -> Sharding:
    return Sharding(strategy=strategy, units=("experts.*", "head"), **options)


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2, timeout_s=50)
def test_ranks_use_units_of_their_own_and_train_as_one_process() -> None:
    for strategy, prefetch in [*((strategy, 1) for strategy in GATHERING), ("full_shard", 0)]:
        with another_order():  # of a backward in which nothing is gathered
            Trial(Experts(), units(strategy, prefetch=prefetch)).train(each_its_own, steps=6)
            Trial(Experts(), units(strategy, prefetch=prefetch, uneven=True)).train(
                some_go_cold, steps=5
            )


@pytest.mark.long
@pytest.mark.slow
@on_ranks(4, timeout_s=50)
def test_replicas_use_units_of_their_own() -> None:
    def four(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return routed(model, rank, step, [[[0], [1, 2], [3], []], [[], [], [1, 0], [2, 2]]])

    for sharding in (
        units("hybrid_shard", shard_size=2),
        units("hybrid_shard", shard_size=2, split=True),
        units("full_shard", regather=2),
    ):
        Trial(Experts(), sharding).train(four, steps=3)


@pytest.mark.slow
@on_ranks(2, timeout_s=50)
def test_micro_batches_use_units_of_their_own() -> None:
    for every in (True, False):
        trial = Trial(Experts(), units("full_shard", reduce_every_backward=every))
        for step in range(6):
            trial.runtime.sync_gradients = step % 3 == 2
            trial.backward(each_its_own, step)
            if step % 3 == 2:
                trial.check_gradients()
                trial.step()
                trial.check_parameters()


@pytest.mark.slow
@on_ranks(2, timeout_s=50)
def test_all_ranks_may_change_the_units_that_they_use_together() -> None:
    with another_order():
        for strategy in GATHERING:
            Trial(Experts(), units(strategy)).train(change_together, steps=5)


@on_ranks(2)
def test_a_changed_order_is_said_once_on_rank_zero_with_a_remedy_and_not_in_evaluation() -> None:
    def forward(step: int) -> None:
        trial.forward(change_together, step)

    trial = Trial(Experts(), units("full_shard"))
    with torch.no_grad():
        for step in range(5):
            forward(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            forward(step)
    said = [
        str(warning.message)
        for warning in caught
        if "units run in another order" in str(warning.message)
    ]
    assert len(said) == (dist.get_rank() == 0)
    assert all("auto_wrap_policy" in text for text in said)


@on_ranks(2)
def test_backwards_of_one_step_are_known_apart_and_agree_on_nothing_once_they_are_known() -> None:
    trial = Trial(Experts(), Sharding(units=("experts.*",)))
    runtime = trial.runtime
    calls: list[str] = []
    call = runtime.mesh.world_fingerprints.call
    runtime.mesh.world_fingerprints.call = lambda what: (calls.append(what), call(what))[1]  # type: ignore[method-assign]
    for step in range(4):
        with runtime.step("training_step"):
            for order in ([0, 1], [2, 3, 1]):  # as a discriminator's backward and a generator's
                routed(trial.model, 0, 0, [[order]]).backward()
        asked = [
            runtime.agreement.agrees(kind)
            for kind in (PassKind("training_step"), PassKind(backward=0), PassKind(backward=1))
        ]
        assert asked == [False] * 3 and calls == [], step


@on_ranks(2)
def test_what_all_ranks_change_for_good_is_asked_about_in_one_step_only() -> None:
    trial = Trial(Experts(), Sharding(units=("experts.*",)))
    calls: list[str] = []
    call = trial.runtime.mesh.world_fingerprints.call
    trial.runtime.mesh.world_fingerprints.call = lambda what, *advice: (
        calls.append(what),
        call(what, *advice),
    )[1]  # type: ignore[method-assign]
    for step in range(6):
        with (
            another_order() if step == 2 else nullcontext(),
            trial.runtime.step("training_step") as outputs,
        ):
            outputs.append(routed(trial.model, 0, 0, [[[0, 1] if step < 2 else [2, 1, 3]]]))
        outputs[0].backward()
        assert bool(calls) == (step == 2), (step, calls)
        calls.clear()
