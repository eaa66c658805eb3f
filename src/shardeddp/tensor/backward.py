"""Backward: gradients as autograd has them, past the `grad` property, and the running call."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import count

import torch

from shardeddp.torch_private import get_gradient, set_gradient, without_torch_function

# -- Gradients past the ``grad`` property


def stored_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the ``.grad`` of a parameter, past the property, which adds what is unreduced."""
    with without_torch_function():
        return get_gradient(parameter)


def stored_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the ``.grad`` of several parameters, past that property."""
    with without_torch_function():
        return [get_gradient(parameter) for parameter in parameters]


def store_gradients(
    parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> None:
    """Set the ``.grad`` of several parameters, past that property."""
    with without_torch_function():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            set_gradient(parameter, gradient)


def store_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set the ``.grad`` of a parameter; gradients that wait for their reduction remain."""
    with without_torch_function():
        set_gradient(parameter, gradient)


# -- The running backward: whether it returns gradients, and retains its graph

# One entry per running call; threads of devices read them as well.
_ASKED: list[object] = []  # of `torch.autograd.grad`
# Per running backward, the outermost first: its number, whether its graph is retained, and whether
# it runs for the gradients of some inputs alone.
_RUNNING: list[tuple[int, bool, bool]] = []
_numbers = count()


def graph_is_retained() -> bool:
    """Return whether the running backward leaves its graph for another one."""
    return any(retained for _, retained, _ in _RUNNING)


def is_for_inputs() -> bool:
    """Return whether the running backward leaves out what leads to none of some inputs alone."""
    return any(for_inputs for _, _, for_inputs in _RUNNING)


def running_backward() -> int | None:
    """Return the number of the running backward, the outermost of nested ones; None: none runs."""
    return _RUNNING[0][0] if _RUNNING else None


@contextmanager
def retaining(graph: bool, *, for_inputs: bool = False) -> Generator[None]:
    """Surround a backward."""
    _RUNNING.append((next(_numbers), graph, for_inputs))
    try:
        yield
    finally:
        _RUNNING.pop()


def are_requested() -> bool:
    """Return whether the running backward returns gradients, and so averages none."""
    return bool(_ASKED)


@contextmanager
def asking() -> Generator[None]:
    """Surround a backward that returns gradients."""
    _ASKED.append(object())
    try:
        yield
    finally:
        _ASKED.pop()
