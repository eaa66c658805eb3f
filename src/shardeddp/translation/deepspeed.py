"""DeepSpeed: the arguments of its strategy, and the configuration in its JSON."""

from __future__ import annotations

# ruff: noqa: SIM905  # tables of words are read as text
import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from shardeddp.errors import ConfigurationError
from shardeddp.translation.calls import Call, Expression, python_code
from shardeddp.translation.rules import (
    UNNEEDED,
    Rule,
    Translation,
    any_value,
    apply_rules,
    is_flag,
    lost,
    not_understood,
    takes,
)
from shardeddp.translation.torch_strategies import BY_STAGE, SHARED

_ITS_OWN = {
    *("fp16", "bf16", "zero_allow_untested_optimizer", "gradient_accumulation_steps"),
    *("gradient_clipping", "steps_per_print", "wall_clock_breakdown", "flops_profiler"),
}
"""Keys that are typical of a DeepSpeed configuration."""

_OF_LIGHTNING = {"trainer", "strategy", "class_path"}


def is_of_deepspeed(config: Mapping[Any, Any]) -> bool:
    """True if the keys of a mapping are those of a DeepSpeed configuration."""
    sizes = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
    return bool({*config} & sizes) or bool(_ITS_OWN & {*config} and not _OF_LIGHTNING & {*config})


_AUTO = "'auto' is filled in by transformers; Lightning needs a value"


def _or_auto(rule: Rule) -> Rule:
    def apply(made: Translation, key: str, value: Any) -> None:
        if type(value) is str and value == "auto":
            made.note(key, _AUTO)
        else:
            rule.apply(made, key, value)

    return rule if rule.needed is False else dataclasses.replace(rule, apply=apply)


def _within(rules: Mapping[str, Rule], expected: str = "a mapping") -> Rule:
    """Make a rule for a mapping with a rule for each of its keys; any value may be 'auto'."""
    inside = {key: _or_auto(rule) for key, rule in rules.items()}

    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            apply_rules(made, inside, cast("Mapping[str, Any]", value), f"{key}.")
        else:
            not_understood(made, key, value, expected)

    return rule


_is_number_of_ranks = takes("a number of ranks", int)


@partial(Rule, any_value=True, needed=True)
def _stage(made: Translation, key: str, value: Any) -> None:
    stage = int(value) if type(value) is str and value.isdigit() else value
    if type(value) not in (int, str):
        not_understood(made, key, value, "0, 1, 2 or 3")
    elif stage in range(4):
        made.options["sharding_strategy"] = BY_STAGE[int(stage)]
    else:
        made.lose(key, f"{value!r} is not known: expected 0, 1, 2 or 3")


@is_flag
def _zero(made: Translation, key: str, value: Any) -> None:
    if not value:
        made.options["sharding_strategy"] = "no_shard"


@_is_number_of_ranks
def _hpz(made: Translation, key: str, value: Any) -> None:
    if value > 1:
        made.options["reshard_after_forward"] = value
        made.note(key, "hpZ is reshard_after_forward: each rank keeps its part of what was "
                       "gathered, and this many neighbours gather for the backward")  # fmt: skip


@_is_number_of_ranks
def _mics(made: Translation, key: str, value: Any) -> None:
    if value > 0:
        made.options |= {"sharding_strategy": "hybrid_shard", "shard_size": value}


@is_flag
def _gather_on_save(made: Translation, key: str, value: Any) -> None:
    if value:
        made.options["state_dict_type"] = "full"


@is_flag
def _cpu_checkpointing(made: Translation, key: str, value: Any) -> None:
    if value:
        made.options["activation_checkpointing"] = Call(
            path="shardeddp.ActivationCheckpointing", arguments={"cpu_offload": True}
        )


_NO_DISKS = "disks are not offloaded to: host memory is the last resort"

_BUFFERS = (
    "nvme_path pin_memory buffer_count buffer_size max_in_cpu pipeline_read pipeline_write "
    "pipeline fast_init"
).split()
_inside_offload = _within(
    {
        **dict.fromkeys(_BUFFERS, UNNEEDED),
        "ratio": lost("what is offloaded is offloaded as a whole", unless=(None, 1)),
    }
)


def _offload_of(part: str) -> Rule:
    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        device = value
        if isinstance(value, Mapping):
            inner = dict(cast("Mapping[str, Any]", value))
            device = inner.pop("device", "none")
            _inside_offload.apply(made, key, inner)
        if device == "nvme":
            made.lose(key, _NO_DISKS)
        if device in (None, False, "none"):
            return
        if device not in (True, "cpu", "nvme"):
            not_understood(made, key, device, "cpu, nvme or none")
        elif part == "params":
            made.options["cpu_offload"] = True
        else:
            made.options.setdefault("cpu_offload", {"optimizer": True})

    return rule


_device_of_offload = lost(_NO_DISKS, unless=(None, "cpu", "none"))

