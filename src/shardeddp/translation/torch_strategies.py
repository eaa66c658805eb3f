"""Strategies on torch's engines: FSDP in its two generations, ModelParallelStrategy and DDP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, cast

from shardeddp.errors import ConfigurationError, closest, did_you_mean
from shardeddp.translation.calls import Call, Expression, described, has_expression
from shardeddp.translation.rules import (
    UNNEEDED,
    Rule,
    Translation,
    always,
    any_value,
    is_flag,
    lost,
    not_understood,
)

# -- values of torch's classes, and names of sharding strategies

BY_STAGE = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")

_STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"sharding_strategy": "full_shard"},
    "SHARD_GRAD_OP": {"sharding_strategy": "shard_grad_op"},
    "HYBRID_SHARD": {"sharding_strategy": "hybrid_shard"},
    "HYBRID_SHARD_ZERO2": {"sharding_strategy": "hybrid_shard", "reshard_after_forward": False},
    "NO_SHARD": {"sharding_strategy": "no_shard"},
    "SHARD_OPTIMIZER": {"sharding_strategy": "shard_optimizer"},
    "FSDP": {"sharding_strategy": "full_shard"},
    "FSDP2": {"sharding_strategy": "full_shard"},
    "HSDP": {"sharding_strategy": "hybrid_shard"},
    "DDP": {"sharding_strategy": "no_shard"},
    **{
        f"{prefix}{stage}": {"sharding_strategy": name}
        for stage, name in enumerate(BY_STAGE)
        for prefix in ("ZERO", "ZERO_", "ZERO-", "STAGE", "STAGE_")
    },
}

_BY_NUMBER = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Strategy names in Accelerate's numbering, which starts at 1."""


def sharding_of(value: Any) -> dict[str, Any] | None:
    """Translate another library's sharding strategy to options of ShardedDP; None if unknown.

    Args:
        value: Case-insensitive name (``HYBRID_SHARD_ZERO2``, ``zero3``, ``hsdp``), or a member of
            torch's ``ShardingStrategy``.
    """
    found = _STRATEGIES.get(_word(value))
    return None if found is None else dict(found)


def prefetch_of(value: Any) -> int | None:
    """Translate torch's ``BackwardPrefetch`` to a number of units; None for other values."""
    return {"BACKWARD_PRE": 1, "BACKWARD_POST": 1, "NO_PREFETCH": 0}.get(_word(value))


def options_of(option: str, value: Any) -> Any:
    """Convert torch's option objects for ``cpu_offload`` and ``mixed_precision`` to our values.

    Raises:
        ConfigurationError: A field of the object has no counterpart.
    """
    if not type(value).__module__.startswith("torch.distributed."):
        return value
    made = Translation()
    rule = {"cpu_offload": _offload, "mixed_precision": _mixed_precision}[option]
    rule.apply(made, option, described(value))
    if refused := [note.text for note in made.notes if note.lost]:
        raise ConfigurationError(f"{option}={value!r}: {'; '.join(refused)}")
    found = made.options.get(option)
    return dict(found.arguments) if isinstance(found, Call) else found


def _word(value: Any) -> str:
    """Last component, in upper case, of an enumeration member, name or dotted path."""
    word = value.name if isinstance(value, Enum) else str(value)
    return word.rpartition(".")[2].strip("'\"").lstrip("_").upper()


def _dtype(value: Any) -> Any:
    """Strip ``torch.`` from the name of a dtype."""
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else value


# -- rules that several strategies share


def _pass_on(made: Translation, key: str, option: str, value: Any, remark: str = "") -> None:
    """Set an option to a value unchanged, with a note if the value is an expression."""
    made.options[option] = value
    if isinstance(value, Expression) or (remark and isinstance(value, Call)):
        made.note(key, f"{value} is passed on as it is written{remark}")


@any_value
def _same(made: Translation, key: str, value: Any) -> None:
    if value is not None:
        _pass_on(made, key, key, value)


@any_value
def _timeout(made: Translation, key: str, value: Any) -> None:
    """Translate a timeout: seconds, a duration string of LightningCLI, or a ``timedelta`` call."""
    if isinstance(value, Call) and value.name == "timedelta" and not has_expression(value):
        value = timedelta(**value.named).total_seconds()
    elif isinstance(value, Call):
        value = Expression(repr(value))
    elif type(value) is str and not re.fullmatch(r"(\d+ days?, )?\d+:\d+:\d+(\.\d+)?", value):
        value = float(value)
    _same.apply(made, key, value)


