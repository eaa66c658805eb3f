"""Global gradient norm and clipping of sharded and plain gradients, exact, with one reduction."""

from collections.abc import Iterable

import torch

from shardeddp.tensor.dispatch import norms
from shardeddp.tensor.shard_tensor import ShardTensor, local_or_whole
from shardeddp.torch_private import foreach_mul_


def total_norm(gradients: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients as one vector: 0D, equal on all ranks, 0 without gradients.

    Plain gradients are the same on every rank.
    """
    gradients = list(gradients)
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardTensor)]
    parts = [
        torch.linalg.vector_norm(plain, norm_type)
        for plain in gradients
        if not isinstance(plain, ShardTensor)
    ]
    if sharded:
        parts += norms(sharded, norm_type)
    if not parts:
        return torch.zeros((), device="cpu")
    return torch.linalg.vector_norm(
        torch.stack([part.to(parts[0].dtype) for part in parts]), norm_type
    )


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients to a global norm of at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` does.

    Returns:
        The norm before clipping, 0D, equal on all ranks.

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set; nothing has been
            changed.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the global gradient norm of order {norm_type} is {norm.item()}; no gradient has been "
            f"clipped. Look for the batch or the layer that overflows, or pass "
            f"error_if_nonfinite=False to go on"
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    locals_ = [local_or_whole(gradient) for gradient in gradients]
    if locals_:
        foreach_mul_(locals_, scale.to(locals_[0].device))
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every gradient element to ``[-clip_value, clip_value]``."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_or_whole(parameter.grad).clamp_(-clip_value, clip_value)
