"""Every argument of ShardedDP can be written in YAML and on the command line, and is explained there."""

import inspect
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import nn

from shardeddp import (
    ActivationCheckpointing,
    AutoPolicy,
    ClassPolicy,
    CPUOffload,
    MixedPrecision,
    NamePolicy,
    ShardedDP,
    SizePolicy,
)
from shardeddp.plan.placement import PLACEMENTS, choose_placement, find_placement
from shardeddp.wrap.policy import PredicatePolicy, SingleUnitPolicy
from support.tasks import Block, TinyGpt

pytestmark = pytest.mark.timeout(60)

STRATEGY = "--trainer.strategy"


def is_block(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


def command_line(*arguments: str) -> LightningCLI:
    """What a script with a LightningCLI does, without training."""
    trainer = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    with mock.patch.object(sys, "argv", ["script.py", *trainer, *arguments]):
        return LightningCLI(TinyGpt, run=False, seed_everything_default=False, save_config_callback=None)


def strategy_of(*arguments: str) -> ShardedDP:
    strategy = command_line(*arguments).trainer.strategy
    assert isinstance(strategy, ShardedDP)
    return strategy


def write(folder: Path, init_args: dict[str, Any]) -> str:
    """A configuration file."""
    path = folder / "config.yaml"
    strategy = {"class_path": "shardeddp.ShardedDP", "init_args": init_args}
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return f"--config={path}"


# -- ways to name the strategy


@pytest.mark.parametrize("name", ["shardeddp.ShardedDP", "ShardedDP", "sharded_dp", "SHARDED_DP"])
def test_the_bare_name_is_enough(name: str) -> None:
    assert strategy_of(f"{STRATEGY}={name}").placement == find_placement("full_shard")


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_sharding_strategy_has_a_name_on_the_command_line(name: str) -> None:
    assert strategy_of(f"{STRATEGY}=sharded_dp_{name}").placement == find_placement(name)


def test_options_follow_the_class_on_the_command_line() -> None:
    strategy = strategy_of(
        f"{STRATEGY}=shardeddp.ShardedDP",
        f"{STRATEGY}.sharding_strategy=Hybrid_Shard",
        f"{STRATEGY}.shard_size=2",
        f"{STRATEGY}.forward_prefetch=3",
        f"{STRATEGY}.auto_wrap_policy=null",
    )
    assert strategy.placement.shard_size == 2
    assert strategy.prefetch.forward == 3
    assert isinstance(strategy.policy, SingleUnitPolicy)


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
    assert (strategy.placement.shard_size, strategy.placement.reduce_every_backward) == (1, False)
    assert (strategy.prefetch.forward, strategy.prefetch.backward) == (0, 2)
    assert strategy.timeout == timedelta(minutes=2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (90, timedelta(seconds=90)),
        (0.5, timedelta(seconds=0.5)),
        ("0:10:00", timedelta(minutes=10)),
        ("1 day, 0:00:00", timedelta(days=1)),
    ],
)
def test_the_timeout_is_a_number_of_seconds_or_a_duration(tmp_path: Path, value: Any, expected: timedelta) -> None:
    assert strategy_of(write(tmp_path, {"timeout": value})).timeout == expected
    assert strategy_of(f"{STRATEGY}=shardeddp.ShardedDP", f"{STRATEGY}.timeout={value}").timeout == expected


# -- policies


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", AutoPolicy()),
        (None, SingleUnitPolicy()),
        ("support.tasks.Block", ClassPolicy([Block])),
        (["support.tasks.Block", "torch.nn.Linear"], ClassPolicy([Block, nn.Linear])),
        ({"class_path": "shardeddp.SizePolicy", "init_args": {"min_numel": 1000}}, SizePolicy(min_numel=1000)),
        ({"class_path": "shardeddp.NamePolicy", "init_args": {"names": ["blocks.*"]}}, NamePolicy(names=["blocks.*"])),
        (f"{__name__}.is_block", PredicatePolicy(is_block)),
    ],
)
def test_a_policy_can_be_written_in_yaml(tmp_path: Path, value: Any, expected: Any) -> None:
    policy = strategy_of(write(tmp_path, {"auto_wrap_policy": value})).policy
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
def test_mixed_precision_can_be_written_in_yaml(tmp_path: Path, value: Any, expected: object) -> None:
    assert strategy_of(write(tmp_path, {"mixed_precision": value})).mixed_precision == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, ActivationCheckpointing()),
        ("auto", ActivationCheckpointing()),
        ({"modules": "auto", "every": 2}, ActivationCheckpointing(every=2)),
        (
            {"class_path": "shardeddp.ActivationCheckpointing", "init_args": {"save_ops": ["matmul"]}},
            ActivationCheckpointing(save_ops=["matmul"]),
        ),
    ],
)
def test_activation_checkpointing_can_be_written_in_yaml(tmp_path: Path, value: Any, expected: Any) -> None:
    found = strategy_of(write(tmp_path, {"activation_checkpointing": value})).activation_checkpointing
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
        ({"class_path": "shardeddp.CPUOffload", "init_args": {"params": True}}, CPUOffload(params=True)),
    ],
)
def test_offload_can_be_written_in_yaml(tmp_path: Path, value: Any, expected: CPUOffload) -> None:
    strategy = strategy_of(write(tmp_path, {"cpu_offload": value}))
    assert strategy.offload == expected
    assert strategy.placement.offload_params == expected.params


