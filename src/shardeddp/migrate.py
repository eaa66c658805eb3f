"""Migration of files to ShardedDP: YAML and Python of Lightning, Accelerate's YAML, DeepSpeed's JSON.

Files are read as data: nothing in them is run or imported.
"""

from __future__ import annotations

# ruff: noqa: SIM905  # tables of words are read as text
import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
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
from shardeddp.translate import (
    NAMES,
    RULES,
    Call,
    Expression,
    Translation,
    not_known,
    translate,
    translate_config,
)

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
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            found = sorted(_of_python(text, path), key=lambda it: int(it.place.rpartition(":")[2]))
        else:
            content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
            found = list(_of_mapping(content, path))
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
    elif "zero_optimization" in config or "train_micro_batch_size_per_gpu" in config:
        made = translate_config(config)
        yield Migrated(
            place=str(path),
            was="a configuration of DeepSpeed",
            text=_as_yaml(made),
            translation=made,
        )
    else:
        yield from _of_lightning(config, path, "")


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
            yield Migrated(
                place=f"{path}: {place}", was=name, text=_as_yaml(made), translation=made
            )
        elif isinstance(value, Mapping):
            yield from _of_lightning(cast("Mapping[str, Any]", value), path, f"{place}.")


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
    for part in ("init_args", "dict_kwargs"):
        arguments |= {key: _from_yaml(it) for key, it in (entry.get(part) or {}).items()}
    return name, arguments, [key for key in entry if key not in _ENTRY]


_ENTRY = ("class_path", "init_args", "dict_kwargs")


def _of_ours(arguments: Mapping[str, Any]) -> Translation:
    """ShardedDP with words of others among its arguments, those of FSDP, or misspelt ones."""
    made = Translation()
    known = [*_names_of(Options), *_OF_LIGHTNING]
    for key, value in arguments.items():
        ours = isinstance(value, Call) and value.path.startswith("shardeddp.")
        owner = None if ours else next((it for it in RULES.values() if key in it), None)
        if owner is not None:
            owner[key](made, key, value)
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
        if "class_path" in entry:
            return Call(path=str(entry["class_path"]), arguments=inner.get("init_args") or {})
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
        return {**arguments, "config": json.loads(file.read_text(encoding="utf-8"))}
    except ValueError as error:
        raise ConfigurationError(f"{file} cannot be parsed: {error}") from error


# -- YAML of Accelerate

_PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
_OF_FSDP = {
    "offload_params": "cpu_offload",
    "backward_prefetch_policy": "backward_prefetch",
}
_LAUNCH = (
    "compute_environment main_training_function rdzv_backend same_network tpu_env tpu_use_cluster "
    "tpu_use_sudo debug enable_cpu_affinity use_cpu num_machines num_processes machine_rank "
    "main_process_ip main_process_port mixed_precision distributed_type deepspeed_config "
    "fsdp_config downcast_bf16 gpu_ids dynamo_config parallelism_config"
).split()


def _of_accelerate(config: Mapping[str, Any], path: Path) -> Migrated:
    kind = str(config["distributed_type"]).upper()
    axes = _axes(config.get("parallelism_config") or {})
    given: dict[str, Any] = {}
    if kind == "FSDP":
        given = _fsdp_arguments(config.get("fsdp_config") or {})
        if {"dp_replicate", "dp_shard"} <= axes.keys():
            given["device_mesh"] = axes.pop("dp_replicate"), axes.pop("dp_shard")
        made = translate("FSDPStrategy", given)
    elif kind == "DEEPSPEED":
        made = translate("DeepSpeedStrategy", _deepspeed_arguments(config, path))
    elif kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "NO"):
        made = translate("DDPStrategy", given)
    else:
        made = Translation(options={"sharding_strategy": "full_shard"})
        made.lose("distributed_type", f"{kind} is not read: layers are split over ranks by "
                                      f"tensor_parallel_size=, pipelines are not there")  # fmt: skip
    _set_trainer(made, config)
    _set_axes(made, axes)
    for key in config:
        if key not in _LAUNCH:
            made.lose(key, "no counterpart is known")
    return Migrated(
        place=str(path), was=f"Accelerate ({kind})", text=_as_yaml(made), translation=made
    )


