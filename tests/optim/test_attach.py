"""Optimizers over sharded parameters: closures, states and state dicts of one process; element-wise or not."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

from shardeddp.optim.attach import attach_optimizer
from shardeddp.tensor.shard_tensor import ShardTensor
from training import WIDTH, Sharding, Trial, batch, close, full, linears
from world import Worlds, on_ranks

SAMPLES = 12  # of a step, over all ranks
every_strategy = pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])

Parameters = Iterable[nn.Parameter]
State = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)) for _ in range(2)]
        )
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x * self.scale


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of this rank's part of a batch that is the same for every number of ranks."""
    part = SAMPLES // dist.get_world_size()
    x = batch(0, step, SAMPLES, WIDTH)[rank * part : (rank + 1) * part]
    return (model(x) - x.roll(1, dims=1)).pow(2).mean()


def sharding(strategy: str = "full_shard") -> Sharding:
    return Sharding(strategy=strategy, units=("blocks.*",))


def adamw(parameters: Parameters) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01)


OPTIMIZERS: dict[str, Callable[[Parameters], optim.Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adamw_foreach": lambda parameters: optim.AdamW(parameters, lr=0.01, foreach=True),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.05),
    "asgd": lambda parameters: optim.ASGD(parameters, lr=0.05),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=0.05),
}


@pytest.mark.slow
@every_strategy
@on_ranks(2)
def test_lbfgs_calls_its_closure_many_times(strategy: str) -> None:
    def lbfgs(parameters: Parameters) -> optim.Optimizer:
        return optim.LBFGS(
            parameters, lr=0.5, max_iter=6, history_size=4, line_search_fn="strong_wolfe"
        )

    trial = Trial(Net(), sharding(strategy), lbfgs)
    for step in range(2):
        found, expected = step_with_closures(trial, step)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        for (name, mine), reference in zip(
            trial.model.named_parameters(), trial.reference.parameters(), strict=True
        ):
            torch.testing.assert_close(
                full(mine), reference.detach(), rtol=1e-3, atol=1e-4, msg=name
            )


