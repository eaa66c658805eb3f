"""Parameters of a plain checkpoint get the names that are certain, and no others."""

from typing import Any

import torch

from shardeddp.checkpoint.writing.optimizer_names import parameter_names


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def optimizer(*shapes: tuple[int, ...], groups: tuple[tuple[int, ...], ...] = ()) -> dict[str, Any]:
    state = {number: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(shape)} for number, shape in enumerate(shapes)}
    groups = groups or (tuple(range(len(shapes))),)
    return {"state": state, "param_groups": [{"params": list(group)} for group in groups]}


def test_all_parameters_in_order_are_named() -> None:
    assert parameter_names(weights(a=(2, 3), b=(3,), c=(2, 3)), optimizer((2, 3), (3,), (2, 3))) == ["a", "b", "c"]


def test_buffers_and_frozen_parameters_of_other_shapes_do_not_matter() -> None:
    assert parameter_names(weights(a=(2, 3), running=(7,), b=(3,), frozen=(1,)), optimizer((2, 3), (3,))) == ["a", "b"]


def test_where_two_names_would_fit_none_is_taken() -> None:
    assert parameter_names(weights(a=(3,), b=(3,)), optimizer((3,))) == ["parameter_0"]
    assert parameter_names(weights(a=(2,), b=(3,), c=(2,)), optimizer((2,))) == ["parameter_0"]


def test_where_none_would_fit_none_is_taken() -> None:
    assert parameter_names(weights(a=(3,)), optimizer((4,))) == ["parameter_0"]
    assert parameter_names(weights(a=(3,), b=(4,)), optimizer((4,), (3,))) == ["parameter_0", "parameter_1"]


def test_several_groups_are_not_guessed() -> None:
    both = weights(a=(2, 3), b=(3,))
    assert parameter_names(both, optimizer((2, 3), (3,), groups=((0,), (1,)))) == ["parameter_0", "parameter_1"]


def test_names_that_torch_has_written_are_taken() -> None:
    state = optimizer((3,), (3,), groups=((1,), (0,)))
    state["param_groups"][0]["param_names"] = ["b"]
    assert parameter_names(weights(a=(3,), b=(3,)), state) == ["parameter_1", "parameter_0"]
    state["param_groups"][1]["param_names"] = ["a"]
    assert parameter_names(weights(a=(3,), b=(3,)), state) == ["b", "a"]


def test_a_parameter_without_a_state_is_not_guessed() -> None:
    state = optimizer((3,), (4,))
    del state["state"][1]
    assert parameter_names(weights(a=(3,), b=(4,)), state) == ["parameter_0", "parameter_1"]
