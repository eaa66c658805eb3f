"""Migration of files to ShardedDP: YAML and Python of Lightning, Accelerate's YAML, DeepSpeed's JSON.

Files are parsed as data, never run or imported.
"""

from __future__ import annotations

import ast
import json
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from shardeddp.config import (
    OF_LIGHTNING,
    ActivationCheckpointing,
    CheckpointOptions,
    CPUOffload,
    MixedPrecision,
    option_names,
    parse_options,
)
from shardeddp.errors import ConfigurationError
from shardeddp.translation.accelerate import translate_accelerate
from shardeddp.translation.calls import Call, Expression, python_code
from shardeddp.translation.deepspeed import is_of_deepspeed, with_config
from shardeddp.translation.python_source import SourceReader
from shardeddp.translation.rules import Translation, apply_rules, in_order, not_known
from shardeddp.translation.strategies import NAMES, RULES, translate, translate_config
from shardeddp.wrap import SizePolicy

# -- strategies in a file, and their replacements


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """Replacement of one strategy in a file."""

    location: str
    """File and line, or file and path of the entry."""

    was: str
    text: str
    """Replacement as Python lines or YAML."""

    translation: Translation


def migrate(path: Path) -> list[Migrated]:
    """Translate each strategy of another library in a file.

    Raises:
        ConfigurationError: The file cannot be parsed, or has no known strategy.
    """
    try:
        if path.suffix == ".py":
            with tokenize.open(path) as file:
                text = file.read()
            found = sorted(
                _of_python(text, path), key=lambda it: int(it.location.rpartition(":")[2])
            )
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
        kind, made = translate_accelerate(config, path.parent)
        yield _in_yaml(made, str(path), f"Accelerate ({kind})")
    elif is_of_deepspeed(config):
        yield _in_yaml(translate_config(config), str(path), "a configuration of DeepSpeed")
    else:
        yield from _of_lightning(config, path, "")


def _try(made: Translation) -> None:
    """Note the errors that ShardedDP raises for the options, as far as no user code is imported."""
    said = {note.key.partition(".")[0] for note in made.notes if note.lost}  # of their fields
    known = {*option_names()} - said
    given = {key: it for key, it in made.options.items() if key in known and _is_plain(it)}
    while refusal := _refusal(given):
        made.lose("ShardedDP", f"refuses what is left: {refusal}")
        # The next error is one of the others. A strategy comes first, what needs it later.
        rest = ({key: given[key] for key in given if key != each} for each in reversed(given))
        given = next((it for it in rest if _refusal(it) != refusal), {})


def _refusal(given: Mapping[str, Any]) -> str:
    """Return the error that ShardedDP raises for options; empty if it takes them."""
    try:
        parse_options({key: _object(it) for key, it in given.items()})
    except Exception as error:  # noqa: BLE001 - files hold anything, and a line says so
        return str(error) or type(error).__name__
    return ""


_FIELDS = ("MixedPrecision", "ActivationCheckpointing")
"""Option classes that ShardedDP also accepts as a mapping of their fields."""


def _is_plain(value: Any) -> bool:
    """True if ShardedDP can validate a value without running or importing user code."""
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


def _in_yaml(made: Translation, location: str, was: str) -> Migrated:
    _try(made)
    return Migrated(location=location, was=was, text=_as_yaml(made), translation=made)


# -- YAML of Lightning


def _of_lightning(config: Mapping[str, Any], path: Path, prefix: str) -> Iterator[Migrated]:
    for key, value in config.items():
        location = f"{prefix}{key}"
        if key == "strategy" and (chosen := _chosen(value)) is not None:
            name, arguments, foreign = chosen
            made = (
                _of_ours(arguments)
                if name == "ShardedDP"
                else translate(name, with_config(arguments, path.parent))
            )
            if foreign:
                made.lose(", ".join(foreign), "could not be read")
            precision = config.get("precision")
            if name == "DeepSpeedStrategy" and precision in ("bf16-true", "16-true"):
                made.trainer.setdefault("precision", f"{str(precision)[:-5]}-mixed")
            yield _in_yaml(made, f"{path}: {location}", name)
        elif isinstance(value, Mapping):
            yield from _of_lightning(cast("Mapping[str, Any]", value), path, f"{location}.")
        elif isinstance(value, list):
            entries = {f"[{at}]": it for at, it in enumerate(cast("list[Any]", value))}
            yield from _of_lightning(entries, path, location)


