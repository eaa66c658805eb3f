"""Outside state: what the code of a module can change outside of it, kept while a plan runs that code."""

from __future__ import annotations

import functools
import operator
import random
import sys
import sysconfig
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.lightning.held_state import HeldState

_MOST_OBJECTS = 100_000
"""Objects to visit: the other ranks wait while rank 0 does."""
_MOST_NBYTES = 2**28
"""Bytes of arrays to copy."""

_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.Tensor,
    torch.dtype,
    range,
    CodeType,
)
_GENERATORS = (
    *(torch.Generator, random.Random, np.random.RandomState),
    *(np.random.Generator, np.random.BitGenerator),
)
_CACHED = type(functools.cache(lambda: None))

_ABSENT = object()
_FRAMEWORK = {
    *("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning"),
    __name__.partition(".")[0],
}
_PLAIN = {"collections", "types"}
"""Files of the standard library with objects whose attributes are the user's."""


@contextmanager
def outside_state_kept(module: nn.Module) -> Generator[None]:
    """Keep what the module's code can change outside of it as it was before the context.

    The module itself may change: it is a copy. Its code is that of its class and of all functions
    that this one names, directly or through others, but for the standard library and installed
    packages. Kept are variables of files, closures and classes, attributes of objects, containers,
    arrays and random generators. Caches of functions are emptied. Files and other processes are not
    kept.

    Raises:
        ConfigurationError: The code reaches an iterator or an open file, which cannot be set back,
            or too much to look at.
    """
    kept = _OutsideState(module)
    try:
        yield
    finally:
        kept.restore()


class _OutsideState:
    """What the code of a module can change outside of it, at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._undo: list[Callable[[], object]] = []
        self._nbytes = 0
        self._module = module
        self._package = type(module).__module__.partition(".")[0]
        generators: list[object] = []
        # Objects with the name they were found by, and whether they are no part of the copy.
        left = deque[tuple[object, str, bool]]([(module, "", False)])
        seen: dict[
            tuple[int, bool], object
        ] = {}  # with the objects, so that identities stay theirs
        while left:
            it, name, is_outside = left.popleft()
            if isinstance(it, _VALUES) or (id(it), is_outside) in seen:
                continue
            seen[id(it), is_outside] = it
            if len(seen) > _MOST_OBJECTS:
                raise self._refusal(f"more than {_MOST_OBJECTS:,} objects outside of it")
            if isinstance(it, _GENERATORS):
                if is_outside:
                    generators.append(it)
            else:
                left += (
                    (at, its or name, is_out)
                    for at, its, is_out in self._inside(it, name, is_outside)
                )
        self._generators = HeldState(generators)

    def restore(self) -> None:
        """Restore it all."""
        for undo in self._undo:
            undo()
        self._generators.restore()

    def _refusal(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"the code of {type(self._module).__name__} reaches {what}, which a plan could not leave "
            f"as they are. Hold them in the module"
        )

    def _inside(self, it: Any, name: str, is_outside: bool) -> Iterator[tuple[object, str, bool]]:
        """Keep an object's own state; yield what it holds, with names."""
        if isinstance(it, FunctionType):
            yield from self._in_function(it)
            return
        if isinstance(it, type):
            yield from self._in_class(it)
            return
        if isinstance(it, ModuleType):
            return  # a function takes what it names of it
        kind = type(it)
        is_own = self._is_own(kind.__module__)
        if is_own:
            yield kind, "", True
            is_outside = is_outside or any("__deepcopy__" in vars(at) for at in kind.__mro__)
        elif isinstance(it, Iterator) and is_outside and it is not sys.stdout:
            raise self._refusal(f"objects such as {name or '?'} ({kind.__name__})")
        if is_outside:
            self._keep(it)
        if isinstance(it, dict):
            yield from _named(dict.items(cast("dict[Any, Any]", it)), is_outside)
        elif isinstance(it, list | tuple | set | frozenset | deque):
            yield from ((at, "", is_outside) for at in cast("Iterable[object]", it))
        elif isinstance(it, functools.partial):
            held = cast("functools.partial[Any]", it)
            yield from ((at, "", is_outside) for at in (held.func, held.args, held.keywords))
        elif isinstance(it, _CACHED):
            yield cast("Any", it).__wrapped__, "", True
        elif isinstance(it, staticmethod | classmethod):
            yield cast("Any", it).__func__, "", True
        elif isinstance(it, property):
            yield from ((at, "", True) for at in (it.fget, it.fset))
        elif isinstance(it, MethodType):
            yield from ((at, "", is_outside) for at in (it.__self__, it.__func__))
        if is_own or isinstance(it, nn.Module) or kind.__module__ in _PLAIN:
            for at in _slots(kind):
                yield at.__get__(it) if _is_set(at, it) else None, at.__name__, is_outside
            own = _dict_of(it)
            if own is not None:
                if is_outside:
                    self._keep_dict(own)
                yield from _named(own.items(), is_outside)

    def _in_function(self, it: FunctionType) -> Iterator[tuple[object, str, bool]]:
        for cell in it.__closure__ or ():
            if (held := _content(cell)) is not _ABSENT:
                self._undo.append(lambda cell=cell, held=held: _fill(cell, held))
                yield held, it.__name__, True
        if not self._is_own(it.__module__):
            return
        yield from ((at, it.__name__, True) for at in it.__defaults__ or ())
        yield it.__kwdefaults__, it.__name__, True
        yield vars(it), it.__name__, True
        names = _names_in(it.__code__)
        spaces, seen = [it.__globals__], list[object]()
        while spaces:
            space = spaces.pop()
            if any(at is space for at in seen):
                continue
            seen.append(space)
            held = {name: space.get(name, _ABSENT) for name in names}
            self._undo.append(lambda space=space, held=held: _bind(space, held))
            for name, value in held.items():
                if isinstance(value, ModuleType):
                    if self._is_own(value.__name__):
                        spaces.append(vars(value))
                elif value is not _ABSENT:
                    yield value, name, True

    def _in_class(self, it: type) -> Iterator[tuple[object, str, bool]]:
        for kind in it.__mro__:
            if self._is_own(kind.__module__):
                held = {name: at for name, at in vars(kind).items() if not name.startswith("__")}
                self._undo.append(lambda kind=kind, held=held: _set_attributes(kind, held))
                yield from _named(vars(kind).items(), is_outside=True)

    def _is_own(self, name: str | None) -> bool:
        """Return whether a module of that name may be the user's."""
        package = (name or "").partition(".")[0]
        return not _is_installed(package) or (
            package == self._package and package not in _FRAMEWORK
        )

    # -- state of single objects

    def _keep(self, it: Any) -> None:
        if isinstance(it, dict):
            self._keep_dict(cast("dict[Any, Any]", it))
        elif isinstance(it, list | set | deque | bytearray | array):
            members = cast("list[object]", [*it])
            self._undo.append(lambda: _refill(it, members))
        elif isinstance(it, _CACHED):
            misses = it.cache_info().misses
            self._undo.append(lambda: it.cache_info().misses == misses or it.cache_clear())
        elif isinstance(it, np.ndarray):
            if it.flags.writeable:
                self._nbytes += it.nbytes
                if self._nbytes > _MOST_NBYTES:
                    raise self._refusal(f"arrays of more than {_MOST_NBYTES:,} bytes")
                copied = it.copy()
                self._undo.append(lambda: it.__setitem__(..., copied))
        elif self._is_own(type(it).__module__):
            for at in _slots(type(it)):
                value = at.__get__(it) if _is_set(at, it) else _ABSENT
                self._undo.append(lambda at=at, value=value: _set_slot(at, it, value))

    def _keep_dict(self, it: dict[Any, Any]) -> None:
        held = dict(dict.items(it))

        def restore() -> None:
            if not _are_same([*held, *held.values()], [*dict.keys(it), *dict.values(it)]):
                kind: Any = OrderedDict if isinstance(it, OrderedDict) else dict  # a Counter's adds
                kind.clear(it)
                kind.update(it, held)

        self._undo.append(restore)


