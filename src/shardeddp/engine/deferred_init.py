"""Deferred initialization: values for meta-device models, one parameter at a time, into shards."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash
from torch import nn

from shardeddp.comm import (
    Collectives,
    Mesh,
    agree_on_highest_alike,
    agree_on_layout,
    all_gather_bytes,
    run_on_all_ranks,
)
from shardeddp.engine.recording import Recording, tensors_on_meta
from shardeddp.engine.replay import HOST, MetaView, ReplayPlan
from shardeddp.engine.takeover import await_values, is_taken_over, note_values
from shardeddp.errors import ConfigurationError, first_three
from shardeddp.plan.layout import Interval, interval_of
from shardeddp.tensor.distributed import forget_whole, whole_parameter
from shardeddp.tensor.gradient_hooks import put_hooks, take_hooks
from shardeddp.tensor.operations import written
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor
from shardeddp.tensor.unsharded import swap_bodies
from shardeddp.tensor.views import GatheredView
from shardeddp.torch_private import (
    DispatchMode,
    make_subclass,
    pytree,
    storage_of,
    without_torch_function,
)
from shardeddp.wrap.tree import ParameterSpec, UnitSpec, is_computed, join

# -- Materializer: values of deferred tensors, in recorded order


@dataclass(frozen=True, eq=False, kw_only=True)
class Deferred:
    """Tensor of a model on the meta device, without values so far."""

    fqn: str
    module: nn.Module
    """First module that holds the tensor."""

    name: str
    """Name of the parameter, buffer or attribute in that module."""

    tensor: torch.Tensor
    view: MetaView
    is_parameter: bool = False
    is_shared: bool = True
    """Whether ranks have equal values, as under DDP; attributes are each rank's own."""

    @property
    def current(self) -> torch.Tensor:
        """Current tensor; the sharded one for a parameter."""
        return self.module._parameters[self.name] if self.is_parameter else self.tensor  # type: ignore[return-value]


