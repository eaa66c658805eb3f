"""Accelerate: its configuration file, for FSDP, DeepSpeed or DistributedDataParallel."""

from __future__ import annotations

# ruff: noqa: SIM905  # tables of words are read as text
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from shardeddp.translation.calls import Call
from shardeddp.translation.deepspeed import with_config
from shardeddp.translation.rules import Translation, not_known
from shardeddp.translation.strategies import translate, translate_config

_UNNEEDED = (
    "compute_environment main_training_function rdzv_backend same_network tpu_env tpu_use_cluster "
    "tpu_use_sudo debug enable_cpu_affinity machine_rank main_process_port downcast_bf16"
).split()

_LAUNCH = (
    "use_cpu num_machines num_processes main_process_ip mixed_precision distributed_type gpu_ids "
    "deepspeed_config fsdp_config dynamo_config parallelism_config"
).split()

_OF_AXES = (
    "cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable "
    "sp_attn_implementation"
).split()

_OF_FSDP = {"offload_params": "cpu_offload", "backward_prefetch_policy": "backward_prefetch"}

_OF_ACCELERATE: dict[str, dict[Any, Any]] = {
    "state_dict_type": {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"},
    "activation_checkpointing": {True: "auto", False: None},
}

_WRAPPED_BY = {
    "TRANSFORMER_BASED_WRAP": "transformer_layer_cls_to_wrap",
    "SIZE_BASED_WRAP": "min_num_params",
    "NO_WRAP": None,
}
"""Key that each kind of wrap policy reads."""

_OF_DEEPSPEED_LAUNCHER = (
    "zero3_init_flag deepspeed_multinode_launcher deepspeed_hostfile offload_optimizer_nvme_path "
    "offload_param_nvme_path"
).split()

_OF_ZERO = {
    "zero_stage": "stage",
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
    "zero3_save_16bit_model": "stage3_gather_16bit_weights_on_model_save",
}


def translate_accelerate(config: Mapping[str, Any], folder: Path) -> tuple[str, Translation]:
    """Translate a configuration of Accelerate; return its ``distributed_type`` and the arguments.

    The path of a DeepSpeed file is resolved from ``folder``, that of the configuration.
    """
    config = _switched(config)
    kind = str(config["distributed_type"] or "NO").upper()
    used = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(kind, "")
    found = Translation()
    axes = _axes(found, _mapping(found, config, "parallelism_config"))
    inner = _mapping(found, config, used)
    if kind == "FSDP":
        given = _fsdp_arguments(found, inner)
        if {"dp_replicate", "dp_shard"} <= axes.keys():
            given["device_mesh"] = axes.pop("dp_replicate"), axes.pop("dp_shard")
        made = translate("FSDPStrategy", given)
    elif kind == "DEEPSPEED":
        made = _deepspeed(found, inner, folder)
    elif kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "NO"):
        made = translate("DDPStrategy", {})
    else:
        made = Translation(options={"sharding_strategy": "full_shard"})
        made.lose("distributed_type", f"{kind} is not read, expected FSDP, DEEPSPEED, MULTI_GPU or "
                                      f"NO: layers are split over ranks by tensor_parallel_size=, "
                                      f"ShardedDP has no pipelines")  # fmt: skip
    for other in ("fsdp_config", "deepspeed_config"):
        if other != used and config.get(other):
            made.note(other, f"Accelerate ignores it: distributed_type is {kind}")
    _set_trainer(made, config)
    _set_axes(made, axes)
    for key in config:
        if key in _UNNEEDED:
            made.unneeded.append(key)
        elif key not in _LAUNCH:
            made.lose(key, not_known(key, _LAUNCH))
    made.notes[:0] = found.notes
    made.unneeded += found.unneeded
    return kind, made


