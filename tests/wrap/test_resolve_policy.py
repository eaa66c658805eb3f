"""What `auto_wrap_policy` may be, in Python and in YAML, and what is said of values that mean nothing."""

import functools
import json
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from shardeddp.errors import ConfigurationError
from shardeddp.wrap import (
    AutoPolicy,
    ClassPolicy,
    NamePolicy,
    Policy,
    PolicyLike,
    PredicatePolicy,
    SingleUnitPolicy,
    SizePolicy,
    resolve_policy,
)

pytestmark = pytest.mark.timeout(30)


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def is_block(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


MODEL = nn.Sequential(Block(), nn.Linear(2, 2), Block())


def refused(value: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve_policy(value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("auto", AutoPolicy),
        ("AUTO", AutoPolicy),
        (None, SingleUnitPolicy),
        ("none", SingleUnitPolicy),
        (Block, ClassPolicy),
        ("Block", ClassPolicy),
        (f"{__name__}.Block", ClassPolicy),
        ("__main__.Block", ClassPolicy),
        ([Block, "Linear"], ClassPolicy),
        ({Block}, ClassPolicy),
        (frozenset({Block}), ClassPolicy),
        ((Block,), ClassPolicy),
        (["lower_case_class"], ClassPolicy),
        (is_block, PredicatePolicy),
        (f"{__name__}.is_block", PredicatePolicy),
        (functools.partial(is_block), PredicatePolicy),
        (max, PredicatePolicy),
    ],
)
def test_every_kind_of_value_has_its_policy(value: object, kind: type[Policy]) -> None:
    assert type(resolve_policy(value)) is kind


@pytest.mark.parametrize(
    "value", [Block, "Block", f"{__name__}.Block", {Block}, is_block, f"{__name__}.is_block"]
)
def test_all_ways_to_say_the_same_choose_the_same(value: object) -> None:
    assert resolve_policy(value).select(MODEL) == ["0", "2"]


def test_a_policy_object_is_returned_as_it_is() -> None:
    policy = SizePolicy(3)
    assert resolve_policy(policy) is policy


@pytest.mark.parametrize("value", ["atuo", "autos", "Aut"])
def test_a_misspelt_preset_is_refused_with_the_nearest(value: str) -> None:
    text = refused(value)
    assert repr(value) in text
    assert 'did you mean "auto"?' in text


@pytest.mark.parametrize("value", ["transformer", "", "two words", "by-size"])
def test_an_unknown_string_is_refused_with_what_is_possible(value: str) -> None:
    text = refused(value)
    assert repr(value) in text
    assert "'auto', 'none'" in text


@pytest.mark.parametrize("value", ["layers.*", "layers.0", ["encoder.layers.*"], "blocks.[01]"])
def test_module_names_are_refused_with_the_policy_that_takes_them(value: object) -> None:
    assert "NamePolicy(names=[" in refused(value)


def test_a_policy_class_is_refused_because_an_object_is_needed() -> None:
    assert "AutoPolicy(...)" in refused(AutoPolicy)
    assert "SizePolicy(...)" in refused("shardeddp.wrap.SizePolicy")


@pytest.mark.parametrize("value", [int, "collections.OrderedDict"])
def test_a_class_of_something_else_is_refused(value: object) -> None:
    assert "not a torch.nn.Module" in refused(value)


@pytest.mark.parametrize("value", [5, 0.5, True, b"auto", {"a": Block}, nn.Linear(1, 1)])
def test_a_value_of_another_type_is_refused_with_its_type(value: object) -> None:
    text = refused(value)
    assert f"of type {type(value).__name__}" in text
    assert 'expected "auto"' in text


def test_an_empty_list_of_classes_is_refused() -> None:
    assert "found none" in refused([])


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        (ModuleWrapPolicy({Block}), ["0", "2"]),
        (
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            ["0", "2"],
        ),
        (
            functools.partial(size_based_auto_wrap_policy, min_num_params=10),
            SizePolicy(10).select(MODEL),
        ),
    ],
    ids=["classes", "transformer", "size"],
)
def test_the_policies_of_torchs_fsdp_choose_as_there(policy: object, chosen: list[str]) -> None:
    assert resolve_policy(policy).select(MODEL) == chosen


# --- YAML ---


class Strategy:
    """Stands for the strategy: takes the argument as it does."""

    def __init__(self, auto_wrap_policy: PolicyLike = "auto") -> None:
        """Keeps the policy.

        Args:
            auto_wrap_policy: Chooses the units.
        """
        self.policy = resolve_policy(auto_wrap_policy)


def policy_object(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"shardeddp.wrap.{name}", "init_args": init_args}


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("auto", AutoPolicy),
        (None, SingleUnitPolicy),
        ("torch.nn.Linear", ClassPolicy),
        (["torch.nn.Linear", f"{__name__}.Block", "Conv2d"], ClassPolicy),
        (f"{__name__}.is_block", PredicatePolicy),
        (policy_object("AutoPolicy", min_numel=100, max_fraction=0.25), AutoPolicy),
        (policy_object("ClassPolicy", classes=["torch.nn.Linear", "Block"]), ClassPolicy),
        (policy_object("NamePolicy", names=["layers.*"]), NamePolicy),
        (policy_object("PredicatePolicy", predicate=f"{__name__}.is_block"), PredicatePolicy),
        (policy_object("SizePolicy", min_numel=1000), SizePolicy),
        ({"class_path": "shardeddp.wrap.SingleUnitPolicy"}, SingleUnitPolicy),
    ],
)
def test_every_policy_can_be_written_in_yaml(written: object, kind: type[Policy]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Strategy, "strategy")
    config = parser.parse_string(json.dumps({"strategy": {"auto_wrap_policy": written}}))
    assert type(parser.instantiate_classes(config).strategy.policy) is kind


def test_the_arguments_of_a_policy_arrive_from_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Strategy, "strategy")
    written = {"strategy": {"auto_wrap_policy": policy_object("AutoPolicy", max_fraction=0.25)}}
    policy = parser.instantiate_classes(parser.parse_string(json.dumps(written))).strategy.policy
    assert repr(policy) == "AutoPolicy(min_numel=None, max_fraction=0.25)"
