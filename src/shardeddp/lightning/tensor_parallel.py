"""Tensor parallelism under Lightning: its device mesh, and what is refused with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from shardeddp.comm import Mesh
from shardeddp.config import Scope
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import Trainer
from shardeddp.optim.scope import scope_of
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import OptimizedModule

DATA_PARALLEL, TENSOR_PARALLEL = "data_parallel", "tensor_parallel"
"""Names of the axes, as in Lightning's ``ModelParallelStrategy``."""


def make_device_mesh(mesh: Mesh) -> DeviceMesh:
    """The axes of ranks for ``parallelize_module``; a collective of all ranks."""
    groups = torch.tensor(mesh.topology.tensor_groups())
    return DeviceMesh(mesh.device.type, groups, mesh_dim_names=(DATA_PARALLEL, TENSOR_PARALLEL))


def check_options(size: int, **untried: bool) -> None:
    """Refuse options that have not been tried with tensor parallelism.

    Args:
        size: ``tensor_parallel_size``.
        untried: By description, whether an option is set.

    Raises:
        ConfigurationError: The size is no positive integer, or one of them is set.
    """
    if type(size) is not int or size < 1:
        raise ConfigurationError(
            f"expected tensor_parallel_size to be a whole number of at least 1, found {size!r}"
        )
    found = [name for name, is_set in untried.items() if is_set]
    if size > 1 and found:
        raise ConfigurationError(
            f"tensor_parallel_size={size} does not work together with {', '.join(found)} yet: "
            f"leave out one of the two"
        )


def refuse_sharded(module: nn.Module, size: int) -> None:
    """Refuse modules that another run has sharded, if that or this one splits layers.

    Raises:
        ConfigurationError: It is one.
    """
    sharded = [it for it in module.parameters() if isinstance(it, ShardTensor)]
    if (size > 1 and sharded) or any(it.spec.mesh.topology.tensor_size > 1 for it in sharded):
        raise ConfigurationError(
            "tensor_parallel_size is for modules that no other run has sharded: build the module "
            "anew"
        )


def refuse_untried(module: nn.Module) -> None:
    """Refuse modules that tensor parallelism has not been tried with.

    Raises:
        ConfigurationError: It is compiled or on the meta device, or has metrics.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ConfigurationError(
                f"tensor_parallel_size does not work together with deferred initialization yet, "
                f"found {name!r} on the meta device: build the module without it"
            )
    for name, child in module.named_modules():
        if isinstance(child, Metric):
            raise ConfigurationError(
                f"tensor_parallel_size does not work together with metrics that are modules yet, "
                f"found {name!r}: it would count ranks that split layers once each. Log values "
                f"with self.log(..., sync_dist=True)"
            )
        if isinstance(child, OptimizedModule) or child._compiled_call_impl is not None:
            raise ConfigurationError(
                f"tensor_parallel_size does not work together with torch.compile yet, found "
                f"{name or 'the module itself'!r} compiled: leave it out"
            )


def refuse_untried_in(trainer: Trainer) -> None:
    """Refuse callbacks and precisions that tensor parallelism has not been tried with.

    Raises:
        ConfigurationError: There is one.
    """
    averaging = ("WeightAveraging", "StochasticWeightAveraging")
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if any(base.__name__ in averaging for base in type(callback).__mro__):
            raise ConfigurationError(
                f"tensor_parallel_size does not work together with {type(callback).__name__} yet: "
                f"leave the callback out"
            )
    if trainer.precision != "32-true":
        raise ConfigurationError(
            f"tensor_parallel_size works with precision='32-true' alone yet, found "
            f"{trainer.precision!r}"
        )


def refuse_optimizer(optimizer: optim.Optimizer, stated: Mapping[str, Scope] | None) -> None:
    """Refuse optimizers that need more of a parameter than a rank has.

    Args:
        optimizer: Any.
        stated: Scopes that the user gives for classes.

    Raises:
        ConfigurationError: It is one, or one that is not known.
    """
    scope = scope_of(type(optimizer), stated)
    if scope != "element":
        raise ConfigurationError(
            f"tensor_parallel_size works with optimizers that treat every element by itself (Adam, "
            f"AdamW, SGD and the like), found {type(optimizer).__name__}, whose scope is {scope!r}"
        )
