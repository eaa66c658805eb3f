"""Deferred initialization: values for what was made on the meta device, module by module, straight into shards.

[Note: the order of random draws]
Eager constructors finish children first, in the order in which they were registered, and a module's own
``reset_parameters`` runs at the end of its constructor. So modules are visited in post-order, and each draws for whole
parameters on the host: the same numbers in the same order. Two things leave no trace on the meta device and are told by
the caller, or guessed: which of its owners has drawn a tied parameter (guess: the first), and where the generator stood
(guess: where it stands now).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardeddp.comm import Mesh, together
from shardeddp.errors import ConfigurationError
from shardeddp.sharding.drawing import Drawing
from shardeddp.sharding.identity import swap_bodies
from shardeddp.sharding.replay import Origin, origin_of, replay
from shardeddp.sharding.resetting import Deferred, ModuleReset, find_reset, untold_initializer
from shardeddp.sharding.shard_tensor import ShardSpec, ShardTensor
from shardeddp.sharding.spec import ParameterSpec, UnitSpec, join


@dataclass(frozen=True, kw_only=True)
class Birth:
    """What is known of the making of a model's deferred tensors, and whether a checkpoint has their values."""

    load: Callable[[], None] | None = None
    """Loads a checkpoint into the sharded model. Only what it leaves out is initialised."""

    creators: Mapping[int, nn.Module] = field(default_factory=dict[int, nn.Module])
    """By identity of a parameter, the module whose constructor made it."""

    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict[int, torch.dtype])
    """By identity of a parameter, the dtype in which it was made, where it may have been converted since."""

    origins: Sequence[Origin] = ()
    """Where the random number generator stood, oldest first."""


class Materializer:
    """Finds the deferred tensors of a model before it is sharded, and gives them values after that.

    Args:
        units: The model's units, the root first.
        birth: What is known of the tensors' making.

    Raises:
        ConfigurationError: A module has a meta tensor that is neither parameter nor buffer.
    """

    def __init__(self, units: Sequence[UnitSpec], birth: Birth) -> None:
        self._root = units[0].module
        self._birth = birth
        specs = [spec for unit in units for spec in unit.parameters]
        self._parameter_places = [spec.owners[0] for spec in specs]
        deferred = [_parameter_item(spec, birth) for spec in specs if spec.parameter.is_meta]
        deferred += _meta_buffers(self._root, birth)
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
        if self._birth.load is not None:
            self._load(self._birth.load, mesh)
        wanted = self._missing()
        if wanted:
            replay(self._birth.origins, lambda stage: self._initialize(stage, wanted, mesh))
            missing = self._missing()
            together("initialising parameters", lambda: _reject_missing(missing), mesh.control)

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
            together("loading the checkpoint into a deferred model", load, mesh.control)
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
                together(f"initialising {name or 'the root module'}", one.run, mesh.control)
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


def _parameter_item(spec: ParameterSpec, birth: Birth) -> Deferred:
    creator = birth.creators.get(id(spec.parameter))
    return Deferred(
        fqn=spec.fqn,
        tensor=spec.parameter,
        places=spec.owners,
        dtype=birth.dtypes.get(id(spec.parameter), spec.parameter.dtype),
        stage=origin_of(spec.parameter, birth.origins),
        creator=creator if any(owner is creator for owner, _ in spec.owners) else spec.owners[0][0],
    )


def _meta_buffers(root: nn.Module, birth: Birth) -> list[Deferred]:
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
            stage=origin_of(found[0][1], birth.origins),
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
