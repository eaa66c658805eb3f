"""Module tree as policies see it: possible units and their names; unit specifications."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from types import FunctionType

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from shardeddp.errors import ConfigurationError
from shardeddp.tensor.distributed import Distribution
from shardeddp.torch_private import OptimizedModule

# -- Scripted and traced modules
#
# Their parameters are stored in C++, and are read and replaced like any other's.


class ScriptedParameters(dict[str, torch.Tensor | None]):
    """Parameters of one scripted module, by name: a mapping without a copy of them."""

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
    """Proxy of a scripted module, with the registered parameters."""

    scripted: torch.jit.ScriptModule

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__()
        vars(self).update(_parameters=ScriptedParameters(module), scripted=module)


def module_behind(registry: nn.Module) -> nn.Module:
    """Return the module of the model that a registry of parameters is, or is a proxy of."""
    return registry.scripted if isinstance(registry, ScriptedRegistry) else registry


def registry_of(module: nn.Module) -> nn.Module:
    """Return the object with the ``_parameters`` that a module computes with."""
    return ScriptedRegistry(module) if isinstance(module, torch.jit.ScriptModule) else module


# -- Unit specifications: a module and its parameters


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter object with all of its registrations in the model.

    A tied parameter has several registrations and still one spec: it is sharded, gathered and reduced
    once.
    """

    fqn: str
    """Its first name in ``named_parameters`` of the root module."""

    parameter: nn.Parameter
    """The object itself; its identity survives sharding."""

    registrations: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute name) under which the object is registered, in module order."""

    shares_memory_with: nn.Parameter | None = None
    """An earlier parameter, another object, with the same memory.

    Example: ``head.weight.data = embedding.weight.data``.
    """

    compute_in: torch.dtype | None = None
    """Dtype in which the parameter is gathered and used; None: its own."""

    is_forward_copy: bool = False
    """True if only forwards of its modules compute with it: in autocast's dtype, or a rank's part.

    See ``forward_copies.py``.
    """

    distribution: Distribution | None = None
    """Split of the parameter that this one is a part of; None: it is whole."""

    reduce_in: torch.dtype | None = None
    """Dtype in which its gradient is reduced; None: float32, or its own if that is wider."""

    @property
    def is_wrapped(self) -> bool:
        """True if modules compute with a tensor that is made from the parameter."""
        return self.distribution is not None and self.distribution.wrapper is not None

    @property
    def is_of_experts(self) -> bool:
        """True if it is split over ranks with different experts."""
        return self.distribution is not None and self.distribution.of_experts

    @property
    def memory(self) -> int:
        """Identity of its memory, equal for parameters that share it."""
        return id(self.parameter if self.shares_memory_with is None else self.shares_memory_with)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the main shard, of the user's gradient and of the optimizer's states."""
        return self.parameter.dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameter."""
        return self.compute_in or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradient while it is reduced."""
        if self.reduce_in is not None or not (
            self.dtype.is_floating_point or self.dtype.is_complex
        ):
            return self.reduce_in or self.dtype
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A module with the parameters that are gathered and released together.

    The root's spec holds the parameters that no inner unit took.
    """

    name: str
    """Fqn of the module, ``""`` for the root."""

    module: nn.Module

    parameters: tuple[ParameterSpec, ...]
    """Parameters in module order, without those of inner units."""

    passthrough: tuple[ParameterSpec, ...] = ()
    """Parameters of a single rank that would not be cut, gathered or cast; they are left as is."""

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.name or "(root)"


def with_one_dtype_of_memory(specs: Iterable[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Return the specs with one dtype for parameters that share memory.

    If autocast would cast only some of them, all keep their own dtype.
    """
    specs = tuple(specs)
    dtypes: dict[int, set[torch.dtype]] = {}
    for spec in specs:
        dtypes.setdefault(spec.memory, set()).add(spec.param_dtype)
    return tuple(
        spec
        if len(dtypes[spec.memory]) == 1
        else replace(spec, compute_in=None, is_forward_copy=False)
        for spec in specs
    )


def memory_of(parameter: torch.Tensor) -> object:
    """Return a key of a tensor's memory: equal for tensors with the same elements there.

    It does not keep the memory alive, and equals no key of later memory at that address.
    """
    if is_lazy(parameter) or parameter.layout is not torch.strided or not parameter.numel():
        return id(parameter)
    memory = StorageWeakRef(parameter.untyped_storage())
    kind = parameter.shape, parameter.stride(), parameter.dtype
    return memory, parameter.storage_offset(), kind


def extent_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a strided tensor, both included."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in dims) + 1) * tensor.element_size()


def is_computed(module: nn.Module, attribute: str) -> bool:
    """Return whether an attribute is recomputed before each forward.

    Examples: `spectral_norm`, `weight_norm`, pruning.
    """
    return any(f"{attribute}_{suffix}" in module._parameters for suffix in ("orig", "g"))


def join(prefix: str, name: str) -> str:
    """Return the fqn of the child ``name`` of module ``prefix``, which is ``""`` for the root."""
    return f"{prefix}.{name}" if prefix else name


# -- Module tree: possible units, their names and classes

_INSIDE = "_orig_mod"  # name of the module inside of an OptimizedModule


def has_forward(module: nn.Module) -> bool:
    """Return whether Python calls the module; other modules cannot be units.

    A unit is gathered when its module is called.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return False  # native code calls the modules inside of it
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the user's class; ``parametrize`` gives every module it changes a class of its own."""
    return parametrize.type_before_parametrizations(module)


def import_path(module_class: type) -> str:
    """Return the import path of a class, as a user would write it in YAML."""
    return f"{module_class.__module__}.{module_class.__qualname__}"


def function_path(function: object) -> str | None:
    """Return the import path of a function; None if another process could not find it by that."""
    if not isinstance(function, FunctionType):
        return None
    path = f"{function.__module__}.{function.__qualname__}"
    return path if imported(path) is function else None


def imported(path: str) -> object | None:
    """Return the object at an import path (``package.module.Class``, nested classes too).

    None for a bare name, or if nothing is found.

    Raises:
        ConfigurationError: The module exists, and importing it fails.
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
    """Return whether there is a module of this name, and import it."""
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
    """Yield direct children that may hold units, without the shells of ``torch.compile(module)``.

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


def outermost_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters that the user's step calls.

    A container without a forward is replaced by its children.
    """
    for _, child in unit_children(module):
        if next(child.parameters(), None) is None:
            continue
        if has_forward(child):
            yield child
        else:
            yield from outermost_modules(child)


def uncompiled(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return name and module as in the user's code, without shells of ``torch.compile(module)``."""
    while isinstance(module, OptimizedModule):
        name, module = join(name, _INSIDE), module.get_submodule(_INSIDE)
    return name, module


def compiled_shells(root: nn.Module) -> dict[int, nn.Module]:
    """Return the outermost ``torch.compile(module)`` shell by identity of compiled modules."""
    shells: dict[int, nn.Module] = {}
    for module in root.modules():
        if isinstance(module, OptimizedModule):
            # Outer shells come first and must not be replaced by those inside of them.
            shells.setdefault(id(uncompiled("", module)[1]), module)
    return shells


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the root and modules that may be or hold units, once, in ``named_modules`` order."""
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
    """Return every module but the root that could be a unit, by fqn, in ``named_modules`` order."""
    return {name: module for name, module in walk(root) if name and has_forward(module)}
