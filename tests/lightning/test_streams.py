"""Iterable data sets are started as often, and asked for as many items, as under DistributedDataParallel."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardeddp import ShardedDP
from support.tasks import VOCABULARY, Block, EvaluatedGpt, TinyGpt
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)


class Stream(IterableDataset[Tensor]):
    """Counts how often it is started, and what is taken from it."""

    def __init__(self, length: int) -> None:
        self.length, self.starts, self.taken = length, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.starts += 1  # at once, as where a connection is opened
        return self.items()

    def items(self) -> Iterator[Tensor]:
        """Sequences of tokens."""
        for number in range(self.length):
            self.taken += 1
            yield (torch.arange(6) + number) % VOCABULARY


class SizedStream(Stream):
    """Knows its length."""

    def __len__(self) -> int:
        return self.length


class Asks(TinyGpt):
    """Wants to know the number of steps before there are any."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As for a schedule."""
        assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Bare:
    """A loader that is no DataLoader."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Tensor]:
        for item in self.stream:
            yield item.unsqueeze(0)


CASES = [
    "plain",
    "asked",
    *(
        pytest.param(case, marks=pytest.mark.torture)
        for case in (
            "sized",
            "validated",
            "asked, steps",
            "min",
            "join",
            "shard_grad_op",
            "shard_optimizer",
            "hybrid_shard",
        )
    ),
    "no_shard",
    "bare",
]


def train(ours: bool, case: str, folder: str) -> dict[str, tuple[int, ...]]:
    """Starts, items and steps of two epochs, of the second alone, and of what follows the middle of the first."""
    warnings.simplefilter("ignore")
    counts: dict[str, tuple[int, ...]] = {}
    steps = "steps" in case

    def run(name: str, epochs: int, path: str | None = None) -> str:
        seed_everything(1, verbose=False)
        model = (Asks if "asked" in case else EvaluatedGpt if case == "validated" else TinyGpt)()
        stream, held_out = (SizedStream if case == "sized" else Stream)(8), Stream(4)
        loader: Any = Bare(stream) if case == "bare" else DataLoader(stream, batch_size=2)
        keeper = ModelCheckpoint(
            folder, filename=name + "-{step}", every_n_train_steps=2, save_top_k=-1
        )
        at_end = ModelCheckpoint(
            folder, filename=name + "-end", every_n_epochs=1, save_top_k=-1, monitor=None
        )
        strategy: Any = DDPStrategy()
        if ours:
            options: Any = {"uneven_batches": case} if case in ("min", "join") else {}
            options |= {"sharding_strategy": case} if "shard" in case else {}
            options |= {"shard_size": 2} if case == "hybrid_shard" else {}
            strategy = ShardedDP(auto_wrap_policy={Block}, **options)
        length = {"max_steps": 4 * epochs, "max_epochs": -1} if steps else {"max_epochs": epochs}
        trainer = make_trainer(
            strategy, callbacks=[keeper, at_end], enable_checkpointing=True, **length
        )
        validation = DataLoader(held_out, batch_size=2) if case == "validated" else None
        trainer.fit(model, loader, validation, ckpt_path=path)
        counts[name] = (
            stream.starts,
            stream.taken,
            held_out.starts,
            held_out.taken,
            trainer.global_step,
        )
        dist.barrier()
        return folder

    run("both", 2)
    run("first", 1)
    run("second", 2, f"{folder}/first-end.ckpt")
    run("rest", 1, f"{folder}/first-step=2.ckpt")
    return counts


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_stream_is_started_and_read_as_under_ddp(
    world: Worlds, tmp_path: Path, case: str
) -> None:
    ranks = 4 if case == "hybrid_shard" else 2
    expected = world(ranks).run(train, False, case, str(tmp_path / "ddp"))
    assert world(ranks).run(train, True, case, str(tmp_path / "ours")) == expected
    assert expected[0]["second"][0] in (1, 2), "the stream is started twice by nobody"
