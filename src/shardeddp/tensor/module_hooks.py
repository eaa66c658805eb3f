"""Hooks of a module that its copies keep without effect.

Parameters of a deep copy or an unpickled module are whole, wherever ranks divide those of the
original. So its forward computes as in one process, if nothing else of it is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardeddp.errors import ConfigurationError

MARK = "_shardeddp_parallel_style"
"""Key in the dictionary of a module that ranks divide, of a :class:`DividedState`."""


class NoopHook:
    """Hooks of an unpickled module: methods raise ``refusal``, or do nothing if that is empty."""

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_refusal":
            raise AttributeError(name)  # for copy and pickle
        return partial(_refuse, self._refusal)


def _refuse(refusal: str, *args: object, **kwargs: object) -> None:
    if refusal:
        raise RuntimeError(refusal)


class ModuleHook:
    """Object with hooks of one module; a deep copy of the module has one without effect."""

    module: nn.Module
    refusal: str = ""
    """Text of the error that calls of an unpickled module raise; empty: they raise none."""

    is_copy: bool = False
    """True if a module was copied with its hooks."""

    def is_of(self, module: nn.Module) -> bool:
        """Return whether a module is the object's own.

        Compiled code does not compare modules: it would be compiled anew for each.
        """
        return not self.is_copy and (torch.compiler.is_compiling() or module is self.module)

    def __deepcopy__(self, memo: object) -> Any:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self), is_copy=True)
        return made

    def __reduce__(self) -> Any:
        return NoopHook, (self.refusal,)


class DividedState(ModuleHook):
    """State of a module that ranks divide, under :data:`MARK`; `SplitLayer` keeps it up to date."""

    attributes: Mapping[str, Any] = MappingProxyType({})
    """Attributes that the module's forward sees in place of the module's own."""

    is_running: bool = False
    """Whether the module's forward runs."""

    num_calls: int = 0
    """Number of calls of the module, if it counts them."""

    counts_calls: bool = False
    """Whether the module's calls are counted: not within compiled code."""

    breaks_graphs: bool = False
    """Whether the module's call is a graph break in compiled code."""

    def count_calls(self, *, within_compiled: bool) -> None:
        """Count calls, unless they are within compiled code."""
        self.counts_calls = not within_compiled

    def begin_call(self) -> None:
        """Count a call of the module."""
        self.num_calls += 1

    def set_running(self, runs: bool) -> None:
        """Note whether the module's forward runs."""
        self.is_running = runs


class DividedCount(ModuleHook):
    """Refusal of copies of a module with a number that ranks divide, such as ``num_heads``."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.refusal = (
            f"a copy of {name!r} was called: tensor_parallel_plan has divided this number, and "
            f"parameters of the copy are whole. Copy the module before the run, or load its "
            f"state_dict() into a module that is built anew"
        )

    def refuse_copy(self, module: nn.Module, args: object) -> None:
        """Refuse the forward of a copy; a pre-hook.

        The parameters of a copy are whole, and its numbers are not.
        """
        if not self.is_of(module):
            raise RuntimeError(self.refusal)


def state_of(module: nn.Module) -> DividedState | None:
    """Return the state of a module that ranks divide; None: it is whole, or a copy."""
    state = vars(module).get(MARK)
    return state if isinstance(state, DividedState) and state.is_of(module) else None


def refuse_split(root: nn.Module) -> None:
    """Raise ConfigurationError for a model with a module that has been split before."""
    split = next((name for name, it in root.named_modules() if state_of(it) is not None), None)
    if split is not None:
        raise ConfigurationError(
            f"{split!r} was split for an earlier run, which has failed: build the module anew"
        )
