"""Sharding of a module: preparation, units with their dtypes and recomputation, and the engine that shards them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from torch import nn

from shardeddp.comm import together
from shardeddp.config import ActivationCheckpointing, CPUOffload, MixedPrecision
from shardeddp.errors import ConfigurationError
from shardeddp.lightning_api import LightningModule, Precision, private, rank_zero_info
from shardeddp.monitor.units import describe_units
from shardeddp.plan.placement import Placement
from shardeddp.plugins.activation_checkpointing import checkpoint_activations
from shardeddp.plugins.deferred import DeferredInit
from shardeddp.plugins.generation import keep_generation_in_step
from shardeddp.plugins.mixed_precision import assign_dtypes, cast_at_boundaries, resolve_dtypes
from shardeddp.plugins.placing import place_module
from shardeddp.plugins.precision import ShardedPrecision
from shardeddp.sharding.hooks import make_plain, runtime_of
from shardeddp.sharding.runtime import Prefetch, Runtime
from shardeddp.sharding.setup import shard_model
from shardeddp.sharding.spec import UnitSpec
from shardeddp.strategy.process_group import ProcessGroup
from shardeddp.strategy.restore import Restore
from shardeddp.wrap import Policy, build_units


class ModelSharding:
    """Shards modules, whether they were built as usual or on the meta device.

    Args:
        group: Ranks of the run.
        restore: Checkpoint that may wait for the shards.
        sharding_strategy: Name of the sharding strategy, for people.
        placement: Sharding strategy.
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
        placement: Placement,
        policy: Policy,
        mixed_precision: MixedPrecision | None,
        activation_checkpointing: ActivationCheckpointing | None,
        offload: CPUOffload,
        prefetch: Prefetch,
        uneven_units: bool,
    ) -> None:
        self._group, self._restore = group, restore
        self._sharding_strategy, self._placement, self._policy = sharding_strategy, placement, policy
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
        if runtime.placement != self._placement:
            raise ConfigurationError(
                f"this {type(module).__name__} is already sharded by another strategy ({runtime.placement}) and cannot "
                f"change to {self._placement}. Use the same options, or build the module anew and load a checkpoint"
            )
        self._group.current = runtime.mesh  # of the Trainer that has sharded it, whatever this one has used before
        return runtime

    def _shard(self, module: LightningModule, precision: Precision) -> Runtime:
        mesh = self._group.mesh
        units = together("finding units", partial(self._plan, module, precision), mesh.control)
        load = self._restore.take_pending()
        deferred = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        birth = self._deferred.birth_of(load if deferred else None)
        runtime = shard_model(
            units, mesh, self._placement, self._prefetch, birth, idle=self._passthrough, uneven=self._uneven_units
        )
        place_module(module, mesh.device)
        private.tell_device(module, mesh.device)
        keep_generation_in_step(module, self._placement)
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
