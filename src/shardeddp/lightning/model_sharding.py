"""LightningModule sharding: preparation, units with dtypes, recomputation, generation in step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardeddp.comm import agree_on_any, agree_on_layout, run_on_all_ranks
from shardeddp.config import AUTO, Options
from shardeddp.engine.activation_checkpointing import checkpoint_activations, keep_activations
from shardeddp.engine.deferred_init import record_resets
from shardeddp.engine.dtypes import assign_dtypes, cast_at_boundaries, forget_dtypes
from shardeddp.engine.recording import Recording
from shardeddp.engine.runtime import Runtime, runtime_of
from shardeddp.engine.shard_model import place_module, shard_model, take_values
from shardeddp.engine.takeover import Takeover, is_taken_over
from shardeddp.errors import ConfigurationError, RankError, first_three
from shardeddp.lightning import private
from shardeddp.lightning.api import Precision, Trainer, rank_zero_info, rank_zero_warn
from shardeddp.lightning.axes import TENSOR_PARALLEL, refuse_untried
from shardeddp.lightning.precision import ShardedPrecision
from shardeddp.lightning.restore import Restore
from shardeddp.lightning.run_group import Ranks, RunGroup
from shardeddp.lightning.tensor_parallel import (
    count_batches_once,
    parallelize,
    tensor_axis,
)
from shardeddp.optim.attach import suspend
from shardeddp.plan.memory import MemoryPlan, plan_memory
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES, ShardingStrategy
from shardeddp.report import describe_units, print_units
from shardeddp.tensor.distributed import Distribution, take_apart
from shardeddp.tensor.expert_dispatch import expert_axis
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import TracingContext
from shardeddp.wrap import build_units, require_parameters
from shardeddp.wrap.experts import ChosenUnits, Experts, find_experts, keep_own
from shardeddp.wrap.flat_buffers import costs_of
from shardeddp.wrap.tensor_plan import (
    UNEVEN,
    PlannedLayer,
    cut_layers,
    find_layers,
    parameters_to_cut,
    with_heads_of_configs,
    with_own_forward,
)
from shardeddp.wrap.tree import UnitSpec

# -- Generation with transformers
#
# A rank that has finished its sequence takes part in gathers until all ranks have.


class Managed:
    """Value of :data:`MARK`: True, so that transformers runs equally many forwards on all ranks.

    False while Dynamo traces: it reads the same attribute, and would apply its guard rules for FSDP
    modules.
    """

    def __bool__(self) -> bool:
        return TracingContext.try_get() is None


MARK = "_is_fsdp_managed_module"
"""Attribute that marks a sharded model for transformers.

