"""ShardedDP: the Lightning face of the engine. Every hook delegates; nothing is decided here that the engine knows."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardeddp.comm import together
from shardeddp.comm.rendezvous import leave_loopback
from shardeddp.config import CheckpointOptions, CPUOffload, MixedPrecision
from shardeddp.errors import ConfigurationError
from shardeddp.lightning_api import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    Trainer,
    TrainerFn,
    private,
)
from shardeddp.plan.placement import OptimizerShard, choose_placement
from shardeddp.plugins.activation_checkpointing import ActivationCheckpointingLike, resolve_activation_checkpointing
from shardeddp.plugins.batch_norm import synchronize_on_host
from shardeddp.plugins.deferred import DeferredInit
from shardeddp.plugins.generation import keep_generation_in_step
from shardeddp.plugins.mixed_precision import resolve_mixed_precision
from shardeddp.plugins.offload import resolve_offload
from shardeddp.plugins.placing import place_module
from shardeddp.plugins.registry import introduction
from shardeddp.plugins.uneven_training import UnevenBatches
from shardeddp.sharding.hooks import make_plain, parameters_changed, runtime_of
from shardeddp.sharding.optimizer import attach_optimizer, follow_optimizers
from shardeddp.sharding.optimizer_scope import Scope, check_stated
from shardeddp.sharding.runtime import Prefetch, Runtime
from shardeddp.sharding.setup import shard_model
from shardeddp.strategy.checkpoints import StateDictType, checkpoint_folders
from shardeddp.strategy.companions import Companions
from shardeddp.strategy.model import ModelStrategy
from shardeddp.strategy.planning import plan_units
from shardeddp.strategy.processes import StartMethod
from shardeddp.wrap import PolicyLike, require_parameters, resolve_policy

_DEFAULTS = CheckpointOptions()  # an instance, so that the command line has a flag for each of its fields


_OF_A_RUN = ("_mesh", "_runtime", "_interruption", "_foremost", "_kept", "_pending_load", "_replaced")


class ShardedDP(ModelStrategy):
    """Trains an unmodified LightningModule with parameters, gradients and optimizer states sharded over ranks.

    Runs on CPU (gloo) exactly as on CUDA (NCCL), and gives the result that one process would give on the whole batch.

    Args:
        sharding_strategy: What is split over the ranks: ``full_shard`` (all: ZeRO-3, FSDP), ``hybrid_shard`` (all
            inside a node, replicas across nodes: HSDP), ``shard_grad_op`` (gradients and optimizer states: ZeRO-2),
            ``shard_optimizer`` (optimizer states: ZeRO-1) or ``no_shard`` (nothing: DDP). Upper or lower case.
        shard_size: Ranks that share one model, for ``hybrid_shard``; must divide the number of ranks. None: the ranks
            of one node.
        auto_wrap_policy: Which modules are gathered as one unit: ``auto`` (the repeated blocks of the model), classes
            or their import paths, a policy object, a function of (name, module), or None for a single unit (all
            parameters are whole while anything computes).
        mixed_precision: In which dtypes parameters travel and compute and gradients are reduced: a ``MixedPrecision``,
            or a dtype for its ``param_dtype``. None: what the Trainer's ``precision`` says.
        activation_checkpointing: Which modules are computed again in backward instead of keeping what they computed in
            forward: classes, a policy or ``auto`` as for ``auto_wrap_policy``, or an ``ActivationCheckpointing``.
            None: none.
        cpu_offload: True: shards and optimizer states live in host memory, and the optimizer steps there. A
            ``CPUOffload`` chooses among them. Changes nothing where the host is the device.
        reshard_after_forward: Whether a unit is released between its forward and its backward (True), or kept (False);
            a number of neighbouring ranks: each keeps its part of what was gathered, and they alone gather for the
            backward (ZeRO++'s hpZ). None: what the strategy says.
        optimizer_shard: For ``hybrid_shard``: ``world`` splits main shards, gradient shards and optimizer states over
            the replicas too (Megatron-FSDP's HFSDP), for one more gather per step across them; ``group`` does not.
        optimizer_scope: For optimizers that torch does not have, by class name or import path: what the new value of an
            element depends on. ``element``: itself (stepped on shards, at no cost); ``parameter``: all of its parameter
            (each rank steps some of them, whole); ``model``: anything. None: what is not known is taken for ``model``.
        forward_prefetch: Units that are gathered ahead of the one at work in forward; 0 for none. Each takes the memory
            of a unit; more than 1 helps where gathering is slower than computing now and then.
        backward_prefetch: Units that are gathered ahead in backward; 0 for none.
        reduce_every_backward: With gradient accumulation: True reduces every micro-batch and accumulates sharded
            gradients (less memory), False accumulates unsharded ones and reduces once per step (less communication).
            None: what the strategy says.
        uneven_batches: What training does when a rank has no batch left and others have: ``error``, on all ranks, with
            the numbers; ``min``: each epoch ends with the first rank that has used up its batches; ``join``: with the
            last, and ranks that have none left repeat their last batch with gradients of zero.
        uneven_units: True where ranks may use different units in a step (experts, modalities, random depth): they agree
            before each gather, and take part with zeros in what they do not use. Without it, ranks have to use the same
            ones once their first steps have been alike; where those differ, they agree by themselves.
        state_dict_type: How checkpoints are saved: ``full``, one ordinary Lightning file; ``sharded``, a directory that
            every rank writes its part of; ``auto``, the former up to ``max_file_gb`` of ``checkpoint_options`` and the
            latter beyond. Both are loaded, whatever is said here.
        checkpoint_options: More about checkpoints: how large files get, asynchronous saves, durability, foreign
            formats.
        process_group_backend: Backend of the process group; None: the device's own (nccl, gloo).
        timeout: After how long a collective gives up: seconds, or a duration (a timedelta; ``0:10:00`` in YAML).
        debug: True compares what your code communicates over ranks before it happens: an error names both lines where
            ranks do different things, instead of a hang. Each such call then waits for a message on the host.
        start_method: How this strategy starts ranks where the cluster environment does not: ``popen`` runs the script
            again, ``spawn`` and ``fork`` start functions (notebooks, tests).
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Where ranks and addresses come from; None: what Lightning detects.
        checkpoint_io: How files are written and read; None: Lightning's own.
        precision_plugin: Set by the Trainer from ``precision``.
    """

    def __init__(
        self,
        sharding_strategy: str = "full_shard",
        shard_size: int | None = None,
        auto_wrap_policy: PolicyLike = "auto",
        *,
        mixed_precision: MixedPrecision | str | None = None,
        activation_checkpointing: ActivationCheckpointingLike = None,
        cpu_offload: bool | CPUOffload = False,
        reshard_after_forward: bool | int | None = None,
        optimizer_shard: OptimizerShard = "group",
        optimizer_scope: Mapping[str, Scope] | None = None,
        forward_prefetch: int = 1,
        backward_prefetch: int = 1,
        reduce_every_backward: bool | None = None,
        uneven_batches: UnevenBatches = "error",
        uneven_units: bool = False,
        state_dict_type: StateDictType = "auto",
        checkpoint_options: CheckpointOptions = _DEFAULTS,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 600.0,
        debug: bool = False,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        offload = resolve_offload(cpu_offload)
        super().__init__(
            sharding_strategy,
            placement=choose_placement(
                sharding_strategy,
                shard_size,
                reduce_every_backward,
                reshard_after_forward,
                offload.params,
                optimizer_shard,
            ),
            offload=offload,
            prefetch=Prefetch(forward=forward_prefetch, backward=backward_prefetch),
            state_dict_type=state_dict_type,
            checkpoint_options=checkpoint_options,
            process_group_backend=process_group_backend,
            timeout=timeout,
            debug=debug,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.policy = resolve_policy(auto_wrap_policy)
        self.mixed_precision = resolve_mixed_precision(mixed_precision)
        self.activation_checkpointing = resolve_activation_checkpointing(activation_checkpointing)
        self.optimizer_scope = check_stated(optimizer_scope)
        self.uneven_units = uneven_units
        self._deferred = DeferredInit()
        self._companions = Companions(uneven_batches)

    @override
    def __repr__(self) -> str:
        return introduction(self._sharding_strategy)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: options and optimizers. What belongs to a process or a run stays behind."""
        return {**super().__getstate__(), **dict.fromkeys(_OF_A_RUN)}

    # -- setup and teardown

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        """Surround the building of a module; with ``empty_init=True`` on the meta device, until it is sharded."""
        with self._deferred.building(self.lightning_module, empty_init), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        if self.accelerator is None or module is None:
            raise RuntimeError("ShardedDP.setup() needs the accelerator and the module that a Trainer connects")
        self.accelerator.setup(trainer)
        self._check_checkpoint_io()
        self._sweep([*checkpoint_folders(trainer), trainer.default_root_dir])
        self._begin_run(trainer)
        self._companions.meet(trainer, module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        runtime = runtime_of(module)
        if runtime is None:
            private.replace_layers(self, module)
            if self.root_device.type == "cpu":
                synchronize_on_host(module)
            make_plain(module)
            self._deferred.note_dtypes(module)
            self.precision_plugin.convert_module(module)
            runtime = self._shard(module)
        elif runtime.placement != self.placement:
            raise ConfigurationError(
                f"this {type(module).__name__} is already sharded by another strategy ({runtime.placement}) and cannot "
                f"change to {self.placement}. Use the same options, or build the module anew and load a checkpoint"
            )
        if fitting and self.is_distributed:
            require_parameters(module)  # as DistributedDataParallel does; whatever else a run does needs none
        self._runtime, self._mesh = runtime, runtime.mesh
        self._watch()
        load = self._companions.join(trainer, module, runtime)
        if load is not None:
            self._load(load)
        self._shard_kept()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # Tensors made under inference mode could not be used in a later training.
            loop.inference_mode = False
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> Runtime:
        plan = partial(
            plan_units, module, self.policy, self.precision_plugin, self.mixed_precision, self.activation_checkpointing
        )
        units = together("finding units", plan, self.mesh.control)
        load, self._pending_load = self._pending_load, None
        deferred = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        birth = self._deferred.birth_of(load if deferred else None)
        idle = not (self.offload.params or self.offload.optimizer)
        runtime = shard_model(
            units, self.mesh, self.placement, self.prefetch, birth, idle=idle, uneven=self.uneven_units
        )
        place_module(module, self.root_device)
        keep_generation_in_step(module, self.placement)
        if load is not None and not deferred:
            self._load(load)
        self._introduce(runtime)
        return runtime

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.trainer is not None:
            self._companions.averages.keep_in_place(self.trainer, self.trainer.lightning_module)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's part of a checkpoint; what callbacks load after it waits for shards as well."""
        super().load_model_state_dict(checkpoint, strict)
        trainer = self._trainer_at_work()
        self._companions.averages.await_shards(trainer, trainer.lightning_module, self.checkpoint_options.cast)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if private.combined_loader(trainer.fit_loop) is not None:  # asked for by `trainer.estimated_stepping_batches`
            if self._companions.meet_loaders(trainer):
                super().setup_optimizers(trainer)
            if trainer.ckpt_path is not None:
                self._ask_loaders_again(trainer.fit_loop)
        follow_optimizers(parameters_changed)
        for optimizer in () if self.runtime.idle else self.optimizers:
            attach_optimizer(optimizer, self.runtime.parameters_changed, self._offloads_optimizer, self.optimizer_scope)

    @override
    def model_to_device(self) -> None:
        """Nothing: parameters reach the device as shards, the rest in :meth:`setup`."""

    @override
    def teardown(self) -> None:
        """Let Lightning's parts go; shards and process group stay, so that saving and another run still work."""
        self._end_run()
        if self.trainer is not None:
            self._companions.leave(self.trainer, self.trainer.lightning_module)
        self._deferred.forget()
        self._environment.teardown()
        leave_loopback()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.wait_for_checkpoint()
        if self._mesh is not None and self.trainer is not None and not self.trainer.interrupted:
            self._mesh.give_back()

    # -- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", self.precision_plugin.train_step_context(), args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _step(self, name: str, precision: AbstractContextManager[Any], args: Any, kwargs: Any) -> Any:
        with precision, self.runtime.step(name) as outputs:
            outputs.append(getattr(self.lightning_module, name)(*args, **kwargs))
        return outputs[0]

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Let a loss count for nothing that is there for others (see ``uneven_batches``)."""
        self._companions.weigh(closure_loss)

    @override
    def on_validation_start(self) -> None:
        self.runtime.sync_buffers()
        self._companions.begin_evaluation(self._trainer_at_work())

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_end(self) -> None:
        self._companions.end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._companions.begin_training(self._trainer_at_work())

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._companions.begin_batch(self._trainer_at_work())

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        """Surround a micro-batch whose gradients need not be communicated yet."""
        self.runtime.sync_gradients = False
        try:
            yield
        finally:
            self.runtime.sync_gradients = True
