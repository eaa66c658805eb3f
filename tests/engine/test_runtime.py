"""Passes through units in every order and number: entered twice, nested, several forwards and backwards, errors.

Each test trains the sharded model beside the same model in one process, see ``tests/training.py``.
"""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.engine.states import Phase, UnitState
from shardeddp.engine.unit import Unit
from shardeddp.torch_private import top_hooks
from training import (
    RUNTIMES,
    WIDTH,
    Chain,
    Sharding,
    Trial,
    another_order,
    batch,
    chain,
    square,
)
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


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
def test_a_forward_that_ends_before_its_unit_is_entered_leaves_the_unit_as_it_was(
    strategy: str,
) -> None:
    trial = chain(strategy, order=(0, 1, 2))

    def refuses(module: nn.Module, args: object) -> None:
        raise ValueError("not this time")

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        for block in model.blocks:
            handle = block.register_forward_pre_hook(refuses, prepend=True)
            with pytest.raises(ValueError, match="not this time"):
                model(batch(rank, step, 4, WIDTH))
            handle.remove()
        if model is trial.model:
            of_root, *of_units = [each.active for each in trial.runtime.progresses]
            assert (of_root, of_units) == (1, [0, 0, 0])  # the root's step goes on
        return square(model, rank, step)

    trial.train(loss)


@every_strategy
@on_ranks(2)
def test_a_unit_that_cannot_be_gathered_is_left_as_it_was(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = chain(strategy, order=(0, 1, 2))
    runtime = trial.runtime

    def fails(unit: Unit) -> None:
        raise ValueError(f"not {unit.label}")

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        if model is trial.model:
            for block in model.blocks:
                monkeypatch.setattr(Unit, "unshard", fails)
                monkeypatch.setattr(Unit, "wait", fails)  # of a unit that was prefetched
                with pytest.raises(ValueError, match="not blocks"):
                    block(batch(rank, step, 4, WIDTH))
                monkeypatch.undo()
            of_root, *of_units = [each.active for each in runtime.progresses]
            assert (of_root, of_units) == (1, [0, 0, 0])
            assert top_hooks(True) is None
            with ThreadPoolExecutor(1) as threads:  # no forward is under way any more
                threads.submit(model.blocks[0], batch(rank, step, 4, WIDTH)).result()
        return square(model, rank, step)

    trial.train(loss)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer"])
@on_ranks(2)
def test_units_that_two_threads_run_at_the_same_time_are_refused_by_name(strategy: str) -> None:
    inside, over = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert over.wait(20)
            return super().forward(x)

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Waits(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as threads:
                first = threads.submit(self.blocks[0], x)
                assert inside.wait(20)
                try:
                    return self.blocks[1](x) + first.result()
                finally:
                    over.set()

    model = Parallel()
    runtime = Sharding(strategy=strategy, units=("blocks.*",)).apply(model)
    with (
        pytest.raises(RuntimeError, match=r"forward of .*blocks\.1.* begins while another thread"),
        runtime.step(),
    ):
        model(batch(0, 0, 4, WIDTH))


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


@pytest.mark.loop(1)
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


@every_strategy
@on_ranks(2)
def test_one_gradient_is_dropped_and_the_others_accumulate(strategy: str) -> None:
    trial = chain(strategy)
    for step in range(3):
        trial.backward(square, step)
        for model in (trial.model, trial.reference):
            model.blocks[0][0].weight.grad = model.stem.bias.grad = None
    trial.backward(square, 3)
    trial.check_gradients()


@pytest.mark.loop(1)
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
            found, expected = (
                trial.forward(square, step + 9),
                square(trial.reference, dist.get_rank(), step + 9),
            )
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in (trial.forward(square), trial.reference_loss(square)):
            loss.backward(create_graph=True)
    said = [str(it.message) for it in caught if "of sharded parameters" in str(it.message)]
    assert len(said) == (trial.runtime.mesh.rank == 0)
    assert all("torch.autograd.grad(loss, parameters, create_graph=True)" in it for it in said)
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
    # In the middle of a unit, where some of its gradients are there already.
    sabotaged = trial.model.blocks[1][1].register_forward_hook(sabotage)
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
def test_a_forward_that_a_user_interrupts_leaves_nothing_behind(strategy: str) -> None:
    trial = chain(strategy, order=(0, 1, 2))
    runtime: Any = trial.runtime

    def interrupts(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = trial.model.blocks[1].register_forward_pre_hook(interrupts)
    with pytest.raises(KeyboardInterrupt), runtime.step():
        square(trial.model, dist.get_rank(), 0)
    handle.remove()
    assert [each.active for each in runtime.progresses] == [0] * len(runtime.progresses)
    assert top_hooks(True) is None
    with ThreadPoolExecutor(1) as thread:  # refused while a forward of another thread runs
        thread.submit(trial.train, square, steps=2).result()
    trial.check_parameters()
    runtime.dissolve()
    assert not runtime.mesh.run.incomplete  # of which a next run on the mesh would hear


@pytest.mark.loop(1)
@pytest.mark.parametrize("part", ["visit", "end"])
@every_strategy
@on_ranks(2)
def test_a_step_that_fails_where_it_begins_or_ends_leaves_a_runtime_for_the_next(
    strategy: str, part: str
) -> None:
    trial = chain(strategy)
    runtime: Any = trial.runtime

    def fails(*_: Any) -> None:
        raise LookupError("no root")

    with (
        pytest.raises(LookupError, match="no root"),
        mock.patch.object(runtime.agreement, part, fails),
        runtime.step(),
    ):
        if part == "end":
            square(trial.model, dist.get_rank(), 0)
    assert runtime.phase is Phase.IDLE and not runtime.mesh.run.in_step
    assert {it.unit.state for it in runtime.progresses} == {UnitState.SHARDED}
    with runtime.mesh.run.step():
        with runtime.mesh.run.step():
            pass
        assert runtime.mesh.run.in_step
    trial.train(square, steps=2)
    trial.check_parameters()


@every_strategy
@on_ranks(2)
def test_a_model_may_be_called_by_itself_after_a_backward_that_failed(strategy: str) -> None:
    trial = chain(strategy, order=(0, 1, 2))
    runtime: Any = trial.runtime
    x = batch(dist.get_rank(), 0, 4, WIDTH)

    def fails(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with runtime.step() as outputs:
        y = trial.model(x)
        y.register_hook(lambda gradient: gradient)
        outputs.append(y.square().mean())
    handle = trial.model.blocks[0].register_full_backward_hook(lambda *_: fails(x))
    with runtime.step() as outputs:
        outputs.append(trial.model(x.clone().requires_grad_()).square().mean())
    with pytest.raises(KeyboardInterrupt):
        outputs[0].backward()
    handle.remove()
    for _ in range(2):
        with torch.no_grad():
            trial.model(x)
    assert [each.active for each in runtime.progresses] == [0] * len(runtime.progresses)
    trial.train(square, steps=2)
    trial.check_parameters()


@every_strategy
@on_ranks(2)
def test_micro_batches_without_a_reduction_are_nested(strategy: str) -> None:
    trial = chain(strategy)
    runtime = trial.runtime
    with runtime.without_sync():
        with pytest.raises(ValueError, match="inside"), runtime.without_sync():
            raise ValueError("inside")
        assert not runtime.sync_gradients
        trial.backward(square)
        assert not runtime.sync_gradients
    assert runtime.sync_gradients
    trial.backward(square, 1)
    trial.check_gradients()
    trial.step()
    trial.check_parameters()