@pytest.mark.parametrize("value", [True, False, 2, None])
def test_resharding_is_a_choice_or_a_number_of_ranks(tmp_path: Path, value: Any) -> None:
    found = strategy_of(write(tmp_path, {"reshard_after_forward": value})).placement
    assert found == choose_placement("full_shard", reshard_after_forward=value)
    assert found.regather_size == (2 if value == 2 else None)


def test_options_of_a_group_follow_it_on_the_command_line() -> None:
    strategy = strategy_of(
        f"{STRATEGY}=shardeddp.ShardedDP",
        f"{STRATEGY}.mixed_precision=bf16",
        f"{STRATEGY}.cpu_offload.optimizer=true",
        f"{STRATEGY}.activation_checkpointing=auto",
    )
    assert strategy.mixed_precision == MixedPrecision(param_dtype="bf16")
    assert strategy.offload == CPUOffload(optimizer=True)
    assert strategy.activation_checkpointing is not None


# -- errors


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command line ends with."""
    with pytest.raises(SystemExit) as ended:
        command_line(*arguments)
    assert ended.value.code != 0
    return capsys.readouterr().err


def test_an_unknown_option_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "shardsize" in refusal(capsys, write(tmp_path, {"shardsize": 2}))
    assert "shardsize" in refusal(capsys, f"{STRATEGY}=shardeddp.ShardedDP", f"{STRATEGY}.shardsize=2")


@pytest.mark.parametrize(("option", "value"), [("shard_size", "two"), ("start_method", "thread"), ("timeout", "soon")])
def test_a_value_of_another_type_is_refused_with_the_name_of_its_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, value: str
) -> None:
    message = refusal(capsys, write(tmp_path, {option: value}))
    assert option in message
    assert value in message


def test_a_wrong_name_for_the_sharding_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'full_shard'"):
        command_line(write(tmp_path, {"sharding_strategy": "ful_shard"}))


# -- help and configuration


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line(*arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_argument_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"\s+", " ", printed(capsys, f"{STRATEGY}.help=shardeddp.ShardedDP"))
    documented = inspect.getdoc(ShardedDP) or ""
    names = [name for name in inspect.signature(ShardedDP).parameters]
    assert "sharding_strategy" in names
    for name in names:
        (meaning,) = re.findall(rf"^    {name}: (.*)$", documented, re.MULTILINE)
        assert f" {STRATEGY}.{name} " in text, name
        assert meaning.split(":")[0].split(";")[0].split(",")[0] in text, f"{name}: {meaning}"


@pytest.mark.parametrize(
    "init_args",
    [
        {},
        {"sharding_strategy": "shard_grad_op", "timeout": "0:10:00", "auto_wrap_policy": ["support.tasks.Block"]},
        {"auto_wrap_policy": None, "timeout": 30.0, "reduce_every_backward": True},
        {"auto_wrap_policy": {"class_path": "shardeddp.SizePolicy", "init_args": {"min_numel": 1000}}},
        {
            "mixed_precision": {"param_dtype": "bf16"},
            "activation_checkpointing": {"every": 2},
            "cpu_offload": {"optimizer": True},
        },
    ],
)
def test_the_printed_configuration_makes_the_same_strategy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, init_args: dict[str, Any]
) -> None:
    first = write(tmp_path, init_args)
    configuration = printed(capsys, first, "--print_config")
    (tmp_path / "printed.yaml").write_text(configuration)
    again = printed(capsys, f"--config={tmp_path / 'printed.yaml'}", "--print_config")
    assert again == configuration
    before, after = strategy_of(first), strategy_of(f"--config={tmp_path / 'printed.yaml'}")
    assert (after.placement, after.prefetch, after.timeout) == (before.placement, before.prefetch, before.timeout)
    assert (after.mixed_precision, after.offload) == (before.mixed_precision, before.offload)
    assert type(after.policy) is type(before.policy)
    assert after.policy.select(TinyGpt()) == before.policy.select(TinyGpt())
    assert set(init_args) <= set(yaml.safe_load(configuration)["trainer"]["strategy"]["init_args"])