@functools.cache
def _is_installed(package: str) -> bool:
    """Return whether a package is of the standard library or was installed as a copy."""
    if package in sys.stdlib_module_names or package in _FRAMEWORK:
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    if not isinstance(file, str):
        return False
    path = Path(file)
    return bool({"site-packages", "dist-packages"} & {*path.parts}) or path.is_relative_to(
        sysconfig.get_path("stdlib")
    )


def _names_in(code: CodeType) -> set[str]:
    """Return the names of variables of the file, and of attributes, in a function and those inside."""
    inner = (_names_in(it) for it in code.co_consts if isinstance(it, CodeType))
    return {*code.co_names}.union(*inner)


def _named(
    items: Iterable[tuple[object, object]], is_outside: bool
) -> Iterator[tuple[object, str, bool]]:
    return ((at, key if isinstance(key, str) else "", is_outside) for key, at in [*items])


def _dict_of(it: object) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(it, "__dict__")
    except AttributeError:
        return None


def _slots(kind: type) -> list[MemberDescriptorType]:
    held = (
        at
        for it in kind.__mro__
        if not _is_installed(it.__module__.partition(".")[0])
        for at in vars(it).values()
    )
    return [at for at in held if isinstance(at, MemberDescriptorType)]


def _is_set(slot: MemberDescriptorType, it: object) -> bool:
    try:
        slot.__get__(it)
    except AttributeError:
        return False
    return True


def _set_slot(slot: MemberDescriptorType, it: object, value: object) -> None:
    if value is not _ABSENT:
        slot.__set__(it, value)
    elif _is_set(slot, it):
        slot.__delete__(it)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _ABSENT


def _fill(cell: CellType, value: object) -> None:
    cell.cell_contents = value


def _bind(space: dict[str, Any], held: dict[str, object]) -> None:
    """Set the variables of a file that have changed."""
    for name, value in held.items():
        if value is _ABSENT:
            space.pop(name, None)
        elif space.get(name, _ABSENT) is not value:
            space[name] = value


def _set_attributes(kind: type, held: dict[str, object]) -> None:
    """Set the attributes of a class that have changed."""
    for name in [it for it in vars(kind) if it not in held and not it.startswith("__")]:
        type.__delattr__(kind, name)
    for name, value in held.items():
        if vars(kind).get(name, _ABSENT) is not value:
            type.__setattr__(kind, name, value)


def _refill(it: Any, members: list[object]) -> None:
    if _are_same(members, [*it]):
        return
    if isinstance(it, set):
        it.clear()
        it.update(members)
    else:
        if isinstance(it, deque):
            it.clear()
        else:
            del it[:]
        it.extend(members)


def _are_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