@any_value
def _of_trainer(made: Translation, key: str, value: Any) -> None:
    if value is not None:
        made.lose(
            key, "an argument of the Trainer: precision='bf16-mixed', or the plugin's own precision"
        )


SHARED: dict[str, Rule] = {
    **dict.fromkeys(("cluster_environment", "checkpoint_io", "process_group_backend"), _same),
    "timeout": _timeout,
    **dict.fromkeys(("accelerator", "parallel_devices"), UNNEEDED),
    "precision_plugin": _of_trainer,
}


# -- FSDP, in its two generations


@partial(Rule, needed=True)
def _sharding(made: Translation, key: str, value: Any) -> None:
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and value.isdigit():
        number = int(value)
    if number is not None and 1 <= number <= len(_BY_NUMBER):
        value = _BY_NUMBER[number - 1]
    found = sharding_of(value)
    if found is None:
        near = did_you_mean(closest(str(value).upper(), _BY_NUMBER))
        made.lose(key, f"{value!r} is not known: expected one of {', '.join(_BY_NUMBER)}{near}")
    else:
        made.options |= found


_SIGNATURE = (
    ": a function of ShardedDP takes (name, module), not (module, recurse, nonwrapped_numel)"
)

_POLICY_FUNCTIONS = ("size_based_auto_wrap_policy", "always_wrap_policy")


@any_value
def _policy(made: Translation, key: str, value: Any) -> None:
    """Translate a wrap policy: torch's objects, partials of its functions, classes, or None."""
    option = key.removesuffix("_policy") if key.startswith("activation") else "auto_wrap_policy"
    remark = _SIGNATURE if key.endswith("_policy") else ""
    if value is None and option != "auto_wrap_policy":
        return
    policy: Any = value
    if isinstance(policy, Call) and policy.name == "partial" and len(policy.positional) == 1:
        function = policy.positional[0]
        name = getattr(function, "__name__", str(function)).rpartition(".")[2]
        policy = Call(path=name, arguments=policy.arguments)
    if isinstance(policy, Expression) and policy.rpartition(".")[2] in _POLICY_FUNCTIONS:
        policy = Call(path=policy)
    asked = policy if isinstance(policy, Call) else Call(path="")
    match asked.name:
        case "ModuleWrapPolicy":
            classes = asked.get("module_classes")
        case "transformer_auto_wrap_policy" | "_module_wrap_policy":
            classes = asked.get("transformer_layer_cls") or asked.get("module_classes")
        case "size_based_auto_wrap_policy":
            size = asked.get("min_num_params") or 100_000_000
            made.options[option] = Call(path="shardeddp.SizePolicy", arguments={"min_numel": size})
            if asked.get("exclude_wrap_modules") or asked.get("force_leaf_modules"):
                made.note(key, "sizes alone decide: exclude_wrap_modules and force_leaf_modules "
                               "have no counterpart; name the classes instead")  # fmt: skip
            return
        case "CustomPolicy" | "lambda_auto_wrap_policy" if isinstance(
            asked.get("lambda_fn"), Expression
        ):
            function = asked.get("lambda_fn")
            made.options[option] = Expression(f"lambda name, module: bool(({function})(module))")
            return
        case "always_wrap_policy":
            made.options[option] = Expression("lambda name, module: True")
            return
        case _:
            if isinstance(value, Call) and value.written:
                value = Expression(value.written)
            _pass_on(made, key, option, value, remark)
            return
    if classes is None:
        made.lose(key, f"{policy!r} names no classes: write {option}={{Block}}")
    else:
        made.options[option] = classes


@any_value
def _offload(made: Translation, key: str, value: Any) -> None:
    if isinstance(value, Call):
        known = value.name in ("CPUOffload", "CPUOffloadPolicy", "OffloadPolicy")
        if not known or value.named.keys() - {"offload_params", "pin_memory"}:
            not_understood(made, key, value, "true, false or torch's CPUOffload")
        value = known and (value.name == "CPUOffloadPolicy" or value.get("offload_params"))
    if value is not None and value is not False:
        _pass_on(made, key, "cpu_offload", value)


