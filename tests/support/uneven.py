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


class Told(Stream):
    """A stream that says how many sequences it has."""

    def __init__(self, count: int, told: int) -> None:
        super().__init__(count)
        self.told = told

    def __len__(self) -> int:
        """Which need not be true."""
        return self.told


class Resumable(DataLoader[Tensor]):
    """Goes on where it was, also where that was its end."""

    position = 0
    resume_at = 0

    def __iter__(self) -> Iterator[Tensor]:
        """Batches from there on."""
        start, self.resume_at = self.resume_at, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.position = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        """How many batches it has given."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Leave out as many."""
        self.resume_at = state_dict["position"]


def loader(counts: tuple[int, int], known: bool | str) -> DataLoader[Tensor]:
    """As many batches of two on each rank as ``counts`` has.

    Args:
        counts: By rank.
        known: True; False: not by the loader; "told": by what is streamed, "falsely": as one batch more.
    """
    rank = dist.get_rank()
    count = 2 * counts[rank]
    told = {"told": count, "falsely": count + 2}
    data: Any = sequences(rank, count) if known is True else Stream(count)
    return DataLoader(Told(count, told[known]) if isinstance(known, str) else data, batch_size=2)


def trainer_of(strategy: str, **options: Any) -> Any:
    """A Trainer in the world of a test."""
    chosen = {name: options.pop(name) for name in ("uneven_batches",) if name in options}
    return make_trainer(
        ShardedDP(strategy, auto_wrap_policy={Block}, **chosen),
        use_distributed_sampler=False,
        **options,
    )
