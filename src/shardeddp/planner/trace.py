"""Trace: work and saved tensors of a micro-batch of a module, by unit, without memory or weights."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from shardeddp.config import ActivationCheckpointing, MixedPrecision
from shardeddp.engine.activation_checkpointing import recomputed_modules
from shardeddp.engine.buffers import BufferBroadcast
from shardeddp.engine.dtypes import cast_at_boundaries, with_dtypes
from shardeddp.engine.hooks import find_tensors
from shardeddp.errors import ConfigurationError, UsageError, first_three
from shardeddp.planner.axes import WHOLE, ModelAxes
from shardeddp.planner.backward import (
    LiveStorages,
    MemoryRecord,
    TensorSpec,
    UnitMemory,
    root_of,
    run_backward,
    with_form,
)
from shardeddp.planner.collectives import Exchange, UnitUsage
from shardeddp.planner.device_functions import (
    DeviceFunctions,
    attention_of_devices,
    flex_attention_on_host,
)
from shardeddp.planner.source import replacement
from shardeddp.planner.values import Values, is_grouped
from shardeddp.planner.work import ModelProfile, UnitWork
from shardeddp.report import human_bytes
from shardeddp.tensor.module_hooks import ModuleHook
from shardeddp.torch_private import (
    DispatchMode,
    FakeTensorMode,
    HigherOrderOperator,
    pytree,
    storage_of,
)
from shardeddp.wrap import Policy, build_units, require_parameters
from shardeddp.wrap.kept_operations import is_kept_by
from shardeddp.wrap.tree import ParameterSpec, UnitSpec

# -- recording of operations


@dataclass
class _Recorder:
    """Recorder of operations and saved tensors in the innermost running unit."""

    work: list[UnitWork]
    head: UnitWork
    free: set[int]  # storages of parameters, and of their casts and views
    is_kept: Callable[..., bool]
    """Whether selective checkpointing keeps the results of an operation and its arguments."""
    inside: list[int] = field(default_factory=lambda: [0])
    seen: set[int] = field(default_factory=set[int])
    inputs: set[int] = field(default_factory=set[int])  # storages of units' inputs
    known: list[StorageWeakRef] = field(default_factory=list[StorageWeakRef])
    """Storages in the sets above: no other one gets their ids, and their memory is not kept."""
    live: LiveStorages = field(default_factory=LiveStorages)
    memory: list[UnitMemory] = field(default_factory=list[UnitMemory])
    largest: list[int] = field(default_factory=list[int])
    """Bytes of the largest result of each unit, and of the root after the last one."""
    anchors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Ends of backwards at the results of units that have run."""
    after_units: bool = False
    exchanges: list[list[Exchange]] = field(default_factory=list[list[Exchange]])
    unsaved: list[Exchange] = field(default_factory=list[Exchange])
    """Exchanges of the running unit since its last saved tensor, which no recomputation repeats."""
    values: Values = field(default_factory=Values)
    is_backward: bool = False
    """True while exchanges of the backward are recorded."""
    is_paused: bool = False
    """True while a backward runs, of which memory and FLOPs alone are recorded."""
    visits: list[int] = field(default_factory=list[int])
    """Unit of each forward, in their order; see :class:`ForwardRecord` of the engine."""
    with_backward: set[int] = field(default_factory=lambda: {0})
    """Units with results that require a gradient."""
    trained: list[UnitWork] = field(default_factory=list[UnitWork])
    """Matmuls and attention with a backward, and kernels with an operand that requires a gradient."""
    trained_head: UnitWork = field(default_factory=UnitWork)
    """The same of the root after the last unit."""
    backward: UnitWork = field(default_factory=UnitWork)
    """Matmuls of the last backward that was run, half of their FLOPs; and its attention."""

    def __post_init__(self) -> None:
        self.exchanges = [[] for _ in self.work]
        self.trained = [UnitWork() for _ in self.work]
        self.memory = [UnitMemory() for _ in self.work]
        self.largest = [0 for _ in self.work]

    @contextmanager
    def rehearsal(self) -> Generator[None]:
        """Record only exchanges of the backward; its other work is derived from the forward."""
        self.is_backward = True
        try:
            yield
        finally:
            self.is_backward = False

    def bind(self, unit: int, spec: ParameterSpec, parameter: nn.Parameter) -> None:
        """Replace a parameter in its modules by its wrapped form, as the engine does."""
        assert spec.distribution is not None
        self.inside.append(unit)
        made: Any = spec.distribution.wrap(parameter.to(spec.param_dtype))  # type: ignore[arg-type]
        self.inside.pop()
        for module, name in spec.registrations:
            module._parameters[name] = made

    def targets(self) -> list[UnitWork]:
        own = self.work[self.inside[-1]]
        return [own, self.head] if self.after_units and self.inside[-1] == 0 else [own]

    def trained_targets(self) -> list[UnitWork]:
        own = self.trained[self.inside[-1]]
        return [own, self.trained_head] if self.after_units and self.inside[-1] == 0 else [own]

    def run_forward(self, index: int, forward: Callable[[], Any]) -> tuple[Any, int]:
        """Run the forward of a unit; return its results and the bytes that it allocated at most."""
        self.visits.append(index)
        around, self.unsaved = self.unsaved, []
        self.inside.append(index)
        try:
            return self.live.measure(forward)
        finally:
            self.inside.pop()
            self.unsaved = around

    def end_forward(
        self,
        index: int,
        made: int,
        root: torch.Tensor | None,
        inputs: Any,
        parameters: Sequence[tuple[torch.Tensor, torch.dtype]],
    ) -> None:
        """Run the backward of a unit whose forward has allocated so many bytes at most."""
        timeline = self.run_backward(index, root, inputs, parameters)
        self.memory[index] = UnitMemory(forward_nbytes=made, backward=timeline)
        if root is not None:
            self.with_backward.add(index)

    def repeat(self, first: _FirstRun, places: Sequence[int]) -> None:
        """Repeat the records of a run of equal units, in the units at these places."""
        for at, place in enumerate(places):
            self.work[place].add(first.works[at])
            self.trained[place].add(first.trained[at])
            self.exchanges[place] += first.exchanges[at]
            self.memory[place] = first.memory[at]
            if first.has_backward[at]:
                self.with_backward.add(place)
        self.visits += [places[at] for at in first.visits]

    def end_unit(self) -> None:
        """Let the root's head begin: it is what follows the last unit that has run."""
        self.after_units, self.largest[0] = True, 0
        self.head, self.trained_head = UnitWork(), UnitWork()

    def end_step(
        self, root: torch.Tensor | None, parameters: Sequence[tuple[torch.Tensor, torch.dtype]]
    ) -> None:
        """Run the backward of the loss, and note what it has computed: that of the head, or all."""
        head = self.run_backward(0, root, self.anchors, parameters)
        self.memory[0] = UnitMemory(forward_nbytes=0, backward=head)
        done, before = UnitWork(), UnitWork()
        if self.after_units:
            for rest, whole, head in (
                (done, self.work[0], self.head),
                (before, self.trained[0], self.trained_head),
            ):
                rest.add(whole)
                rest.add(head, times=-1)
        self.note_trained(self.work[0], done, self.trained[0], before)

    def trained_works(self) -> list[UnitWork]:
        """Return the part of each unit's work that has a backward; after the backward of the loss.

        Other kernels than matmuls and attention have one in units with a backward, and in the root
        before them if any of them has.
        """
        found: list[UnitWork] = []
        for unit, (work, trained) in enumerate(zip(self.work, self.trained, strict=True)):
            rest = trained.kernels > self.trained_head.kernels if unit == 0 else True
            others = (work if rest else self.head) if unit in self.with_backward else UnitWork()
            found.append(
                replace(
                    others,
                    matmul_flops=trained.matmul_flops,
                    attention_flops=trained.attention_flops,
                )
            )
        return found

    def add_inputs(self, work: UnitWork, values: Any) -> None:
        """Count the tensors among values that are no inputs of earlier units."""
        for it in find_tensors(values):
            if storage_of(it) not in self.inputs:
                self.inputs.add(storage_of(it))
                self.known.append(StorageWeakRef(it.untyped_storage()))
                work.input_nbytes += it.nbytes
                if it.requires_grad and not it.is_leaf:
                    work.activation_input_nbytes += it.nbytes

    def run_backward(
        self,
        index: int,
        root: torch.Tensor | None,
        inputs: Any,
        parameters: Sequence[tuple[torch.Tensor, torch.dtype]],
    ) -> MemoryRecord:
        """Run the backward of a unit, or of the loss (0), for its memory.

        Estimate it if it fails: it needs values, or reads a result that a unit has not returned.
        """
        self.backward = UnitWork()
        ends = [*find_tensors(inputs)]
        if root is None:
            return MemoryRecord()
        try:
            with self.paused(), torch.autocast("cpu", enabled=False):
                return run_backward(root, self.live, ends, parameters)
        except Exception:  # noqa: BLE001 - the module's own code
            self.backward = UnitWork(matmul_flops=math.inf, attention_flops=math.inf)
            own = sum(it.numel() * dtype.itemsize for it, dtype in parameters if it.requires_grad)
            return MemoryRecord(activations=[2 * self.largest[index]], gradients=[own])

    @contextmanager
    def paused(self) -> Generator[None]:
        """Surround operations that are not recorded."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def note_trained(
        self, work: UnitWork, done: UnitWork, trained: UnitWork, before: UnitWork
    ) -> None:
        """Count what the last backward has computed if the forward's operands did not tell it.

        Functions with their own backward, and checkpointing that is reentrant, have a forward
        without gradients. ``done`` and ``before`` are ``work`` and ``trained`` at its start. What
        the model itself computes again is no part of the backward.
        """
        for name in ("matmul_flops", "attention_flops"):
            least = vars(before)[name] + vars(self.backward)[name]
            most = vars(before)[name] + vars(work)[name] - vars(done)[name]
            setattr(trained, name, max(vars(trained)[name], min(least, most)))

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_paused:
            return tensor
        for it in self.unsaved:
            it.is_redone = True
        self.unsaved.clear()
        key = storage_of(tensor)
        if key not in self.seen and key not in self.free:
            self.seen.add(key)
            self.known.append(StorageWeakRef(tensor.untyped_storage()))
            for work in self.targets():
                work.saved_nbytes += tensor.untyped_storage().nbytes()
        return tensor

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        results = [it for it in pytree.tree_leaves(out) if isinstance(it, torch.Tensor)]
        operands = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
        if not results or isinstance(func, HigherOrderOperator):
            return
        self.live.add(it for it in results if storage_of(it) not in self.free)
        name = func.name().partition("::")[2].partition(".")[0]
        if self.is_paused:
            is_backward = name.endswith("backward")
            if "scaled_dot_product" in name:
                if is_backward:
                    self.backward.attention_flops += _flops(func, args, kwargs, out)
            else:
                self.backward.matmul_flops += _flops(func, args, kwargs, out) / 2
            return
        if func.namespace == "shardeddp":
            self.exchange(func.name(), operands[0], results[0])
        if self.is_backward:
            return
        if operands and all(storage_of(it) in self.free for it in operands):
            self.free.update(map(storage_of, results))  # casts and views of parameters
            self.known += [StorageWeakRef(it.untyped_storage()) for it in results]
            return
        if storage_of(results[0]) in {storage_of(it) for it in operands} and func.is_view:
            return
        nbytes = sum(it.nbytes for it in (*operands, *results))
        index = self.inside[-1]
        if index or self.after_units:
            self.largest[index] = max(self.largest[index], *(it.nbytes for it in results))
        done, flops = UnitWork(kernels=1), _flops(func, args, kwargs, out)
        wanted = [it.requires_grad for it in operands] if torch.is_grad_enabled() else [False]
        trained = UnitWork(kernels=int(any(wanted)))
        if "scaled_dot_product" in name:
            done.attention_flops = flops
            trained.attention_flops = flops * any(wanted)
        elif _is_matmul(func, operands):
            done.matmul_flops, done.matmul_nbytes = flops, nbytes
            # Each of two factors gets its gradient by as many FLOPs; operands before them are added.
            factors = wanted[1:3] if _adds(name) else wanted[:2]
            trained.matmul_flops = flops * sum(factors) / 2
        else:
            done.moved_nbytes = nbytes
        if self.is_kept(func, *args, **kwargs):
            done.costly_nbytes = sum(it.nbytes for it in results)
            done.kept_matmul_flops = done.matmul_flops
            done.kept_attention_flops = done.attention_flops
            done.kept_moved_nbytes = done.moved_nbytes
        for work in self.targets():
            work.add(done)
        for work in self.trained_targets():
            work.add(trained)

    def exchange(self, name: str, given: torch.Tensor, made: torch.Tensor) -> None:
        kind: Any = name.partition("::")[2]
        found = Exchange(kind=kind, nbytes=max(given.nbytes, made.nbytes))
        self.exchanges[self.inside[-1]].append(found)
        if not self.is_backward:
            self.unsaved.append(found)


def _is_matmul(func: Any, operands: Sequence[torch.Tensor]) -> bool:
    return func.overloadpacket in flop_registry or is_grouped(func, operands)


def _adds(name: str) -> bool:
    """Return whether the first operand of a matmul is added to the product of the next two."""
    return name.lstrip("_").startswith(("addmm", "baddbmm", "addbmm"))


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of a matmul, or those of the forward of fused attention; 0 for all others."""
    operands = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
    if "scaled_dot_product" in func.name():
        flags = (*args[4:], kwargs.get("is_causal"))  # dropout before it is a number
        query, key = operands[1:3] if "backward" in func.name() else operands[:2]
        causal = 0.5 if any(flag is True for flag in flags) else 1.0
        return 4.0 * math.prod(query.shape) * key.shape[-2] * causal
    if is_grouped(func, operands):
        return 2.0 * operands[0].numel() * operands[1].shape[2]
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def _parameters_of(unit: UnitSpec) -> list[tuple[torch.Tensor, torch.dtype]]:
    """Return a unit's parameters as its modules compute with them, and their compute dtypes."""
    found = [(spec, *spec.registrations[0]) for spec in unit.parameters]
    return [
        (made, spec.param_dtype)
        for spec, module, name in found
        if (made := module._parameters[name]) is not None
    ]


