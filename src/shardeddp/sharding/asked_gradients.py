"""``torch.autograd.grad`` with respect to sharded parameters: this rank's own gradients, whole, as under DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardeddp.sharding.backward import asking
from shardeddp.sharding.shard_tensor import ShardTensor
from shardeddp.sharding.unsharded import outside_of


def asked_gradients(outputs: Any, inputs: Sequence[Any], **options: Any) -> tuple[torch.Tensor | None, ...]:
    """What ``torch.autograd.grad`` returns, where sharded parameters are among its arguments.

    A sharded parameter stands for two leaves of the graph: itself, where it was used outside its unit, and the
    unsharded parameter of its unit. Its gradient is the sum of theirs: of this rank's outputs, not averaged, a plain
    tensor of the parameter's shape that may be differentiated again.

    Args:
        outputs: As torch takes them.
        inputs: As torch takes them, in a sequence.
        options: As torch takes them.
    """
    dtypes = [x.dtype for x in inputs]
    inputs = [outside_of(x) for x in inputs]  # in a step, parameters are met unsharded
    leaves = [
        (place, x.unsharded) for place, x in enumerate(inputs) if isinstance(x, ShardTensor) and x.unsharded is not None
    ]
    unused_is_fine, zeros = options.get("allow_unused"), options.get("materialize_grads")
    options |= {"allow_unused": True, "materialize_grads": False}
    with asking():
        both = [*inputs, *(leaf for _, leaf in leaves)]
        results: list[torch.Tensor | None] = [*torch.autograd.grad(outputs, both, **options)]
    for (place, _), gradient in zip(leaves, results[len(inputs) :], strict=True):
        if gradient is not None:
            gradient = gradient.to(dtypes[place])  # what autocast's copy got
        outside = results[place]
        results[place] = gradient if outside is None else outside if gradient is None else outside + gradient
    for place, x in enumerate(inputs):
        if results[place] is None and zeros:
            graph = bool(options.get("create_graph"))
            results[place] = torch.zeros(x.shape, dtype=x.dtype, device=x.device, requires_grad=graph)
        elif results[place] is None and not unused_is_fine:
            name = f" ({x.spec.fqn})" if isinstance(x, ShardTensor) else ""
            raise RuntimeError(
                f"One of the differentiated Tensors{name} appears to not have been used in the graph. Set "
                f"allow_unused=True if this is the desired behavior."
            )
    return tuple(results[: len(inputs)])


def backward_to(tensors: Any, *, inputs: Any = None, **options: Any) -> None:
    """Run ``torch.autograd.backward`` where sharded parameters are among its arguments.

    Args:
        tensors: As torch takes them.
        inputs: As torch takes them: the only ones that get gradients, wherever they were used. None: all.
        options: As torch takes them.
    """
    torch.autograd.backward(tensors, inputs=None if inputs is None else with_unsharded(inputs), **options)


def with_unsharded(inputs: Any) -> list[Any]:
    """Leaves of a graph, and the unsharded parameters of those that are sharded; each once."""
    leaves: list[Any] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    unsharded = [leaf.unsharded for leaf in leaves if isinstance(leaf, ShardTensor) and leaf.unsharded is not None]
    known = {id(leaf) for leaf in leaves}
    return leaves + [leaf for leaf in unsharded if id(leaf) not in known]
