"""Policies: which modules are units, by class, name, size, predicate, or found by themselves."""

import inspect
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias, TypeGuard, cast

from torch import nn

from shardeddp.errors import ConfigurationError, closest, listing, nearest
from shardeddp.torch_private import content_of_fsdp_policy
from shardeddp.wrap.tree import (
    class_of,
    has_forward,
    import_path,
    imported,
    join,
    uncompiled,
    unit_candidates,
    unit_children,
    walk,
)

# -- Policies by class, name, size or predicate


class Policy(ABC):
    """Chooses the modules of a model that become units of their own; the root always is one."""

    @abstractmethod
    def select(self, root: nn.Module) -> list[str]:
        """Return the fqns of the modules that become units.

        Args:
            root: Model with the same module tree on every rank. The result must not depend on the
                rank.

        Returns:
            Names as in ``root.named_modules()``, never ``""``. Nested ones are fine: every
            parameter belongs to the nearest unit around it.

        Raises:
            ConfigurationError: The model has no such module.
        """

    def __eq__(self, other: object) -> bool:
        """Return whether both choose the same modules of any model."""
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


class SingleUnitPolicy(Policy):
    """Makes the whole model one unit.

    It is gathered once per forward and, with ``full_shard``, never smaller in between.
    """

    def select(self, root: nn.Module) -> list[str]:
        """Return no module below the root."""
        return []


class PredicatePolicy(Policy):
    """Chooses every module that a function accepts.

    Args:
        predicate: Function called as ``predicate(name, module)`` with every module that can be a
            unit; it must choose at least one, and the same ones on every rank.
    """

    def __init__(self, predicate: Callable[[str, nn.Module], bool]) -> None:
        self.predicate = predicate

    def select(self, root: nn.Module) -> list[str]:
        """Return the modules with a forward that the predicate accepts."""
        candidates = unit_candidates(root)
        names = [name for name, module in candidates.items() if self.predicate(name, module)]
        if not names:
            raise ConfigurationError(
                f"PredicatePolicy: expected {self.predicate!r} to accept at least one module of "
                f"{type(root).__name__}, found that it accepts none of {len(candidates)} "
                f"({listing(candidates) or 'no submodules'}). Accept at least one, or pass "
                f"auto_wrap_policy=None for one unit."
            )
        return names


class SizePolicy(Policy):
    """Units of at least ``min_numel`` parameters, collected from the leaves upwards.

    A module becomes a unit as soon as the parameters below it that no inner unit took reach
    ``min_numel``; the rest at the top stays with the root.

    Args:
        min_numel: Minimum number of parameters (elements, not bytes) of a unit.
    """

    def __init__(self, min_numel: int) -> None:
        if min_numel < 1:
            raise ConfigurationError(
                f"SizePolicy: expected min_numel of at least 1 parameter, found {min_numel}."
            )
        self.min_numel = min_numel

    def select(self, root: nn.Module) -> list[str]:
        """Return the lowest modules that reach the size; none if the whole model is smaller."""
        names: list[str] = []
        counted: set[int] = set()
        for name, child in unit_children(root):
            self._collect(name, child, counted, names)
        return names

    def _collect(self, name: str, module: nn.Module, counted: set[int], names: list[str]) -> int:
        """Add the units at or below the module to ``names``.

        Returns the number of parameter elements that none of them took.
        """
        left = 0
        for child_name, child in unit_children(module):
            left += self._collect(join(name, child_name), child, counted, names)
        # Parameters below the children were counted with them (tied ones at their first name);
        # the rest is the module's own, or lies in children that cannot be units.
        for parameter in module.parameters():
            if id(parameter) not in counted:
                counted.add(id(parameter))
                left += parameter.numel()
        if left < self.min_numel or not has_forward(module):
            return left
        names.append(name)
        return 0


