"""Source of a plan's model: an import path, a configuration file, or dimensions; and its inputs."""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from lightning_utilities import apply_to_collection
from torch import nn
from torch.nn.parameter import is_lazy

from shardeddp.engine.dtypes import cast_tensors
from shardeddp.engine.hooks import find_tensors
from shardeddp.errors import ConfigurationError
from shardeddp.planner.transformer import Decoder, Dimensions, tensor_plan_of
from shardeddp.torch_private import storage_of
from shardeddp.wrap.tensor_plan import TensorPlan
from shardeddp.wrap.tree import imported


@dataclass(frozen=True, kw_only=True)
class Source:
    """Factory of a model and of a training step on it."""

    name: str
    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, int, torch.dtype | None], Any]
    """Training step of a module on a number of samples; see :func:`_training_step` for the dtype."""
    tokens_of: Callable[[nn.Module, int], int]
    """Tokens of a sample, by module and sequence length; 1 if samples are no sequences."""
    is_affine: bool = False
    """True if its work is known to be affine in the number of samples."""
    dimensions: Dimensions | None = None
    """Dimensions from which the model follows alone; None: it has code of its own."""
    tensor_plan: TensorPlan | None = None
    """Tensor-parallel plan for ``auto`` or an unset option; None: the plan of the module itself."""


def of_dimensions(dims: Dimensions, length: int, name: str = "transformer") -> Source:
    """Return the source of a decoder on sequences of ``length`` tokens."""

    def step(module: nn.Module, samples: int, dtype: torch.dtype | None) -> Any:
        return module(torch.empty(samples, length, dtype=torch.long))

    return Source(
        name=name,
        build=lambda: Decoder(dims, length),
        step=step,
        tokens_of=lambda _, length: length,
        is_affine=True,
        dimensions=dims,
        tensor_plan=tensor_plan_of(dims),
    )


def of_transformers_config(path: Path, length: int) -> Source:
    """Return the source of a decoder with the dimensions of a transformers ``config.json``."""
    config = _parsed(path / "config.json" if path.is_dir() else path, json.loads)
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return of_dimensions(Dimensions.of_config(cast("dict[str, Any]", config)), length, str(path))


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ConfigurationError(f"{path} cannot be parsed: {why}") from error


def of_module(
    named: str | type[nn.Module],
    arguments: Mapping[str, Any],
    inputs: Sequence[str],
    length: int,
    make_batch: Callable[[int], Any] | None = None,
) -> Source:
    """Return the source of an unmodified LightningModule; its ``training_step`` is planned.

    ``named`` is its class, the import path, or a YAML file of LightningCLI. See :func:`make_plan`
    for the other arguments.
    """
    path = named if isinstance(named, str) else ""
    if path.endswith((".yaml", ".yml")):
        document = _parsed(Path(path), yaml.safe_load)
        entry: Any = document.get("model") if isinstance(document, dict) else None
        model = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        own, kind_path = model.get("init_args") or {}, model.get("class_path")
        if not isinstance(kind_path, str) or not isinstance(own, dict):
            raise ConfigurationError(
                f"{path}: expected `model:` with `class_path:` and perhaps a mapping as "
                f"`init_args:`, as LightningCLI writes it"
            )
        path, arguments = kind_path, {**cast("dict[str, Any]", own), **arguments}
    kind = imported(path) if path else named
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigurationError(
            f"{path or named!r}: expected a LightningModule, or its class or the import path of "
            f"that (package.module.Class), found {'nothing' if kind is None else repr(kind)}. Is "
            f"its folder on PYTHONPATH?"
        )
    found = kind

    def build() -> nn.Module:
        try:
            return configured(found(**arguments))
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigurationError(
                f"{found.__name__} cannot be built on the meta device with the arguments "
                f"{dict(arguments)} ({type(error).__name__}: {error}). Constructors that load weights or data "
                f"have to do that elsewhere (configure_model, setup); pass arguments with --args "
                f"'{{\"name\": value}}'"
            ) from error

    return Source(
        name=found.__name__,
        build=build,
        step=_training_step(inputs, length, make_batch),
        tokens_of=_tokens(inputs, make_batch),
    )


def of_instance(
    module: nn.Module,
    inputs: Sequence[str],
    length: int,
    make_batch: Callable[[int], Any] | None = None,
) -> Source:
    """Return the source of a LightningModule instance; copies without its weights are planned.

    See :func:`of_module` for the other arguments.
    """
    return Source(
        name=type(module).__name__,
        build=lambda: configured(without_weights(module)),
        step=_training_step(inputs, length, make_batch),
        tokens_of=_tokens(inputs, make_batch),
    )


