"""Trace: work and saved tensors of a micro-batch of a module, by unit, without memory or weights."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import string_at
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, TypeAlias, TypeGuard, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from shardeddp.config import ActivationCheckpointing, MixedPrecision
from shardeddp.engine.activation_checkpointing import recomputed_modules
from shardeddp.engine.buffers import BufferBroadcast
from shardeddp.engine.dtypes import cast_at_boundaries, with_dtypes
from shardeddp.engine.hooks import find_tensors
from shardeddp.errors import ConfigurationError, UsageError, first_three
from shardeddp.planner.axes import WHOLE, ModelAxes
from shardeddp.planner.backward import (
    TensorSpec,
    pass_units,
    root_of,
    with_form,
)
from shardeddp.planner.collectives import UnitUsage
from shardeddp.planner.device_functions import (
    DeviceFunctions,
    attention_of_devices,
    flex_attention_on_host,
)
from shardeddp.planner.recorder import Recorder, RecordingMode, RecordsBefore, UnitRecords
from shardeddp.planner.source import replacement
from shardeddp.planner.values import Values, is_of_step
from shardeddp.planner.work import RECOMPUTES, ModelProfile, UnitWork
from shardeddp.report import human_bytes
from shardeddp.tensor.module_hooks import ModuleHook
from shardeddp.torch_private import (
    FakeTensor,
    FakeTensorMode,
    close_to_pytree,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    pytree,
    storage_of,
    top_saved_tensors_hooks,
    torch_dispatch_modes,
    torch_function_modes,
    transforms,
)
from shardeddp.wrap import Policy, build_units, require_parameters
from shardeddp.wrap.kept_operations import is_kept_by
from shardeddp.wrap.tree import ParameterSpec, UnitSpec

# -- repeated modules run once


@dataclass(kw_only=True)
class _FirstRun:
    """First run of equal units: its results and records."""

    out: Any
    records: UnitRecords
    collected: Sequence[_Collected]
    """Arguments of hooks that collect outputs of layers inside of it."""


_Collected: TypeAlias = tuple[str, int, Any]
"""Name of a layer, place of a hook of it, and forms of the layer's arguments and results."""