def _set_trainer(made: Translation, config: Mapping[str, Any]) -> None:
    machines, processes = config.get("num_machines", 1), config.get("num_processes", 1)
    made.trainer["num_nodes"] = machines
    made.trainer["devices"] = max(1, int(processes) // max(1, int(machines)))
    made.trainer["accelerator"] = "cpu" if config.get("use_cpu") else "gpu"
    precision = str(config.get("mixed_precision", "no"))
    if precision in _PRECISIONS:
        made.trainer["precision"] = _PRECISIONS[precision]
    elif precision not in ("no", "None"):
        made.lose("mixed_precision", f"{precision} is not there: '16-mixed' or 'bf16-mixed'")
    if config.get("gpu_ids") not in (None, "all"):
        ids = [int(each) for each in str(config["gpu_ids"]).split(",")]
        made.trainer["devices"] = ids
    if config.get("main_process_ip"):
        made.note("main_process_ip", "MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment, "
                                     "or torchrun, or SLURM")  # fmt: skip
    if config.get("dynamo_config"):
        made.note("dynamo_config", "torch.compile(module) before Trainer.fit does that")


def _axes(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of Accelerate's ``ParallelismConfig`` by axis, of those with several ranks."""
    sizes = {
        key.removeprefix("parallelism_config_").removesuffix("_size"): int(value or 1)
        for key, value in config.items()
        if key.endswith("_size")
    }
    return {axis: ranks for axis, ranks in sizes.items() if ranks > 1}


def _set_axes(made: Translation, axes: Mapping[str, int]) -> None:
    for axis, ranks in axes.items():
        if axis == "tp":
            made.options["tensor_parallel_size"] = ranks
            made.options["tensor_parallel_plan"] = "auto"
        elif axis == "dp_replicate":
            made.options["sharding_strategy"] = "no_shard"
        elif axis != "dp_shard":
            made.lose(f"parallelism_config_{axis}_size", f"{ranks} ranks split something else than "
                                                         f"layers and batches, which is not there")  # fmt: skip


def _fsdp_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    given = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    version = given.pop("version", 1)
    arguments: dict[str, Any] = {}
    kind = str(given.pop("auto_wrap_policy", "")).upper()
    classes = given.pop("transformer_layer_cls_to_wrap", None)
    size = given.pop("min_num_params", None)
    if kind == "SIZE_BASED_WRAP":
        arguments["auto_wrap_policy"] = Call(
            path="size_based_auto_wrap_policy", arguments={"min_num_params": int(size or 0) or None}
        )
    elif kind == "NO_WRAP":
        arguments["auto_wrap_policy"] = None
    elif classes:
        names = classes.split(",") if isinstance(classes, str) else classes
        arguments["auto_wrap_policy"] = [str(each).strip() for each in names]
    for key, value in given.items():
        if key in ("cpu_ram_efficient_loading",):
            continue  # what configure_model does
        name = _OF_FSDP.get(key, key)
        if name == "state_dict_type":
            value = "full" if str(value).upper().startswith("FULL") else "sharded"
        if name == "activation_checkpointing":
            value = "auto" if value else None
        if name == "ignored_modules" and value == "":
            continue
        arguments[name] = value
    if str(version) == "2" and arguments.get("reshard_after_forward") is False:
        arguments.setdefault("sharding_strategy", "SHARD_GRAD_OP")
        arguments.pop("reshard_after_forward")
    return arguments


def _deepspeed_arguments(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    given = dict(config.get("deepspeed_config") or {})
    file = given.pop("deepspeed_config_file", None)
    arguments: dict[str, Any] = {"config": file} if file else {}
    renamed = {"zero_stage": "stage", "offload_optimizer_device": "offload_optimizer",
               "offload_param_device": "offload_parameters"}  # fmt: skip
    inner: dict[str, Any] = {}
    for key, value in given.items():
        if key in renamed:
            arguments[renamed[key]] = None if value == "none" else value
        elif key == "zero3_save_16bit_model":
            arguments["stage3_gather_16bit_weights_on_model_save"] = value
        elif key in ("gradient_clipping", "gradient_accumulation_steps"):
            inner[key] = float(value) if key == "gradient_clipping" else int(value)
        elif key not in ("zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_hostfile"):
            inner[key] = value
    if inner and not file:
        arguments["config"] = inner
    return _with_config(arguments, path)


# -- Python


def _of_python(text: str, path: Path) -> Iterator[Migrated]:
    tree = ast.parse(text, str(path))
    reader = _Reader(tree)
    for node in ast.walk(tree):
        for value, word in _words(node):
            if word in NAMES:
                kind, arguments = NAMES[word]
                made, fabric = translate(kind, arguments), reader.is_fabric(node)
                yield _in_python(made, f"{path}:{value.lineno}", f"strategy={word!r}", fabric)
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if (name := reader.name_of(base)) in RULES:
                    made = translate(name, {})
                    made.lose(f"class {node.name}", f"what it changes of {name} is its own code")
                    was = f"class {node.name}({ast.unparse(base)})"
                    yield _in_python(made, f"{path}:{node.lineno}", was, reader.is_fabric(base))
        if isinstance(node, ast.Call) and (name := reader.name_of(node.func)) in RULES:
            given, unread = reader.arguments(node)
            made = translate(name, _with_config(given, path), [*map(reader.read, node.args)])
            for each in unread:
                made.lose(f"**{each}", "arguments that only the running program knows")
            fabric = reader.is_fabric(node)
            yield _in_python(made, f"{path}:{node.lineno}", ast.unparse(node), fabric)


def _words(node: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """Texts that a call or a mapping gives as its ``strategy``."""
    pairs: list[tuple[Any, ast.expr]] = []
    if isinstance(node, ast.Call):
        pairs += [(it.arg, it.value) for it in node.keywords]
    if isinstance(node, ast.Dict):  # as trainer_defaults of LightningCLI
        keys = [it.value if isinstance(it, ast.Constant) else None for it in node.keys]
        pairs += zip(keys, node.values, strict=True)
    for key, value in pairs:
        if key == "strategy" and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value, value.value


def _in_python(made: Translation, place: str, was: str, fabric: bool) -> Migrated:
    names = {
        it.name for it in made.options.values() if isinstance(it, Call) and "shardeddp." in it.path
    }
    line = f"strategy={_as_python(Call(path='ShardedDP', arguments=made.options))}"
    if not fabric:
        names.add("ShardedDP")
    lines = [f"from shardeddp import {', '.join(sorted(names))}"] if names else []
    lines += ["from shardeddp.fabric import ShardedDP"] if fabric else []
    trainer = "".join(f", {key}={_as_python(it)}" for key, it in made.trainer.items())
    return Migrated(
        place=place, was=was, text="\n".join([*lines, line + trainer]), translation=made
    )


class _Reader:
    """Values of expressions, as far as a file says them."""

    def __init__(self, tree: ast.Module) -> None:
        # By the name here: the module that it is or comes from, and its name there.
        self._imported = {
            alias.asname or alias.name: (getattr(node, "module", None) or alias.name, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        self._assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    self._assigned.setdefault(target.id, []).append(node.value)

    def name_of(self, function: ast.expr) -> str:
        """The name under which a function was defined, if it is called by a name."""
        if isinstance(function, ast.Attribute):
            return function.attr
        if isinstance(function, ast.Name):
            return self._imported.get(function.id, ("", function.id))[1].rpartition(".")[2]
        return ""

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
            elif isinstance(value, dict):
                given |= cast("dict[str, Any]", value)
            else:
                unread.append(ast.unparse(each.value))
        return given, unread

    def read(self, node: ast.expr) -> Any:
        """A value: a plain one, a :class:`Call`, or the expression itself."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if len(self._assigned.get(name, ())) == 1:
                return self.read(self._assigned[name][0])
            case ast.Set(elts=items) | ast.List(elts=items) | ast.Tuple(elts=items):
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
                given, _ = self.arguments(node)
                return Call(
                    path=self.name_of(function),
                    positional=tuple(map(self.read, node.args)),
                    arguments=given,
                )
            case _:
                return Expression(ast.unparse(node))


_READ = (
    "partial ModuleWrapPolicy CustomPolicy MixedPrecision MixedPrecisionPolicy CPUOffload "
    "CPUOffloadPolicy OffloadPolicy init_device_mesh"
).split()
"""Calls that rules look into; others are passed on as they are written."""


# -- text


def _as_python(value: Any) -> str:
    if isinstance(value, Call):
        given = dict(value.arguments)
        first = given.pop("sharding_strategy", None) if value.name == "ShardedDP" else None
        shown = [] if first in (None, "full_shard") else [_as_python(first)]
        shown += [_as_python(it) for it in value.positional]
        shown += [f"{key}={_as_python(it)}" for key, it in given.items()]
        return f"{value.name}({', '.join(shown)})"
    if isinstance(value, Expression):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_as_python, cast('Sequence[Any]', value)))}]"
    if isinstance(value, tuple):
        inner = ", ".join(map(_as_python, cast("Sequence[Any]", value)))
        return f"({inner},)" if value else "()"
    if isinstance(value, dict):
        mapping = cast("dict[str, Any]", value)
        return (
            "{" + ", ".join(f"{_as_python(k)}: {_as_python(v)}" for k, v in mapping.items()) + "}"
        )
    return repr(value)


def _as_yaml(made: Translation) -> str:
    options = {key: _to_yaml(it) for key, it in made.options.items()}
    strategy: dict[str, Any] = {"class_path": "shardeddp.ShardedDP"}
    if options:
        strategy["init_args"] = options
    tree = {"trainer": {**made.trainer, "strategy": strategy}}
    return yaml.safe_dump(tree, sort_keys=False).rstrip()


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
        lines = [f"# {each.place}: {each.was}", each.text, ""]
        lines += [f"# changed  {note.key}: {note.text}" for note in made.notes if not note.lost]
        lines += [f"# LOST     {note.key}: {note.text}" for note in made.notes if note.lost]
        if made.unneeded:
            lines.append(f"# unneeded {', '.join(dict.fromkeys(made.unneeded))}")
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts)
