"""Deferred initialization: values for meta-device models, one parameter at a time, into shards."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
import xxhash
from torch import nn

from shardeddp.comm import (
    Mesh,
    agree_on_highest_alike,
    agree_on_layout,
    all_gather_bytes,
    run_on_all_ranks,
)
from shardeddp.engine.recording import HOST, MetaView, Recording, ReplayPlan, storage_of
from shardeddp.engine.takeover import await_values, is_taken_over
from shardeddp.errors import ConfigurationError
from shardeddp.tensor.distributed import forget_whole, whole_parameter
from shardeddp.tensor.operations import written
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor
from shardeddp.tensor.unsharded import swap_bodies
from shardeddp.tensor.views import GatheredView
from shardeddp.torch_private import TorchDispatchMode, make_subclass, pytree
from shardeddp.wrap.tree import ParameterSpec, UnitSpec, first_three, is_computed, join

# -- Materializer: values of deferred tensors, in recorded order


@dataclass(frozen=True, eq=False, kw_only=True)
class Deferred:
    """A tensor of a model that has no values until something is written to it."""

    fqn: str
    owner: nn.Module
    """The first module that has it."""

    name: str
    """Of the attribute of that module."""

    tensor: torch.Tensor
    place: MetaView
    is_parameter: bool = False

    @property
    def current(self) -> torch.Tensor:
        """The current tensor: of a parameter, the sharded one."""
        return self.owner._parameters[self.name] if self.is_parameter else self.tensor  # type: ignore[return-value]


class Materializer:
    """Finds the deferred tensors of a model before it is sharded, and gives them values after that.

    Args:
        units: The model's units, the root first.
        recording: How the model was built.
        load: Loads a checkpoint into the sharded model; what it leaves out is initialised. None:
            there is none.

    Raises:
        ConfigurationError: A deferred tensor cannot be given values of its own.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        recording: Recording,
        load: Callable[[], None] | None = None,
    ) -> None:
        root = units[0].module
        self._recording, self._load = recording, load
        specs = [
            spec
            for unit in units
            for spec in unit.parameters
            if spec.parameter.is_meta and not is_taken_over(spec.parameter)
        ]
        parameters = [
            _parameter(spec, recording.place_of(whole_parameter(spec.parameter))) for spec in specs
        ]
        for spec in specs:
            forget_whole(spec.parameter)
        former = [it for it in root.parameters() if it.is_meta and is_taken_over(it)]
        names = {item.place.storage: item.fqn for item in parameters}
        storages = [item.place.storage for item in parameters]
        storages += [recording.place_of(it).storage for it in former]
        others = _others(root, recording, storages, but=root.parameters())
        _refuse_views(others, names)
        # Attributes in the memory of a parameter follow it (shard_model).
        of_parameters = set(storages)
        own = [it for it in others if it.place.storage not in of_parameters]
        self._deferred = [*parameters, *own]

    @torch.no_grad()
    def fill(self, mesh: Mesh) -> None:
        """Give every deferred tensor its values; a collective of all ranks.

        Raises:
            ConfigurationError: Nothing can give some of them values; lists them.
            LayoutMismatchError: Ranks have built their models in different ways.
            RankError: Some rank failed while it loaded or initialised.
        """
        parameters = [item.current for item in self._deferred if item.is_parameter]
        await_values(parameters, True)
        self._fill(mesh)
        await_values(parameters, False)

    def _fill(self, mesh: Mesh) -> None:
        memory = _allocate(item for item in self._deferred if not item.is_parameter)
        missing = [item for item in self._deferred if item.tensor.numel()]
        if self._load is not None and missing:
            with Writes() as writes:
                run_on_all_ranks(
                    "loading the checkpoint into a deferred model", self._load, mesh.world_control
                )
            missing = [item for item in missing if not writes.reached(item.current)]
        if not missing:
            self._recording.rewind()
            return

        def make_plan() -> tuple[ReplayPlan, bytes]:
            plan = _plan(missing, self._recording)
            return plan, plan.digest()

        plan, digest = run_on_all_ranks("initialising parameters", make_plan, mesh.world_control)
        if mesh.rank == 0:
            _warn_of_resets(missing, self._recording)
        parts: dict[int, list[Deferred]] = {}
        for item in missing:
            parts.setdefault(item.place.storage, []).append(item)
        agree_on_layout(
            [f"initialises {parts[storage][0].fqn}" for storage in plan.completed], mesh.control
        )

        _, alike = agree_on_highest_alike(
            [], digest, mesh.control, "agreement on how parameters are initialised"
        )
        source = None if alike else mesh
        if alike:
            plan.narrow(_parts_of(parts, memory))

        def take(storage: int, values: torch.UntypedStorage) -> None:
            if storage in memory:
                _take(_as_bytes(memory[storage]), _as_bytes(values), source)
            for item in parts[storage]:
                if item.is_parameter:
                    _take(item.current, item.place.over(values), source)

        run_on_all_ranks(
            "initialising parameters", lambda: self._repeat(plan, take, alike), mesh.world_control
        )
        if alike and mesh.data.size > 1:
            whole = [_as_bytes(memory[it]) for it in dict.fromkeys(parts) if it in memory]
            _make_equal([it.current for it in missing if it.is_parameter], whole, mesh)

    def _repeat(
        self, plan: ReplayPlan, take: Callable[[int, torch.UntypedStorage], None], alike: bool
    ) -> None:
        awaited = dict.fromkeys(() if alike else plan.completed)
        try:
            for storage, values in self._recording.repeat(plan, move_generators=True):
                take(storage, values)
                awaited.pop(storage, None)
                del values
        except Exception:
            # The others send and receive what this rank does not have any more, before all hear of
            # it.
            for storage in awaited:
                take(storage, torch.UntypedStorage(self._recording.nbytes(storage), device=HOST))
            raise


