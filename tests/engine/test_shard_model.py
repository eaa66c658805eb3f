"""Setup is agreed on by all ranks: another model or a failure on one rank is an error of all, and changes nothing."""

import contextlib
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.config import parse_options
from shardeddp.engine import unit as unit_module
from shardeddp.engine.recording import Recording
from shardeddp.engine.states import UNIT_VERBS, UnitState
from shardeddp.errors import ConfigurationError, LayoutMismatchError, RankError
from shardeddp.tensor.shard_tensor import ShardTensor
from training import RUNTIMES, Sharding, unit_of
from world import on_ranks


def model_of(
    width: int = 4, dtype: torch.dtype = torch.float32, frozen: bool = False
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).to(dtype)
    model[1].bias.requires_grad_(not frozen)
    return model


def another_shape() -> nn.Module:
    return model_of(width=5)


def another_dtype() -> nn.Module:
    return model_of(dtype=torch.float64)


def another_freeze() -> nn.Module:
    return model_of(frozen=True)


def one_layer_less() -> nn.Module:
    return model_of()[:1]


Keep = Callable[[nn.Linear], object]


@on_ranks(2)
def test_parameters_that_were_not_contiguous_are_pointed_out() -> None:
    model = model_of()
    model[0].weight = torch.nn.Parameter(torch.randn(model[0].weight.shape[::-1]).t())
    expected = pytest.warns(UserWarning, match=r"^0\.weight: a parameter that was not contiguous")
    with expected if torch.distributed.get_rank() == 0 else contextlib.nullcontext():
        Sharding().apply(model)
    assert model[0].weight.is_contiguous()


KEPT: dict[str, Keep] = {
    "a view in a list": lambda layer: [layer.weight.detach()[0]],
    "an array": lambda layer: layer.weight.detach().numpy(),
    "a state dict": lambda layer: layer.state_dict(),
}


@pytest.mark.parametrize("kept", KEPT)
@on_ranks(2)
def test_who_keeps_the_former_memory_of_parameters_is_told(kept: str) -> None:
    model = model_of()
    held = KEPT[kept](model[0])
    with pytest.warns(
        UserWarning, match=r"still refers to the memory that 0\.(bias|weight).*had before"
    ) as caught:
        Sharding().apply(model)
    assert len(caught) == 1 and held is not None


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["attribute", "buffer"])
@on_ranks(2)
def test_a_module_that_holds_a_part_of_a_parameters_memory_is_refused(
    kind: str, device: str
) -> None:
    recording = Recording()
    with torch.device(device), recording.active():
        model = model_of()
        part = model[0].weight.data[1:3]  # it begins elsewhere than the parameter
        if kind == "buffer":
            model.register_buffer("part", part)
        else:
            model.part = part
    with pytest.raises(
        ConfigurationError, match=r"part is made of the memory of parameter 0\.weight"
    ):
        Sharding().apply(model, recording=recording)


LED: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda view: [view],
    "object": lambda view: types.SimpleNamespace(inner={"deep": [view]}),
    "closure": lambda view: lambda: [view],
    "partial": lambda view: functools.partial(torch.add, view),
}


@pytest.mark.loop(1)
@pytest.mark.parametrize("is_all", [False, True])
@pytest.mark.parametrize("way", LED)
@on_ranks(2)
def test_what_leads_to_a_parameters_memory_on_the_meta_device_keeps_its_first_values(
    way: str, is_all: bool
) -> None:
    first = model_of()[0].weight.detach()[0 if is_all else 1 :]
    recording = Recording()
    with torch.device("meta"), recording.active():
        model = model_of()
        view = model[0].weight.data[0 if is_all else 1 :]
        model[1].held = LED[way](view)
    with pytest.warns(
        UserWarning, match=r"still refers to the memory that 0\.weight had before"
    ) as caught:
        Sharding().apply(model, recording=recording)
    assert len(caught) == 1
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(view, first)


