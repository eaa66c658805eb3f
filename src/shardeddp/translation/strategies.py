"""Strategies of Lightning by name: their rules, and the translation of one of them as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardeddp.translation.deepspeed import DEEPSPEED, drop_unread
from shardeddp.translation.rules import Rule, Translation, apply_rules
from shardeddp.translation.torch_strategies import DDP, FSDP, MODEL_PARALLEL

RULES: dict[str, dict[str, Rule]] = {
    "FSDPStrategy": FSDP,
    "ModelParallelStrategy": MODEL_PARALLEL,
    "DeepSpeedStrategy": DEEPSPEED,
    "DDPStrategy": DDP,
}

_OFFLOAD_3 = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}

NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}),
    "deepspeed_stage_1": ("DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_1_offload": ("DeepSpeedStrategy", {"stage": 1, "offload_optimizer": True}),
    "deepspeed_stage_2": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_3_offload": ("DeepSpeedStrategy", _OFFLOAD_3),
    "deepspeed_stage_3_offload_nvme": (
        "DeepSpeedStrategy",
        {**_OFFLOAD_3, "offload_params_device": "nvme", "offload_optimizer_device": "nvme"},
    ),
    "ddp": ("DDPStrategy", {}),
    "ddp_spawn": ("DDPStrategy", {"start_method": "spawn"}),
    "ddp_fork": ("DDPStrategy", {"start_method": "fork"}),
    "ddp_notebook": ("DDPStrategy", {"start_method": "fork"}),
    "ddp_find_unused_parameters_true": ("DDPStrategy", {"find_unused_parameters": True}),
    "ddp_find_unused_parameters_false": ("DDPStrategy", {}),
}
"""Class and arguments of the strategy names that Lightning's Trainer accepts."""

_POSITIONS: dict[str, tuple[str, ...]] = {
    "FSDPStrategy": ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io",
                     "precision_plugin", "process_group_backend", "timeout", "cpu_offload",
                     "mixed_precision", "auto_wrap_policy"),
    "ModelParallelStrategy": ("data_parallel_size", "tensor_parallel_size",
                              "save_distributed_checkpoint", "process_group_backend", "timeout"),
    "DeepSpeedStrategy": ("accelerator", "zero_optimization", "stage"),
    "DDPStrategy": ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
}  # fmt: skip


def translate(
    strategy: str, arguments: Mapping[str, Any], positional: Sequence[Any] = ()
) -> Translation:
    """Translate the arguments of another Lightning strategy to those of ShardedDP.

    Arguments were read from a file, or converted by ``described``.
    """
    made = Translation()
    places = _POSITIONS[strategy]
    given = dict(zip(places, positional, strict=False))
    for place, extra in enumerate(positional[len(places) :], len(places) + 1):
        made.lose(repr(extra), f"argument {place} of {strategy}: give it by name")
    given |= arguments
    made.options["sharding_strategy"] = {
        "DeepSpeedStrategy": "shard_grad_op",
        "DDPStrategy": "no_shard",
    }.get(strategy, "full_shard")
    if strategy == "DeepSpeedStrategy":
        drop_unread(made, given)
    apply_rules(made, RULES[strategy], given)
    _say_defaults(made, strategy, given)
    return made


def translate_config(config: Mapping[str, Any]) -> Translation:
    """Translate the content of a DeepSpeed JSON file to arguments of ShardedDP."""
    made = Translation()
    DEEPSPEED["config"].apply(made, "config", config)
    _say_defaults(made, "DeepSpeedStrategy", {})
    return made


def _say_defaults(made: Translation, strategy: str, given: Mapping[str, Any]) -> None:
    """Add notes on defaults that differ from those of the other strategy."""
    if strategy == "DeepSpeedStrategy":
        made.note("precision", "DeepSpeed keeps float32 master weights and steps on them whatever "
                               "the precision; with ShardedDP 'bf16-mixed' or '16-mixed' does "
                               "that, and 'bf16-true' steps on bfloat16 itself")  # fmt: skip
        made.note("checkpoints", "those of DeepSpeed are not read: make one file of the last with "
                                 "its zero_to_fp32.py, and load that as a state_dict")  # fmt: skip
    if strategy == "ModelParallelStrategy":
        made.note("configure_model", "take fully_shard(...) out of it, and parallelize_module(...) "
                                     "where tensor_parallel_size is 1: auto_wrap_policy says "
                                     "which modules are units")  # fmt: skip
        if "tensor_parallel_size" not in given:
            MODEL_PARALLEL["tensor_parallel_size"].apply(made, "tensor_parallel_size", "auto")
        if "save_distributed_checkpoint" not in given:
            made.options["state_dict_type"] = "sharded"
    if strategy == "FSDPStrategy":
        if "auto_wrap_policy" not in given:
            made.note("auto_wrap_policy", "without one FSDP gathers the whole model at once; "
                                          "'auto' finds its repeated blocks")  # fmt: skip
        if not {"mixed_precision", "precision_plugin"} & given.keys():
            made.note("precision", "with 'bf16-mixed' FSDP reduces gradients in bfloat16, "
                                   "ShardedDP in float32")  # fmt: skip
    if "state_dict_type" not in made.options and strategy != "ModelParallelStrategy":
        theirs = "a directory" if strategy == "DeepSpeedStrategy" else "one file"
        made.note("state_dict_type", f"a checkpoint of {strategy} is {theirs}; of ShardedDP one file "
                                     f"up to 4 GB, a directory of shards beyond: 'full' or "
                                     f"'sharded' decides")  # fmt: skip
    if given.get("timeout") is None:
        made.note("timeout", f"ranks of ShardedDP wait 600 s for each other, of {strategy} 1800 s: "
                             f"timeout=1800.0 keeps that")  # fmt: skip
    complete(made)


def complete(made: Translation) -> None:
    """Add the sharding strategy that the options imply, and remove those that do not go with it."""
    if "shard_size" in made.options:
        made.options.setdefault("sharding_strategy", "hybrid_shard")
    whole = made.options.get("sharding_strategy") in ("no_shard", "shard_optimizer")
    if whole and made.options.pop("reshard_after_forward", None) is not None:
        made.lose("reshard_after_forward", "parameters are whole all the time with this strategy")
