"""Distributed parameters: how tensor-parallel ranks split a parameter, and views of it as DTensors.

A parameter that ``parallelize_module`` has made a DTensor becomes its local tensor before the
model is sharded, so that a flat buffer holds what this rank has of it. Its module computes with a
DTensor over the unsharded parameter, made anew whenever that is bound to memory. Outside of its
unit it is a ``ShardTensor`` of the whole shape, whose owners share one box.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardeddp.errors import ConfigurationError
from shardeddp.plan.layout import Box


@dataclass(frozen=True, kw_only=True, eq=False)
class DistributedLayout:
    """Everything about a DTensor but its local tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def over(self, local: torch.Tensor) -> DTensor:
        """The DTensor of a local tensor; gradients that reach it go on to that."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Distribution:
    """How ranks split one parameter."""

    layout: DistributedLayout
    boxes: tuple[Box, ...]
    """What each tensor rank has of it; empty: all of it."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.layout.shape

    def wrap(self, leaf: nn.Parameter) -> DTensor:
        """What a module computes with: differentiable, whatever surrounds the gather."""
        inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inference else nullcontext(), torch.enable_grad():
            return self.layout.over(leaf)


def layout_of(tensor: DTensor) -> DistributedLayout:
    """Everything about a DTensor but its local tensor."""
    return DistributedLayout(
        mesh=tensor.device_mesh,
        placements=tuple(tensor.placements),
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_of(tensor: DTensor) -> torch.Tensor:
    """What this rank has of a DTensor, without history."""
    with torch.no_grad():
        return tensor.to_local()


def take_apart(root: nn.Module, mesh: DeviceMesh) -> Mapping[nn.Parameter, Distribution]:
    """Let modules hold local tensors in place of distributed parameters.

    Args:
        root: The model.
        mesh: The tensor axis, with one dim.

    Returns:
        By new parameter, how the former one was split.

    Raises:
        ConfigurationError: A parameter is split in a way that is not supported; nothing has
            changed.
    """
    found: dict[int, tuple[DTensor, str]] = {}
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if isinstance(tensor, DTensor):
            if not isinstance(tensor, nn.Parameter):
                raise ConfigurationError(
                    f"expected buffers that every rank has whole, found {name!r}, a DTensor"
                )
            found[id(tensor)] = tensor, name
    made: dict[int, tuple[nn.Parameter, Distribution]] = {}
    for key, (tensor, name) in found.items():
        distribution = _distribution_of(name, tensor, mesh)
        local = nn.Parameter(local_of(tensor).contiguous(), tensor.requires_grad)
        vars(local).update({k: v for k, v in vars(tensor).items() if k not in _OF_DTENSOR})
        made[key] = local, distribution
    for module in root.modules():
        for attribute, tensor in module._parameters.items():
            if id(tensor) in made:
                module._parameters[attribute] = made[id(tensor)][0]
    return dict(made.values())


_OF_DTENSOR = {"_local_tensor", "_spec", "_is_param"}
"""Attributes that are no user's."""


def _distribution_of(name: str, tensor: Any, mesh: DeviceMesh) -> Distribution:
    layout = layout_of(tensor)
    if layout.mesh != mesh or len(layout.placements) != 1:
        raise ConfigurationError(
            f"expected parameters that are split over self.device_mesh['tensor_parallel'] alone, "
            f"found {name!r} on {layout.mesh}. Leave fully_shard and further axes out: the "
            f"strategy shards what parallelize_module has left"
        )
    (placement,) = layout.placements
    if type(placement) is Replicate:
        return Distribution(layout=layout, boxes=())
    if type(placement) is not Shard:
        raise ConfigurationError(
            f"expected parameters that are split along a dim or replicated, found {name!r} with "
            f"placement {placement}"
        )
    dim, size = placement.dim % tensor.dim(), mesh.size()
    if tensor.shape[dim] % size:
        raise ConfigurationError(
            f"expected dims that tensor_parallel_size={size} divides, found {name!r} of shape "
            f"{tuple(tensor.shape)}, split along dim {dim}. Choose a size that divides it, or "
            f"leave the layer out of the plan"
        )
    sizes = list(tensor.shape)
    sizes[dim] //= size
    boxes = [
        Box(tuple(place * sizes[dim] if at == dim else 0 for at in range(len(sizes))), tuple(sizes))
        for place in range(size)
    ]
    return Distribution(layout=layout, boxes=tuple(boxes))