class _UnitRuns:
    """Forwards of units, of which only the first of equal modules runs: see :func:`_once_each`."""

    def __init__(self, units: Sequence[UnitSpec], recorder: Recorder, reuses: bool) -> None:
        self._units, self._recorder, self._reuses = units, recorder, reuses
        self._known: dict[object, _FirstRun] = {}
        self._kept: list[object] = []
        self.opened: set[type] = set()
        """Dataclasses of results, into which pytree looks until the end of the step."""
        self._state = _TorchState()
        indices = {id(unit.module): index for index, unit in enumerate(units)}
        self._inner = [
            [indices[id(module)] for module in unit.module.modules() if id(module) in indices]
            for unit in units
        ]

    def run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a unit's forward and its backward, or repeat the records of an equal unit."""
        recorder = self._recorder
        if recorder.is_paused:  # checkpointing around it computes it again
            return forward(*args, **kwargs)
        state = self._state.of_unit() if self._reuses else None
        signature = partial(_signature, values=recorder.values, kept=self._kept)
        key = state and (state, signature(self._units[index].module, (args, kwargs)))
        first = self._known.get(key)
        before = recorder.before(self._inner[index])
        if first is None:
            out, collected, storages = self._run_first(before, index, forward, args, kwargs)
        else:
            self._state.repeats()
            storages = recorder.repeat(first.records, self._inner[index], (args, kwargs))
            out, collected = first.out, first.collected
        nodes: list[Any] = [it.grad_fn for it in find_tensors((args, kwargs))]
        nodes.append(_frame_of(top_saved_tensors_hooks(True)))  # it has the checkpoint's inputs
        made = partial(with_form, anchors=recorder.anchors, before=nodes)
        fresh = partial(pytree.tree_map, made)
        with recorder.paused():  # the layers have made them
            for name, place, given in collected:
                layer = self._units[index].module.get_submodule(name)
                [*layer._forward_hooks.values()][place](layer, *fresh(given))
        result = fresh(out)
        storages = recorder.return_results(before, storages, result)
        if key is not None and first is None:
            self._known[key] = _FirstRun(
                out=pytree.tree_map(TensorSpec.of, out),
                records=recorder.since(before, (args, kwargs), storages),
                collected=collected,
            )
        recorder.end_unit()
        return result

    def _run_first(
        self,
        before: RecordsBefore,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Sequence[_Collected], Sequence[int | None]]:
        """Run a unit; return specs of its results and of what hooks collect, and their storages."""
        recorder, nested = self._recorder, len(self._recorder.anchors)
        with _without_collecting(self._units[index].module) as collected:
            call = partial(forward, *args, **kwargs)
            given = [*find_tensors((args, kwargs))]
            result, made = recorder.run_forward(index, (args, kwargs), call)
        _open_dataclasses(result, self.opened)
        known = {id(it) for it in (*given, *pytree.tree_leaves(result))}
        left = (*find_tensors((args, kwargs)), *self._in_attributes(index))
        if any(it.grad_fn is not None and id(it) not in known for it in left):
            recorder.leaking.add(index)
        del given, left
        ends = (args, kwargs), recorder.anchors[nested:]
        root = root_of(result)
        # Results without a graph may have known values.
        out = pytree.tree_map(partial(TensorSpec.of, requires_grad=True), result)
        storages = [
            recorder.storage_of(it) if isinstance(it, torch.Tensor) else None
            for it in pytree.tree_leaves(result)
        ]
        del result
        without_graph = {
            storage_of(it) for it in pytree.tree_leaves(out) if isinstance(it, torch.Tensor)
        }
        parameters = _parameters_of(self._units[index])
        recorder.end_forward(before, made, without_graph, root, ends, parameters)
        del root
        recorder.note_outside(before)
        own = before.places.index(index)
        recorder.note_trained(
            recorder.work[index], before.works[own], recorder.trained[index], before.trained[own]
        )
        return out, collected, storages

    def _in_attributes(self, index: int) -> Iterator[torch.Tensor]:
        """Yield tensors in attributes of a unit's modules, without those of units inside of it."""
        inner = (self._units[it].module for it in self._inner[index] if it != index)
        others = {module for unit in inner for module in unit.modules()}
        for module in self._units[index].module.modules():
            if module not in others:
                leaves = pytree.tree_leaves(_attributes_with_tensors(module))
                yield from (it for it in leaves if isinstance(it, torch.Tensor))


def _open_dataclasses(value: Any, opened: set[type]) -> None:
    """Let pytree look into dataclasses, as the engine does for tensors in results of units."""
    while kinds := {
        type(it)
        for it in pytree.tree_leaves(value)
        if is_dataclass(it) and not isinstance(it, (type, TensorSpec))
    }:
        for kind in kinds:
            pytree.register_pytree_node(kind, _fields_of, partial(_with_fields, kind))
            opened.add(kind)


