"""Migration of files to ShardedDP: YAML and Python of Lightning, Accelerate's YAML, DeepSpeed's JSON.

Files are read as data: nothing in them is run or imported.
"""

from __future__ import annotations

# ruff: noqa: SIM905  # tables of words are read as text
import ast
import json
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from shardeddp.config import (
    ActivationCheckpointing,
    CheckpointOptions,
    CPUOffload,
    MixedPrecision,
    Options,
)
from shardeddp.errors import ConfigurationError
from shardeddp.translation.calls import Call, Expression, python_code
from shardeddp.translation.deepspeed import is_of_deepspeed
from shardeddp.translation.rules import Translation, apply_rules, in_order, not_known
from shardeddp.translation.strategies import NAMES, RULES, translate, translate_config
from shardeddp.wrap import SizePolicy

# -- what a file has, and what takes its place


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """One place of a file."""

    place: str
    """File and line, or the path of the entry."""

    was: str
    text: str
    """What to write there: a Python line, or YAML."""

    translation: Translation


def migrate(path: Path) -> list[Migrated]:
    """What takes the place of each strategy of another library in a file.

    Raises:
        ConfigurationError: The file cannot be parsed, or nothing in it chooses a strategy.
    """
    try:
        if path.suffix == ".py":
            with tokenize.open(path) as file:
                text = file.read()
            found = sorted(_of_python(text, path), key=lambda it: int(it.place.rpartition(":")[2]))
        else:
            text = path.read_text(encoding="utf-8-sig")
            content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
            found = list(_of_mapping(content, path))
    except RecursionError as error:
        raise ConfigurationError(
            f"{path} cannot be parsed: something in it holds itself, or is nested too deeply"
        ) from error
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, ConfigurationError):
            raise
        why = " ".join(str(error).split())
        raise ConfigurationError(f"{path} cannot be parsed: {why}") from error
    if not found:
        raise ConfigurationError(
            f"{path} chooses no strategy that is known here: expected one of {', '.join(RULES)}, "
            f"a name such as strategy='fsdp', a distributed_type of Accelerate, or a configuration "
            f"of DeepSpeed"
        )
    return found


def _of_mapping(content: Any, path: Path) -> Iterator[Migrated]:
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{path} holds a {type(content).__name__}, expected a mapping")
    config = cast("Mapping[str, Any]", content)
    if "distributed_type" in config:
        yield _of_accelerate(config, path)
    elif is_of_deepspeed(config):
        yield _in_yaml(translate_config(config), str(path), "a configuration of DeepSpeed")
    else:
        yield from _of_lightning(config, path, "")


def _try(made: Translation) -> None:
    """Lose what ShardedDP refuses, as far as it can be tried without imports of somebody's code."""
    known = _names_of(Options)
    given = {key: it for key, it in made.options.items() if key in known and _is_plain(it)}
    try:
        if not made.loses:
            Options(**{key: _object(it) for key, it in given.items()})
    except Exception as error:  # noqa: BLE001 - files hold anything, and a line says so
        made.lose("ShardedDP", f"refuses what is left: {error}")


_FIELDS = ("MixedPrecision", "ActivationCheckpointing")


def _is_plain(value: Any) -> bool:
    """Whether a value can be tried: it runs nothing, and no name in it would be imported."""
    if isinstance(value, Call):
        return value.name in (*_FIELDS, "SizePolicy") and _is_plain(value.arguments)
    if isinstance(value, (Mapping, list, tuple)):
        entries = value.values() if isinstance(value, Mapping) else value
        return all(map(_is_plain, cast("Iterable[Any]", entries)))
    return not isinstance(value, Expression) and not (
        isinstance(value, str) and set(value) & {*".:"}
    )


def _object(value: Any) -> Any:
    if isinstance(value, Call):
        return dict(value.arguments) if value.name in _FIELDS else SizePolicy(**value.arguments)
    return value


def _in_yaml(made: Translation, place: str, was: str) -> Migrated:
    _try(made)
    return Migrated(place=place, was=was, text=_as_yaml(made), translation=made)


# -- YAML of Lightning


