"""Keeps dynamo, the tracer of ``torch.compile``, out of functions that communicate or move memory."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def never_traced(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let compiled code end before a function and go on behind it.

    Args:
        reason: What happens there and what to do about it; torch shows it to users who ask for one whole graph.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        disabled: Any = torch.compiler.disable(function, reason=reason)
        return disabled

    return decorate