class _Recording(DispatchMode):
    def __init__(self, recorder: _Recorder, truth: bool) -> None:
        super().__init__()
        self._recorder, self._truth = recorder, truth
        self.was_asked = False
        """True if the step has read the value of a boolean tensor."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten._local_scalar_dense.default
            and self._recorder.values.of(args[0]) is None
        ):
            if args[0].is_floating_point():
                return 1.0  # any number: it is logged; integers decide on shapes
            if args[0].dtype is torch.bool:
                self.was_asked = True
                return self._truth
        out = self._recorder.values.call(func, args, kwargs or {})
        self._recorder.operation(func, args, kwargs or {}, out)
        return out


# -- repeated modules run once


@dataclass(kw_only=True)
class _FirstRun:
    """First run of equal units: its results, and what it recorded in each unit inside of it."""

    out: Any
    works: list[UnitWork]
    exchanges: list[list[Exchange]]
    memory: list[UnitMemory]
    trained: list[UnitWork]
    has_backward: list[bool]
    visits: list[int]
    """Forwards of units inside of it, as places in its list of these."""
    collected: Sequence[_Collected]
    """Arguments of hooks that collect outputs of layers inside of it."""


_Collected: TypeAlias = tuple[str, int, Any]
"""Name of a layer, place of a hook of it, and forms of the layer's arguments and results."""


