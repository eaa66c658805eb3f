"""Running backward: whether it returns gradients instead of accumulating, and retains its graph."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

# One entry per running call; threads of devices look at them as well.
_ASKED: list[object] = []  # of `torch.autograd.grad`
# By running backward: whether its graph is retained.
_RETAINED: list[bool] = []


def graph_is_retained() -> bool:
    """Whether the backward that is running leaves its graph for another one."""
    return any(_RETAINED)


@contextmanager
def retaining(graph: bool) -> Generator[None]:
    """A backward runs.

    Args:
        graph: Whether it leaves its graph for another one.
    """
    _RETAINED.append(graph)
    try:
        yield
    finally:
        _RETAINED.pop()


def are_asked() -> bool:
    """Whether the backward that is running returns gradients, and so averages none."""
    return bool(_ASKED)


@contextmanager
def asking() -> Generator[None]:
    """Surround a backward that returns gradients."""
    _ASKED.append(object())
    try:
        yield
    finally:
        _ASKED.pop()
