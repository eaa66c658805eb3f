"""What autograd and the engine have as gradients, past the ``grad`` that sharded and unsharded parameters show."""

from collections.abc import Iterable
from typing import Any

import torch

_get_gradient: Any = torch._C.TensorBase.grad.__get__  # type: ignore[attr-defined]  # past the property
_set_gradient: Any = torch._C.TensorBase.grad.__set__  # type: ignore[attr-defined]


def stored_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What autograd and the engine have as a parameter's gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return _get_gradient(parameter)


def stored_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """The same of many."""
    with torch._C.DisableTorchFunctionSubclass():
        return [_get_gradient(parameter) for parameter in parameters]


def store_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set that, and leave what waits to be reduced alone."""
    with torch._C.DisableTorchFunctionSubclass():
        _set_gradient(parameter, gradient)
