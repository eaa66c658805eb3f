"""Activation checkpointing: modules that keep only inputs, and how backward recomputes them."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardeddp.config import ActivationCheckpointing, Modules
from shardeddp.engine.runtime import find_tensors
from shardeddp.errors import ConfigurationError
from shardeddp.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    all_operation_names,
    has_kernel,
    higher_order_operations,
    pytree,
)
from shardeddp.wrap import AutoPolicy, Policy, PolicyLike, resolve_policy
from shardeddp.wrap.tree import class_of, compiled_shells, imported, nearest, uncompiled

# -- Kept operations of selective activation checkpointing

Operation = OpOverload | HigherOrderOperator

PRESETS: dict[str, tuple[str, ...]] = {
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "higher_order.flex_attention",
    ),
}
"""Names that stand for several operations.

Those are the products of linear layers, and every kernel behind scaled dot-product attention.
"""

_EXPECTED = (
    f"expected names of operations ('aten.mm.default', 'aten.mm', 'mm'), "
    f"{' or '.join(map(repr, PRESETS))}, objects of torch.ops, or one policy function"
)


def selective_contexts(save_ops: object) -> ContextFunction | None:
    """Context function that keeps results of some operations for recomputation; None: keep nothing.

    Raises:
        ConfigurationError: Something in it is no operation, or one that autograd takes apart before
            it runs.
    """
    policy = _policy_of(save_ops)
    if policy is not None:
        return functools.partial(create_selective_checkpoint_contexts, policy)
    operations = find_operations(_entries(save_ops))
    return (
        functools.partial(create_selective_checkpoint_contexts, operations) if operations else None
    )


def check_save_ops(save_ops: object) -> None:
    """Refuse wrong entries before libraries with their own operations are imported.

    Raises:
        ConfigurationError: As :func:`selective_contexts`.
    """
    if _policy_of(save_ops) is None:
        find_operations(
            entry
            for entry in _entries(save_ops)
            if not isinstance(entry, str)
            or entry in PRESETS
            or _qualified(entry).startswith("aten.")
        )


def find_operations(entries: Iterable[object]) -> list[Operation]:
    """Operations that names and objects stand for; without an overload, all overloads of one name.

    Raises:
        ConfigurationError: An entry stands for none, or for one that autograd takes apart before it
            runs.
    """
    found: dict[Operation, None] = {}
    for entry in entries:
        if isinstance(entry, str):
            names = PRESETS.get(entry, (entry,))
            operations = [operation for name in names for operation in _named(name)]
        elif isinstance(entry, OpOverloadPacket):
            operations = _overloads(entry)
        elif isinstance(entry, (OpOverload, HigherOrderOperator)):
            operations = [entry]
        else:
            raise ConfigurationError(
                f"ActivationCheckpointing.save_ops: {_EXPECTED}; found {entry!r} of type "
                f"{type(entry).__name__}."
            )
        if all(_is_composite(operation) for operation in operations):
            raise ConfigurationError(
                f"ActivationCheckpointing.save_ops: {entry!r} is taken apart into other operations "
                f"before autograd sees it, so there would be nothing to keep. Name what it "
                f"becomes: 'matmul' stands for the products of linear layers and torch.matmul, "
                f"'attention' for the kernels of scaled dot-product attention."
            )
        found.update(dict.fromkeys(operations))
    return list(found)


def _policy_of(save_ops: object) -> Callable[..., Any] | None:
    """The policy function, given directly or by import path; None where operations are listed."""
    if isinstance(save_ops, str) and save_ops not in PRESETS:
        target = imported(save_ops)
        return target if _is_function(target) else None
    return save_ops if _is_function(save_ops) else None


def _is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    return callable(value) and not isinstance(
        value, (OpOverload, OpOverloadPacket, HigherOrderOperator, type)
    )


def _entries(save_ops: object) -> list[object]:
    if save_ops is None:
        return []
    if isinstance(save_ops, (list, tuple, set, frozenset)):
        return list(save_ops)
    return [save_ops]


def _named(name: str) -> list[Operation]:
    """Operations of a name, with or without namespace and overload.

    ``.`` or ``::`` may follow the namespace.
    """
    qualified = _qualified(name)
    namespace, _, rest = qualified.partition(".")
    if namespace == "higher_order" and rest in higher_order_operations:
        return [higher_order_operations[rest]]
    operation, _, overload = rest.partition(".")
    registered = _registered()
    overloads = registered.get(f"{namespace}.{operation}", [])
    if overload in overloads or (overloads and not overload):
        packet = getattr(getattr(torch.ops, namespace), operation)
        return [getattr(packet, overload)] if overload else _overloads(packet)
    near = [f"{namespace}.{operation}.{each}" for each in overloads]
    known = (
        near
        or [other for other in registered if other.startswith(f"{namespace}.")]
        or list(registered)
    )
    raise ConfigurationError(
        f"ActivationCheckpointing.save_ops: {_EXPECTED}; found {name!r}, which is not registered: "
        f"{nearest(qualified, known)} (Operations of other libraries exist once their library is "
        f"imported.)"
    )


def _qualified(name: str) -> str:
    """The name with its namespace.

    The namespace is ``aten`` for a name of one part, or one whose first part is an operation of
    aten.
    """
    dotted = name.replace("::", ".").removeprefix("torch.ops.").removeprefix("torch.")
    first, _, rest = dotted.partition(".")
    if dotted in higher_order_operations:
        return f"higher_order.{dotted}"
    return f"aten.{dotted}" if not rest or f"aten.{first}" in _registered() else dotted


def _registered() -> dict[str, list[str]]:
    """Overload names of every operation registered now, by ``namespace.operation``."""
    operations: defaultdict[str, list[str]] = defaultdict(list)
    for name in all_operation_names():
        namespace, _, rest = name.partition("::")
        operation, _, overload = rest.partition(".")
        operations[f"{namespace}.{operation}"].append(overload or "default")
    return {name: sorted(operations[name]) for name in sorted(operations)}


def _overloads(packet: OpOverloadPacket) -> list[Operation]:
    """All overloads that give a new tensor; autograd records none that write into an argument."""
    overloads: list[OpOverload] = [
        getattr(packet, overload) for overload in sorted(packet.overloads())
    ]
    return [overload for overload in overloads if not overload._schema.is_mutable] or [*overloads]


def _is_composite(operation: Operation) -> bool:
    if isinstance(operation, HigherOrderOperator):
        return False
    return has_kernel(operation.name(), "CompositeImplicitAutograd")


# -- Recomputation: a forward that keeps its inputs and runs again in backward

ContextFunction = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes the contexts of forward and recomputation for ``torch.utils.checkpoint.checkpoint``."""