def step_with_closures(trial: Trial, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of both optimizers with a closure; the loss that either returns, over all ranks."""

    def closure() -> torch.Tensor:
        trial.optimizer.zero_grad()
        loss = trial.forward(square, step)
        loss.backward()
        # One process looks at the loss of the whole batch, and a line search depends on it.
        dist.all_reduce(total := loss.detach().clone())
        return total / dist.get_world_size()

    def reference_closure() -> torch.Tensor:
        trial.reference_optimizer.zero_grad()
        loss = trial.reference_loss(square, step)
        loss.backward()
        return loss

    found, expected = (
        trial.optimizer.step(closure),
        trial.reference_optimizer.step(reference_closure),
    )
    return torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()


@every_strategy
@on_ranks(2)
def test_an_element_wise_optimizer_takes_a_closure(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)
    for step in range(3):
        torch.testing.assert_close(*step_with_closures(trial, step), rtol=1e-5, atol=1e-6)
        trial.check_parameters()


@every_strategy
@on_ranks(2)
def test_a_closure_sees_sharded_parameters_and_their_gradients(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)

    def closure() -> torch.Tensor:
        loss = trial.forward(square)
        loss.backward()
        (parameters,) = (group["params"] for group in trial.optimizer.param_groups)
        assert [id(parameter) for parameter in parameters] == [
            id(parameter) for parameter in trial.model.parameters()
        ]
        nn.utils.clip_grad_norm_(trial.model.parameters(), 0.01)
        return loss

    trial.optimizer.step(closure=closure)
    trial.reference_loss(square).backward()
    nn.utils.clip_grad_norm_(trial.reference.parameters(), 0.01)
    trial.reference_optimizer.step()
    trial.check_parameters()


@every_strategy
@on_ranks(2)
def test_parameters_are_added_to_an_optimizer_that_has_stepped(strategy: str) -> None:
    def of_the_stem(parameters: Parameters) -> optim.Optimizer:
        return optim.AdamW(list(parameters)[:2], lr=0.01)

    trial = Trial(Net(), sharding(strategy), of_the_stem)
    trial.train(square)
    for model, optimizer in (
        (trial.model, trial.optimizer),
        (trial.reference, trial.reference_optimizer),
    ):
        optimizer.add_param_group(
            {"params": list(model.blocks.parameters()), "lr": 0.05, "weight_decay": 0.5}
        )
    trial.train(square)
    assert len(trial.optimizer.state) == len(trial.reference_optimizer.state)


@every_strategy
@on_ranks(2)
def test_parameters_without_gradient_are_left_alone(strategy: str) -> None:
    def stem_only(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model.stem(batch(rank, step, 4, WIDTH)).pow(2).mean()

    trial = Trial(Net(), sharding(strategy), adamw)
    trial.train(stem_only)
    assert len(trial.optimizer.state) == len(trial.reference_optimizer.state) == 2


@pytest.mark.slow
@every_strategy
@on_ranks(3)
def test_states_are_read_as_global_tensors(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)
    trial.train(square)
    assert list(trial.optimizer.state) == list(trial.model.parameters())
    for mine, expected in zip(trial.model.parameters(), trial.reference.parameters(), strict=True):
        state, expected_state = (
            trial.optimizer.state[mine],
            trial.reference_optimizer.state[expected],
        )
        assert list(state) == list(expected_state)
        assert torch.equal(state["step"], expected_state["step"])
        for name in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[name], ShardTensor)
            assert state[name].shape == expected.shape
            close(full(state[name]), expected_state[name], name)


@every_strategy
@on_ranks(2)
def test_states_that_are_written_or_assigned_reach_the_optimizer(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)
    trial.train(square)
    for model, optimizer in (
        (trial.model, trial.optimizer),
        (trial.reference, trial.reference_optimizer),
    ):
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].mul_(0.5)
            optimizer.state[parameter]["exp_avg_sq"] = optimizer.state[parameter]["exp_avg_sq"] * 4
            optimizer.state[parameter]["step"] = torch.tensor(9.0)
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_states_are_removed(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)
    trial.train(square)
    for model, optimizer in (
        (trial.model, trial.optimizer),
        (trial.reference, trial.reference_optimizer),
    ):
        del optimizer.state[model.stem.weight]
        optimizer.state[model.stem.bias].clear()
        optimizer.state[model.scale].pop("exp_avg")
        optimizer.state[model.scale].update(exp_avg=torch.tensor(0.25), step=torch.tensor(5.0))
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_a_step_after_one_that_failed(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)
    trial.train(square, steps=1)
    trial.backward(square)
    for optimizer in (trial.optimizer, trial.reference_optimizer):
        optimizer.param_groups[0]["weight_decay"] = "none"
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["weight_decay"] = 0.0
    trial.step()
    trial.check_parameters()
    trial.train(square)


# -- state dicts


def full_state(optimizer: optim.Optimizer) -> State:
    """A state dict with whole tensors, as any process can load it."""
    state_dict = copy.deepcopy({"param_groups": optimizer.state_dict()["param_groups"]})
    state = optimizer.state_dict()["state"]
    whole = {
        index: {
            name: full(value).clone() if torch.is_tensor(value) else value
            for name, value in each.items()
        }
        for index, each in state.items()
    }
    return {**state_dict, "state": whole}


def train_from(
    strategy: str, name: str, steps: range, model_state: State | None, optimizer_state: State | None
) -> tuple[State, State]:
    """Train some steps from a full checkpoint to a full checkpoint."""
    model = Net()
    if model_state is not None:
        model.load_state_dict(model_state)
    trial = Trial(model, sharding(strategy), OPTIMIZERS[name])
    if optimizer_state is not None:
        trial.optimizer.load_state_dict(optimizer_state)
    for step in steps:
        trial.forward(square, step).backward()
        trial.optimizer.step()
        trial.optimizer.zero_grad()
    return {key: full(p) for key, p in trial.model.named_parameters()}, full_state(trial.optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_foreach", "sgd", "adagrad", "asgd", "adafactor"])
@pytest.mark.parametrize(
    "strategies", [("full_shard", "full_shard"), ("no_shard", "shard_optimizer")]
)
def test_states_move_to_another_number_of_ranks(
    world: Worlds, strategies: tuple[str, str], name: str
) -> None:
    expected, _ = world(1).run(train_from, "no_shard", name, range(6), None, None)[0]
    model_state, optimizer_state = world(2).run(
        train_from, strategies[0], name, range(3), None, None
    )[0]
    for found, _ in world(3).run(
        train_from, strategies[1], name, range(3, 6), model_state, optimizer_state
    ):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


@every_strategy
@on_ranks(2)
def test_a_state_dict_is_that_of_a_plain_optimizer_and_loads_into_itself(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)
    trial.train(square)
    mine, expected = trial.optimizer.state_dict(), trial.reference_optimizer.state_dict()
    assert mine["param_groups"] == expected["param_groups"]
    assert {index: list(state) for index, state in mine["state"].items()} == {
        index: list(state) for index, state in expected["state"].items()
    }
    trial.optimizer.load_state_dict(mine)
    trial.train(square)


@every_strategy
@on_ranks(2)
def test_a_scheduler_and_a_second_attachment_change_nothing(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)
    attach_optimizer(trial.optimizer)
    schedulers = [
        optim.lr_scheduler.StepLR(each, 1, 0.5)
        for each in (trial.optimizer, trial.reference_optimizer)
    ]
    for step in range(3):
        trial.train(square, steps=1)
        for scheduler in schedulers:
            scheduler.step()
        assert trial.optimizer.param_groups[0]["lr"] == 0.01 * 0.5 ** (step + 1)


@every_strategy
@on_ranks(2)
def test_an_optimizer_has_parameters_that_are_not_sharded(strategy: str) -> None:
    trial = Trial(Net(), sharding(strategy), adamw)
    extras = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for extra, optimizer in zip(extras, (trial.optimizer, trial.reference_optimizer), strict=True):
        optimizer.add_param_group({"params": [extra]})
    for step in range(2):
        trial.backward(square, step)
        for extra in extras:
            F.mse_loss(extra, torch.zeros(3)).backward()
        trial.step()
        trial.check_parameters()
    assert torch.equal(extras[0], extras[1])
    assert torch.equal(
        trial.optimizer.state[extras[0]]["exp_avg"],
        trial.reference_optimizer.state[extras[1]]["exp_avg"],
    )


class FailsHalfWay(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise KeyboardInterrupt


@on_ranks(2)
def test_a_step_that_fails_half_way_can_be_saved_as_what_it_is() -> None:
    trial = Trial(linears(), Sharding())
    parameters = list(trial.model.parameters())
    optimizer = FailsHalfWay(parameters)
    attach_optimizer(optimizer, stated={"FailsHalfWay": "element"})
    trial.backward(square)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    states = optimizer.state_dict()["state"]
    assert [group["params"] for group in optimizer.param_groups] == [parameters]
    assert [states[index]["exp_avg"].shape for index in range(len(parameters))] == [
        it.shape for it in parameters
    ]
