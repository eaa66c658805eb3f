"""Passes through units in every order and number: entered twice, nested, several forwards and backwards, errors.

Each test trains the sharded model beside the same model in one process, see ``tests/training.py``.
"""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from training import RUNTIMES, Sharding, Trial, another_order, batch, full, unit_of
from world import on_ranks

WIDTH = 6
every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


class Chain(nn.Module):
    """Blocks that run in the order given by ``order``, which a test may change."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(blocks)]
        )
        self.order = list(range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in self.order:
            x = x + self.blocks[index](x)
        return x


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 4, WIDTH)).pow(2).mean()


def chain(strategy: str, order: tuple[int, ...] = (0, 1, 2), prefetch: int = 1) -> Trial:
    model = Chain()
    model.order = list(order)
    return Trial(model, Sharding(strategy=strategy, units=("blocks.*",), prefetch=prefetch))


@every_strategy
@on_ranks(2)
def test_a_unit_is_used_twice_in_a_forward(strategy: str) -> None:
    chain(strategy, order=(0, 1, 0, 2, 2)).train(square)


@every_strategy
@on_ranks(2)
def test_units_are_nested_and_the_outer_one_has_parameters_on_both_sides(strategy: str) -> None:
    class Outer(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.after = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(super().forward(x))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Outer(), nn.Linear(WIDTH, WIDTH))
    Trial(model, Sharding(strategy=strategy, units=("1", "1.blocks.*"))).train(square)


@every_strategy
@on_ranks(2)
def test_two_forwards_share_one_backward(strategy: str) -> None:
    def siamese(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        left, right = model(batch(rank, step, 4, WIDTH)), model(batch(rank, step + 50, 4, WIDTH))
        return (left * right).mean() + right.pow(2).mean()

    chain(strategy).train(siamese)


@every_strategy
@on_ranks(2)
def test_two_steps_share_one_backward(strategy: str) -> None:
    trial = chain(strategy)
    (trial.forward(square, 0) * trial.forward(square, 1)).backward()
    ranks = range(dist.get_world_size())
    losses = [square(trial.reference, rank, 0) * square(trial.reference, rank, 1) for rank in ranks]
    torch.stack(losses).mean().backward()
    trial.check_gradients()
    trial.check_rest()
    trial.train(square, steps=1)


@every_strategy
@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2)
def test_two_forwards_have_a_backward_each_in_either_order(strategy: str, first: int) -> None:
    trial = chain(strategy)
    losses = [trial.forward(square, 0), trial.forward(square, 1)]
    losses[first].backward()
    losses[1 - first].backward()
    for step in range(2):
        trial.reference_loss(square, step).backward()
    trial.check_gradients()
    trial.check_rest()
    trial.step()
    trial.train(square, steps=1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x).tanh()
        return {"left": self.heads[0](x), "right": self.heads[1](x)}


@every_strategy
@pytest.mark.parametrize("units", [(), ("heads.*",), ("body", "heads.*")])
@on_ranks(2)
def test_a_backward_through_some_outputs_leaves_the_others_without_gradient(
    strategy: str, units: tuple[str, ...]
) -> None:
    def one_head(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 4, WIDTH))[("left", "right", "left")[step]].pow(2).mean()

    trial = Trial(TwoHeads(), Sharding(strategy=strategy, units=units))
    with another_order():
        trial.train(one_head)


@every_strategy
@on_ranks(2)
def test_a_graph_that_is_retained_gives_its_gradients_twice(strategy: str) -> None:
    trial = chain(strategy)
    losses = (trial.forward(square), trial.reference_loss(square))
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    trial.check_gradients()
    trial.check_rest()


@every_strategy
@on_ranks(2)
def test_gradients_accumulate_until_they_are_zeroed(strategy: str) -> None:
    trial = chain(strategy)
    for step in range(3):
        trial.backward(square, step)
        trial.check_gradients()
    trial.step()
    trial.check_parameters()


@pytest.mark.parametrize("set_to_none", [True, False])
@every_strategy
@on_ranks(2)
def test_gradients_are_zeroed_either_way(strategy: str, set_to_none: bool) -> None:
    trial = chain(strategy)
    for step in range(2):
        trial.backward(square, step)
        trial.optimizer.zero_grad(set_to_none=set_to_none)
        trial.reference_optimizer.zero_grad(set_to_none=set_to_none)
        trial.check_gradients()
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_a_forward_without_gradients_comes_between_forward_and_backward(strategy: str) -> None:
    trial = chain(strategy)
    for step in range(3):
        loss = trial.forward(square, step)
        with torch.no_grad():
            found, expected = trial.forward(square, step + 9), square(trial.reference, dist.get_rank(), step + 9)
        torch.testing.assert_close(found, expected)
        loss.backward()
        trial.reference_loss(square, step).backward()
        trial.check_gradients()
        trial.step()
        trial.check_parameters()
        trial.check_rest()


@every_strategy
@on_ranks(2)
def test_a_step_looks_at_its_own_model_without_gradients(strategy: str) -> None:
    def distilled(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 4, WIDTH)
        with torch.no_grad():
            before = model(x)
        after = model(x + 0.1)
        with torch.no_grad():
            model(x - 0.1)
        return (after - before).pow(2).mean()

    chain(strategy).train(distilled)


@every_strategy
@on_ranks(2)
def test_gradients_of_inputs_come_from_autograd_grad_inside_a_step(strategy: str) -> None:
    def smooth(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 4, WIDTH).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.pow(2).mean() + slope.pow(2).mean()

    chain(strategy).train(smooth)


@every_strategy
@on_ranks(2)
def test_inputs_are_made_worse_by_their_gradient_before_the_step(strategy: str) -> None:
    def adversarial(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 4, WIDTH).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).mean(), x)
        return model(x.detach() + 0.1 * slope.sign()).pow(2).mean()

    trial = chain(strategy)
    trial.train(adversarial)
    traffic = trial.runtime.mesh.traffic
    traffic.reset()
    trial.forward(square).backward()
    usual = traffic.calls["reduce_scatter"] + traffic.calls["all_reduce"]
    traffic.reset()
    trial.forward(adversarial).backward()
    assert traffic.calls["reduce_scatter"] + traffic.calls["all_reduce"] == usual


@every_strategy
@on_ranks(2)
def test_a_backward_that_keeps_its_graph_for_another_one(strategy: str) -> None:
    trial = chain(strategy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")  # torch's advice
        for loss in (trial.forward(square), trial.reference_loss(square)):
            loss.backward(create_graph=True)
    trial.check_gradients()
    trial.step()
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_training_goes_on_after_an_error_in_a_forward(strategy: str) -> None:
    def failing(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        model.order = [0, 1, 7]
        return square(model, rank, step)

    trial = chain(strategy)
    trial.train(square, steps=1)
    with pytest.raises(IndexError):
        trial.forward(failing)
    trial.check_rest()
    trial.model.order = [0, 1, 2]
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_training_goes_on_after_an_error_in_a_backward(strategy: str) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise LookupError("no such gradient")

    def sabotage(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    trial = chain(strategy)
    trial.train(square, steps=1)
    sabotaged = trial.model.blocks[1].register_forward_hook(sabotage)
    with pytest.raises(LookupError):
        trial.forward(square).backward()
    sabotaged.remove()
    trial.runtime.reset()
    trial.check_rest()
    trial.optimizer.zero_grad()
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_an_error_that_the_step_handles_itself_changes_nothing(strategy: str) -> None:
    def retrying(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        order, model.order = model.order, [0, 7]
        with pytest.raises(IndexError):
            square(model, rank, step)
        model.order = order
        return square(model, rank, step)

    chain(strategy).train(retrying)


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
        if order == [2, 0, 1]:
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
        assert trial.runtime.mesh.traffic.calls["reduce_scatter"] == len(trial.runtime.tracks)


def train_with_prefetch(strategy: str, prefetch: int) -> dict[str, torch.Tensor]:
    trial = chain(strategy, order=(0, 2, 1, 0), prefetch=prefetch)
    trial.train(square)
    return {name: full(parameter) for name, parameter in trial.model.named_parameters()}


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
        seen.append([t.unit.label for t in trial.runtime.tracks[1:] if t.unit.state.value != "sharded"])

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
        seen.append("".join(t.unit.label[-1] for t in trial.runtime.tracks[1:] if t.unit.state.value != "sharded"))

    for block in trial.model.blocks:
        block[1].register_forward_hook(watch)
        block[1].register_full_backward_hook(watch)
    trial.forward(square).backward()
    assert seen == ["01", "12", "2", "12", "01", "0"]


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
