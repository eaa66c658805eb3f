"""What other strategies take is translated, or refused with the line to write."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import CPUOffload as FSDPOffload
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from shardeddp import ConfigurationError, CPUOffload, MixedPrecision, ShardedDP, SizePolicy
from shardeddp.plan.sharding_strategy import Reshard, ShardSize
from shardeddp.translation.calls import Call, Expression, described, python_code
from shardeddp.translation.strategies import RULES, translate
from shardeddp.wrap import resolve_policy


@pytest.mark.parametrize(
    ("value", "size", "reshard"),
    [
        (ShardingStrategy.FULL_SHARD, ShardSize.WORLD, Reshard.AFTER_FORWARD),
        (ShardingStrategy.SHARD_GRAD_OP, ShardSize.WORLD, Reshard.AFTER_BACKWARD),
        (ShardingStrategy.NO_SHARD, 1, Reshard.NEVER),
        (ShardingStrategy._HYBRID_SHARD_ZERO2, ShardSize.NODE, Reshard.AFTER_BACKWARD),
        ("HYBRID_SHARD_ZERO2", ShardSize.NODE, Reshard.AFTER_BACKWARD),
        ("zero3", ShardSize.WORLD, Reshard.AFTER_FORWARD),
        ("zero1", ShardSize.WORLD, Reshard.NEVER),
        ("hsdp", ShardSize.NODE, Reshard.AFTER_FORWARD),
    ],
)
def test_sharding_strategies_of_others_are_known(
    value: Any, size: ShardSize | int, reshard: Reshard
) -> None:
    sharding = ShardedDP(value).options.sharding
    assert (sharding.shard_size, sharding.reshard) == (size, reshard)


@pytest.mark.parametrize("value", [*BackwardPrefetch, "BACKWARD_PRE"])
def test_the_backward_prefetch_of_fsdp_is_one_unit(value: Any) -> None:
    assert ShardedDP(backward_prefetch=value).options.backward_prefetch == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (FSDPOffload(offload_params=True), CPUOffload(params=True, optimizer=True)),
        (FSDPOffload(offload_params=False), CPUOffload()),
        (CPUOffloadPolicy(), CPUOffload(params=True, optimizer=True)),
        (OffloadPolicy(), CPUOffload()),
    ],
)
def test_offload_objects_of_fsdp_are_known(value: Any, expected: CPUOffload) -> None:
    assert ShardedDP(cpu_offload=value).options.cpu_offload == expected


@pytest.mark.parametrize("value", [{}, CPUOffload()])
def test_an_offload_of_nothing_is_none(value: Any) -> None:
    assert ShardedDP(cpu_offload=value).options.cpu_offload == CPUOffload()


@pytest.mark.parametrize("value", [1, "params", [CPUOffload()]])
def test_an_offload_that_is_none_of_its_forms_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="optimizer: true"):
        ShardedDP(cpu_offload=value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            FSDPMixedPrecision(param_dtype=torch.bfloat16),
            MixedPrecision(param_dtype="bfloat16", reduce_dtype="bfloat16"),
        ),
        (
            FSDPMixedPrecision(cast_root_forward_inputs=False),
            MixedPrecision(cast_forward_inputs=False),
        ),
        (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
            MixedPrecision(
                param_dtype="bfloat16", reduce_dtype="float32", cast_forward_inputs=False
            ),
        ),
    ],
)
def test_mixed_precision_objects_of_fsdp_are_known(value: Any, expected: MixedPrecision) -> None:
    assert ShardedDP(mixed_precision=value).options.mixed_precision == expected


def test_what_mixed_precision_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="keep_low_precision_grads"):
        ShardedDP(mixed_precision=FSDPMixedPrecision(keep_low_precision_grads=True))


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.Linear}),
        CustomPolicy(is_linear),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
        partial(size_based_auto_wrap_policy, min_num_params=15),
        partial(lambda_auto_wrap_policy, lambda_fn=is_linear),
        always_wrap_policy,
    ],
)
def test_wrap_policies_of_torch_choose_the_same_modules(policy: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert resolve_policy(policy).select(model) == ["0", "1"]


def test_a_wrap_policy_without_its_classes_is_explained() -> None:
    with pytest.raises(ConfigurationError, match="Pass the set of classes"):
        resolve_policy(transformer_auto_wrap_policy)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"use_orig_params": True}, "ShardedDP()"),
        ({"device_mesh": (2, 4)}, "ShardedDP(sharding_strategy='hybrid_shard', shard_size=4)"),
        ({"activation_checkpointing_policy": {nn.Linear}}, "activation_checkpointing={Linear})"),
        ({"stage": 2}, "ShardedDP(sharding_strategy='shard_grad_op')"),
        ({"offload_policy": CPUOffloadPolicy()}, "ShardedDP(cpu_offload=True)"),
        (
            {"shard_size": 2, "limit_all_gathers": False},
            "ShardedDP(shard_size=2, sharding_strategy='hybrid_shard')",
        ),
    ],
)
def test_an_argument_of_another_strategy_is_refused_with_the_line_to_write(
    arguments: dict[str, Any], line: str
) -> None:
    with pytest.raises(TypeError) as refused:
        ShardedDP(**arguments)
    assert str(refused.value).endswith(line)


def test_a_misspelt_argument_of_another_strategy_is_named() -> None:
    with pytest.raises(TypeError, match=r"did you mean limit_all_gathers \(of FSDPStrategy\)"):
        ShardedDP(limit_all_gather=True)
    made = translate("FSDPStrategy", {"limit_all_gather": True})
    assert "did you mean limit_all_gathers?" in made.notes[0].text


@pytest.mark.parametrize("name", ["shard_sise", "SHARD_SIZE"])
def test_a_misspelt_argument_is_named(name: str) -> None:
    with pytest.raises(TypeError, match="did you mean shard_size") as refused:
        ShardedDP("hybrid_shard", **{name: 4})
    line = "ShardedDP(sharding_strategy='hybrid_shard', shard_size=4)"
    assert str(refused.value).endswith(f"The line to write: {line}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device_mesh": 3}, "ShardedDP()"),
        ({"device_mesh": {}}, "ShardedDP()"),
        ({"find_unused_parameters": torch.zeros(2)}, "ShardedDP()"),
        ({"precision": "bf16-mixed"}, "Trainer(precision='bf16-mixed')\nThe line"),
        ({"stage": 0, "zero_hpz_partition_size": 4}, "ShardedDP(sharding_strategy='no_shard')"),
        ({"stage": 3, "sharding_strategy": "no_shard"}, "'no_shard' is given as well: keep one"),
        ({"shard_sise": 4}, "ShardedDP(shard_size=4, sharding_strategy='hybrid_shard')"),
        (
            {
                "device_id": 0,
                "auto_wrap_policy": lambda name, module: True,
                "timeout": timedelta(minutes=3),
            },
            "ShardedDP(timeout=180.0), and your own auto_wrap_policy=",
        ),
        (
            {
                "device_id": 0,
                "sharding_strategy": ShardingStrategy.NO_SHARD,
                "auto_wrap_policy": SizePolicy(5),
            },
            "ShardedDP(sharding_strategy=ShardingStrategy.NO_SHARD, auto_wrap_policy=SizePolicy(min_numel=5))",
        ),
        (
            {"device_id": 0, "mixed_precision": MixedPrecision(param_dtype=torch.float16)},
            "ShardedDP(mixed_precision=MixedPrecision(param_dtype=torch.float16))",
        ),
        (
            {"device_id": 0, "optimizer_scope": {torch.optim.SGD: "element"}},
            "ShardedDP(optimizer_scope={SGD: 'element'})",
        ),
    ],
)
def test_the_line_to_write_can_be_pasted(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as refused:
        ShardedDP(**arguments)
    assert said in str(refused.value)
    assert "..." not in str(refused.value)


OF_LIGHTNING: dict[str, Any] = {
    each.__name__: each
    for each in (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, DDPStrategy)
}


@pytest.mark.parametrize("strategy", RULES)
def test_every_argument_of_every_strategy_has_a_rule(strategy: str) -> None:
    has = set(signature(OF_LIGHTNING[strategy]).parameters)
    if strategy == "FSDPStrategy":
        has |= set(signature(FullyShardedDataParallel).parameters) - {"module"}
        has |= set(signature(fully_shard).parameters) - {"module"}
    if strategy == "DDPStrategy":
        has |= set(signature(nn.parallel.DistributedDataParallel).parameters)
    assert has - {"kwargs"} - set(RULES[strategy]) - NOT_OF_THE_STRATEGY == set()


NOT_OF_THE_STRATEGY = {"module", "device_ids", "output_device", "dim", "process_group"}
"""What Lightning passes to DistributedDataParallel by itself, or does not let users pass."""


def test_what_is_lost_is_said() -> None:
    made = translate("FSDPStrategy", {"ignored_modules": [1], "unheard_of": 2})
    assert made.loses
    assert [note.key for note in made.notes if note.lost] == ["ignored_modules", "unheard_of"]


def test_objects_are_described_by_their_calls() -> None:
    assert repr(described(FSDPOffload(offload_params=True))) == "CPUOffload(offload_params=True)"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (("a", nn.Linear), "('a', Linear,)"),
        ({"a": [1, None]}, "{'a': [1, None]}"),
        (Call(path="m.f", positional=(Expression("x.y"),), arguments={"k": 1.5}), "f(x.y, k=1.5)"),
        (Call(path="f", written="m.f(*a)"), "m.f(*a)"),
    ],
)
def test_values_are_written_as_the_code_that_makes_them(value: Any, code: str) -> None:
    assert python_code(value) == code
    assert python_code(value, quote='"{}"'.format) == code.replace("'", '"')