class NamePolicy(Policy):
    """Chooses modules by name; a pattern may stand for several.

    Args:
        names: Names as in ``named_modules()``, or patterns with ``*``, ``?`` and ``[...]``, matched
            segment by segment: ``layers.*`` means ``layers.0`` and ``layers.1``, not
            ``layers.0.mlp``.
    """

    def __init__(self, names: Sequence[str] | set[str]) -> None:
        given = [names] if isinstance(names, str) else list(names)
        if not given or "" in given:
            found = "an empty list" if not given else "''"
            raise ConfigurationError(
                f"NamePolicy: expected module names such as 'layers.*', found {found}. The root is "
                f"always a unit and is not named; pass auto_wrap_policy=None for one unit."
            )
        # A set's order differs from rank to rank; which name an error reports must not.
        self.names = sorted(given)

    def select(self, root: nn.Module) -> list[str]:
        """Return the named modules, each under its first name."""
        known = dict(root.named_modules(remove_duplicate=False))
        del known[""]
        first_name = {id(module): name for name, module in reversed(known.items())}
        allowed = {id(module) for module in unit_candidates(root).values()}
        chosen: dict[str, None] = {}
        for pattern in self.names:
            matches = [name for name in known if _matches(pattern, name)]
            if not matches:
                raise ConfigurationError(
                    f"NamePolicy: expected {pattern!r} to name a module of {type(root).__name__}, "
                    f"found none; {nearest(pattern, known)} (Patterns are matched segment by "
                    f"segment.)"
                )
            for name in matches:
                if id(uncompiled(name, known[name])[1]) not in allowed:
                    raise ConfigurationError(_cannot_be_unit(pattern, name, known[name]))
                chosen[first_name[id(known[name])]] = None
        return list(chosen)


class ClassPolicy(Policy):
    """Chooses every module of the given classes and of their subclasses.

    Args:
        classes: Module classes, or strings: an import path (``"my.module.Block"``) or, if the model
            holds only one class of that name, a bare class name (``"Block"``). Each must match at
            least one module.
    """

    def __init__(
        self, classes: Sequence[type[nn.Module] | str] | set[type[nn.Module] | str]
    ) -> None:
        given = [classes] if isinstance(classes, (str, type)) else list(classes)
        if not given:
            raise ConfigurationError(
                "ClassPolicy: expected at least one module class, found none. Pass "
                "auto_wrap_policy=None for one unit."
            )
        for entry in given:
            if not isinstance(entry, str) and not _is_module_class(entry):
                raise ConfigurationError(
                    f"ClassPolicy: expected subclasses of torch.nn.Module or their names as "
                    f"strings, found {entry!r}."
                )
        # A set's order differs from rank to rank; which class an error names must not.
        self.classes = sorted(
            given, key=lambda entry: entry if isinstance(entry, str) else import_path(entry)
        )

    def select(self, root: nn.Module) -> list[str]:
        """Return modules of the classes, except those without a forward, as ``nn.ModuleList``."""
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
        """Return the class that a string names: from the model, else by its import path."""
        present = list(dict.fromkeys(class_of(module) for module in root.modules()))
        bases = [
            base
            for module_class in present
            for base in module_class.__mro__
            if issubclass(base, nn.Module)
        ]
        for classes in (present, list(dict.fromkeys(bases))):
            found = [
                each
                for each in classes
                if name in (import_path(each), each.__qualname__, each.__name__)
            ]
            if len(found) == 1:
                return found[0]
            if found:
                raise ConfigurationError(
                    f"ClassPolicy: expected {name!r} to mean one class of {type(root).__name__}, "
                    f"found several: {listing(import_path(each) for each in found)}. Give the "
                    f"import path, or the class itself."
                )
        elsewhere = imported(name)
        if not _is_module_class(elsewhere):
            raise ConfigurationError(_no_module_of(name, None, root))
        return elsewhere


def _matches(pattern: str, name: str) -> bool:
    """Return whether every dotted segment of the name matches that of the pattern."""
    patterns, segments = pattern.split("."), name.split(".")
    return len(patterns) == len(segments) and all(map(fnmatchcase, segments, patterns))