_TUNING = (
    "params_buffer_count params_buffer_size max_in_cpu optimizer_buffer_count block_size "
    "queue_depth single_submit overlap_events thread_count pin_memory sub_group_size "
    "contiguous_gradients overlap_comm allgather_partitions reduce_scatter allgather_bucket_size "
    "reduce_bucket_size zero_allow_untested_optimizer logging_batch_size_per_gpu logging_level "
    "contiguous_memory_optimization synchronize_checkpoint_boundary load_full_weights nvme_path "
    "round_robin_gradients ignore_unused_parameters stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold elastic_checkpoint legacy_stage1 memory_efficient_linear "
    "override_module_apply use_multi_rank_bucket_allreduce mics_hierarchical_params_gather "
    "param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance prefetch_bucket_size load_from_fp32_weights"
).split()

_ZERO: dict[str, Rule] = {
    **dict.fromkeys(_TUNING, UNNEEDED),
    "stage": _stage,
    "offload_optimizer": _offload_of("optimizer"),
    "offload_param": _offload_of("params"),
    "cpu_offload": _offload_of("optimizer"),
    "cpu_offload_params": _offload_of("params"),
    "zero_hpz_partition_size": _hpz,
    "mics_shard_size": _mics,
    "gather_16bit_weights_on_model_save": _gather_on_save,
    "stage3_gather_16bit_weights_on_model_save": _gather_on_save,
    "stage3_gather_fp16_weights_on_model_save": _gather_on_save,
    "zero_quantized_weights": lost("parameters travel in their compute dtype, never in int8"),
    "zero_quantized_nontrainable_weights": lost("parameters travel in their compute dtype"),
    "zero_quantized_gradients": lost("gradients travel in reduce_dtype, never in int8"),
}

_inside_zero = _within(_ZERO, "a mapping, true or false")


@any_value
def _zero_optimization(made: Translation, key: str, value: Any) -> None:
    # In a configuration, DeepSpeed reads true as stage 1 and false as stage 0.
    rule, asked = (_stage, int(value)) if isinstance(value, bool) else (_inside_zero, value)
    rule.apply(made, key, asked)


_SCALER = (
    "the loss scaler is the Trainer's: Trainer(plugins=MixedPrecision('16-mixed', 'cuda', "
    "scaler=torch.amp.GradScaler(...)))"
)

_SCALING: dict[str, Rule] = {
    "loss_scale": lost(_SCALER, unless=(None, 0)),
    "initial_scale_power": lost(_SCALER, unless=(None, 16)),
    "loss_scale_window": lost(_SCALER, unless=(None, 1000)),
    "hysteresis": lost(_SCALER, unless=(None, 2)),
    "min_loss_scale": lost(_SCALER, unless=(None, 1)),
}

_PRECISION: dict[str, Rule] = {
    **_SCALING,
    "consecutive_hysteresis": lost(_SCALER),
    "auto_cast": lost("inputs are cast by the Trainer's precision"),
    **dict.fromkeys(
        "fp16_master_weights_and_grads bf16_master_weights_and_grads bf16_optimizer_states".split(),
        lost("main weights and what the optimizer holds have the dtype of the parameters"),
    ),
    **dict.fromkeys(("immediate_grad_update", "check_grad_overflow"), UNNEEDED),
}


def _mixed(precision: str) -> Rule:
    @is_flag
    def enabled(made: Translation, key: str, value: Any) -> None:
        if made.trainer.setdefault("precision", precision) != precision:
            made.lose(key, f"{made.trainer['precision']!r} is asked for as well: one of the two")

    inside = _within({**_PRECISION, "enabled": enabled})

    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        it = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"enabled": True}
        if it.get("enabled") == "auto":
            made.note(f"{key}.enabled", f"{_AUTO}: Trainer(precision={precision!r}), or nothing")
            inside.apply(made, key, {name: it[name] for name in it if name != "enabled"})
        elif it.get("enabled") not in (None, False):
            inside.apply(made, key, value)

    return rule


def _to_trainer(name: str) -> Rule:
    @takes("a number", int, float)
    def rule(made: Translation, key: str, value: Any) -> None:
        made.trainer[name] = value

    return rule


@takes("a number", int)
def _in_loader(made: Translation, key: str, value: Any) -> None:
    own = value if key.endswith("train_micro_batch_size_per_gpu") else "..."
    made.note(key, f"the DataLoader says it: DataLoader(batch_size={own}), per rank")


_IN_CODE = "written in code: configure_optimizers() returns it"

_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad")