def _parts_of(
    items: Mapping[int, Sequence[Deferred]], memory: Container[int]
) -> dict[MetaView, tuple[int, int]]:
    """The elements that this rank keeps, of parameters that nothing else shares memory with."""
    parts: dict[MetaView, tuple[int, int]] = {}
    for storage, (item, *more) in items.items():
        spec = cast(ShardTensor, item.current).spec if item.is_parameter else None
        if spec is not None and not spec.boxes and not more and storage not in memory:
            parts[item.place] = spec.interval.start, spec.interval.stop
    return parts


def _plan(missing: Sequence[Deferred], recording: Recording) -> ReplayPlan:
    """How all of them get values.

    Raises:
        ConfigurationError: Some do not; lists them.
    """
    plan = recording.plan(item.place.storage for item in missing)
    found = {storage for storage in plan.completed if recording.knows(storage)}
    lost = [item for item in missing if item.place.storage not in found]
    if lost:
        names = ", ".join(sorted(item.fqn for item in lost))
        classes = ", ".join(sorted({type(item.owner).__name__ for item in lost}))
        raise ConfigurationError(
            f"Expected every parameter and buffer to get a value, found {len(lost)} on the meta "
            f"device that nothing initialises: {names}. Fill them in the constructors of "
            f"{classes}, built under trainer.init_module(empty_init=True) or in configure_model; "
            f"or define reset_parameters() there; or load a checkpoint that has them. Build the "
            f"model anew before the next try."
        )
    return plan


def _take(target: torch.Tensor, values: torch.Tensor, source: Mesh | None) -> None:
    """Copy values into a tensor; of a sharded one, into this rank's part.

    Args:
        target: The tensor.
        values: All of them, on the host.
        source: Ranks that have other values than rank 0, and get its. None: they have the same.
    """
    values = values.resolve_conj().resolve_neg()
    if source is not None:
        values = values.to(source.device).contiguous()
        source.data.broadcast_(values, 0).wait()
        source.tensor.broadcast_(values, 0).wait()
    if isinstance(target, ShardTensor):
        target.to_local().copy_(target.spec.localize(values))
    else:
        target.copy_(values)


