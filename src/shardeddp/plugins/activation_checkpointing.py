"""Activation checkpointing: which modules keep only their inputs in forward and are computed again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from shardeddp.config import ActivationCheckpointing, Modules
from shardeddp.errors import ConfigurationError
from shardeddp.plugins.kept_operations import check_save_ops, selective_contexts
from shardeddp.plugins.recomputation import Recomputation
from shardeddp.wrap import AutoPolicy, Policy, PolicyLike, resolve_policy
from shardeddp.wrap.tree import class_of, compiled_shells, imported, nearest, uncompiled

ActivationCheckpointingLike: TypeAlias = bool | ActivationCheckpointing | Mapping[str, Any] | PolicyLike
"""Everything that ``resolve_activation_checkpointing`` understands."""

_FIELDS = tuple(field.name for field in fields(ActivationCheckpointing))


def resolve_activation_checkpointing(value: object) -> ActivationCheckpointing | None:
    """The options that a value of ``activation_checkpointing`` means.

    Args:
        value: None, False or ``"none"`` (off); True or ``"auto"`` (the repeated blocks of the model); modules, written
            as ``auto_wrap_policy`` is: a module class or its name, a list or set of those, a function
            ``(name, module) -> bool``, a Policy; a mapping with the fields of :class:`ActivationCheckpointing`, or with
            the ``class_path`` and ``init_args`` of a policy; or that itself.

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

    Names of modules and parameters do not change. A module inside of another one that was chosen is left out: it is
    computed again with the outer one, and would be a third time for itself. ``every`` counts what remains. To choose
    again changes how a module recomputes, and nothing where the options are the same.

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
                f"ActivationCheckpointing.modules: expected modules whose forward is Python, found {name!r}, a "
                f"{type(module).__name__}. Choose the module around it, or do not script it."
            )
        if options.cpu_offload:
            # The compiler must not see what is moved; the operations of a selective recomputation it has to see.
            module = shells.get(id(module), module)
        forward = module.forward
        if isinstance(forward, Recomputation):
            forward = forward.__wrapped__
        module.forward = Recomputation(module, forward, context_fn=context_fn, cpu_offload=options.cpu_offload)
    return chosen


def _from_mapping(value: Mapping[Any, Any]) -> ActivationCheckpointing:
    if "class_path" in value:
        return ActivationCheckpointing(modules=_build_policy(value))
    for key in value:
        if key not in _FIELDS:
            raise ConfigurationError(
                f"activation_checkpointing: expected a mapping with some of {', '.join(_FIELDS)}; found {key!r}: "
                f"{nearest(str(key), _FIELDS)}"
            )
    return ActivationCheckpointing(**value)


def _policy(modules: Any) -> Policy:
    """The policy that chooses the modules; a mapping is a policy as YAML writes an object."""
    if isinstance(modules, Mapping):
        return _build_policy(modules)
    if modules is None or (isinstance(modules, str) and modules.lower() == "none"):
        raise ConfigurationError(
            "ActivationCheckpointing.modules: expected which modules to compute again, found None. Write 'auto' for "
            "the repeated blocks, classes or a policy; activation_checkpointing=None turns it off."
        )
    try:
        return resolve_policy(modules)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_LIKE_UNITS} {error}") from error


def _build_policy(written: Mapping[str, Any]) -> Policy:
    path, arguments = written.get("class_path"), written.get("init_args") or {}
    target = imported(path) if isinstance(path, str) else None
    if set(written) - {"class_path", "init_args"} or not (isinstance(target, type) and issubclass(target, Policy)):
        raise ConfigurationError(
            "ActivationCheckpointing.modules: expected a mapping with the class_path of a policy, such as "
            f"'shardeddp.wrap.NamePolicy', and its init_args; found {dict(written)!r}."
        )
    return target(**arguments)


_LIKE_UNITS = "ActivationCheckpointing.modules is written as auto_wrap_policy is, and what was found does not do:"


def _select(root: nn.Module, policy: Policy) -> list[str]:
    """The names of what the policy chooses, at least one."""
    try:
        names = policy.select(root)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_LIKE_UNITS} {error}") from error
    if not names and isinstance(policy, AutoPolicy) and policy.min_numel is None:
        # Blocks too small to be gathered alone may still be worth recomputing; their activations are another matter.
        names = AutoPolicy(min_numel=1, max_fraction=policy.max_fraction).select(root)
    if not names:
        raise ConfigurationError(
            f"ActivationCheckpointing.modules: expected {policy!r} to find modules of {class_of(root).__name__}, found "
            "none. Name the classes to compute again, or pass activation_checkpointing=None."
        )
    return names


def _outermost(names: list[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The names in module order, without modules inside of others (wherever else they are registered, too)."""
    inside = {id(inner) for name in names for inner in modules[name].modules() if inner is not modules[name]}
    wanted = {id(modules[name]) for name in names} - inside
    return [name for name in modules if name in names and id(modules[name]) in wanted]
