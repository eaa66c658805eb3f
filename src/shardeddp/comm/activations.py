"""Collectives over activations, as operations of torch that compiled code sees.

Each returns a new tensor and knows nothing of gradients. A group is given by its name, a plain
string, as compiled graphs, deep copies and pickles of modules keep it.
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
    """Let operations find a group by the name that this returns, or by one that it has already."""
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
    """The sum of a tensor over the ranks of a group."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    _group(group).all_reduce_(total).wait()
    return total


@torch.library.custom_op("shardeddp::all_gather", mutates_args=())
def all_gather(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    """The tensors of all ``size`` ranks of a group, one behind the other along a dim."""
    ranks = _group(group)
    parts = tensor.new_empty(size, *tensor.shape)
    parts[ranks.rank].copy_(tensor)
    ranks.all_gather_(parts.view(-1)).wait()
    return torch.cat(parts.unbind(), dim)


@torch.library.custom_op("shardeddp::reduce_scatter", mutates_args=())
def reduce_scatter(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    """This rank's part along a dim of the sum of a tensor over the ``size`` ranks of a group."""
    parts = torch.stack(tensor.chunk(size, dim))  # (ranks, *part)
    total = torch.empty_like(parts[0])
    _group(group).reduce_scatter(total.view(-1), parts.view(-1)).wait()
    return total.mul_(size)  # groups average


@torch.library.custom_op("shardeddp::all_to_all", mutates_args=())
def all_to_all(
    rows: torch.Tensor, leaving: Sequence[int], arriving: Sequence[int], group: str
) -> torch.Tensor:
    """Rows of all ranks for this one, (sum of arriving, ...).

    Args:
        rows: (sum of leaving, ...); rank by rank, what each is sent.
        leaving: Number of rows for each rank of the group.
        arriving: Number of rows from each.
        group: Its name.
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
