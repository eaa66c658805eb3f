"""Module tree as policies see it: possible units and their names; unit specifications."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

import torch
from torch import nn
from torch.nn.utils import parametrize

from shardeddp.errors import ConfigurationError
from shardeddp.tensor.distributed import Distribution
from shardeddp.torch_private import OptimizedModule

# -- Scripted and traced modules
#
# Their parameters live in C++, and are read and replaced like any other's.


class ScriptedParameters(dict[str, torch.Tensor | None]):
    """The parameters of one scripted module, by name; nothing is kept here."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__()
        self._module = module

    def get(self, name: str, default: torch.Tensor | None = None) -> torch.Tensor | None:  # type: ignore[override]  # noqa: D102
        parameters = self._module._parameters
        return parameters[name] if name in parameters else default  # noqa: SIM401  # no get()

    def __getitem__(self, name: str) -> torch.Tensor | None:
        return self._module._parameters[name]

    def __setitem__(self, name: str, parameter: torch.Tensor | None) -> None:
        self._module._parameters[name] = parameter  # type: ignore[assignment]


class ScriptedRegistry(nn.Module):
    """Stands for a scripted module where parameters are registered."""

    scripted: torch.jit.ScriptModule

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__()
        vars(self).update(_parameters=ScriptedParameters(module), scripted=module)


def module_behind(owner: nn.Module) -> nn.Module:
    """The module of the model that an owner of parameters stands for, or is."""
    return owner.scripted if isinstance(owner, ScriptedRegistry) else owner


def registry_of(module: nn.Module) -> nn.Module:
    """The object whose ``_parameters`` a module computes with."""
    return ScriptedRegistry(module) if isinstance(module, torch.jit.ScriptModule) else module


# -- Unit specifications: a module and its parameters


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter object and every place of the model where it is registered.

    A tied parameter has several owners and still one spec: it is sharded, gathered and reduced
    once.
    """

    fqn: str
    """The first name that ``named_parameters`` gives it, seen from the root module."""

    parameter: nn.Parameter
    """The object itself; its identity survives sharding."""

    owners: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute name) under which the object is registered, in module order."""

    shares_memory_with: nn.Parameter | None = None
    """An earlier parameter, another object, whose memory it has.

    Example: ``head.weight.data = embedding.weight.data``.
    """

    compute_in: torch.dtype | None = None
    """Dtype that the parameter is gathered in and computes with; None: its own."""

    is_autocast_copy: bool = False
    """Whether it is gathered for the forward of its owners alone; see ``autocast_copies.py``."""

    distribution: Distribution | None = None
    """How ranks split the parameter that this one is a part of; None: it is whole."""

    reduce_in: torch.dtype | None = None
    """Dtype that its gradient is reduced in; None: float32, or its own where that is wider."""

    @property
    def is_wrapped(self) -> bool:
        """Whether modules compute with something that is made of the parameter."""
        return self.distribution is not None and self.distribution.wrapper is not None

    @property
    def is_of_experts(self) -> bool:
        """Whether ranks have different experts' parts of it."""
        return self.distribution is not None and self.distribution.of_experts

    @property
    def memory(self) -> int:
        """Equal for parameters that have the same memory."""
        return id(self.parameter if self.shares_memory_with is None else self.shares_memory_with)

    @property
    def dtype(self) -> torch.dtype:
        """Of the main shard, the gradient that the user sees and the optimizer's states."""
        return self.parameter.dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """Of the gathered parameter."""
        return self.compute_in or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the gradient while it is reduced."""
        if self.reduce_in is not None or not (
            self.dtype.is_floating_point or self.dtype.is_complex
        ):
            return self.reduce_in or self.dtype
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A module whose parameters are gathered and released together.

    The root's spec holds the parameters that no inner unit took.
    """

    name: str
    """The module's fqn, ``""`` for the root."""

    module: nn.Module

    parameters: tuple[ParameterSpec, ...]
    """In module order, without those that an inner unit holds."""

    passthrough: tuple[ParameterSpec, ...] = ()
    """Parameters of a single rank that would not be cut, gathered or cast; they stay as is."""

    @property
    def label(self) -> str:
        """The name as people read it."""
        return self.name or "(root)"


