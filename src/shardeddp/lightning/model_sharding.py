"""Sharding of a LightningModule: preparation, units with their dtypes and recomputation, generation in step."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardeddp.comm import run_on_all_ranks
from shardeddp.config import ActivationCheckpointing, CPUOffload, MixedPrecision
from shardeddp.engine.deferred_init import ConstructionRecord, DeferredRecord
from shardeddp.engine.runtime import Prefetch, Runtime, make_plain, runtime_of
from shardeddp.engine.shard_model import place_module, shard_model
from shardeddp.errors import ConfigurationError
from shardeddp.lightning import private
from shardeddp.lightning.activation_checkpointing import checkpoint_activations
from shardeddp.lightning.api import LightningModule, Precision, TrainerStatus, rank_zero_info
from shardeddp.lightning.mixed_precision import assign_dtypes, cast_at_boundaries, resolve_dtypes
from shardeddp.lightning.precision import ShardedPrecision
from shardeddp.lightning.process_group import ProcessGroup
from shardeddp.lightning.restore import Restore
from shardeddp.plan.sharding_strategy import Reshard, ShardingStrategy
from shardeddp.report import describe_units
from shardeddp.torch_private import TracingContext
from shardeddp.wrap import Policy, build_units
from shardeddp.wrap.tree import UnitSpec

# -- Lets ``generate()`` of transformers keep ranks in step, where a rank that has ended could take no part in gathers


class Managed:
    """What a module answers when transformers asks whether its ranks have to run equally many forwards.

    Dynamo reads the same attribute, and takes a module that has it for one of FSDP, with other rules for its guards:
    while it traces, the answer is no.
    """

    def __bool__(self) -> bool:
        return TracingContext.try_get() is None


MARK = "_is_fsdp_managed_module"
"""The attribute by which transformers recognizes a sharded model: ``generate()`` then runs with ``synced_gpus``."""


def keep_generation_in_step(module: nn.Module, sharding: ShardingStrategy) -> None:
    """Mark every model in a module that generates by itself, if its units are gathered for each forward.

    Ranks that end their sequences at different lengths would run different numbers of forwards, and the longest would
    wait for the others in a gather.

    Args:
        module: The root; models of transformers in it are known by name, so that nothing needs to be installed.
        sharding: Whether units are gathered for each forward.
    """
    if sharding.reshard is Reshard.NEVER:
        return
    for child in module.modules():
        if any(base.__name__ == "GenerationMixin" for base in type(child).__mro__):
            setattr(child, MARK, Managed())


# -- DeferredInit: what Lightning's hooks tell of the making of a model on the meta device, and of its checkpoint


class DeferredInit:
    """Between the building of a module and its sharding: remembers what sharding has to know of the building."""

    def __init__(self) -> None:
        self._before_run: torch.Tensor | None = None  # the generator's state when init_module was entered
        self._in_run: ConstructionRecord | None = None  # the same for configure_model
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
                self._in_run = ConstructionRecord(state=torch.get_rng_state(), earlier=earlier)
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

    def record_of(self, load: Callable[[], None] | None) -> DeferredRecord:
        """What is known of a module that is about to be sharded; forgets it.

        Args:
            load: Loads a checkpoint into the sharded module; None: there is none.
        """
        origins: list[ConstructionRecord] = []
        if self._before_run is not None:
            # Every run seeds anew, where seed_everything has been called.
            origins.append(ConstructionRecord(state=self._before_run, reseeded="PL_GLOBAL_SEED" in os.environ))
        if self._in_run is not None:
            origins.append(self._in_run)
        record = DeferredRecord(
            load=load,
            creators={id(parameter): creator for parameter, creator in self._made.values()},
            dtypes=self._dtypes,
            origins=origins,
        )
        self.forget()
        return record

    def forget(self) -> None:
        """Let everything go."""
        self._before_run, self._in_run = None, None
        self._made, self._dtypes = {}, {}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


# -- Sharding of a module: preparation, units with their dtypes and recomputation, and the engine that shards them


class ModelSharding:
    """Shards modules, whether they were built as usual or on the meta device.

    Args:
        group: Ranks of the run.
        restore: Checkpoint that may wait for the shards.
        sharding_strategy: Name of the sharding strategy, for people.
        sharding: Sharding strategy.
        policy: Choice of the modules that are units.
        mixed_precision: Dtypes of the user; None: those of the Trainer's precision.
        activation_checkpointing: Modules that recompute; None: none.
        offload: Tensors that live in host memory.
        prefetch: Units that are gathered ahead.
        uneven_units: Whether ranks may use different units in a step.
    """

    def __init__(
        self,
        group: ProcessGroup,
        restore: Restore,
        *,
        sharding_strategy: str,
        sharding: ShardingStrategy,
        policy: Policy,
        mixed_precision: MixedPrecision | None,
        activation_checkpointing: ActivationCheckpointing | None,
        offload: CPUOffload,
        prefetch: Prefetch,
        uneven_units: bool,
    ) -> None:
        self._group, self._restore = group, restore
        self._sharding_strategy, self._sharding, self._policy = sharding_strategy, sharding, policy
        self._mixed_precision, self._activation_checkpointing = mixed_precision, activation_checkpointing
        self._prefetch, self._uneven_units = prefetch, uneven_units
        self._passthrough = not (offload.params or offload.optimizer)  # where one rank has nothing to share
        self._deferred = DeferredInit()

    @contextmanager
    def building(
        self, module: LightningModule | None, precision: Precision, empty_init: bool | None
    ) -> Generator[None]:
        """Surround the building of a module; with ``empty_init=True`` on the meta device, until it is sharded."""
        with self._deferred.building(module, empty_init), precision.tensor_init_context():
            yield

    def shard(self, module: LightningModule, precision: Precision, fitting: bool) -> Runtime:
        """The engine of a module, which is sharded unless an earlier run has done so; a collective of all ranks."""
        runtime = runtime_of(module)
        if fitting and self._group.mesh.device.type == "cpu":
            _refuse_sync_batch_norm(module)
        if runtime is None:
            make_plain(module)
            self._deferred.note_dtypes(module)
            precision.convert_module(module)
            return self._shard(module, precision)
        if runtime.sharding != self._sharding:
            raise ConfigurationError(
                f"this {type(module).__name__} is already sharded by another strategy ({runtime.sharding}) and cannot "
                f"change to {self._sharding}. Use the same options, or build the module anew and load a checkpoint"
            )
        self._group.current = runtime.mesh  # of the Trainer that has sharded it, whatever this one has used before
        return runtime

    def _shard(self, module: LightningModule, precision: Precision) -> Runtime:
        mesh = self._group.mesh
        units = run_on_all_ranks("finding units", partial(self._plan, module, precision), mesh.control)
        load = self._restore.take_pending()
        deferred = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        record = self._deferred.record_of(load if deferred else None)
        runtime = shard_model(
            units,
            mesh,
            self._sharding,
            self._prefetch,
            record,
            passthrough=self._passthrough,
            uneven=self._uneven_units,
        )
        place_module(module, mesh.device)
        private.tell_device(module, mesh.device)
        keep_generation_in_step(module, self._sharding)
        self._restore.load(None if deferred else load, module)
        if self._group.is_rank_zero:
            rank_zero_info(f"ShardedDP: {describe_units(self._sharding_strategy, runtime)}")
        return runtime

    def _plan(self, module: nn.Module, precision: Precision) -> list[UnitSpec]:
        """The units of a module, the root first; casts at their boundaries and recomputation are set up."""
        units = build_units(module, self._policy)
        autocast = precision.autocast if isinstance(precision, ShardedPrecision) else None
        dtypes = resolve_dtypes(self._mixed_precision, autocast)
        units = assign_dtypes(module, units, dtypes)
        cast_at_boundaries(module, units, dtypes)
        if self._activation_checkpointing is not None:
            checkpoint_activations(module, self._activation_checkpointing)
        return units

    def forget(self) -> None:
        """Let go of what is known of the building of a module."""
        self._deferred.forget()


def _refuse_sync_batch_norm(module: nn.Module) -> None:
    """Raise where the forward of a training would: torch computes synchronized BatchNorm on accelerators only."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if names:
        raise ConfigurationError(
            f"expected no SyncBatchNorm (sync_batchnorm=True) in a training on the CPU, where torch does not compute "
            f"it, found {len(names)} layers: {', '.join(map(repr, names[:3]))}{', ...' if names[3:] else ''}. Build "
            f"the module anew and leave sync_batchnorm out, so that each rank normalizes by its own batch, or train on "
            f"GPUs"
        )
