"""Held state: metrics and random generators that a module, its callbacks and its data hold."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torchmetrics import Metric

_MOST = 1000
"""Entries of a container that is looked into: larger ones are data."""

_MOST_OBJECTS = 10_000
"""Objects to visit, the nearest first: a step does not wait for a walk through all of a program."""

_CONTAINERS = list, tuple, dict, set, frozenset, deque
_VALUES = bool, int, float, complex, str, bytes, type(None), torch.Tensor, np.ndarray, torch.dtype
_OPAQUE = type, ModuleType, FunctionType

_PACKAGES = {
    *("torch", "lightning", "lightning_fabric", "pytorch_lightning", "shardeddp"),
    *("rich", "tqdm", "logging", "threading"),
}
"""Packages whose objects, other than modules, have neither metrics nor generators of a step."""

_OF_MODULES = {*vars(nn.Module())}
"""Attributes that every module has."""


class HeldState:
    """States of metrics and random generators at one moment, to be restored.

    They are looked for in the attributes of modules and of objects of the user's classes, and in
    containers of up to 1,000 entries. Of a metric all attributes are kept but modules and objects
    of further classes.

    Args:
        roots: Objects that hold them, directly or through others.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._undo: list[Callable[[], object]] = []
        # Tensors inside of containers, which would be copies of all batches of an epoch.
        self._kept: list[tuple[torch.Tensor, int, str]] = []
        for it in _reachable(roots):
            if isinstance(it, Metric):
                self._keep_metric(it)
            else:
                self._keep_generator(it)

    def restore(self) -> None:
        """Restore the states; may be called several times."""
        for undo in self._undo:
            undo()

    def lost(self) -> str:
        """Return the name of an attribute whose state cannot be restored; empty: there is none."""
        return next((name for it, version, name in self._kept if it._version != version), "")

    def _keep_generator(self, it: object) -> None:
        if isinstance(it, torch.Generator):
            state = it.get_state()
            self._undo.append(lambda: it.set_state(state))
        elif isinstance(it, random.Random) and not isinstance(it, random.SystemRandom):
            of_python = it.getstate()
            self._undo.append(lambda: it.setstate(of_python))
        elif isinstance(it, np.random.RandomState):
            legacy = it.get_state()
            self._undo.append(lambda: it.set_state(legacy))
        elif isinstance(it, np.random.Generator | np.random.BitGenerator):
            bits = it.bit_generator if isinstance(it, np.random.Generator) else it
            of_numpy = bits.state
            self._undo.append(lambda: setattr(bits, "state", of_numpy))

    def _keep_metric(self, metric: Metric) -> None:
        held = vars(metric)
        names = {*held}
        state = {name: self._copied(it, metric, name) for name, it in held.items() if _is_own(name)}

        def restore() -> None:
            for name in held.keys() - names:  # of the attempt
                del held[name]
            held.update((name, _copy(it)) for name, it in state.items())

        self._undo.append(restore)

    def _copied(self, value: object, metric: Metric, name: str) -> object:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_inference():  # without a version
                return tensor.clone()
            self._kept.append((tensor, tensor._version, f"{type(metric).__name__}.{name}"))
            return tensor

        return _copy(value) if isinstance(value, torch.Tensor) else _copy(value, keep)


def _is_own(name: str) -> bool:
    return name not in _OF_MODULES and name not in ("_defaults", "_reductions")


def _copy(value: Any, keep: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Return a copy of tensors, arrays, containers and records; any other object itself.

    Args:
        value: What to copy.
        keep: Function of the tensors inside of containers; None: those stay the same objects.
    """

    def inside(it: Any) -> Any:
        if isinstance(it, torch.Tensor):
            return it if keep is None else keep(it)
        return _copy(it, keep)

    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return cast("object", value.copy())
    if type(value) in (list, set):
        return type(value)(map(inside, value))
    if isinstance(value, deque):
        return deque(map(inside, value), value.maxlen)  # type: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        made = cast("dict[Any, Any]", value).copy()
        for key, it in made.items():
            made[key] = inside(it)  # not update(): a Counter adds
        return made
    if type(value) is tuple:
        return tuple(map(inside, value))
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and hasattr(value, "__dict__")):
        record: Any = copy.copy(value)  # type: ignore[reportUnknownArgumentType]
        vars(record).update((key, inside(it)) for key, it in vars(value).items())
        return record
    return value


def _reachable(roots: Iterable[object]) -> Iterator[object]:
    """Yield objects that roots hold, once each, the nearest first."""
    left = deque(roots)
    seen: dict[int, object] = {}  # with the objects, so that identities stay theirs
    while left and len(seen) < _MOST_OBJECTS:
        it = left.popleft()
        if id(it) in seen:
            continue
        seen[id(it)] = it
        yield it
        found = _inside(it)
        # By exact type first, for speed: most are.
        left += (at for at in found if type(at) not in _VALUES and not isinstance(at, _VALUES))


def _inside(it: Any) -> Iterable[object]:
    if isinstance(it, _CONTAINERS):
        held = cast("Any", it)
        if len(held) > _MOST:
            return ()
        return held.values() if isinstance(it, dict) else held
    if isinstance(it, nn.Module):
        own = (at for name, at in vars(it).items() if name not in _OF_MODULES)
        return (*own, *it._modules.values())
    if isinstance(it, _OPAQUE) or type(it).__module__.partition(".")[0] in _PACKAGES:
        return ()
    try:
        return [*object.__getattribute__(it, "__dict__").values()]
    except AttributeError:  # slots
        return ()
