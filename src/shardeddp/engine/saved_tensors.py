"""Saved-tensor hooks around the forward of units.

Graphs keep the geometry of a view of a parameter, not its memory.

A unit's forward mostly saves its inputs and views of its parameters for backward. If graphs held
the views, all parameters would stay in memory from forward to backward. So a graph gets a
:class:`SavedView` instead, and the unit is gathered again when the backward unpacks it. This works
for every backward, even if the unit's outputs do not announce it (a loss on a feature that a hook
has recorded, a second backward of the same graph).

Hooks change the use of memory, never results: without hooks, graphs hold the memory itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardeddp.engine.storage import GatheredBuffer, SavedView
from shardeddp.tensor.distributed import DistributedLayout, layout_of, local_of
from shardeddp.tensor.unsharded import UnshardedParameter
from shardeddp.torch_private import (
    are_hooks_enabled,
    disable_hooks,
    pop_hooks,
    push_hooks,
    runs_eagerly,
    top_hooks,
)

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Restore = Callable[[SavedView], torch.Tensor]


class SavedTensors:
    """Sets saved-tensor hooks between :meth:`enter` and :meth:`leave`.

    Args:
        restore: Method that returns the tensor of a saved view, called during a backward. Graphs
            refer to its object weakly: a module may keep an output and with it the graph, a cycle
            hidden from the garbage collector.
    """

    def __init__(self, restore: Restore) -> None:
        self._restore = weakref.WeakMethod(restore)
        self.buffers: dict[int, GatheredBuffer] = {}
        """Buffers with views to save without memory, by storage address; updated by the buffers."""

        # One entry for each enter() without its leave(); None: no hooks set.
        self._levels: list[_Hooks | None] = []
        _let_transforms_pass()

    def enter(self) -> None:
        """Set hooks, on top of existing ones."""
        hooks = None
        if torch.is_grad_enabled() and are_hooks_enabled():
            below = top_hooks(True)
            top = _ours(below)
            if top is None or top.buffers is not self.buffers:
                hooks = _Hooks(self.buffers, self._restore, below)
                hooks.push()
        self._levels.append(hooks)

    def leave(self) -> None:
        """Remove the hooks of the last :meth:`enter`."""
        hooks = self._levels.pop() if self._levels else None
        if hooks is not None:
            hooks.pop()

    def clear(self) -> None:
        """Remove all hooks, after a failure."""
        while self._levels:
            self.leave()


class _Hooks:
    """Pair of saved-tensor hooks.

    Views of the buffers, given by storage address, are saved without memory. The hooks ``below``,
    which torch would call without these, get all other tensors.
    """

    def __init__(
        self,
        buffers: Mapping[int, GatheredBuffer],
        restore: weakref.WeakMethod[Restore],
        below: tuple[Pack, Unpack] | None,
    ) -> None:
        self.buffers = buffers
        self._restore = restore
        self._below = below
        self._set = False

    def push(self) -> None:
        push_hooks(self.pack, self.unpack)
        self._set = True

    def pop(self) -> None:
        if self._set and _ours(top_hooks(True)) is self:
            pop_hooks()
        self._set = False

    # Torch also calls the hooks between graphs of compiled code, and with sharded parameters.
    @runs_eagerly
    def pack(self, tensor: torch.Tensor) -> Any:
        kind = type(tensor)
        if kind is torch.Tensor or kind is nn.Parameter or issubclass(kind, UnshardedParameter):
            values = tensor
        else:
            values = local_of(tensor) if isinstance(tensor, DTensor) else None
        if values is not None and values.layout is torch.strided:
            storage = values.untyped_storage()._cdata  # `storage_of`, inlined: a hot path
            buffer = self.buffers.get(storage)
            view = None if buffer is None else buffer.save(values, storage)
            if view is not None and values is tensor:
                return view
            if view is not None and isinstance(tensor, DTensor):
                return SavedDistributedView(view, layout_of(tensor))
        if self._below is not None:
            return self._below[0](tensor)
        # Detached: a node that saves its own output would refer to itself and never be freed; a
        # parameter would forward to the sharded one once its unit is resharded.
        is_plain = tensor.grad_fn is None and not isinstance(tensor, UnshardedParameter)
        return tensor if is_plain else torch.Tensor.detach(tensor), tensor._version

    @runs_eagerly
    def unpack(self, saved: Any) -> torch.Tensor:
        is_distributed = type(saved) is SavedDistributedView
        view: Any = saved.view if is_distributed else saved
        if type(view) is SavedView:
            restore = self._restore()
            if restore is None:
                raise RuntimeError(
                    f"the backward of {view.buffer.layout.slots[view.parameter_index].fqn} needs its "
                    f"values, and the sharded model that it belongs to is gone: keep a reference to "
                    f"the model until backward has run"
                )
            values = restore(view)
            return saved.layout.over(values) if is_distributed else values
        if self._below is not None:
            return self._below[1](saved)
        tensor, version = saved
        if tensor._version != version:  # autograd leaves this check to hooks
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {version} instead. Hint: "
                f"torch.autograd.set_detect_anomaly(True) finds the operation that failed to "
                f"compute its gradient"
            )
        return tensor


class SavedDistributedView(NamedTuple):
    """Distributed tensor over a view of a gathered buffer, saved by a graph."""

    view: SavedView
    layout: DistributedLayout


def _ours(hooks: tuple[Pack, Unpack] | None) -> _Hooks | None:
    pack = None if hooks is None else hooks[0]
    return (
        pack.__self__
        if isinstance(pack, MethodType) and isinstance(pack.__self__, _Hooks)
        else None
    )


def _let_transforms_pass() -> None:
    """Let ``torch.func.grad`` and other transforms run inside a unit's forward.

    They refuse to run under saved-tensor hooks, by a private function of torch that they call
    first. Its replacement removes our hooks before the call, for the rest of that forward.
    """
    disable = disable_hooks.current
    if isinstance(disable, FunctionType):
        return  # done

    def make_way(error_message: str, fail_if_non_empty: bool = True) -> None:
        while fail_if_non_empty and (hooks := _ours(top_hooks(True))) is not None:
            hooks.pop()
        disable(error_message, fail_if_non_empty)

    disable_hooks.replace(make_way)