class Materializer:
    """Finds the deferred tensors of a model before sharding, and gives them values afterwards.

    Args:
        units: Units of the model, the root unit first.
        recording: Recorded construction of the model.
        load: Function that loads a checkpoint into the sharded model; tensors that it does not load
            are initialised. None: no checkpoint.
        is_only: True if no other recorded module awaits its units. Then tensors that constructors
            left outside of the model get values, too; else :func:`fill_rest` does that.

    Raises:
        ConfigurationError: A deferred tensor cannot get values of its own.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        recording: Recording,
        load: Callable[[], None] | None = None,
        *,
        is_only: bool = False,
    ) -> None:
        root = units[0].module
        self._recording, self._load, self._is_only = recording, load, is_only
        specs = [
            spec
            for unit in units
            for spec in unit.parameters
            if spec.parameter.is_meta and not is_taken_over(spec.parameter)
        ]
        parameters = [
            _parameter(spec, recording.view_of(whole_parameter(spec.parameter))) for spec in specs
        ]
        for spec in specs:
            forget_whole(spec.parameter)
        former = [it for it in root.parameters() if it.is_meta and is_taken_over(it)]
        storages = {item.view.storage for item in parameters}
        storages.update(recording.view_of(it).storage for it in former)
        # Attributes in the memory of a parameter follow it (shard_model).
        others = _others(root, recording, but=root.parameters())
        own = [it for it in others if it.view.storage not in storages]
        _check_values([it for it in own if not it.is_shared and it.tensor.numel()], recording)
        if load is None:
            _check_writes([*parameters, *own], recording)
        self._deferred = [*parameters, *own]
        self._root, self._of_parameters = root, storages

    @property
    def is_needed(self) -> bool:
        """Whether the model has deferred tensors."""
        return bool(self._deferred)

    @torch.no_grad()
    def fill(self, mesh: Mesh) -> set[str]:
        """Give every deferred tensor its values; a collective of all ranks.

        Returns:
            Names of parameters with views outside of the model, which keep the initial values.

        Raises:
            ConfigurationError: Some tensors cannot get values; the message lists them.
            LayoutMismatchError: Ranks have built their models differently.
            RankError: A rank failed to load or to initialise its tensors.
        """
        parameters = [item.current for item in self._deferred if item.is_parameter]
        await_values(parameters)
        memory: dict[int, torch.UntypedStorage] = {}
        kept: dict[int, torch.UntypedStorage] = {}  # of this rank alone
        own = [item for item in self._deferred if not item.is_parameter]
        for item in sorted(own, key=lambda it: not it.is_shared):
            is_common = item.is_shared or item.view.storage in memory
            _allocate(item.tensor, item.view, memory if is_common else kept)
            if isinstance(item.module, torch.jit.ScriptModule):  # it has a tensor of its own
                setattr(item.module, item.name, item.tensor)
        filled: list[torch.Tensor] = []
        for tensor, view in _elsewhere(self._recording, self._deferred):
            is_own = view.storage in kept or view.storage in self._of_parameters
            if view.storage in memory or is_own or self._is_only:
                _allocate(tensor, view, memory if view.storage in memory else kept)
                filled.append(tensor)
        if self.is_needed:
            _name_host(self._root, filled)
        self._fill(mesh, memory, kept)
        note_values(parameters)
        self._recording.forget_values()
        return {it.fqn for it in self._deferred if it.is_parameter and it.view.storage in kept}

    def _fill(
        self,
        mesh: Mesh,
        memory: Mapping[int, torch.UntypedStorage],
        kept: Mapping[int, torch.UntypedStorage],
    ) -> None:
        """Fill the model's tensors, and those kept elsewhere, by index of their storages."""
        # Ranks have parts of a parameter, or nothing of it, and agree on its whole.
        missing = [item for item in self._deferred if item.is_shared and item.view.numel]
        if self._load is not None and missing:
            with torch.compiler.set_stance("force_eager"), Writes() as writes:
                run_on_all_ranks(
                    "loading the checkpoint into a deferred model", self._load, mesh.control
                )
            missing = [item for item in missing if not writes.reached(item.current)]
        if not missing:
            _refill(kept, self._recording)
            self._recording.rewind()
            return

        def make_plan() -> tuple[ReplayPlan, bytes]:
            _check_values(missing, self._recording)
            plan = self._recording.plan(item.view.storage for item in missing)
            return plan, plan.digest()

        plan, digest = run_on_all_ranks("initialising parameters", make_plan, mesh.control)
        if mesh.rank == 0:
            _warn_of_resets(missing, self._recording)
        parts: dict[int, list[Deferred]] = {}
        for item in missing:
            parts.setdefault(item.view.storage, []).append(item)
        agree_on_layout(
            [f"initialises {parts[storage][0].fqn}" for storage in plan.completed], mesh.control
        )

        _, alike = agree_on_highest_alike(
            [], digest, mesh.control, "agreement on how parameters are initialised"
        )
        source = None if alike else mesh
        if alike:
            # Tensors kept elsewhere are filled in the same replay, which draws all numbers once.
            plan = self._recording.plan({*plan.wanted, *kept}) if kept else plan
            plan.narrow(_parts_of(parts, {*memory, *kept}))
        else:
            _refill(kept, self._recording)

        def take(storage: int, values: torch.UntypedStorage) -> None:
            if alike and storage in kept:
                _as_bytes(kept[storage]).copy_(_as_bytes(values))
            if storage in memory:
                _take(_as_bytes(memory[storage]), _as_bytes(values), source)
            for item in parts.get(storage, ()):
                if item.is_parameter:
                    _take(item.current, item.view.over(values), source)

        run_on_all_ranks(
            "initialising parameters", lambda: self._repeat(plan, take, alike), mesh.control
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
            # Other ranks send and receive the remaining tensors before they learn of the error, so
            # this rank must take part without values.
            for storage in awaited:
                take(storage, torch.UntypedStorage(self._recording.nbytes(storage), device=HOST))
            raise


def _parts_of(
    items: Mapping[int, Sequence[Deferred]], whole: Container[int]
) -> dict[MetaView, tuple[int, int]]:
    """Return the interval of elements that this rank keeps, for parameters with unshared memory."""
    parts: dict[MetaView, tuple[int, int]] = {}
    for storage, (item, *more) in items.items():
        spec = cast(ShardTensor, item.current).spec if item.is_parameter else None
        own = None if spec is None else _own_interval(spec)
        if own is not None and not more and storage not in whole:
            parts[item.view] = own.start, own.stop
    return parts


def _own_interval(spec: ShardSpec) -> Interval | None:
    """Return the interval of a whole parameter that this rank owns; None: it owns several.

    Rows of a split layer and stacked experts are one box, whose elements follow each other; of an
    expert in a list that other ranks have, it owns nothing.
    """
    if not spec.boxes:
        return spec.interval
    if not spec.shared:
        return Interval(0, 0)
    try:
        (box,) = spec.shared
        return spec.interval.shift(interval_of(box, spec.shape).start)
    except ValueError:
        return None


def _check_values(missing: Sequence[Deferred], recording: Recording) -> None:
    """Check that the recording gives all tensors values."""
    plan = recording.plan(item.view.storage for item in missing)
    found = {storage for storage in plan.completed if recording.knows(storage)}
    lost = [item for item in missing if item.view.storage not in found]
    if lost:
        names = ", ".join(sorted(item.fqn for item in lost))
        classes = ", ".join(sorted({type(item.module).__name__ for item in lost}))
        raise ConfigurationError(
            f"Expected every parameter and buffer to get a value, found {len(lost)} on the meta "
            f"device that nothing initialises: {names}. Fill them in the constructors of "
            f"{classes}, built under trainer.init_module(empty_init=True) or in configure_model; "
            f"or define reset_parameters() there; or load a checkpoint that has them. Build the "
            f"model anew before the next try."
        )


def _check_writes(items: Sequence[Deferred], recording: Recording) -> None:
    """Reject unrecorded writes to parameters; warn about those to other tensors."""
    lost = [it for it in items if it.view.storage in recording.written]
    parameters = [it.fqn for it in lost if it.is_parameter]
    said = (
        f"{first_three(parameters or [it.fqn for it in lost])}: expected no writes on the meta "
        f"device between the construction of the model and its training, found some, which are "
        f"lost. Write under trainer.init_module(empty_init=True), or in setup()"
    )
    if parameters:
        raise ConfigurationError(said)
    if lost:
        warnings.warn(said, stacklevel=2)


def _take(target: torch.Tensor, values: torch.Tensor, source: Mesh | None) -> None:
    """Copy the whole tensor's values, on the host, into a tensor, or into this rank's shard of it.

    Rank 0 broadcasts its values in the mesh ``source``; None: all ranks have equal values.
    """
    values = values.resolve_conj().resolve_neg()
    if source is not None:
        values = values.to(source.device).contiguous()
        source.broadcast_whole_(values)
    if isinstance(target, ShardTensor):
        target.to_local().copy_(target.spec.localize(values))
    else:
        target.copy_(values)


def _make_equal(parameters: Sequence[Any], whole: Sequence[torch.Tensor], mesh: Mesh) -> None:
    """Compare replayed values between ranks, and broadcast those of the first rank if they differ.

    All ranks have run the same operations, but their processors may round differently. Shards of
    ``parameters`` are compared between replicas in their mesh, which experts have of their own;
    tensors of ``whole`` between all ranks.
    """
    meshes = [mesh] if mesh.experts is None else [mesh, mesh.experts]
    replicas = [it.replicate for it in meshes if not it.topology.split_replicas]
    compared: list[tuple[Collectives | None, Sequence[torch.Tensor]]] = [(None, whole)]
    compared += [
        (group, [it.raw_local for it in parameters if it.spec.mesh.replicate is group])
        for group in replicas
        if group.size > 1
    ]
    said = all_gather_bytes(b"".join(_digest(tensors) for _, tensors in compared), mesh.control)
    for place, (group, tensors) in enumerate(compared):
        ranks = range(len(said)) if group is None else group.ranks
        if len({said[rank][16 * place : 16 * (place + 1)] for rank in ranks}) == 1:
            continue
        for tensor in tensors:
            if group is None:
                _take(tensor, tensor, mesh)
            else:
                group.broadcast_(tensor, 0).wait()


def _digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a digest of values, 16 bytes."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(cast(Any, tensor.to(HOST).view(torch.uint8).numpy()))
    return found.digest()


def _as_bytes(memory: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=HOST).set_(memory)  # type: ignore[arg-type]


def _allocate(
    tensor: torch.Tensor, view: MetaView, memory: dict[int, torch.UntypedStorage]
) -> None:
    """Give a tensor host memory, shared within its storage; it stays the same object."""
    storage = memory.setdefault(
        view.storage, torch.UntypedStorage(tensor.untyped_storage().nbytes(), device=HOST)
    )
    body: Any = make_subclass(
        type(tensor), view.over(storage), tensor.requires_grad and tensor.is_leaf
    )
    vars(body).update(vars(tensor))
    hooks = take_hooks(tensor)
    swap_bodies(tensor, body)
    put_hooks(tensor, hooks)


def _refill(
    kept: Mapping[int, torch.UntypedStorage], recording: Recording, *, move_generators: bool = False
) -> None:
    """Fill storages with their values on this rank, without other ranks."""
    for storage, values in recording.repeat(recording.plan(kept), move_generators):
        _as_bytes(kept[storage]).copy_(_as_bytes(values))


class Writes(DispatchMode):
    """Records writes to tensors while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._reached: set[ShardSpec | int] = set()

    def reached(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor, made before the mode was entered, was written to."""
        return _memory_key(tensor) in self._reached

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._reached.update(map(_memory_key, written(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _memory_key(tensor: torch.Tensor) -> ShardSpec | int:
    """Return a key that is equal for all tensors over the same elements."""
    if isinstance(tensor, GatheredView):
        return tensor.sharded.spec
    if isinstance(tensor, ShardTensor):
        return tensor.spec
    return storage_of(tensor) if tensor.layout is torch.strided else id(tensor)


# -- Deferred tensors of a model


def _parameter(spec: ParameterSpec, view: MetaView) -> Deferred:
    module, name = spec.registrations[0]
    if spec.parameter.grad is not None:
        raise ConfigurationError(
            f"Expected parameters on the meta device to have no gradients, found one of "
            f"{spec.fqn}, which has no values: of a backward in a constructor, or one that counted "
            f"FLOPs. Build its module outside of the meta device; after counting, zero_grad()"
        )
    return Deferred(
        fqn=spec.fqn, module=module, name=name, tensor=spec.parameter, view=view, is_parameter=True
    )


def _others(
    root: nn.Module, recording: Recording, but: Iterable[nn.Parameter] = ()
) -> list[Deferred]:
    """Find the meta tensors of a model, once each, in an order that is the same on all ranks.

    They are parameters except those in ``but``, buffers, and tensors of attributes in nested dicts,
    lists and tuples.
    """
    seen = set(map(id, but))
    found: list[Deferred] = []
    for path, module in root.named_modules():
        shared = {*module._parameters.keys(), *module._buffers.keys()}
        for name, tensor in _held(module):
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
            view = recording.view_of(tensor)
            found.append(
                Deferred(
                    fqn=fqn,
                    module=module,
                    name=name,
                    tensor=tensor,
                    view=view,
                    is_shared=name in shared,
                )
            )
    return sorted(found, key=lambda it: it.view.storage)


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the meta tensors among a module's parameters, buffers and attributes, with names."""
    own = {name: it for name, it in vars(module).items() if name not in _OF_MODULES}
    for name, value in (*module._parameters.items(), *module._buffers.items(), *own.items()):
        if isinstance(value, _PLAIN):  # most are: flattening them would take most of the time
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                yield name, leaf


_PLAIN = (type(None), bool, int, float, str, torch.Size)


# -- Deferred tensors that are kept elsewhere
#
# A constructor may leave tensors in objects, closures and caches, or in a module of a plain list,
# which no state dict has. Torch multiplies host and meta tensors to garbage without an error. So
# all recorded tensors that still exist get values on the host, of this rank, as after an eager
# construction.


def _elsewhere(
    recording: Recording, deferred: Sequence[Deferred] = ()
) -> list[tuple[torch.Tensor, MetaView]]:
    """Find all recorded tensors that still exist on the meta device, with their view geometry.

    A warning lists those that may be unrecorded copies of the tensors of a model, ``deferred``.
    """
    tensors = tensors_on_meta() if deferred or recording.is_used else []
    if tensors:  # mostly there are none; else collect garbage, which must not get values
        tensors.clear()
        gc.collect()
        tensors = tensors_on_meta()
    with without_torch_function():  # some belong to other models, which may be gone
        known = [it for it in tensors if recording.has(it) and not recording.is_set_aside(it)]
        # Tensors without known values stay on meta: hooks make them there on purpose.
        known = [it for it in known if recording.knows(recording.view_of(it).storage)]
        computed = [it.shape for it in known if it.requires_grad and not it.is_leaf]
        shapes = {item.view.shape: item.fqn for item in deferred if item.view.numel > 1}
        missed = [it for it in tensors if it.shape in shapes and recording.has_missed(it)]
        views = [recording.view_of(it) for it in known]
    if computed:
        warnings.warn(
            f"a constructor has computed a tensor of shape {tuple(computed[0])} from parameters on the "
            f"meta device, and keeps it where no attribute leads to it. It has its value and is a "
            f"constant: no gradient leads through it. Compute it in forward",
            stacklevel=2,
        )
    if missed:
        names = sorted({shapes[it.shape] for it in missed})
        warnings.warn(
            f"{len(missed)} tensors on the meta device, with shapes as of {first_three(names)}, have "
            f"no values and get none. If they belong to a model that is used for its shapes alone, "
            f"nothing is wrong. Copies of a model (deepcopy, clone) between its construction and "
            f"its training are not recorded: take them under trainer.init_module(), in setup() or "
            f"in on_fit_start()",
            stacklevel=2,
        )
    return [*zip(known, views, strict=True)]


@torch.no_grad()
def fill_rest(recording: Recording) -> None:
    """Fill all recorded tensors that are still on the meta device, whole, on this rank."""
    kept: dict[int, torch.UntypedStorage] = {}
    elsewhere = _elsewhere(recording)
    for tensor, view in elsewhere:
        _allocate(tensor, view, kept)
    _name_host(None, [tensor for tensor, _ in elsewhere])
    _refill(kept, recording)


def _name_host(root: nn.Module | None, elsewhere: Sequence[torch.Tensor]) -> None:
    """Replace the meta device in attributes of modules by the host, as after an eager construction.

    A module that makes tensors on a stored device (``self.device = self.weight.device``) would
    make them on the meta device. Modules that hold one of the tensors ``elsewhere``, directly or by
    other modules, are searched as well as the submodules of ``root``.
    """

    def named(leaf: Any) -> Any:
        return HOST if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    modules = [*root.modules()] if root is not None else []
    for module in [*modules, *_holders(elsewhere)]:
        for name, value in [*vars(module).items()]:
            if isinstance(value, torch.device):
                vars(module)[name] = named(value)
            elif isinstance(value, (dict, list, tuple)) and name not in _OF_MODULES:
                leaves = pytree.tree_leaves(value)
                if any(named(leaf) is not leaf for leaf in leaves):
                    vars(module)[name] = pytree.tree_map(named, value)


def _holders(tensors: Sequence[torch.Tensor]) -> list[nn.Module]:
    """Find all modules of this process that hold one of the tensors, directly or in children."""
    if not tensors:
        return []
    wanted = set(map(id, tensors))
    rest = [it for it in gc.get_objects() if issubclass(type(it), nn.Module)]
    found: list[nn.Module] = []
    while True:
        more, others = [], []
        for it in rest:
            held = vars(it)  # incomplete if the constructor has failed
            parts = (x for name in _OF_MODULES for x in (held.get(name) or {}).values())
            own = [*held.values(), *parts]  # states of metrics are attributes
            (others if wanted.isdisjoint(map(id, own)) else more).append(it)
        if not more:
            return found
        found, rest, wanted = [*found, *more], others, set(map(id, more))


_OF_MODULES = ("_parameters", "_buffers", "_modules")


class MetaGuard(DispatchMode):
    """Refuses operations that mix tensors with values and tensors on the meta device.

    Torch computes many of them (products, lookups by index) without an error, from invalid memory.
    All meta tensors that were found have values by now; this mode detects the others.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as without this mode; for other modes torch marks code as skipped, for good."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
        with without_torch_function():
            on_meta = [it for it in tensors if it.is_meta]
            others = [it for it in tensors if not it.is_meta and it.dim()]
        if on_meta and others:
            found = on_meta[0]
            name = func.name().rpartition("::")[2].partition(".")[0]
            raise RuntimeError(
                f"{name} has a tensor on the meta device, which has no "
                f"values: {found.dtype} of shape {tuple(found.shape)}. The model was built on "
                f"the meta device, and this tensor was made where nothing is recorded: after the "
                f"construction, in a setup hook, by native code, by another Trainer, or on a device "
                f"that was read during the construction. Make it on the device of the step's inputs "
                f"(device=x.device), or outside of the meta device; see docs/deferred-init.md"
            )
        return func(*args, **kwargs)


# -- Models without a recording
#
# Reset methods of their modules give them values.

_RESETS = ("reset_parameters", "_reset_parameters")


def record_resets(root: nn.Module, recording: Recording) -> None:
    """Record ``reset_parameters()`` of each module that has unrecorded meta parameters or buffers.

    Children come before their parent, in the order in which constructors end.
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
        recording.adopt(unseen.values(), [join(path, name) for name in unseen])
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
    """Warn about tensors with values of resets, because their construction was not recorded."""
    names = [item.fqn for item in missing if item.fqn in recording.reset_names]
    if names:
        warnings.warn(
            f"{first_three(names)} are on the meta device, and their construction was not "
            f"recorded: it was under torch.device() alone or under another Trainer, or they are "
            f"copied or converted. They get the values of their modules' reset_parameters(); other "
            f"changes of them are lost. Do all of it under init_module(empty_init=True) of the Trainer "
            f"that trains the model, or in configure_model, where nothing is lost",
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
    """Yield every module once with its path, children before their parent."""
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
def materialize(root: nn.Module, recording: Recording, *, is_loaded: bool = False) -> None:
    """Move a module on the meta device to the host, with its values; its tensors stay the same.

    If ``is_loaded``, values are loaded afterwards, and tensors may stay uninitialised.
    """
    recording.notice_writes()
    record_resets(root, recording)
    deferred = _others(root, recording)
    if not is_loaded:
        missing = [item for item in deferred if item.tensor.numel()]
        _check_writes(deferred, recording)
        _check_values(missing, recording)
        _warn_of_resets(missing, recording)
    memory: dict[int, torch.UntypedStorage] = {}
    for item in deferred:
        _allocate(item.tensor, item.view, memory)
    elsewhere = _elsewhere(recording)
    for tensor, view in elsewhere:
        _allocate(tensor, view, memory)
    _name_host(root, [tensor for tensor, _ in elsewhere])
    _refill(memory, recording, move_generators=True)
