"""Fabric: the strategy for custom training loops, on the engine of the Trainer's strategy."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from shardeddp.checkpoint.clean import directory_at
from shardeddp.checkpoint.full_write import save_full
from shardeddp.checkpoint.loop_state import LoopState
from shardeddp.checkpoint.schema import WEIGHTS
from shardeddp.checkpoint.snapshot import nbytes_of
from shardeddp.config import AUTO, OF_LIGHTNING, StartMethod, check_choice, parse_options
from shardeddp.engine.deferred_init import fill_rest
from shardeddp.engine.runtime import Runtime
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    LIGHTNING_VERSION,
    DDPStrategy,
)
from shardeddp.lightning.checkpointing import Checkpoints, streams
from shardeddp.lightning.model_sharding import ModelSharding
from shardeddp.lightning.precision import ShardedPrecision
from shardeddp.lightning.private import check_lightning
from shardeddp.lightning.restore import Restore
from shardeddp.lightning.run_group import Ranks, RunGroup, set_rank
from shardeddp.optim.attach import attach_optimizer, follow_optimizers
from shardeddp.optim.clip import clip_grad_norm_, clip_grad_value_
from shardeddp.optim.late_parameters import average_late_gradients
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import never_traced, runs_eagerly


class ShardedForward(nn.Module):
    """Sharded module; each call is a step of the engine."""

    def __init__(self, module: nn.Module, runtime: Runtime, fill_rest: Callable[[], None]) -> None:
        super().__init__()
        self.module, self.runtime = module, runtime
        self._fill_rest: Callable[[], None] | None = fill_rest

    def begin_step(self) -> AbstractContextManager[list[Any]]:
        """Return the context of a step; modules not set up by the first one stay unsharded."""
        if self._fill_rest is not None:
            self._fill_rest()
            self._fill_rest = None
        return self.runtime.step("training_step" if torch.is_grad_enabled() else "validation_step")

    @runs_eagerly  # the inner module is compiled if Fabric's was
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output; a training step if gradients are enabled."""
        with _Step(self) as outputs:
            outputs.append(self.module(*args, **kwargs))
        return outputs[0]


_outside_of_graphs = never_traced("a step of ShardedDP begins or ends here")


class _Step:
    """Context of a step of the engine, excluded from compiled code."""

    def __init__(self, sharded: ShardedForward) -> None:
        self._sharded = sharded

    @_outside_of_graphs
    def __enter__(self) -> list[Any]:
        self._step = self._sharded.begin_step()
        return self._step.__enter__()

    @_outside_of_graphs
    def __exit__(self, *error: Any) -> bool | None:
        return self._step.__exit__(*error)


