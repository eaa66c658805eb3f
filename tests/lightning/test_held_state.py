"""Metrics and random generators that modules, callbacks and their objects hold are restored, wherever they are."""

import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from shardeddp.lightning.held_state import HeldState

pytestmark = pytest.mark.timeout(30)


class Plain:
    """An object with a metric, and with itself."""

    def __init__(self, held: object) -> None:
        self.held, self.again = held, self


class Counting(Metric):
    """A metric with all kinds of state."""

    values: list[Tensor]
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")
        self.add_state("values", [], "cat")
        self.seen, self.last, self.names = Counter[str](), deque[int](maxlen=3), set[int]()
        self.array, self.text, self.nested = np.zeros(2), "0", {"a": [[0]]}
        self.record = SimpleNamespace(count=0)

    def update(self, value: float) -> None:
        """Change all of them."""
        count = int(self.text) + 1
        self.text, self.late = str(count), count
        self.total += value
        self.values.append(self.total.clone())
        self.seen["a"] += 1
        self.last.append(count)
        self.names.add(count)
        self.array += 1
        self.nested["a"][0][0] += 1
        self.record.count += 1

    def compute(self) -> Tensor:
        """Total."""
        return self.total

    def state(self) -> Any:
        """All of them, comparable."""
        kinds: Any = self.total.item(), [it.item() for it in self.values], dict(self.seen)
        more = [*self.last], {*self.names}, self.array.tolist(), self.text, repr(self.nested)
        return *kinds, *more, self.record.count, self.update_count, getattr(self, "late", None)


def test_all_state_of_a_metric_is_restored_several_times() -> None:
    metric = Counting()
    metric.update(1.0)
    del metric.late
    before, held = metric.state(), HeldState([metric])
    for _ in range(2):
        metric.update(2.0)
        metric.update(2.0)
        assert metric.state() != before
        held.restore()
        assert metric.state() == before
    assert not held.lost()
    metric.values[0] += 1
    assert held.lost() == "Counting.values"


def _with(module: nn.Sequential, held: object) -> nn.Module:
    module[0].held = {"a": held}  # type: ignore[assignment]
    return module


HOLDERS: dict[str, Callable[[object], object]] = {
    "dict of a child": partial(_with, nn.Sequential(nn.Linear(1, 1))),
    "object": lambda it: Plain(Plain(it)),
    "namespace": lambda it: Plain(SimpleNamespace(held=it)),
    "deque": lambda it: Plain(deque([(it,)])),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_metrics_and_generators_are_found_in_every_holder(holder: str) -> None:
    metric, of_torch, of_python = SumMetric(), torch.Generator().manual_seed(1), random.Random(1)
    of_numpy, legacy = np.random.default_rng(1), np.random.RandomState(1)
    every = [metric, of_torch, of_python, of_numpy, legacy, random.SystemRandom()]

    def draw() -> list[float]:
        metric.update(1.0)
        drawn = torch.rand((), generator=of_torch).item(), of_python.random()
        return [*drawn, of_numpy.random(), legacy.rand(), metric.compute().item()]

    draw()
    held = HeldState([HOLDERS[holder](every)])
    first = draw()
    assert draw() != first
    held.restore()
    assert draw() == first


def test_a_metric_in_a_module_of_a_callback_is_found() -> None:
    callback = SimpleNamespace(modules=nn.ModuleDict({"a": SumMetric()}))
    held = HeldState([callback])
    metric: Any = callback.modules["a"]
    metric.update(1.0)
    held.restore()
    assert metric.update_count == 0


def test_large_containers_are_not_walked_through() -> None:
    metric = SumMetric()
    held = HeldState([Plain([metric] * 1001)])
    metric.update(1.0)
    held.restore()
    assert metric.compute() == 1
