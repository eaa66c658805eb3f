"""Which torch functions only ask about a tensor, or hand it on as it is, and so never need its elements."""

from typing import Any

import torch

_NAMES = {
    "__get__",
    "__set__",
    "__delete__",
    "__hash__",
    "__len__",
    "__repr__",
    "__format__",
    "__deepcopy__",
    "__reduce_ex__",
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "storage_offset",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "is_set_to",
    "is_shared",
    "get_device",
    "detach",
    "requires_grad_",
    "retain_grad",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "has_names",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
}

# Attributes that are operations.
_COMPUTED_ATTRIBUTES = {
    vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH", "real", "imag")
}


def asks_only_about(func: Any) -> bool:
    """Whether the function can be answered from the shard alone, whatever grad mode is."""
    return func.__name__ in _NAMES and func not in _COMPUTED_ATTRIBUTES