class _UnitRuns:
    """Forwards of units, of which only the first of equal modules runs: see :func:`_once_each`."""

    def __init__(self, units: Sequence[UnitSpec], recorder: _Recorder, reuses: bool) -> None:
        self._units, self._recorder, self._reuses = units, recorder, reuses
        self._known: dict[object, _FirstRun] = {}
        self._kept: list[object] = []
        indices = {id(unit.module): index for index, unit in enumerate(units)}
        self._inner = [
            [indices[id(module)] for module in unit.module.modules() if id(module) in indices]
            for unit in units
        ]

    def run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a unit's forward and its backward, or repeat the records of an equal unit."""
        key = _signature(self._units[index].module, (args, kwargs), self._kept)
        first = self._known.get(key)
        if first is None:
            out, collected = self._run_first(key, index, forward, args, kwargs)
        else:
            self._recorder.repeat(first, self._inner[index])
            self._recorder.add_inputs(self._recorder.work[index], (args, kwargs))
            out, collected = first.out, first.collected
        fresh = partial(pytree.tree_map, partial(with_form, anchors=self._recorder.anchors))
        with self._recorder.paused():  # the layers have made them
            for name, place, given in collected:
                layer = self._units[index].module.get_submodule(name)
                [*layer._forward_hooks.values()][place](layer, *fresh(given))
        result = fresh(out)
        self._recorder.end_unit()
        return result

    def _run_first(
        self,
        key: object,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Sequence[_Collected]]:
        """Run a unit; return the specs of its results and of what hooks collect, and keep them."""
        recorder, inner = self._recorder, self._inner[index]
        before = [UnitWork(**vars(recorder.work[place])) for place in inner]
        trained = [UnitWork(**vars(recorder.trained[place])) for place in inner]
        at_start = len(recorder.visits)
        counts = [len(recorder.exchanges[place]) for place in inner]
        nested = len(recorder.anchors)
        recorder.add_inputs(recorder.work[index], (args, kwargs))
        with _without_collecting(self._units[index].module) as collected:
            result, made = recorder.run_forward(index, partial(forward, *args, **kwargs))
        ends = (args, kwargs), recorder.anchors[nested:]
        root = root_of(result)
        # Results without a graph may have known values.
        out = pytree.tree_map(partial(TensorSpec.of, requires_grad=True), result)
        del result
        recorder.end_forward(index, made, root, ends, _parameters_of(self._units[index]))
        del root
        own = inner.index(index)
        recorder.note_trained(
            recorder.work[index], before[own], recorder.trained[index], trained[own]
        )
        if self._reuses and not any(vars(work)["kernels"] for work in before):
            works = [UnitWork(**vars(recorder.work[it])) for it in inner]
            own_work = works[inner.index(index)]
            own_work.input_nbytes = own_work.activation_input_nbytes = 0  # counted for each call
            self._known[key] = _FirstRun(
                out=pytree.tree_map(TensorSpec.of, out),
                works=works,
                exchanges=[
                    recorder.exchanges[it][count:] for it, count in zip(inner, counts, strict=True)
                ],
                memory=[recorder.memory[it] for it in inner],
                trained=[UnitWork(**vars(recorder.trained[it])) for it in inner],
                has_backward=[it in recorder.with_backward for it in inner],
                visits=[inner.index(it) for it in recorder.visits[at_start:]],
                collected=collected,
            )
        return out, collected


