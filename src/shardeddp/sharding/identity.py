"""Give a parameter another body and keep its identity, so that references taken before sharding stay valid."""

import weakref
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

_IDENTITY = "shardeddp"  # a key of what torch keeps for its users beside a node


def swap_bodies(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange class, attributes and implementation of two tensors; ``id()`` of each stays.

    ``torch.utils.swap_tensors`` does the same and refuses objects with weak references, which every ``nn.LSTM`` has on
    its weights; those references are to the object and stay true. A graph that was recorded before leads to the
    former body: it refuses to run backward.

    Raises:
        RuntimeError: Native code holds a weak reference to one of them; nothing has changed.
    """
    others = first._use_count() - 1  # type: ignore[attr-defined]  # torch.utils.swap_tensors asks the same
    recorded = get_gradient_edge(first).node if first.requires_grad and others else None
    torch._C._swap_tensor_impl(first, second)
    if recorded is not None:
        recorded.register_prehook(_refuse_backward)
        _metadata_of(recorded)[_IDENTITY] = weakref.ref(first)
    first_class, second_class = type(first), type(second)
    first_attributes, second_attributes = dict(first.__dict__), dict(second.__dict__)
    first.__class__, second.__class__ = second_class, first_class
    vars(first).clear()
    vars(first).update(second_attributes)
    vars(second).clear()
    vars(second).update(first_attributes)


def successor_of(node: Node) -> torch.Tensor | None:
    """The parameter whose node this was in graphs, before it was given another body; None: it is no such node."""
    identity = _metadata_of(node).get(_IDENTITY)
    return None if identity is None else identity()


def _metadata_of(node: Any) -> dict[str, Any]:
    return node.metadata  # a property, which torch declares as a method


def _refuse_backward(gradients: tuple[Any, ...]) -> None:
    raise RuntimeError(
        "this graph was recorded before its model was sharded, and its gradients would reach nobody: expected a "
        "forward of the model as the Trainer has set it up. Compute what the loss needs anew, inside training_step"
    )
