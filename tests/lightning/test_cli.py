"""The strategy and its arguments in every spelling that YAML and the command line have for them."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardeddp import (
    ActivationCheckpointing,
    AutoPolicy,
    ClassPolicy,
    CPUOffload,
    MixedPrecision,
    NamePolicy,
    SizePolicy,
)
from shardeddp.config import choose_sharding, find_sharding
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES
from shardeddp.wrap.policy import PredicatePolicy, SingleUnitPolicy
from support.command_line import STRATEGY, strategy_of, write
from support.tasks import Block, TinyGpt

pytestmark = pytest.mark.timeout(60)


def is_block(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


# -- ways to name the strategy


@pytest.mark.parametrize("name", ["shardeddp.ShardedDP", "ShardedDP", "sharded_dp", "SHARDED_DP"])
def test_the_bare_name_is_enough(name: str) -> None:
    assert strategy_of(f"{STRATEGY}={name}").options.sharding == find_sharding("full_shard")


@pytest.mark.parametrize("name", SHARDING_STRATEGIES)
def test_each_sharding_strategy_has_a_name_on_the_command_line(name: str) -> None:
    assert strategy_of(f"{STRATEGY}=sharded_dp_{name}").options.sharding == find_sharding(name)


def test_options_follow_the_class_on_the_command_line() -> None:
    strategy = strategy_of(
        f"{STRATEGY}=shardeddp.ShardedDP",
        f"{STRATEGY}.sharding_strategy=Hybrid_Shard",
        f"{STRATEGY}.shard_size=2",
        f"{STRATEGY}.forward_prefetch=3",
        f"{STRATEGY}.auto_wrap_policy=null",
    )
    assert strategy.options.sharding.shard_size == 2
    assert strategy.options.forward_prefetch == 3
    assert isinstance(strategy.options.auto_wrap_policy, SingleUnitPolicy)


def test_every_plain_argument_can_be_written_in_yaml(tmp_path: Path) -> None:
    strategy = strategy_of(
        write(
            tmp_path,
            {
                "sharding_strategy": "hybrid_shard",
                "shard_size": 1,
                "auto_wrap_policy": "auto",
                "forward_prefetch": 0,
                "backward_prefetch": 2,
                "reduce_every_backward": False,
                "process_group_backend": "gloo",
                "timeout": 120,
                "start_method": "spawn",
            },
        )
    )
    assert (
        strategy.options.sharding.shard_size,
        strategy.options.sharding.reduce_every_backward,
    ) == (1, False)
    assert (strategy.options.forward_prefetch, strategy.options.backward_prefetch) == (0, 2)
    assert strategy.options.timeout == timedelta(minutes=2)


@pytest.mark.loop(1)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (90, timedelta(seconds=90)),
        (0.5, timedelta(seconds=0.5)),
        ("0:10:00", timedelta(minutes=10)),
        ("1 day, 0:00:00", timedelta(days=1)),
    ],
)
def test_the_timeout_is_a_number_of_seconds_or_a_duration(
    tmp_path: Path, value: Any, expected: timedelta
) -> None:
    assert strategy_of(write(tmp_path, {"timeout": value})).options.timeout == expected
    assert (
        strategy_of(
            f"{STRATEGY}=shardeddp.ShardedDP", f"{STRATEGY}.timeout={value}"
        ).options.timeout
        == expected
    )


# -- policies


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", AutoPolicy()),
        (None, SingleUnitPolicy()),
        ("support.tasks.Block", ClassPolicy([Block])),
        (["support.tasks.Block", "torch.nn.Linear"], ClassPolicy([Block, nn.Linear])),
        (
            {"class_path": "shardeddp.SizePolicy", "init_args": {"min_numel": 1000}},
            SizePolicy(min_numel=1000),
        ),
        (
            {"class_path": "shardeddp.NamePolicy", "init_args": {"names": ["blocks.*"]}},
            NamePolicy(names=["blocks.*"]),
        ),
        (f"{__name__}.is_block", PredicatePolicy(is_block)),
    ],
)
def test_a_policy_can_be_written_in_yaml(tmp_path: Path, value: Any, expected: Any) -> None:
    policy = strategy_of(write(tmp_path, {"auto_wrap_policy": value})).options.auto_wrap_policy
    assert type(policy) is type(expected)
    assert policy.select(TinyGpt()) == expected.select(TinyGpt())


def test_a_policy_that_chooses_nothing_would_be_noticed() -> None:
    assert len(ClassPolicy([Block]).select(TinyGpt())) == 3


# -- what makes a model fit


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("bf16", MixedPrecision(param_dtype="bf16")),
        (
            {"param_dtype": "bfloat16", "reduce_dtype": "float32", "keep_fp32": ["LayerNorm"]},
            MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", keep_fp32=["LayerNorm"]),
        ),
        (
            {"class_path": "shardeddp.MixedPrecision", "init_args": {"reduce_dtype": "bf16"}},
            MixedPrecision(reduce_dtype="bf16"),
        ),
    ],
)
def test_mixed_precision_can_be_written_in_yaml(
    tmp_path: Path, value: Any, expected: object
) -> None:
    assert (
        strategy_of(write(tmp_path, {"mixed_precision": value})).options.mixed_precision == expected
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, ActivationCheckpointing()),
        ("auto", ActivationCheckpointing()),
        ({"modules": "auto", "every": 2}, ActivationCheckpointing(every=2)),
        (
            {
                "class_path": "shardeddp.ActivationCheckpointing",
                "init_args": {"save_ops": ["matmul"]},
            },
            ActivationCheckpointing(save_ops=["matmul"]),
        ),
    ],
)
def test_activation_checkpointing_can_be_written_in_yaml(
    tmp_path: Path, value: Any, expected: Any
) -> None:
    found = strategy_of(
        write(tmp_path, {"activation_checkpointing": value})
    ).options.activation_checkpointing
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.every, list(found.save_ops)) == (expected.every, list(expected.save_ops))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, CPUOffload(params=True, optimizer=True)),
        (False, CPUOffload()),
        ({"optimizer": True}, CPUOffload(optimizer=True)),
        (
            {"class_path": "shardeddp.CPUOffload", "init_args": {"params": True}},
            CPUOffload(params=True),
        ),
    ],
)
def test_offload_can_be_written_in_yaml(tmp_path: Path, value: Any, expected: CPUOffload) -> None:
    strategy = strategy_of(write(tmp_path, {"cpu_offload": value}))
    assert strategy.options.cpu_offload == expected
    assert strategy.options.sharding.offload_params == expected.params


@pytest.mark.parametrize("value", [True, False, 2, None])
def test_resharding_is_a_choice_or_a_number_of_ranks(tmp_path: Path, value: Any) -> None:
    found = strategy_of(write(tmp_path, {"reshard_after_forward": value})).options.sharding
    assert found == choose_sharding("full_shard", reshard_after_forward=value)
    assert found.regather_size == (2 if value == 2 else None)


def test_options_of_a_group_follow_it_on_the_command_line() -> None:
    strategy = strategy_of(
        f"{STRATEGY}=shardeddp.ShardedDP",
        f"{STRATEGY}.mixed_precision=bf16",
        f"{STRATEGY}.cpu_offload.optimizer=true",
        f"{STRATEGY}.activation_checkpointing=auto",
    )
    assert strategy.options.mixed_precision == MixedPrecision(param_dtype="bf16")
    assert strategy.options.cpu_offload == CPUOffload(optimizer=True)
    assert strategy.options.activation_checkpointing is not None
