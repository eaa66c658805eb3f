"""Gradient hooks of a sharded parameter.

They run on each rank's gradient on its way, or once `.grad` is complete.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Concatenate, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardeddp.tensor.unsharded import accumulate_in, taking_hooks
from shardeddp.torch_private import current_backward, engine

T = TypeVar("T")

GradientHook = Callable[[torch.Tensor], torch.Tensor | None]
CompletionHook = Callable[[torch.Tensor], None]
Hooks = tuple["OrderedDict[int, GradientHook] | None", "OrderedDict[int, CompletionHook] | None"]
"""Hooks of ``register_hook`` and of ``register_post_accumulate_grad_hook``.

They remain in the dictionaries that their handles refer to.
"""


def take_hooks(parameter: torch.Tensor) -> Hooks:
    """Remove the hooks of a parameter and return them.

    They belong to the Python object, and would not fire for another implementation.
    """
    found: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if found[0] is not None:
        parameter._backward_hooks = None
    if found[1] is not None:
        parameter._post_accumulate_grad_hooks = None  # type: ignore[attr-defined]
    return found


def put_hooks(parameter: torch.Tensor, hooks: Hooks) -> None:
    """Put hooks from :func:`take_hooks` on a parameter; their handles remain valid."""
    for name, found in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), hooks, strict=True):
        if found is not None:
            setattr(parameter, name, found)


class GradientHooks:
    """Hooks on one sharded parameter, which stands for two leaves of autograd's graphs.

    A hook of ``register_hook`` sees the gradient of all uses, in the parameter's unit and outside
    of it: this rank's gradient, whole and before it is averaged, as under DDP. A hook of
    ``register_post_accumulate_grad_hook`` is called with the sharded parameter when the backward
    has ended and ``.grad`` is complete, once. Handles of the ``former`` hooks, from before the
    parameter was sharded, remain valid. Without an unsharded parameter, it belongs to no unit.
    """

    def __init__(
        self, sharded: torch.Tensor, unsharded: nn.Parameter | None, former: Hooks = (None, None)
    ) -> None:
        on_gradient, when_complete = former
        self._on_gradient = OrderedDict[int, GradientHook]() if on_gradient is None else on_gradient
        self._when_complete = (
            OrderedDict[int, CompletionHook]() if when_complete is None else when_complete
        )
        self._sharded = weakref.ref(sharded)
        # Autograd's number of the backward after which the completion hooks are due.
        self._due = -1
        self._unsharded = None if unsharded is None else weakref.ref(unsharded)
        self.node_is_known = False
        """True if hooks may have been set on the parameter's node in graphs."""
        self.listens = False
        """True if gradients of the unsharded parameter pass through the hooks."""
        if self._on_gradient:
            self.listen()

    def of_users(self) -> Hooks:
        """Return the dictionaries of users' hooks, for a successor to share with their handles."""
        return self._on_gradient, self._when_complete

    def add(self, hook: GradientHook) -> RemovableHandle:
        """Call a hook with each gradient on its way; its result, if any, replaces the gradient."""
        self.listen()
        handle = RemovableHandle(self._on_gradient)
        self._on_gradient[handle.id] = hook
        return handle

    def show_node(self) -> None:
        """Note that a user has been given the node, where all gradients of the parameter end."""
        self.node_is_known = True

    def listen(self) -> None:
        """Pass gradients of the unsharded parameter through the hooks from now on."""
        sharded, unsharded = self._sharded(), self._unsharded and self._unsharded()
        if self.listens or sharded is None or unsharded is None:
            return
        self.listens = True
        with taking_hooks(unsharded):
            # Weak: autograd holds hooks invisibly to the garbage collector, and users' hooks may
            # refer to the model.
            if unsharded.dtype != sharded.dtype:
                # Hooks see gradients in the parameter's own dtype.
                accumulate_in(unsharded, sharded.dtype)
            torch.Tensor.register_hook(unsharded, weakly(self, GradientHooks.run))

    def add_completion(self, hook: CompletionHook) -> RemovableHandle:
        """Call a hook with the parameter when a backward has completed its gradient."""
        handle = RemovableHandle(self._when_complete)
        self._when_complete[handle.id] = hook
        return handle

    def announce(self) -> None:
        """Call the completion hooks at the end of the running backward, which changes ``.grad``."""
        backward = current_backward()
        if self._due == backward or not self._when_complete:
            return
        self._due = backward
        # A callback within a callback: it runs last, when the engine has installed the reduced
        # gradients.
        engine.queue_callback(lambda: engine.queue_callback(self._complete))

    def run(self, gradient: torch.Tensor) -> torch.Tensor:
        """Call the hooks with a gradient on its way and return the result."""
        plain = type(gradient) is torch.Tensor
        for hook in list(self._on_gradient.values()):
            result: Any = hook(gradient)
            if result is not None:
                # Whole if the unit's gradient is: a hook may return sharded tensors.
                gradient = (
                    result.full_tensor() if plain and type(result) is not torch.Tensor else result
                )
        return gradient

    @torch.no_grad()
    def _complete(self) -> None:
        sharded = self._sharded()
        if sharded is not None and sharded.grad is not None:
            for hook in list(self._when_complete.values()):
                hook(sharded)


def weakly(
    owner: T, method: Callable[Concatenate[T, ...], Any], *arguments: Any
) -> Callable[[Any], Any]:
    """Return a hook that calls a method of an object while the object lives.

    The method gets the arguments, and then what the hook gets.
    """
    reference = weakref.ref(owner)

    def run(found: Any) -> Any:
        alive = reference()
        return None if alive is None else method(alive, *arguments, found)

    return run