class ShardedDP(DDPStrategy):
    """Strategy of sharded training for ``Fabric(strategy=shardeddp.fabric.ShardedDP(...))``.

    Args:
        sharding_strategy: State to split over the ranks, as for :class:`shardeddp.ShardedDP`.
        state_dict_type: Format of ``fabric.save``. ``sharded``: a directory to which every rank
            writes its part, and which the Trainer's strategy reads too. ``full``: one file, in the
            format of Fabric's other strategies. Every setting loads both.
        start_method: Method of starting ranks if the cluster environment does not start them.
        options: Further options of :class:`shardeddp.ShardedDP`, except for ``uneven_batches``,
            ``plan_only``, ``"auto"``, asynchronous saves, tensor and expert parallelism.

    Raises:
        TypeError: An option is unknown.
        ConfigurationError: An option does not work with Fabric, or is invalid.
    """

    def __init__(
        self,
        sharding_strategy: str = "full_shard",
        *,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        start_method: StartMethod = "popen",
        **options: Any,
    ) -> None:
        lightning = {name: options.pop(name) for name in OF_LIGHTNING if name in options}
        lightning["precision"] = options.pop("precision", None)
        check_lightning()
        own = parse_options(
            {
                "sharding_strategy": sharding_strategy,
                "state_dict_type": check_choice(
                    "state_dict_type", state_dict_type, ("sharded", "full")
                ),
                "start_method": start_method,
                **options,
            },
            (*OF_LIGHTNING, "precision"),
        )
        chosen = AUTO in (own.sharding_strategy, own.shard_size) or own.plan_only
        for option, given, why in (
            (
                "CheckpointOptions(asynchronous=True)",
                own.checkpoint_options.asynchronous,
                "nothing in a custom loop waits for the last checkpoint",
            ),
            ("uneven_batches", "uneven_batches" in options, "your own loop ends epochs by itself"),
            (
                "'auto' or plan_only",
                chosen,
                "it has the model before a run; ShardedDP.plan(model) prints settings for Fabric",
            ),
            ("tensor_parallel_size", own.tensor_parallel_size != 1, "where it has been tried"),
            ("expert_parallel_size", own.expert_parallel_size != 1, "where it has been tried"),
        ):
            if given:
                raise ConfigurationError(f"{option} goes with the Trainer: {why}. Leave it out")
        super().__init__(**lightning, start_method=start_method)
        self._group = RunGroup(own)
        self._checkpoints = Checkpoints(self._group)
        self._restore = Restore(self._group)
        self._sharding = ModelSharding(self._group, self._restore, shards_several=True)
        self._backward_sync_control = cast(Any, self)  # Fabric calls its no_backward_sync

    @override
    def setup_environment(self) -> None:
        if self.cluster_environment is None or self.accelerator is None:
            raise RuntimeError("ShardedDP has no environment yet: Fabric finds one when it is made")
        self.accelerator.setup_device(self.root_device)
        nodes, processes = self.num_nodes, self.num_processes
        rank = self.node_rank * processes + self.local_rank
        set_rank(self.cluster_environment, rank, nodes * processes)
        ranks = Ranks(self.cluster_environment, self.root_device, nodes, processes)
        self._group.connect(ranks)
        self._group.begin_run(ranks, None)
        follow_optimizers()

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._group.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return self._group.gather(tensor, group, sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._group.barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._group.broadcast(obj, src)

    # -- modules and optimizers

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        """Surround a micro-batch without gradient communication (accumulation)."""
        runtime: Runtime = module.runtime
        return runtime.without_sync() if enabled else nullcontext()

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Surround the construction of a module; ``empty_init=True`` builds on the meta device."""
        return self._sharding.building(cast(Any, self.precision), empty_init)

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: parameters reach the device as shards, in :meth:`setup_module`."""

    @override
    def setup_module(self, module: nn.Module) -> Any:
        precision = ShardedPrecision()  # Fabric's own converts modules and wraps forwards
        precision.precision = cast(Any, self.precision.precision)
        runtime = self._sharding.shard(module, precision, lambda: None, fitting=True)
        return ShardedForward(module, runtime, partial(fill_rest, self._sharding.recording))

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        held = [it for group in optimizer.param_groups for it in group["params"]]
        if self.world_size > 1 and not any(isinstance(it, ShardTensor) for it in held):
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds no parameter of a module that is set up: call "
                f"fabric.setup_module(module) first, or fabric.setup(module, optimizer)"
            )
        scopes = self._group.options.optimizer_scope
        attach_optimizer(optimizer, self._group.offloads_optimizer, scopes)
        return optimizer

    @override
    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.precision.unscale_gradients(optimizer)
        average_late_gradients([optimizer])
        return clip_grad_norm_(self.precision.main_params(optimizer), max_norm, *args, **kwargs)

    @override
    def clip_gradients_value(self, module: Any, optimizer: Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        average_late_gradients([optimizer])
        clip_grad_value_(self.precision.main_params(optimizer), clip_val)

    # -- checkpoints

    @override
    def save_checkpoint(
        self, path: str | Path, state: Any, storage_options: Any = None, filter: Any = None
    ) -> None:
        loop = LoopState({key: _bare(it) for key, it in state.items()})
        if self._group.options.state_dict_type == "full":
            target = self.broadcast(os.fspath(path))
            write = partial(self._write_file, target, storage_options)
            save_full(loop.plain(filter), target, write, self._group.current)
            return
        if filter:
            raise NotImplementedError("fabric.save(filter=...) needs state_dict_type='full'")
        checkpoint = loop.checkpoint(LIGHTNING_VERSION)
        self._checkpoints.save(checkpoint, path, storage_options, self.checkpoint_io, loop.names)

    def _write_file(self, target: str, storage_options: Any, full: dict[str, Any]) -> None:
        if not streams(storage_options, self.checkpoint_io):
            self.checkpoint_io.save_checkpoint(full, target, storage_options)
            return
        options = self._group.options.checkpoint_options
        with directory_at(target).new_file(nbytes_of(full), options) as opened:
            torch.save(full, opened)

    @override
    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: Any = None
    ) -> dict[str, Any]:
        place = self.broadcast(os.fspath(path))
        checkpoint = self._restore.read(place, weights_only, self.checkpoint_io)
        if not state:
            return checkpoint
        raw = not isinstance(state, dict)
        wanted: dict[str, Any] = {"": state} if raw else state
        loop = LoopState({key: _bare(it) for key, it in wanted.items()})
        found = {"": checkpoint.get(WEIGHTS, checkpoint)} if raw else loop.found_in(checkpoint)
        if strict and (missing := [key for key in wanted if key not in found]):
            raise KeyError(f"{path} has no {missing[0]!r}: found {', '.join(found)}")
        cast = self._group.options.checkpoint_options.cast
        load = partial(loop.load, found, checkpoint, strict=strict, cast=cast)
        wanted.update(self._group.run_on_all_ranks("loading the checkpoint", load))
        return {} if raw else found


def _bare(value: Any) -> Any:
    return value.module if isinstance(value, ShardedForward) else value