``generate()`` then runs with ``synced_gpus``.
"""


def synchronize_generation(module: nn.Module, sharding: ShardingStrategy) -> None:
    """Mark every model with ``generate()`` in a module, if units are gathered per forward.

    Ranks whose sequences end at different lengths would run different numbers of forwards, and the
    longest would wait for the others in a gather. Models are found by the name of their base class,
    so transformers need not be installed.
    """
    if sharding.retains:
        return
    for child in module.modules():
        if any(base.__name__ == "GenerationMixin" for base in type(child).__mro__):
            setattr(child, MARK, Managed())


def forget_generation(module: nn.Module) -> None:
    """Undo :func:`synchronize_generation`."""
    for child in module.modules():
        if isinstance(vars(child).get(MARK), Managed):
            delattr(child, MARK)


# -- ModelSharding: preparation, units and engine of one module


class ModelSharding:
    """Sharding of modules that were built as usual or on the meta device.

    Args:
        group: Ranks of the run.
        restore: Checkpoint whose values modules get.
        shards_several: True if several modules are sharded one after the other, as under Fabric.
    """

    def __init__(self, group: RunGroup, restore: Restore, *, shards_several: bool = False) -> None:
        self._group, self._restore = group, restore
        self.recording = Recording()
        """Covers every module that is built; several may be built before one is sharded."""
        self._hooks = ExitStack()  # closes the recording of hooks
        self._shards_several = shards_several

    @contextmanager
    def building(self, precision: Precision, empty_init: bool | None) -> Generator[None]:
        """Record the construction of a module inside the context: its operations on meta tensors.

        Args:
            precision: Precision plugin of the Trainer; it may set the dtype of new tensors.
            empty_init: True: build on the meta device. Else tensors are on the device that the user
                names, or on the host: the whole model is never built on the GPU.
        """
        place = torch.device("meta") if empty_init else nullcontext()
        with place, self.recording.watched(), precision.tensor_init_context():
            yield

    def begin_hooks(self) -> None:
        """Record operations of hooks on meta tensors until :meth:`end_hooks`.

        These are the setup hooks, and hooks of a checkpoint that is read before the sharding.
        """
        if self.recording.is_used:
            self._hooks.enter_context(self.recording.watched(builds=False))

    def end_hooks(self) -> None:
        """End the recording of hooks before the model is sharded, or after a hook has failed."""
        self._hooks.close()

    def shard(
        self,
        module: nn.Module,
        precision: Precision,
        replace_layers: Callable[[], None],
        *,
        fitting: bool,
        averages: Iterable[nn.Parameter] = (),
    ) -> Runtime:
        """Shard a module and return its engine; a collective of all ranks.

        A module that an earlier run has sharded in the same way keeps its engine. Parameters that
        other runs have sharded differently, or in another module, are sharded anew with their
        present values. Before, ``replace_layers`` replaces layers on the Trainer's request
        (SyncBatchNorm). Its ``averages`` get their values after it.
        """
        self.recording.set_aside(averages)
        runtime = runtime_of(module)
        outdated = runtime is not None and self._is_outdated(runtime, precision)
        if runtime is None or outdated:
            replace_layers()
        if fitting:  # evaluation needs no parameters, as under DistributedDataParallel
            if self._group.mesh.world.size > 1 and not self._shards_several:
                require_parameters(module)
            if self._group.mesh.device.type == "cpu":
                _refuse_sync_batch_norm(module)
        if runtime is not None and not outdated:
            # The module's shards belong to the mesh of the Trainer that sharded it: use that one.
            self._group.reuse(runtime.mesh)
            return runtime
        refuse_untried(module, self._group.options)
        takeover = self._take_over(module)
        try:
            run_on_all_ranks(
                "preparing the model",
                partial(self._convert, module, precision),
                self._group.mesh.control,
            )
            return self._shard(module, precision, takeover)
        except BaseException:
            takeover.restore_values()
            raise

    def forget_values(self) -> None:
        """Free what was recorded, once the module and its averages have their values."""
        self.recording.forget_values()

    def memory_plan(
        self, runtime: Runtime, *, accumulates: bool, as_full_shard: bool = False
    ) -> MemoryPlan:
        """Plan the memory of this rank for a sharded model, without activations.

        ``as_full_shard`` plans it with that strategy instead of its own, without split layers and
        divided experts.
        """
        units, sharding = [it.unit for it in runtime.progresses], self._group.options.sharding
        costs = [unit.costs() for unit in units]
        if as_full_shard:
            sharding = SHARDING_STRATEGIES["full_shard"]
            topology = sharding.topology(1, runtime.mesh.topology.world_size)
            on_host = any(it.plan.on_host for unit in costs for it in unit)
            costs = [
                [*costs_of(it.spec, topology, on_host=on_host), *it.costs()[len(it.groups) :]]
                for it in units
            ]
        return plan_memory(
            costs,
            sharding,
            prefetch=self._group.options.backward_prefetch,
            needs_receive_buffer=self._group.device.type == "cpu",
            accumulates=accumulates,
            offload_optimizer=self._group.offloads_optimizer,
        )

    def print_units(self, module: nn.Module | None) -> None:
        """Print the table of a module's units on rank 0."""
        runtime = None if module is None else runtime_of(module)
        if runtime is None:
            raise RuntimeError(
                "ShardedDP has no units yet: the Trainer shards the model when it starts to run"
            )
        if self._group.is_rank_zero:
            print_units(self._group.options.sharding_strategy, runtime)

    def check_reshard(
        self, trainer: Trainer, name: str, shard_size: int | None, ranks: Ranks, runtime: Runtime
    ) -> Options:
        """Check that a model can be sharded by another strategy between two steps; a collective.

        Returns:
            Options with the new strategy; equal to the present ones if nothing changes.

        Raises:
            ConfigurationError: An option does not allow it, or ranks pass different strategies.
            RuntimeError: The run is no training, or the runtime of a rank is in a step or has
                incomplete gradients.
        """
        if not trainer.training:
            raise RuntimeError("reshard() outside of training: call it in a fit, between two steps")
        options = self._group.options.with_sharding(name, shard_size)
        split, name = options.tensor_parallel_size, options.sharding_strategy
        experts = options.expert_parallel_size
        if AUTO in (name, options.shard_size) or split > 1 or experts > 1:
            raise ConfigurationError(
                f"reshard({name!r}, {options.shard_size!r}) with tensor_parallel_size={split} and "
                f"expert_parallel_size={experts}: expected the name of a strategy, a number of "
                f"ranks or None, and layers and experts that are not split"
            )
        options.sharding.topology(ranks.num_nodes, ranks.per_node)
        agree_on_layout([f"{name} of {options.shard_size}"], self._group.mesh.control)
        try:
            self._group.run_on_all_ranks("resharding", lambda: runtime.check_rest("reshard()"))
        except RankError as error:
            raise error.__cause__ or error from None
        return options

    def reshard(
        self,
        module: nn.Module,
        precision: Precision,
        options: Options,
        ranks: Ranks,
        former: Runtime,
    ) -> Runtime:
        """Shard a model in training by other options, after :meth:`check_reshard`; a collective.

        The new engine continues the state of the ``former`` one.
        """
        self._group.renew(options, ranks)
        runtime = self.shard(module, precision, lambda: None, fitting=True)
        runtime.go_on_from(former)
        return runtime

    def _is_outdated(self, runtime: Runtime, precision: Precision) -> bool:
        """Return True if any rank has to shard a module anew; a collective of all ranks.

        Reasons: added or removed layers, parameters or buffers; other options or dtypes.
        """
        same = runtime.options.shards_like(self._group.options)
        same = same and runtime.precision == _compared(precision)
        outdated = not (same and runtime.is_current)
        return agree_on_any([outdated], self._group.mesh.control)[0]

    def _take_over(self, module: nn.Module) -> Takeover:
        """Take over parameters that are sharded already, in this module or in others."""
        sharded = [it for it in module.parameters() if isinstance(it, ShardTensor)]
        suspend(sharded)
        takeover = Takeover(module)
        for root in takeover.roots:
            keep_activations(root)
            forget_dtypes(root)
            forget_generation(root)
        if self._group.mesh.world.size == 1:
            takeover.make_plain()
        return takeover

    def _convert(self, module: nn.Module, precision: Precision) -> None:
        self.recording.notice_writes()
        record_resets(module, self.recording)
        with self.recording.active():
            precision.convert_module(module)

    def _shard(self, module: nn.Module, precision: Precision, takeover: Takeover) -> Runtime:
        mesh, options = self._group.mesh, self._group.options
        layers = self._find_split_layers(module)
        experts = self._find_experts(module)
        units = run_on_all_ranks(
            "preparing units",
            partial(self._prepare_units, module, precision, layers, experts),
            mesh.control,
        )
        load = self._restore.take_pending()
        is_deferred = any(
            tensor.is_meta and not is_taken_over(tensor)
            for tensor in (*module.parameters(), *module.buffers())
        )
        runtime = shard_model(
            units,
            mesh,
            options,
            precision=_compared(precision),
            recording=self.recording,
            takeover=takeover,
            load=load if is_deferred else None,
            is_only=not self._shards_several,
        )
        place_module(module, mesh.device)
        private.set_device(module, mesh.device)
        synchronize_generation(module, options.sharding)
        self._restore.load(None if is_deferred else load, module)
        if self._group.is_rank_zero:
            described = describe_units(options.sharding_strategy, runtime)
            rank_zero_info(f"ShardedDP: {described}")
        return runtime

    def _find_split_layers(self, module: nn.Module) -> list[PlannedLayer]:
        """Find the layers of the plan; give the ranks that split one equal values of it."""
        mesh, options = self._group.mesh, self._group.options
        plan, size = options.tensor_parallel_plan, options.tensor_parallel_size
        if size == 1:
            return []
        if not plan and not any(isinstance(it, DTensor) for it in module.parameters()):
            rank_zero_warn(
                f"tensor_parallel_size={size}, and no layer is split: groups of {size} ranks compute "
                f"the same. Set tensor_parallel_plan ('auto' for models of transformers), or split "
                f"layers in configure_model by parallelize_module"
            )
            return []
        if plan is None:
            return []
        layers = run_on_all_ranks(
            "reading tensor_parallel_plan",
            lambda: find_layers(module, plan, size),
            mesh.control,
        )
        uneven = [it.name for it in layers if it.style_name == UNEVEN]
        if uneven:
            rank_zero_warn(
                f"tensor_parallel_size={size} does not divide the vocabulary or features of "
                f"{first_three(uneven)}: each rank has this layer whole. Pad it to split it "
                f"(model.resize_token_embeddings(..., pad_to_multiple_of={size}))"
            )
        heads = with_heads_of_configs(module, layers) if plan != "auto" else []
        if heads:
            rank_zero_warn(
                f"{first_three(heads)} is the number of all heads, and tensor_parallel_plan gives each "
                f"rank 1/{size} of them: a forward that views features by it divides those of the "
                f"rank into too many heads, without an error. Use view(*shape, -1, head_dim) there"
            )
        own = with_own_forward(layers) if plan != "auto" else []
        if own:
            rank_zero_warn(
                f"tensor_parallel_plan splits {first_three(own)}, whose class has a forward of its "
                f"own: it is given this rank's part of the weight, and what it returns is summed or "
                f"gathered over ranks afterwards. What is not linear in it, or looks at all features "
                f"(a norm, a softmax, an activation behind a split by rows), is not what one process "
                f"computes: put it into a module around the layer"
            )
        for parameter in {id(it): it for it in parameters_to_cut(layers)}.values():
            if not parameter.is_meta and parameter.numel():
                take_values(parameter, mesh.device, mesh.tensor)
        return layers

    def _find_experts(self, module: nn.Module) -> list[Experts]:
        """Find the experts that are divided among ranks; give all ranks rank 0's values of them."""
        mesh, options = self._group.mesh, self._group.options
        size = options.expert_parallel_size
        if size == 1:
            return []
        experts = run_on_all_ranks(
            "finding experts",
            lambda: find_experts(module, options.experts, size),
            mesh.control,
        )
        shapes = [f"experts {it.name}: {it.count}" for it in experts]
        agree_on_layout(shapes, mesh.control)
        for parameter in (it for each in experts for it in each.module.parameters()):
            if not parameter.is_meta:
                take_values(parameter, mesh.device, mesh.data)
        return experts

    def _prepare_units(
        self,
        module: nn.Module,
        precision: Precision,
        layers: Sequence[PlannedLayer],
        experts: Sequence[Experts],
    ) -> list[UnitSpec]:
        """Leave this rank's part of a module, with casts and recomputation; return the units, root first."""
        options = self._group.options
        policy, split = options.auto_wrap_policy, dict[nn.Parameter, Distribution]()
        if experts:
            policy = ChosenUnits(policy, module, experts)
            split = keep_own(module, experts, expert_axis(self._group.expert_mesh))
        elif self._group.device_mesh is not None:
            split = self._split_layers(module, layers, self._group.device_mesh)
        units = build_units(module, policy, split)
        autocast = precision.autocast if isinstance(precision, ShardedPrecision) else None
        units = assign_dtypes(module, units, options.mixed_precision, autocast)
        cast_at_boundaries(module, units, options.mixed_precision)
        if options.activation_checkpointing is not None:
            checkpoint_activations(module, options.activation_checkpointing)
        return units

    def _split_layers(
        self, module: nn.Module, layers: Sequence[PlannedLayer], device_mesh: DeviceMesh
    ) -> dict[nn.Parameter, Distribution]:
        """Split the layers of a plan, and those that users have split; return the parts of parameters."""
        tensor_mesh = device_mesh[TENSOR_PARALLEL]
        count_batches_once(module, device_mesh)
        parallelize(module, layers, tensor_mesh)
        parts = take_apart(module, tensor_mesh)
        return {**parts, **cut_layers(module, layers, tensor_axis(self._group.mesh))}


def _compared(precision: Precision) -> object:
    """Return a comparable form of a precision; equal forms choose equal dtypes."""
    return type(precision), precision.precision


def _refuse_sync_batch_norm(module: nn.Module) -> None:
    """Refuse SyncBatchNorm on the CPU before a forward does; torch supports it on GPUs only."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if names:
        raise ConfigurationError(
            f"expected no SyncBatchNorm (sync_batchnorm=True) in a training on the CPU, where "
            f"torch does not compute it, found {len(names)} layers: "
            f"{first_three(map(repr, names))}. Build the module "
            f"anew and leave sync_batchnorm out, so that each rank normalizes by its own batch, or "
            f"train on GPUs"
        )
