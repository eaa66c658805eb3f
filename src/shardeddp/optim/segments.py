"""Segments: neighbours in a main shard that an element-wise optimizer steps on as one 1D tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardeddp.optim.scope import SCALAR_STATES
from shardeddp.optim.swap import State
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import storage_of, storage_use_count

WINDOW = 1 << 18
"""Elements of a window of a main shard: parameters that begin in one window are stepped together.

A step's temporary tensors are as long as its segments, and stay in a core's cache if those are
short: AdamW with `foreach=False` on a CPU steps 4 Mi elements in 8 ms in segments of this length,
and in 19 ms in one segment.
"""


class Segment:
    """Neighbouring local parameters, and the 1D tensor that is stepped on instead of them.

    Three parameters of 6, 5 and 4 elements, each on a multiple of 4::

        main shard   . . a a a a a a - - b b b b b - - - c c c c . .
        segment          a a a a a a - - b b b b b - - - c c c c        starts = [0, 8, 16]

    Padding between them is stepped on as well: its gradient is zero, and it is never read.

    Args:
        shards: Local parameters, 1D, in the order of memory; :func:`chains` finds them.
    """

    def __init__(self, shards: Sequence[torch.Tensor]) -> None:
        self.shards = list(shards)
        first = int(shards[0].storage_offset())
        self.starts = [int(each.storage_offset()) - first for each in shards]
        self.shard = _span(shards)
        """1D view of the main shard with its own ``.grad``: optimizers may share parameters."""

        self.tensor = self.shard
        """Tensor stepped on, 1D: the segment itself, or a copy in host memory."""

    def step_on(self, tensor: torch.Tensor) -> None:
        """Let the optimizer step on another tensor of this size."""
        self.tensor = tensor

    @property
    def numel(self) -> int:
        """Number of elements, with the padding between parameters."""
        return self.shard.numel()

    def stop(self, index: int) -> int:
        """Return the offset in the segment at which a parameter ends."""
        return self.starts[index] + self.shards[index].numel()


def _span(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return neighbours in one storage as one 1D tensor, with a version counter of its own."""
    first, last = tensors[0], tensors[-1]
    numel = last.storage_offset() + last.numel() - first.storage_offset()
    return first.data.as_strided((numel,), (1,), first.storage_offset())


