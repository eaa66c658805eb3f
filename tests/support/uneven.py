"""Loaders that have another number of batches on each rank, with and without a length, and a Trainer for them."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardeddp import ShardedDP
from support.tasks import VOCABULARY, Block
from support.trainers import make_trainer


def sequences(rank: int, count: int) -> Tensor:
    """Tokens of shape (count, 6)."""
    return torch.randint(VOCABULARY, (count, 6), generator=torch.Generator().manual_seed(rank))


class Stream(IterableDataset[Tensor]):
    """Sequences, and no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        """Those of this rank."""
        yield from sequences(dist.get_rank(), self.count)


def loader(counts: tuple[int, int], known: bool) -> DataLoader[Tensor]:
    """As many batches of two on each rank as ``counts`` has."""
    rank = dist.get_rank()
    data: Any = sequences(rank, 2 * counts[rank]) if known else Stream(2 * counts[rank])
    return DataLoader(data, batch_size=2)


def trainer_of(strategy: str, **options: Any) -> Any:
    """A Trainer in the world of a test."""
    chosen = {name: options.pop(name) for name in ("uneven_batches",) if name in options}
    return make_trainer(
        ShardedDP(strategy, auto_wrap_policy={Block}, **chosen), use_distributed_sampler=False, **options
    )
