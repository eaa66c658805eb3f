"""The module tree as policies see it: which modules can be units, and under which names and classes."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pkgutil import resolve_name

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.utils import parametrize

from shardeddp.sharding.spec import join

_MOST_LISTED = 10
_INSIDE = "_orig_mod"  # the name of the module inside of an OptimizedModule


def has_forward(module: nn.Module) -> bool:
    """Whether Python calls the module; a unit is gathered when its module is called, so others cannot be units."""
    if isinstance(module, torch.jit.ScriptModule):
        return False  # code that is not Python's calls what is inside of it
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class the user wrote; ``parametrize`` gives every module that it touches a class of its own."""
    return parametrize.type_before_parametrizations(module)


def import_path(module_class: type) -> str:
    """The class's import path, as a user would write it in YAML."""
    return f"{module_class.__module__}.{module_class.__qualname__}"


def imported(path: str) -> object | None:
    """What an import path leads to; None where nothing is found, or where it is a bare name."""
    if "." not in path:
        return None
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def unit_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The direct children below which units may lie; of what ``torch.compile(module)`` returned, the module inside.

    ``nn.MultiheadAttention`` reads the weights of its ``out_proj`` without calling it, and a parametrization is
    evaluated while an attribute is read: no call would gather them, so both belong to the unit around them. So does
    everything inside of a scripted or traced module.
    """
    if isinstance(module, nn.MultiheadAttention | torch.jit.ScriptModule):
        return
    hidden = "parametrizations" if parametrize.is_parametrized(module) else None
    for name, child in module.named_children():
        if name != hidden:
            yield uncompiled(name, child)


def uncompiled(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Name and module that the user wrote, without the shells that ``torch.compile(module)`` puts around it."""
    while isinstance(module, OptimizedModule):
        name, module = join(name, _INSIDE), module.get_submodule(_INSIDE)
    return name, module


def compiled_shells(root: nn.Module) -> dict[int, nn.Module]:
    """The outermost shell of every module around which ``torch.compile(module)`` has put one, by its identity."""
    shells: dict[int, nn.Module] = {}
    for module in root.modules():
        if isinstance(module, OptimizedModule):
            # Outer shells come first and must not be replaced by those inside of them.
            shells.setdefault(id(uncompiled("", module)[1]), module)
    return shells


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Root and every module at or below which units may lie, each object once, in ``named_modules`` order."""
    # Identity, not equality: a torchmetrics Metric overloads ``==`` and changes its hash.
    seen: set[int] = set()

    def descend(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        for child_name, child in unit_children(module):
            yield from descend(join(name, child_name), child)

    return descend("", root)


def unit_candidates(root: nn.Module) -> dict[str, nn.Module]:
    """Every module that could be a unit by its fqn, without the root, in ``named_modules`` order."""
    return {name: module for name, module in walk(root) if name and has_forward(module)}


def listing(names: Iterable[str]) -> str:
    """Names for an error message, at most ten of them."""
    every = list(names)
    shown = ", ".join(repr(name) for name in every[:_MOST_LISTED])
    return f"{shown} and {len(every) - _MOST_LISTED} more" if len(every) > _MOST_LISTED else shown


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known names closest to it, or what there is.

    Args:
        name: What was asked for.
        known: What would have been right; case does not count.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    if not by_lower:
        return "there are none."
    matches = get_close_matches(name.lower(), by_lower, n=3)
    if matches:
        return f"did you mean {' or '.join(repr(by_lower[match]) for match in matches)}?"
    return f"there are {listing(by_lower.values())}."
