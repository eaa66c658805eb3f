"""Values of `auto_wrap_policy`, and the policy that each means."""

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.wrap.policy import AutoPolicy, ClassPolicy, Policy, PredicatePolicy, SingleUnitPolicy
from shardeddp.wrap.tree import imported

PolicyLike: TypeAlias = (
    Policy
    | str
    | type[nn.Module]
    | Sequence[type[nn.Module] | str]
    | set[type[nn.Module] | str]
    | Callable[[str, nn.Module], bool]
    | None
)
"""Everything that ``resolve_policy`` understands."""

_PRESETS: dict[str, type[Policy]] = {"auto": AutoPolicy, "none": SingleUnitPolicy}

_EXPECTED = (
    'expected "auto", None (one unit), a module class or its name, a list or set of those, a function '
    "predicate(name, module), or a Policy object"
)

# Arguments of torch's own wrap policies, by which one is told from a predicate.
_TORCH_POLICY_ARGUMENTS = frozenset({"recurse", "nonwrapped_numel"})


def resolve_policy(value: object) -> Policy:
    """The policy that a value of ``auto_wrap_policy`` means.

    Args:
        value: ``"auto"`` (the repeated blocks of the model), None or ``"none"`` (one unit), a
            module class, a class name or import path, a list, tuple or set of those, a predicate
            ``(name, module) -> bool`` or its import path, or a Policy, which is returned as it is.
            The case of ``"auto"`` and ``"none"`` does not count.

    Raises:
        ConfigurationError: The value is none of these.
    """
    if isinstance(value, Policy):
        return value
    if value is None:
        return SingleUnitPolicy()
    if isinstance(value, str):
        return _resolve_string(value)
    if isinstance(value, type):
        return _resolve_class(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _resolve_collection(list(value))
    if callable(value) and not isinstance(value, nn.Module):
        return _resolve_callable(value)
    raise ConfigurationError(
        f"auto_wrap_policy: {_EXPECTED}; found {value!r} of type {type(value).__name__}."
    )


def _resolve_string(value: str) -> Policy:
    """A preset, or a class or predicate by name; others are refused before any model is seen."""
    if value.lower() in _PRESETS:
        return _PRESETS[value.lower()]()
    _reject_module_name(value)
    # Classes are capitalized, so a lower-case word is a misspelt preset. A list still takes
    # lower-case classes.
    misspelt = get_close_matches(value.lower(), _PRESETS, n=1, cutoff=0.7)
    if (
        misspelt
        or not all(part.isidentifier() for part in value.split("."))
        or ("." not in value and value.islower())
    ):
        hint = (
            f'did you mean "{misspelt[0]}"?'
            if misspelt
            else f"the names are {', '.join(map(repr, _PRESETS))}."
        )
        raise ConfigurationError(f"auto_wrap_policy: {_EXPECTED}; found {value!r}: {hint}")
    target = imported(value)
    if isinstance(target, type):
        return _resolve_class(target)
    # A name that cannot be imported may still be a class of the model: one of `__main__`, or one
    # made inside a function.
    return _resolve_callable(target) if callable(target) else ClassPolicy([value])


def _resolve_class(value: type) -> Policy:
    if issubclass(value, nn.Module):
        return ClassPolicy([value])
    if issubclass(value, Policy):
        raise ConfigurationError(
            f"auto_wrap_policy: expected a policy object, found the class: pass "
            f"{value.__name__}(...)."
        )
    raise ConfigurationError(
        f"auto_wrap_policy: {_EXPECTED}; found the class {value!r}, which is not a torch.nn.Module."
    )


def _resolve_collection(values: list[type[nn.Module] | str]) -> Policy:
    for entry in values:
        if isinstance(entry, str):
            _reject_module_name(entry)
    return ClassPolicy(values)


def _resolve_callable(value: Callable[..., Any]) -> Policy:
    """A predicate; torch's FSDP policies are callables too and take other arguments."""
    try:
        names = set(inspect.signature(value).parameters)
    except (TypeError, ValueError):  # builtins without a signature: believe the caller
        names: set[str] = set()
    if names & _TORCH_POLICY_ARGUMENTS:
        raise ConfigurationError(
            f"auto_wrap_policy: {_EXPECTED}; found {value!r}, a policy of torch's FSDP. Pass the "
            f"set of classes that it wraps, SizePolicy(min_numel=...) for a size, or a function "
            f"predicate(name, module)."
        )
    return PredicatePolicy(value)


def _reject_module_name(value: str) -> None:
    """Raise for values that can only be meant as module names."""
    if any(character in value for character in "*?[") or any(
        part.isdigit() for part in value.split(".")
    ):
        raise ConfigurationError(
            f"auto_wrap_policy: {_EXPECTED}; found {value!r}, which names modules. Pass "
            f"NamePolicy(names=[{value!r}])."
        )
