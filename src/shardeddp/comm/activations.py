"""Collectives over activations, as operations of torch that compiled code sees.

Each returns a new tensor and defines no gradient. A group is passed by its name, a plain string,
which compiled graphs, deep copies and pickles of modules can keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch

from shardeddp.comm.collectives import Collectives

_NUMBERS = count(1)
_GROUPS: WeakValueDictionary[str, Collectives] = WeakValueDictionary()


def name_group(group: Collectives, name: str = "") -> str:
    """Register a group for operations under a name, a new one if empty; return the name."""
    name = name or f"tensor ranks {[*group.ranks]} of run {next(_NUMBERS)}"
    _GROUPS[name] = group
    return name


def _group(name: str) -> Collectives:
    group = _GROUPS.get(name)
    if group is None:
        raise RuntimeError(
            f"layers of this module are split over {name}, which is gone: build the module anew"
        )
    return group


@torch.library.custom_op("shardeddp::all_reduce", mutates_args=())
def all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of a group."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    _group(group).all_reduce_(total).wait()
    return total


@torch.library.custom_op("shardeddp::all_gather", mutates_args=())
def all_gather(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    """Concatenate the tensors of all ``size`` ranks of a group along a dim."""
    ranks = _group(group)
    parts = tensor.new_empty(size, *tensor.shape)
    parts[ranks.rank].copy_(tensor)
    ranks.all_gather_(parts.view(-1)).wait()
    return torch.cat(parts.unbind(), dim)


@torch.library.custom_op("shardeddp::reduce_scatter", mutates_args=())
def reduce_scatter(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    """Return this rank's chunk along a dim of the sum of a tensor over the ``size`` ranks."""
    parts = torch.stack(tensor.chunk(size, dim))  # (ranks, *part)
    total = torch.empty_like(parts[0])
    _group(group).reduce_scatter(total.view(-1), parts.view(-1)).wait()
    return total.mul_(size)  # groups average


@torch.library.custom_op("shardeddp::all_to_all", mutates_args=())
def all_to_all(
    rows: torch.Tensor, leaving: Sequence[int], arriving: Sequence[int], group: str
) -> torch.Tensor:
    """Send rows to the ranks of a group; return the rows received, (sum of arriving, ...).

    Args:
        rows: Rows to send, ordered by destination rank, (sum of leaving, ...).
        leaving: Number of rows to send to each rank of the group.
        arriving: Number of rows to receive from each rank.
        group: Name of the group.
    """
    ranks = _group(group)
    rows = rows.contiguous()
    arrived = rows.new_empty(sum(arriving), *rows.shape[1:])
    sent, received = rows.split([*leaving]), arrived.split([*arriving])
    ranks.all_to_all(
        [each.view(-1) for each in received], [each.reshape(-1) for each in sent]
    ).wait()
    received[ranks.rank].copy_(sent[ranks.rank])
    return arrived


@all_reduce.register_fake
def _(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] *= size
    return tensor.new_empty(shape)


@reduce_scatter.register_fake
def _(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] //= size
    return tensor.new_empty(shape)


@all_to_all.register_fake
def _(
    rows: torch.Tensor, leaving: Sequence[int], arriving: Sequence[int], group: str
) -> torch.Tensor:
    return rows.new_empty(sum(arriving), *rows.shape[1:])