def extent_nbytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a strided tensor to behind its last one."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in dims) + 1) * tensor.element_size()


def is_computed(module: nn.Module, attribute: str) -> bool:
    """Whether an attribute is recomputed before each forward.

    Examples: `spectral_norm`, `weight_norm`, pruning.
    """
    return any(f"{attribute}_{suffix}" in module._parameters for suffix in ("orig", "g"))


def join(prefix: str, name: str) -> str:
    """The fqn of the child ``name`` of the module ``prefix``, which is ``""`` for the root."""
    return f"{prefix}.{name}" if prefix else name


# -- Module tree: possible units, their names and classes

_MOST_LISTED = 10
_INSIDE = "_orig_mod"  # the name of the module inside of an OptimizedModule


def has_forward(module: nn.Module) -> bool:
    """Whether Python calls the module; other modules cannot be units.

    A unit is gathered when its module is called.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False  # native code calls the modules inside of it
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class the user wrote; ``parametrize`` gives every module it touches its own class."""
    return parametrize.type_before_parametrizations(module)


def import_path(module_class: type) -> str:
    """The class's import path, as a user would write it in YAML."""
    return f"{module_class.__module__}.{module_class.__qualname__}"


def imported(path: str) -> object | None:
    """The object at an import path (``package.module.Class``, also of a class inside of another).

    None for a bare name, or where nothing is found.

    Raises:
        ConfigurationError: The module is there, and importing it fails.
    """
    names = path.replace(":", ".").split(".")
    if len(names) == 1 or not all(name.isidentifier() for name in names):
        return None
    found: object | None = None
    modules, within = True, ""
    for name in names:
        within = f"{within}.{name}" if within else name
        modules = modules and _is_module(within)
        found = sys.modules[within] if modules else getattr(found, name, None)
    return found


def _is_module(path: str) -> bool:
    """Whether there is a module of this name, which is imported then."""
    try:
        import_module(path)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == path:
            return False
        raise ConfigurationError(
            f"importing {path} fails ({type(error).__name__}: {error})"
        ) from error
    return True


def unit_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Direct children below which units may lie, without the shells of ``torch.compile(module)``.

    ``nn.MultiheadAttention`` reads the weights of its ``out_proj`` without calling it, and a
    parametrization is evaluated while an attribute is read: no call would gather them, so both
    belong to the unit around them. So does everything inside of a scripted or traced module.
    """
    if isinstance(module, nn.MultiheadAttention | torch.jit.ScriptModule):
        return
    hidden = "parametrizations" if parametrize.is_parametrized(module) else None
    for name, child in module.named_children():
        if name != hidden:
            yield uncompiled(name, child)


def uncompiled(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Name and module as the user wrote them, without the shells of ``torch.compile(module)``."""
    while isinstance(module, OptimizedModule):
        name, module = join(name, _INSIDE), module.get_submodule(_INSIDE)
    return name, module


def compiled_shells(root: nn.Module) -> dict[int, nn.Module]:
    """Outermost ``torch.compile(module)`` shell of each compiled module, by module identity."""
    shells: dict[int, nn.Module] = {}
    for module in root.modules():
        if isinstance(module, OptimizedModule):
            # Outer shells come first and must not be replaced by those inside of them.
            shells.setdefault(id(uncompiled("", module)[1]), module)
    return shells


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Root and modules at or below which units may lie, once each, in ``named_modules`` order."""
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
    """Every module but the root that could be a unit, by fqn, in ``named_modules`` order."""
    return {name: module for name, module in walk(root) if name and has_forward(module)}


def listing(names: Iterable[str]) -> str:
    """Names for an error message, at most ten of them."""
    every = list(names)
    shown = ", ".join(repr(name) for name in every[:_MOST_LISTED])
    return f"{shown} and {len(every) - _MOST_LISTED} more" if len(every) > _MOST_LISTED else shown


def first_three(names: Iterable[str]) -> str:
    """The first names for a warning, and how many more there are."""
    every = list(names)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """End of an error message about an unknown name: the closest known names, or all."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    if not by_lower:
        return "there are none."
    matches = get_close_matches(name.lower(), by_lower, n=3)
    if matches:
        return f"did you mean {' or '.join(repr(by_lower[match]) for match in matches)}?"
    return f"there are {listing(by_lower.values())}."
