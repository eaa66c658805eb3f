"""Kept operations of selective activation checkpointing, by name."""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from shardeddp.errors import ConfigurationError, nearest
from shardeddp.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    all_operation_names,
    has_kernel,
    higher_order_operations,
)
from shardeddp.wrap.tree import function_path, imported

ContextFunction = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns the contexts of forward and recomputation for ``torch.utils.checkpoint.checkpoint``."""

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
"""Names for groups of operations.

They are the products of linear layers, and every kernel of scaled dot-product attention.
"""

_EXPECTED = (
    f"expected names of operations ('aten.mm.default', 'aten.mm', 'mm'), "
    f"{' or '.join(map(repr, PRESETS))}, objects of torch.ops, or one policy function"
)


def selective_contexts(save_ops: object) -> ContextFunction | None:
    """Return the context function that keeps results of some operations; None: of none."""
    policy = _policy_of(save_ops)
    return None if policy is None else functools.partial(_contexts, policy)


def _policy_of(save_ops: object) -> Callable[..., Any] | None:
    """Return the policy function; None if no operation is kept."""
    policy = _given_policy(save_ops)
    if policy is not None:
        return policy
    operations = find_operations(_entries(save_ops))
    return functools.partial(_keep, frozenset(operations)) if operations else None


def _contexts(policy: Callable[..., Any]) -> Any:
    return create_selective_checkpoint_contexts(_Checked(policy))


def _keep(operations: frozenset[Operation], _: Any, op: Operation, *args: Any, **kw: Any) -> Any:
    return CheckpointPolicy.MUST_SAVE if op in operations else CheckpointPolicy.PREFER_RECOMPUTE


class _Checked:
    """Policy for one forward and its recomputation that refuses views past torch's checks.

    torch refuses kept results that are changed in place. It does not see changes through views that
    have versions of their own: the recomputation would compute with changed values. Compiled code
    changes nothing in place.
    """

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy
        self._keeps_products = False

    def __call__(self, context: Any, op: Operation, *args: Any, **kwargs: Any) -> Any:
        decision = self._policy(context, op, *args, **kwargs)
        if op in _products():
            self._keeps_products |= decision in _KEPT
        elif self._keeps_products and op in _UNSAFE_VIEWS and not torch.compiler.is_compiling():
            raise ConfigurationError(
                f"ActivationCheckpointing.save_ops keeps matmul results, and a module in the "
                f"recomputed one changes them in place, unseen by autograd ({op.name()}; nn.GRU on "
                f"CPUs does): gradients would be wrong. Leave such modules out of "
                f"activation_checkpointing, or keep no matmul results there"
            )
        return decision


_KEPT = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

_UNSAFE_VIEWS = (
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
)


@functools.cache
def _products() -> frozenset[Operation]:
    return frozenset(find_operations(["matmul"]))


def is_kept_by(save_ops: object) -> Callable[..., bool]:
    """Return a function of an operation and its arguments: True if its results are kept."""
    policy = _policy_of(save_ops)
    in_forward = SelectiveCheckpointContext(is_recompute=False)

    def is_kept(operation: Operation, *args: Any, **kwargs: Any) -> bool:
        return policy is not None and policy(in_forward, operation, *args, **kwargs) in _KEPT

    return is_kept


def written_operations(save_ops: object) -> str | list[str]:
    """Return ``save_ops`` as a configuration file has it.

    Raises:
        LookupError: It is a function that another process could not find by a name.
    """
    if isinstance(save_ops, str):
        return save_ops
    if not _is_function(save_ops):
        return [*map(str, _entries(save_ops))]
    path = function_path(save_ops)
    if path is None:
        raise LookupError(save_ops)
    return path


def check_save_ops(save_ops: object) -> None:
    """Refuse wrong entries, before libraries with their own operations are imported."""
    if _given_policy(save_ops) is None:
        find_operations(
            entry
            for entry in _entries(save_ops)
            if not isinstance(entry, str)
            or entry in PRESETS
            or _qualified(entry).startswith("aten.")
        )


def find_operations(entries: Iterable[object]) -> list[Operation]:
    """Return the operations of names and objects; a name without overload means all its overloads.

    Raises:
        ConfigurationError: An entry is no operation, or one that autograd decomposes before it
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


def _given_policy(save_ops: object) -> Callable[..., Any] | None:
    """Return the policy function, given directly or by import path; None if there is none."""
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
    """Return the operations of a name, with or without namespace and overload.

    ``.`` or ``::`` may follow the namespace.
    """
    qualified = _qualified(name)
    namespace, _, rest = qualified.partition(".")
    if namespace == "higher_order" and rest in higher_order_operations:
        return [higher_order_operations[rest]]
    operation, _, overload = rest.partition(".")
    packet = _packet(namespace, operation)
    if packet is not None and (not overload or overload in packet.overloads()):
        return [getattr(packet, overload)] if overload else _overloads(packet)
    if packet is not None:
        known = [f"{namespace}.{operation}.{each}" for each in packet.overloads()]
    else:
        names = {each.partition(".")[0].replace("::", ".") for each in all_operation_names()}
        known = sorted(it for it in names if it.startswith(f"{namespace}.")) or sorted(names)
    raise ConfigurationError(
        f"ActivationCheckpointing.save_ops: {_EXPECTED}; found {name!r}, which is not registered: "
        f"{nearest(qualified, known)} (Operations of other libraries exist once their library is "
        f"imported.)"
    )


def _qualified(name: str) -> str:
    """Return a name with its namespace.

    The namespace is ``aten`` for a name of one part, or if its first part is an operation of aten.
    """
    dotted = name.replace("::", ".").removeprefix("torch.ops.").removeprefix("torch.")
    first, _, rest = dotted.partition(".")
    if dotted in higher_order_operations:
        return f"higher_order.{dotted}"
    return f"aten.{dotted}" if not rest or _packet("aten", first) else dotted


def _packet(namespace: str, operation: str) -> OpOverloadPacket | None:
    """Return the operation of torch or of an imported library; None if there is none."""
    packet = getattr(getattr(torch.ops, namespace, None), operation, None)
    return packet if isinstance(packet, OpOverloadPacket) else None


def _overloads(packet: OpOverloadPacket) -> list[Operation]:
    """Return all overloads with a new tensor as result; autograd does not record the others.

    Those for numbers are TorchScript's alone, and no operations of the dispatcher.
    """
    known = set(all_operation_names())
    every: list[OpOverload] = [getattr(packet, overload) for overload in sorted(packet.overloads())]
    overloads = [overload for overload in every if overload.name() in known]
    return [overload for overload in overloads if not overload._schema.is_mutable] or [*overloads]


def _is_composite(operation: Operation) -> bool:
    if isinstance(operation, HigherOrderOperator):
        return False
    return has_kernel(operation.name(), "CompositeImplicitAutograd")
