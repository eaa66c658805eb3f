"""Tensor and expert axes under Lightning: their device mesh, and refusals of what is untried with them."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from shardeddp.comm import Mesh
from shardeddp.comm.activations import name_group
from shardeddp.config import Options
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    StochasticWeightAveraging,
    Trainer,
    WeightAveraging,
    callbacks_of,
)
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import OptimizedModule
from shardeddp.wrap.tensor_plan import TensorPlan

DATA_PARALLEL, TENSOR_PARALLEL = "data_parallel", "tensor_parallel"
"""Names of the mesh axes, as in Lightning's ``ModelParallelStrategy``."""

EXPERT_PARALLEL = "expert_parallel"
"""Name of the mesh axis of ranks with different experts."""


def make_device_mesh(mesh: Mesh) -> DeviceMesh | None:
    """Make the device mesh of the tensor or expert axis; None without; a collective of all ranks."""
    if mesh.topology.tensor_size > 1:
        return mesh.device_mesh((DATA_PARALLEL, TENSOR_PARALLEL))
    if mesh.experts is None:
        return None
    made = mesh.experts.device_mesh(("expert_data_parallel", EXPERT_PARALLEL))
    name_group(mesh.experts.activations, made[EXPERT_PARALLEL].get_group().group_name)
    return made


def refuse_untried(module: nn.Module, options: Options) -> None:
    """Refuse modules that an axis does not work with, or has not been tried with.

    Raises:
        ConfigurationError: Parameters are shards of another run, and either run has an axis; or the
            module has DTensors, and is on the meta device or compiled.
    """
    sharded = [it for it in module.parameters() if isinstance(it, ShardTensor)]
    has_axis = max(options.tensor_parallel_size, options.expert_parallel_size) > 1
    if (has_axis and sharded) or any(it.spec.mesh.topology.tensor_size > 1 for it in sharded):
        raise ConfigurationError(
            "tensor_parallel_size and expert_parallel_size are for modules that no other run has "
            "sharded: build the module anew"
        )
    if options.tensor_parallel_size == 1:
        return
    tensors = (*module.named_parameters(), *module.named_buffers())
    deferred = next((name for name, it in tensors if it.is_meta), None)
    distributed = _distributed(module, options.tensor_parallel_plan)
    if not distributed:
        return
    if deferred is not None:
        raise ConfigurationError(
            f"parallelize_module and styles of torch do not work together with deferred "
            f"initialization, found {deferred!r} on the meta device and {distributed[0]!r} split: "
            f"tensor ranks would draw other numbers than one process. Name the layers in "
            f"tensor_parallel_plan instead, or build the module without it (tensor_parallel_size)"
        )
    for name, child in module.named_modules():
        if isinstance(child, OptimizedModule) or child._compiled_call_impl is not None:
            raise ConfigurationError(
                f"parallelize_module and styles of torch do not work together with torch.compile, "
                f"found {name or 'the module itself'!r} compiled and {distributed[0]!r} split. Name "
                f"the layers in tensor_parallel_plan instead, or leave torch.compile out "
                f"(tensor_parallel_size)"
            )


def refuse_callbacks(trainer: Trainer, module: nn.Module, options: Options) -> None:
    """Refuse callbacks that an axis does not work with, or has not been tried with."""
    plan = options.tensor_parallel_plan
    for callback in callbacks_of(trainer):
        name = type(callback).__name__
        if not isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            continue
        if options.expert_parallel_size > 1:
            raise ConfigurationError(
                f"expert_parallel_size does not work together with {name} yet, which copies the "
                f"module: leave the callback out"
            )
        if options.tensor_parallel_size == 1:
            continue
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigurationError(
                f"tensor_parallel_size has not been tried with {name}: use EMAWeightAveraging, or "
                f"leave the callback out"
            )
        if plan is None or _distributed(module, plan):
            raise ConfigurationError(
                f"parallelize_module and styles of torch do not work together with {name}, which "
                f"copies modules of DTensors. Name the layers in tensor_parallel_plan instead, or "
                f"leave the callback out (tensor_parallel_size)"
            )


def _distributed(module: nn.Module, plan: TensorPlan | None) -> list[str]:
    """Return the names of parameters that are DTensors, and of layers that will have some."""
    names = [name for name, it in module.named_parameters() if isinstance(it, DTensor)]
    if plan is not None and plan != "auto":
        names += [name for name, it in plan.items() if isinstance(it, ParallelStyle)]
    return names