def gradient_of(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return a segment's gradient, 1D, from its local gradients, of which all or none are given."""
    known = [part for part in parts if part is not None]
    return _span(known) if len(known) > 1 else next(iter(known), None)


# -- Chains: neighbours that may form a segment


def chains(
    parameters: Sequence[torch.Tensor], parts: Sequence[torch.Tensor | None]
) -> list[list[int]]:
    """Divide the parameters of a group that have a gradient into chains of neighbours.

    Returns:
        Indices of parameters, in the order of memory; the chains in the order of the group. The
        first parameter is a chain of its own: options that make a step fail make it fail there,
        on all ranks and before anything else has changed, as in a step on single parameters.
    """
    found = [index for index, part in enumerate(parts) if part is not None]
    placed: dict[Any, list[tuple[int, int]]] = {}
    result = [[position] for position in found[:1]]
    for position in found[1:]:
        parameter = parameters[position]
        if isinstance(parameter, ShardTensor) and parameter.group is not None:
            placed.setdefault(parameter.group, []).append((parameter.index_in_group, position))
        else:
            result.append([position])
    for neighbours in placed.values():
        chain: list[int] = []
        for index, position in sorted(neighbours):
            before = chain[-1] if chain else None
            if before is not None and _are_neighbours(parameters, parts, before, position, index):
                chain.append(position)
            else:
                chain = [position]
                result.append(chain)
    return sorted(result, key=min)


def _are_neighbours(
    parameters: Sequence[Any],
    parts: Sequence[torch.Tensor | None],
    before: int,
    position: int,
    index: int,
) -> bool:
    """Return whether only padding lies between two parameters, and between their gradients."""
    if parameters[before].index_in_group + 1 != index:
        return False
    one, other = parameters[before].raw_local, parameters[position].raw_local
    part, other_part = parts[before], parts[position]
    distance = other.storage_offset() - one.storage_offset()
    return (
        part is not None
        and other_part is not None
        and _is_exact(one)
        and distance >= one.numel()
        and one.storage_offset() // WINDOW == other.storage_offset() // WINDOW
        and _is_in_one_memory(one, other)
        and _lies_like(part, one)
        and _lies_like(other_part, other)
        and other_part.storage_offset() - part.storage_offset() == distance
        and _is_in_one_memory(part, other_part)
    )


def _is_exact(shard: torch.Tensor) -> bool:
    """Return whether new values are independent of an element's position and of the numel.

    On CPUs, operations on half precision round once in whole vectors and twice in the remainder at
    the end of a tensor.
    """
    return shard.device.type != "cpu" or shard.dtype in (torch.float32, torch.float64)


def _lies_like(part: torch.Tensor, shard: torch.Tensor) -> bool:
    return (
        type(part) is torch.Tensor
        and not part.requires_grad
        and part.shape == shard.shape
        and (part.is_contiguous() or part.numel() < 2)
    )


def _is_in_one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and storage_of(one) == storage_of(other)


# -- Splitting and joining of segments

Slices = WeakTensorKeyDictionary
"""Maps the state of a part of a segment to the tensor that it is a slice of, and its offset there.

They lie there as the parameters do in their main shard, so neighbours are joined without a copy.
"""


def split(
    segment: Segment, state: State | None, cuts: Iterable[int], slices: Slices
) -> list[tuple[Segment, State | None]]:
    """Divide a segment before some of its parameters, the first of each part but the first.

    Parts have slices of element-wise states and copies of others; new slices are added. The first
    part takes over the state of the segment.
    """
    parts: list[tuple[Segment, State | None]] = []
    for first, stop in pairwise([0, *cuts, len(segment.shards)]):
        part = Segment(segment.shards[first:stop])
        if state is None:
            parts.append((part, None))
            continue
        start, end = segment.starts[first], segment.stop(stop - 1)
        taken: State = {}
        for name, value in state.items():
            if not _is_by_element(name, value, segment):
                copies = first > 0 and isinstance(value, torch.Tensor)
                taken[name] = value.clone() if copies else value
                continue
            whole, offset = value, 0
            if value in slices:
                whole, offset = slices[value]
            taken[name] = value[start:end]
            slices[taken[name]] = whole, offset + start
        parts.append((part, taken))
    return parts


def references(states: Mapping[Any, State], key: Any) -> list[int]:
    """Return the reference counts of a state and of its values.

    The state is looked up here: the count of an argument depends on whether Python calls functions
    by itself, which it does not while any thread runs code of ``torch.compile``.
    """
    state = states[key]
    return [sys.getrefcount(state), *map(sys.getrefcount, state.values())]


_PROBE: dict[int, State] = {0: {"alone": torch.zeros((), device="cpu")}}
_ALONE = references(_PROBE, 0)
"""Reference counts of a state, and of a value, held by the optimizer alone."""


def signature(segment: Segment, state: State | None, held: Sequence[int], slices: Slices) -> Any:
    """Return the common part of the states of neighbours that can be joined; None: they cannot.

    A number per parameter, as a tensor or not, has to be equal in all of them. A value with other
    references (``held`` by :func:`references`) is left as it is: a step count that was taken from
    ``optimizer.state`` goes on counting for its own parameter, and writes to it reach that one.
    """
    if state is None:
        return ()
    if held[0] > _ALONE[0]:
        return None
    found: list[Any] = []
    for (name, value), count in zip(state.items(), held[1:], strict=True):
        own = _signature_of_value(segment, name, value, count > _ALONE[1], slices)
        if own is None:
            return None
        found.append((name, own))
    return tuple(found)


def _signature_of_value(segment: Segment, name: str, value: Any, held: bool, slices: Slices) -> Any:
    if value is None or isinstance(value, (int, float, complex)):
        return type(value), value
    if type(value) is not torch.Tensor or value.requires_grad or not value.is_contiguous():
        return None
    kind = (value.dtype, value.device)
    if _is_by_element(name, value, segment):
        if value in slices:
            whole, start = slices[value]
            return *kind, id(whole), start - int(segment.shard.storage_offset())
        # To be moved to a longer tensor: nothing else may refer to the memory that it leaves.
        return None if held or _is_shared(value) else (*kind, "apart")
    return None if value.dim() or held or _is_shared(value) else (*kind, value.item())


def join(
    pairs: Sequence[tuple[Segment, State | None]], slices: Slices
) -> tuple[Segment, State | None]:
    """Join neighbours, in order, with states of one signature; new slices are added."""
    segment = Segment([shard for part, _ in pairs for shard in part.shards])
    origin = int(segment.shard.storage_offset())
    first, state = pairs[0]
    if state is None:
        return segment, None
    joined: State = {}
    for name, value in state.items():
        if _is_by_element(name, value, first):
            if value not in slices:
                whole = value.new_zeros(segment.numel)
                for part, own in pairs:
                    start = int(part.shard.storage_offset()) - origin
                    if own is not None:  # it moves to the new memory, and frees its own
                        own[name] = whole[start : start + part.numel].copy_(own[name])
                        slices[own[name]] = whole, start
            whole, start = slices[state[name]]
            joined[name] = whole[start : start + segment.numel]
            slices[joined[name]] = whole, start
        else:
            joined[name] = value
    return segment, joined


def _is_by_element(name: str, value: Any, segment: Segment) -> bool:
    """Return whether a state has one element per element of the segment, not one per parameter."""
    return (
        isinstance(value, torch.Tensor)
        and name not in SCALAR_STATES
        and value.dim() == 1
        and value.numel() == segment.numel
    )


def _is_shared(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor can be reached by anything but its one holder."""
    return _uses(tensor) not in _UNSHARED


def _uses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return C++ use counts of a tensor and its storage; of a view also those of its base."""
    base: Any = tensor._base
    uses = (
        tensor._use_count(),  # type: ignore[attr-defined]
        storage_use_count(storage_of(tensor)),
    )
    return uses if base is None else (*uses, base._use_count(), sys.getrefcount(base))


_VIEW = torch.zeros(1, device="cpu").view(())
_UNSHARED = {_uses(_PROBE[0]["alone"]), _uses(_VIEW)}
"""Use counts of a tensor that is no view, and of a view with a base without other references."""
