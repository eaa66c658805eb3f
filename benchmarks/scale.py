"""What one rank of 8 to 4,096 does, counted in worlds of which it is the only rank that exists.

The real Trainer trains as rank 0, or as the last one, on torch's fake process group, whose collectives come back at
once. Counted are the process groups that it makes, its calls to the store, its collectives on the host ("rounds", each
2 (N - 1) messages one after the other on gloo's ring) and their bytes, while the run is set up, per step, and in a
micro-batch that is not the last; measured is its processor time for setup, for a step, and for what a save does on the
training thread before anything is written. Nothing of it is a network's time.

    python benchmarks/scale.py
    python benchmarks/scale.py --ranks 8 1024 --strategies full_shard
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
RANKS = (8, 64, 512, 1024, 4096)
NODE = 8
STEPS = 6
"""Of which the first two are not counted: in them ranks get to know each other."""

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "gather")


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
    rounds: int = 0
    nbytes: int = 0

    def minus(self, other: Counts) -> Counts:
        """What came since."""
        return Counts(
            self.groups - other.groups,
            self.store - other.store,
            self.rounds - other.rounds,
            self.nbytes - other.nbytes,
        )

    def copy(self) -> Counts:
        """As it is now."""
        return Counts(self.groups, self.store, self.rounds, self.nbytes)


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count groups, questions to the store, and collectives of the host's groups."""
    counts = Counts()
    on_host: set[int] = set()

    def group(make: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts.groups += 1
            made = make(*arguments, **options)
            if (arguments[place] if len(arguments) > place else options.get("backend")) is not None:
                on_host.add(id(made))  # a backend is named for groups of the host alone
            return made

        return call

    def collective(name: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if id(options.get("group")) in on_host:
                sent = arguments[0] if name == "all_gather" else tensor
                counts.rounds += 1
                counts.nbytes += sent.nbytes
            if name == "all_gather":
                for arrived in tensor:
                    arrived.copy_(arguments[0])  # the others are taken to say the same
            return issue(tensor, *arguments, **options)

        return call

    def ask(desk: Any, question: Callable[[], Any], **options: Any) -> Any:
        counts.store += 1
        return former(desk, question, **options)

    former = store._StoreWorker.ask
    with contextlib.ExitStack() as stack:
        replace = lambda *arguments: stack.enter_context(patch.object(*arguments))  # noqa: E731
        replace(dist, "new_group", group(dist.new_group, 2))
        replace(mesh, "new_group_of_its_ranks", group(mesh.new_group_of_its_ranks, 3))
        replace(store._StoreWorker, "ask", ask)
        replace(mesh, "GlooCollectives", NativeCollectives)
        replace(dist, "broadcast_object_list", lambda *_, **__: None)
        replace(backends, "_all_gather", gather_own)
        for name in COLLECTIVES:
            replace(dist, name, collective(name, getattr(dist, name)))
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
        self._begun = (Counts(), 0.0)
        self.setup = Counts()
        self.setup_s = time.process_time()
        self.save_s = 0.0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.setup, self.setup_s = self._counts.copy(), time.process_time() - self.setup_s

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._begun = self._counts.copy(), time.process_time()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        counts, began = self._begun
        self.steps.append((self._counts.minus(counts), time.process_time() - began))

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


def train(name: str, rank: int, size: int, blocks: int, accumulate: int = 1) -> Watch:
    """Train a few steps as one rank of many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with counting() as counts:
            model = Model(blocks)
            watch = Watch(counts)
            trainer = L.Trainer(
                accelerator="cpu", devices=NODE, num_nodes=size // NODE, plugins=[Place(rank, size)],
                strategy=ShardedDP(name, auto_wrap_policy={Block}), max_steps=STEPS // accumulate,
                accumulate_grad_batches=accumulate, callbacks=[watch], logger=False, enable_checkpointing=False,
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
            "ranks", "as rank", "groups", "descriptors (CUDA / CPU)", "store calls, setup", "host rounds, setup",
            "KB sent, setup", "setup, s", "host rounds, step", "host rounds, micro-batch",
            "step, ms", "snapshot, s", "MB",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for size in options.ranks:
            for rank in (0, size - 1):
                watch = train(name, rank, size, options.blocks)
                accumulated = train(name, rank, size, options.blocks, accumulate=2)
                steady = watch.steps[2:]
                strategy = ShardedDP(name, auto_wrap_policy={Block})
                table.add_row(
                    f"{size:,}", f"{rank:,}", f"{watch.setup.groups}",
                    f"{connections(strategy, size, 'cuda'):,} / {connections(strategy, size, 'cpu'):,}",
                    f"{watch.setup.store}", f"{watch.setup.rounds}",
                    f"{watch.setup.nbytes / 1e3:.1f}", f"{watch.setup_s:.2f}",
                    f"{steady[-1][0].rounds}", f"{accumulated.steps[-2][0].rounds}",
                    f"{1e3 * min(seconds for _, seconds in steady):.1f}", f"{watch.save_s:.3f}",
                    f"{psutil.Process().memory_info().rss / 1e6:,.0f}",
                )  # fmt: skip
        console.print(table)


if __name__ == "__main__":
    main()