@any_value
def _mixed_precision(made: Translation, key: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Call):
        _pass_on(made, key, "mixed_precision", value)
        return
    found = value.named
    ours = {
        name: _dtype(found.pop(name))
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
        if found.get(name) is not None
    }
    if "param_dtype" in ours and "reduce_dtype" not in ours:
        ours["reduce_dtype"] = ours["param_dtype"]
        made.note(key, "without reduce_dtype FSDP reduces gradients in param_dtype, ShardedDP "
                       "in float32: leave reduce_dtype out for that")  # fmt: skip
    # FSDP1 casts the root's inputs even if it casts no others; inner activations follow from them.
    casts_root = found.pop("cast_root_forward_inputs", value.name == "MixedPrecision")
    casts = found.pop("cast_forward_inputs", value.name != "MixedPrecision")
    if isinstance(casts, Expression) or isinstance(casts_root, Expression):
        made.lose(key, "only the running program knows which inputs are cast")
    elif casts is False and not casts_root:
        ours["cast_forward_inputs"] = False
    ignored = found.pop("_module_classes_to_ignore", None)
    if ignored and [_word(getattr(it, "__name__", it)) for it in ignored] != ["BATCHNORM"]:
        ours["keep_fp32"] = ignored  # batch norms, the default, may not be in the model
    if found.pop("keep_low_precision_grads", None):
        made.lose(key, "keep_low_precision_grads: gradients of shards have the shards' own dtype")
    for name in found:
        made.lose(key, f"{name} is not known")
    made.options["mixed_precision"] = Call(path="shardeddp.MixedPrecision", arguments=ours)


@Rule
def _device_mesh(made: Translation, key: str, value: Any) -> None:
    if value is None:
        return
    sizes: Any = value
    if isinstance(value, Call):
        sizes = value.get("mesh_shape")
    elif type(value).__name__ == "DeviceMesh":
        sizes = tuple(value.mesh.shape)
    if not isinstance(sizes, (tuple, list)) or not all(
        type(size) is int and size > 0 for size in cast("Sequence[Any]", sizes)
    ):
        made.lose(key, "write shard_size=, the number of ranks that share one model (the last "
                       "number of the mesh), with 'hybrid_shard'")  # fmt: skip
    elif len(sizes) == 2:
        made.options.setdefault("sharding_strategy", "hybrid_shard")
        if made.options["sharding_strategy"] == "full_shard":
            made.options["sharding_strategy"] = "hybrid_shard"
        if (chosen := made.options["sharding_strategy"]) != "hybrid_shard":
            made.lose(key, f"replicas of shards are 'hybrid_shard', and {chosen!r} is asked for")
        else:
            made.options["shard_size"] = sizes[1]
    elif len(sizes) != 1:
        made.lose(key, f"{tuple(sizes)} has more dimensions than replicas and shards: write "
                       f"tensor_parallel_size= for ranks that split layers; context and pipeline "
                       f"parallelism do not exist in ShardedDP")  # fmt: skip


@Rule
def _backward_prefetch(made: Translation, key: str, value: Any) -> None:
    if value is None:
        made.options[key] = 0
        return
    depth = prefetch_of(value)
    if depth is None:
        made.options[key] = value
    elif _word(value) == "BACKWARD_POST":
        made.note(key, "BACKWARD_POST gathers a unit later than backward_prefetch=1, which is "
                       "BACKWARD_PRE; backward_prefetch=0 takes the least memory")  # fmt: skip
    elif depth != 1:
        made.options[key] = depth


@Rule
def _forward_prefetch(made: Translation, key: str, value: Any) -> None:
    if value is False:
        made.note(key, "ShardedDP gathers one unit ahead; False of FSDP does so too, as the "
                       "host runs ahead of the device; forward_prefetch=0 for none")  # fmt: skip
    elif value is not True and value is not None:
        made.options[key] = value


@Rule
def _reshard(made: Translation, key: str, value: Any) -> None:
    if isinstance(value, str) and sharding_of(value):
        _sharding.apply(made, key, value)
    elif value is False or type(value) is int:
        made.options[key] = value
    elif value is not True:
        not_understood(made, key, value, "true, false or a number of ranks")