def _fields_of(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(it.name for it in fields(value))
    return [getattr(value, name) for name in names], names


def _with_fields(kind: type[Any], values: Iterable[Any], names: Any) -> Any:
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # frozen ones, too
    return made


def _parameters_of(unit: UnitSpec) -> list[tuple[torch.Tensor, torch.dtype]]:
    """Return a unit's parameters as its modules compute with them, and their compute dtypes."""
    found = [(spec, *spec.registrations[0]) for spec in unit.parameters]
    return [
        (made, spec.param_dtype)
        for spec, module, name in found
        if (made := module._parameters[name]) is not None
    ]


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


class _TorchState:
    """Global state of torch that a forward depends on, and checkpoints in which units run.

    Modes and hooks are compared with those at the begin of a step.
    """

    def __init__(self) -> None:
        self._modes, self._hooks = self._active_modes(), top_saved_tensors_hooks(True)
        self._frame: Any = None
        # Checkpoints in which a unit has run, and those in which one was repeated.
        self._entered, self._repeated = WeakSet[Any](), WeakSet[Any]()

    def of_unit(self) -> object:
        """Return what is equal in equal states; None: it cannot be compared.

        That are modes and hooks of the model, and checkpoints of more than one unit: their
        recomputation is part of the backward of each.

        Raises:
            NotRepeatableError: A unit was repeated in such a checkpoint.
        """
        hooks = top_saved_tensors_hooks(True)
        self._frame = None if hooks == self._hooks else _frame_of(hooks)
        if self._frame is not None:
            if self._frame in self._repeated:
                raise _NotRepeatableError
            is_alone = self._frame not in self._entered and not self._frame.weak_holders
            self._entered.add(self._frame)
            if not is_alone or _hooks_around(hooks) != self._hooks:
                return None
        elif hooks != self._hooks:
            return None
        if self._active_modes() != self._modes or transforms() is not None:
            return None
        return (
            self._frame is not None and (type(self._frame), self._frame.early_stop),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            *((torch.is_autocast_enabled(it), torch.get_autocast_dtype(it)) for it in _DEVICES),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )

    def repeats(self) -> None:
        """Note that the unit is repeated whose state was asked for last."""
        if self._frame is not None:
            self._repeated.add(self._frame)

    def _active_modes(self) -> list[int]:
        return [id(it) for it in (*torch_function_modes(), *torch_dispatch_modes())]


_DEVICES = ("cpu", "cuda")


class _NotRepeatableError(Exception):
    """A unit was repeated that another one depends on: all units have to run."""


def _frame_of(hooks: Any) -> Any:
    """Return the checkpoint whose hooks for saved tensors these are; None: they are others."""
    pack = hooks and hooks[0]
    if getattr(pack, "__module__", None) != checkpoint.__module__:
        return None
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    return cells["frame"].cell_contents if "frame" in cells else None


def _hooks_around(hooks: Any) -> Any:
    """Return the hooks for saved tensors below the active ones."""
    pop_saved_tensors_hooks()
    try:
        return top_saved_tensors_hooks(True)
    finally:
        push_saved_tensors_hooks(*hooks)


@contextmanager
def _once_each(
    units: Sequence[UnitSpec], recorder: Recorder, *, reuses: bool = True
) -> Generator[None]:
    """Count work by unit, and run only the first of equal modules.

    All return fresh tensors with the shapes of the first one's results.
    The backward of a module that has run runs at once, for its memory. So only attributes that a
    forward sets are missing; ``reuses=False`` runs all modules.
    """
    runs = _UnitRuns(units, recorder, reuses)
    with ExitStack() as stack:
        stack.callback(lambda: [*map(close_to_pytree, runs.opened)])
        for index, unit in enumerate(units[1:], start=1):
            original = unit.module.forward
            unit.module.forward = partial(runs.run, index, original)
            stack.callback(vars(unit.module).pop, "forward")
        yield


def _signature(module: nn.Module, given: object, values: Values, kept: list[object]) -> object:
    """Return what the forward of a module depends on: equal for equal modules and inputs.

    Of values it has those that are known. Other objects are equal to themselves alone. ``kept``
    gets them: no other one may get their ids.
    """

    def plain(value: Any) -> object:
        kind: type[Any] = type(value)
        if isinstance(value, torch.Tensor):
            form = kind, tuple(value.shape), value.dtype, value.requires_grad
            if value.layout is not torch.strided:
                return form
            # Tensors of one memory are saved once, and with all of it.
            memory = memories.setdefault(storage_of(value), len(memories))
            nbytes = value.untyped_storage().nbytes()
            return form, value.stride(), value.storage_offset(), memory, nbytes, known(value)
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

    def known(tensor: torch.Tensor) -> object:
        """Return the known values of a tensor, on which shapes may depend."""
        found = values.of(tensor)
        if found is None:
            return None
        memory = found.untyped_storage()
        if memory.nbytes() <= _COMPARED_NBYTES:
            read = string_at(memory.data_ptr(), memory.nbytes())
            return read, found.stride(), found.storage_offset()
        kept.append(found)
        return id(found), found._version

    def forward_of(child: nn.Module) -> object:
        """Return the forward of a module, which is replaced by that of units while they run."""
        set_on_it = vars(child).get("forward", child.forward)
        return plain(set_on_it.args[1] if _runs_unit(set_on_it) else set_on_it)

    places = {id(child): name for name, child in module.named_modules()}
    memories = dict[int, int]()
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

_COMPARED_NBYTES = 1 << 20
"""Largest memory of known values that are compared; others are equal to themselves alone."""

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
        is_cast = dtype is not None and own.is_floating_point
        meta = torch.empty(shape, dtype=dtype if is_cast else own, device="meta")
        return FakeTensor(mode, meta, torch.device("cpu"))  # ten times as fast as in the mode

    replaced = replacement(empty)
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    table[name] = replaced(tensor)  # type: ignore[assignment]
        for name, value in _attributes_with_tensors(child).items():
            vars(child)[name] = pytree.tree_map_only(torch.Tensor, replaced, value)


def _attributes_with_tensors(module: nn.Module) -> dict[str, Any]:
    """Return attributes that are a tensor, or a list, tuple or dict with one, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        and isinstance(value, (torch.Tensor, list, tuple, dict))
        and any(isinstance(it, torch.Tensor) for it in pytree.tree_leaves(value))
    }


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
    on_host = recomputation is not None and recomputation.cpu_offload
    kept = {it: recorder.kept(it, recomputed, on_host) for it in RECOMPUTES}
    recorder.work[0].saved_nbytes = kept["none"].root_nbytes
    recorder.head.saved_nbytes = kept["none"].head_nbytes
    for unit, nbytes in zip(recorder.visits, kept["none"].kept, strict=True):
        recorder.work[unit].saved_nbytes += nbytes
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
        memory=[recorder.head_memory, *recorder.memory],
        kept=kept,
        root_memory=recorder.root_memory,
        visits=[order.index(it) for it in recorder.visits],
        has_backward=recorder.has_backward,
        recomputed=[recomputed[it] for it in order],
        others_recomputed=others,
        leaking=[units[it].label for it in sorted(recorder.leaking) if recomputed[it]],
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
        self._recorders: list[Recorder] = []
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
        self._casts = {
            storage_of(made): spec.param_dtype
            for spec in (it for unit in self.units for it in unit.parameters)
            for module, name in spec.registrations[:1]
            if (made := module._parameters[name]) is not None and made.dtype != spec.param_dtype
        }
        self.buffers_nbytes = sum(nbytes for it, nbytes in buffers.items() if it not in own)
        broadcast = BufferBroadcast(module).by_dtype()
        self.broadcast_nbytes = [sum(it.nbytes for it in each) for each in broadcast.values()]
        self._wrapped = [*_wrapped(self.units)]

    def record(self, step: Callable[[], Any], is_kept: Callable[..., bool]) -> Recorder:
        """Run a step until it succeeds, with other values where it has read some.

        Raises:
            ConfigurationError: It fails on tensors without values.
        """
        recorder, was_asked, error = self._run(step, is_kept)  # booleans are False: no NaN is found
        # From skipped forwards, perhaps.
        if isinstance(error, (AttributeError, TypeError, _NotRepeatableError)):
            recorder, was_asked, error = self._run(step, is_kept, reuses=False)
        if error is not None and was_asked:
            recorder, _, error = self._run(step, is_kept, truth=True)  # so that assertions hold
        if isinstance(error, ConfigurationError):
            raise error
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
    ) -> tuple[Recorder, bool, BaseException | None]:
        """Run one step; return whether it has read a boolean value, and its error."""
        units, is_mixed = self.units, self._dtypes.autocast is not None
        works = [UnitWork() for _ in units]
        recorder = Recorder(works, UnitWork(), set(self._free), self._casts, is_kept)
        self._recorders.append(recorder)
        recording = RecordingMode(recorder, truth)
        try:
            with (
                _quiet(),
                torch.compiler.set_stance("force_eager"),  # compiled later, not here
                self._mode,
                _holding_batch(self._module, recorder),
                torch.autocast("cpu", torch.bfloat16, enabled=is_mixed),
                torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda it: it),
                recording,
                DeviceFunctions(partial(self._check_gradients, recorder)),
                flex_attention_on_host(),
                attention_of_devices(),
                _without_reentry(),
                _once_each(units, recorder, reuses=reuses),  # after all modes
            ):
                for index, spec, parameter in self._wrapped:
                    recorder.bind(index, spec, parameter)
                out = step()
                torch.clear_autocast_cache()  # autocast is over before the backward
                self._axes.end_forward(self._module)
                root = root_of(out.get("loss") if isinstance(out, Mapping) else out)
                if root is None:
                    return recorder, recording.was_asked, _without_loss(self._module, out)
                del out
                recorder.end_step(root, _parameters_of(units[0]))
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the module's own code
            return recorder, recording.was_asked, error
        return recorder, recording.was_asked, None

    def _check_gradients(self, recorder: Recorder, outputs: Any, inputs: Any) -> None:
        """Refuse gradients that a step computes through units, whose backwards have run."""
        if not recorder.is_paused and pass_units(find_tensors(outputs), find_tensors(inputs)):
            raise ConfigurationError(
                f"{type(self._module).__name__} cannot be planned: its training step computes "
                f"gradients (torch.autograd.grad) through units, as a gradient penalty does, and the "
                f"planner has run the backward of each unit behind its forward. "
                f"auto_wrap_policy=None plans the whole model as one unit"
            )


@contextmanager
def _holding_batch(module: nn.Module, recorder: Recorder) -> Generator[None]:
    """Hold the batch of a ``training_step`` until the backward of the loss, as Lightning does."""
    method = getattr(module, "training_step", None)
    if method is None:
        yield
        return

    @wraps(method)
    def holding(*args: Any, **kwargs: Any) -> Any:
        recorder.begin_step((args, kwargs))
        return method(*args, **kwargs)

    before = vars(module).get("training_step")
    vars(module)["training_step"] = holding
    try:
        yield
    finally:
        if before is None:
            del vars(module)["training_step"]
        else:
            vars(module)["training_step"] = before


def _usage(index: int, units: Sequence[UnitSpec], recorder: Recorder) -> UnitUsage:
    """Return the use of a unit; the last one to begin, and those around it, end the forward."""
    last = [units[it].module for it in recorder.visits[-1:]]
    return UnitUsage(
        calls=recorder.visits.count(index) if index else 1,
        has_backward=index in recorder.with_backward,
        ends_forward=any(it in last for it in units[index].module.modules()),
    )


def _without_loss(module: nn.Module, out: Any) -> ConfigurationError:
    """Return the error about a step from which no backward can begin."""
    found = "one without" if isinstance(out, torch.Tensor) else type(out).__name__
    why = "such a step trains nothing"
    if out is None:
        why = "Lightning skips such a batch, and no plan can be made of it"
    if _optimizes_itself(module):
        why = _OPTIMIZES
    return ConfigurationError(
        f"{type(module).__name__} cannot be planned: expected a loss that requires a gradient from "
        f"its training step, found {found}; {why}"
    )


def _optimizes_itself(module: nn.Module) -> bool:
    return getattr(module, "automatic_optimization", True) is False


_OPTIMIZES = (
    "with automatic_optimization=False it runs backwards and optimizers itself, and plans are of one "
    "loss, whose backward Lightning runs"
)


def _reason(module: nn.Module, error: BaseException) -> str | None:
    """Return why a step fails that reads no values; None: it may read some."""
    if isinstance(error, SystemExit):
        return "its training step ends the process"
    if _optimizes_itself(module):
        return _OPTIMIZES
    if "not attached to a `Trainer`" in str(error):
        return (
            "its training step needs a Trainer, and only a plan of one has it: plan_only=True as an "
            "option of the strategy"
        )
    if isinstance(error, AttributeError):
        return (
            "its training step needs an attribute that is not there; for a plan no setup() is called "
            "and no hook"
        )
    return None


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
    if reason := _reason(module, error):
        return ConfigurationError(
            f"{type(module).__name__} cannot be planned: {reason} ({type(error).__name__}: {said})"
            f"{_place_of(error)}. {_of_states(units)}"
        )
    return ConfigurationError(
        f"{type(module).__name__} does not run without values ({type(error).__name__}: "
        f"{said}){_place_of(error)}. The planner runs one training step on tensors that have shapes and no "
        f"values: a step that reads values (item() of whole numbers, shapes that depend on "
        f"data) cannot be planned so, nor one that "
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


def _place_of(error: BaseException) -> str:
    """Return the last line of the user's code that an error comes from, with its text."""
    frames = traceback.extract_tb(error.__traceback__)
    found = next((it for it in reversed(frames) if is_of_step(it.filename)), None)
    if found is None:
        return ""
    return f", in line {found.lineno} of {found.filename}" + (
        f": {found.line}" if found.line else ""
    )


@contextmanager
def _without_reentry() -> Generator[None]:
    """Let reentrant checkpointing of a model record gradients in its forward, as the other kind does.

    A unit inside of it has a backward then, which begins at its results.
    """

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    CheckpointFunction.apply = staticmethod(apply)
    try:
        yield
    finally:
        del CheckpointFunction.apply  # that of all functions is behind it


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
