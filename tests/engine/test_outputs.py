"""What units take and return: tensors anywhere in plain containers are found, what hides them is warned about."""

import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardeddp.engine.hooks import find_tensors
from training import RUNTIMES, WIDTH, Sharding, Trial, square
from world import on_ranks

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    """A plain dataclass."""

    tensor: torch.Tensor
    note: str = "note"


class Envelope:
    """Holds a tensor where nobody looks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Wrapped(nn.Module):
    """A linear layer whose output is handed on in something."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.linear(x).tanh() + 0.5)


class Unwrapping(nn.Module):
    """Two wrapped layers and what takes their outputs out again."""

    def __init__(
        self, wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Wrapped(wrap), Wrapped(wrap)])
        self.unwrap = unwrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.unwrap(layer(x))
        return x


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda x: (None, x), lambda out: out[1]),
    "nested": (lambda x: {"a": [1, {"b": (x, "text")}]}, lambda out: out["a"][1]["b"][0]),
    "namedtuple": (lambda x: Pair(1.0, x), lambda out: out.right),
    "ordered": (lambda x: OrderedDict(logits=x), lambda out: out["logits"]),
    "dataclass": (lambda x: Record(x), lambda out: out.tensor),
    "two views": (lambda x: (x[:, :2], x[:, 2:]), lambda out: torch.cat(out, dim=1)),
    "in place": (lambda x: x, lambda out: out.add_(1.0)),
}


@pytest.mark.loop(1)
@pytest.mark.parametrize("strategy", RUNTIMES)
@pytest.mark.parametrize("container", CONTAINERS)
@on_ranks(2)
def test_outputs_in_containers_are_found(strategy: str, container: str) -> None:
    trial = Trial(
        Unwrapping(*CONTAINERS[container]), Sharding(strategy=strategy, units=("layers.*",))
    )
    trial.train(square)


@pytest.mark.parametrize("strategy", RUNTIMES)
@on_ranks(2)
def test_a_unit_whose_outputs_are_hidden_is_gathered_when_its_backward_comes(strategy: str) -> None:
    trial = Trial(
        Unwrapping(Envelope, lambda out: out.tensor),
        Sharding(strategy=strategy, units=("layers.*",)),
    )
    trial.train(square)


def test_tensors_are_found_in_containers_and_not_in_other_objects() -> None:
    tensors = [torch.tensor(float(index)) for index in range(5)]
    value = {
        "a": tensors[0],
        "b": [tensors[1], (tensors[2], Record(tensors[3])), "text", 1, None],
        "c": {1, 2},
    }
    assert [float(tensor) for tensor in find_tensors(value)] == [0.0, 1.0, 2.0, 3.0]
    assert [*find_tensors([tensors[0], Envelope(tensors[4])])] == tensors[:1]


def test_plain_values_hold_no_tensors() -> None:
    values = [1, 2.0, True, "text", b"bytes", None, torch.float32, torch.Size([1]), {"k": {1.0}}]
    assert not [*find_tensors(values)]


class ReturnsItsWeight(nn.Module):
    """A unit whose output is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


class TakesAWeight(nn.Module):
    """Multiplies with what a unit returns."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ReturnsItsWeight()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.unit(x)


@on_ranks(2)
def test_nothing_is_kept_of_earlier_steps_where_a_unit_returns_its_parameter() -> None:
    warnings.filterwarnings("ignore", "parameter unit.weight is used outside")
    for strategy in RUNTIMES:
        trial = Trial(TakesAWeight(), Sharding(strategy=strategy, units=("unit",)))
        trial.train(square, steps=4)
        trial.check_parameters()
        (unit,) = (it.unit for it in trial.runtime.progresses if it.unit.spec.parameters)
        with trial.runtime.step():
            node = torch.autograd.graph.get_gradient_edge(unit.unsharded_parameters()[0]).node
        known = [it for it in node.metadata.values() if isinstance(it, list)]
        assert [len(it) for it in known] == [1]