def _chosen(value: Any) -> tuple[str, dict[str, Any], list[str]] | None:
    """Return class, arguments and unreadable keys of a ``strategy`` entry; None if unknown."""
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
    """Translate arguments of ShardedDP itself: foreign ones by their rules, misspelt ones lost."""
    made = Translation()
    known = [*option_names(), *OF_LIGHTNING, "precision_plugin"]
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
            names = [it.name for it in fields(_WITH_FIELDS[key])]
            for name in cast("Mapping[str, Any]", inner):
                if name not in names:
                    made.lose(f"{key}.{name}", not_known(name, names))
    return made


_WITH_FIELDS: dict[str, type] = {
    "mixed_precision": MixedPrecision,
    "activation_checkpointing": ActivationCheckpointing,
    "cpu_offload": CPUOffload,
    "checkpoint_options": CheckpointOptions,
}


def _from_yaml(value: Any) -> Any:
    if isinstance(value, Mapping):
        entry = cast("Mapping[str, Any]", value)
        inner = {key: _from_yaml(it) for key, it in entry.items()}
        given = inner.get("init_args") or {}
        if "class_path" in entry and isinstance(given, Mapping):
            return Call(path=str(entry["class_path"]), arguments=cast("Mapping[str, Any]", given))
        return inner
    return [*map(_from_yaml, cast("list[Any]", value))] if isinstance(value, list) else value


# -- Python


def _of_python(text: str, path: Path) -> Iterator[Migrated]:
    tree = ast.parse(text, str(path))
    reader = SourceReader(tree)
    for node in ast.walk(tree):
        for value in _chosen_by(node, reader):
            fabric = reader.is_fabric(node)
            location, said = f"{path}:{value.lineno}", ast.unparse(value)
            word = reader.read(value)
            if isinstance(word, str) and word in NAMES:
                kind, arguments = NAMES[word]
                shown = f"strategy={said}" if repr(word) == said else f"strategy={said} ({word!r})"
                yield _in_python(translate(kind, arguments), location, shown, fabric)
                continue
            made = Translation()
            if isinstance(word, Expression) and not reader.is_strategy(value):
                made.lose("strategy", f"{said} is known to the running program only")
            elif type(word) is str and word.startswith(("ddp", "deepspeed", "fsdp")):
                made.lose("strategy", not_known(word, NAMES))
            if made.loses:
                yield Migrated(location=location, was=f"strategy={said}", text="", translation=made)
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
            made = translate(name, with_config(given, path.parent), [*map(reader.read, known)])
            unread += [ast.unparse(it) for it in positional[len(known) :]]
            for each in unread:
                made.lose(each, "arguments that only the running program knows")
            if len(positional) < len(node.args):
                made.lose("partial", "arguments that are added where it is called are not read")
            yield _in_python(
                made, f"{path}:{node.lineno}", ast.unparse(node), reader.is_fabric(node)
            )


def _chosen_by(node: ast.AST, reader: SourceReader) -> Iterator[ast.expr]:
    """Yield values of ``strategy``: any in calls of Trainer or Fabric, only constants elsewhere."""
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


def _in_python(made: Translation, location: str, was: str, fabric: bool) -> Migrated:
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
        location=location, was=was, text="\n".join([*lines, line + trainer]), translation=made
    )


_code = partial(python_code, quote=partial(json.dumps, ensure_ascii=False))
"""Writer of values as Python code, with the double quotes of formatted files."""


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
        return inner if value.name in _FIELDS else {"class_path": value.path, "init_args": inner}
    if isinstance(value, (list, tuple)):
        return [*map(_to_yaml, cast("Sequence[Any]", value))]
    if isinstance(value, dict):
        return {key: _to_yaml(it) for key, it in cast("dict[str, Any]", value).items()}
    return str(value) if isinstance(value, str) else value


def report(found: Sequence[Migrated]) -> str:
    """Write the report: each strategy, its replacement, and one line per note."""
    parts: list[str] = []
    for each in found:
        made = each.translation
        lines = [f"# {each.location}: {each.was}", *filter(None, [each.text]), ""]
        lines += [f"# changed  {note.key}: {note.text}" for note in made.notes if not note.lost]
        lines += [f"# LOST     {note.key}: {note.text}" for note in made.notes if note.lost]
        if made.unneeded:
            lines.append(f"# unneeded {', '.join(dict.fromkeys(made.unneeded))}")
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts)