def _collects(hook: object) -> TypeGuard[FunctionType]:
    """Return whether a function is of a hook by which transformers collects outputs of layers.

    Router logits are for the loss of a router: without them it would have those of one layer.
    """
    return isinstance(hook, FunctionType) and hook.__module__ == _COLLECTING


_COLLECTING = "transformers.utils.output_capturing"


@contextmanager
def _without_collecting(module: nn.Module) -> Generator[list[_Collected]]:
    """Give a list that gets what hooks of layers inside of a module would collect.

    They are called later, with tensors at which the backward of the loss ends.
    """
    collected: list[_Collected] = []

    def note(name: str, place: int, *given: Any) -> None:
        collected.append((name, place, pytree.tree_map(TensorSpec.of, given[1:])))

    with ExitStack() as stack:
        for name, child in module.named_modules():
            if child is module:  # its own run where its forward is repeated
                continue
            for place, (key, hook) in enumerate([*child._forward_hooks.items()]):
                if _collects(hook):
                    stack.callback(child._forward_hooks.__setitem__, key, hook)
                    child._forward_hooks[key] = partial(note, name, place)
        yield collected


@contextmanager
def _once_each(
    units: Sequence[UnitSpec], recorder: _Recorder, *, reuses: bool = True
) -> Generator[None]:
    """Count work by unit, and run only the first of equal modules.

    All return fresh tensors with the shapes of the first one's results.
    The backward of a module that has run runs at once, for its memory. So only attributes that a
    forward sets are missing; ``reuses=False`` runs all modules.
    """
    runs = _UnitRuns(units, recorder, reuses)
    with ExitStack() as stack:
        for index, unit in enumerate(units[1:], start=1):
            original = unit.module.forward
            unit.module.forward = partial(runs.run, index, original)
            stack.callback(vars(unit.module).pop, "forward")
        yield


