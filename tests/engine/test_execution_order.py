"""The order in which units run: what is gathered ahead, what changes with it, and that each is reduced once.

Each test trains the sharded model beside the same model in one process, see ``tests/training.py``.
"""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from training import (
    RUNTIMES,
    another_order,
    chain,
    full,
    square,
    unit_of,
)
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


@pytest.mark.slow
@every_strategy
@on_ranks(2)
def test_a_changed_order_warns_once_with_both_names_and_stays_right(strategy: str) -> None:
    trial = chain(strategy)
    trial.train(square)
    for order in ([2, 0, 1], [1, 0, 2], [0], [0, 1, 2, 0]):
        trial.model.order = trial.reference.order = order
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trial.train(square)
        messages = [str(warning.message) for warning in caught]
        if order == [2, 0, 1] and dist.get_rank() == 0:
            assert len(messages) == 1
            assert re.search(r"expected blocks\.0, found blocks\.2", messages[0])
        else:
            assert messages == []


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 0, 1, 2, 1), (2, 0, 1, 1, 0)])
@on_ranks(2)
def test_each_unit_is_reduced_once_in_a_backward(strategy: str, order: tuple[int, ...]) -> None:
    trial = chain(strategy, order)
    for step in range(3):
        trial.runtime.mesh.traffic.reset()
        trial.forward(square, step).backward()
        assert trial.runtime.mesh.traffic.calls["reduce_scatter"] == len(trial.runtime.progresses)


def train_with_prefetch(strategy: str, prefetch: int) -> dict[str, torch.Tensor]:
    trial = chain(strategy, order=(0, 2, 1, 0), prefetch=prefetch)
    trial.train(square)
    return {name: full(parameter) for name, parameter in trial.model.named_parameters()}


@pytest.mark.slow
@every_strategy
@on_ranks(2)
def test_prefetch_changes_nothing_but_time(strategy: str) -> None:
    results = [train_with_prefetch(strategy, prefetch) for prefetch in (0, 1, 2, 9)]
    for other in results[1:]:
        assert all(torch.equal(other[name], weight) for name, weight in results[0].items())


@on_ranks(2)
def test_units_are_unsharded_one_at_a_time_when_nothing_is_prefetched() -> None:
    trial = chain("full_shard", prefetch=0)
    seen: list[list[str]] = []

    def watch(*_: object) -> None:
        seen.append(
            [t.unit.label for t in trial.runtime.progresses[1:] if t.unit.state.value != "sharded"]
        )

    for block in trial.model.blocks:
        block[1].register_forward_hook(watch)
        block[1].register_full_backward_hook(watch)
    for step in range(3):
        seen.clear()
        trial.forward(square, step).backward()
    blocks = [f"blocks.{index}" for index in (0, 1, 2, 2, 1, 0)]
    assert seen == [[block] for block in blocks]


@on_ranks(2)
def test_prefetch_gathers_what_comes_next_in_both_directions() -> None:
    trial = chain("full_shard", prefetch=1)
    trial.train(square, steps=2)
    seen: list[str] = []

    def watch(*_: object) -> None:
        seen.append(
            "".join(
                t.unit.label[-1]
                for t in trial.runtime.progresses[1:]
                if t.unit.state.value != "sharded"
            )
        )

    for block in trial.model.blocks:
        block[1].register_forward_hook(watch)
        block[1].register_full_backward_hook(watch)
    trial.forward(square).backward()
    assert seen == ["01", "12", "2", "12", "01", "0"]


@every_strategy
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
@on_ranks(2)
def test_units_are_reduced_while_the_backward_goes_on(
    strategy: str, order: tuple[int, ...]
) -> None:
    trial = chain(strategy, order)
    seen: list[set[str]] = []

    def watch(*_: object) -> None:
        seen.append(
            {
                progress.unit.label[-1]
                for progress in trial.runtime.progresses
                if not progress.awaiting_reduction
            }
        )

    trial.train(square, steps=2)
    for index in order:
        trial.model.blocks[index][1].register_full_backward_hook(watch)
    trial.forward(square).backward()
    _, second, third = (str(index) for index in order)
    assert seen == [set(), {third}, {second, third}]
    assert not any(progress.awaiting_reduction for progress in trial.runtime.progresses)


@every_strategy
@on_ranks(2)
def test_a_whole_unit_is_left_out_of_some_steps(strategy: str) -> None:
    def sometimes(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        model.order = [0, 1, 2] if step % 2 else [0, 2]
        return square(model, rank, step)

    trial = chain(strategy)
    with another_order():
        trial.train(sometimes, steps=4)


@on_ranks(2)
def test_ranks_that_use_different_units_are_fine_where_nothing_is_gathered() -> None:
    def routed(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        model.order = [0, 1] if (rank + step) % 2 else [2, 0]
        return square(model, rank, step)

    trial = chain("no_shard")
    with another_order():
        trial.train(routed, steps=4)


@every_strategy
@on_ranks(2)
def test_the_state_of_a_unit_at_rest_is_that_of_its_strategy(strategy: str) -> None:
    trial = chain(strategy)
    trial.train(square)
    for name in ("", "blocks.0", "blocks.2"):
        assert unit_of(trial.runtime, name).state.value == "sharded"