def _of_lightning(config: Mapping[str, Any], path: Path, prefix: str) -> Iterator[Migrated]:
    for key, value in config.items():
        place = f"{prefix}{key}"
        if key == "strategy" and (chosen := _chosen(value)) is not None:
            name, arguments, foreign = chosen
            made = (
                _of_ours(arguments)
                if name == "ShardedDP"
                else translate(name, _with_config(arguments, path))
            )
            if foreign:
                made.lose(", ".join(foreign), "could not be read")
            precision = config.get("precision")
            if name == "DeepSpeedStrategy" and precision in ("bf16-true", "16-true"):
                made.trainer.setdefault("precision", f"{str(precision)[:-5]}-mixed")
            yield _in_yaml(made, f"{path}: {place}", name)
        elif isinstance(value, Mapping):
            yield from _of_lightning(cast("Mapping[str, Any]", value), path, f"{place}.")
        elif isinstance(value, list):
            entries = {f"[{at}]": it for at, it in enumerate(cast("list[Any]", value))}
            yield from _of_lightning(entries, path, place)


def _chosen(value: Any) -> tuple[str, dict[str, Any], list[str]] | None:
    """Class, arguments and what could not be read of an entry ``strategy``."""
    if isinstance(value, str):
        if value in NAMES:
            name, arguments = NAMES[value]
            return name, dict(arguments), []
        value = {"class_path": value}
    if not isinstance(value, Mapping):
        return None
    entry = cast("Mapping[str, Any]", value)
    name = str(entry.get("class_path", "")).rpartition(".")[2]
    if name not in RULES and name != "ShardedDP":
        return None
    arguments: dict[str, Any] = {}
    foreign = [str(key) for key in entry if key not in _ENTRY]
    for part in ("init_args", "dict_kwargs"):
        given = entry.get(part) or {}
        if isinstance(given, Mapping):
            given = cast("Mapping[Any, Any]", given)
            arguments |= {str(key): _from_yaml(it) for key, it in given.items()}
        else:
            foreign.append(f"{part}: {given!r}")
    return name, arguments, foreign


_ENTRY = ("class_path", "init_args", "dict_kwargs")


def _of_ours(arguments: Mapping[str, Any]) -> Translation:
    """ShardedDP with words of others among its arguments, those of FSDP, or misspelt ones."""
    made = Translation()
    known = [*_names_of(Options), *_OF_LIGHTNING]
    for key in in_order(arguments):
        value = arguments[key]
        ours = isinstance(value, Call) and value.path.startswith("shardeddp.")
        ours = ours or (key == "sharding_strategy" and value == "auto")
        owner = None if ours else next((it for it in RULES.values() if key in it), None)
        if owner is not None:
            apply_rules(made, owner, {key: value})
        elif key in known:
            made.options[key] = value
        else:
            made.lose(key, not_known(key, known))
        inner = value.arguments if isinstance(value, Call) else value
        if key in _WITH_FIELDS and isinstance(inner, Mapping):
            names = _names_of(_WITH_FIELDS[key])
            for name in cast("Mapping[str, Any]", inner):
                if name not in names:
                    made.lose(f"{key}.{name}", not_known(name, names))
    return made


_OF_LIGHTNING = (
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
)  # fmt: skip
"""Arguments of ShardedDP that are none of its options."""

_WITH_FIELDS: dict[str, type] = {
    "mixed_precision": MixedPrecision,
    "activation_checkpointing": ActivationCheckpointing,
    "cpu_offload": CPUOffload,
    "checkpoint_options": CheckpointOptions,
}


def _names_of(options: type) -> list[str]:
    return [it.name for it in fields(options) if it.init]


def _from_yaml(value: Any) -> Any:
    if isinstance(value, Mapping):
        entry = cast("Mapping[str, Any]", value)
        inner = {key: _from_yaml(it) for key, it in entry.items()}
        given = inner.get("init_args") or {}
        if "class_path" in entry and isinstance(given, Mapping):
            return Call(path=str(entry["class_path"]), arguments=cast("Mapping[str, Any]", given))
        return inner
    return [*map(_from_yaml, cast("list[Any]", value))] if isinstance(value, list) else value


