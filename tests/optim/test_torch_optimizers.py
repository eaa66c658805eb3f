"""Every optimizer of ``torch.optim``, in every variant that runs other code, steps as in one process."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from shardeddp.comm import Mesh
from shardeddp.errors import ConfigurationError
from shardeddp.optim.attach import attach_optimizer
from shardeddp.tensor.shard_tensor import ShardTensor
from support.optimizers import stepped_on
from training import WIDTH, Sharding, Trial, full, linears, square
from world import on_ranks

pytestmark = pytest.mark.timeout(60)

Options = dict[str, Any]

LISTS: list[Options] = [
    {"foreach": True},
    {"foreach": False},
    {"maximize": True},
    {"weight_decay": 0.1},
]
FUSED: list[Options] = [{"fused": True}, {"fused": True, "maximize": True, "weight_decay": 0.1}]
ADAM: list[Options] = [
    *LISTS,
    *FUSED,
    {"amsgrad": True},
    {"amsgrad": True, "fused": True},
    {"lr": torch.tensor(0.01)},
]

# By class, the options of each variant beside those of the first.
VARIANTS: dict[str, tuple[Options, list[Options]]] = {
    "Adadelta": ({"lr": 0.5}, LISTS),
    "Adafactor": ({"lr": 0.05}, [*LISTS, {"beta2_decay": -0.5, "d": 2.0, "eps": (1e-8, 1e-2)}]),
    "Adagrad": (
        {"lr": 0.05},
        [*LISTS, *FUSED, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}],
    ),
    "Adam": ({"lr": 0.01}, [*ADAM, {"decoupled_weight_decay": True, "weight_decay": 0.1}]),
    "AdamW": ({"lr": 0.01}, ADAM),
    "Adamax": ({"lr": 0.01}, LISTS),
    "ASGD": ({"lr": 0.05, "t0": 1.0}, LISTS),
    "Muon": (
        {"lr": 0.002},
        [{"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"weight_decay": 0.0}],
    ),
    "NAdam": ({"lr": 0.01}, [*LISTS, {"decoupled_weight_decay": True, "weight_decay": 0.1}]),
    "RAdam": ({"lr": 0.01}, [*LISTS, {"decoupled_weight_decay": True, "weight_decay": 0.1}]),
    "RMSprop": ({"lr": 0.01}, [*LISTS, {"momentum": 0.5, "centered": True}]),
    "Rprop": ({"lr": 0.01}, LISTS[:3]),
    "SGD": (
        {"lr": 0.1},
        [*LISTS, *FUSED, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}],
    ),
}
ELSEWHERE = {
    "LBFGS",  # needs a closure: see test_attach.py
    "SparseAdam",  # refused: see below
}


def make(name: str, options: Options) -> Callable[[Iterable[nn.Parameter]], optim.Optimizer]:
    def make_optimizer(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        chosen = [parameter for parameter in parameters if name != "Muon" or parameter.ndim == 2]
        own = {
            key: value.clone() if torch.is_tensor(value) else value
            for key, value in options.items()
        }
        return vars(optim)[name](chosen, **own)

    return make_optimizer


def test_all_optimizers_of_this_torch_are_covered() -> None:
    kinds = {
        name
        for name, it in vars(optim).items()
        if isinstance(it, type) and issubclass(it, optim.Optimizer)
    }
    assert kinds - {"Optimizer"} <= VARIANTS.keys() | ELSEWHERE


def on_one_mesh(sharding: Sharding) -> Sharding:
    """The same with a mesh that is made once: connecting takes longer than training."""
    mesh = sharding.mesh()

    class OnOneMesh(Sharding):
        def mesh(self) -> Mesh:
            return mesh

    return OnOneMesh(**vars(sharding))


def compare(trial: Trial, case: str) -> None:
    for step in range(3):
        trial.backward(square, step)
        trial.step()
    try:
        trial.check_parameters()
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2)
def test_every_variant_steps_as_in_one_process() -> None:
    sharding = on_one_mesh(Sharding(units=("1",)))
    for name, (base, variants) in VARIANTS.items():
        for options in [{}, *variants] if name in vars(optim) else []:
            trial = Trial(linears(2), sharding, make(name, {**base, **options}))
            compare(trial, f"{name} with {options}")


SPOT_CHECKS = [name for name in ("AdamW", "Adafactor", "Muon", "ASGD") if name in vars(optim)]
SHARDINGS = [
    *(
        Sharding(strategy=strategy, units=("1",))
        for strategy in ("shard_grad_op", "shard_optimizer", "no_shard")
    ),
    Sharding(strategy="hybrid_shard", units=("1",), shard_size=2),
    Sharding(strategy="hybrid_shard", units=("1",), shard_size=2, split=True),
]


@pytest.mark.long
@pytest.mark.slow
@on_ranks(4)
def test_the_other_strategies_step_as_in_one_process() -> None:
    for sharding in map(on_one_mesh, SHARDINGS):
        for name in SPOT_CHECKS:
            trial = Trial(linears(2), sharding, make(name, VARIANTS[name][0]))
            compare(trial, f"{name} under {sharding}")


# -- whole parameters, each on one rank


@pytest.mark.skipif("Muon" not in vars(optim), reason="this torch has no Muon")
@on_ranks(2)
def test_each_rank_steps_half_of_the_matrices_on_plain_whole_tensors() -> None:
    for strategy in ("full_shard", "shard_optimizer"):
        trial = Trial(linears(4), Sharding(strategy=strategy), make("Muon", {"lr": 0.002}))
        seen = stepped_on(trial.optimizer)
        trial.train(square, steps=1)
        assert [tuple(it.shape) for it in seen] == [(WIDTH, WIDTH)] * 2
        assert not any(isinstance(it, ShardTensor) for it in seen)
        assert all(
            it.untyped_storage().nbytes() == 0 or it._is_view() for it in seen
        )  # released after the step


@on_ranks(2)
def test_an_owner_keeps_the_states_and_every_rank_sees_all_of_them() -> None:
    trial = Trial(linears(3), Sharding(), make("Adafactor", {"lr": 0.05}))
    trial.train(square)
    held = 0
    for mine, expected in zip(trial.model.parameters(), trial.reference.parameters(), strict=True):
        state, reference = trial.optimizer.state[mine], trial.reference_optimizer.state[expected]
        assert list(state) == list(reference)
        for name, value in state.items():
            assert isinstance(value, ShardTensor)
            held += value.to_local().numel()
            torch.testing.assert_close(full(value), reference[name], rtol=1e-4, atol=1e-7)
    total = sum(
        value.numel()
        for state in trial.reference_optimizer.state.values()
        for value in state.values()
    )
    counts = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(counts, torch.tensor(float(held)))
    assert sum(counts) == total  # nobody holds what another holds
    assert max(counts) < 0.75 * total


@on_ranks(2)
def test_what_is_assigned_to_states_between_steps_reaches_their_owner() -> None:
    trial = Trial(linears(2), Sharding(), make("Adafactor", {"lr": 0.05}))
    trial.train(square, steps=2)
    for model, optimizer in (
        (trial.model, trial.optimizer),
        (trial.reference, trial.reference_optimizer),
    ):
        first, second, third, fourth = model.parameters()
        optimizer.state[first]["row_var"].mul_(4)
        optimizer.state[first]["col_var"] = optimizer.state[first]["col_var"] * 3
        optimizer.state[second]["step"] = torch.tensor(9.0)
        optimizer.state[third].pop("step")
        optimizer.state[third]["step"] = torch.tensor(5.0)
        del optimizer.state[fourth]
    trial.train(square, steps=2)
    assert len(trial.optimizer.state) == 4


@on_ranks(2)
def test_a_step_moves_each_rank_its_own_shards_three_times() -> None:
    trial = Trial(linears(4), Sharding(), make("Adafactor", {"lr": 0.05}))
    trial.train(square, steps=1)
    trial.backward(square)
    traffic = trial.runtime.mesh.traffic
    traffic.reset()
    trial.optimizer.step()
    numel = sum(parameter.numel() for parameter in trial.model.parameters())
    assert traffic.calls["all_to_all"] == 3
    assert 0 < traffic.nbytes["all_to_all"] <= 1.5 * 3 * 4 * numel / 2
    assert traffic.calls["all_gather"] == 0


@on_ranks(2)
def test_parameters_without_a_gradient_and_new_ones_are_no_trouble_for_owners() -> None:
    def of_the_first(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.Adafactor(list(parameters)[:2], lr=0.05)

    trial = Trial(linears(3), Sharding(units=("1",)), of_the_first)
    trial.train(square, steps=1)
    for model, optimizer in (
        (trial.model, trial.optimizer),
        (trial.reference, trial.reference_optimizer),
    ):
        optimizer.add_param_group({"params": list(model[1:].parameters()), "lr": 0.02})
        model[2].requires_grad_(False)
    trial.train(square, steps=1)
    for model in (trial.model, trial.reference):
        model[2].requires_grad_(True)
    trial.train(square, steps=2)


# -- refusals


def refused(optimizer: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        attach_optimizer(optimizer, lambda: None)
    return str(caught.value)


@on_ranks(2)
def test_optimizers_that_cannot_work_are_refused_with_the_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on import
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    warnings.filterwarnings(
        "ignore", "parameter .* is used outside"
    )  # by the constructor of the latter
    model = linears(2)
    Sharding().apply(model)
    assert "expected an optimizer for dense ones" in refused(
        optim.SparseAdam(list(model.parameters()), lr=0.1)
    )
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optim.Adam, lr=0.1)
    assert "Return the optimizer inside of it" in refused(zero)
    averaging = PostLocalSGDOptimizer(optim.SGD(model.parameters(), lr=0.1), averager=None)  # type: ignore[arg-type]
    assert "averages over them by itself" in refused(averaging)
