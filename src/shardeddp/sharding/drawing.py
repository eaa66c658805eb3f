"""Drawing: what an initialization writes, and random numbers for sharded tensors that are rank 0's on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardeddp.comm import Mesh
from shardeddp.sharding.gathered import GatheredView
from shardeddp.sharding.questions import written
from shardeddp.sharding.shard_tensor import ShardSpec, ShardTensor, mark_written


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