def _cannot_be_unit(pattern: str, name: str, module: nn.Module) -> str:
    """Return the error message for a named module that cannot be a unit."""
    kind = import_path(class_of(module))
    start = f"NamePolicy: expected {pattern!r} to name modules that are called, found {name!r}, a {kind}"
    if not has_forward(module):
        return f"{start}, which has no forward and so is never called. Name its members instead: {name + '.*'!r}."
    return (
        f"{start}, inside a torch.nn.MultiheadAttention or a parametrization, which use its "
        f"weights without a call. Name the module around it instead."
    )


def _is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _no_module_of(
    entry: type[nn.Module] | str, wanted: type[nn.Module] | None, root: nn.Module
) -> str:
    """Return the error message for a class that selected nothing, with close names."""
    shown = entry if isinstance(entry, str) else import_path(entry)
    start = f"ClassPolicy: expected at least one module of class {shown!r} in {type(root).__name__}"
    unusable = [
        name
        for name, module in root.named_modules()
        if wanted is not None and isinstance(module, wanted)
    ]
    if unusable:
        return (
            f"{start} that is called, found only {listing(unusable)}: containers have no forward, "
            f"and the parts of a torch.nn.MultiheadAttention or a parametrization are not called. "
            f"Name the class of their members, or that of the module around them."
        )
    known = sorted({class_of(module).__name__ for module in unit_candidates(root).values()})
    name = shown.rpartition(".")[2]
    if wanted is not None and name in known:
        return (
            f"{start}, found another class that is named {name!r} too. Was it defined again after "
            f"the model was built? Pass the class that the model was built from, or its name as a "
            f"string."
        )
    return f"{start}, found none; {nearest(name, known)}"


# -- Policy ``"auto"``: the repeated blocks of a model

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# An embedding's weight is often read outside its forward (tied logits); the root's parameters are
# there all the time.
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

# 64 KiB in fp32: a smaller all-gather costs its latency alone.
_SMALLEST_FLOOR = 16_384
_LARGEST_FLOOR = 1_000_000
_FLOOR_FRACTION = 256


