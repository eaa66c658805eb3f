"""What one rank of 8 to 4,096 does, counted in worlds of which it is the only rank that exists.

The real Trainer trains as rank 0, or as the last one, on torch's fake process group, whose collectives come back at
once. Counted are the process groups that it makes, its calls to the store, what it agrees on with other ranks on the
host (what its training thread carries out itself and waits for, what goes on behind its back, and the hops of all that,
each a message that follows another) and its bytes, while the run is set up, per step, and in a micro-batch that is not
the last, and per step of units that may differ between ranks (`uneven_units`); measured is its processor time for setup, for a step, and for what a save does on the training thread before
anything is written. Nothing of it is a network's time.

    python benchmarks/scale.py
    python benchmarks/scale.py --ranks 8 1024 --strategies full_shard
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any
from unittest.mock import patch

import lightning as L
import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from typing_extensions import override

from host_time import RankZero
from shardeddp import ShardedDP
from shardeddp.checkpoint.snapshot import take_snapshot
from shardeddp.comm import backends, mesh, store
from shardeddp.comm.backends import NativeCollectives
from shardeddp.comm.host_group import HostGroup

STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
RANKS = (8, 64, 512, 1024, 4096)
NODE = 8
STEPS, WARMUP = 20, 6
"""Batches, and those of them that are not counted: in them ranks get to know each other."""

OPERATIONS = ("keep_highest_", "gather", "gather_to_first", "broadcast_")


class Block(nn.Module):
    """A layer with twelve parameters, as many as a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Model(L.LightningModule):
    """Blocks.

    Args:
        blocks: Their number.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Mean of squares."""
        return self.blocks(batch).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Place(RankZero):
    """One rank of many that nobody starts.

    Args:
        rank: Which.
        size: Of how many.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._rank, self._size = rank, size

    @override
    def world_size(self) -> int:
        return self._size

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def local_rank(self) -> int:
        return self._rank % NODE

    @override
    def node_rank(self) -> int:
        return self._rank // NODE


@dataclass
class Counts:
    """What a rank has done so far."""

    groups: int = 0
    store: int = 0
    waited: int = 0
    """Operations on the host that the training thread has carried out itself."""

    ahead: int = 0
    """Those that went on behind its back, to be looked at before the step or a step later."""

    hops: int = 0
    """Messages, one after the other in each operation."""

    nbytes: int = 0

    def minus(self, other: Counts) -> Counts:
        """What came since."""
        return Counts(
            *(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True))
        )


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count groups, questions to the store, and what is sent between hosts."""
    counts = Counts()

    def group(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts.groups += 1
            return make(*arguments, **options)

        return call

    def operation(carry_out: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.current_thread().name == "shardeddp-agreement":
                counts.ahead += 1
            else:
                counts.waited += 1
            return carry_out(*arguments)

        return call

    def send(host_group: HostGroup, axis: Any, sent: torch.Tensor, *rest: Any) -> None:
        counts.hops += 1
        counts.nbytes += sent.nbytes
        swap(host_group, axis, sent, *rest)

    def ask(desk: Any, question: Callable[[], Any], **options: Any) -> Any:
        counts.store += 1
        return former(desk, question, **options)

    former, swap = store._StoreWorker.ask, HostGroup._swap
    with contextlib.ExitStack() as stack:
        replace = lambda *arguments: stack.enter_context(patch.object(*arguments))  # noqa: E731
        replace(dist, "new_group", group(dist.new_group))
        replace(mesh, "new_group_of_its_ranks", group(mesh.new_group_of_its_ranks))
        replace(store._StoreWorker, "ask", ask)
        replace(mesh, "GlooCollectives", NativeCollectives)
        replace(backends, "_all_gather", gather_own)
        for name in OPERATIONS:
            replace(HostGroup, name, operation(getattr(HostGroup, name)))
        replace(HostGroup, "_swap", send)
        yield counts


def gather_own(buffer: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Fill all slices with this rank's in one call; the fake group makes one for each rank."""
    buffer.view(-1, own.numel()).copy_(own.clone())


class Watch(L.Callback):
    """Takes the counts and the processor's clock where phases of a run begin.

    Args:
        counts: What is being counted.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.steps: list[tuple[Counts, float]] = []
        self._begun: tuple[Counts, float] | None = None
        self.setup = Counts()
        self.setup_s = time.process_time()
        self.save_s = 0.0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.setup, self.setup_s = replace(self._counts), time.process_time() - self.setup_s

    def _now(self, trainer: L.Trainer) -> tuple[Counts, float]:
        """Counts when all that has been asked is answered."""
        trainer.strategy._group.mesh.control.channel.in_background(bool).result()
        return replace(self._counts), time.process_time()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if (
            self._begun is not None
        ):  # so that what other callbacks ask at a step's end is the step's
            counts, began = self._begun
            now, ended = self._now(trainer)
            self.steps.append((now.minus(counts), ended - began))
        self._begun = self._now(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()
        names = [[name for name, _ in pl_module.named_parameters()]]
        began = time.process_time()
        take_snapshot(checkpoint, names, pl_module.trainer.strategy._group.mesh, ())
        self.save_s = time.process_time() - began


def connections(strategy: ShardedDP, size: int, device: str) -> int:
    """Descriptors that a rank in the middle holds for groups on the host."""
    topology = strategy.options.sharding.topology(size // NODE, NODE)
    return mesh.count_connections(
        topology, 1, torch.device(device), strategy.options.sharding.regather_size
    )


def train(
    name: str, rank: int, size: int, blocks: int, accumulate: int = 1, *, uneven_units: bool = False
) -> Watch:
    """Train a few steps as one rank of many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with counting() as counts:
            model = Model(blocks)
            watch = Watch(counts)
            trainer = L.Trainer(
                accelerator="cpu", devices=NODE, num_nodes=size // NODE, plugins=[Place(rank, size)],
                strategy=ShardedDP(name, auto_wrap_policy={Block}, uneven_units=uneven_units),
                max_steps=STEPS // accumulate, accumulate_grad_batches=accumulate, callbacks=[watch], logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            )  # fmt: skip
            trainer.fit(model, DataLoader(torch.randn(STEPS, 8)))
    finally:
        dist.destroy_process_group()
    return watch


def main() -> None:
    """Print a table per strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--blocks", type=int, default=24, help="of twelve parameters each")
    options = parser.parse_args()
    for quiet in ("lightning.pytorch", "torch.distributed"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    train("full_shard", 0, NODE, options.blocks)  # imports, and caches of code
    console = Console(width=160)
    for name in options.strategies:
        table = Table(title=f"{name}, {12 * options.blocks} parameters")
        for column in (
            "ranks", "as rank", "groups", "descriptors (CUDA / CPU)", "store calls, setup", "agreed, setup",
            "hops, setup", "KB sent, setup", "setup, s", "waited + ahead, step", "hops, step",
            "waited + ahead, micro-batch", "waited + ahead, step, uneven units", "step, ms", "snapshot, s", "MB",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for size in options.ranks:
            for rank in (0, size - 1):
                watch = train(name, rank, size, options.blocks)
                accumulated = train(name, rank, size, options.blocks, accumulate=2)
                uneven = train(name, rank, size, options.blocks, uneven_units=True).steps[-2][0]
                steady, (micro_batch, _) = watch.steps[WARMUP:], accumulated.steps[-1]
                step = steady[-2][0]
                strategy = ShardedDP(name, auto_wrap_policy={Block})
                table.add_row(
                    f"{size:,}", f"{rank:,}", f"{watch.setup.groups}",
                    f"{connections(strategy, size, 'cuda'):,} / {connections(strategy, size, 'cpu'):,}",
                    f"{watch.setup.store}", f"{watch.setup.waited + watch.setup.ahead}", f"{watch.setup.hops}",
                    f"{watch.setup.nbytes / 1e3:.1f}", f"{watch.setup_s:.2f}",
                    f"{step.waited} + {step.ahead}", f"{step.hops}", f"{micro_batch.waited} + {micro_batch.ahead}",
                    f"{uneven.waited} + {uneven.ahead}", f"{1e3 * min(seconds for _, seconds in steady):.1f}", f"{watch.save_s:.3f}",
                    f"{psutil.Process().memory_info().rss / 1e6:,.0f}",
                )  # fmt: skip
        console.print(table)


if __name__ == "__main__":
    main()