def _signature(module: nn.Module, given: object, kept: list[object]) -> object:
    """Return what the forward of a module depends on, apart from values: equal for equal modules.

    Other objects are equal to themselves alone. ``kept`` gets them: no other one may get their ids.
    """

    def plain(value: Any) -> object:
        kind: type[Any] = type(value)
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else ()
            return kind, tuple(value.shape), strides, value.dtype, value.requires_grad
        if kind in _COMPARED or isinstance(value, (torch.dtype, torch.device)):
            return kind, value  # with its type: 1 and 1.0 give results of other dtypes
        if isinstance(value, Enum):
            return kind, value.name
        if isinstance(value, (tuple, list)):
            return kind, *map(plain, cast("Sequence[Any]", value))
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(map(plain, cast("set[Any]", value)))
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return kind, *((plain(key), plain(it)) for key, it in items)
        if isinstance(value, partial):
            return kind, *map(plain, (value.func, value.args, value.keywords))
        if _collects(value):
            cells = [it.cell_contents for it in value.__closure__ or ()]
            return kind, value.__code__, *map(plain, cells)
        if isinstance(value, MethodType):
            return kind, id(value.__func__), plain(value.__self__)
        if id(value) in places:  # a module of the unit, or an object that was compared already
            return kind, places[id(value)]
        if isinstance(value, ModuleHook) or is_dataclass(value):
            places[id(value)] = str(len(places))
            # The names of hooked modules are for messages.
            named = ("name", "refusal") if isinstance(value, ModuleHook) else ()
            return kind, plain({key: it for key, it in vars(value).items() if key not in named})
        kept.append(value)
        return id(value)

    def forward_of(child: nn.Module) -> object:
        """Return the forward of a module, which is replaced by that of units while they run."""
        set_on_it = vars(child).get("forward", child.forward)
        return plain(set_on_it.args[1] if _runs_unit(set_on_it) else set_on_it)

    places = {id(child): name for name, child in module.named_modules()}
    return plain(given), tuple(
        (
            name,
            type(child),
            forward_of(child),
            plain({**child._parameters, **child._buffers}),
            tuple(
                (key, plain([*value.values()] if key in _HOOKS else value))  # keys are ids
                for key, value in vars(child).items()
                if key not in _NO_SETTINGS and not (key == "layer_idx" and _is_numbered(child))
            ),
        )
        for name, child in module.named_modules()
    )


_COMPARED = (bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis))
"""Types whose values are settings."""

_HOOKS = {it for it in vars(nn.Module()) if it.endswith("_hooks") and "state_dict" not in it}
_NO_SETTINGS = {*vars(nn.Module()), "forward"} - _HOOKS - {"training"}
"""Attributes of modules that are compared in another way, or have no effect on a forward."""