@any_value
def _optimizer(made: Translation, key: str, value: Any) -> None:
    """Translate DeepSpeed's Adam, which is torch's AdamW unless ``adam_w_mode`` is false."""
    it = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
    kind, asked, line = str(it.get("type")).lower(), it.get("params") or {}, ""
    if not isinstance(value, Mapping) or not isinstance(asked, Mapping):
        not_understood(made, key, value, 'a mapping with "type" and "params"')
        return
    params = {
        name: own for name, own in cast("Mapping[str, Any]", asked).items() if own is not None
    }
    if kind == "adamw" or (kind == "adam" and params.get("adam_w_mode", True) is True):
        # DeepSpeed's kernels have a default weight decay of 0, torch's class has not.
        own = {} if params.get("torch_adam") else {"weight_decay": 0.0}
        own = {**{name: params[name] for name in _ADAM if name in params}, **own, **params}
        own = {name: own[name] for name in own if name in _ADAM and own[name] != "auto"}
        call = Call(path="AdamW", positional=(Expression("self.parameters()"),), arguments=own)
        line = f", under ShardedDP torch.optim.{python_code(call)}"
        if others := [str(it) for it in params if it not in (*_ADAM, "torch_adam", "adam_w_mode")]:
            line += f"; {', '.join(others)} would be lost"
    made.lose(key, f"{_IN_CODE}{line}")


_ACTIVATIONS: dict[str, Rule] = {
    **dict.fromkeys(
        "contiguous_memory_optimization number_checkpoints profile "
        "synchronize_checkpoint_boundary".split(),
        UNNEEDED,
    ),
    "cpu_checkpointing": _cpu_checkpointing,
    "partition_activations": lost("kept inputs are not split over tensor-parallel ranks"),
}


@any_value
def _tool(made: Translation, key: str, value: Any) -> None:
    off = isinstance(value, Mapping) and cast("Any", value).get("enabled") in (None, False)
    if value is not None and value is not False and not off:
        made.lose(key, "a tool of DeepSpeed: use the Trainer's logger and profiler")


_CONFIG: dict[str, Rule] = {
    **dict.fromkeys(
        "steps_per_print dump_state zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "prescale_gradients gradient_predivide_factor memory_breakdown checkpoint "
        "sparse_gradients".split(),
        UNNEEDED,
    ),
    **dict.fromkeys(
        "wall_clock_breakdown flops_profiler comms_logger tensorboard wandb csv_monitor".split(),
        _tool,
    ),
    "communication_data_type": lost("gradients are reduced in mixed_precision's reduce_dtype"),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), _in_loader),
    "zero_optimization": _zero_optimization,
    "fp16": _mixed("16-mixed"),
    "bf16": _mixed("bf16-mixed"),
    "bfloat16": _mixed("bf16-mixed"),
    "gradient_clipping": _to_trainer("gradient_clip_val"),
    "gradient_accumulation_steps": _to_trainer("accumulate_grad_batches"),
    "optimizer": _optimizer,
    "scheduler": lost(_IN_CODE),
    "activation_checkpointing": _within(_ACTIVATIONS),
    "aio": lost(_NO_DISKS),
}
_inside_config = _within(_CONFIG)


@any_value
def _config(made: Translation, key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        made.options["sharding_strategy"] = "no_shard"  # as without zero_optimization
        _inside_config.apply(made, key, value)
    elif value is not None:
        made.lose(key, f"{value!r} could not be read: give the JSON file itself to "
                       f"`shardeddp migrate`")  # fmt: skip


DEEPSPEED: dict[str, Rule] = {
    **SHARED,
    **_ZERO,
    "zero_optimization": _zero,
    "offload_parameters": _offload_of("params"),
    "offload_params_device": _device_of_offload,
    "offload_optimizer_device": _device_of_offload,
    "remote_device": _device_of_offload,
    "config": _config,
    "partition_activations": _ACTIVATIONS["partition_activations"],
    "cpu_checkpointing": _cpu_checkpointing,
    "exclude_frozen_parameters": lost(
        "checkpoints hold frozen parameters too; the LightningModule's "
        "on_save_checkpoint can drop them"
    ),
    **_SCALING,
}

_BESIDE_CONFIG = {
    *SHARED, *_SCALING, "config", "exclude_frozen_parameters", "load_full_weights", "logging_level",
    "remote_device",
}  # fmt: skip
"""Arguments of DeepSpeedStrategy that it reads even if ``config`` is given."""


def drop_unread(made: Translation, given: dict[str, Any]) -> None:
    """Remove arguments that DeepSpeedStrategy ignores because of other ones."""
    says = "config" if given.get("config") is not None else "zero_optimization"
    if says == "zero_optimization" and given.get(says) is not False:
        return
    for key in [it for it in given if it in DEEPSPEED and it not in (says, *_BESIDE_CONFIG)]:
        made.note(key, f"DeepSpeedStrategy ignores it beside {says}")
        del given[key]


def with_config(arguments: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Replace the path in ``config`` of DeepSpeedStrategy by the content of that file.

    A relative path starts at ``folder``.
    """
    config = arguments.get("config")
    if not isinstance(config, str) or isinstance(config, Expression):
        return dict(arguments)
    file = folder / config
    if not file.is_file():
        return dict(arguments)
    try:
        return {**arguments, "config": json.loads(file.read_text(encoding="utf-8-sig"))}
    except ValueError as error:
        raise ConfigurationError(f"{file} cannot be parsed: {error}") from error
