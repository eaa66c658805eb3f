"""Calls of modules: functions that run before and after them, outside of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardeddp.tensor.module_hooks import ModuleHook
from shardeddp.torch_private import OptimizedModule, never_traced

outside_of_graphs = never_traced(
    "a unit of ShardedDP begins or ends here, or a layer that ranks divide, and its parameters are "
    "gathered or released. Compile units one by one (block.compile()) to have each in one graph, or "
    "compile what contains units without fullgraph=True"
)
"""Decorator of functions that are a graph break in compiled code."""


class Listener(NamedTuple):
    """Functions around a module's calls."""

    enter: Callable[[], None]
    leave: Callable[[Any, Any], None]
    """Receives the call's inputs, ``(args, kwargs)``, and its output; None after an exception."""


class CallHook(ModuleHook):
    """Calls listeners before and after each call of a module, outside of compiled code.

    Dynamo could specialize on traced hooks, or skip them: it replaces a module without hooks by its
    ``forward``, and a module that ``torch.compile`` has wrapped by the inner module. So every
    function here is a graph break, set at a point that every call passes:

    - A module that is not compiled has module hooks. Compiled code around it breaks there and is
      compiled again inside.
    - A module compiled in place (``module.compile()``) has its module hooks *inside* of the
      compiled code, so the compiled call itself is replaced by one with hooks around it.
    - So is the forward of the ``OptimizedModule`` that ``torch.compile(module)`` returns.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._listeners: list[Listener] = []  # entered in this order, left in the reverse one

        # Handles of module hooks; None before the first follow().
        self._handles: list[RemovableHandle] | None = None
        # Replacement of the compiled call, with hooks around it.
        self._bracketed: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] | None = None  # the compiled call
        # Listeners of each call that has begun, which have been entered.
        self._calls: list[list[Listener]] = []

    @property
    def is_heard(self) -> bool:
        """Whether anything listens to the calls."""
        return bool(self._listeners)

    def listen(self, listener: Listener) -> None:
        """Call a listener after those there are, in each call that begins from now on."""
        self._listeners.append(listener)

    def ignore(self, listener: Listener) -> None:
        """Call a listener no more."""
        self._listeners.remove(listener)

    @outside_of_graphs
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        if module is self.module:
            entered = list[Listener]()
            try:
                for listener in self._listeners:
                    listener.enter()  # may reset the list of calls
                    entered.append(listener)
            finally:
                self._calls.append(entered)

    @outside_of_graphs
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook, also called after an exception in the forward or in a pre-hook."""
        if module is self.module and self._calls:
            for listener in reversed(self._calls.pop()):
                listener.leave((args, kwargs), output)

    def reset(self) -> None:
        """Drop calls that have not returned: torch calls no hook after a KeyboardInterrupt."""
        self._calls.clear()

    def follow(self) -> None:
        """Attach to the module's current call, which users may compile after sharding."""
        module, compiled = self.module, compiled_call(self.module)
        if self._handles is not None and compiled is self._bracketed:
            return
        for handle in self._handles or ():
            handle.remove()
        self._compiled = compiled
        self._bracketed = None if compiled is None else self._bracket(compiled)
        if self._bracketed is None:
            self._handles = [
                module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
            ]
        elif module._compiled_call_impl is None:
            self._handles = []
            module.forward = self._bracketed
        else:
            self._handles = [module.register_forward_pre_hook(_not_only_forward)]
            module._compiled_call_impl = self._bracketed

    def detach(self) -> None:
        """Restore the module's call from before :meth:`follow`."""
        module = self.module
        for handle in self._handles or ():
            handle.remove()
        if self._bracketed is not None and compiled_call(module) is self._bracketed:
            if module._compiled_call_impl is None:
                module.forward = self._compiled  # type: ignore[assignment]
            else:
                module._compiled_call_impl = self._compiled
        self._handles = self._bracketed = self._compiled = None

    def _bracket(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @outside_of_graphs
        def call(*args: Any, **kwargs: Any) -> Any:
            output = None
            try:
                self.enter(self.module, args, kwargs)
                output = compiled(*args, **kwargs)
            finally:
                self.leave(self.module, args, kwargs, output)
            return output

        return call


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that a compiled module's call runs; None if it is not compiled."""
    if module._compiled_call_impl is not None:
        return module._compiled_call_impl
    return module.forward if isinstance(module, OptimizedModule) else None


def _not_only_forward(module: nn.Module, args: Any) -> None:
    """Do nothing; the presence of a hook changes the tracing of code around the module.

    Without hooks, dynamo traces the module's ``forward``. With one, it uses the module's compiled
    call, which has a graph break around it.
    """
