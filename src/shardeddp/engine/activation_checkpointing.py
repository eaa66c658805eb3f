"""Activation checkpointing: modules that keep only inputs, and how backward recomputes them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardeddp.config import LIKE_UNITS, ActivationCheckpointing, resolve_modules
from shardeddp.engine.hooks import find_tensors
from shardeddp.engine.split_layers import entered, has_split_layers
from shardeddp.errors import ConfigurationError
from shardeddp.tensor.unsharded import SHARDED
from shardeddp.torch_private import pytree, runs_eagerly
from shardeddp.wrap import AutoPolicy, Policy
from shardeddp.wrap.kept_operations import ContextFunction, selective_contexts
from shardeddp.wrap.tree import class_of, compiled_shells, uncompiled

# -- Recomputation: a forward that keeps its inputs and runs again in backward

_ONLY_READS = "_can_checkpoint_with_cache"
"""Attribute of transformers layers that read a cache without adding to it."""

_CACHES = {"use_cache": False, "past_key_values": None, "layer_past": None}
"""Cache arguments of a transformers layer, with their replacements."""


_Registered: TypeAlias = tuple[dict[str, Any], str, torch.Tensor]
"""Table of a module's parameters or buffers, name in it, and tensor."""


class SavedOnHost(saved_tensors_hooks):
    """Saved tensors in host memory, as under ``torch.autograd.graph.save_on_cpu``.

    Copies do not block the host, because only the device reads them.
    """

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device, bool]:
        """Copy to host memory; return the copy, the original device, and True if it is pinned."""
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return tensor.cpu(), tensor.device, False
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        return kept.copy_(tensor, non_blocking=True), tensor.device, True

    def unpack(self, saved: tuple[torch.Tensor, torch.device, bool]) -> torch.Tensor:
        """Copy back to the original device."""
        kept, device, is_pinned = saved
        # torch gives pinned memory to nobody else before the copies from it have ended.
        return kept.to(device, non_blocking=is_pinned)


