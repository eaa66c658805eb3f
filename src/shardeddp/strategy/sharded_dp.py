"""ShardedDP: the Lightning face of the engine. Every hook delegates; nothing is decided here that the engine knows."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from shardeddp.checkpoint.full import save_full
from shardeddp.comm import together
from shardeddp.errors import ConfigurationError
from shardeddp.monitor.units import report_units
from shardeddp.plan.memory import MemoryPlan, plan_memory
from shardeddp.plan.placement import choose_placement
from shardeddp.plugins.placing import place_module
from shardeddp.plugins.precision import shard_precision
from shardeddp.plugins.uneven import hold_if_uneven, let_go
from shardeddp.sharding.hooks import runtime_of
from shardeddp.sharding.optimizer import attach_optimizer
from shardeddp.sharding.runtime import Prefetch, Runtime
from shardeddp.sharding.setup import shard_model
from shardeddp.strategy.processes import ProcessStrategy, StartMethod
from shardeddp.wrap import PolicyLike, build_units, resolve_policy


class ShardedDP(ProcessStrategy):
    """Trains an unmodified LightningModule with parameters, gradients and optimizer states sharded over ranks.

    Runs on CPU (gloo) exactly as on CUDA (NCCL), and gives the result that one process would give on the whole batch.

    Args:
        sharding_strategy: What is sharded, in any case: ``full_shard`` (ZeRO-3, FSDP), ``hybrid_shard`` (full inside
            a node, replicas across nodes), ``shard_grad_op`` (ZeRO-2), ``shard_optimizer`` (ZeRO-1) or ``no_shard``
            (DDP).
        shard_size: Ranks that share one model, for ``hybrid_shard``; must divide the number of ranks. None: the ranks
            of one node.
        auto_wrap_policy: Which modules are gathered as one unit: ``auto`` (the repeated blocks of the model), classes
            or their import paths, a policy object, a function of (name, module), or None for a single unit.
        forward_prefetch: Units that are gathered ahead of the one at work in forward; 0 for none.
        backward_prefetch: The same in backward.
        reduce_every_backward: With gradient accumulation: True reduces every micro-batch and accumulates sharded
            gradients (less memory), False accumulates unsharded ones and reduces once per step (less communication).
            None: what the strategy says.
        process_group_backend: Backend of the process group; None: the device's own (nccl, gloo).
        timeout: After how long a collective gives up: seconds, or a duration (a timedelta; ``0:10:00`` in YAML).
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
        forward_prefetch: int = 1,
        backward_prefetch: int = 1,
        reduce_every_backward: bool | None = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 600.0,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            choose_placement(sharding_strategy, shard_size, reduce_every_backward),
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._sharding_strategy = sharding_strategy.lower()
        self.policy = resolve_policy(auto_wrap_policy)
        self.prefetch = Prefetch(forward=forward_prefetch, backward=backward_prefetch)
        self._runtime: Runtime | None = None

    @property
    @override
    def precision_plugin(self) -> Precision:
        return shard_precision(self._precision_plugin)

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None has to stay None: the Trainer takes anything else as the user's choice, over its own precision argument.
        self._precision_plugin = None if precision_plugin is None else shard_precision(precision_plugin)

    @property
    def runtime(self) -> Runtime:
        """The engine of the model; exists from ``setup`` on."""
        if self._runtime is None:
            raise RuntimeError("ShardedDP has not sharded a model yet: the Trainer does so when it starts to run")
        return self._runtime

    @property
    def memory_plan(self) -> MemoryPlan:
        """Predicted bytes of this rank, without activations, for an optimizer with two states per element."""
        units = [track.unit.costs() for track in self.runtime.tracks]
        return plan_memory(units, prefetch=self.prefetch.backward, staged=self.root_device.type == "cpu")

    # -- setup and teardown

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        if self.accelerator is None or module is None:
            raise RuntimeError("ShardedDP.setup() needs the accelerator and the module that a Trainer connects")
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        runtime = runtime_of(module)
        if runtime is None:
            if self._layer_sync:
                self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
            runtime = self._shard(module)
        elif runtime.placement != self.placement:
            raise ConfigurationError(
                f"this {type(module).__name__} is already sharded by another strategy ({runtime.placement}) and cannot "
                f"change to {self.placement}. Use the same options, or build the module anew and load a checkpoint"
            )
        self._runtime, self._mesh = runtime, runtime.mesh
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # Tensors made under inference mode could not be used in a later training.
            loop.inference_mode = False
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> Runtime:
        specs = together("finding units", lambda: build_units(module, self.policy), self.mesh.control)
        runtime = shard_model(specs, self.mesh, self.placement, self.prefetch)
        place_module(module, self.root_device)
        if self.is_global_zero:
            report_units(self._sharding_strategy, runtime)
        return runtime

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            attach_optimizer(optimizer, self.runtime.parameters_changed)

    @override
    def model_to_device(self) -> None:
        """Nothing: parameters reach the device as shards, the rest in :meth:`setup`."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._mesh is not None:
            self._mesh.failures.explain(exception)

    @override
    def teardown(self) -> None:
        """Let Lightning's parts go; shards and process group stay, so that saving and another run still work."""
        let_go(self._runtime)
        self._environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

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
    def on_validation_start(self) -> None:
        self.runtime.sync_buffers()

    on_test_start = on_validation_start

    @override
    def on_predict_start(self) -> None:
        self.runtime.sync_buffers()
        if self.lightning_module is not None:
            hold_if_uneven(self.runtime, self.lightning_module.trainer.predict_loop.max_batches)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        """Surround a micro-batch whose gradients need not be communicated yet."""
        self.runtime.sync_gradients = self.placement.reduce_every_backward
        try:
            yield
        finally:
            self.runtime.sync_gradients = True

    # -- checkpoints

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write one ordinary Lightning checkpoint; sharded tensors anywhere in it are gathered, one at a time."""
        write = partial(self.checkpoint_io.save_checkpoint, path=filepath, storage_options=storage_options)
        save_full(checkpoint, str(filepath), write, self._mesh)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.lightning_module is None:
            raise RuntimeError("ShardedDP has no module to load into: the Trainer connects it")
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
