"""ShardedDP: the Lightning face of the engine. Every hook delegates; nothing is decided here that the engine knows."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from shardeddp.checkpoint.full import gather_full, save_full, whole
from shardeddp.comm import Mesh, Traffic, barrier, broadcast_object, reduce_tensor, together
from shardeddp.errors import ConfigurationError
from shardeddp.monitor.units import report_units
from shardeddp.plan.memory import MemoryPlan, plan_memory
from shardeddp.plan.placement import choose_placement
from shardeddp.plugins.launcher import ShardedMultiProcessingLauncher
from shardeddp.plugins.placing import place_module
from shardeddp.plugins.precision import shard_precision
from shardeddp.plugins.timeout import collective_timeout
from shardeddp.plugins.uneven import hold_if_uneven, let_go
from shardeddp.sharding.optimizer import attach_optimizer
from shardeddp.sharding.runtime import Prefetch, Runtime, runtime_of
from shardeddp.sharding.setup import shard_model
from shardeddp.wrap import PolicyLike, build_units, resolve_policy

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ShardedDP(ParallelStrategy):
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
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.placement = choose_placement(sharding_strategy, shard_size, reduce_every_backward)
        self._sharding_strategy = sharding_strategy.lower()
        self.policy = resolve_policy(auto_wrap_policy)
        self.prefetch = Prefetch(forward=forward_prefetch, backward=backward_prefetch)
        self._process_group_backend = process_group_backend
        self.timeout = collective_timeout(timeout)
        self._start_method: StartMethod = start_method
        self.num_nodes = 1  # set by the Trainer
        self._mesh: Mesh | None = None
        self._runtime: Runtime | None = None

    # -- what this strategy is

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank; Lightning then injects samplers and syncs logged values."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError("ShardedDP has no devices yet: the Trainer assigns them when it is made")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks per machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

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
    def mesh(self) -> Mesh:
        """The communicators of this rank; exists from ``setup_environment`` on."""
        if self._mesh is None:
            raise RuntimeError("ShardedDP has no process group yet: it is set up when the Trainer starts to run")
        return self._mesh

    @property
    def runtime(self) -> Runtime:
        """The engine of the model; exists from ``setup`` on."""
        if self._runtime is None:
            raise RuntimeError("ShardedDP has not sharded a model yet: the Trainer does so when it starts to run")
        return self._runtime

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has communicated for the engine, by kind."""
        return self.mesh.traffic

    @property
    def memory_plan(self) -> MemoryPlan:
        """Predicted bytes of this rank, without activations, for an optimizer with two states per element."""
        units = [track.unit.costs() for track in self.runtime.tracks]
        return plan_memory(units, prefetch=self.prefetch.backward, staged=self.root_device.type == "cpu")

    # -- processes

    @property
    def _environment(self) -> ClusterEnvironment:
        if self.cluster_environment is None:
            raise RuntimeError("ShardedDP has no cluster environment: the Trainer finds one when it is made")
        return self.cluster_environment

    @override
    def _configure_launcher(self) -> None:
        # A shard_size that does not fit fails here, before any process is started.
        self.placement.topology(self.num_nodes, self.num_processes)
        if self._start_method == "popen":
            self._launcher = _SubprocessScriptLauncher(self._environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = ShardedMultiProcessingLauncher(self, self._start_method, gather_full)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        _init_dist_connection(
            self._environment,
            self._process_group_backend or _get_default_process_group_backend_for_device(device),
            timeout=self.timeout,
            device_id=None if device.type == "cpu" else device,
        )
        if self._mesh is None:
            # A module that another Trainer has sharded brings its communicators along.
            sharded = None if self.lightning_module is None else runtime_of(self.lightning_module)
            topology = self.placement.topology(self.num_nodes, self.num_processes)
            self._mesh = Mesh(topology, device, self.timeout) if sharded is None else sharded.mesh

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and everything that acts on rank 0 alone, which rank this is."""
        self._environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self._environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # pyright: ignore[reportFunctionMemberAccess]

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

    # -- communication for users

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._mesh is not None:
            barrier(self._mesh)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._mesh is None else broadcast_object(self._mesh, obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor) or self._mesh is None:
            return tensor
        if group is not None and group is not torch.distributed.group.WORLD:
            raise NotImplementedError("reduce() is over all ranks; for other groups use torch.distributed")
        return reduce_tensor(self._mesh, whole(tensor), "sum" if reduce_op is None else reduce_op)

    @override
    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return _all_gather_ddp_if_available(whole(tensor), group=group, sync_grads=sync_grads)

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
