"""The names of an optimizer's parameters, found out from a plain checkpoint, which only numbers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_Shape = tuple[int, ...]


def parameter_names(weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> list[str]:
    """Name the parameters of an optimizer in the order of its groups.

    torch writes names if it was given some (``param_names``). Else those of the weights are taken, in their order, if
    there is exactly one way in which they fit the shapes of the states; a guess could give a state to another
    parameter.

    Args:
        weights: The state of the model.
        optimizer: A state of an optimizer.

    Returns:
        By number; ``parameter_3`` where no name is certain.
    """
    groups: Sequence[Mapping[str, Any]] = optimizer["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        return [str(name) for group in groups for name in group["param_names"]]
    shapes = [_shape(optimizer["state"].get(number, {})) for number in numbers]
    known = [(name, tuple(value.shape)) for name, value in weights.items() if isinstance(value, torch.Tensor)]
    return (_only_fit(shapes, known) if len(groups) == 1 else None) or [f"parameter_{number}" for number in numbers]


def _shape(state: Mapping[str, Any]) -> _Shape | None:
    """The parameter's, which its moments have as well; None without any."""
    shapes = {tuple(value.shape) for key, value in state.items() if isinstance(value, torch.Tensor) and key != "step"}
    return shapes.pop() if len(shapes) == 1 else None


def _only_fit(shapes: Sequence[_Shape | None], known: Sequence[tuple[str, _Shape]]) -> list[str] | None:
    """The names whose shapes are these, in order, if there is one such choice: the earliest is the latest."""
    first = _earliest(shapes, known)
    last = _earliest(shapes[::-1], known[::-1])
    if first is None or last is None or first != last[::-1]:
        return None
    return first


def _earliest(shapes: Sequence[_Shape | None], known: Sequence[tuple[str, _Shape]]) -> list[str] | None:
    rest = iter(known)
    found: list[str] = []
    for shape in shapes:
        name = next((name for name, other in rest if other == shape), None)
        if name is None:
            return None
        found.append(name)
    return found