def _make_equal(parameters: Sequence[Any], whole: Sequence[torch.Tensor], mesh: Mesh) -> None:
    """Give ranks the values of the first of those that have the same elements, where they differ.

    They have repeated the same, on processors that may round it in other ways. Shards of
    ``parameters`` are compared between replicas, tensors of ``whole`` between all ranks.
    """
    replicas = None if mesh.topology.split_replicas else mesh.replicate
    parts = [it.raw_local for it in parameters] if replicas and replicas.size > 1 else []
    own = [xxhash.xxh3_128(), xxhash.xxh3_128()]
    for found, tensors in zip(own, (parts, whole), strict=True):
        for tensor in tensors:
            found.update(cast(Any, tensor.to(HOST).view(torch.uint8).numpy()))
    said = all_gather_bytes(b"".join(found.digest() for found in own), mesh.control)
    if replicas and len({said[rank][:16] for rank in replicas.ranks}) > 1:
        for part in parts:
            replicas.broadcast_(part, 0).wait()
    if len({each[16:] for each in said}) > 1:
        for tensor in whole:
            _take(tensor, tensor, mesh)


def _as_bytes(memory: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=HOST).set_(memory)  # type: ignore[arg-type]


def _allocate(items: Iterable[Deferred]) -> dict[int, torch.UntypedStorage]:
    """Give tensors host memory, shared where they shared it before; their identity stays.

    Raises:
        RuntimeError: Native code holds a weak reference to one of them.
    """
    memory: dict[int, torch.UntypedStorage] = {}
    for item in items:
        tensor, place = item.tensor, item.place
        storage = memory.setdefault(
            place.storage, torch.UntypedStorage(tensor.untyped_storage().nbytes(), device=HOST)
        )
        body: Any = make_subclass(
            type(tensor), place.over(storage), tensor.requires_grad and tensor.is_leaf
        )
        vars(body).update(vars(tensor))
        swap_bodies(tensor, body)
    return memory