def _is_numbered(module: nn.Module) -> bool:
    """Return whether ``layer_idx`` of a module is a place in a cache alone: that of transformers."""
    return type(module).__module__.startswith("transformers.")


def _runs_unit(forward: object) -> TypeGuard[partial[Any]]:
    """Return whether a forward is that which :func:`_once_each` has set on a unit."""
    method = forward.func if isinstance(forward, partial) else None
    return isinstance(method, MethodType) and method.__func__ is _UnitRuns.run


# -- a module without memory, and its step


SELECTIVE = ("matmul", "attention")
"""Operations whose results selective checkpointing keeps unless others are named."""

PRECISIONS = ("32-true", "bf16-mixed", "bf16", "bf16-true", "16-mixed", "fp16", "16-true")
"""Values of the Trainer's ``precision``; ``bf16``, ``fp16``: ``MixedPrecision(param_dtype)``."""


@dataclass(frozen=True, kw_only=True)
class PlannedPrecision:
    """Dtypes of a run; float16 is bfloat16 here, which takes the same bytes and matmul rates."""

    stored: torch.dtype | None
    """Dtype of the module's own tensors and of batches; None: as they are."""
    autocast: torch.dtype | None
    """Dtype of the autocast around the step; None: no autocast."""
    options: MixedPrecision
    """Dtypes of gathers, reductions and casts."""

    @staticmethod
    def of(precision: str, options: MixedPrecision | None = None) -> PlannedPrecision:
        """Return the dtypes of a precision in :data:`PRECISIONS`, with the options of a strategy.

        Raises:
            UsageError: The precision is unknown, or the options compute in float64 or 8 bits.
        """
        if precision not in PRECISIONS:
            raise UsageError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}")
        options, half = options or MixedPrecision(), torch.bfloat16
        if precision in ("bf16", "fp16"):
            options = replace(options, param_dtype=half)
        narrow = {
            it.name: half for it in fields(options) if vars(options)[it.name] is torch.float16
        }
        options = replace(options, **narrow)  # pyright: ignore[reportArgumentType]  # of dtypes
        if options.param_dtype not in (None, half, torch.float32):
            raise UsageError(
                f"MixedPrecision.param_dtype={options.param_dtype}: expected bfloat16, float16 or "
                f"float32, as no rates of matmuls in others are known"
            )
        return PlannedPrecision(
            stored=half if precision.endswith("16-true") else None,
            autocast=half if precision.endswith("-mixed") else None,
            options=options,
        )

    @property
    def is_fp32(self) -> bool:
        """True if matmuls are in float32."""
        return (
            self.autocast is None
            and (self.options.param_dtype or self.stored or torch.float32) is torch.float32
        )


def without_memory(module: nn.Module, mode: Any, dtype: torch.dtype | None) -> None:
    """Replace parameters, buffers and other tensors of modules by fake ones; tied ones stay tied.

    Other tensors are attributes (constants, states of metrics), also in lists, tuples and dicts.
    """

    def empty(shape: Sequence[int], own: torch.dtype) -> torch.Tensor:
        with mode:
            is_cast = dtype is not None and own.is_floating_point
            return torch.empty(shape, dtype=dtype if is_cast else own)

    replaced = replacement(empty)
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    table[name] = replaced(tensor)  # type: ignore[assignment]
        for name, value in [*vars(child).items()]:
            if name not in ("_parameters", "_buffers", "_modules") and _has_tensors(value):
                vars(child)[name] = pytree.tree_map_only(torch.Tensor, replaced, value)


def _has_tensors(value: object) -> bool:
    """Return whether an attribute is a tensor, or a list, tuple or dict with one."""
    return isinstance(value, (torch.Tensor, list, tuple, dict)) and any(
        isinstance(it, torch.Tensor) for it in pytree.tree_leaves(value)
    )


