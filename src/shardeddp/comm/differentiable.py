"""A sum over ranks that autograd sees through, for layers that need other ranks' values in their forward."""

from typing import Any

import torch
import torch.distributed as dist


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of every rank's tensor; each rank's gets, in backward, the sum of what all ranks' results got.

    Args:
        tensor: Any shape, the same on every rank.
        group: Which ranks; None: all of the default process group.
    """
    return _SumOverRanks.apply(tensor, group)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return sum_over_ranks(gradient, ctx.group), None
