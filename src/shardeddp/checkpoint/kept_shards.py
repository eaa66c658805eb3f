"""Kept shards: sharded tensors outside of model and optimizer states, such as a home-made EMA.

They are saved whole or in shards like all others. A resumed run needs them sharded again, and not
whole on every rank, so the checkpoint has the path of each, and the parameter with its layout::

    checkpoint["shardeddp"]["kept_shards"] = [["blocks.0.up.weight", ["callbacks", "EMA", "average", "up"]], ...]

They are read, and passed to callbacks, before the model is sharded: Lightning gives each callback a
deep copy. When the model is sharded, each becomes sharded in place, for all of its holders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from shardeddp.checkpoint.read import LazyTensor, Read
from shardeddp.checkpoint.schema import KEPT, KEY, OPTIMIZERS, TRAINED, WEIGHTS
from shardeddp.checkpoint.state_codec import tensors_with_paths
from shardeddp.plan.layout import Box, Interval
from shardeddp.tensor.shard_tensor import ShardTensor

_LOADED_BY_NAME = frozenset({WEIGHTS, OPTIMIZERS, TRAINED, KEY})
"""Entries with tensors that are copied into those of model, average and optimizers."""

Places: TypeAlias = list[list[Any]]
"""``[fqn of a parameter, [keys from the root of the checkpoint]]`` of each."""


def places_of_shards(checkpoint: Mapping[str, Any], module: nn.Module) -> Places:
    """Return the paths of tensors that are sharded like a parameter; no communication."""
    named = module.named_parameters()
    names = {
        id(parameter.spec): name for name, parameter in named if isinstance(parameter, ShardTensor)
    }
    entries = {key: value for key, value in checkpoint.items() if key not in _LOADED_BY_NAME}
    found = (
        (names.get(id(tensor.spec)), list(keys))
        for tensor, keys in tensors_with_paths(entries)
        if isinstance(tensor, ShardTensor)
    )
    return [[fqn, keys] for fqn, keys in found if fqn is not None]


class KeptShards:
    """Kept shards of one checkpoint, from its reading until the model is sharded."""

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        own = checkpoint.get(KEY)
        places = cast("Mapping[str, Any]", own).get(KEPT) if isinstance(own, Mapping) else None
        self._found: dict[int, tuple[torch.Tensor, str]] = {}
        for place in cast("list[Any]", places) if isinstance(places, list) else []:
            fqn, keys = cast("tuple[str, list[Any]]", place)
            holder = _at(checkpoint, keys[:-1])
            tensor = _at(holder, keys[-1:])
            if isinstance(tensor, torch.Tensor):
                self._add(fqn, _watched(tensor, holder, keys, partial(self._add, fqn)))

    def _add(self, fqn: str, tensor: torch.Tensor) -> None:
        self._found[id(tensor)] = tensor, fqn

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return True if this very object is one of them."""
        return id(tensor) in self._found

    def shard(self, module: nn.Module) -> None:
        """Shard each of them like its parameter and on its device; no communication.

        It becomes whole instead if the parameter is gone or has another shape, or if the tensor has
        a view.

        Raises:
            CheckpointError: One cannot be read as it was written. None has changed then.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        made = [
            (tensor, _like(tensor, parameters.get(fqn))) for tensor, fqn in self._found.values()
        ]
        self._found = {}
        for tensor, other in made:
            try:
                torch.utils.swap_tensors(tensor, other)
            except RuntimeError:
                # C++ or a weak reference (of a view for example) holds the tensor: it stays whole.
                if isinstance(tensor, LazyTensor):
                    tensor.keep()


def _watched(
    tensor: torch.Tensor, holder: Any, keys: list[Any], copied: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Replace a tensor in its holder by a lazy one that reports its deep copies; return it."""
    if isinstance(tensor, LazyTensor):
        lazy = tensor
    elif isinstance(holder, (dict, list)):
        lazy = LazyTensor(tuple(keys), tuple(tensor.shape), tensor.dtype, _reader_of(tensor))
        holder[keys[-1]] = lazy
    else:
        return tensor  # in a tuple: copies of it stay whole
    lazy.report_copies(copied)
    return lazy


def _reader_of(tensor: torch.Tensor) -> Read:
    whole = tensor.detach()

    def read(interval: Interval, box: Box | None = None, /) -> torch.Tensor:
        shared = whole if box is None else whole[box.slices]
        return shared.reshape(-1)[interval.start : interval.stop].clone()

    return read


def _like(tensor: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    if not isinstance(parameter, ShardTensor) or parameter.shape != tensor.shape:
        return tensor.whole() if isinstance(tensor, LazyTensor) else tensor.detach()
    spec, device = parameter.spec, parameter.to_local().device
    local = (
        spec.read(tensor.elements)
        if isinstance(tensor, LazyTensor)
        else spec.localize(tensor.detach())
    )
    return ShardTensor(local.to(device, copy=True), spec)


def _at(value: Any, keys: list[Any]) -> Any:
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):  # the loading code may have changed it
            return None
    return value