def profile(
    module: nn.Module,
    step: Callable[[nn.Module, int], Any],
    *,
    policy: Policy,
    precision: str,
    micro_batch: int,
    tokens: int,
    axes: ModelAxes = WHOLE,
    mixed_precision: MixedPrecision | None = None,
    recomputation: ActivationCheckpointing | None = None,
) -> ModelProfile:
    """Run one forward of a module on fake tensors, and count its work by unit.

    The tensors of the module, on any device, are replaced by ones without memory: it is not usable
    afterwards. ``step`` gets the module and the number of samples, makes its inputs and returns the
    loss. ``tokens`` are those of the micro-batch. If ranks split the model, the part of the first
    one runs. ``recomputation`` says which modules can be recomputed, None: all units; and what
    selective checkpointing keeps, matmuls and attention if it says nothing.

    Raises:
        UsageError: The precision is not planned, or the model cannot be split over the axes.
        ConfigurationError: Parameters are lazy, or the step fails on tensors without values.
    """
    dtypes = PlannedPrecision.of(precision, mixed_precision)
    _check_trainable(module)
    traced = _TracedModel(module, policy, dtypes, axes)
    units = traced.units
    is_kept = is_kept_by((recomputation and recomputation.save_ops) or SELECTIVE)
    recomputed, others = _recomputed(module, units, recomputation)
    recorder = traced.record(lambda: step(module, micro_batch), is_kept)
    calls = Counter(recorder.visits)
    order = [0, *(it for it in range(1, len(units)) if it not in calls), *calls]
    trained = recorder.trained_works()
    return ModelProfile(
        units=[units[it] for it in order],
        usages=[_usage(it, units, recorder) for it in order],
        work=[recorder.work[it] for it in order],
        trained=[trained[it] for it in order],
        head=recorder.head,
        tokens=tokens,
        buffers_nbytes=traced.buffers_nbytes,
        broadcast_nbytes=traced.broadcast_nbytes,
        exchanges=[recorder.exchanges[it] for it in order],
        memory=[recorder.memory[it] for it in order],
        visits=[order.index(it) for it in recorder.visits],
        recomputed=[recomputed[it] for it in order],
        others_recomputed=others,
        inputs_on_host=recomputation is not None and recomputation.cpu_offload,
        is_routed=recorder.values.were_read and recorder.values.were_chosen,
        is_even=recorder.values.are_even,
    )


def _check_trainable(module: nn.Module) -> None:
    if lazy := [name for name, it in module.named_parameters() if is_lazy(it)]:
        raise ConfigurationError(
            f"{type(module).__name__} has parameters that get their shapes from data (nn.Lazy...: "
            f"{first_three(lazy)}): name their sizes to plan it"
        )
    require_parameters(module)
    if not any(it.requires_grad for it in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__} has no parameter that requires a gradient: expected a training "
            f"step with something to train, found that all is frozen. requires_grad_(True) of a part "
            f"trains it; forwards alone are not planned"
        )


class _TracedModel:
    """Module without memory: one rank's part of it, in units, with the dtypes of a run."""

    def __init__(
        self, module: nn.Module, policy: Policy, dtypes: PlannedPrecision, axes: ModelAxes
    ) -> None:
        self._module, self._dtypes, self._axes = module, dtypes, axes
        self._mode = FakeTensorMode()
        without_memory(module, self._mode, dtypes.stored)
        self._recorders: list[_Recorder] = []
        with self._mode:
            policy, split = axes.split(module, policy, lambda: self._recorders[-1].rehearsal())
        self.units = with_dtypes(
            module, build_units(module, policy, split), dtypes.options, dtypes.autocast
        )
        with self._mode:
            cast_at_boundaries(module, self.units, dtypes.options)
            if dtypes.options.param_dtype is not None:
                _gather_parameters(self.units)
        own = {storage_of(it) for it in module.parameters()}
        buffers = {storage_of(it): it.untyped_storage().nbytes() for it in module.buffers()}
        self._free = own | buffers.keys()
        self.buffers_nbytes = sum(nbytes for it, nbytes in buffers.items() if it not in own)
        broadcast = BufferBroadcast(module).by_dtype()
        self.broadcast_nbytes = [sum(it.nbytes for it in each) for each in broadcast.values()]
        self._wrapped = [*_wrapped(self.units)]

    def record(self, step: Callable[[], Any], is_kept: Callable[..., bool]) -> _Recorder:
        """Run a step until it succeeds, with other values where it has read some.

        Raises:
            ConfigurationError: It fails on tensors without values.
        """
        recorder, was_asked, error = self._run(step, is_kept)  # booleans are False: no NaN is found
        if isinstance(error, (AttributeError, TypeError)):  # from skipped forwards, perhaps
            recorder, was_asked, error = self._run(step, is_kept, reuses=False)
        if error is not None and was_asked:
            recorder, _, error = self._run(step, is_kept, truth=True)  # so that assertions hold
        if error is not None:
            raise _refusal(self._module, self._axes, error, self.units) from error
        return recorder

    def _run(
        self,
        step: Callable[[], Any],
        is_kept: Callable[..., bool],
        *,
        truth: bool = False,
        reuses: bool = True,
    ) -> tuple[_Recorder, bool, BaseException | None]:
        """Run one step; return whether it has read a boolean value, and its error."""
        units, is_mixed = self.units, self._dtypes.autocast is not None
        recorder = _Recorder([UnitWork() for _ in units], UnitWork(), set(self._free), is_kept)
        self._recorders.append(recorder)
        recording = _Recording(recorder, truth)
        try:
            with (
                _quiet(),
                torch.compiler.set_stance("force_eager"),  # compiled later, not here
                self._mode,
                _once_each(units, recorder, reuses=reuses),
                torch.autocast("cpu", torch.bfloat16, enabled=is_mixed),
                torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda it: it),
                recording,
                DeviceFunctions(),
                flex_attention_on_host(),
                attention_of_devices(),
            ):
                for index, spec, parameter in self._wrapped:
                    recorder.bind(index, spec, parameter)
                out = step()
                self._axes.end_forward(self._module)
                root = root_of(out.get("loss") if isinstance(out, Mapping) else out)
                del out
                recorder.end_step(root, _parameters_of(units[0]))
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the module's own code
            return recorder, recording.was_asked, error
        return recorder, recording.was_asked, None