_IGNORED = lost(
    "every parameter is sharded, and nothing can be left out: a module that must stay whole "
    "has to be kept out of the LightningModule's attributes"
)

FSDP: dict[str, Rule] = {
    **SHARED,
    "sharding_strategy": _sharding,
    "device_mesh": _device_mesh,
    "cpu_offload": _offload,
    "offload_policy": _offload,
    "mixed_precision": _mixed_precision,
    "mp_policy": _mixed_precision,
    "auto_wrap_policy": _policy,
    "activation_checkpointing": _policy,
    "activation_checkpointing_policy": _policy,
    "state_dict_type": _same,
    "backward_prefetch": _backward_prefetch,
    "forward_prefetch": _forward_prefetch,
    "reshard_after_forward": _reshard,
    "use_orig_params": always("parameters always keep their names, shapes and identity"),
    "sync_module_states": always("rank 0's values always reach all ranks"),
    "limit_all_gathers": always(
        "how far the host runs ahead is always limited: by forward_prefetch and backward_prefetch"
    ),
    "ignored_modules": _IGNORED,
    "ignored_states": _IGNORED,
    "ignored_parameters": _IGNORED,
    "ignored_params": _IGNORED,
    "param_init_fn": lost(
        "modules built on the meta device get the values that their own construction gives; "
        "leave the function out, or write in configure_model what it does"
    ),
    "process_group": lost("groups follow from sharding_strategy and shard_size"),
    "mesh": _device_mesh,
    "dp_mesh_dims": lost("shard_size says how many ranks share one model"),
    "shard_placement_fn": lost("flat buffers are cut evenly over ranks, whatever the dimension"),
    "device_id": UNNEEDED,
}


# -- ModelParallelStrategy


@is_flag
def _save_distributed(made: Translation, key: str, value: Any) -> None:
    made.options["state_dict_type"] = "full" if value is False else "sharded"


@Rule
def _tensor_parallel(made: Translation, key: str, value: Any) -> None:
    if type(value) is int and value > 0:
        made.options |= {"tensor_parallel_size": value} if value > 1 else {}
    elif value != "auto":
        not_understood(made, key, value, "a number of ranks")
    else:
        made.lose(key, "its default is all ranks of a node, that of ShardedDP is 1: set the "
                       "number of ranks that split layers")  # fmt: skip


MODEL_PARALLEL: dict[str, Rule] = {
    **SHARED,
    "data_parallel_size": UNNEEDED,
    "tensor_parallel_size": _tensor_parallel,
    "save_distributed_checkpoint": _save_distributed,
}


# -- DistributedDataParallel


@Rule
def _unused_parameters(made: Translation, key: str, value: Any) -> None:
    if value:
        made.note(key, "not needed: a parameter without a gradient keeps none. Where ranks use "
                       "different parts of the model in a step, write uneven_units=True")  # fmt: skip


_HOOK = lost("gradients are reduced by the engine: mixed_precision's reduce_dtype compresses them")

DDP: dict[str, Rule] = {
    **SHARED,
    "start_method": _same,
    "find_unused_parameters": _unused_parameters,
    "static_graph": UNNEEDED,
    "gradient_as_bucket_view": UNNEEDED,
    "bucket_cap_mb": UNNEEDED,
    "bucket_cap_mb_list": UNNEEDED,
    "init_sync": always("rank 0's values always reach all ranks"),
    "broadcast_buffers": lost("buffers follow rank 0, as DDP's do by default", unless=(None, True)),
    "ddp_comm_hook": _HOOK,
    "ddp_comm_state": _HOOK,
    "ddp_comm_wrapper": _HOOK,
    "mixed_precision": _mixed_precision,
    **dict.fromkeys(
        ("batched_grad_copy", "check_reduction", "skip_all_reduce_unused_params"), UNNEEDED
    ),
    **dict.fromkeys(
        ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "forward_sync_buffers"),
        lost("gradients and buffers are communicated by the engine alone"),
    ),
    "device_mesh": lost("replicas are all ranks: 'hybrid_shard' with shard_size for fewer"),
    "model_averaging_period": lost("replicas are equal after every step", unless=(None,)),
}
