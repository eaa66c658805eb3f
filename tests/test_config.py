"""Options of the strategy are taken in every way that is said to work, and refused by name in any other."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from shardeddp import CheckpointOptions, ConfigurationError, CPUOffload, MixedPrecision, ShardedDP
from shardeddp.config import (
    choose_sharding,
    find_sharding,
    option_names,
    parse_options,
    resolve_timeout,
)
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES
from shardeddp.wrap import ClassPolicy, NamePolicy

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (60, timedelta(minutes=1)),
        (0.5, timedelta(seconds=0.5)),
        (timedelta(hours=1), timedelta(hours=1)),
    ],
)
def test_seconds_and_durations_are_taken(value: object, expected: timedelta) -> None:
    assert resolve_timeout(value) == expected


@pytest.mark.parametrize(
    "value", [0, -1, True, None, "60", float("inf"), float("nan"), timedelta(0)]
)
def test_anything_else_is_refused_with_what_to_write(value: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"expected a positive number of seconds or a datetime.timedelta"
    ):
        resolve_timeout(value)


def test_checkpoint_options_may_be_a_mapping_of_their_fields() -> None:
    strategy = ShardedDP(checkpoint_options={"asynchronous": True, "timeout": 5})  # type: ignore[arg-type]
    assert strategy.options.checkpoint_options == CheckpointOptions(asynchronous=True, timeout=5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"checkpoint_options": {"nope": 3}}, "checkpoint_options=.*some of max_file_gb, async"),
        ({"checkpoint_options": "disk"}, "checkpoint_options='disk': expected CheckpointOptions"),
        ({"checkpoint_options": {"cast": "yes"}}, "cast='yes': expected True or False"),
        ({"checkpoint_options": {"timeout": "1"}}, "timeout='1': expected a positive number"),
        ({"checkpoint_options": {"max_file_gb": "4"}}, "max_file_gb='4': expected a number"),
        ({"debug": "no"}, "debug='no': expected True or False"),
        ({"uneven_units": 3}, "uneven_units=3: expected True or False"),
        ({"reduce_every_backward": "x"}, "reduce_every_backward='x': expected True, False or None"),
        ({"reshard_after_forward": "x"}, "reshard_after_forward='x': expected True, False, or a"),
        ({"start_method": "x"}, "start_method='x': expected one of popen, spawn, fork"),
        ({"forward_prefetch": "1"}, "forward_prefetch='1': expected 0"),
        ({"backward_prefetch": True}, "backward_prefetch=True: expected 0"),
        ({"backward_prefetch": 1.5}, "backward_prefetch=1.5: expected 0"),
    ],
)
def test_options_of_other_types_are_refused_by_name(options: Any, expected: str) -> None:
    with pytest.raises((ConfigurationError, ValueError), match=expected):
        ShardedDP(**options)


@pytest.mark.parametrize(
    "options",
    [
        *({"sharding_strategy": "hybrid_shard", "shard_size": it} for it in (-4, 0, 1.5, True)),
        {"timeout": 1e300},
        {"checkpoint_options": {"timeout": 1e14}},
        {"cpu_offload": {"params": "false"}},
        {"mixed_precision": {"param_dtype": "bf16", "cast_forward_inputs": "no"}},
        {"process_group_backend": 3},
        {"tensor_parallel_size": "2"},
        {"expert_parallel_size": 0},
        {
            "activation_checkpointing": {
                "class_path": "shardeddp.wrap.NamePolicy",
                "init_args": 3,
            }
        },
    ],
    ids=str,
)
def test_values_of_another_kind_are_refused_by_the_name_of_their_option(
    options: dict[str, Any],
) -> None:
    inner = {
        "activation_checkpointing": "ActivationCheckpointing",
        "checkpoint_options": "timeout=",
        "cpu_offload": "params='false'",
        "mixed_precision": "cast_forward_inputs='no'",
    }
    name = inner.get([*options][-1], [*options][-1])
    with pytest.raises(ConfigurationError, match=name):
        ShardedDP(**options)


def test_what_users_write_is_parsed_to_the_values_that_are_read() -> None:
    options = parse_options(
        {
            "sharding_strategy": "HYBRID_SHARD_ZERO2",
            "auto_wrap_policy": ["Block"],
            "mixed_precision": "bf16",
            "cpu_offload": True,
            "activation_checkpointing": "Block",
            "forward_prefetch": True,
            "timeout": 1,
            "plan_only": "a100-80",
        }
    )
    expected = {
        "sharding_strategy": "hybrid_shard",
        "reshard_after_forward": False,
        "auto_wrap_policy": ClassPolicy(["Block"]),
        "mixed_precision": MixedPrecision(param_dtype="bf16"),
        "cpu_offload": CPUOffload(params=True, optimizer=True),
        "forward_prefetch": 1,
        "timeout": timedelta(seconds=1),
        "plan_only": "A100-80",
    }
    assert {name: getattr(options, name) for name in expected} == expected
    assert options.activation_checkpointing is not None
    assert options.activation_checkpointing.modules == ClassPolicy(["Block"])
    assert vars(pickle.loads(pickle.dumps(options))) == vars(options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mixed_precision", "bf16"),
        ("timeout", 5),
        ("cpu_offload", True),
        ("auto_wrap_policy", {"Block"}),
        ("forward_prefetch", True),
        ("activation_checkpointing", "auto"),
        ("sharding_strategy", "ZeRO1"),
    ],
)
def test_options_that_are_replaced_are_resolved_like_those_of_users(name: str, value: Any) -> None:
    replaced, parsed = replace(parse_options({}), **{name: value}), parse_options({name: value})
    for each in ("sharding", "candidates", name):
        assert getattr(replaced, each) == getattr(parsed, each), each
    if name != "timeout":
        assert not replaced.shards_like(parse_options({})) or name == "forward_prefetch"
        assert replaced.shards_like(parsed)


REPLACED: dict[str, tuple[Any, bool]] = {
    "sharding_strategy": ("shard_grad_op", False),
    "shard_size": (None, True),
    "auto_wrap_policy": (["Block"], False),
    "mixed_precision": ("bf16", False),
    "activation_checkpointing": ("auto", False),
    "cpu_offload": (True, False),
    "reshard_after_forward": (False, False),
    "optimizer_shard": ("group", True),
    "optimizer_scope": ({"Lion": "element"}, True),
    "tensor_parallel_size": (2, False),
    "tensor_parallel_plan": ({"up": "colwise"}, False),
    "expert_parallel_size": (2, False),
    "experts": (["Expert"], False),
    "forward_prefetch": (2, False),
    "backward_prefetch": (2, False),
    "reduce_every_backward": (False, False),
    "uneven_batches": ("min", True),
    "uneven_units": (True, False),
    "state_dict_type": ("full", True),
    "checkpoint_options": (CheckpointOptions(asynchronous=True), True),
    "process_group_backend": ("gloo", True),
    "timeout": (5, True),
    "debug": (True, False),
    "plan_only": (True, True),
    "start_method": ("fork", True),
}
"""Another value of each option, and whether a model that is sharded already stays as it is."""


def test_options_say_whether_a_model_is_to_be_sharded_anew() -> None:
    assert {*REPLACED} == {*option_names()}
    beside = {
        "tensor_parallel_plan": {"tensor_parallel_size": 2},
        "experts": {"expert_parallel_size": 2},
        "expert_parallel_size": {"experts": ["Expert"]},
    }
    for name, (value, stays) in REPLACED.items():
        others = beside.get(name, {})
        if name == "experts":
            before = parse_options({**others, name: ["Layer"]})
        elif name == "expert_parallel_size":
            before = parse_options({})
        else:
            before = parse_options(others)
        assert before.shards_like(parse_options({**others, name: value})) == stays, name


def test_derived_options_follow_the_others_and_cannot_be_given() -> None:
    offloaded = replace(parse_options({}), cpu_offload=CPUOffload(params=True))
    assert offloaded.sharding.offload_params
    with pytest.raises(ValueError, match="sharding"):
        replace(offloaded, sharding=parse_options({}).sharding)


def test_a_policy_may_have_any_equality() -> None:
    class Odd(NamePolicy):
        def __eq__(self, other: object) -> Any:
            return torch.zeros(2)

        __hash__ = NamePolicy.__hash__

    policy = Odd(["*"])
    assert parse_options({"auto_wrap_policy": policy}).auto_wrap_policy is policy


def test_options_with_another_sharding_keep_all_others() -> None:
    experts = {"experts": "layers.*.experts", "expert_parallel_size": 2, "timeout": 5}
    sharded = {"sharding_strategy": "hsdp", "shard_size": 2, "reduce_every_backward": False}
    former = parse_options({**experts, **sharded})
    options = former.with_sharding("ZeRO2", None)
    assert options.sharding == choose_sharding("shard_grad_op", reduce_every_backward=False)
    assert list(options.candidates) == [options.sharding_strategy] == ["shard_grad_op"]
    assert options.shard_size is None
    assert options.experts == NamePolicy(["layers.*.experts"])
    assert options.timeout == timedelta(seconds=5)
    with pytest.raises(ConfigurationError, match="shard_size=2 goes with sharding_strategy='hybr"):
        former.with_sharding("full_shard", 2)


@pytest.mark.parametrize(
    "spelling", [str.lower, str.upper, str.title, str.swapcase, str.capitalize]
)
@pytest.mark.parametrize("name", SHARDING_STRATEGIES)
def test_a_name_is_found_in_any_case(name: str, spelling: Callable[[str], str]) -> None:
    assert find_sharding(spelling(name)) is SHARDING_STRATEGIES[name]


@pytest.mark.parametrize("name", SHARDING_STRATEGIES)
def test_a_name_that_lost_any_one_letter_is_recognised(name: str) -> None:
    for index in range(len(name)):
        typo = name[:index] + name[index + 1 :]
        with pytest.raises(ValueError, match=f"did you mean '{name}'"):
            find_sharding(typo)


@pytest.mark.parametrize(
    ("found", "nearest"),
    [
        ("FULLSHARD", "full_shard"),
        ("full-shard", "full_shard"),
        ("hybrid", "hybrid_shard"),
        ("grad_op", "shard_grad_op"),
        ("SHARD_OPTIM", "shard_optimizer"),
        ("noshard", "no_shard"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one_in_any_case(found: str, nearest: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"sharding_strategy='{found}' is not known; .*; did you mean '{nearest}'\?",
    ):
        find_sharding(found)


@pytest.mark.parametrize("found", ["", "zzz", "42"])
def test_a_name_that_is_near_to_none_gets_the_whole_list_and_no_guess(found: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"'{found}' is not known; expected one of {', '.join(SHARDING_STRATEGIES)}",
    ) as caught:
        find_sharding(found)
    assert "did you mean" not in str(caught.value)