def sized(tensor: torch.Tensor, former: int, samples: int) -> torch.Tensor:
    """Return a tensor like another, without values, for ``samples`` samples in place of ``former``.

    Tensors whose dim 0 is not of samples keep it.
    """
    if tensor.is_nested:
        raise ConfigurationError("a batch with nested tensors cannot be planned. Pad them")
    scales = tensor.ndim and tensor.shape[0] == former
    return torch.empty((samples, *tensor.shape[1:]) if scales else tensor.shape, dtype=tensor.dtype)


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch: size of dim 0 of its first tensor; 1 without any."""
    return next((it.size(0) for it in find_tensors(batch) if it.ndim and it.size(0)), 1)


def tokens_of(batch: Any) -> int:
    """Return the tokens of a sample: size of dim 1 of the first 2D tensor of token ids, else 1.

    Whole numbers behind a tensor of floating-point numbers are targets, such as several labels of
    an image, and no tokens.
    """
    for it in find_tensors(batch):
        if it.is_floating_point() and it.ndim > 1:
            return 1
        if it.ndim == 2 and it.dtype in (torch.int64, torch.int32):
            # Samples of a nested tensor differ in length.
            return it.values().numel() // max(1, it.size(0)) if it.is_nested else it.shape[1]
    return 1


def _tokens(
    inputs: Sequence[str], make_batch: Callable[[int], Any] | None
) -> Callable[[nn.Module, int], int]:
    """Return the function for ``Source.tokens_of``; of a batch, the length is that of its tokens."""

    def found(module: nn.Module, length: int) -> int:
        if make_batch:
            return length
        with torch.device("meta"):
            return tokens_of(_batch(module, inputs, 1, length))

    return found


def replacement(
    empty: Callable[[Sequence[int], torch.dtype], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that maps tensors to others; tied ones stay tied, shared memory shared.

    ``empty`` returns new memory of a shape; it gets the dtype of the tensor that is replaced, too.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # originals keep their ids
    memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # by storage

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, nn.Parameter):  # has no storage of its elements
            return empty(tensor.shape, tensor.dtype)
        key, storage = (storage_of(tensor), tensor.dtype), tensor.untyped_storage()
        if key not in memory:
            count = storage.nbytes() // tensor.element_size()
            is_all = tensor.numel() == count and tensor.is_contiguous()
            memory[key] = empty(tensor.shape if is_all else (count,), tensor.dtype)
            if is_all:  # most are: a view of itself would take as long as the memory
                return memory[key]
        return memory[key].as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        if id(tensor) not in made:
            new = fresh(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = tensor, new
        return made[id(tensor)][1]

    return replaced


def without_weights(module: nn.Module) -> nn.Module:
    """Copy a module with its parameters and buffers on the meta device."""
    bare = replacement(lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
    tensors = [it for it in (*module.parameters(), *module.buffers()) if not is_lazy(it)]
    try:
        return copy.deepcopy(module, {id(it): bare(it) for it in tensors})
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied, so it cannot be planned as it is "
            f"({type(error).__name__}: {error}). Give its class and `arguments`, or take what "
            f"cannot be copied out of the module"
        ) from error


def configured(module: nn.Module) -> nn.Module:
    """Call ``configure_model`` of a module on the meta device, if it has one; return the module."""
    build: Callable[[], None] | None = getattr(module, "configure_model", None)
    if build is not None:
        try:
            build()
        except (Exception, SystemExit) as error:
            raise ConfigurationError(
                f"configure_model() of {type(module).__name__} does not run without a Trainer, its "
                f"data and its ranks ({type(error).__name__}: {error}), and the planner builds "
                f"models without them. Build the layers from the constructor's arguments alone"
            ) from error
    return module


def _training_step(
    inputs: Sequence[str], length: int, make_batch: Callable[[int], Any] | None
) -> Callable[[nn.Module, int, torch.dtype | None], Any]:
    """Return the step of a module; floating-point tensors of its batch are cast to a dtype if any."""

    def step(module: nn.Module, samples: int, dtype: torch.dtype | None) -> Any:
        batch = make_batch(samples) if make_batch else _batch(module, inputs, samples, length)
        batch = batch if dtype is None else cast_tensors(batch, dtype)
        train = getattr(module, "training_step", None)
        if train is None:
            return module(*batch) if isinstance(batch, tuple) else module(batch)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*self\.log\(\)")  # without a Trainer
            arguments = (batch, 0) if _takes_two(train) else (batch,)
            return train(*arguments)

    return step


def _takes_two(train: Callable[..., Any]) -> bool:
    """Return whether a ``training_step`` takes a batch index, which Lightning makes optional."""
    try:
        inspect.signature(train).bind(None, 0)
    except TypeError:
        return False
    return True


def _batch(module: nn.Module, inputs: Sequence[str], samples: int, length: int) -> Any:
    if inputs:
        if not any("B" in re.split("[:, ]", text) for text in inputs):
            raise ConfigurationError(
                f"--input {', '.join(inputs)}: expected a B among the sizes, as int64:B,S: plans compare "
                f"numbers of samples"
            )
        made = [_tensor(text, samples, length) for text in inputs]
        return tuple(made) if len(made) > 1 else made[0]
    example = getattr(module, "example_input_array", None)
    if example is not None:
        fitted = partial(sized, former=samples_of(example), samples=samples)
        try:
            return apply_to_collection(example, torch.Tensor, fitted)
        except ValueError as error:  # a frozen dataclass, which Lightning does not move, either
            raise ConfigurationError(
                f"{type(module).__name__}.example_input_array: {error} Name dtypes and sizes instead: "
                f"--input float32:B,8 (from Python: inputs=['float32:B,8'])"
            ) from error
    raise ConfigurationError(
        f"{type(module).__name__} has no example_input_array: expected dtypes and sizes of "
        f"a batch, found none: --input int64:B,S for tokens, --input float32:B,3,224,224 --input int64:B for images "
        f"with labels (from Python: inputs=['int64:B,S'])"
    )


def _tensor(text: str, samples: int, length: int) -> torch.Tensor:
    name, _, sizes = text.partition(":")
    dtype = vars(torch).get(name)
    known = {"B": samples, "S": length}
    parts = [part.strip() for part in sizes.split(",") if part.strip()]
    is_known = all(it in known or re.fullmatch("[0-9]{1,15}", it) for it in parts)
    if not isinstance(dtype, torch.dtype) or not is_known:
        raise ConfigurationError(
            f"--input {text}: expected DTYPE:SIZES such as int64:B,S, with B for the samples of a "
            f"micro-batch and S for --length"
        )
    shape = [known[it] if it in known else int(it) for it in parts]
    if math.prod(shape) * dtype.itemsize >= 2**60:
        raise ConfigurationError(f"--input {text}: expected a tensor below 2**60 bytes")
    return torch.empty(shape, dtype=dtype)  # its values are not known
