"""Resetting: one module's ``reset_parameters``, run on whole parameters that are cut into shards afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardeddp.comm import Mesh
from shardeddp.errors import ConfigurationError
from shardeddp.sharding.drawing import Drawing, memory_of
from shardeddp.sharding.shard_tensor import ShardTensor
from shardeddp.sharding.unit import register

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
