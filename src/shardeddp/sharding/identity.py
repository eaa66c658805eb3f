"""Give a parameter another body and keep its identity, so that references taken before sharding stay valid."""

import torch


def swap_bodies(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange class, attributes and implementation of two tensors; ``id()`` of each stays.

    ``torch.utils.swap_tensors`` does the same and refuses objects with weak references, which every ``nn.LSTM`` has on
    its weights; those references are to the object and stay true.

    Raises:
        RuntimeError: Something else holds the implementation of one of them, for example an autograd graph that is
            still alive.
    """
    torch._C._swap_tensor_impl(first, second)  # raises before anything has changed
    first_class, second_class = type(first), type(second)
    first_attributes, second_attributes = dict(first.__dict__), dict(second.__dict__)
    first.__class__, second.__class__ = second_class, first_class
    first.__dict__.clear()
    first.__dict__.update(second_attributes)
    second.__dict__.clear()
    second.__dict__.update(first_attributes)