def _switched(value: Any) -> Any:
    """Convert the strings yes, no, true and false in a value to booleans, recursively."""
    if isinstance(value, Mapping):
        return {str(key): _switched(it) for key, it in cast("Mapping[Any, Any]", value).items()}
    words = {"true": True, "yes": True, "false": False, "no": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    """Convert strings and floats of numbers, such as 1e8, to numbers; return others unchanged."""
    try:
        number = float(value) if isinstance(value, (str, float)) else value
        return int(number) if number == int(number) else number
    except (ValueError, OverflowError, TypeError):
        return value


def _mapping(made: Translation, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    made.lose(key, f"{value!r} is not understood: expected a mapping")
    return {}


def _set_trainer(made: Translation, config: Mapping[str, Any]) -> None:
    counts: dict[str, Any] = {}
    for key in ("num_machines", "num_processes"):
        counts[key] = _number(config.get(key, 1))
        if type(counts[key]) is not int or counts[key] < 1:
            made.lose(key, f"{config[key]!r} is not understood: expected a number from 1")
            counts[key] = 1
    made.trainer["num_nodes"] = counts["num_machines"]
    devices, left = divmod(counts["num_processes"], counts["num_machines"])
    made.trainer["devices"] = max(devices, 1)
    if left:
        made.lose("num_processes", f"not the same number on {counts['num_machines']} machines")
    on_host, ids = config.get("use_cpu"), config.get("gpu_ids")
    made.trainer["accelerator"] = "cpu" if on_host is True else "gpu"
    if not isinstance(on_host, (bool, type(None))):
        made.lose("use_cpu", f"{on_host!r} is not understood: expected true or false")
    if ids not in (None, "all"):
        given = cast("list[Any]", ids) if isinstance(ids, list) else str(ids).split(",")
        made.trainer["devices"] = [*map(_number, given)]
        if not all(type(it) is int for it in made.trainer["devices"]):
            made.lose("gpu_ids", f"{ids!r} is not understood: expected numbers, or all")
    precision = config.get("mixed_precision")
    if precision in ("fp16", "bf16"):
        ours = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[precision]
        if made.trainer.setdefault("precision", ours) != ours:
            made.lose("mixed_precision", f"{precision}, and DeepSpeed's configuration says another")
    elif precision:
        made.lose("mixed_precision", f"Lightning has no {precision}: '16-mixed' or 'bf16-mixed'")
    if config.get("main_process_ip"):
        made.note("main_process_ip", "MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment, "
                                     "or torchrun, or SLURM")  # fmt: skip
    if config.get("dynamo_config"):
        made.note("dynamo_config", "torch.compile(module) before Trainer.fit does that")


def _axes(made: Translation, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the axes of Accelerate's ``ParallelismConfig`` with a size above 1, by name."""
    sizes: dict[str, int] = {}
    for key, value in config.items():
        name = key.removeprefix("parallelism_config_")
        ranks = _number(value or 1)
        if name in _OF_AXES:
            made.unneeded.append(key)
        elif name not in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            made.lose(key, "no counterpart is known")
        elif type(ranks) is not int or ranks < 1:
            made.lose(key, f"{value!r} is not understood: expected a number from 1")
        elif ranks > 1:
            sizes[name.removesuffix("_size")] = ranks
    return sizes


def _set_axes(made: Translation, axes: Mapping[str, int]) -> None:
    for axis, ranks in axes.items():
        key = f"parallelism_config_{axis}_size"
        if axis == "tp":
            made.options |= {"tensor_parallel_size": ranks, "tensor_parallel_plan": "auto"}
        elif axis == "dp_replicate" and made.options["sharding_strategy"] == "hybrid_shard":
            made.lose(key, f"{ranks} replicas without dp_shard_size, and 'hybrid_shard': write "
                           f"shard_size=, the number of ranks that share one model")  # fmt: skip
        elif axis == "dp_replicate":
            made.options["sharding_strategy"] = "no_shard"
        elif axis != "dp_shard":
            made.lose(key, f"{ranks} ranks split something else than layers and batches, which "
                           f"ShardedDP does not")  # fmt: skip


def _fsdp_arguments(made: Translation, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of FSDPStrategy; add notes on all other keys to ``made``."""
    given = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    version = given.pop("version", 1)
    arguments: dict[str, Any] = {}
    kind = str(given.pop("auto_wrap_policy", None) or "").upper()
    parts = {it: given.pop(it, None) for it in ("transformer_layer_cls_to_wrap", "min_num_params")}
    classes, size = parts.values()
    if kind not in ("", *_WRAPPED_BY):
        made.lose("fsdp_auto_wrap_policy", f"{kind}: expected one of {', '.join(_WRAPPED_BY)}")
    elif kind == "SIZE_BASED_WRAP":
        least = {"min_num_params": _number(size or 100_000_000)}
        arguments["auto_wrap_policy"] = Call(path="size_based_auto_wrap_policy", arguments=least)
    elif kind == "NO_WRAP":
        arguments["auto_wrap_policy"] = None
    elif classes:
        names = classes.split(",") if isinstance(classes, str) else classes
        arguments["auto_wrap_policy"] = (
            [str(it).strip() for it in cast("list[Any]", names)]
            if isinstance(names, list)
            else names
        )
    for other, value in parts.items():
        if value and _WRAPPED_BY.get(kind, other) != other:
            made.note(f"fsdp_{other}", f"Accelerate ignores it: fsdp_auto_wrap_policy is {kind}")
    for key, value in given.items():
        name = _OF_FSDP.get(key, key)
        if key == "cpu_ram_efficient_loading" or (key == "ignored_modules" and value == ""):
            made.unneeded.append(f"fsdp_{key}")  # configure_model serves cpu_ram_efficient_loading
        elif name in _OF_ACCELERATE and isinstance(value, (str, bool)):
            arguments[name] = _OF_ACCELERATE[name].get(value, value)
        else:
            arguments[name] = value
    if str(version) == "2" and arguments.get("reshard_after_forward") is False:
        arguments.setdefault("sharding_strategy", "SHARD_GRAD_OP")
        arguments.pop("reshard_after_forward")
    return arguments


def _deepspeed(made: Translation, config: Mapping[str, Any], folder: Path) -> Translation:
    file = config.get("deepspeed_config_file")
    zero: dict[str, Any] = {"stage": 2}
    content: dict[str, Any] = {"zero_optimization": zero}
    for key, value in config.items():
        if key in _OF_DEEPSPEED_LAUNCHER:
            made.unneeded.append(key)
        elif key not in (*_OF_ZERO, "gradient_clipping", "gradient_accumulation_steps"):
            if key != "deepspeed_config_file":
                made.lose(key, not_known(key, _OF_ZERO))
        elif file:
            made.note(key, "Accelerate ignores it beside deepspeed_config_file")
        elif key in _OF_ZERO:
            zero[_OF_ZERO[key]] = value
        else:
            content[key] = _number(value)
    if not file:
        return translate_config(content)
    return translate("DeepSpeedStrategy", with_config({"config": file}, folder))
