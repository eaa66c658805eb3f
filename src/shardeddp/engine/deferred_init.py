"""Deferred initialization: values for parameters made on the meta device, module by module, straight into shards."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardeddp.comm import Mesh, run_on_all_ranks
from shardeddp.engine.unit import register
from shardeddp.errors import ConfigurationError
from shardeddp.tensor.operations import written
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor, mark_written
from shardeddp.tensor.unsharded import swap_bodies
from shardeddp.tensor.views import GatheredView
from shardeddp.torch_private import TorchDispatchMode
from shardeddp.wrap.tree import ParameterSpec, UnitSpec, join

# -- Drawing: what an initialization writes, and random numbers for sharded tensors that are rank 0's on every rank


class Drawing(TorchDispatchMode):
    """Surrounds a ``reset_parameters`` or a load.

    It notes which tensors are written to, draws random numbers for sharded tensors on the host and for the whole
    tensor, as an eager constructor does, and undoes what is written to tensors that are to keep their values.

    Args:
        mesh: Through which rank 0's random numbers travel.
        wanted: Sharded tensors that may be written to; all others keep their values.
        guarded: Plain tensors that keep their values.
        private: Plain tensors whose values are broadcast afterwards, so that their random numbers need not be.
    """

    def __init__(
        self,
        mesh: Mesh,
        wanted: Iterable[ShardSpec],
        guarded: Sequence[torch.Tensor] = (),
        private: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self._wanted = set(wanted)
        self._guarded = {memory_of(tensor): tensor for tensor in guarded}
        self._private = {memory_of(tensor) for tensor in private}
        self._written: set[ShardSpec | int] = set()
        self._kept: dict[ShardSpec | int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensor and its values

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to a tensor that has existed since this began."""
        return _place_of(tensor) in self._written

    @property
    def written_specs(self) -> set[ShardSpec]:
        """What was written to of sharded tensors."""
        return {place for place in self._written if isinstance(place, ShardSpec)}

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for tensor, values in self._kept.values():
            tensor.copy_(values)
            mark_written(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        targets = written(func, args, kwargs)
        for target in targets:
            self._note(target)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        target = args[0] if targets and targets[0] is args[0] else None
        if not isinstance(target, ShardTensor | GatheredView):
            return self._shared(func(*args, **kwargs))
        host = torch.empty(target.shape, dtype=target.dtype)
        target.copy_(self._shared(func(host, *args[1:], **kwargs)))
        return target

    def _note(self, target: torch.Tensor) -> None:
        place = _place_of(target)
        self._written.add(place)
        if place in self._kept:
            return
        if isinstance(place, int):
            tensor = self._guarded.get(place)
        else:
            tensor = None if place in self._wanted else _sharded_of(target).to_local()
        if tensor is not None:
            self._kept[place] = tensor, tensor.detach().clone()

    def _shared(self, drawn: torch.Tensor) -> torch.Tensor:
        """The numbers that rank 0 has drawn; each rank draws, so that its generator moves as after an eager init."""
        if self._mesh.world.size == 1 or not drawn.numel() or memory_of(drawn) in self._private:
            return drawn
        values = drawn.to(self._mesh.device).contiguous()
        self._mesh.world.broadcast_(values, 0).wait()
        return drawn if values is drawn else drawn.copy_(values)


def _sharded_of(tensor: torch.Tensor) -> ShardTensor:
    return tensor if isinstance(tensor, ShardTensor) else tensor.sharded  # type: ignore[attr-defined]


def _place_of(tensor: torch.Tensor) -> ShardSpec | int:
    """What all tensors over the same elements have in common."""
    if isinstance(tensor, ShardTensor | GatheredView):
        return _sharded_of(tensor).spec
    return memory_of(tensor)


def memory_of(tensor: torch.Tensor) -> int:
    """What all plain tensors over the same memory have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


# -- Replay: draw the random numbers of a deferred initialization where the eager one would have drawn them


@dataclass(frozen=True, kw_only=True)
class ConstructionRecord:
    """Where the host's random number generator stood when the constructors of some deferred tensors began."""

    state: torch.Tensor
    """As ``torch.get_rng_state`` gives it."""

    earlier: Sequence[torch.Tensor] = ()
    """Deferred tensors that were there already."""

    reseeded: bool = False
    """The generator has been seeded anew since, so these draws do not move what comes after them."""


def origin_of(tensor: torch.Tensor, origins: Sequence[ConstructionRecord]) -> int:
    """Index of the origin under which a tensor was made: the last that did not find it there."""
    younger = [i for i, origin in enumerate(origins) if not any(tensor is other for other in origin.earlier)]
    return younger[-1] if younger else 0


def replay(origins: Sequence[ConstructionRecord], draw: Callable[[int], None]) -> None:
    """Draw from each origin in turn, and leave the generator where eager constructors would have left it.

    A generator that has not moved since an origin continues behind what was drawn from it. One that has moved, or was
    seeded anew, stays as it is.

    Args:
        origins: Oldest first; none is the state of now.
        draw: Draws what belongs to the origin of this index.
    """
    now = torch.get_rng_state()
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, origin in enumerate(origins or [ConstructionRecord(state=now)]):
        start = _follow(origin.state, moves)
        torch.set_rng_state(start)
        draw(index)
        if not origin.reseeded:
            moves.append((start, torch.get_rng_state()))
    torch.set_rng_state(_follow(now, moves))


def _follow(state: torch.Tensor, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    for before, after in moves:
        if torch.equal(state, before):
            state = after
    return state


# -- Resetting: one module's ``reset_parameters``, run on whole parameters that are cut into shards afterwards

Reset = Callable[[], object]

_RESETS = ("reset_parameters", "_reset_parameters")
# By these names constructors initialise children whose own resets they do not trust.
_CUSTOM = ("_init_weights", "init_weights", "initialize_weights", "post_init")


@dataclass(kw_only=True, eq=False)
class Deferred:
    """A parameter or buffer without values, until something writes to it."""

    fqn: str
    tensor: torch.Tensor
    """What is registered now: the meta tensor, later the sharded parameter or a buffer with memory."""

    places: Sequence[tuple[nn.Module, str]]
    """Every module and name under which it is registered."""

    dtype: torch.dtype
    """In which its constructor has made it."""

    stage: int
    """Which state of the random number generator it was made from."""

    creator: nn.Module | None = None
    """The module whose constructor has made it; None where nobody knows."""

    filled: bool = False


class ModuleReset:
    """The reset of one module.

    Args:
        module: The module.
        reset: What to call.
        own: Its deferred tensors.
        wanted: Those whose values are to be taken; what is drawn for others is dropped.
    """

    def __init__(self, module: nn.Module, reset: Reset, own: Sequence[Deferred], wanted: set[Deferred]) -> None:
        self._module = module
        self._reset = reset
        self._wanted = wanted
        held = {id(item.tensor): item for item in own}
        self._parameters = {name: held[id(it)] for name, it in module._parameters.items() if id(it) in held}
        self._buffers = {name: held[id(it)] for name, it in module._buffers.items() if id(it) in held}
        self._whole: dict[str, torch.Tensor] = {name: _whole_parameter(item) for name, item in self._parameters.items()}
        self._memory = {name: memory_of(whole) for name, whole in self._whole.items()}

    @property
    def temporaries(self) -> list[torch.Tensor]:
        """Whole tensors that exist for the time of the reset."""
        return list(self._whole.values())

    def run(self) -> None:
        """Call the reset with whole parameters in place of the sharded ones.

        Raises:
            ConfigurationError: It has replaced a parameter by another of another shape, or without values.
        """
        for name, whole in self._whole.items():
            register(self._module, name, whole)
        try:
            self._reset()
            for name, whole in self._whole.items():
                self._whole[name] = self._found(name, whole.shape)
        finally:
            for name, item in self._parameters.items():
                register(self._module, name, item.tensor)

    def finish(self, drawing: Drawing, mesh: Mesh) -> None:
        """Take the values that were wanted: rank 0's for parameters, this rank's interval of them."""
        for name, item in self._parameters.items():
            whole = self._whole[name]
            drawn = drawing.has_written(whole) or memory_of(whole) != self._memory[name]
            if item not in self._wanted or not drawn or (item.filled and item.creator is not self._module):
                continue
            values = whole.detach().to(mesh.device).contiguous()
            if mesh.world.size > 1 and values.numel():
                mesh.world.broadcast_(values, 0).wait()
            item.tensor.copy_(values)
            item.filled = True
        for name, item in self._buffers.items():
            self._finish_buffer(name, item, drawing)

    def _finish_buffer(self, name: str, item: Deferred, drawing: Drawing) -> None:
        found = self._module._buffers.get(name)
        if found is not None and found is item.tensor:
            item.filled = item.filled or drawing.has_written(found)
        elif item in self._wanted and found is not None and not found.is_meta:
            item.tensor, item.filled = found, True
            for owner, place in item.places:
                owner._buffers[place] = found
        else:
            self._module._buffers[name] = item.tensor

    def _found(self, name: str, shape: torch.Size) -> torch.Tensor:
        found = self._module._parameters.get(name)
        if found is None or found.shape != shape or found.is_meta:
            what = "nothing" if found is None else f"one of shape {tuple(found.shape)} on {found.device}"
            raise ConfigurationError(
                f"{type(self._module).__name__}.{self._reset.__name__}() has replaced the parameter {name!r}: expected "
                f"one of shape {tuple(shape)} with values, found {what}. Fill parameters in place"
            )
        return found


def find_reset(module: nn.Module, owns: bool) -> Reset | None:
    """What gives a module the values that its constructor would have given it.

    Args:
        module: The module.
        owns: Whether it has deferred tensors of its own; then its reset is always called. Otherwise only if its
            constructor does so, as that of ``nn.Transformer``.
    """
    name = next((name for name in _RESETS if callable(inspect.getattr_static(module, name, None))), None)
    if name is None or not (owns or _constructor_names(type(module)).intersection((name, *_CUSTOM))):
        return None
    return getattr(module, name)  # type: ignore[no-any-return]


def untold_initializer(module: nn.Module) -> str | None:
    """The method by which a constructor initialises its children in a way that a deferred model cannot repeat."""
    if any(callable(inspect.getattr_static(module, name, None)) for name in _RESETS):
        return None
    called = _constructor_names(type(module))
    return next((name for name in _CUSTOM if name in called), None)


def _constructor_names(cls: type) -> set[str]:
    """Names of what the constructors of a class and its bases call or read."""
    found: set[str] = set()
    for base in cls.__mro__:
        constructor = inspect.unwrap(vars(base)["__init__"]) if "__init__" in vars(base) else None
        if inspect.isfunction(constructor):
            found.update(constructor.__code__.co_names)
    return found


def _whole_parameter(item: Deferred) -> nn.Parameter:
    """A plain parameter on the host with the attributes that the user has set on the sharded one."""
    sharded = item.tensor
    whole = nn.Parameter(
        torch.empty(sharded.shape, dtype=item.dtype, device="cpu"), requires_grad=sharded.requires_grad
    )
    vars(whole).update(sharded.user_attributes() if isinstance(sharded, ShardTensor) else vars(sharded))
    return whole


# -- Deferred initialization: values for what was made on the meta device, module by module, straight into shards
#
# [Note: the order of random draws]
# Eager constructors finish children first, in the order in which they were registered, and a module's own
# ``reset_parameters`` runs at the end of its constructor. So modules are visited in post-order, and each draws for
# whole parameters on the host: the same numbers in the same order. Two things leave no trace on the meta device and
# are told by the caller, or guessed: which of its owners has drawn a tied parameter (guess: the first), and where the
# generator stood (guess: where it stands now).


@dataclass(frozen=True, kw_only=True)
class DeferredRecord:
    """What is known of the making of a model's deferred tensors, and whether a checkpoint has their values."""

    load: Callable[[], None] | None = None
    """Loads a checkpoint into the sharded model. Only what it leaves out is initialised."""

    creators: Mapping[int, nn.Module] = field(default_factory=dict[int, nn.Module])
    """By identity of a parameter, the module whose constructor made it."""

    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict[int, torch.dtype])
    """By identity of a parameter, the dtype in which it was made, where it may have been converted since."""

    origins: Sequence[ConstructionRecord] = ()
    """Where the random number generator stood, oldest first."""


class Materializer:
    """Finds the deferred tensors of a model before it is sharded, and gives them values after that.

    Args:
        units: The model's units, the root first.
        record: What is known of the tensors' making.

    Raises:
        ConfigurationError: A module has a meta tensor that is neither parameter nor buffer.
    """

    def __init__(self, units: Sequence[UnitSpec], record: DeferredRecord) -> None:
        self._root = units[0].module
        self._record = record
        specs = [spec for unit in units for spec in unit.parameters]
        self._parameter_places = [spec.owners[0] for spec in specs]
        deferred = [_parameter_item(spec, record) for spec in specs if spec.parameter.is_meta]
        deferred += _meta_buffers(self._root, record)
        self._deferred: dict[int, Deferred] = {id(item.tensor): item for item in deferred}
        if deferred:
            _reject_stray(self._root)
            _warn_untold(self._root)

    @torch.no_grad()
    def fill(self, mesh: Mesh) -> None:
        """Give every deferred tensor its values; a collective of all ranks.

        Raises:
            ConfigurationError: Nothing can give some of them values; lists them.
            RankError: Some rank failed in a ``reset_parameters`` or in loading.
        """
        self._locate()
        if self._record.load is not None:
            self._load(self._record.load, mesh)
        wanted = self._missing()
        if wanted:
            replay(self._record.origins, lambda stage: self._initialize(stage, wanted, mesh))
            missing = self._missing()
            run_on_all_ranks("initialising parameters", lambda: _reject_missing(missing), mesh.control)

    def _missing(self) -> set[Deferred]:
        return {item for item in self._deferred.values() if not item.filled}

    def _locate(self) -> None:
        """Follow the tensors to what they have become: parameters to shards, buffers to memory on the host."""
        for item in self._deferred.values():
            owner, name = item.places[0]
            parameter = owner._parameters.get(name)
            item.tensor = _allocate(item) if parameter is None else parameter
        self._deferred = {id(item.tensor): item for item in self._deferred.values()}

    def _load(self, load: Callable[[], None], mesh: Mesh) -> None:
        with Drawing(mesh, self._specs()) as drawing:
            run_on_all_ranks("loading the checkpoint into a deferred model", load, mesh.control)
        for item in self._deferred.values():
            item.filled = drawing.has_written(item.tensor)

    def _specs(self) -> set[ShardSpec]:
        """The specs of all parameters of the model."""
        parameters = (owner._parameters[name] for owner, name in self._parameter_places)
        return {parameter.spec for parameter in parameters if isinstance(parameter, ShardTensor)}

    def _initialize(self, stage: int, wanted: set[Deferred], mesh: Mesh) -> None:
        """Run the resets of the modules whose deferred tensors, or else whose children's, belong to a stage."""
        specs = {item.tensor.spec: item for item in wanted if isinstance(item.tensor, ShardTensor)}
        kept = {id(item.tensor) for item in wanted}
        guarded = [buffer for buffer in self._root.buffers() if id(buffer) not in kept]
        for name, module in _post_order(self._root):
            own = self._own(module)
            reset = find_reset(module, bool(own))
            inside = own or [item for child in module.modules() for item in self._own(child)]
            if reset is None or wanted.isdisjoint(inside) or max(item.stage for item in inside) != stage:
                continue
            one = ModuleReset(module, reset, own, wanted)
            with Drawing(mesh, specs, guarded, one.temporaries) as drawing:
                run_on_all_ranks(f"initialising {name or 'the root module'}", one.run, mesh.control)
            one.finish(drawing, mesh)
            for spec in drawing.written_specs & specs.keys():
                specs[spec].filled = True
            self._deferred.update({id(item.tensor): item for item in own})

    def _own(self, module: nn.Module) -> list[Deferred]:
        """The deferred tensors that a module holds itself."""
        held = dict.fromkeys(map(id, (*module._parameters.values(), *module._buffers.values())))
        return [self._deferred[key] for key in held if key in self._deferred]


def allocate_on_host(module: nn.Module) -> None:
    """Give what a state dict has of a module on the meta device memory on the host, for values that are to be loaded.

    Buffers that are not persistent stay on the meta device: nothing is going to fill them.
    """
    for child in module.modules():
        persistent = [it for name, it in child._buffers.items() if name not in child._non_persistent_buffers_set]
        for tensor in (*child._parameters.values(), *persistent):
            if tensor is None or not tensor.is_meta:
                continue
            memory = torch.empty_like(tensor, device="cpu", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
            vars(memory).update(vars(tensor))
            swap_bodies(tensor, memory)


def _parameter_item(spec: ParameterSpec, record: DeferredRecord) -> Deferred:
    creator = record.creators.get(id(spec.parameter))
    return Deferred(
        fqn=spec.fqn,
        tensor=spec.parameter,
        places=spec.owners,
        dtype=record.dtypes.get(id(spec.parameter), spec.parameter.dtype),
        stage=origin_of(spec.parameter, record.origins),
        creator=creator if any(owner is creator for owner, _ in spec.owners) else spec.owners[0][0],
    )


def _meta_buffers(root: nn.Module, record: DeferredRecord) -> list[Deferred]:
    """Every buffer object on the meta device, with all its places."""
    places: dict[int, list[tuple[str, torch.Tensor, nn.Module, str]]] = {}
    for path, module in root.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                fqn = join(path, name)
                places.setdefault(id(buffer), []).append((fqn, buffer, module, name))
    return [
        Deferred(
            fqn=found[0][0],
            tensor=found[0][1],
            places=[(module, name) for _, _, module, name in found],
            dtype=found[0][1].dtype,
            stage=origin_of(found[0][1], record.origins),
        )
        for found in places.values()
    ]


def _allocate(item: Deferred) -> torch.Tensor:
    """Give a buffer memory on the host; the object stays, wherever it is referred to, unless native code holds it."""
    memory = torch.empty_like(item.tensor, device="cpu")
    try:
        swap_bodies(item.tensor, memory)
    except RuntimeError:
        for owner, name in item.places:
            owner._buffers[name] = memory
        return memory
    return item.tensor


def _post_order(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, children before their parent: the order in which constructors end."""
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            yield from visit(join(path, name), child)
        yield path, module

    return visit("", root)


def _reject_stray(root: nn.Module) -> None:
    stray = [
        join(path, name)
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if stray:
        raise ConfigurationError(
            f"Expected meta tensors to be parameters or buffers, found {len(stray)} plain attributes: "
            f"{', '.join(stray)}. Nothing can give these values: build the modules that hold them (metrics, caches) "
            f"outside the meta device, or register them as buffers that reset_parameters() fills."
        )


def _warn_untold(root: nn.Module) -> None:
    for cls, name in {type(module): untold_initializer(module) for module in root.modules()}.items():
        if name is not None:
            warnings.warn(
                f"the constructor of {cls.__name__} initialises parameters by {name}, which has no effect on the meta "
                f"device: its children keep their own initial values. Give {cls.__name__} a reset_parameters() that "
                f"does what the constructor does; it is called when the model has been sharded",
                stacklevel=2,
            )


def _reject_missing(missing: set[Deferred]) -> None:
    if not missing:
        return
    names = sorted(item.fqn for item in missing)
    classes = sorted({type(owner).__name__ for item in missing for owner, _ in item.places[:1]})
    raise ConfigurationError(
        f"Expected every parameter and buffer to get a value, found {len(names)} on the meta device that nothing "
        f"initialises: {', '.join(names)}. Define reset_parameters() in {', '.join(classes)} so that it fills them, "
        f"build these modules outside the meta device, or load a checkpoint that has them. Build the model anew "
        f"before the next try."
    )