class Recomputation:
    """Wrapper set as ``module.forward`` that recomputes the original forward in backward.

    It runs inside the module's hooks, so the hooks that unshard a unit and prepare its backward
    are not repeated. Names of modules and parameters do not change. A deep copy of the module
    recomputes with its own parameters. A pickled module has the original forward, and loads
    without shardeddp.

    Without grad mode, or if no input and no parameter requires a gradient, it only calls the
    forward.

    Args:
        module: Module of the forward. The two refer to each other, as a module and its bound
            methods do.
        forward: Original ``module.forward``.
        context_fn: Contexts around the forward and its recomputation, for selective recomputation.
        cpu_offload: True to keep inputs in host memory between forward and backward.
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
        places = enumerate(inspect.signature(forward).parameters if self._without else ())
        self._without_at = {
            place: self._without[name] for place, name in places if name in self._without
        }
        self._context_fn = context_fn
        self._cpu_offload = cpu_offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward, with recomputation if gradients are recorded."""
        if not torch.is_grad_enabled() or not self._is_differentiable(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        args = tuple(self._without_at.get(place, it) for place, it in enumerate(args))
        kwargs = {name: self._without.get(name, value) for name, value in kwargs.items()}
        if self._cpu_offload:
            if torch.compiler.is_compiling():
                _refuse_compiled_offload()
            return self._offloaded(args, kwargs)
        # Bind keyword arguments: a forward may have arguments with the names of `checkpoint`'s own.
        is_plain = torch.compiler.is_compiling() and not has_split_layers(self._module)
        forward = self.__wrapped__ if is_plain else self._forward()
        function = functools.partial(forward, **kwargs) if kwargs else forward
        return self._checkpoint(function, *args)

    @runs_eagerly
    def _forward(self) -> Callable[..., Any]:
        """Return the forward for now and for backward: with the tensors that modules have now.

        These are tensors that ``torch.func.functional_call`` has put there for the time of the
        call, buffers that the forward replaces, and this rank's parts of divided parameters. The
        engine's parameters are not among them: it gathers them again.
        """
        tensors = [
            (table, name, tensor)
            for module in self._module.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
            and type(tensor) in (torch.Tensor, nn.Parameter)
            and SHARDED not in vars(tensor)
        ]
        return functools.partial(self._run, tensors)

    @runs_eagerly
    def _run(self, tensors: Sequence[_Registered], *args: Any, **kwargs: Any) -> Any:
        with _registered(tensors), entered(self._module):
            return self.__wrapped__(*args, **kwargs)

    def _checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._context_fn is None:  # torch.compile does not accept context_fn=None
            return checkpoint(function, *args, use_reentrant=False)
        return checkpoint(function, *args, use_reentrant=False, context_fn=self._context_fn)

    def _is_differentiable(self, args: Any, kwargs: Any) -> bool:
        if torch.compiler.is_compiling():
            return True  # the compiler decides itself; this check would add a guard per parameter
        if any(parameter.requires_grad for parameter in self._module.parameters()):
            return True
        return any(tensor.requires_grad for tensor in find_tensors((args, kwargs)))

    def _offloaded(self, args: Any, kwargs: Any) -> Any:
        """Recompute from inputs that were offloaded to host memory.

        Only activations are offloaded. Leaves (a parameter as input) stay on the device anyway, and
        so do inputs without gradient (masks, rotary tables), which all blocks usually share.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        moved = {
            index: leaf
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf
        }
        # The recomputation outlives the forward; a reference would keep an input on the device.
        kept = [None if index in moved else leaf for index, leaf in enumerate(leaves)]
        indices, forward = tuple(moved), self._forward()

        def function(*tensors: torch.Tensor) -> Any:
            complete = list(kept)
            for index, tensor in zip(indices, tensors, strict=True):
                complete[index] = tensor
            positional, named = pytree.tree_unflatten(complete, structure)
            return forward(*positional, **named)

        # `checkpoint` saves its inputs under these hooks, and the forward's other tensors under its
        # own.
        with SavedOnHost() if moved else nullcontext():
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
        # Operations and policy functions cannot be pickled; the original forward can.
        return functools.partial, (self.__wrapped__,)


@contextmanager
def _registered(tensors: Sequence[_Registered]) -> Generator[None]:
    """Register tensors in tables of modules, in place of those that are there."""
    former: list[tuple[dict[str, Any], str, Any]] = []
    for table, name, tensor in tensors:
        if name in table and table[name] is not tensor:
            former.append((table, name, table[name]))
            table[name] = tensor
    try:
        yield
    finally:
        for table, name, tensor in former:
            table[name] = tensor


def _fills_a_cache(module: nn.Module) -> bool:
    # The recomputation would fill the cache a second time; transformers' own checkpointing omits it
    # as well. The class is matched by name, so that transformers need not be installed.
    bases = type(module).__mro__
    only_reads = next(
        (vars(base)[_ONLY_READS] for base in bases if _ONLY_READS in vars(base)), False
    )
    return not only_reads and any(base.__name__ == "GradientCheckpointingLayer" for base in bases)


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]  # torch's own annotations
def _refuse_compiled_offload() -> None:
    # Disabled, because the compiler would treat the error as a reason for a graph break.
    raise NotImplementedError(
        "ActivationCheckpointing.cpu_offload: expected modules that are compiled inside of their "
        "recomputation, found one inside of a compiled module, where the compiler decides what is "
        "saved. Replace the block by torch.compile(block) before the strategy sets the model up, "
        "or set cpu_offload=False."
    )


# -- Activation checkpointing: the modules that are recomputed


def recomputed_modules(root: nn.Module, options: ActivationCheckpointing) -> list[str]:
    """Return the names of the modules that are recomputed, in module order.

    A module inside another chosen one is left out: it is recomputed with the outer one. ``every``
    counts the remaining modules.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    chosen = _outermost(_select(root, resolve_modules(options.modules)), modules)
    return chosen[:: options.every]


def checkpoint_activations(root: nn.Module, options: ActivationCheckpointing) -> list[str]:
    """Let the chosen modules of a model recompute their activations in backward.

    Names of modules and parameters do not change. A second call replaces the options of a module;
    with equal options it changes nothing.

    Returns:
        Names of the chosen modules, in module order.
    """
    context_fn = selective_contexts(options.save_ops)
    modules = dict(root.named_modules(remove_duplicate=False))
    chosen = recomputed_modules(root, options)
    shells = compiled_shells(root)
    for name in chosen:
        _, module = uncompiled(name, modules[name])
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"ActivationCheckpointing.modules: expected modules whose forward is Python, found "
                f"{name!r}, a {type(module).__name__}. Choose the module around it, or do not "
                f"script it."
            )
        if options.cpu_offload:
            # Offloading must stay outside compiled code; selective recomputation must be inside.
            module = shells.get(id(module), module)
        forward = module.forward
        if isinstance(forward, Recomputation):
            forward = forward.__wrapped__
        module.forward = Recomputation(
            module, forward, context_fn=context_fn, cpu_offload=options.cpu_offload
        )
    return chosen


def keep_activations(root: nn.Module) -> None:
    """Undo :func:`checkpoint_activations`, also on a deep copy of the model."""
    for module in root.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Recomputation):
            del vars(module)["forward"]
            if module.forward != forward.__wrapped__:  # set on the instance, not on its class
                module.forward = forward.__wrapped__


def _select(root: nn.Module, policy: Policy) -> list[str]:
    """Return the names of the modules that the policy chooses, at least one."""
    try:
        names = policy.select(root)
    except ConfigurationError as error:
        raise ConfigurationError(f"{LIKE_UNITS} {error}") from error
    if not names and isinstance(policy, AutoPolicy) and policy.min_numel is None:
        # Blocks too small for a unit of their own may still have large activations.
        names = AutoPolicy(min_numel=1, max_fraction=policy.max_fraction).select(root)
    if not names:
        raise ConfigurationError(
            f"ActivationCheckpointing.modules: expected {policy!r} to find modules of "
            f"{class_of(root).__name__}, found none. Name the classes to compute again, or pass "
            f"activation_checkpointing=None."
        )
    return names


def _outermost(names: list[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Sort names into module order, without modules nested inside other chosen ones."""
    inside = {
        id(inner)
        for name in names
        for inner in modules[name].modules()
        if inner is not modules[name]
    }
    wanted = {id(modules[name]) for name in names} - inside
    return [name for name in modules if name in names and id(modules[name]) in wanted]
