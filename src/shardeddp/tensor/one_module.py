"""Hooks of one module: copies of the module keep them without effect.

Parameters of a deep copy or an unpickled module are whole, wherever ranks divide those of the
original. So its forward computes as in one process, if nothing else of it is divided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardeddp.errors import ConfigurationError

MARK = "_shardeddp_parallel_style"
"""Key in the dictionary of a module that ranks divide, of an :class:`OfOneModule`."""


class Inert:
    """Hooks of an unpickled module: each method does nothing."""

    module: nn.Module | None = None

    def __getattr__(self, name: str) -> Any:
        return _do_nothing


def _do_nothing(*args: object, **kwargs: object) -> None:
    """Do nothing."""


class OfOneModule:
    """Object with hooks of one module; a copy of the module keeps the same object."""

    module: nn.Module

    def is_of(self, module: nn.Module) -> bool:
        """Return whether a module is the object's own; compiled code is that of the module."""
        return torch.compiler.is_compiling() or module is self.module

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __reduce__(self) -> Any:
        return Inert, ()


class DividedNumbers(OfOneModule):
    """Refusal of copies of a module with numbers that ranks divide, such as ``num_heads``.

    Args:
        module: Module with the numbers; None: it was unpickled.
        what: Name of the module and its number, for messages.
    """

    def __init__(self, module: nn.Module | None, what: str) -> None:
        self.module, self._what = module, what  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return DividedNumbers, (None, self._what)

    def refuse_copy(self, module: nn.Module, args: object) -> None:
        """Refuse the forward of a copy; a pre-hook.

        Raises:
            RuntimeError: The module is a copy: its parameters are whole, and its numbers are not.
        """
        if not self.is_of(module):
            raise RuntimeError(
                f"a copy of {self._what} was called: tensor_parallel_plan has divided this number, "
                f"and parameters of the copy are whole. Copy the module before the run, or load "
                f"its state_dict() into a module that is built anew"
            )


def state_of(module: nn.Module) -> OfOneModule | None:
    """Return the state of a module that ranks divide; None: it is whole, or a copy."""
    state = vars(module).get(MARK)
    return state if isinstance(state, OfOneModule) and state.module is module else None


def refuse_split(root: nn.Module) -> None:
    """Raise ConfigurationError for a model with a module that has been split before."""
    split = next((name for name, it in root.named_modules() if state_of(it) is not None), None)
    if split is not None:
        raise ConfigurationError(
            f"{split!r} was split for an earlier run, which has failed: build the module anew"
        )
