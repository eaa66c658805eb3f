"""Source of a plan's model: an import path, a configuration file, or dimensions; and its inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.planner.transformer import Decoder, Dimensions
from shardeddp.wrap.tree import imported


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a model is built, and how a step of it is run."""

    name: str
    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, int], Any]


def of_dimensions(dims: Dimensions, length: int, name: str = "transformer") -> Source:
    """A decoder that predicts sequences of a length."""

    def step(module: nn.Module, samples: int) -> Any:
        return module(torch.empty(samples, length, dtype=torch.long))

    return Source(name=name, build=lambda: Decoder(dims, length), step=step)


def of_transformers_config(path: Path, length: int) -> Source:
    """A decoder with the dimensions of a ``config.json`` of transformers."""
    config: Any = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return of_dimensions(Dimensions.of_config(cast("dict[str, Any]", config)), length, str(path))


def of_module(
    path: str, arguments: Mapping[str, Any], inputs: Sequence[str], length: int
) -> Source:
    """A LightningModule, unmodified; its ``training_step`` is what is planned.

    Args:
        path: Import path of the class (``package.module.Class``), or a YAML file of LightningCLI
            whose ``model`` has ``class_path`` and ``init_args``.
        arguments: Of the constructor; they go before those of the file.
        inputs: Of a batch, as ``int64:B,S``; several are a tuple. Nothing: the module's
            ``example_input_array``.
        length: What ``S`` stands for.

    Raises:
        ConfigurationError: There is no such class, or it cannot be built without data.
    """
    if path.endswith((".yaml", ".yml")):
        document: Any = yaml.safe_load(Path(path).read_text())
        entry: Any = document.get("model") if isinstance(document, dict) else None
        if not isinstance(entry, dict) or "class_path" not in entry:
            raise ConfigurationError(
                f"{path}: expected `model:` with `class_path:`, as LightningCLI writes it"
            )
        model = cast("dict[str, Any]", entry)
        path, arguments = model["class_path"], {**(model.get("init_args") or {}), **arguments}
    kind = imported(path.replace(":", "."))
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigurationError(
            f"{path!r}: expected the import path of a LightningModule (package.module.Class), found "
            f"{'nothing' if kind is None else repr(kind)}. Is its folder on PYTHONPATH?"
        )
    found = kind

    def build() -> nn.Module:
        try:
            return found(**arguments)
        except Exception as error:
            raise ConfigurationError(
                f"{found.__name__} cannot be built on the meta device with the arguments "
                f"{dict(arguments)} ({type(error).__name__}: {error}). Constructors that load weights or data "
                f"have to do that elsewhere (configure_model, setup); pass arguments with --args "
                f"'{{\"name\": value}}'"
            ) from error

    def step(module: nn.Module, samples: int) -> Any:
        batch = _batch(module, inputs, samples, length)
        train = vars(type(module)).get("training_step") or getattr(module, "training_step", None)
        if train is None:
            return module(*batch) if isinstance(batch, tuple) else module(batch)
        return cast(Any, module).training_step(batch, 0)

    return Source(name=found.__name__, build=build, step=step)


def _batch(module: nn.Module, inputs: Sequence[str], samples: int, length: int) -> Any:
    if inputs:
        made = [_tensor(text, samples, length) for text in inputs]
        return tuple(made) if len(made) > 1 else made[0]
    example = getattr(module, "example_input_array", None)
    if isinstance(example, torch.Tensor):
        return torch.empty(samples, *example.shape[1:], dtype=example.dtype)
    raise ConfigurationError(
        f"{type(module).__name__} has no example_input_array, so what a batch looks like has to be "
        f"said: --input int64:B,S for tokens, --input float32:B,3,224,224 --input int64:B for images "
        f"with labels"
    )


def _tensor(text: str, samples: int, length: int) -> torch.Tensor:
    name, _, sizes = text.partition(":")
    dtype = vars(torch).get(name)
    known = {"B": samples, "S": length}
    parts = [part.strip() for part in sizes.split(",") if part.strip()]
    if not isinstance(dtype, torch.dtype) or not all(it in known or it.isdigit() for it in parts):
        raise ConfigurationError(
            f"--input {text}: expected DTYPE:SIZES such as int64:B,S, with B for the samples of a "
            f"micro-batch and S for --length"
        )
    shape = [known[it] if it in known else int(it) for it in parts]
    return torch.zeros(shape, dtype=dtype)
