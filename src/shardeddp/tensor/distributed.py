"""Distributed parameters: how tensor-parallel ranks split a parameter, and what they compute with.

A parameter that ranks split becomes a local tensor before the model is sharded, so that a flat
buffer holds what this rank has of it. Outside of its unit it is a ``ShardTensor`` of the whole
shape, whose owners share some boxes. Inside, its module computes with the local tensor itself, or
with something that is made of it whenever it is bound to memory: a DTensor, where
``parallelize_module`` has made it one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardeddp.errors import ConfigurationError
from shardeddp.plan.layout import Box
from shardeddp.tensor.gradient_hooks import put_hooks


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

    shape: torch.Size
    """Of the whole parameter."""

    boxes: tuple[tuple[Box, ...], ...]
    """What each tensor rank has of it, in the order of its elements; empty: all of it."""

    wrapper: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes what modules compute with of the local tensor; None: they compute with that."""

    part: torch.Size | None = None
    """Shape of what each has; None: that of the whole parameter."""

    of_experts: bool = False
    """Whether it is split over ranks with experts of their own, which train on other batches."""

    def wrap(self, leaf: nn.Parameter) -> torch.Tensor:
        """What a module computes with: differentiable, whatever surrounds the gather."""
        if self.wrapper is None:
            return leaf
        inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inference else nullcontext(), torch.enable_grad():
            return self.wrapper(leaf)


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
    return replace_parameters(root, made)


def local_part(parameter: nn.Parameter, distribution: Distribution, rank: int) -> nn.Parameter:
    """What a rank has of a whole parameter, with its attributes; in memory of its own if it is cut."""
    values = parameter.detach()
    if distribution.boxes:
        values = flatten_boxes(values, distribution.boxes[rank]).view(
            *(distribution.part or parameter.shape)
        )
    local = nn.Parameter(values, parameter.requires_grad)
    vars(local).update(vars(parameter))
    # What is sharded later takes them over.
    put_hooks(local, (parameter._backward_hooks, parameter._post_accumulate_grad_hooks))  # type: ignore[attr-defined]
    if parameter.is_meta:
        vars(local)[_WHOLE] = parameter
    return local


_WHOLE = "_shardeddp_whole"  # in the dictionary of a part on the meta device


def whole_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter on the meta device that a tensor is a part of; any other tensor itself."""
    return vars(tensor).get(_WHOLE, tensor)


def forget_whole(part: torch.Tensor) -> None:
    """Let go of the parameter that a tensor is a part of."""
    vars(part).pop(_WHOLE, None)


def flatten_boxes(tensor: torch.Tensor, shared: Sequence[Box]) -> torch.Tensor:
    """The elements of boxes of a tensor, one box behind the other; 1D."""
    parts = [tensor[box.slices].reshape(-1) for box in shared]
    return torch.cat(parts) if parts else tensor.new_empty(0)


def replace_parameters(
    root: nn.Module, made: Mapping[int, tuple[nn.Parameter, Distribution]]
) -> dict[nn.Parameter, Distribution]:
    """Let modules hold parts of parameters, by the identity of the former ones.

    Returns:
        By new parameter, how the former one was split.
    """
    for module in root.modules():
        for attribute, tensor in module._parameters.items():
            if id(tensor) in made:
                module._parameters[attribute], _ = made[id(tensor)]
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
        return Distribution(shape=layout.shape, boxes=(), wrapper=layout.over)
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
    boxes = boxes_along(dim, tensor.shape, size)
    return Distribution(shape=layout.shape, boxes=boxes, wrapper=layout.over)


def boxes_along(
    dim: int, shape: Sequence[int], size: int, fused: int = 1, *, stacked: bool = False
) -> tuple[tuple[Box, ...], ...]:
    """What each of ``size`` ranks has of a tensor that is split along a dim.

    Args:
        dim: That dim.
        shape: Of the tensor.
        size: Number of ranks, which divides the dim's size over ``fused``.
        fused: Number of equal tensors that lie one behind the other along the dim, each of which
            is split.
        stacked: Whether a rank's parts of them are apart: all of the first one's, then all of the
            second one's.

    Returns:
        By rank, its boxes in the order of the elements of its part.
    """
    part = shape[dim] // fused // size
    by_row = fused > 1 and not stacked
    outer = list(product(*map(range, shape[:dim]))) if by_row else [(0,) * dim]
    sizes = (*((1,) * dim if by_row else shape[:dim]), part, *shape[dim + 1 :])
    behind = (0,) * (len(shape) - dim - 1)
    return tuple(
        tuple(
            Box((*at, (which * size + place) * part, *behind), sizes)
            for at in outer
            for which in range(fused)
        )
        for place in range(size)
    )
