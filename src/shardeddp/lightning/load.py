"""Modules from sharded checkpoints, without ranks or a Trainer.

Our ``load_from_checkpoint``, and an extension of Lightning's.
"""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch

from shardeddp.checkpoint.find import carries_manifest
from shardeddp.checkpoint.location import local_path, location
from shardeddp.checkpoint.read import LazyTensor
from shardeddp.checkpoint.schema import OPTIMIZERS, WEIGHTS, check_entries
from shardeddp.checkpoint.state_codec import are_leaves
from shardeddp.errors import first_three
from shardeddp.lightning.api import LightningModule, extend_reading
from shardeddp.lightning.private import load_state, migrate_checkpoint
from shardeddp.lightning.restore import open_any

ModuleT = TypeVar("ModuleT", bound=LightningModule)


def load_from_checkpoint(
    module_class: type[ModuleT],
    checkpoint_path: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    strict: bool | None = None,
    weights_only: bool | None = None,
    foreign: bool = False,
    **hyper_parameters: Any,
) -> ModuleT:
    """Make a module from a checkpoint, as ``module_class.load_from_checkpoint`` does.

    Also reads directories of other tools. One process reads and verifies the whole model; optimizer
    states are not read.

    Args:
        module_class: Class of the module, constructed with the saved hyper-parameters.
        checkpoint_path: Checkpoint directory, or a plain file.
        map_location: Device of the returned module.
        strict: True if names must match exactly; None: the module's own setting.
        weights_only: False unpickles hyper-parameters that only pickle could save, which can run
            arbitrary code.
        foreign: True if the directory may be that of another tool (FSDP, FSDP2,
            ``torch.distributed.checkpoint``).
        hyper_parameters: Overrides of saved hyper-parameters.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not fit the module.
    """
    path = local_path(checkpoint_path)
    if not _is_directory(path):
        return module_class.load_from_checkpoint(
            path, map_location, strict=strict, weights_only=weights_only, **hyper_parameters
        )
    checkpoint = migrate_checkpoint(_read_directory(path, "cpu", weights_only, foreign), path)
    saved = checkpoint.setdefault(module_class.CHECKPOINT_HYPER_PARAMS_KEY, {})
    saved.update(hyper_parameters)
    module: Any = load_state(module_class, checkpoint, strict=strict, **hyper_parameters)
    _warn_of_casts(path, checkpoint[WEIGHTS], module)
    return module.to(map_location)


def _warn_of_casts(path: str, saved: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Warn of converted dtypes, by tensor: values may be rounded, or take twice the memory."""
    own = module.state_dict(keep_vars=True)
    casts = [
        f"{name} from {value.dtype} to {own[name].dtype}"
        for name, value in saved.items()
        if isinstance(value, torch.Tensor)
        and isinstance(own.get(name), torch.Tensor)
        and own[name].dtype != value.dtype
    ]
    if casts:
        warnings.warn(
            f"tensors of {path} were converted to the dtypes of {type(module).__name__}: "
            f"{first_three(casts)}",
            stacklevel=3,
        )


def read_directories_too() -> None:
    """Let Lightning's ``load_from_checkpoint``, also of data modules, read sharded checkpoints."""
    extend_reading(_with_directories)


def _with_directories(read: Any) -> Any:
    @wraps(read)
    def reading(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        local = local_path(path) if isinstance(path, (str, os.PathLike)) else ""
        if _is_directory(local):
            return _read_directory(local, map_location, weights_only)
        return read(path, map_location=map_location, weights_only=weights_only)

    return reading


def _is_directory(path: str) -> bool:
    place = location(path)
    return place.is_dir() or carries_manifest(place)


def _read_directory(
    path: str, map_location: Any, weights_only: bool | None, foreign: bool = False
) -> dict[str, Any]:
    """Read a directory into the form of a file that Lightning reads.

    Tensors that stay on the host are read lazily, optimizer states never.
    """
    checkpoint = open_any(location(path), weights_only, foreign=foreign)
    check_entries(checkpoint, path, loads=True)
    device = _device_of(map_location)
    return {
        key: value
        if key == OPTIMIZERS or (key == WEIGHTS and device.type == "cpu")
        else _read(value, device)
        for key, value in checkpoint.items()
    }


def _device_of(map_location: Any) -> torch.device:
    """Return the device on which ``torch.load`` would put a tensor saved on the host."""
    if callable(map_location):
        moved: Any = cast("Callable[..., Any]", map_location)(torch.UntypedStorage(0), "cpu")
        return torch.device("cpu") if moved is None else moved.device
    if isinstance(map_location, Mapping):
        map_location = cast("Mapping[str, Any]", map_location).get("cpu")
    return torch.device("cpu" if map_location is None else map_location)


def _read(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.whole() if isinstance(value, LazyTensor) else value).to(device)
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        if are_leaves(mapping.values()):
            return mapping
        read = {key: _read(item, device) for key, item in mapping.items()}
        dict.update(mapping, read)  # Counter.update would add
        return mapping
    if isinstance(value, Namespace):
        _read(vars(value), device)
        return value
    if type(value) in (list, tuple) and not are_leaves(value):
        return type(value)(map(partial(_read, device=device), value))
    return value
