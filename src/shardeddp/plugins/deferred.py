"""DeferredInit: what Lightning's hooks tell of the making of a model on the meta device, and of its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardeddp.lightning_api import LightningModule, TrainerStatus, private
from shardeddp.sharding.materialize import Birth
from shardeddp.sharding.replay import Origin


class DeferredInit:
    """Between the building of a module and its sharding: remembers what sharding has to know of the building."""

    def __init__(self) -> None:
        self._before_run: torch.Tensor | None = None  # the generator's state when init_module was entered
        self._in_run: Origin | None = None  # the same for configure_model
        self._made: dict[int, tuple[nn.Parameter, nn.Module]] = {}  # every meta parameter with its creator
        self._dtypes: dict[int, torch.dtype] = {}

    @contextmanager
    def building(self, module: LightningModule | None, empty_init: bool | None) -> Generator[None]:
        """Surround the building of a module.

        Args:
            module: The one that is connected to the Trainer.
            empty_init: True builds on the meta device; else tensors are built where the user says, or on the host:
                never the whole model on the device.
        """
        running = module is not None and private.trainer_of(module) is not None
        if running and module.trainer.state.status == TrainerStatus.RUNNING:  # type: ignore[union-attr]
            if self._in_run is None:
                earlier = [tensor for tensor in _tensors(module) if tensor.is_meta]  # type: ignore[arg-type]
                self._in_run = Origin(state=torch.get_rng_state(), earlier=earlier)
        elif empty_init:
            self._before_run = torch.get_rng_state()
        hook = register_module_parameter_registration_hook(self._note)
        try:
            with torch.device("meta") if empty_init else nullcontext():
                yield
        finally:
            hook.remove()

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.is_meta:
            self._made.setdefault(id(parameter), (parameter, module))

    def note_dtypes(self, module: nn.Module) -> None:
        """Remember in which dtypes parameters were made, before they are converted."""
        self._dtypes = {id(parameter): parameter.dtype for parameter in module.parameters() if parameter.is_meta}

    def birth_of(self, load: Callable[[], None] | None) -> Birth:
        """What is known of a module that is about to be sharded; forgets it.

        Args:
            load: Loads a checkpoint into the sharded module; None: there is none.
        """
        origins: list[Origin] = []
        if self._before_run is not None:
            # Every run seeds anew, where seed_everything has been called.
            origins.append(Origin(state=self._before_run, reseeded="PL_GLOBAL_SEED" in os.environ))
        if self._in_run is not None:
            origins.append(self._in_run)
        birth = Birth(
            load=load,
            creators={id(parameter): creator for parameter, creator in self._made.values()},
            dtypes=self._dtypes,
            origins=origins,
        )
        self.forget()
        return birth

    def forget(self) -> None:
        """Let everything go."""
        self._before_run, self._in_run = None, None
        self._made, self._dtypes = {}, {}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