@on_ranks(2)
def test_parameters_whose_memory_nobody_keeps_are_sharded_without_a_word() -> None:
    model = model_of()
    model.same = model[0].weight.data  # follows the parameter
    copied = [parameter.detach().clone() for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sharding().apply(model)
    assert len(copied) == 4


MISMATCHES: list[tuple[Callable[[], nn.Module], str]] = [
    (
        another_shape,
        r"parameter 0\.weight: torch.float32, shape \(4, 4\).*rank 2 has .*shape \(5, 4\)",
    ),
    (
        another_dtype,
        r"parameter 0\.weight: torch.float32.*rank 2 has 'parameter 0\.weight: torch.float64",
    ),
    (another_freeze, r"parameter 1\.bias.*trainable.*rank 2 has 'parameter 1\.bias.*frozen"),
    (one_layer_less, r"parameter 1\.weight.*rank 2 has 'nothing more'"),
]


@pytest.mark.parametrize("case", range(len(MISMATCHES)))
@on_ranks(3)
def test_another_model_on_one_rank_is_refused_on_every_rank(case: int) -> None:
    build, message = MISMATCHES[case]
    model = build() if dist.get_rank() == 2 else model_of()
    before = {
        name: (parameter, parameter.detach().clone())
        for name, parameter in model.named_parameters()
    }
    with pytest.raises(LayoutMismatchError, match=message) as caught:
        Sharding().apply(model)
    assert "ranks that differ from rank 0: [2]" in str(caught.value)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, before[name][1])
    assert not model._forward_pre_hooks


@on_ranks(2)
def test_another_strategy_on_one_rank_is_refused_on_every_rank() -> None:
    strategy = ("full_shard", "shard_grad_op")[dist.get_rank()]
    with pytest.raises(
        LayoutMismatchError, match=r"reshard.*AFTER_FORWARD.*rank 1 has.*AFTER_BACKWARD"
    ):
        Sharding(strategy=strategy).apply(model_of())


@on_ranks(2)
def test_other_units_on_one_rank_are_refused_on_every_rank() -> None:
    with pytest.raises(
        LayoutMismatchError,
        match=r"rank 0 has 'parameter 1\.weight.*rank 1 has 'parameter 0\.weight",
    ):
        Sharding(units=(str(dist.get_rank()),)).apply(model_of())


@on_ranks(3)
def test_a_failure_of_one_rank_while_sharding_is_raised_on_every_rank_with_its_traceback() -> None:
    failure = MemoryError("no room for the shard") if dist.get_rank() == 1 else None
    with (
        mock.patch.object(
            unit_module, "FlatGroup", wraps=unit_module.FlatGroup, side_effect=failure
        ),
        pytest.raises(
            RankError, match=r"(?s)sharding the model failed on rank 1.*no room for the shard"
        ) as caught,
    ):
        Sharding().apply(model_of())
    assert list(caught.value.failures) == [1]
    assert "Traceback" in caught.value.failures[1]


@on_ranks(2)
def test_a_graph_from_before_the_sharding_refuses_to_run_backward() -> None:
    model = model_of()
    loss = (model[0].weight * 2).sum()
    parameter = model[0].weight
    with pytest.warns(UserWarning, match="still refers to the memory"):
        runtime = Sharding().apply(model)
    assert model[0].weight is parameter
    with pytest.raises(RuntimeError, match="recorded before its model was sharded"):
        loss.backward()
    with runtime.step("training_step") as outputs:
        outputs.append(model(torch.ones(1, 4)).sum())
    outputs[0].backward()
    assert isinstance(parameter.grad, ShardTensor)


@pytest.mark.parametrize("strategy", RUNTIMES)
@on_ranks(1)
def test_one_rank_is_a_world(strategy: str) -> None:
    runtime = Sharding(strategy=strategy, units=("0",)).apply(model_of())
    with runtime.step("training_step") as outputs:
        outputs.append(runtime.root_module(torch.ones(1, 4)).sum())
    outputs[0].backward()
    assert runtime.mesh.traffic.total_nbytes == 0


@pytest.mark.parametrize("verb", UNIT_VERBS)
@on_ranks(1)
def test_verbs_of_a_unit_are_refused_in_the_wrong_state(verb: str) -> None:
    unit = unit_of(Sharding().apply(model_of()), "")
    sources, _ = UNIT_VERBS[verb]
    for state in UnitState:
        unit.state = state
        if state not in sources:
            with pytest.raises(
                RuntimeError,
                match=rf"{verb} of unit \(root\): expected it .*, found it {state.value}",
            ):
                getattr(unit, verb)()


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_negative_prefetch_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}_prefetch=-1: expected 0"):
        parse_options({f"{name}_prefetch": -1})
