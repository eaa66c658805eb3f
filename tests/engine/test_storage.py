"""Memory of a released buffer is the next one's, unless something else refers to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardeddp.engine import storage
from shardeddp.engine.storage import GatheredBuffer, ReleasedMemory
from training import Sharding
from world import on_ranks

pytestmark = pytest.mark.timeout(60)


def test_memory_that_nobody_else_has_is_the_next_one_of_its_size() -> None:
    released, flat = ReleasedMemory(), torch.empty(10)
    address = flat.data_ptr()
    released.give(flat)
    del flat
    block = released.take(40)
    assert block is not None and block.data_ptr() == address
    assert released.take(40) is None


@pytest.mark.parametrize(
    "hold", [lambda flat: flat[2:], lambda flat: flat.detach(), lambda flat: flat.numpy()]
)
def test_memory_that_something_else_holds_is_left_to_it(hold: Callable[[Any], Any]) -> None:
    released, flat = ReleasedMemory(), torch.empty(10)
    held = hold(flat)
    released.give(flat)
    assert released.take(40) is None and len(held)


def test_what_has_another_size_is_given_back() -> None:
    released = ReleasedMemory()
    released.give(torch.empty(10))
    assert released.take(44) is None
    assert released.take(40) is None
    released.give(torch.empty(10))
    released.clear(for_nbytes=40)
    assert released.take(40) is not None
    released.give(torch.empty(10))
    released.clear(for_nbytes=41)
    assert released.take(40) is None


@pytest.mark.parametrize(("strategy", "reused"), [("full_shard", 8), ("shard_grad_op", 0)])
@on_ranks(2)
def test_units_that_are_gathered_in_turn_have_the_memory_of_those_before(
    strategy: str, reused: int
) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    runtime = Sharding(strategy=strategy, units=("*",)).apply(model)
    hits: list[bool] = []
    take = storage.RELEASED_MEMORY.take

    def noting(nbytes: int) -> Any:
        block = take(nbytes)
        hits.append(block is not None)
        return block

    storage.RELEASED_MEMORY.take = noting  # type: ignore[method-assign]
    try:
        for _ in range(3):
            hits.clear()
            with runtime.step() as outputs:
                outputs.append(model(torch.ones(2, 8)).sum())
            outputs.pop().backward()
    finally:
        del storage.RELEASED_MEMORY.take
    assert sum(hits) == reused, hits
    assert take(8 * 9 * 4) is None  # nothing is kept between steps


@on_ranks(2)
def test_a_view_that_left_its_unit_keeps_its_values_when_others_are_gathered() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    views: list[torch.Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda it, *_: views.append(it.weight.detach()[2:5]))
    runtime = Sharding(units=("*",)).apply(model)
    with runtime.step() as outputs:
        outputs.append(model(torch.ones(2, 8)).sum())
    expected = [layer.weight.full_tensor()[2:5] for layer in model]
    outputs.pop().backward()
    assert all(torch.equal(one, other) for one, other in zip(views, expected, strict=True))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@on_ranks(2)
def test_a_block_that_a_view_had_and_let_go_is_the_memory_of_one_unit_alone(
    order: list[int],
) -> None:
    units = [nn.Linear(4, 4) for _ in range(2)]
    runtime = Sharding(units=("*",)).apply(nn.Sequential(*units))
    first, second = (
        it.unit.groups[0].buffer for it in runtime.progresses if it.unit.spec.parameters
    )

    def gather(buffer: GatheredBuffer, value: float) -> None:
        buffer.allocate().fill_(value)
        buffer.bind()

    gather(first, 1.0)
    view = first.parameters[0].detach()
    first.release()
    gather(first, 2.0)
    del view
    first.release()
    buffers = [first, second]
    for place in order:
        gather(buffers[place], 10.0 + place)
    assert [it.parameters[0].detach().unique().tolist() for it in buffers] == [[10.0], [11.0]]
    for buffer in buffers:
        buffer.release()
    storage.RELEASED_MEMORY.clear()
