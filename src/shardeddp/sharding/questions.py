"""What torch functions do with their arguments: which only ask about a tensor, and which write to one."""

from functools import cache
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
    "_has_compatible_shallow_copy_type",  # asked by Module.to()
    "grad",  # torch.autograd.grad, which asks about the graph
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

# Answered with truths or places, which have no gradient.
_TRUTHS = {
    "equal",
    "allclose",
    "isclose",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "isnan",
    "isinf",
    "isfinite",
    "any",
    "all",
    "count_nonzero",
    "argmax",
    "argmin",
}

_ASKED = _NAMES | _TRUTHS

# Attributes that are operations.
_COMPUTED_ATTRIBUTES = {vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}


def asks_only_about(func: Any) -> bool:
    """Whether the function has nothing to record for a backward, whatever grad mode is."""
    return func.__name__ in _ASKED and func not in _COMPUTED_ATTRIBUTES


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among its arguments that an ATen operation writes to."""
    found: list[Any] = []
    for position, name in _written_places(func):
        argument = args[position] if position < len(args) else kwargs.get(name)
        found += argument if isinstance(argument, (list, tuple)) else [argument]
    return [argument for argument in found if isinstance(argument, torch.Tensor)]


@cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(place, it.name) for place, it in arguments if it.alias_info is not None and it.alias_info.is_write]