_ONLY_READS = "_can_checkpoint_with_cache"
"""Attribute of transformers' layers that take a cache and do not add to it."""

_CACHES = {"use_cache": False, "past_key_values": None, "layer_past": None}
"""Arguments by which a transformers layer gets its key-value cache, with their replacements."""


class SavedOnHost(saved_tensors_hooks):
    """Saved tensors in host memory, as under ``torch.autograd.graph.save_on_cpu``.

    The host does not wait for copies from the device: nobody but the device reads them.
    """

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device, bool]:
        """A copy in host memory, where the tensor was, and whether the copy is pinned."""
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return tensor.cpu(), tensor.device, False
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return kept.copy_(tensor, non_blocking=True), tensor.device, True

    def unpack(self, saved: tuple[torch.Tensor, torch.device, bool]) -> torch.Tensor:
        """The tensor where it was."""
        kept, device, is_pinned = saved
        return kept.to(device, non_blocking=is_pinned)


class Recomputation:
    """Stands as ``module.forward`` before the module's own forward, which backward recomputes.

    It lies inside of the module's hooks: what gathers a unit's parameters for its forward and
    announces its backward is not repeated. Names of modules and parameters stay what they are. A
    deep copy of the module recomputes with its own parameters; a pickled one computes plainly, and
    can be loaded where shardeddp is not installed.

    Without gradients, or where neither an input nor a parameter requires one, it only calls the
    forward.

    Args:
        module: Whose forward it is. The two refer to each other, as a module and its bound methods
            do.
        forward: The former ``module.forward``.
        context_fn: Contexts around the forward and its recomputation, if that is selective.
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
        """The forward that ``nn.Module`` calls between its hooks."""
        if not torch.is_grad_enabled() or not self._is_differentiable(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        kwargs = {name: self._without.get(name, value) for name, value in kwargs.items()}
        if self._cpu_offload:
            if torch.compiler.is_compiling():
                _refuse_compiled_offload()
            return self._offloaded(args, kwargs)
        # Bound, not passed on: a forward may have arguments of the names that `checkpoint` takes
        # for itself.
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

        Only activations are moved: leaves (a parameter that is passed in) live on the device
        anyway, and so does what is not differentiable (a mask, a table of rotations), which is
        mostly shared by all blocks.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
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
            positional, named = pytree.tree_unflatten(complete, structure)
            return self.__wrapped__(*positional, **named)

        # `checkpoint` saves its inputs under these hooks, and all else that the forward saves under
        # its own.
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
        # Operations and policy functions cannot be pickled; the forward could be before.
        return functools.partial, (self.__wrapped__,)


def _fills_a_cache(module: nn.Module) -> bool:
    # The recomputation would fill it a second time; transformers' own checkpointing leaves it out
    # as well. Known by name, so that nothing needs to be installed.
    bases = type(module).__mro__
    only_reads = next(
        (vars(base)[_ONLY_READS] for base in bases if _ONLY_READS in vars(base)), False
    )
    return not only_reads and any(base.__name__ == "GradientCheckpointingLayer" for base in bases)


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]  # torch's own annotations
def _refuse_compiled_offload() -> None:
    # Disabled, because the compiler would take the error for a reason to run the block without it.
    raise NotImplementedError(
        "ActivationCheckpointing.cpu_offload: expected modules that are compiled inside of their "
        "recomputation, found one inside of a compiled module, where the compiler decides what is "
        "saved. Replace the block by torch.compile(block) before the strategy sets the model up, "
        "or set cpu_offload=False."
    )


# -- Activation checkpointing: the modules that are recomputed

ActivationCheckpointingLike: TypeAlias = (
    bool | ActivationCheckpointing | Mapping[str, Any] | PolicyLike
)
"""Everything that ``resolve_activation_checkpointing`` understands."""

_FIELDS = tuple(field.name for field in fields(ActivationCheckpointing))


def resolve_activation_checkpointing(value: object) -> ActivationCheckpointing | None:
    """The options that a value of ``activation_checkpointing`` means.

    Args:
        value: None, False or ``"none"`` (off); True or ``"auto"`` (the repeated blocks of the
            model); modules, written as ``auto_wrap_policy`` is: a module class or its name, a list
            or set of those, a function ``(name, module) -> bool``, a Policy; a mapping with the
            fields of :class:`ActivationCheckpointing`, or with the ``class_path`` and ``init_args``
            of a policy; or that itself.

    Returns:
        The options, with a Policy as ``modules``; None for off.

    Raises:
        ConfigurationError: The value is none of these, or one of the options is wrong.
    """
    if value is None or value is False or (isinstance(value, str) and value.lower() == "none"):
        return None
    if isinstance(value, ActivationCheckpointing):
        options = value
    elif isinstance(value, Mapping):
        options = _from_mapping(value)
    else:
        options = ActivationCheckpointing(modules="auto" if value is True else cast(Modules, value))
    check_save_ops(options.save_ops)
    return replace(options, modules=_policy(options.modules))


def checkpoint_activations(root: nn.Module, options: ActivationCheckpointing) -> list[str]:
    """Let the chosen modules of a model recompute their activations in backward.

    Names of modules and parameters do not change. A module inside of another one that was chosen is
    left out: it is computed again with the outer one, and would be a third time for itself.
    ``every`` counts what remains. To choose again changes how a module recomputes, and nothing
    where the options are the same.

    Args:
        root: The model, before or after it is sharded; alike on every rank.
        options: Which modules, and how.

    Returns:
        The names of the modules, in module order.

    Raises:
        ConfigurationError: The model has no such modules, or the options are wrong.
    """
    context_fn = selective_contexts(options.save_ops)
    modules = dict(root.named_modules(remove_duplicate=False))
    chosen = _outermost(_select(root, _policy(options.modules)), modules)[:: options.every]
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
            # The compiler must not see what is moved; the operations of a selective recomputation
            # it has to see.
            module = shells.get(id(module), module)
        forward = module.forward
        if isinstance(forward, Recomputation):
            forward = forward.__wrapped__
        module.forward = Recomputation(
            module, forward, context_fn=context_fn, cpu_offload=options.cpu_offload
        )
    return chosen


def keep_activations(root: nn.Module) -> None:
    """Undo :func:`checkpoint_activations`, also for a deep copy of such a model."""
    for module in root.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Recomputation):
            del vars(module)["forward"]
            if module.forward != forward.__wrapped__:  # one of the module's own, not its class's
                module.forward = forward.__wrapped__


def _from_mapping(value: Mapping[Any, Any]) -> ActivationCheckpointing:
    if "class_path" in value:
        return ActivationCheckpointing(modules=_build_policy(value))
    for key in value:
        if key not in _FIELDS:
            raise ConfigurationError(
                f"activation_checkpointing: expected a mapping with some of {', '.join(_FIELDS)}; "
                f"found {key!r}: {nearest(str(key), _FIELDS)}"
            )
    return ActivationCheckpointing(**value)


def _policy(modules: Any) -> Policy:
    """The policy that chooses the modules; a mapping is a policy as YAML writes an object."""
    if isinstance(modules, Mapping):
        return _build_policy(modules)
    if modules is None or (isinstance(modules, str) and modules.lower() == "none"):
        raise ConfigurationError(
            "ActivationCheckpointing.modules: expected which modules to compute again, found "
            "None. Write 'auto' for the repeated blocks, classes or a policy; "
            "activation_checkpointing=None turns it off."
        )
    try:
        return resolve_policy(modules)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_LIKE_UNITS} {error}") from error


def _build_policy(written: Mapping[str, Any]) -> Policy:
    path, arguments = written.get("class_path"), written.get("init_args") or {}
    target = imported(path) if isinstance(path, str) else None
    if set(written) - {"class_path", "init_args"} or not (
        isinstance(target, type) and issubclass(target, Policy)
    ):
        raise ConfigurationError(
            f"ActivationCheckpointing.modules: expected a mapping with the class_path of a policy, "
            f"such as 'shardeddp.wrap.NamePolicy', and its init_args; found {dict(written)!r}."
        )
    return target(**arguments)


_LIKE_UNITS = "ActivationCheckpointing.modules is written as auto_wrap_policy is, and what was found does not do:"


def _select(root: nn.Module, policy: Policy) -> list[str]:
    """Names of the modules that the policy chooses, at least one."""
    try:
        names = policy.select(root)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_LIKE_UNITS} {error}") from error
    if not names and isinstance(policy, AutoPolicy) and policy.min_numel is None:
        # Blocks too small to be gathered alone may still be worth recomputing; their activations
        # are another matter.
        names = AutoPolicy(min_numel=1, max_fraction=policy.max_fraction).select(root)
    if not names:
        raise ConfigurationError(
            f"ActivationCheckpointing.modules: expected {policy!r} to find modules of "
            f"{class_of(root).__name__}, found none. Name the classes to compute again, or pass "
            f"activation_checkpointing=None."
        )
    return names


def _outermost(names: list[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The names in module order, without modules that are registered anywhere inside of others."""
    inside = {
        id(inner)
        for name in names
        for inner in modules[name].modules()
        if inner is not modules[name]
    }
    wanted = {id(modules[name]) for name in names} - inside
    return [name for name in modules if name in names and id(modules[name]) in wanted]
