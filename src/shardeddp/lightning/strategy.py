"""ShardedDP: Lightning's interface to the engine; each hook shows the parts that it calls, in order.

The file is long because it is one class: a quarter are the arguments of ``ShardedDP`` with the
descriptions from which the command line's help is made, the rest are Lightning's hooks.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from shardeddp.checkpoint.load_states import parameter_names
from shardeddp.comm import Mesh, Traffic, during
from shardeddp.comm.rendezvous import leave_loopback
from shardeddp.config import (
    AUTO,
    OF_LIGHTNING,
    ActivationCheckpointingLike,
    CheckpointOptions,
    CPUOffload,
    MixedPrecision,
    OptimizerScope,
    OptimizerShard,
    Options,
    ShardingStrategyName,
    ShardSizeOption,
    StartMethod,
    StateDictType,
    UnevenBatches,
    changed_arguments,
    parse_options,
)
from shardeddp.engine.runtime import Runtime, runtime_of
from shardeddp.engine.summon import summon
from shardeddp.lightning import private
from shardeddp.lightning.api import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    LightningModule,
    ParallelStrategy,
    Precision,
    Trainer,
    TrainerFn,
    introduction,
    register_names,
    reset_seed,
)
from shardeddp.lightning.axes import refuse_callbacks
from shardeddp.lightning.callbacks import CallbackAdapters
from shardeddp.lightning.checkpointing import Checkpoints
from shardeddp.lightning.expert_parallel import ExpertRankChecks
from shardeddp.lightning.guards import Guards
from shardeddp.lightning.launchers import make_launcher
from shardeddp.lightning.model_sharding import ModelSharding
from shardeddp.lightning.out_of_memory import (
    MemoryGuard,
    MemoryReport,
    OutOfMemory,
    memory_report,
    refusal_to_repeat,
)
from shardeddp.lightning.planning import (
    Chosen,
    PlanLauncher,
    RunSetting,
    choose_on_rank_zero,
    planned_precision,
)
from shardeddp.lightning.precision import shard_precision
from shardeddp.lightning.private import check_lightning
from shardeddp.lightning.repeated_steps import Deepen, RepeatedSteps
from shardeddp.lightning.restore import Restore
from shardeddp.lightning.resume import Resume
from shardeddp.lightning.run_group import Ranks, RunGroup, set_rank
from shardeddp.lightning.tensor_parallel import (
    TensorRankChecks,
    explain_missing_mesh,
    explain_shapes,
    warning_of_untied,
)
from shardeddp.optim.attach import attach_optimizer, follow_optimizers, shard_states
from shardeddp.optim.late_parameters import average_late_gradients, find_late_parameters
from shardeddp.optim.scope import refuse_beside_axes
from shardeddp.plan.memory import MemoryPlan
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.wrap import PolicyLike
from shardeddp.wrap.tensor_plan import TensorPlan

# An instance as default gives the command line a flag for each field.
_DEFAULTS = CheckpointOptions()


class ShardedDP(ParallelStrategy):
    """Lightning strategy that shards parameters, gradients and optimizer states over ranks.

    The LightningModule stays unmodified, and the result equals that of one process on the whole
    batch. Runs on CPUs (gloo), where nearly all tests run, and on CUDA (NCCL), tested on one GPU.

    An unknown argument raises a TypeError; for arguments of other strategies it gives the line to
    write instead.

    Args:
        sharding_strategy: State to split over the ranks: ``full_shard`` (parameters, gradients and
            optimizer states: ZeRO-3, FSDP), ``hybrid_shard`` (the same inside a node, replicas
            across nodes: HSDP), ``shard_grad_op`` (gradients and optimizer states: ZeRO-2),
            ``shard_optimizer`` (optimizer states: ZeRO-1) or ``no_shard`` (nothing: DDP), in any
            case. ``auto``: rank 0 chooses one for all ranks by its plan in the setup of the first
            run, and logs the choice with the reason.
        shard_size: Number of ranks that share one model under ``hybrid_shard``; must divide the
            number of ranks. None: the ranks of one node. ``auto``: chosen in the setup of the first
            run, by its plan if the GPU and ``example_input_array`` are known, else the ranks of an
            NVLink domain or of a node.
        auto_wrap_policy: Modules that become units, each gathered and released as a whole: ``auto``
            (the repeated blocks of the model), classes or their import paths, a policy object, a
            function of (name, module), or None (one unit: all parameters are whole in a step).
        mixed_precision: Dtypes of gathered parameters, of computation and of gradient reduction: a
            ``MixedPrecision``, or a dtype for its ``param_dtype``. None: the dtypes of the
            Trainer's ``precision``.
        activation_checkpointing: Modules that recompute their activations in backward: classes, a
            policy or ``auto`` as for ``auto_wrap_policy``, or an ``ActivationCheckpointing``.
            None: no recomputation.
        cpu_offload: True: shards and optimizer states live in host memory, and the optimizer steps
            there. A ``CPUOffload`` selects some of them. No effect in training on CPUs.
        reshard_after_forward: True: release a unit's parameters between its forward and its
            backward. False: keep them gathered. A number of neighbouring ranks: each keeps its part
            of the gathered unit, and the all-gather for backward runs among these ranks only
            (ZeRO++'s hpZ). None: the default of the sharding strategy.
        optimizer_shard: Ranks that split the optimizer under ``hybrid_shard``: ``group``, the shard
            group; ``world``, all ranks: replicas split main shards, gradient shards and optimizer
            states too (Megatron-FSDP's HFSDP), for one more all-gather across them per step.
        optimizer_scope: Input of the update of one element, by class name or import path, for
            optimizers that torch does not have. ``element``: the element itself (steps on shards,
            at no cost). ``parameter``: its whole parameter (each rank steps some parameters).
            ``model``: anything. None: unknown optimizers count as ``model``.
        tensor_parallel_size: Number of neighbouring ranks of a node that split layers. They train
            on the same batches; sharding is among the ranks that train on different batches.
        tensor_parallel_plan: Layers to split: ``auto`` (the plan of a transformers model), or a
            mapping from module names (``model.layers.*.mlp.up_proj``) to styles (``colwise``), as
            listed in ``docs/tensor-parallel.md``. None: the layers that ``configure_model`` splits
            by ``parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)``.
        expert_parallel_size: Number of neighbouring ranks that divide the experts, and send each
            other tokens. Ranks with the same experts shard them by the sharding strategy.
        experts: Modules that hold the experts: classes, or name patterns (a string with ``*``), of
            modules of stacked experts, or of single experts in an ``nn.ModuleList``. None: the
            experts of Mixtral-like transformers models.
        forward_prefetch: Number of units gathered ahead of the current one in forward; 0: none.
            Each takes the memory of a unit. More than 1 helps if gathering is at times slower than
            computing.
        backward_prefetch: Number of units gathered ahead of the current one in backward; 0: none.
            Torch's ``BackwardPrefetch`` and its names (``BACKWARD_PRE``) count as 1.
        reduce_every_backward: True: with gradient accumulation, reduce every micro-batch and
            accumulate gradient shards (less memory). False: accumulate unsharded gradients and
            reduce once per step (less communication). None: the default of the sharding strategy.
        uneven_batches: End of a training epoch in which ranks have different numbers of batches.
            ``error``: an error on all ranks, with the numbers. ``min``: the end of the first rank
            without a batch. ``join``: the end of the last rank; the others repeat their last batch
            with zero gradients.
        uneven_units: True: ranks may use different units in a step (experts, modalities, random
            depth); they agree before each gather in forward and at the start of each backward, and
            contribute zeros for unused units. False: ranks must use the same units once their first
            steps have been alike; if these differ, the ranks agree by themselves.
        state_dict_type: Format of saved checkpoints: ``full``, one ordinary Lightning file;
            ``sharded``, a directory to which every rank writes its part; ``auto``, a file up to
            ``max_file_gb`` of ``checkpoint_options``, a directory beyond. Every setting loads both.
        checkpoint_options: Further checkpoint options: size limit of files, asynchronous saves,
            durability, foreign formats.
        process_group_backend: Backend of the process group: ``gloo``, ``nccl``, or one for each
            kind of device (``cpu:gloo,cuda:nccl``). None: the device's own.
        timeout: Time after which a collective fails: seconds or a timedelta (``0:10:00`` in YAML).
        debug: True: compare the collectives of user code over ranks before they run. If ranks
            differ, an error names both lines instead of a hang. Each such call then waits for a
            message on the host.
        plan_only: True: plan a ``fit`` instead of training, without starting ranks. The plan shows
            the settings that fit on this machine's GPUs, their speed and the reasons. A GPU's name
            (``A100-80``): plan for that GPU.
        start_method: Method of starting ranks if the cluster environment does not start them:
            ``popen`` runs the script again; ``spawn``, ``fork`` and ``forkserver`` start functions
            (notebooks, tests).
        accelerator: Lightning's accelerator, set by the Trainer.
        parallel_devices: Devices of the ranks of this node, set by the Trainer.
        cluster_environment: Source of ranks and addresses; None: the one that Lightning detects.
        checkpoint_io: Lightning plugin that writes and reads files; None: Lightning's default.
        precision_plugin: Precision plugin, set by the Trainer from ``precision``.
    """

    def __init__(
        self,
        sharding_strategy: ShardingStrategyName | str = "full_shard",  # any case
        shard_size: ShardSizeOption = None,
        auto_wrap_policy: PolicyLike = "auto",
        *,
        mixed_precision: MixedPrecision | str | None = None,
        activation_checkpointing: ActivationCheckpointingLike = None,
        cpu_offload: bool | CPUOffload = False,
        reshard_after_forward: bool | int | None = None,
        optimizer_shard: OptimizerShard = "group",
        optimizer_scope: Mapping[str, OptimizerScope] | None = None,
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: TensorPlan | None = None,
        expert_parallel_size: int = 1,
        experts: PolicyLike = None,
        forward_prefetch: int = 1,
        backward_prefetch: int | str = 1,
        reduce_every_backward: bool | None = None,
        uneven_batches: UnevenBatches = "error",
        uneven_units: bool = False,
        state_dict_type: StateDictType = "auto",
        checkpoint_options: CheckpointOptions = _DEFAULTS,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 600.0,
        debug: bool = False,
        plan_only: bool | str = False,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **others: Any,
    ) -> None:
        given = {**changed_arguments(ShardedDP, locals()), **others}
        check_lightning()
        options = parse_options(given, (*OF_LIGHTNING, "precision_plugin"))
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        self.chosen: Chosen | None = None
        """Choice of ``auto`` with its reason; set in ``setup_environment``."""
        self._tensor_ranks = TensorRankChecks()
        self._expert_ranks = ExpertRankChecks()

        self.num_nodes = 1  # set by the Trainer
        self._group = RunGroup(options)
        self._checkpoints = Checkpoints(self._group)
        self._restore = Restore(self._group)
        self._model_sharding = ModelSharding(self._group, self._restore)
        self._resume = Resume(self._group)
        self._guards = Guards(self._group)
        self._out_of_memory = OutOfMemory(self._describe_memory)
        self._callbacks = CallbackAdapters(options.uneven_batches)
        self._repeated: RepeatedSteps | None = None  # of a run whose steps are repeated
        self._runtime: Runtime | None = None

    plan = staticmethod(make_plan)
    """Plan a model without a training run: see :func:`shardeddp.planner.plan.make_plan`."""

    @override
    def __repr__(self) -> str:
        return introduction(self.options.sharding_strategy)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle: options and optimizers.

        Components leave out their state of a process or a run.
        """
        return {**super().__getstate__(), "_runtime": None, "_repeated": None}

    @property
    def options(self) -> Options:
        """Present options; ``auto`` and :meth:`reshard` replace them."""
        return self._group.options

    @property
    def planned(self) -> Plan | None:
        """Plan made under ``plan_only``; None before."""
        return self._launcher.plan if isinstance(self._launcher, PlanLauncher) else None

    # -- Ranks, devices, model

    # The Trainer assigns the module here, and then refuses a compiled module (marked by
    # `_compiler_ctx`) under all but three of Lightning's own strategies. A compiled module trains
    # like any other, so the mark is removed. Lightning's `to_uncompiled` is lost with it, but every
    # later run that is passed no module would look for the mark again.
    _lightning_module = private.ModuleEntry()  # pyright: ignore[reportAssignmentType]

    @property
    def trainer(self) -> Trainer | None:
        """Trainer of the module; None before it connects one, or in a parent of spawned ranks."""
        module = self.lightning_module
        return None if module is None else private.trainer_of(module)

    def _trainer_at_work(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError(
                "ShardedDP has no module yet: the Trainer connects it when it starts to run"
            )
        return self.trainer

    @property
    def _fitting(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    @property
    def is_distributed(self) -> bool:
        """True if there are several ranks: Lightning then injects samplers and syncs logs."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError(
                "ShardedDP has no devices yet: the Trainer assigns them when it is made"
            )
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self._group.single_rank_environment is None else 0

    @property
    @override
    def local_rank(self) -> int:
        return super().local_rank if self._group.single_rank_environment is None else 0

    @property
    @override
    def node_rank(self) -> int:
        return super().node_rank if self._group.single_rank_environment is None else 0

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self._group.single_rank_environment is None else 1

    @property
    def num_processes(self) -> int:
        """Number of ranks per node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.options.tensor_parallel_size == 1:
            ranks = self.num_nodes * self.num_processes
            return {"num_replicas": ranks, "rank": self.global_rank}
        topology = self.mesh.topology
        return {"num_replicas": topology.data_size, "rank": topology.data_rank(self.global_rank)}

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or shard_precision(None)

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None has to stay None: the Trainer takes anything else as the user's choice, over its own
        # precision argument.
        self._precision_plugin = (
            None if precision_plugin is None else shard_precision(precision_plugin)
        )

    @property
    def repeats_batch(self) -> bool:
        """True if this rank has run out of batches and repeats its last one: ``uneven_batches``."""
        return self._callbacks.repeats_batch

    @property
    def mesh(self) -> Mesh:
        """Communicators of this rank; available from ``setup_environment`` on."""
        return self._group.mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """Mesh with the axes ``data_parallel`` and ``tensor_parallel``.

        Under ``expert_parallel_size`` the axes are ``expert_data_parallel`` and
        ``expert_parallel``. Available from ``setup_environment`` on if one size is above 1.
        """
        if self._group.device_mesh is None:
            raise RuntimeError(
                "ShardedDP has a device mesh from the start of a run with "
                "ShardedDP(tensor_parallel_size=...), or expert_parallel_size, on; there is none yet"
            )
        return self._group.device_mesh

    @property
    def traffic(self) -> Traffic:
        """Bytes communicated by the engine on this rank, by kind."""
        return self.mesh.traffic

    @property
    def _environment(self) -> ClusterEnvironment:
        if self.cluster_environment is None:
            raise RuntimeError(
                "ShardedDP has no cluster environment: the Trainer finds one when it is made"
            )
        return self._group.single_rank_environment or self.cluster_environment

    @property
    def runtime(self) -> Runtime:
        """Engine of the model; available from ``setup`` on."""
        if self._runtime is None:
            raise RuntimeError(
                "ShardedDP has not sharded a model yet: the Trainer does so when it starts to run"
            )
        return self._runtime

    @property
    def memory_plan(self) -> MemoryPlan:
        """Predicted bytes of this rank without activations, at two optimizer states per element."""
        return self._plan_memory()

    def _plan_memory(self, *, as_full_shard: bool = False) -> MemoryPlan:
        accumulates = self.trainer is not None and self.trainer.accumulate_grad_batches > 1
        return self._model_sharding.memory_plan(
            self.runtime, accumulates=accumulates, as_full_shard=as_full_shard
        )

    def _describe_memory(self, error: BaseException) -> MemoryReport:
        plan, saved = self.memory_plan, None
        if self.options.tensor_parallel_size == self.options.expert_parallel_size == 1:
            saved = plan.peak_nbytes - self._plan_memory(as_full_shard=True).peak_nbytes
        trainer, options = self._trainer_at_work(), self.options
        may_repeat = (
            self._fitting
            and self._repeated is None
            and refusal_to_repeat(trainer, trainer.lightning_module, options) is None
        )
        return memory_report(
            error, self.runtime, plan, saved, self.optimizers, options, may_repeat=may_repeat
        )

    def _report_memory(self, error: BaseException) -> None:
        """Say what a rank held, and draw it, if a run ends for want of memory."""
        if self._runtime is not None and self.trainer is not None:
            self._out_of_memory.end_run(error, self.trainer.default_root_dir, self.global_rank)

    def print_units(self) -> None:
        """Print the units and the bytes that each rank stores of them, on rank 0.

        Available from ``on_fit_start`` on. Other ranks may call it, but need not.
        """
        self._model_sharding.print_units(self.lightning_module)

    @contextmanager
    def summon_full_params(
        self,
        module: nn.Module | None = None,
        *,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
    ) -> Generator[None]:
        """Surround code that needs whole parameters; all ranks enter and leave it.

        Inside, modules hold plain parameters of full shape and of the model's own dtype, to be
        read, saved, pickled, passed to other libraries and written to; ranks may differ in this.
        In-place writes of rank 0 reach all ranks at the end; writes of other ranks are dropped.
        References taken before (by an optimizer) still point to the sharded parameters, and a
        ``backward()`` to whole ones is an error. Every rank needs memory for all parameters of
        ``module``; each is gathered once. The context may be nested, and used in any hook or after
        a run. Before the model is sharded it has no effect, as parameters are whole. Within a step,
        modules in the middle of their forward keep their gathered parameters: write to parameters
        outside of steps. With several ranks, an exception drops the written values.

        Args:
            module: Model, submodule, or a deep copy of either; None: the LightningModule.
            writeback: False: drop the written values.
            rank0_only: True: only rank 0 has whole parameters inside; other ranks hold one at a
                time, while it is gathered.
            offload_to_cpu: True: whole parameters are in host memory.
        """
        model = self.lightning_module
        # A later run that has taken over submodules leaves the model itself without a runtime.
        runtime = None if model is None else runtime_of(model) or self._runtime
        target = model if module is None else module
        if runtime is None or target is None:
            yield
            return
        with summon(
            runtime,
            target,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
        ):
            yield

    # -- Start of a run

    @override
    def _configure_launcher(self) -> None:
        options = self.options
        # Raises for sizes that do not fit before any process is started.
        options.sharding.topology(
            self.num_nodes,
            self.num_processes,
            tensor_size=options.tensor_parallel_size,
            expert_size=options.expert_parallel_size,
        )
        self._launcher = make_launcher(
            self, self._environment, self._group, self._model_sharding, self._report_memory
        )

    def set_world_ranks(self) -> None:
        """Set the rank in the cluster environment and in ``rank_zero_only``."""
        self._group.set_ranks(self._environment, self.is_distributed)
        rank = self.node_rank * self.num_processes + self.local_rank
        set_rank(self._environment, rank, self.num_nodes * self.num_processes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._group.connect(self._ranks)
        if AUTO in (self.options.sharding_strategy, self.options.shard_size):
            self.chosen = choose_on_rank_zero(
                self._group, self.lightning_module, self.setting(self.trainer)
            )
        self._group.begin_run(self._ranks, self.lightning_module)
        if self.trainer is not None:
            if self._fitting:
                self._checkpoints.check_stores(self.trainer)
            self._callbacks.keep_averages_on_host(self.trainer, self.trainer.lightning_module)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self._environment, self.root_device, self.num_nodes, self.num_processes)

    def setting(self, trainer: Trainer | None) -> RunSetting:
        """Return the settings that a plan depends on."""
        accumulates = 1 if trainer is None else trainer.accumulate_grad_batches
        return RunSetting(
            options=self.options,
            precision=planned_precision(
                self.precision_plugin.precision, self.options.mixed_precision
            ),
            device=self.root_device,
            num_nodes=self.num_nodes,
            ranks_per_node=self.num_processes,
            accumulates=accumulates,
        )

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        """Surround the construction of a module, also in ``configure_model``.

        With ``empty_init=True`` the module is on the meta device until it is sharded.
        """
        try:
            splits = self.options.tensor_parallel_size > 1
            with (
                warning_of_untied(self.lightning_module if splits else None),
                self._model_sharding.building(self.precision_plugin, empty_init),
            ):
                yield
        except TypeError as error:
            explain_missing_mesh(error)
            raise

    @override
    def setup(self, trainer: Trainer) -> None:
        self._model_sharding.end_hooks()
        module = self.lightning_module
        if self.accelerator is None or module is None:
            raise RuntimeError(
                "ShardedDP.setup() needs the accelerator and the module that a Trainer connects"
            )
        refuse_callbacks(trainer, module, self.options)
        self.accelerator.setup(trainer)
        self._checkpoints.begin_run(trainer, self.checkpoint_io)
        self._guards.begin_run(trainer, partial(self._resume.begin_streams, trainer))
        self._shard_model(trainer, module)
        if self._fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard_model(self, trainer: Trainer, module: LightningModule) -> None:
        """Shard the model, and load what callbacks and checkpoints have for it."""
        sharding, callbacks = self._model_sharding, self._callbacks
        replace_layers = partial(private.replace_layers, self, module)
        self._runtime = sharding.shard(
            module,
            self.precision_plugin,
            replace_layers,
            fitting=self._fitting,
            averages=callbacks.before_sharding(trainer, module),
        )
        self._restore.load(callbacks.after_sharding(trainer, module, self._runtime), module)
        self._restore.load(self._resume.take_kept(module), module)
        sharding.forget_values()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        # `configure_optimizers` may read `trainer.estimated_stepping_batches`: loaders are set up.
        if self._callbacks.align_loaders(trainer):
            super().setup_optimizers(trainer)
        self._resume.ask_loaders_again(trainer)
        for optimizer in self.optimizers:
            refuse_beside_axes(optimizer, self.options)
        self._attach_optimizers()

    def _attach_optimizers(self) -> None:
        if self.runtime.is_passthrough:
            return
        follow_optimizers()
        for optimizer in self.optimizers:
            scopes = self.options.optimizer_scope
            attach_optimizer(optimizer, self._group.offloads_optimizer, scopes)

    # -- Another sharding strategy in the middle of a run

    def reshard(
        self, sharding_strategy: ShardingStrategyName, shard_size: int | None = None
    ) -> None:
        """Continue with another sharding strategy; all ranks call it between two optimizer steps.

        Parameters and averages of callbacks stay the same objects, with their values, gradients and
        optimizer states. Elements that move to other ranks are gathered one tensor at a time: no
        rank ever has the whole model. Shards are in memory twice until all are moved; states of
        optimizers follow after that, one tensor at a time.

        Args:
            sharding_strategy: Name of the new strategy, as for ``ShardedDP``; not ``auto``.
            shard_size: Number of ranks that share one model under ``hybrid_shard``; None: the ranks
                of one node.

        Raises:
            ConfigurationError: The number of ranks or another option does not allow it, or ranks
                pass different strategies.
            RuntimeError: No training is running, a step or ``summon_full_params`` is in progress,
                or gradients of micro-batches are incomplete; on all ranks if true on one.
        """
        trainer, runtime = self._trainer_at_work(), self.runtime
        options = self._model_sharding.check_reshard(
            trainer, sharding_strategy, shard_size, self._ranks, runtime
        )
        if options.shards_like(self.options):
            return
        self.wait_for_checkpoint()
        module = trainer.lightning_module
        self._runtime = self._model_sharding.reshard(
            module, self.precision_plugin, options, self._ranks, runtime
        )
        self._callbacks.after_resharding(trainer, module, self._runtime)
        self._attach_optimizers()
        shard_states(self.optimizers)

    @override
    def model_to_device(self) -> None:
        """Do nothing: parameters reach the device as shards, other tensors in :meth:`setup`."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._resume.prepare_loader(dataloader, self._trainer_at_work())

    @override
    def on_train_start(self) -> None:
        trainer = self._trainer_at_work()
        self._guards.begin_training(trainer, self.node_rank, self.local_rank)
        self._resume.begin_training(trainer.fit_loop)
        self._callbacks.begin_training(trainer)
        self._tensor_ranks.begin_run(self.mesh)
        self._expert_ranks.begin_run(self.runtime.root_module)

    # -- Steps

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._checkpoints.begin_batch()
        self._resume.begin_batch()
        self._callbacks.begin_batch(self._trainer_at_work())

    def _during(self, part: str) -> MemoryGuard:
        mesh = self._group.current
        timed = during(None if mesh is None else mesh.run.clock, part)
        return self._out_of_memory.during(timed)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        with self._during("data"):
            # `root_device` would read a variable of the environment for each batch.
            return super().batch_to_device(batch, device or self._group.device, dataloader_idx)

    def repeat_steps(self, deepen: Deepen, patience_s: float) -> None:
        """Repeat training steps for which memory runs out, for the rest of this run.

        See :class:`shardeddp.ReshardOnOutOfMemory`, which calls it.

        All ranks call it.

        Args:
            deepen: Function that is called with the error and returns a function that reduces the
                memory of a step, to be called on all ranks; None: there is nothing left to reduce,
                and the error is raised.
            patience_s: Maximum wait for other ranks to run out of memory too, in seconds.
        """
        self._repeated = RepeatedSteps(deepen, patience_s, self.mesh)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._repeated is None:
            return self._training_step(args, kwargs)
        step = partial(self._training_step, args, kwargs)
        return self._repeated.run_forward(step, self._trainer_at_work())

    def _training_step(self, args: Any, kwargs: Any) -> Any:
        find_late_parameters(self.optimizers)
        module, context = self._lightning_module, self.precision_plugin.train_step_context()
        is_automatic = module is None or module.automatic_optimization
        return self._step("training_step", context, args, kwargs, optimizes_after=is_automatic)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(
            "predict_step", self.precision_plugin.predict_step_context(), args, kwargs
        )

    def _step(
        self,
        name: str,
        precision: AbstractContextManager[Any],
        args: Any,
        kwargs: Any,
        *,
        optimizes_after: bool | None = None,
    ) -> Any:
        runtime = self.runtime
        step = runtime.step(name, optimizes_after=optimizes_after)
        with self._during("compute"), precision, step as outputs:
            try:
                self._tensor_ranks.begin_step(name, (args, kwargs), runtime)
                outputs.append(getattr(self.lightning_module, name)(*args, **kwargs))
                self._expert_ranks.end_step(runtime)
            except Exception as error:
                self._out_of_memory.explain(error)  # before units are released
                explain_shapes(error, self.options.tensor_parallel_size)
                raise
        return outputs[0]

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        repeated = self._repeated
        with self._during("compute"):
            if repeated is None:
                return super().backward(closure_loss, optimizer, *args, **kwargs)
            backward = super().backward
            return repeated.run_backward(
                lambda loss: backward(loss, optimizer, *args, **kwargs), closure_loss
            )

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._during("optimizer"):
            return super().optimizer_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Zero the loss of a repeated batch (``uneven_batches="join"``); begin the axes' checks."""
        runtime = self.runtime
        self._callbacks.zero_repeated_loss(closure_loss)
        self._tensor_ranks.begin_backward(closure_loss, runtime.mesh)
        self._expert_ranks.begin_backward(runtime)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Average gradients of late parameters; check split layers, calls and token dispatch."""
        runtime = self.runtime
        if runtime.sync_gradients:
            average_late_gradients(self.optimizers)
        self._tensor_ranks.end_backward(runtime)
        self._expert_ranks.end_backward()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        """Surround a micro-batch without gradient communication (accumulation)."""
        with self.runtime.without_sync():
            yield

    @override
    def on_validation_start(self) -> None:
        self._tensor_ranks.begin_evaluation()
        self.runtime.broadcast_buffers()
        self._callbacks.begin_evaluation(self._trainer_at_work())

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_end(self) -> None:
        self._callbacks.end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    # -- Communication for users

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._guards.is_single_rank_failure(self.trainer):
            self._group.barrier(name)
        if name == private.BEFORE_SETUP:
            self._model_sharding.begin_hooks()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return (
            obj
            if self._guards.is_single_rank_failure(self.trainer)
            else self._group.broadcast(obj, src)
        )

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._group.reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        return self._group.gather(tensor, group, sync_grads)

    # -- Checkpoints

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint; empty if not all ranks take part."""
        with self._group.explaining():
            return (
                {}
                if self._guards.is_single_rank_failure(self.trainer)
                else super().optimizer_state(optimizer)
            )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint in the format of ``state_dict_type``.

        After an error of this rank alone, nothing is written.
        """
        if self._guards.is_single_rank_failure(self.trainer):
            return
        names = partial(parameter_names, self.lightning_module, self.optimizers)
        with self._during("checkpoint"), self._group.explaining():
            extended = self._resume.extended(checkpoint, self.lightning_module, names, self.chosen)
            self._checkpoints.save(
                extended, filepath, storage_options, self.checkpoint_io, names, self.trainer
            )
            if self._guards.may_end(self.trainer):
                self.wait_for_checkpoint()  # the process may end before a later wait

    def wait_for_checkpoint(self) -> None:
        """Wait for a save in progress; raise if the last checkpoint could not be saved."""
        with self._during("checkpoint"):
            self._checkpoints.wait()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint that this run wrote, or that is in a folder of its callbacks.

        The deletion waits for a save in progress.
        """
        if self.is_global_zero:
            self._checkpoints.remove(filepath, self.checkpoint_io, self.trainer)

    def find_last(self, candidates: list[str], folders: list[str]) -> str | None:
        """Return the checkpoint for ``ckpt_path="last"``: the one of the highest step."""
        # Spawned and forked ranks do not have their rank number yet.
        clears = self.options.start_method == "popen" and self.is_global_zero
        return self._checkpoints.find_last(candidates, folders, clears=clears)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file or directory; its random states are restored when training starts."""
        with self._group.explaining():
            self.wait_for_checkpoint()
            path = self.broadcast(checkpoint_path)
            checkpoint = self._restore.open(path, weights_only, self.checkpoint_io)
        self._resume.take(checkpoint, self._fitting)
        module = self.lightning_module
        if module is not None and runtime_of(module) is not None:
            self._restore.load(self._resume.take_kept(module), module)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's part of a checkpoint.

        Later loads of callbacks are postponed until the model is sharded.
        """
        trainer = self._trainer_at_work()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        with self._group.explaining():
            self._restore.check_run(checkpoint, callbacks)
            self._checkpoints.follow_move(checkpoint, str(self._restore.path), trainer)
        self._restore.load_model(
            trainer.lightning_module, checkpoint, strict=strict, fitting=self._fitting
        )
        self._callbacks.defer_loads(
            trainer, trainer.lightning_module, self.options.checkpoint_options.cast
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        trainer = self._trainer_at_work()
        module = trainer.lightning_module
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._restore.load_optimizers(module, self.optimizers, schedulers, checkpoint)

    # -- End of a run

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._restore.roll_back()
        self._group.explain(exception)

    @override
    def teardown(self) -> None:
        """Tear down Lightning's plugins.

        Shards and process group stay, so that saving and another run still work.
        """
        self._group.end_steps()
        self._guards.end_run(self.trainer)
        self._repeated = None
        self._resume.end_run()
        self._callbacks.end_run(self.trainer)
        leave_loopback()
        for plugin in (self._environment, self.precision_plugin, self.accelerator):
            if plugin is not None:
                plugin.teardown()
        self.checkpoint_io.teardown()
        self.wait_for_checkpoint()
        self._group.end_run()


register_names(ShardedDP)
