"""Tensors without own memory, gradients past their `grad`, and functions that no tracer enters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

from shardeddp.torch_private import get_gradient, set_gradient, skip_frames, without_torch_function

# -- Functions that dynamo does not trace

P = ParamSpec("P")
R = TypeVar("R")


def never_traced(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let compiled code end before a function and go on behind it.

    Args:
        reason: The reason and the remedy; torch shows both to users who ask for one
            whole graph.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        disabled: Any = torch.compiler.disable(function, reason=reason)
        return disabled

    return decorate


def runs_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run as it is where it is called between the graphs of compiled code.

    Costs nothing, unlike :func:`never_traced`; functions that it calls may be compiled.
    """
    skipped: Any = skip_frames(function)
    return skipped


# -- Gradients past the ``grad`` property


def stored_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Gradient of a parameter in autograd and in the engine."""
    with without_torch_function():
        return get_gradient(parameter)


def stored_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """The same of many."""
    with without_torch_function():
        return [get_gradient(parameter) for parameter in parameters]


def store_gradients(
    parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> None:
    """Set that of many."""
    with without_torch_function():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            set_gradient(parameter, gradient)


def store_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set that gradient, and leave gradients that wait for their reduction alone."""
    with without_torch_function():
        set_gradient(parameter, gradient)


# -- Memoryless: tensors without memory of their own


class Memoryless:
    """Refused access to raw memory of sharded tensors and views: writes could not be seen."""

    def data_ptr(self) -> int:  # noqa: D102
        raise self._refusal("data_ptr")

    def untyped_storage(self) -> torch.UntypedStorage:  # noqa: D102
        raise self._refusal("untyped_storage")

    def __dlpack__(self, **options: Any) -> Any:
        raise self._refusal("__dlpack__")

    def apply_(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102
        raise self._refusal("apply_")

    def map_(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102
        raise self._refusal("map_")

    def map2_(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102
        raise self._refusal("map2_")

    def _refusal(self, asked: str) -> RuntimeError:
        tensor: Any = self  # both have a spec
        return RuntimeError(
            f"{tensor.spec.fqn} is sharded: no memory holds all of its elements for {asked}(). Ask "
            f"to_local() for this rank's elements, or full_tensor() for a copy of all of them, and "
            f"write to it with copy_()"
        )