def _usage(index: int, units: Sequence[UnitSpec], recorder: _Recorder) -> UnitUsage:
    """Return the use of a unit; the last one to begin, and those around it, end the forward."""
    last = [units[it].module for it in recorder.visits[-1:]]
    return UnitUsage(
        calls=recorder.visits.count(index) if index else 1,
        has_backward=index in recorder.with_backward,
        ends_forward=any(it in last for it in units[index].module.modules()),
    )


def _refusal(
    module: nn.Module, axes: ModelAxes, error: BaseException, units: Sequence[UnitSpec]
) -> ConfigurationError:
    """Return the error about a step that fails on tensors without values, with the remedy."""
    said = str(error).splitlines()[0] if str(error) else ""
    if axes.expert_size > 1:
        return UsageError(
            f"{type(module).__name__} does not run with experts divided among {axes.size} ranks "
            f"({type(error).__name__}: {said})"
        )
    if axes.tensor_size > 1:
        return UsageError(
            f"{type(module).__name__} does not run with layers split over {axes.size} ranks as "
            f"tensor_parallel_plan says ({type(error).__name__}: {said}). What comes out of a 'colwise' "
            f"layer is a rank's 1/{axes.size} of its features: behind it is a 'rowwise' one, and "
            f"whatever lies between is split too, or takes any number of features"
        )
    return ConfigurationError(
        f"{type(module).__name__} does not run without values ({type(error).__name__}: "
        f"{said}). The planner runs one training step on tensors that have shapes and no "
        f"values: a step that reads values (item() of whole numbers, shapes that depend on "
        f"data, attributes that setup() or a Trainer sets) cannot be planned so, nor one that "
        f"gets another batch than it expects: one --input for each of its tensors. `shardeddp "
        f"plan --dims` plans a transformer of the same dimensions. {_of_states(units)}"
    )


def _wrapped(units: Sequence[UnitSpec]) -> Iterator[tuple[int, ParameterSpec, nn.Parameter]]:
    """Yield unit index, spec and parameter for parameters that modules use in a wrapped form."""
    for index, unit in enumerate(units):
        for spec in unit.parameters:
            module, name = spec.registrations[0]
            parameter = module._parameters[name]
            if spec.is_wrapped and parameter is not None:
                yield index, spec, parameter


@contextmanager
def _quiet() -> Generator[None]:
    """Disable torch's log of fake tensors, which prints a traceback for errors reported here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            # It is compiled later.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            yield
    finally:
        logger.disabled = was_disabled


def _of_states(units: Sequence[UnitSpec]) -> str:
    """Return a sentence on the memory of parameters, gradients and optimizer states alone."""
    specs = [it for unit in units for it in unit.parameters]
    numel = sum(it.parameter.numel() for it in specs)
    nbytes = sum(it.parameter.nbytes * (4 if it.parameter.requires_grad else 1) for it in specs)
    return (
        f"Without a step it can be said that {numel:,} parameters, their gradients and AdamW's states "
        f"take {human_bytes(nbytes)} over the ranks that share them, besides activations"
    )


def _recomputed(
    module: nn.Module, units: Sequence[UnitSpec], options: ActivationCheckpointing | None
) -> tuple[list[bool], list[str]]:
    """Return which units are recomputed, and the names of other modules that are.

    Units inside of a recomputed one are recomputed with it.
    """
    if options is None:
        return [bool(index) for index in range(len(units))], []
    modules = dict(module.named_modules(remove_duplicate=False))
    own = {id(unit.module) for unit in units[1:]}
    names = recomputed_modules(module, options)
    inside = {
        id(inner) for name in names if id(modules[name]) in own for inner in modules[name].modules()
    }
    others = [name for name in names if id(modules[name]) not in own]
    return [id(unit.module) in inside for unit in units], others


def _gather_parameters(units: Sequence[UnitSpec]) -> None:
    """Let modules compute with parameters in the dtype in which they are gathered."""
    for spec in (it for unit in units for it in unit.parameters):
        if spec.param_dtype is spec.dtype:
            continue
        gathered = torch.empty(spec.parameter.shape, dtype=spec.param_dtype)
        made = nn.Parameter(gathered, requires_grad=spec.parameter.requires_grad)
        for module, name in spec.registrations:
            module._parameters[name] = made
