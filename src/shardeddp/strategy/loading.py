"""load_from_checkpoint: a LightningModule of its own from a sharded checkpoint, without ranks and without a Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardeddp.lightning_api import LightningModule, load_state, migrate_checkpoint
from shardeddp.strategy.checkpoints import open_any

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
    """Make a module of a sharded checkpoint, as ``LightningModule.load_from_checkpoint`` makes one of a file.

    One process reads all of the model, checked, and nothing of the optimizers.

    Args:
        module_class: Of the module; made with the hyper-parameters that were saved.
        checkpoint_path: The directory.
        map_location: Where the module goes at the end.
        strict: Whether names have to be the same; None: what the module says.
        weights_only: False unpickles hyper-parameters that only pickle could save; that can run any code.
        foreign: The directory may be one of another tool (FSDP, FSDP2, ``torch.distributed.checkpoint``).
        hyper_parameters: In place of those that were saved.

    Raises:
        CheckpointError: It is damaged, or does not fit.
    """
    checkpoint = open_any(Path(checkpoint_path), weights_only, foreign=foreign)
    checkpoint = migrate_checkpoint(checkpoint, str(checkpoint_path))
    saved = checkpoint.setdefault(module_class.CHECKPOINT_HYPER_PARAMS_KEY, {})
    saved.update(hyper_parameters)
    module: Any = load_state(module_class, checkpoint, strict=strict, **hyper_parameters)
    return module.to(map_location)
