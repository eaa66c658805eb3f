"""Distributed parameters: splits over tensor-parallel ranks, and the tensors that modules compute with.

A parameter that ranks split becomes a local tensor before the model is sharded, so that a flat
buffer holds only this rank's part. Outside of its unit it is a ``ShardTensor`` of the whole shape
with ranks that share some boxes. Inside, its module computes with the local tensor itself, or with
a wrapper made from it whenever it is bound to memory: a DTensor, where ``parallelize_module`` has
made the parameter one.
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
    """Mesh, placements, shape and stride of a DTensor: all but its local tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def over(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor of a local tensor; its gradients go on to the local tensor."""
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
    """Split of one parameter over the ranks."""

    shape: torch.Size
    """Shape of the whole parameter."""

    boxes: tuple[tuple[Box, ...], ...]
    """Boxes of each tensor rank, in the order of its elements; empty: every rank has all of it."""

    wrapper: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes the tensor that modules compute with from the local one; None: the local one itself."""

    part: torch.Size | None = None
    """Shape of each rank's part; None: that of the whole parameter."""

    is_dtensor: bool = False
    """True if modules compute with a DTensor."""

    of_experts: bool = False
    """True if it is split over ranks with different experts, which train on other batches."""

    layer: nn.Module | None = None
    """Module whose forward alone computes with the part; None: all code inside of the unit does."""

    def wrap(self, leaf: nn.Parameter) -> torch.Tensor:
        """Return the tensor for a module: differentiable, in any grad mode around the gather."""
        if self.wrapper is None:
            return leaf
        inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inference else nullcontext(), torch.enable_grad():
            return self.wrapper(leaf)


def layout_of(tensor: DTensor) -> DistributedLayout:
    """Return the layout of a DTensor."""
    return DistributedLayout(
        mesh=tensor.device_mesh,
        placements=tuple(tensor.placements),
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return this rank's local tensor of a DTensor, without history."""
    with torch.no_grad():
        return tensor.to_local()


def take_apart(root: nn.Module, mesh: DeviceMesh) -> Mapping[nn.Parameter, Distribution]:
    """Replace distributed parameters of modules, as :func:`replace_parameters`, by local tensors.

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
    """Return a rank's part of a whole parameter, with its attributes; a copy if it is cut."""
    values = parameter.detach()
    if distribution.boxes:
        values = flatten_boxes(values, distribution.boxes[rank]).view(
            distribution.part or parameter.shape
        )
    local = nn.Parameter(values, parameter.requires_grad)
    vars(local).update(vars(parameter))
    # Sharding takes them over later.
    put_hooks(local, (parameter._backward_hooks, parameter._post_accumulate_grad_hooks))  # type: ignore[attr-defined]
    if parameter.is_meta:
        vars(local)[_WHOLE] = parameter
    return local


_WHOLE = "_shardeddp_whole"  # in the dictionary of a part on the meta device


def whole_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Return the meta parameter that a tensor is a part of; any other tensor itself."""
    return vars(tensor).get(_WHOLE, tensor)


def forget_whole(part: torch.Tensor) -> None:
    """Release the parameter that a tensor is a part of."""
    vars(part).pop(_WHOLE, None)


def flatten_boxes(tensor: torch.Tensor, shared: Sequence[Box]) -> torch.Tensor:
    """Return the elements of boxes of a tensor, concatenated; 1D."""
    parts = [tensor[box.slices].reshape(-1) for box in shared]
    return torch.cat(parts) if parts else tensor.new_empty(0)


def replace_parameters(
    root: nn.Module, made: Mapping[int, tuple[nn.Parameter, Distribution]]
) -> dict[nn.Parameter, Distribution]:
    """Replace parameters of modules by their parts, keyed by the identity of the former ones.

    Returns:
        Split of each former parameter, by new parameter.
    """
    for module in root.modules():
        for attribute, tensor in module._parameters.items():
            if id(tensor) in made:
                module._parameters[attribute], _ = made[id(tensor)]
    return dict(made.values())


_OF_DTENSOR = {"_local_tensor", "_spec", "_is_param"}
"""Attributes of torch, not of the user."""


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
        return Distribution(shape=layout.shape, boxes=(), wrapper=layout.over, is_dtensor=True)
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
    return Distribution(shape=layout.shape, boxes=boxes, wrapper=layout.over, is_dtensor=True)


def boxes_along(
    dim: int, shape: Sequence[int], size: int, fused: int = 1, *, stacked: bool = False
) -> tuple[tuple[Box, ...], ...]:
    """Return the boxes of each of ``size`` ranks in a tensor that is split along a dim.

    Args:
        dim: Dim along which it is split.
        shape: Shape of the tensor.
        size: Number of ranks, which divides the dim's size over ``fused``.
        fused: Number of equal tensors that are concatenated along the dim, each of which is split.
        stacked: True if a rank's parts of them are separate: all of the first one's, then all of
            the second one's.

    Returns:
        Boxes by rank, in the order of the elements of its part.
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
