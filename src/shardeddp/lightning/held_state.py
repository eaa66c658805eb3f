"""Held state: what a module, its callbacks and its data hold, as it was at one moment."""

from __future__ import annotations

import operator
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from functools import partial
from itertools import chain, starmap, zip_longest
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from shardeddp.lightning.api import LightningModule, Logger, Strategy, Trainer
from shardeddp.tensor.operations import overlaps_itself

_MOST = 1000
"""Entries of a container that is looked into: larger ones are data."""

_MOST_COPIED = 100_000
"""Entries of a container that is copied."""

_MOST_BYTES = 64 * 1024
"""Size of tensors and arrays outside of buffers and metrics that are copied."""

_MOST_COPIES = 200
"""Tensors in containers that are copied: an epoch's batches take long, and much memory."""

_MOST_OBJECTS = 10_000
"""Objects to visit beside modules: a step does not wait for a walk through all of a program."""

_VALUES = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_CONTAINERS = dict, list, set, deque, tuple, frozenset, bytearray, array
_CALLABLE = MethodType, BuiltinMethodType, FunctionType, partial
_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.RandomState,
    np.random.Generator,
    np.random.BitGenerator,
)

_PACKAGES = {
    *("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "shardeddp"),
    *("rich", "tqdm", "logging", "pandas", "pyarrow", "builtins", "abc", "enum", "weakref"),
}
"""Packages whose objects, other than modules, have no state of a step."""

_LIVE = {
    *("_thread", "threading", "queue", "_queue", "socket", "_io", "multiprocessing", "asyncio"),
    *("concurrent", "subprocess", "mmap"),
}
"""Packages of what other threads and processes use: its holders are not set back."""

_NOT_OF_STEPS = {*vars(LightningModule())} - {"training"} | {"_defaults", "_reductions", "forward"}
"""Attributes of every module and metric; the Trainer and the engine look after these."""

_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_FLAGS_OF_HOOKS = {
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs"),
    "_forward_hooks_always_called",
}
"""Attributes of modules by key of hook, which handles remove together."""

_Place = tuple[object, str]
"""Object and its attribute that hold something, directly or in containers."""


class HeldState:
    """State of objects and of all that they hold, at one moment, to be restored.

    Restored are random generators, buffers, the mode, the attributes and the hooks of modules,
    attributes of other objects, cells of closures, attributes of classes, containers, options of
    optimizers, and schedulers; tensors and arrays if they are buffers or attributes of a metric, or
    of at most 64 KiB, with the gradients of those that are no parameters. Changes of other tensors
    are found out if torch counts them. Neither is so for globals of Python modules, iterators,
    states of extensions, larger arrays, what containers of more than 1,000 entries hold, and
    attributes of objects with a lock, a thread or a file.

    Args:
        roots: Objects that hold it, directly or through others.
        managed: Tensors to be left alone.
    """

    def __init__(self, roots: Iterable[object], managed: Iterable[object] = ()) -> None:
        self._undo: list[Callable[[], object]] = []
        # Tensors without a copy, which would be one of all batches of an epoch.
        self._kept: list[tuple[torch.Tensor, tuple[object, ...], _Place]] = []
        self._copied: list[_CopiedTensor] = []
        # Containers that are not looked into, with their length where they are not copied.
        self._large: list[tuple[Sized, int | None, _Place]] = []
        self._copies_left = _MOST_COPIES
        self._requires_grad: list[tuple[torch.Tensor, bool]] = []
        self._hooked: list[dict[str, Any]] = []  # attributes of modules
        self._hooks: dict[int, dict[int, Any]] = {}  # by identity; few modules have any
        # With the objects, so that identities stay theirs.
        self._seen: dict[int, object] = {id(it): it for it in managed}
        self._keepers: dict[type, Callable[[Any, _Place], object] | None] = {}
        self._modules: deque[nn.Module] = deque()
        self._others: deque[tuple[object, _Place]] = deque()
        for it in roots:
            self._find(it, (it, ""))
        visited = 0
        while self._modules or (self._others and visited < _MOST_OBJECTS):
            if self._modules:
                self._keep_module(self._modules.popleft())
            else:
                it, place = self._others.popleft()
                self._keepers[type(it)](it, place)  # type: ignore[misc]
                visited += 1
        self._is_cut_off = bool(self._others)
        self._others.clear()
        self._seen.clear()
        self._keepers.clear()

    def restore(self) -> None:
        """Restore the state; may be called several times."""
        for held in self._hooked:
            for hooks in map(held.__getitem__, _HOOKS):
                set_hooks(hooks, self._hooks.get(id(hooks), {}))
        for undo in self._undo:
            undo()
        for copied in self._copied:
            copied.restore()
        for parameter, requires_grad in self._requires_grad:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)

    def lost(self) -> str:
        """Return the name of an attribute whose tensors cannot be restored; empty: there is none."""
        places = [place for it, marks, place in self._kept if _marks(it) != marks]
        places += [it.place for it in self._copied if it.is_lost()]
        return _name(places[0]) if places else ""

    def obstacle(self) -> str:
        """Return why the state cannot be restored; empty: it can."""
        if name := self.lost():
            return f"it has changed a tensor inside of {name} in place, of which there is no copy"
        if self._is_cut_off:
            return (
                f"module, callbacks and datamodule hold more than {_MOST_OBJECTS:,} objects, of which "
                f"not all have been looked at"
            )
        for held, length, place in self._large:
            if length is not None and len(held) != length:
                return f"it has changed {_name(place)}, of {length:,} entries, which are not copied"
            values: Any = held.values() if isinstance(held, dict) else held  # type: ignore[reportUnknownMemberType]
            for kind in {*map(type, values)}:
                if issubclass(kind, (nn.Module, *_GENERATORS)):
                    return (
                        f"{_name(place)} holds {kind.__name__} objects in a container of more than "
                        f"{_MOST:,} entries, which is not looked into"
                    )
        return ""

    # -- the walk

    def _find(self, it: Any, place: _Place, *, is_attribute: bool = False) -> None:
        kind = type(it)
        if kind in _VALUES or id(it) in self._seen:
            return
        if isinstance(it, torch.Tensor):
            self._seen[id(it)] = it
            is_small = it.numel() * it.element_size() <= _MOST_BYTES
            if is_attribute:
                is_small |= isinstance(place[0], Metric)
            elif is_small:
                is_small = self._copies_left > 0 and not isinstance(it, nn.Parameter)
                self._copies_left -= is_small
            self._keep_tensor(it, place, copy=is_small)
            return
        if kind not in self._keepers:
            self._keepers[kind] = self._keeper(kind)
        if self._keepers[kind] is None:
            return
        self._seen[id(it)] = it
        if isinstance(it, nn.Module):  # before the data around them
            self._modules.append(it)
        else:
            self._others.append((it, place))

    def _keeper(self, kind: type) -> Callable[[Any, _Place], object] | None:
        """Return the method for objects of a class; None: they have no state."""
        for its, keeper in _KEEPERS.items():
            if issubclass(kind, its):
                if keeper is None:
                    return None
                is_plain = _package(kind) in {*_PACKAGES, "collections"}
                if is_plain or not issubclass(kind, _CONTAINERS):
                    return partial(keeper, self)
                self._keep_class(kind)
                return partial(self._keep_subclass, partial(keeper, self))
        if _package(kind) in _PACKAGES | _LIVE:
            return None
        self._keep_class(kind)
        return self._keep_object

    def _keep_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            for name, buffer in module.named_buffers():
                self._find_buffer(buffer, (module, name))
            return
        if id(type(module)) not in self._seen:
            self._keep_class(type(module))
        self._keep_attributes(module, vars(module))
        for held in (module._modules, module._buffers):
            self._undo.append(partial(_set_dict, held, [*held.items()]))
        self._keep_hooks(module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self._find_buffer(buffer, (module, name))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._requires_grad.append((parameter, parameter.requires_grad))
                if id(parameter) not in self._seen:
                    self._find(parameter, (module, name))
        for child in module._modules.values():
            self._find(child, (module, ""))

    def _keep_hooks(self, module: nn.Module) -> None:
        held = vars(module)
        self._hooked.append(held)
        for name in _HOOKS:
            if hooks := held[name]:
                self._hooks[id(hooks)] = {**hooks}
                for hook in hooks.values():
                    if not _is_hook_of_engine(hook):
                        self._find(hook, (module, name))
                for flags in map(held.__getitem__, _FLAGS_OF_HOOKS):
                    self._undo.append(partial(flags.update, {**flags}))

    def _find_buffer(self, buffer: torch.Tensor, place: _Place) -> None:
        if id(buffer) not in self._seen:
            self._seen[id(buffer)] = buffer
            self._keep_tensor(buffer, place, copy=True)

    def _keep_attributes(self, owner: object, held: dict[str, Any]) -> None:
        former = {name: it for name, it in held.items() if name not in _NOT_OF_STEPS}
        self._undo.append(partial(_set_attributes, held, former))
        for name, it in former.items():
            if type(it) not in _VALUES and id(it) not in self._seen:
                self._find(it, (owner, name), is_attribute=True)

    def _keep_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if _package(each) in _PACKAGES or id(each) in self._seen:
                continue
            self._seen[id(each)] = each
            former = {name: it for name, it in vars(each).items() if _is_of_class(name, it)}
            self._undo.append(partial(_set_class, each, former))
            for name, it in former.items():
                self._find(it, (each, name), is_attribute=True)

    def _keep_object(self, it: object, place: _Place) -> None:
        held: dict[str, Any] = getattr(it, "__dict__", {})
        if any(_package(type(at)) in _LIVE for at in held.values()):
            for name, at in held.items():
                if isinstance(at, (nn.Module, *_GENERATORS)):
                    self._find(at, (it, name))
        elif hasattr(it, "__dict__"):
            self._keep_attributes(it, held)
        for each in type(it).__mro__:
            for name, slot in vars(each).items() if "__slots__" in vars(each) else ():
                if isinstance(slot, MemberDescriptorType):
                    self._keep_slot(it, name, slot)

    def _keep_subclass(
        self, keeper: Callable[[Any, _Place], object], it: Any, place: _Place
    ) -> None:
        """Keep a container of a class that may have attributes, too."""
        keeper(it, place)
        self._keep_object(it, place)

    def _keep_slot(self, it: object, name: str, slot: Any) -> None:
        try:
            value = slot.__get__(it)
        except AttributeError:
            self._undo.append(partial(_delete_slot, it, slot))
            return
        if _package(type(value)) not in _LIVE:
            self._undo.append(lambda: slot.__set__(it, value))
        self._find(value, (it, name), is_attribute=True)

    def _keep_cell(self, cell: CellType, place: _Place) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing yet
            return
        self._undo.append(lambda: _is_ours(value) or setattr(cell, "cell_contents", value))
        self._find(value, place)

    def _keep_callable(self, it: Any, place: _Place) -> None:
        if isinstance(it, partial):
            inside: tuple[Any, ...] = it.func, it.args, it.keywords
        elif isinstance(it, FunctionType):
            is_foreign = (it.__module__ or "").partition(".")[0] in _PACKAGES
            inside = () if is_foreign else (it.__closure__, it.__defaults__, it.__kwdefaults__)
        else:
            inside = it.__self__, getattr(it, "__func__", None)
        for at in inside:
            self._find(at, place)

    # -- containers

    def _look_into(self, held: Any, entries: Iterable[object], place: _Place) -> bool:
        """Find what a container holds; return whether it is small enough to be copied."""
        if len(held) > _MOST:
            is_copied = len(held) <= _MOST_COPIED
            self._large.append((held, None if is_copied else len(held), place))
            return is_copied
        for it in entries:
            if type(it) not in _VALUES:
                self._find(it, place)
        return True

    def _keep_dict(self, held: dict[Any, Any], place: _Place) -> None:
        if self._look_into(held, held.values(), place):
            self._undo.append(partial(_set_dict, held, [*held.items()]))

    def _keep_sequence(self, held: Any, place: _Place) -> None:
        if self._look_into(held, held, place):
            self._undo.append(partial(_set_entries, held, [*held]))

    def _keep_tuple(self, held: Any, place: _Place) -> None:
        self._look_into(held, held, place)

    def _keep_elements(self, held: Any, place: _Place) -> None:
        """Keep a ``bytearray`` or an ``array.array``."""
        if len(held) > _MOST_COPIED:
            self._large.append((held, len(held), place))
            return
        former = held[:]
        self._undo.append(lambda: held.__setitem__(slice(None), former))

    # -- arrays, tensors and generators

    def _keep_array(self, array: np.ndarray[Any, Any], place: _Place) -> None:
        is_small = isinstance(place[0], Metric) or array.nbytes <= _MOST_BYTES
        if not (is_small and array.flags.writeable):
            return
        former = array.copy()

        def restore() -> None:
            if array.shape != former.shape:
                array.resize(former.shape, refcheck=False)
            array[...] = former

        self._undo.append(restore)

    def _keep_tensor(self, it: torch.Tensor, place: _Place, *, copy: bool) -> None:
        if _is_ours(it):
            return
        values = _own_elements(it.detach()) if copy else None
        if values is not None:
            self._copied.append(_CopiedTensor(it, values, place))
        elif not it.is_inference():  # without a version
            self._kept.append((it, _marks(it), place))
        if it.requires_grad and it.is_leaf and not isinstance(it, nn.Parameter):
            self._keep_gradient(it, place)

    def _keep_gradient(self, it: torch.Tensor, place: _Place) -> None:
        """Keep the gradient of a leaf, to which a backward that fails has added."""
        gradient = it.grad
        self._undo.append(lambda: it.grad is gradient or setattr(it, "grad", gradient))
        if gradient is not None:
            self._find(gradient, place)

    # -- optimizers

    def _keep_optimizer(self, optimizer: Optimizer, place: _Place) -> None:
        """Keep the options of an optimizer; the engine looks after its parameters and states."""
        former = [_options(group) for group in optimizer.param_groups]
        self._undo.append(lambda: _set_options(optimizer, former))
        for at in chain(*(options.values() for options in former)):
            self._find(at, (optimizer, "param_groups"), is_attribute=True)

    def _keep_generator(self, it: Any, place: _Place) -> None:
        if isinstance(it, torch.Generator):
            state = it.get_state()
            self._undo.append(lambda: it.set_state(state))
        elif isinstance(it, random.SystemRandom):
            pass
        elif isinstance(it, random.Random):
            of_python = it.getstate()
            self._undo.append(lambda: it.setstate(of_python))
        elif isinstance(it, np.random.RandomState):
            legacy = it.get_state()
            self._undo.append(lambda: it.set_state(legacy))
        else:
            bits = it.bit_generator if isinstance(it, np.random.Generator) else it
            of_numpy = bits.state
            self._undo.append(lambda: setattr(bits, "state", of_numpy))


_KEEPERS: dict[type, Callable[[HeldState, Any, _Place], object] | None] = {
    **dict.fromkeys((type, ModuleType, Trainer, Strategy, Logger)),
    Optimizer: HeldState._keep_optimizer,
    LRScheduler: HeldState._keep_object,
    nn.Module: lambda held, it, _: held._keep_module(it),
    **dict.fromkeys(_GENERATORS, HeldState._keep_generator),
    np.ndarray: HeldState._keep_array,
    dict: HeldState._keep_dict,
    **dict.fromkeys((list, set, deque), HeldState._keep_sequence),
    **dict.fromkeys((tuple, frozenset), HeldState._keep_tuple),
    **dict.fromkeys((bytearray, array), HeldState._keep_elements),
    **dict.fromkeys(_CALLABLE, HeldState._keep_callable),
    CellType: HeldState._keep_cell,
}
"""Methods by class, the first of which decides; None: objects without state of a step."""


class _CopiedTensor:
    """A tensor with a copy of its elements."""

    def __init__(self, tensor: torch.Tensor, elements: torch.Tensor, place: _Place) -> None:
        self.tensor, self.place = tensor, place
        self._alias = tensor.detach()  # keeps shape and storage if they change
        self._elements, self._copy = elements, elements.clone()

    def is_lost(self) -> bool:
        """Return whether its memory is gone."""
        if not _is_plain(self.tensor):
            return self.tensor.shape != self._alias.shape
        it = self._alias
        numel = 1 + sum((n - 1) * by for n, by in zip(it.shape, it.stride(), strict=True))
        needed = (it.storage_offset() + numel) * it.element_size() if it.numel() else 0
        return it.untyped_storage().nbytes() < needed

    @torch.no_grad()
    def restore(self) -> None:
        with torch.inference_mode(self.tensor.is_inference()):
            if _is_plain(self.tensor) and not self.tensor.is_set_to(self._alias):
                self.tensor.data = self._alias
            self._elements.copy_(self._copy)


def _own_elements(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the elements that have memory of their own; None: there is no such view."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    if tensor.numel() and overlaps_itself(tensor):  # expanded
        return tensor[tuple(slice(None) if by else slice(1) for by in tensor.stride())]
    return tensor


def _marks(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what changes with the elements of a tensor."""
    at = tensor.data_ptr() if _is_plain(tensor) else 0
    return tensor._version, at, tensor.shape


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and type(tensor) in (torch.Tensor, nn.Parameter)


# -- how state is set back


def _set_attributes(held: dict[str, Any], former: dict[str, Any]) -> None:
    for name in held.keys() - former.keys() - _NOT_OF_STEPS:  # of the attempt
        if not _is_ours(held[name]):
            del held[name]
    for name, it in former.items():
        if (name not in held or held[name] is not it) and not _is_ours(it):
            held[name] = it


def _set_class(kind: type, former: dict[str, Any]) -> None:
    for name, it in [*vars(kind).items()]:
        if _is_of_class(name, it) and name not in former:
            delattr(kind, name)
    for name, it in former.items():
        if vars(kind).get(name, kind) is not it:
            setattr(kind, name, it)


def set_hooks(present: dict[int, Any], former: dict[int, Any]) -> None:
    """Set back the hooks that users have set; the engine changes its own when it shards deeper."""
    for key in present.keys() - former.keys():
        if not _is_hook_of_engine(present[key]):
            del present[key]
    of_users = {key: hook for key, hook in former.items() if not _is_hook_of_engine(hook)}
    if not of_users.keys() <= present.keys():
        for key, hook in of_users.items():  # in their order
            present.pop(key, None)
            present[key] = hook


def _is_hook_of_engine(hook: Any) -> bool:
    if isinstance(hook, partial):
        hook = hook.func
    return _is_ours(hook) or _is_ours(getattr(hook, "__self__", None))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: it for name, it in group.items() if name != "params"}


def _set_options(optimizer: Optimizer, former: list[dict[str, Any]]) -> None:
    for group, options in zip(optimizer.param_groups, former, strict=False):
        for name in _options(group).keys() - options.keys():
            del group[name]
        group.update(options)


def _delete_slot(it: object, slot: Any) -> None:
    with suppress(AttributeError):
        slot.__delete__(it)


def _set_dict(held: dict[Any, Any], former: list[tuple[Any, Any]]) -> None:
    present = [*held.items()]
    if not _are_same(chain(*present), chain(*former)):
        held.clear()
        for key, it in former:
            held[key] = it


def _set_entries(held: Any, former: list[object]) -> None:
    if not _are_same(held, former):
        held.clear()
        held.update(former) if isinstance(held, set) else held.extend(former)


def _are_same(present: Iterable[object], former: Iterable[object]) -> bool:
    missing = object()
    pairs = zip_longest(present, former, fillvalue=missing)
    return all(starmap(operator.is_, pairs))


def _is_ours(it: object) -> bool:
    """Return whether it belongs to the engine or the Trainer, which change it themselves."""
    named = it if isinstance(it, MethodType | FunctionType) else type(it)
    return (named.__module__ or "").partition(".")[0] in ("shardeddp", "lightning")


def _is_of_class(name: str, it: object) -> bool:
    is_state = not hasattr(type(it), "__get__") and not isinstance(it, type)
    return is_state and not name.startswith("__") and name != "_abc_impl"


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _name(place: _Place) -> str:
    owner, attribute = place
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__name__}.{attribute}" if attribute else kind.__name__
