"""ShardedDP: Lightning's interface to the engine; hooks call parts in the order given here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from shardeddp.checkpoint.durable import is_remote
from shardeddp.checkpoint.full import gather_full
from shardeddp.checkpoint.restore import parameter_names
from shardeddp.checkpoint.schema import KEY
from shardeddp.comm import Mesh, Traffic, agree_on_layout, during
from shardeddp.comm.rendezvous import leave_loopback
from shardeddp.config import (
    ActivationCheckpointingLike,
    CheckpointOptions,
    CPUOffload,
    MixedPrecision,
    Options,
    Scope,
    StartMethod,
    StateDictType,
    UnevenBatches,
    parse_options,
)
from shardeddp.engine.runtime import Runtime, parameters_changed, runtime_of
from shardeddp.engine.summon import summon
from shardeddp.errors import ConfigurationError, RankError
from shardeddp.lightning import expert_parallel, private
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
    rank_zero_info,
    rank_zero_only,
    register_names,
    reset_seed,
)
from shardeddp.lightning.callbacks import CallbackAdapters
from shardeddp.lightning.checkpointing import Checkpoints, checkpoint_folders
from shardeddp.lightning.guards import Guards
from shardeddp.lightning.launchers import ShardedMultiProcessingLauncher, ShardedScriptLauncher
from shardeddp.lightning.model_sharding import ModelSharding
from shardeddp.lightning.out_of_memory import explain_memory, memory_lines
from shardeddp.lightning.planning import (
    Chosen,
    PlanLauncher,
    RunSetting,
    choose,
)
from shardeddp.lightning.precision import shard_precision
from shardeddp.lightning.private import check_lightning
from shardeddp.lightning.process_group import ProcessGroup, Ranks, environment_without_ranks
from shardeddp.lightning.restore import Restore, clear_away
from shardeddp.lightning.resume import Resume
from shardeddp.lightning.tensor_parallel import (
    compare_losses,
    explain_missing_mesh,
    explain_shapes,
    refuse_uncalled_layers,
    refuse_untried_in,
)
from shardeddp.optim.attach import attach_optimizer, follow_optimizers
from shardeddp.optim.scope import refuse_beside_axes
from shardeddp.plan.memory import MemoryPlan, plan_memory
from shardeddp.plan.sharding_strategy import (
    AUTO,
    OptimizerShard,
    ShardingStrategyName,
    ShardSizeOption,
)
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.report import print_units
from shardeddp.wrap import PolicyLike, require_parameters
from shardeddp.wrap.tensor_plan import TensorPlan

# An instance as default gives the command line a flag for each field.
_DEFAULTS = CheckpointOptions()


_OF_LIGHTNING = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
)
"""Arguments that Lightning's strategies have."""


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``ShardedDP`` that differ from their defaults, and those that it does not have."""
    known = signature(ShardedDP).parameters

    def differs(value: Any, default: Any) -> bool:
        return value is not default and (type(value) is not type(default) or value != default)

    own = {name: it.default for name, it in known.items() if name != "others"}
    changed = {name: arguments[name] for name, it in own.items() if differs(arguments[name], it)}
    return {**changed, **arguments["others"]}


class ShardedDP(ParallelStrategy):
    """Trains an unmodified LightningModule with sharded parameters, gradients and optimizer states.

    Gives the result that one process would give on the whole batch. Runs on CPUs (gloo), on which
    nearly all tests run, and on CUDA (NCCL), of which one GPU has been tried.

    An argument that is not known is a TypeError, which says what to write for those of other
    strategies.

    Args:
        sharding_strategy: The state split over the ranks: ``full_shard`` (all: ZeRO-3, FSDP),
            ``hybrid_shard`` (all inside a node, replicas across nodes: HSDP), ``shard_grad_op``
            (gradients and optimizer states: ZeRO-2), ``shard_optimizer`` (optimizer states: ZeRO-1)
            or ``no_shard`` (nothing: DDP). Upper or lower case. ``auto`` chooses one of them by its
            plan when the first run is set up, on rank 0 for all ranks, and says which and why.
        shard_size: Ranks that share one model, for ``hybrid_shard``; must divide the number of
            ranks. None: the ranks of one node. ``auto``: chosen when the first run is set up: by
            its plan where the GPU and ``example_input_array`` are known, else the ranks of an
            NVLink domain, or of a node.
        auto_wrap_policy: Which modules are gathered as one unit: ``auto`` (the repeated blocks of
            the model), classes or their import paths, a policy object, a function of (name,
            module), or None for a single unit (all parameters are whole while anything computes).
        mixed_precision: In which dtypes parameters travel and compute and gradients are reduced: a
            ``MixedPrecision``, or a dtype for its ``param_dtype``. None: as the Trainer's
            ``precision`` says.
        activation_checkpointing: Which modules are computed again in backward instead of keeping
            what they computed in forward: classes, a policy or ``auto`` as for
            ``auto_wrap_policy``, or an ``ActivationCheckpointing``. None: none.
        cpu_offload: True: shards and optimizer states live in host memory, and the optimizer steps
            there. A ``CPUOffload`` chooses among them. Changes nothing where the host is the
            device.
        reshard_after_forward: Whether a unit is released between its forward and its backward
            (True), or kept (False); a number of neighbouring ranks: each keeps its part of what was
            gathered, and they alone gather for the backward (ZeRO++'s hpZ). None: as the strategy
            says.
        optimizer_shard: For ``hybrid_shard``: ``world`` splits main shards, gradient shards and
            optimizer states over the replicas too (Megatron-FSDP's HFSDP), for one more gather per
            step across them; ``group`` does not.
        optimizer_scope: For optimizers that torch does not have, by class name or import path: what
            the new value of an element depends on. ``element``: itself (stepped on shards, at no
            cost); ``parameter``: all of its parameter (each rank steps some of them, whole);
            ``model``: anything. None: unknown optimizers count as ``model``.
        tensor_parallel_size: Neighbouring ranks of a node that split layers among them. They train
            on the same batches; what is said above is of the ranks that train on different ones.
        tensor_parallel_plan: Which layers they split: ``auto``, the plan that models of
            transformers have; or by name of modules (``model.layers.*.mlp.up_proj``) the style
            (``colwise``), as ``docs/tensor-parallel.md`` lists them. None: those that
            ``configure_model`` splits by ``parallelize_module(self.model,
            self.device_mesh["tensor_parallel"], plan)``.
        expert_parallel_size: Neighbouring ranks that each have their own part of the experts, and
            send them the tokens of all. Ranks with the same experts share them as the sharding
            strategy says.
        experts: Which modules have the experts: their classes, or patterns of names (a string with
            ``*``); modules of stacked experts, or the experts themselves where they are members of
            an ``nn.ModuleList``. None: those of Mixtral-like models of transformers.
        forward_prefetch: Units that are gathered ahead of the one at work in forward; 0 for none.
            Each takes the memory of a unit; more than 1 helps where gathering is slower than
            computing now and then.
        backward_prefetch: Units that are gathered ahead in backward; 0 for none.
        reduce_every_backward: With gradient accumulation: True reduces every micro-batch and
            accumulates sharded gradients (less memory), False accumulates unsharded ones and
            reduces once per step (less communication). None: as the strategy says.
        uneven_batches: Behaviour of training when a rank has no batch left and others have:
            ``error``, on all ranks, with the numbers; ``min``: each epoch ends with the first rank
            that has used up its batches; ``join``: with the last, and ranks that have none left
            repeat their last batch with gradients of zero.
        uneven_units: True where ranks may use different units in a step (experts, modalities,
            random depth): they agree before each gather of a forward and when a backward begins,
            and take part with zeros in what they do not use. Without it, ranks have to use the same
            ones once their first steps have been alike; where those differ, they agree by
            themselves.
        state_dict_type: How checkpoints are saved: ``full``, one ordinary Lightning file;
            ``sharded``, a directory that every rank writes its part of; ``auto``, the former up to
            ``max_file_gb`` of ``checkpoint_options`` and the latter beyond. Both are loaded,
            whatever is said here.
        checkpoint_options: More about checkpoints: how large files get, asynchronous saves,
            durability, foreign formats.
        process_group_backend: Backend of the process group; None: the device's own (nccl, gloo).
        timeout: After how long a collective gives up: seconds, or a duration (a timedelta;
            ``0:10:00`` in YAML).
        debug: True compares what your code communicates over ranks before it happens: an error
            names both lines where ranks do different things, instead of a hang. Each such call then
            waits for a message on the host.
        plan_only: True plans a ``fit`` instead of training: it shows what fits on this machine's
            GPUs, how fast it is and why, without starting ranks. A name plans for that GPU
            (``A100-80``).
        start_method: How this strategy starts ranks where the cluster environment does not:
            ``popen`` runs the script again, ``spawn`` and ``fork`` start functions (notebooks,
            tests).
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Source of ranks and addresses; None: the one that Lightning detects.
        checkpoint_io: How files are written and read; None: Lightning's own.
        precision_plugin: Set by the Trainer from ``precision``.
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
        optimizer_scope: Mapping[str, Scope] | None = None,
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
        given = _given(locals())
        check_lightning()
        self.options = options = parse_options(given, _OF_LIGHTNING)
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        self.chosen: Chosen | None = None
        """What ``auto`` has chosen, and why; exists from ``setup_environment`` on."""
        self.planned: Plan | None = None
        """Plan that ``plan_only`` has made."""
        self.num_nodes = 1  # set by the Trainer
        self._alone: ClusterEnvironment | None = None  # of one rank that the cluster's cannot tell
        self._group = ProcessGroup(options)
        self._checkpoints = Checkpoints(self._group, options)
        self._restore = Restore(self._group, options.checkpoint_options)
        self._model_sharding = ModelSharding(self._group, self._restore, options)
        self._resume = Resume(self._group)
        self._guards = Guards(self._group)
        self._callbacks = CallbackAdapters(options.uneven_batches)
        self._runtime: Runtime | None = None
        self._is_first_step = False

    plan = staticmethod(make_plan)
    """Plans a model that is not training: see :func:`shardeddp.planner.plan.make_plan`."""

    @override
    def __repr__(self) -> str:
        return introduction(self.options.sharding_strategy)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or a pickle: options and optimizers.

        Parts leave out the state of a process or a run.
        """
        return {**super().__getstate__(), "_runtime": None}

    # -- Ranks, devices, model

    # The Trainer assigns the module here, and then refuses a compiled one, which has a note, to all
    # but three of Lightning's own strategies. It trains like any other, so the note goes, and
    # Lightning's `to_uncompiled` with it: each later run without a module of its own looks for the
    # note again. Rejected: registering as a virtual subclass of one of the three, for which
    # Lightning asks for other reasons too.
    _lightning_module = private.ModuleEntry()  # pyright: ignore[reportAssignmentType]

    @property
    def trainer(self) -> Trainer | None:
        """Trainer of the runs; None before it has connected a module.

        Also None in a process that has spawned the ranks.
        """
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
        """Whether there are several ranks.

        Lightning then injects samplers and syncs logged values.
        """
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
        return super().global_rank if self._alone is None else 0

    @property
    @override
    def local_rank(self) -> int:
        return super().local_rank if self._alone is None else 0

    @property
    @override
    def node_rank(self) -> int:
        return super().node_rank if self._alone is None else 0

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self._alone is None else 1

    @property
    def num_processes(self) -> int:
        """Ranks per machine."""
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
    def mesh(self) -> Mesh:
        """The communicators of this rank; exists from ``setup_environment`` on."""
        return self._group.mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The axes ``data_parallel`` and ``tensor_parallel`` of ranks, or ``expert_parallel``.

        They exist from ``setup_environment`` on, where ``tensor_parallel_size``, or
        ``expert_parallel_size``, is above 1.
        """
        if self._group.device_mesh is None:
            raise RuntimeError(
                "ShardedDP has a device mesh from the start of a run with "
                "ShardedDP(tensor_parallel_size=...), or expert_parallel_size, on; there is none yet"
            )
        return self._group.device_mesh

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has communicated for the engine, by kind."""
        return self.mesh.traffic

    @property
    def _environment(self) -> ClusterEnvironment:
        if self.cluster_environment is None:
            raise RuntimeError(
                "ShardedDP has no cluster environment: the Trainer finds one when it is made"
            )
        return self._alone or self.cluster_environment

    @property
    def runtime(self) -> Runtime:
        """The engine of the model; exists from ``setup`` on."""
        if self._runtime is None:
            raise RuntimeError(
                "ShardedDP has not sharded a model yet: the Trainer does so when it starts to run"
            )
        return self._runtime

    @property
    def memory_plan(self) -> MemoryPlan:
        """Predicted bytes of this rank without activations, at two optimizer states per element."""
        return plan_memory(
            [progress.unit.costs() for progress in self.runtime.progresses],
            self.options.sharding,
            prefetch=self.options.backward_prefetch,
            staged=self.root_device.type == "cpu",
            accumulates=self.trainer is not None and self.trainer.accumulate_grad_batches > 1,
            offload_optimizer=self._offloads_optimizer,
        )

    @property
    def _offloads_optimizer(self) -> bool:
        # Where the host is the device, its states are there already.
        return self.options.offload.optimizer_alone and self.root_device.type != "cpu"

    def _describe_memory(self, error: BaseException) -> list[str]:
        return memory_lines(error, self.runtime, self.memory_plan, self.optimizers, self.options)

    def print_units(self) -> None:
        """Print the units, and the bytes that each rank stores of them, on rank 0.

        Works from ``on_fit_start`` on. Other ranks may call it and need not.
        """
        runtime = None if self.lightning_module is None else runtime_of(self.lightning_module)
        if runtime is None:
            raise RuntimeError(
                "ShardedDP has no units yet: the Trainer shards the model when it starts to run"
            )
        if self.is_global_zero:
            print_units(self.options.sharding_strategy, runtime)

    @contextmanager
    def summon_full_params(
        self,
        module: nn.Module | None = None,
        *,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
    ) -> Generator[None]:
        """Surround code that needs whole parameters.

        All ranks enter it; what they do inside is up to each.

        Inside, modules hold plain parameters of full shape and of the model's own dtype: they can
        be read, saved, pickled, handed to other libraries, and written to. Values that rank 0
        writes in place reach all ranks afterwards; writes of other ranks are dropped. References
        that were taken before (by an optimizer) are to the sharded parameters still, and a
        ``backward()`` to whole ones is an error. It takes memory for all parameters of ``module``
        on every rank, and gathers each once. It may be nested, used in any hook, and after a run.
        Before the model is sharded it does nothing, as parameters are whole then. Inside of a step,
        modules whose forward is under way hold what they compute with: write to parameters outside
        of steps. An exception that leaves it drops what was written, if there are several ranks.

        Args:
            module: The model, a part of it, or a deep copy of either; None: the LightningModule.
            writeback: False drops the written values.
            rank0_only: Only rank 0 has whole parameters inside; the others hold one at a time while
                it is gathered.
            offload_to_cpu: Whole parameters are in host memory.
        """
        model = self.lightning_module
        # Parts of the model may belong to another run by now, and then it has no runtime any more.
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
        # A shard_size that does not fit fails here, before any process is started.
        options = self.options
        options.sharding.topology(
            self.num_nodes, self.num_processes, tensor_size=options.tensor_parallel_size
        )
        if options.plan_only:
            launcher: Any = PlanLauncher(self, options, self.setting)
            self._launcher = launcher
        elif options.start_method == "popen":
            self._launcher = ShardedScriptLauncher(
                self._environment,
                self.num_processes,
                self.num_nodes,
                self._model_sharding.end_hooks,
            )
        else:
            leave = self._group.explain_and_leave
            materialize = self._model_sharding.materialize
            self._launcher = ShardedMultiProcessingLauncher(
                self, options.start_method, gather_full, materialize, leave
            )

    def set_world_ranks(self) -> None:
        """Tell the rank to the cluster environment and to everything that acts on rank 0 alone."""
        if self._alone is None and not self.is_distributed:
            self._alone = environment_without_ranks(self._environment)
        self._environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self._environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # pyright: ignore[reportFunctionMemberAccess]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._group.connect(self._ranks)
        if AUTO in (self.options.sharding_strategy, self.options.shard_size):
            self._choose_sharding()
        self._group.begin_run(self._ranks, self.lightning_module)
        if self._group.device_mesh is not None and self.lightning_module is not None:
            private.give_device_mesh(self.lightning_module, self._group.device_mesh)
        if self.trainer is not None:
            if self._fitting:
                self._checkpoints.check_stores(self.trainer)
            self._callbacks.averages.keep_on_host(self.trainer, self.trainer.lightning_module)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self._environment, self.root_device, self.num_nodes, self.num_processes)

    def setting(self, trainer: Trainer | None) -> RunSetting:
        """What is set, as far as plans depend on it."""
        accumulates = 1 if trainer is None else trainer.accumulate_grad_batches
        precision = self.precision_plugin.precision
        return RunSetting.of(self.options, precision, self._ranks, accumulates)

    def _choose_sharding(self) -> None:
        """Go on as if what rank 0 chooses for ``auto`` had been set."""
        module, setting = self.lightning_module, self.setting(self.trainer)
        options, reach = self.options, self._group.reach or self.num_processes
        found = self._group.on_rank_zero(
            "choice of a sharding strategy", lambda: vars(choose(module, options, setting, reach))
        )
        self.chosen = chosen = Chosen(**found)
        size = chosen.shard_size or options.shard_size
        self._use(replace(options, sharding_strategy=chosen.sharding_strategy, shard_size=size))
        over = f" over {chosen.shard_size} ranks" if chosen.shard_size else ""
        rank_zero_info(f"ShardedDP: auto chose {chosen.sharding_strategy}{over}, {chosen.reason}")

    def _use(self, options: Options) -> None:
        self.options = options
        for part in (self._group, self._model_sharding, self._checkpoints):
            part.options = options

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        """Surround the building of a module, in ``configure_model`` too.

        With ``empty_init=True`` it is built on the meta device and stays there until it is sharded.
        """
        try:
            with self._model_sharding.building(self.precision_plugin, empty_init):
                yield
        except TypeError as error:
            explain_missing_mesh(error)
            raise

    @override
    def setup(self, trainer: Trainer) -> None:
        self._model_sharding.end_hooks()
        module = self._begin_run(trainer)
        self._runtime = self._model_sharding.shard(
            module,
            self.precision_plugin,
            partial(private.replace_layers, self, module),
            fitting=self._fitting,
        )
        if self._fitting and self.is_distributed:
            # Only training needs parameters, as under DistributedDataParallel.
            require_parameters(module)
        self._restore.load(self._callbacks.after_sharding(trainer, module, self._runtime), module)
        self._restore.load(self._resume.take_kept(module), module)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # Tensors of inference mode could not be used in a later training.
            loop.inference_mode = False
        self._model_sharding.forget_values()
        if self._fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _begin_run(self, trainer: Trainer) -> LightningModule:
        module = self.lightning_module
        if self.accelerator is None or module is None:
            raise RuntimeError(
                "ShardedDP.setup() needs the accelerator and the module that a Trainer connects"
            )
        if self.options.tensor_parallel_size > 1:
            refuse_untried_in(trainer, module, self.options.tensor_parallel_plan)
        if self.options.expert_parallel_size > 1:
            expert_parallel.refuse_trainer(trainer)
        self.accelerator.setup(trainer)
        self._checkpoints.check_io(self.checkpoint_io)
        if self.is_global_zero:
            root = trainer.default_root_dir
            clear_away([*checkpoint_folders(trainer), *([] if is_remote(root) else [root])])
        self._guards.begin_run(trainer, partial(self._resume.begin_streams, trainer))
        self._model_sharding.set_aside(self._callbacks.before_sharding(trainer, module))
        return module

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        # `trainer.estimated_stepping_batches` has set the loaders up.
        if private.combined_loader(trainer.fit_loop) is not None:
            if self._callbacks.align_loaders(trainer):
                super().setup_optimizers(trainer)
            if trainer.ckpt_path is not None:
                self._resume.ask_loaders_again(trainer.fit_loop)
        for optimizer in self.optimizers:
            refuse_beside_axes(optimizer, self.options)
        self._attach_optimizers()

    def _attach_optimizers(self) -> None:
        if self.runtime.passthrough:
            return
        follow_optimizers(parameters_changed)
        for optimizer in self.optimizers:
            attach_optimizer(
                optimizer,
                self.runtime.parameters_changed,
                self._offloads_optimizer,
                self.options.optimizer_scope,
            )

    # -- Another sharding strategy in the middle of a run

    def reshard(
        self, sharding_strategy: ShardingStrategyName, shard_size: int | None = None
    ) -> None:
        """Go on with another sharding strategy; all ranks call it between two optimizer steps.

        Parameters stay the objects that they are, with their values, gradients and optimizer
        states, and so do averages of callbacks. What is to lie elsewhere is gathered one tensor at
        a time: no rank ever has the whole model. Shards are in memory twice until all are in place.

        Args:
            sharding_strategy: As ``ShardedDP`` takes it, but for ``auto``.
            shard_size: As there.

        Raises:
            ConfigurationError: The ranks or the other options do not allow it, or ranks ask for
                different strategies.
            RuntimeError: There is no run, a step or ``summon_full_params`` is under way, or
                gradients of micro-batches are not complete; on all ranks, if it is so on one.
        """
        trainer, runtime = self._trainer_at_work(), self.runtime
        if not trainer.training:
            raise RuntimeError("reshard() outside of training: call it in a fit, between two steps")
        options = replace(self.options, sharding_strategy=sharding_strategy, shard_size=shard_size)
        self._check_reshard(options)
        if options == self.options:
            return
        self.wait_for_checkpoint()
        self.mesh.run.settle()
        self._group.renew(options, self._ranks)
        self._use(options)
        module = trainer.lightning_module
        self._runtime = self._model_sharding.shard(
            module, self.precision_plugin, lambda: None, fitting=self._fitting
        )
        self._runtime.go_on_from(runtime)
        self._callbacks.after_resharding(trainer, module, self._runtime)
        self._attach_optimizers()

    def _check_reshard(self, options: Options) -> None:
        """Raise on all ranks before anything has changed."""
        split, name = options.tensor_parallel_size, options.sharding_strategy
        experts = options.expert_parallel_size
        if AUTO in (name, options.shard_size) or split > 1 or experts > 1:
            raise ConfigurationError(
                f"reshard({name!r}, {options.shard_size!r}) with tensor_parallel_size={split} and "
                f"expert_parallel_size={experts}: expected the name of a strategy, a number of "
                f"ranks or None, and layers and experts that are not split"
            )
        options.sharding.topology(self.num_nodes, self.num_processes)
        agree_on_layout([f"{name} of {options.shard_size}"], self.mesh.control)
        try:
            self._group.run_on_all_ranks("resharding", lambda: self.runtime.check_rest("reshard()"))
        except RankError as error:
            raise error.__cause__ or error from None

    @override
    def model_to_device(self) -> None:
        """Nothing: parameters reach the device as shards, the rest in :meth:`setup`."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._resume.prepare_loader(dataloader, self._trainer_at_work())

    @override
    def on_train_start(self) -> None:
        trainer = self._trainer_at_work()
        self._guards.begin_training(trainer, self.node_rank, self.local_rank)
        self._resume.begin_training(trainer.fit_loop)
        self._callbacks.begin_training(trainer)
        self._is_first_step = True

    # -- Steps

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._checkpoints.begin_batch()
        self._resume.begin_batch()
        self._callbacks.begin_batch(self._trainer_at_work())

    def _during(self, part: str) -> _Part:
        mesh = self._group.current
        return _Part(during(None if mesh is None else mesh.run.clock, part), self._describe_memory)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        with self._during("data"):
            # The device of a strategy is looked up by a variable of the environment each time.
            return super().batch_to_device(batch, device or self._group.device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        self.runtime.optimizes_after_step = module is None or module.automatic_optimization
        return self._step("training_step", self.precision_plugin.train_step_context(), args, kwargs)

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
        self, name: str, precision: AbstractContextManager[Any], args: Any, kwargs: Any
    ) -> Any:
        with self._during("compute"), precision, self.runtime.step(name) as outputs:
            try:
                outputs.append(getattr(self.lightning_module, name)(*args, **kwargs))
            except Exception as error:
                explain_memory(error, self._describe_memory)  # before units are released
                explain_shapes(error, self.options.tensor_parallel_size)
                raise
        return outputs[0]

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        with self._during("compute"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._during("optimizer"):
            return super().optimizer_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Zero the gradients of a repeated batch (``uneven_batches="join"``)."""
        self._callbacks.zero_repeated_loss(closure_loss)
        if self._is_first_step and self.options.tensor_parallel_size > 1:
            compare_losses(closure_loss, self.mesh)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """See, once, that what ranks have of layers and of experts makes one model."""
        if self._is_first_step:
            self._is_first_step = False
            refuse_uncalled_layers(self.runtime.root_module)
            expert_parallel.warn_of_unsent_tokens(self.runtime.root_module)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        """Surround a micro-batch whose gradients need not be communicated yet."""
        self.runtime.sync_gradients = False
        try:
            yield
        finally:
            self.runtime.sync_gradients = True

    @override
    def on_validation_start(self) -> None:
        self.runtime.sync_buffers()
        self._callbacks.begin_evaluation(self._trainer_at_work())

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_end(self) -> None:
        self._callbacks.end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    # -- Communication for users

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._guards.is_alone(self.trainer):
            self._group.barrier(name)
        if name == private.BEFORE_SETUP:
            self._model_sharding.begin_hooks()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._guards.is_alone(self.trainer) else self._group.broadcast(obj, src)

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
        """State of an optimizer for a checkpoint; empty if not all ranks can tell theirs."""
        with self._group.explaining():
            return {} if self._guards.is_alone(self.trainer) else super().optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint as ``state_dict_type`` says.

        After an error it writes nothing if not all ranks are there.
        """
        if self._guards.is_alone(self.trainer):
            return
        names = partial(parameter_names, self.lightning_module, self.optimizers)
        with self._during("checkpoint"), self._group.explaining():
            extended = self._resume.extended(checkpoint, self.lightning_module, names)
            if self.chosen is not None and KEY in extended:
                extended[KEY]["chosen"] = dict(vars(self.chosen))
            self._checkpoints.save(
                extended, filepath, storage_options, self.checkpoint_io, names, self.trainer
            )
            if self._guards.may_end(self.trainer):
                self.wait_for_checkpoint()  # nobody else is going to

    def wait_for_checkpoint(self) -> None:
        """Wait until no checkpoint is being written; raises if the last one could not be saved."""
        with self._during("checkpoint"):
            self._checkpoints.wait()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint if it lies where this run keeps checkpoints.

        It is deleted when no save is under way any more.
        """
        if self.is_global_zero:
            self._checkpoints.remove(filepath, self.checkpoint_io, self.trainer)

    def find_last(self, candidates: list[str], folders: list[str]) -> str | None:
        """Checkpoint that ``ckpt_path="last"`` means: the one of the highest step."""
        # In a spawned or forked rank it is not known yet which one it is.
        clears = self.options.start_method == "popen" and self.is_global_zero
        return self._checkpoints.find_last(candidates, folders, clears=clears)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of either kind; its random states are restored when training starts."""
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

        What callbacks load after it waits for shards as well.
        """
        trainer = self._trainer_at_work()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        with self._group.explaining():
            self._restore.check_run(checkpoint, callbacks)
            self._checkpoints.follow_move(checkpoint, str(self._restore.path), trainer)
        self._restore.load_model(
            trainer.lightning_module, checkpoint, strict=strict, fitting=self._fitting
        )
        self._callbacks.averages.defer_loads(
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
        """Release Lightning's parts.

        Shards and process group stay, so that saving and another run still work.
        """
        if self._group.current is not None:
            self._group.current.end_run()
        self._guards.end_run(self.trainer)
        self._resume.end_run()
        if self.trainer is not None:
            self._callbacks.end_run(self.trainer, self.trainer.lightning_module)
        self._environment.teardown()
        leave_loopback()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.wait_for_checkpoint()
        self._group.end_run()


register_names(ShardedDP)


class _Part:
    """A part of a step: measured where somebody measures, and an error for want of memory explained.

    Not a generator, since a step of a small model has several.
    """

    def __init__(
        self,
        timed: AbstractContextManager[None],
        describe: Callable[[BaseException], list[str]],
    ) -> None:
        self._timed, self._describe = timed, describe

    def __enter__(self) -> None:
        """Begin it."""
        self._timed.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """End it."""
        self._timed.__exit__(kind, error, traceback)
        if error is not None:
            explain_memory(error, self._describe)
