"""Policies that are told what to choose: by class, by name, by size, or by a function of one's own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeGuard

from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.sharding.spec import join
from shardeddp.wrap.tree import (
    class_of,
    has_forward,
    import_path,
    imported,
    listing,
    nearest,
    uncompiled,
    unit_candidates,
    unit_children,
)


class Policy(ABC):
    """Chooses the modules of a model that become units of their own; the root always is one."""

    @abstractmethod
    def select(self, root: nn.Module) -> list[str]:
        """The fqns of the modules that become units.

        Args:
            root: The model, on every rank with the same module tree. The answer must not depend on the rank.

        Returns:
            Names as ``root.named_modules()`` gives them, never ``""``. Nested ones are fine: every parameter belongs to
            the nearest unit around it.

        Raises:
            ConfigurationError: What was asked for is not in the model.
        """

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


class SingleUnitPolicy(Policy):
    """The whole model is one unit: gathered once per forward and, with ``full_shard``, never smaller in between."""

    def select(self, root: nn.Module) -> list[str]:
        """No module below the root."""
        return []


class PredicatePolicy(Policy):
    """Every module for which a function says yes.

    Args:
        predicate: Called as ``predicate(name, module)`` with every module that can be a unit; it must choose at least
            one, and the same ones on every rank.
    """

    def __init__(self, predicate: Callable[[str, nn.Module], bool]) -> None:
        self.predicate = predicate

    def select(self, root: nn.Module) -> list[str]:
        """The modules that the predicate accepts; it is not asked about those without a forward."""
        candidates = unit_candidates(root)
        names = [name for name, module in candidates.items() if self.predicate(name, module)]
        if not names:
            raise ConfigurationError(
                f"PredicatePolicy: expected {self.predicate!r} to accept at least one module of {type(root).__name__}, "
                f"found that it accepts none of {len(candidates)} ({listing(candidates) or 'no submodules'}). "
                "Accept at least one, or pass auto_wrap_policy=None for one unit."
            )
        return names


class SizePolicy(Policy):
    """Units of at least ``min_numel`` parameters, collected from the leaves upwards.

    A module becomes a unit as soon as the parameters below it that no inner unit took reach ``min_numel``; what remains
    at the top stays with the root.

    Args:
        min_numel: Parameters (elements, not bytes) that a unit holds at least.
    """

    def __init__(self, min_numel: int) -> None:
        if min_numel < 1:
            raise ConfigurationError(f"SizePolicy: expected min_numel of at least 1 parameter, found {min_numel}.")
        self.min_numel = min_numel

    def select(self, root: nn.Module) -> list[str]:
        """The lowest modules that reach the size; none where the whole model is smaller."""
        names: list[str] = []
        counted: set[int] = set()
        for name, child in unit_children(root):
            self._collect(name, child, counted, names)
        return names

    def _collect(self, name: str, module: nn.Module, counted: set[int], names: list[str]) -> int:
        """Adds the units at or below the module to ``names`` and returns the parameters that none of them took."""
        left = 0
        for child_name, child in unit_children(module):
            left += self._collect(join(name, child_name), child, counted, names)
        # What lies below the children was counted with them (tied parameters at their first place); the rest is the
        # module's own, or lies in children that cannot be units.
        for parameter in module.parameters():
            if id(parameter) not in counted:
                counted.add(id(parameter))
                left += parameter.numel()
        if left < self.min_numel or not has_forward(module):
            return left
        names.append(name)
        return 0


class NamePolicy(Policy):
    """Modules by name; a pattern may stand for several.

    Args:
        names: Names as ``named_modules()`` gives them, or patterns with ``*``, ``?`` and ``[...]``, matched segment by
            segment: ``layers.*`` means ``layers.0`` and ``layers.1``, not ``layers.0.mlp``.
    """

    def __init__(self, names: Sequence[str] | set[str]) -> None:
        given = [names] if isinstance(names, str) else list(names)
        if not given or "" in given:
            found = "an empty list" if not given else "''"
            raise ConfigurationError(
                f"NamePolicy: expected module names such as 'layers.*', found {found}. "
                "The root is always a unit and is not named; pass auto_wrap_policy=None for one unit."
            )
        # A set's order differs from rank to rank; which name an error reports must not.
        self.names = sorted(given)

    def select(self, root: nn.Module) -> list[str]:
        """The modules that were named, each under its first name."""
        known = dict(root.named_modules(remove_duplicate=False))
        del known[""]
        first_name = {id(module): name for name, module in reversed(known.items())}
        allowed = {id(module) for module in unit_candidates(root).values()}
        chosen: dict[str, None] = {}
        for pattern in self.names:
            matches = [name for name in known if _matches(pattern, name)]
            if not matches:
                raise ConfigurationError(
                    f"NamePolicy: expected {pattern!r} to name a module of {type(root).__name__}, found none; "
                    f"{nearest(pattern, known)} (Patterns are matched segment by segment.)"
                )
            for name in matches:
                if id(uncompiled(name, known[name])[1]) not in allowed:
                    raise ConfigurationError(_cannot_be_unit(pattern, name, known[name]))
                chosen[first_name[id(known[name])]] = None
        return list(chosen)


class ClassPolicy(Policy):
    """Every module of the given classes and of their subclasses.

    Args:
        classes: Module classes, or strings: an import path (``"my.module.Block"``) or, where the model holds only one
            class of that name, a bare class name (``"Block"``). Each must match at least one module.
    """

    def __init__(self, classes: Sequence[type[nn.Module] | str] | set[type[nn.Module] | str]) -> None:
        given = [classes] if isinstance(classes, (str, type)) else list(classes)
        if not given:
            raise ConfigurationError(
                "ClassPolicy: expected at least one module class, found none. Pass auto_wrap_policy=None for one unit."
            )
        for entry in given:
            if not isinstance(entry, str) and not _is_module_class(entry):
                raise ConfigurationError(
                    f"ClassPolicy: expected subclasses of torch.nn.Module or their names as strings, found {entry!r}."
                )
        # A set's order differs from rank to rank; which class an error names must not.
        self.classes = sorted(given, key=lambda entry: entry if isinstance(entry, str) else import_path(entry))

    def select(self, root: nn.Module) -> list[str]:
        """The modules of the classes; those without a forward, such as ``nn.ModuleList``, are left out."""
        candidates = unit_candidates(root)
        chosen: set[str] = set()
        for entry in self.classes:
            wanted = self._find_class(entry, root) if isinstance(entry, str) else entry
            names = [name for name, module in candidates.items() if isinstance(module, wanted)]
            if not names and not isinstance(root, wanted):
                raise ConfigurationError(_no_module_of(entry, wanted, root))
            chosen.update(names)
        return [name for name in candidates if name in chosen]

    def _find_class(self, name: str, root: nn.Module) -> type[nn.Module]:
        """The class that a string means, looked for in the model first and imported only if it is not there."""
        present = list(dict.fromkeys(class_of(module) for module in root.modules()))
        bases = [base for module_class in present for base in module_class.__mro__ if issubclass(base, nn.Module)]
        for classes in (present, list(dict.fromkeys(bases))):
            found = [each for each in classes if name in (import_path(each), each.__qualname__, each.__name__)]
            if len(found) == 1:
                return found[0]
            if found:
                raise ConfigurationError(
                    f"ClassPolicy: expected {name!r} to mean one class of {type(root).__name__}, found several: "
                    f"{listing(import_path(each) for each in found)}. Give the import path, or the class itself."
                )
        elsewhere = imported(name)
        if not _is_module_class(elsewhere):
            raise ConfigurationError(_no_module_of(name, None, root))
        return elsewhere


def _matches(pattern: str, name: str) -> bool:
    """Whether every dotted segment of the name matches that of the pattern."""
    patterns, segments = pattern.split("."), name.split(".")
    return len(patterns) == len(segments) and all(map(fnmatchcase, segments, patterns))


def _cannot_be_unit(pattern: str, name: str, module: nn.Module) -> str:
    """Why a module that was named is refused."""
    kind = import_path(class_of(module))
    start = f"NamePolicy: expected {pattern!r} to name modules that are called, found {name!r}, a {kind}"
    if not has_forward(module):
        return f"{start}, which has no forward and so is never called. Name its members instead: {name + '.*'!r}."
    return (
        f"{start}, inside a torch.nn.MultiheadAttention or a parametrization, which use its weights without a call. "
        "Name the module around it instead."
    )


def _is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _no_module_of(entry: type[nn.Module] | str, wanted: type[nn.Module] | None, root: nn.Module) -> str:
    """Why a class selected nothing, and what it could have been."""
    shown = entry if isinstance(entry, str) else import_path(entry)
    start = f"ClassPolicy: expected at least one module of class {shown!r} in {type(root).__name__}"
    unusable = [name for name, module in root.named_modules() if wanted is not None and isinstance(module, wanted)]
    if unusable:
        return (
            f"{start} that is called, found only {listing(unusable)}: containers have no forward, and the parts of a "
            "torch.nn.MultiheadAttention or a parametrization are not called. Name the class of their members, or "
            "that of the module around them."
        )
    known = sorted({class_of(module).__name__ for module in unit_candidates(root).values()})
    name = shown.rpartition(".")[2]
    if wanted is not None and name in known:
        return (
            f"{start}, found another class that is named {name!r} too. Was it defined again after the model was built? "
            "Pass the class that the model was built from, or its name as a string."
        )
    return f"{start}, found none; {nearest(name, known)}"
