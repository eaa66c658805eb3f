"""Recomputation: a module's forward that keeps its inputs alone and is run again in backward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from shardeddp.sharding.outputs import find_tensors

ContextFunction = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes what surrounds a forward and its recomputation, as ``torch.utils.checkpoint.checkpoint`` wants it."""

_ONLY_READS = "_can_checkpoint_with_cache"
"""What a layer of transformers says of itself if it takes a cache and does not add to it."""

_CACHES = {"use_cache": False, "past_key_values": None, "layer_past": None}
"""What a layer of transformers is given to keep its keys and values in, and what it is given instead."""


class Recomputation:
    """Stands as ``module.forward`` in front of the module's own forward, which is computed again in backward.

    It lies inside of the module's hooks: what gathers a unit's parameters for its forward and announces its backward is
    not repeated. Names of modules and parameters stay what they are. A deep copy of the module recomputes with its own
    parameters; a pickled one computes plainly, and can be loaded where shardeddp is not installed.

    Without gradients, or where neither an input nor a parameter requires one, it only calls the forward.

    Args:
        module: Whose forward it is. The two refer to each other, as a module and its bound methods do.
        forward: What ``module.forward`` was.
        context_fn: What surrounds the forward and its recomputation, where that is selective.
        cpu_offload: Keep inputs in host memory between forward and backward.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        *,
        context_fn: ContextFunction | None = None,
        cpu_offload: bool = False,
    ) -> None:
        functools.update_wrapper(self, forward)  # the name, the documentation and the signature
        self.__wrapped__ = forward
        self._module = module
        self._without = _CACHES if _fills_a_cache(module) else {}
        self._context_fn = context_fn
        self._cpu_offload = cpu_offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward; what ``nn.Module`` calls between its hooks."""
        if not torch.is_grad_enabled() or not self._is_differentiable(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        kwargs = {name: self._without.get(name, value) for name, value in kwargs.items()}
        if self._cpu_offload:
            if torch.compiler.is_compiling():
                _refuse_compiled_offload()
            return self._offloaded(args, kwargs)
        # Bound, not passed on: a forward may have arguments of the names that `checkpoint` takes for itself.
        function = functools.partial(self.__wrapped__, **kwargs) if kwargs else self.__wrapped__
        return self._checkpoint(function, *args)

    def _checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._context_fn is None:  # torch.compile takes no other way to say so
            return checkpoint(function, *args, use_reentrant=False)
        return checkpoint(function, *args, use_reentrant=False, context_fn=self._context_fn)

    def _is_differentiable(self, args: Any, kwargs: Any) -> bool:
        if torch.compiler.is_compiling():
            return True  # the compiler finds out by itself, and would guard on every parameter for this question
        if any(parameter.requires_grad for parameter in self._module.parameters()):
            return True
        return any(tensor.requires_grad for tensor in find_tensors((args, kwargs)))

    def _offloaded(self, args: Any, kwargs: Any) -> Any:
        """Recompute from inputs that have been to host memory.

        Only activations are moved: leaves (a parameter that is passed in) live on the device anyway, and so does what
        is not differentiable (a mask, a table of rotations), which is mostly shared by all blocks.
        """
        leaves, structure = tree_flatten((args, kwargs))
        moved = {
            index: leaf
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf
        }
        # The recomputation outlives the forward; what it refers to would stay on the device.
        kept = [None if index in moved else leaf for index, leaf in enumerate(leaves)]
        indices = tuple(moved)

        def function(*tensors: torch.Tensor) -> Any:
            complete = list(kept)
            for index, tensor in zip(indices, tensors, strict=True):
                complete[index] = tensor
            positional, named = tree_unflatten(complete, structure)
            return self.__wrapped__(*positional, **named)

        pinned = any(tensor.is_cuda for tensor in moved.values())
        # `checkpoint` saves its inputs under these hooks, and all else that the forward saves under its own.
        with save_on_cpu(pin_memory=pinned) if moved else nullcontext():
            return self._checkpoint(function, *moved.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Recomputation:
        copied = Recomputation(
            copy.deepcopy(self._module, memo),
            copy.deepcopy(self.__wrapped__, memo),
            context_fn=self._context_fn,
            cpu_offload=self._cpu_offload,
        )
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # Operations and policy functions cannot be pickled; the forward could be before.
        return functools.partial, (self.__wrapped__,)


def _fills_a_cache(module: nn.Module) -> bool:
    # The recomputation would fill it a second time; transformers' own checkpointing leaves it out as well. Known by
    # name, so that nothing needs to be installed.
    bases = type(module).__mro__
    only_reads = next((vars(base)[_ONLY_READS] for base in bases if _ONLY_READS in vars(base)), False)
    return not only_reads and any(base.__name__ == "GradientCheckpointingLayer" for base in bases)


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]  # torch's own annotations
def _refuse_compiled_offload() -> None:
    # Disabled, because the compiler would take the error for a reason to run the block without it.
    raise NotImplementedError(
        "ActivationCheckpointing.cpu_offload: expected modules that are compiled inside of their recomputation, found "
        "one inside of a compiled module, where the compiler decides what is saved. Replace the block by "
        "torch.compile(block) before the strategy sets the model up, or set cpu_offload=False."
    )