def _with_config(arguments: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Arguments with the DeepSpeed configuration that they name read from its file."""
    config = arguments.get("config")
    if not isinstance(config, str) or isinstance(config, Expression):
        return dict(arguments)
    file = path.parent / config
    if not file.is_file():
        return dict(arguments)
    try:
        return {**arguments, "config": json.loads(file.read_text(encoding="utf-8-sig"))}
    except ValueError as error:
        raise ConfigurationError(f"{file} cannot be parsed: {error}") from error


# -- YAML of Accelerate


def _of_accelerate(config: Mapping[str, Any], path: Path) -> Migrated:
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
        made = _of_accelerated_deepspeed(found, inner, path)
    elif kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "NO"):
        made = translate("DDPStrategy", {})
    else:
        made = Translation(options={"sharding_strategy": "full_shard"})
        made.lose("distributed_type", f"{kind} is not read, expected FSDP, DEEPSPEED, MULTI_GPU or "
                                      f"NO: layers are split over ranks by tensor_parallel_size=, "
                                      f"pipelines are not there")  # fmt: skip
    for other in ("fsdp_config", "deepspeed_config"):
        if other != used and config.get(other):
            made.note(other, f"not looked at there: distributed_type is {kind}")
    _set_trainer(made, config)
    _set_axes(made, axes)
    for key in config:
        if key in _UNNEEDED:
            made.unneeded.append(key)
        elif key not in _LAUNCH:
            made.lose(key, not_known(key, _LAUNCH))
    made.notes[:0] = found.notes
    made.unneeded += found.unneeded
    return _in_yaml(made, str(path), f"Accelerate ({kind})")


def _switched(value: Any) -> Any:
    """A value with the texts by which Accelerate's files say true and false as these."""
    if isinstance(value, Mapping):
        return {str(key): _switched(it) for key, it in cast("Mapping[Any, Any]", value).items()}
    words = {"true": True, "yes": True, "false": False, "no": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    """A value, a whole number where it is a text or a float of one, such as 1e8."""
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
        made.lose("mixed_precision", f"{precision} is not there: '16-mixed' or 'bf16-mixed'")
    if config.get("main_process_ip"):
        made.note("main_process_ip", "MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment, "
                                     "or torchrun, or SLURM")  # fmt: skip
    if config.get("dynamo_config"):
        made.note("dynamo_config", "torch.compile(module) before Trainer.fit does that")


def _axes(made: Translation, config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of Accelerate's ``ParallelismConfig`` by axis, of those with several ranks."""
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
            made.lose(key, f"{ranks} ranks split something else than layers and batches, which is "
                           f"not there")  # fmt: skip


def _fsdp_arguments(made: Translation, config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of FSDPStrategy; what goes other ways is said in ``made``."""
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
            made.note(f"fsdp_{other}", f"not looked at there: fsdp_auto_wrap_policy is {kind}")
    for key, value in given.items():
        name = _OF_FSDP.get(key, key)
        if key == "cpu_ram_efficient_loading" or (key == "ignored_modules" and value == ""):
            made.unneeded.append(f"fsdp_{key}")  # the former is what configure_model does
        elif name in _OF_ACCELERATE and isinstance(value, (str, bool)):
            arguments[name] = _OF_ACCELERATE[name].get(value, value)
        else:
            arguments[name] = value
    if str(version) == "2" and arguments.get("reshard_after_forward") is False:
        arguments.setdefault("sharding_strategy", "SHARD_GRAD_OP")
        arguments.pop("reshard_after_forward")
    return arguments


def _of_accelerated_deepspeed(
    made: Translation, config: Mapping[str, Any], path: Path
) -> Translation:
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
            made.note(key, "not looked at there: deepspeed_config_file says it all")
        elif key in _OF_ZERO:
            zero[_OF_ZERO[key]] = value
        else:
            content[key] = _number(value)
    if not file:
        return translate_config(content)
    return translate("DeepSpeedStrategy", _with_config({"config": file}, path))


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
"""Kinds of policies, and the key that each looks at."""
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


# -- Python


def _of_python(text: str, path: Path) -> Iterator[Migrated]:
    tree = ast.parse(text, str(path))
    reader = _Reader(tree)
    for node in ast.walk(tree):
        for value in _chosen_by(node, reader):
            fabric = reader.is_fabric(node)
            place, said = f"{path}:{value.lineno}", ast.unparse(value)
            word = reader.read(value)
            if isinstance(word, str) and word in NAMES:
                kind, arguments = NAMES[word]
                shown = f"strategy={said}" if repr(word) == said else f"strategy={said} ({word!r})"
                yield _in_python(translate(kind, arguments), place, shown, fabric)
                continue
            made = Translation()
            if isinstance(word, Expression) and not reader.is_strategy(value):
                made.lose("strategy", f"{said} is known to the running program only")
            elif type(word) is str and word.startswith(("ddp", "deepspeed", "fsdp")):
                made.lose("strategy", not_known(word, NAMES))
            if made.loses:
                yield Migrated(place=place, was=f"strategy={said}", text="", translation=made)
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if (name := reader.name_of(base)) in RULES:
                    made = translate(name, {})
                    made.lose(f"class {node.name}", f"what it changes of {name} is its own code")
                    was = f"class {node.name}({ast.unparse(base)})"
                    yield _in_python(made, f"{path}:{node.lineno}", was, reader.is_fabric(base))
        if isinstance(node, ast.Call) and (called := reader.strategy_of(node)) is not None:
            name, positional = called
            given, unread = reader.arguments(node)
            stars = [at for at, it in enumerate(positional) if isinstance(it, ast.Starred)]
            known = positional[: stars[0]] if stars else positional
            made = translate(name, _with_config(given, path), [*map(reader.read, known)])
            unread += [ast.unparse(it) for it in positional[len(known) :]]
            for each in unread:
                made.lose(each, "arguments that only the running program knows")
            if len(positional) < len(node.args):
                made.lose("partial", "arguments that are added where it is called are not read")
            yield _in_python(
                made, f"{path}:{node.lineno}", ast.unparse(node), reader.is_fabric(node)
            )


def _chosen_by(node: ast.AST, reader: _Reader) -> Iterator[ast.expr]:
    """What is given as ``strategy``: anything to a Trainer or a Fabric, texts to other calls."""
    pairs: list[tuple[Any, ast.expr]] = []
    runs = False
    if isinstance(node, ast.Call):
        runs = reader.name_of(node.func) in ("Trainer", "Fabric")
        pairs += [(it.arg, it.value) for it in node.keywords]
        if runs and not any(isinstance(it, ast.Starred) for it in node.args[:2]):
            pairs += [("strategy", it) for it in node.args[1:2]]
    if isinstance(node, ast.Dict):  # as trainer_defaults of LightningCLI
        keys = [it.value if isinstance(it, ast.Constant) else None for it in node.keys]
        pairs += zip(keys, node.values, strict=True)
    for key, value in pairs:
        if key == "strategy" and (runs or isinstance(value, ast.Constant)):
            yield value


def _in_python(made: Translation, place: str, was: str, fabric: bool) -> Migrated:
    _try(made)
    names = {
        it.name for it in made.options.values() if isinstance(it, Call) and "shardeddp." in it.path
    }
    options = dict(made.options)
    chosen = options.pop("sharding_strategy", None)
    first = () if chosen in (None, "full_shard") else (chosen,)
    line = f"strategy={_code(Call(path='ShardedDP', positional=first, arguments=options))}"
    if not fabric:
        names.add("ShardedDP")
    lines = [f"from shardeddp import {', '.join(sorted(names))}"] if names else []
    lines += ["from shardeddp.fabric import ShardedDP"] if fabric else []
    trainer = "".join(f", {key}={_code(it)}" for key, it in made.trainer.items())
    return Migrated(
        place=place, was=was, text="\n".join([*lines, line + trainer]), translation=made
    )


_code = partial(python_code, quote=partial(json.dumps, ensure_ascii=False))
"""Values as Python code, with the double quotes of formatted files."""

_Binding = tuple[ast.AST, ast.AST]
"""What holds the place where a name is bound, and the module, function or class of that place."""


class _Reader:
    """Values of expressions, as far as a file says them.

    A name is read where it is bound once in the whole file, by a plain assignment of the module or
    of the same function. A value that can be changed in place has to be used by the calls alone
    that this file is read for.
    """

    def __init__(self, tree: ast.Module) -> None:
        # By the name here: the module that it is or comes from, and its name there.
        self._imported: dict[str, tuple[str, str]] = {}
        self._bound: dict[str | None, list[_Binding]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}
        self._loads: Counter[str] = Counter()
        self._following: set[str] = set()
        waiting: list[tuple[ast.AST, ast.AST, ast.AST]] = [(tree, tree, tree)]
        while waiting:
            node, parent, scope = waiting.pop()
            self._scopes[node] = scope
            for name in _bound_by(node):
                self._bound.setdefault(name, []).append((parent, scope))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                for alias in node.names:
                    self._imported[alias.asname or alias.name] = module or alias.name, alias.name
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._loads[node.id] += 1
            inner = node if isinstance(node, _SCOPES) else scope
            waiting += [(child, node, inner) for child in ast.iter_child_nodes(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (
                self.name_of(node.func) in _HARMLESS or self.strategy_of(node)
            ):
                given = [*node.args, *(it.value for it in node.keywords)]
                self._loads.subtract(it.id for it in given if isinstance(it, ast.Name))

    def _value_of(self, name: ast.Name) -> ast.expr | None:
        """The expression that a name stands for wherever it is bound; None where that may vary."""
        bindings = self._bound.get(name.id, [])
        if len(bindings) != 1 or name.id in self._following:
            return None
        (assigned, scope) = bindings[0]
        seen = isinstance(scope, ast.Module) or scope is self._scopes.get(name)
        if not seen or isinstance(scope, ast.ClassDef):
            return None
        match assigned:
            case ast.Assign(targets=[_], value=value) | ast.AnnAssign(value=value):
                return value
            case _:
                return None

    def _followed(self, name: ast.Name) -> Any:
        value = self._value_of(name)
        if value is None:
            return Expression(name.id)
        self._following.add(name.id)
        found = self.read(value)
        self._following.discard(name.id)
        changes = isinstance(found, (list, dict, tuple, Call)) and self._loads[name.id] > 0
        return Expression(name.id) if changes or isinstance(found, Expression) else found

    def strategy_of(self, call: ast.Call) -> tuple[str, list[ast.expr]] | None:
        """The strategy that a call makes, or makes a partial of, and arguments by place."""
        name = self.name_of(call.func)
        if name in RULES:
            return name, call.args
        if name == "partial" and call.args and (name := self.name_of(call.args[0])) in RULES:
            return name, call.args[1:]
        return None

    def is_strategy(self, value: ast.expr) -> bool:
        """Whether an expression makes a strategy that is reported where it is made."""
        if isinstance(value, ast.Name):
            value = self._value_of(value) or value
        return isinstance(value, ast.Call) and self.name_of(value.func) in (*RULES, "ShardedDP")

    def name_of(self, function: ast.expr) -> str:
        """The name under which a function was defined, if it is called by a name."""
        if isinstance(function, ast.Attribute):
            return function.attr
        if not isinstance(function, ast.Name):
            return ""
        value = self._value_of(function)
        if isinstance(value, (ast.Name, ast.Attribute)):
            self._following.add(function.id)
            name = self.name_of(value)
            self._following.discard(function.id)
            return name
        return self._imported.get(function.id, ("", function.id))[1].rpartition(".")[2]

    def is_fabric(self, node: ast.AST) -> bool:
        """Whether a call makes a Fabric, or what is named comes from Fabric's modules."""
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.expr) and self.name_of(function) == "Fabric":
            return True
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        named = ast.unparse(function)
        module = self._imported.get(root.id, ("",))[0] if isinstance(root, ast.Name) else ""
        return any(
            "fabric" in it.split(".")[:2] or "lightning_fabric" in it for it in (module, named)
        )

    def arguments(self, call: ast.Call) -> tuple[dict[str, Any], list[str]]:
        """Arguments with names, and what is unpacked and cannot be read."""
        given: dict[str, Any] = {}
        unread: list[str] = []
        for each in call.keywords:
            value = self.read(each.value)
            if each.arg is not None:
                given[each.arg] = value
            elif isinstance(value, dict) and all(
                isinstance(key, str) for key in cast("dict[Any, Any]", value)
            ):
                given |= cast("dict[str, Any]", value)
            else:
                unread.append(f"**{ast.unparse(each.value)}")
        return given, unread

    def read(self, node: ast.expr) -> Any:
        """A value: a plain one, a :class:`Call`, or the expression itself."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Name():
                return self._followed(node)
            case ast.Attribute(value=owner, attr=word) if self.name_of(owner) in _ENUMERATIONS:
                return word
            case ast.Attribute(value=ast.Name(id="torch"), attr=word) if word in _DTYPES:
                return f"torch.{word}"
            case ast.Set(elts=items) | ast.List(elts=items) | ast.Tuple(elts=items) if not any(
                isinstance(it, ast.Starred) for it in items
            ):
                kind = tuple if isinstance(node, ast.Tuple) else list
                return kind(map(self.read, items))
            case ast.Dict(keys=keys, values=values) if all(
                isinstance(key, ast.Constant) for key in keys
            ):
                names = [key.value for key in keys if isinstance(key, ast.Constant)]
                return dict(zip(names, map(self.read, values), strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                given, unread = self.arguments(node)
                return Expression(ast.unparse(node)) if unread else given
            case ast.Call(func=function) if self.name_of(function) in _READ:
                given, unread = self.arguments(node)
                if unread or any(isinstance(it, ast.Starred) for it in node.args):
                    return Expression(ast.unparse(node))
                return Call(
                    path=self.name_of(function),
                    positional=tuple(map(self.read, node.args)),
                    arguments=given,
                    written=ast.unparse(node),
                )
            case _:
                return Expression(ast.unparse(node))


_READ = (
    "partial ModuleWrapPolicy CustomPolicy MixedPrecision MixedPrecisionPolicy CPUOffload "
    "CPUOffloadPolicy OffloadPolicy init_device_mesh timedelta"
).split()
"""Calls that rules look into; others are passed on as they are written."""

_HARMLESS = {*RULES, *_READ, "Trainer", "Fabric", "ShardedDP"} - {"partial"}
"""Calls that do not change what they are given."""

_ENUMERATIONS = ("ShardingStrategy", "BackwardPrefetch")
_DTYPES = "bfloat16 float16 half float32 float float64 double".split()
_SCOPES = (
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp,
    ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


def _bound_by(node: ast.AST) -> list[str | None]:
    """Names that a node gives a value, or takes it from."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.alias):
        return [node.asname or node.name.partition(".")[0]]
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return [*node.names]
    found = dict(ast.iter_fields(node))
    return [found.get("name"), found.get("rest"), node.arg if isinstance(node, ast.arg) else None]


# -- text


def _as_yaml(made: Translation) -> str:
    options = {key: _to_yaml(it) for key, it in made.options.items()}
    strategy: dict[str, Any] = {"class_path": "shardeddp.ShardedDP"}
    if options:
        strategy["init_args"] = options
    tree = {"trainer": {**made.trainer, "strategy": strategy}}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).rstrip()


def _to_yaml(value: Any) -> Any:
    if isinstance(value, Call):
        inner = {key: _to_yaml(it) for key, it in value.arguments.items()}
        if value.name in ("MixedPrecision", "ActivationCheckpointing"):
            return inner
        return {"class_path": value.path, "init_args": inner}
    if isinstance(value, (list, tuple)):
        return [*map(_to_yaml, cast("Sequence[Any]", value))]
    if isinstance(value, dict):
        return {key: _to_yaml(it) for key, it in cast("dict[str, Any]", value).items()}
    return str(value) if isinstance(value, str) else value


def report(found: Sequence[Migrated]) -> str:
    """What was found, what to write, and one line for each key to know about."""
    parts: list[str] = []
    for each in found:
        made = each.translation
        lines = [f"# {each.place}: {each.was}", *filter(None, [each.text]), ""]
        lines += [f"# changed  {note.key}: {note.text}" for note in made.notes if not note.lost]
        lines += [f"# LOST     {note.key}: {note.text}" for note in made.notes if note.lost]
        if made.unneeded:
            lines.append(f"# unneeded {', '.join(dict.fromkeys(made.unneeded))}")
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts)
