"""What a module's code changes outside of it is after a plan as it was before: variables, attributes, numbers."""

import copy
import functools
import itertools
import random
from array import array
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from shardeddp import ConfigurationError
from shardeddp.lightning.held_state import outside_state_kept

pytestmark = pytest.mark.timeout(30)

NUMBERS = np.random.default_rng(0)
IN_A_LIST: list[Any] = [random.Random(0), [np.random.RandomState(0)]]
OF_TORCH = torch.Generator().manual_seed(0)
CONTAINERS: list[Any] = [
    *([1], {1}, {1: [2]}, deque([1], 3), OrderedDict(a=1), Counter("ab"), UserDict(a=1)),
    *(bytearray(b"a"), array("i", [1]), np.ones(2)),
]
METRIC = MeanMetric()
calls = 0


@dataclass(slots=True)
class Slots:
    """State without a dict."""

    count: int = 0


class Holder:
    """State of a class and of an object."""

    seen: Any = 0
    of_class = np.random.default_rng(1)

    def __init__(self) -> None:
        self.slots = Slots()
        self.numbers = Iterates()

    def move(self) -> None:
        """Change all of it."""
        Holder.seen += 1
        Holder.new = 1  # type: ignore[attr-defined]
        self.slots.count += 1
        self.added = 1
        next(self.numbers)
        self.of_class.normal()


class Iterates:
    """An iterator whose state is an attribute."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


HOLDER = Holder()


def closure() -> Callable[[], float]:
    count, numbers = 0, np.random.default_rng(2)

    def move() -> float:
        nonlocal count
        count += 1
        return count + numbers.normal()

    return move


CLOSURE = closure()
PARTIAL = partial(lambda numbers: numbers.normal(), np.random.default_rng(3))
BOUND = np.random.default_rng(4).normal


def draws(default: list[int] = []) -> int:  # noqa: B006
    default.append(1)
    return len(default)


@functools.cache
def mask() -> object:
    return object()


class Module(nn.Module):
    """Code that changes whatever it reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.of_file = lambda: NUMBERS.normal()

    def training_step(self) -> list[Any]:
        """Change all that is outside, and say what it was."""
        global calls
        calls += 1
        METRIC.update(2.0)
        HOLDER.move()
        for it in CONTAINERS:
            if isinstance(it, list | deque):
                it.append(3)
            elif isinstance(it, set):
                it.add(len(it))
            elif isinstance(it, bytearray | array):
                it[0] += 1
                it.append(3)
            elif isinstance(it, np.ndarray):
                it += 1
            else:
                it["c"] = it.get("c", 0) + 3
        CONTAINERS[2].setdefault(1, []).append(4)
        return [
            *(calls, self.of_file(), NUMBERS.integers(9), CLOSURE(), draws(), helped()),
            *(IN_A_LIST[0].random(), IN_A_LIST[1][0].rand(), torch.rand((), generator=OF_TORCH)),
            *map(copy.deepcopy, CONTAINERS),
            *(HOLDER.slots.count, HOLDER.numbers.at, Holder.seen, Holder.of_class.normal()),
            *(METRIC.compute(), METRIC.update_count, vars(HOLDER).keys()),
        ]


def helped() -> float:
    """A function of the file that the step calls."""
    return random_of_class() + PARTIAL()


def random_of_class() -> float:
    """One more of them, which is two calls away."""
    return Holder.of_class.random()


def test_a_step_after_a_plan_finds_all_as_it_was() -> None:
    module = Module()
    with outside_state_kept(copy.deepcopy(module)):
        first = module.training_step()
        module.training_step()
    assert not hasattr(Holder, "new")
    assert "added" not in vars(HOLDER)
    assert str(module.training_step()) == str(first)


class Cached(nn.Module):
    """Code that keeps what it has made."""

    def training_step(self) -> object:
        """Make it once."""
        return mask()


def test_what_a_plan_has_cached_is_made_anew() -> None:
    with outside_state_kept(Cached()):
        planned = Cached().training_step()
    made = mask()
    assert made is not planned
    with outside_state_kept(Cached()):
        assert mask() is made
    assert mask() is made


COUNT = itertools.count()


class Counts(nn.Module):
    """Code whose iterator cannot be set back."""

    def training_step(self) -> int:
        """Take the next number."""
        return next(COUNT)


def test_an_iterator_outside_of_the_module_is_refused_and_one_inside_is_not() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"Counts reaches objects such as COUNT \(count\)"),
        outside_state_kept(Counts()),
    ):
        pass
    module = nn.Module()
    module.count = itertools.count()  # type: ignore[assignment]
    with outside_state_kept(module):
        pass