def default_floor(numel: int) -> int:
    """Return the minimum number of parameters of a unit under ``"auto"``, in a model of ``numel``.

    Example:
        The 1/256 is for models between 4 and 256 million parameters; the ends are fixed::

            model     2 M   25 M   124 M   7 B
            floor    16 k   98 k   484 k   1 M
    """
    return min(_LARGEST_FLOOR, max(_SMALLEST_FLOOR, numel // _FLOOR_FRACTION))


class AutoPolicy(Policy):
    """Makes a unit of each repeated block of the model.

    The rule, in which a *list* is an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` (or
    a subclass of one):

    1. A *block* is a module held directly in a list, with a forward and at least ``min_numel``
       parameters, if a second such module of the same class exists anywhere in the model. One
       object that is registered twice counts once. ``nn.Embedding`` is never a block.
    2. The outermost blocks become units: the layers of a transformer, not the experts or the heads
       inside them.
    3. A *stage* is opened: the blocks inside it are taken instead. A block is a stage if at
       least half of its parameters are in list-held blocks of one class, each made of several
       modules, and if stages come in different sizes: no two blocks of its class, or fewer than
       half of them, have the same number of parameters. So Swin gives its blocks and not its
       stages. A plain ``nn.Sequential`` of equal blocks is a stage at any size.
    4. A block with more than ``max_fraction`` of the model's parameters is opened too: the blocks
       inside it become units, and so does each of its other children that reaches ``min_numel``. If
       there are none, it is a unit.
    5. All else belongs to the unit around it, mostly the root: embeddings, heads, classes that
       appear once, models without lists, models with all parts below ``min_numel``.

    Args:
        min_numel: Minimum number of parameters (elements) of a unit; None: 1/256 of the model's,
            but not below 16,384 and not above 1,000,000.
        max_fraction: Share of the model's parameters above which a block is opened, in (0, 1].
    """

    def __init__(self, min_numel: int | None = None, max_fraction: float = 0.5) -> None:
        if min_numel is not None and min_numel < 1:
            raise ConfigurationError(
                f"AutoPolicy: expected min_numel of at least 1 parameter or None, found "
                f"{min_numel}."
            )
        if not 0 < max_fraction <= 1:
            raise ConfigurationError(
                f"AutoPolicy: expected max_fraction above 0 and at most 1, found {max_fraction}."
            )
        self.min_numel = min_numel
        self.max_fraction = max_fraction

    def select(self, root: nn.Module) -> list[str]:
        """Return the blocks of the model by the rule above; none if no block is repeated."""
        numel = sum(parameter.numel() for parameter in root.parameters())
        floor = default_floor(numel) if self.min_numel is None else self.min_numel
        return _Census(root, floor, self.max_fraction * numel).units()


class _Census:
    """Parameters of every module and classes of list members, counted once for one ``select``."""

    def __init__(self, root: nn.Module, floor: int, ceiling: float) -> None:
        self._root = root
        self._floor = floor
        self._ceiling = ceiling
        self._numel = {id(module): _numel(module) for module in root.modules()}
        self._members: dict[int, nn.Module] = {
            id(child): child
            for _, module in walk(root)
            if isinstance(module, _LISTS)
            for _, child in unit_children(module)
            if has_forward(child) and self._is_eligible(child)
        }
        self._sizes: defaultdict[type[nn.Module], list[int]] = defaultdict(list)
        for member in self._members.values():
            self._sizes[class_of(member)].append(self._numel[id(member)])

    def units(self) -> list[str]:
        """Return the names of the chosen modules, each object once."""
        modules = dict(self._root.named_modules(remove_duplicate=False))
        first_name: dict[int, str] = {}
        for name in self._find("", self._root):
            first_name.setdefault(id(modules[name]), name)
        return list(first_name.values())

    def _find(self, name: str, module: nn.Module) -> list[str]:
        """Return the units at or below a module, outermost only."""
        if not self._is_eligible(module):
            return []
        if self._is_block(module) and not self._is_stage(module):
            return [name] if self._numel[id(module)] <= self._ceiling else self._split(name, module)
        return [
            unit
            for child_name, child in unit_children(module)
            for unit in self._find(join(name, child_name), child)
        ]

    def _split(self, name: str, module: nn.Module) -> list[str]:
        """Return the units of a module too large to be one: eligible children, or units in them."""
        units: list[str] = []
        for child_name, child in unit_children(module):
            path = join(name, child_name)
            inside = self._find(path, child)
            if inside or not self._is_eligible(child):
                units += inside
            elif has_forward(child) and self._numel[id(child)] <= self._ceiling:
                units.append(path)
            else:
                units += self._split(path, child)
        return units or ([name] if has_forward(module) else [])

    def _is_eligible(self, module: nn.Module) -> bool:
        return self._numel[id(module)] >= self._floor and not isinstance(module, _EMBEDDINGS)

    def _is_block(self, module: nn.Module) -> bool:
        return id(module) in self._members and len(self._sizes[class_of(module)]) > 1

    def _is_stage(self, module: nn.Module) -> bool:
        """Return whether the module is one of several sizes and made of blocks.

        Or it is a plain sequence of equal blocks.
        """
        sizes_differ = not _mostly_equal(self._sizes[class_of(module)])
        if not sizes_differ and class_of(module) is not nn.Sequential:
            return False
        by_class: defaultdict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        for inner in self._composites_in(module):
            by_class[class_of(inner)].append(inner)
        return any(
            len(blocks) > 1
            and 2 * _numel(*blocks) >= self._numel[id(module)]
            and (sizes_differ or _mostly_equal([self._numel[id(block)] for block in blocks]))
            for blocks in by_class.values()
        )

    def _composites_in(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield list members inside a module that contain modules: blocks, not single layers."""
        for name, inner in walk(module):
            if name and id(inner) in self._members and any(True for _ in unit_children(inner)):
                yield inner


def _numel(*modules: nn.Module) -> int:
    """Return the number of parameter elements of the modules, each parameter counted once."""
    parameters = {
        id(parameter): parameter for module in modules for parameter in module.parameters()
    }
    return sum(parameter.numel() for parameter in parameters.values())


def _mostly_equal(sizes: list[int]) -> bool:
    """Return whether two or more, and at least half, are of one size."""
    most = max(Counter(sizes).values())
    return most > 1 and 2 * most >= len(sizes)


# -- Values of ``auto_wrap_policy``

Modules: TypeAlias = (
    Policy
    | str
    | type[nn.Module]
    | Sequence[type[nn.Module] | str]
    | set[type[nn.Module] | str]
    | Callable[[str, nn.Module], bool]
)
"""Modules of a model, in every notation: policy, class, name, sequence, set or function."""

PolicyLike: TypeAlias = Modules | None
"""Everything that ``resolve_policy`` understands."""

_PRESETS: dict[str, type[Policy]] = {"auto": AutoPolicy, "none": SingleUnitPolicy}

_EXPECTED = (
    'expected "auto", None (one unit), a module class or its name, a list or set of those, a function '
    "predicate(name, module), or a Policy object"
)

# Arguments of torch's own wrap policies, which distinguish them from a predicate.
_TORCH_POLICY_ARGUMENTS = frozenset({"recurse", "nonwrapped_numel"})


def resolve_policy(value: object) -> Policy:
    """Return the policy for a value of ``auto_wrap_policy``.

    Args:
        value: ``"auto"`` (the repeated blocks of the model), None or ``"none"`` (one unit), a
            module class, a class name or import path, a list, tuple or set of those, a predicate
            ``(name, module) -> bool`` or its import path, or a Policy, which is returned as it is.
            ``"auto"`` and ``"none"`` are case-insensitive.

    Raises:
        ConfigurationError: The value is none of these.
    """
    if isinstance(value, Policy):
        return value
    if (translated := _of_torch(value)) is not None:
        return translated
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
    """Return a preset, or a class or predicate by name; refuse others before a model is built."""
    if value.lower() in _PRESETS:
        return _PRESETS[value.lower()]()
    _reject_module_name(value)
    # Classes are capitalized, so a lower-case word is a misspelt preset. A list still takes
    # lower-case classes.
    misspelt = closest(value, _PRESETS, cutoff=0.7)
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
    """Return the policy of a predicate; refuse torch's FSDP policies (other arguments)."""
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


def _of_torch(value: object) -> Policy | None:
    """Return the counterpart of one of torch's FSDP policies, by its name; None: it is none."""
    arguments: Mapping[str, Any] = {}
    if isinstance(value, partial):
        value, arguments = cast("partial[Any]", value).func, value.keywords
    named = value if isinstance(value, FunctionType) else type(value)
    if not (named.__module__.startswith("torch.") and named.__module__.endswith(".fsdp.wrap")):
        return None
    match named.__name__:
        case "ModuleWrapPolicy" | "CustomPolicy":
            chosen = content_of_fsdp_policy(value)
            return PredicatePolicy(_OfModule(chosen)) if callable(chosen) else ClassPolicy(chosen)
        case "transformer_auto_wrap_policy" if "transformer_layer_cls" in arguments:
            return ClassPolicy(arguments["transformer_layer_cls"])
        case "lambda_auto_wrap_policy" if "lambda_fn" in arguments:
            return PredicatePolicy(_OfModule(arguments["lambda_fn"]))
        case "size_based_auto_wrap_policy":
            return SizePolicy(min_numel=arguments.get("min_num_params", 100_000_000))
        case "always_wrap_policy":
            return PredicatePolicy(_OfModule(lambda module: True))
        case _:
            return None


class _OfModule:
    """A predicate on the module alone."""

    def __init__(self, function: Callable[[nn.Module], Any]) -> None:
        self.function = function

    def __call__(self, name: str, module: nn.Module) -> bool:
        return bool(self.function(module))

    def __repr__(self) -> str:
        return repr(self.function)


def _reject_module_name(value: str) -> None:
    """Raise for values that can only be module names."""
    if any(character in value for character in "*?[") or any(
        part.isdigit() for part in value.split(".")
    ):
        raise ConfigurationError(
            f"auto_wrap_policy: {_EXPECTED}; found {value!r}, which names modules. Pass "
            f"NamePolicy(names=[{value!r}])."
        )