class Writes(TorchDispatchMode):
    """Notes which tensors are written to while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._reached: set[ShardSpec | int] = set()

    def reached(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to a tensor that has existed since this began."""
        return _memory_of(tensor) in self._reached

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._reached.update(map(_memory_of, written(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _memory_of(tensor: torch.Tensor) -> ShardSpec | int:
    """Common part of all tensors over the same elements."""
    if isinstance(tensor, GatheredView):
        return tensor.sharded.spec
    if isinstance(tensor, ShardTensor):
        return tensor.spec
    return storage_of(tensor) if tensor.layout is torch.strided else id(tensor)


# -- Deferred tensors of a model


def _parameter(spec: ParameterSpec, place: MetaView) -> Deferred:
    owner, name = spec.owners[0]
    if spec.parameter.grad is not None:
        raise ConfigurationError(
            f"Expected parameters on the meta device to have no gradients, found one of "
            f"{spec.fqn}: a constructor that runs a backward needs values. Build its module "
            f"outside the meta device"
        )
    return Deferred(
        fqn=spec.fqn, owner=owner, name=name, tensor=spec.parameter, place=place, is_parameter=True
    )


def _others(
    root: nn.Module,
    recording: Recording,
    storages: Iterable[int] = (),
    but: Iterable[nn.Parameter] = (),
) -> list[Deferred]:
    """The meta tensors of a model but some, in an order that is the same on all ranks.

    Where some that was recorded is in none of its attributes and still exists, they are searched
    for in all that attributes lead to.

    Args:
        root: The model.
        recording: How it was built.
        storages: Those of the tensors to leave out, one for each.
        but: Tensors to leave out.
    """
    but = [*but]
    found = list(_meta_tensors(root, recording, but, leaves=pytree.tree_leaves))
    if recording.lives_beside(Counter([*storages, *(it.place.storage for it in found)])):
        found = list(_meta_tensors(root, recording, but, leaves=_led_to))
        _warn_of_unreached(recording, [*but, *(it.tensor for it in found)])
    return sorted(found, key=lambda it: it.place.storage)


def _warn_of_unreached(recording: Recording, reached: Sequence[torch.Tensor]) -> None:
    """Point out recorded tensors that still exist and that nothing of any module leads to."""
    gc.collect()
    alive = gc.get_objects()
    modules = [it for it in alive if issubclass(type(it), nn.Module) and "_buffers" in vars(it)]
    # Those of other modules may be sharded later.
    others = [it for module in modules for _, it in _held(module, _led_to)]
    found = {id(it) for tensor in (*reached, *others) for it in (tensor, tensor._base)}
    left = [
        f"{it.dtype} of shape {tuple(it.shape)}"
        for it in alive
        if issubclass(type(it), torch.Tensor) and id(it) not in found
        if it.is_meta and it.layout is torch.strided and recording.has(it)
    ]
    if left:
        warnings.warn(
            f"{first_three(sorted(left))}: built on the meta device with the model and kept, but "
            f"nothing in the model leads to it (a class, a global, a cache, a variable). It stays "
            f"without values, and torch's products with it may be wrong without an error. Keep it "
            f"in an attribute of a module, or build it outside the meta device",
            stacklevel=2,
        )


def _refuse_views(others: Iterable[Deferred], parameters: Mapping[int, str]) -> None:
    """Refuse what lies in the memory of a parameter and is no attribute: it cannot follow it."""
    for item in others:
        fqn = parameters.get(item.place.storage)
        attributes = vars(item.owner) | item.owner._buffers
        if fqn is not None and attributes.get(item.name) is not item.tensor:
            raise ConfigurationError(
                f"{item.fqn} leads to a tensor that is made of the memory of parameter {fqn}, "
                f"which is about to be sharded, and would not follow it: expected tensors of their "
                f"own beside parameters. Clone it, or compute it from the parameter where it is "
                f"needed"
            )


def _meta_tensors(
    root: nn.Module,
    recording: Recording,
    but: Iterable[nn.Parameter],
    leaves: Callable[[Any], Iterable[Any]],
) -> Iterator[Deferred]:
    """All meta tensors of a model but some, once each.

    They are parameters, buffers and what ``leaves`` finds in attributes.
    """
    seen = set(map(id, but))
    for path, module in root.named_modules():
        for name, tensor in _held(module, leaves):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            fqn = join(path, name)
            if tensor.layout is not torch.strided or not (
                tensor.is_leaf or is_computed(module, name)
            ):
                what = "a sparse one" if tensor.is_leaf else "one with a graph"
                raise ConfigurationError(
                    f"Expected tensors on the meta device to be dense and without history, found "
                    f"{what}: {fqn}. Build the module that holds it outside the meta device, or "
                    f"detach() it"
                )
            yield Deferred(
                fqn=fqn, owner=module, name=name, tensor=tensor, place=recording.place_of(tensor)
            )


def _held(
    module: nn.Module, leaves: Callable[[Any], Iterable[Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The meta tensors among a module's parameters, buffers and attributes, by name."""
    own = {
        name: it
        for name, it in vars(module).items()
        if name not in ("_parameters", "_modules", "_buffers")
    }
    for name, value in (*module._parameters.items(), *module._buffers.items(), *own.items()):
        if isinstance(value, _PLAIN):  # most are: looking into them would take longest
            continue
        for leaf in leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                yield name, leaf


def _led_to(value: Any) -> Iterator[torch.Tensor]:
    """All tensors that a value leads to: through objects, containers, functions and their closures."""
    seen: dict[int, Any] = {}  # by address, which is another's once an object is gone
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif not isinstance(each, _PLAIN) and id(each) not in seen:
            seen[id(each)] = each
            waiting += _inside(each)


def _inside(value: Any) -> Iterable[Any]:
    """What a value holds; nothing of modules, whose tensors are found by name, and of libraries."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords, vars(value)]
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, (type, ModuleType, nn.Module)) or library in _LIBRARIES:
        return []
    slots = [
        getattr(value, name)
        for kind in type(value).__mro__
        for name in _names_of(vars(kind).get("__slots__", ()))
        if not name.startswith("__") and hasattr(value, name)
    ]
    held = [getattr(value, "__dict__", None), *slots]
    if isinstance(value, dict):
        held += [*cast("dict[Any, Any]", value).items()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        held += [*cast("Iterable[Any]", value)]
    return held


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names_of(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


_LIBRARIES = {
    "torch",
    "torchmetrics",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "shardeddp",
}
_PLAIN = (type(None), bool, int, float, str, torch.Size)


# -- Models without a recording
#
# Their values come from the reset methods of their modules.

_RESETS = ("reset_parameters", "_reset_parameters")


def record_resets(root: nn.Module, recording: Recording) -> None:
    """Record ``reset_parameters()`` of each module that has unrecorded meta parameters or buffers.

    Children come before their parent, as constructors end.

    Raises:
        ConfigurationError: A reset has replaced a parameter by another of another shape, or without
            values.
    """
    for path, module in _post_order(root):
        own = dict(module.named_parameters(recurse=False)) | dict(
            module.named_buffers(recurse=False)
        )
        unseen = {
            name: it
            for name, it in own.items()
            if it.is_meta
            and it.layout is torch.strided
            and not (recording.has(whole_parameter(it)) or is_taken_over(it))
        }
        if not unseen:
            continue
        recording.reset_names.update(join(path, name) for name in unseen)
        recording.adopt(unseen.values())
        reset = next(
            (name for name in _RESETS if callable(inspect.getattr_static(module, name, None))), None
        )
        if reset is not None:
            before = dict(module.named_parameters(recurse=False))
            with torch.device("meta"), recording.active():
                getattr(module, reset)()
            for name, parameter in before.items():
                _keep_object(module, name, parameter, reset)


def _warn_of_resets(missing: Sequence[Deferred], recording: Recording) -> None:
    """Warn about tensors that get values of resets, as nobody saw what their constructors did."""
    names = [item.fqn for item in missing if item.fqn in recording.reset_names]
    if names:
        warnings.warn(
            f"{first_three(names)} were built on the meta device under torch.device() "
            f"alone. They get the values of their modules' reset_parameters(); whatever else the "
            f"constructors do to them is lost. Build the model under "
            f"trainer.init_module(empty_init=True) or in configure_model, where nothing is lost",
            stacklevel=2,
        )


def _keep_object(module: nn.Module, name: str, parameter: nn.Parameter, reset: str) -> None:
    """Move the memory of a parameter that a reset registered anew to the former parameter."""
    found = module._parameters.get(name)
    if found is parameter:
        return
    if found is None or found.shape != parameter.shape or not found.is_meta:
        what = (
            "nothing" if found is None else f"one of shape {tuple(found.shape)} on {found.device}"
        )
        raise ConfigurationError(
            f"{type(module).__name__}.{reset}() has replaced the parameter {name!r}: expected one "
            f"of shape {tuple(parameter.shape)} on the meta device, found {what}. Fill parameters "
            f"in place"
        )
    parameter.data = found.data
    module._parameters[name] = parameter


def _post_order(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, children before their parent."""
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            yield from visit(join(path, name), child)
        yield path, module

    return visit("", root)


# -- Modules that this process does not shard


@torch.no_grad()
def materialize(root: nn.Module, recording: Recording) -> None:
    """Give a module on the meta device all its values, on the host.

    Every reference to it is followed there.

    Raises:
        ConfigurationError: Nothing can give some tensors values.
    """
    record_resets(root, recording)
    deferred = _others(root, recording)
    missing = [item for item in deferred if item.tensor.numel()]
    plan = _plan(missing, recording)
    _warn_of_resets(missing, recording)
    memory = _allocate(deferred)
    for storage, values in recording.repeat(plan, move_generators=True):
        _as_bytes(memory[storage]).copy_(_as_bytes(values))


def allocate_on_host(module: nn.Module) -> None:
    """Allocate host memory for a meta module's state-dict tensors, whose values are loaded later.

    Buffers that are not persistent stay on the meta device: nothing is going to fill them.
    """
    for child in module.modules():
        persistent = [
            it
            for name, it in child._buffers.items()
            if name not in child._non_persistent_buffers_set
        ]
        for tensor in (*child._parameters.values(), *persistent):
            if tensor is None or not tensor.is_meta:
                continue
            memory = torch.empty_like(tensor, device="cpu", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
            vars(memory).update(vars(tensor))
            swap_bodies(tensor, memory)
