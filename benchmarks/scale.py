"""What one rank of 8 to 4,096 does, counted in worlds of which it is the only rank that exists.

The real Trainer trains as rank 0, or as the last one, on torch's fake process group, whose collectives come back at
once. Counted are the process groups that it makes, its calls to the store, what it agrees on with other ranks on the
host (what its training thread carries out itself and waits for, what goes on behind its back, and the hops of all that,
each a message that follows another) and its bytes, while the run is set up, per step, in a micro-batch that is not
the last, and per step of ranks that may use units of their own (`uneven_units`); measured is its processor time for
setup, for a step, for what a save does on the training thread before anything is written, and for loading a checkpoint
that one rank has saved. Nothing of it is a network's time.

A figure of the last rank stands behind that of the first where they are not equal.

    python benchmarks/scale.py
    python benchmarks/scale.py --ranks 8 1024 --strategies full_shard
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
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
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from host_time import RankZero
from shardeddp import ShardedDP
from shardeddp.checkpoint.snapshot import take_snapshot
from shardeddp.comm import backends, group_pool, mesh, store
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


class Stream(IterableDataset[torch.Tensor]):
    """Data without a length: before each batch ranks ask each other whether it is their last."""

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randn(STEPS, 8))


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
    store_nbytes: int = 0
    """Written to it and read from it."""

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
            if threading.current_thread().name == "shardeddp-transfers":
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

    def text(carry_out: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = carry_out(*arguments)
            written = arguments[2] if len(arguments) > 2 else ""
            read = answer if isinstance(answer, bytes | list) else ()
            counts.store_nbytes += len(written) if isinstance(written, str) else 8
            counts.store_nbytes += len(read) if isinstance(read, bytes) else sum(map(len, read))
            return answer

        return call

    former, swap = store.StoreWorker.ask, HostGroup.hop
    with contextlib.ExitStack() as stack:
        replace = lambda *arguments: stack.enter_context(patch.object(*arguments))  # noqa: E731
        replace(dist, "new_group", group(dist.new_group))
        replace(group_pool, "new_group_of_its_ranks", group(group_pool.new_group_of_its_ranks))
        replace(store.StoreWorker, "ask", ask)
        for name in ("set", "compare_set", "multi_get", "add"):
            replace(dist.PrefixStore, name, text(getattr(dist.PrefixStore, name)))
        replace(mesh, "GlooCollectives", NativeCollectives)
        replace(backends, "all_gather_single", gather_own)
        replace(backends, "reduce_scatter_single", scatter_own)
        for name in OPERATIONS:
            replace(HostGroup, name, operation(getattr(HostGroup, name)))
        replace(HostGroup, "hop", send)
        yield counts


def gather_own(buffer: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Fill all slices with this rank's in one call; the fake group makes one for each rank."""
    buffer.view(-1, own.numel()).copy_(own.clone())


def scatter_own(output: torch.Tensor, buffer: torch.Tensor, **_: Any) -> None:
    """Take this rank's slice; the fake group makes a tensor of each rank's, 0.8 ms at 1,024."""
    output.copy_(buffer.view(-1, output.numel())[0])


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
        trainer.strategy.mesh.control.begin(bool).result()
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
        take_snapshot(checkpoint, names, pl_module.trainer.strategy.mesh, ())
        self.save_s = time.process_time() - began


def connections(strategy: ShardedDP, size: int, device: str) -> int:
    """Descriptors that a rank in the middle holds for groups on the host."""
    topology = strategy.options.sharding.topology(size // NODE, NODE)
    return mesh.count_connections(
        topology, 1, torch.device(device), strategy.options.sharding.regather_size
    )


class Timed(ShardedDP):
    """Takes the processor's clock while a checkpoint is loaded."""

    load_s = 0.0

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return self._time(super().load_checkpoint, *args, **kwargs)

    @override
    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._time(super().load_model_state_dict, *args, **kwargs)

    @override
    def load_optimizer_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._time(super().load_optimizer_state_dict, *args, **kwargs)

    def _time(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return load(*args, **kwargs)
        finally:
            self.load_s += time.process_time() - began


def trainer_of(strategy: ShardedDP, **options: Any) -> L.Trainer:
    """A Trainer that shows and saves nothing."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return L.Trainer(
        accelerator="cpu", strategy=strategy, use_distributed_sampler=False, **quiet, **options
    )


def save(blocks: int, target: Path) -> None:
    """Save what one rank has trained for a step."""
    strategy = ShardedDP(auto_wrap_policy={Block}, state_dict_type="sharded")
    trainer = trainer_of(strategy, devices=1, max_steps=1)
    trainer.fit(Model(blocks), DataLoader(torch.randn(STEPS, 8)))
    trainer.save_checkpoint(target)
    dist.destroy_process_group()


def train(
    name: str,
    rank: int,
    size: int,
    blocks: int,
    accumulate: int = 1,
    checkpoint: Path | None = None,
    data: Any = None,
    **options: Any,
) -> tuple[Watch, Timed]:
    """Train a few steps as one rank of many, with options of the strategy."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with counting() as counts:
            watch, strategy = Watch(counts), Timed(name, auto_wrap_policy={Block}, **options)
            trainer = trainer_of(
                strategy, devices=NODE, num_nodes=size // NODE, plugins=[Place(rank, size)],
                max_steps=(STEPS + (checkpoint is not None)) // accumulate,
                accumulate_grad_batches=accumulate, callbacks=[watch],
            )  # fmt: skip
            data = torch.randn(STEPS, 8) if data is None else data
            trainer.fit(Model(blocks), DataLoader(data), ckpt_path=checkpoint)
    finally:
        dist.destroy_process_group()
    return watch, strategy


def figures(name: str, rank: int, size: int, blocks: int, checkpoint: Path) -> dict[str, str]:
    """What is printed of one rank, by title."""
    watch, strategy = train(name, rank, size, blocks)
    accumulated, _ = train(name, rank, size, blocks, accumulate=2)
    streamed, _ = train(name, rank, size, blocks, data=Stream())
    uneven, _ = train(name, rank, size, blocks, uneven_units=True)
    _, loaded = train(name, rank, size, blocks, checkpoint=checkpoint)
    steady, (micro_batch, _) = watch.steps[WARMUP:], accumulated.steps[-1]
    step, setup = steady[-2][0], watch.setup
    (stream, _), (own_units, _) = streamed.steps[-2], uneven.steps[-2]
    return {
        "process groups": f"{setup.groups}",
        "descriptors on CUDA": f"{connections(strategy, size, 'cuda'):,}",
        "descriptors on CPU": f"{connections(strategy, size, 'cpu'):,}",
        "setup: calls to the store": f"{setup.store}",
        "setup: bytes in the store": f"{setup.store_nbytes:,}",
        "setup: agreements": f"{setup.waited + setup.ahead}",
        "setup: hops": f"{setup.hops}",
        "setup: KB sent on the host": f"{setup.nbytes / 1e3:.1f}",
        "setup, s": f"{watch.setup_s:.2f}",
        "step: agreements waited for": f"{step.waited}",
        "step: agreements asked ahead": f"{step.ahead}",
        "step: hops": f"{step.hops}",
        "step, ms": f"{1e3 * min(seconds for _, seconds in steady):.1f}",
        "micro-batch: agreements": f"{micro_batch.waited + micro_batch.ahead}",
        "step on a stream: waited for": f"{stream.waited}",
        "step of uneven units: waited for": f"{own_units.waited}",
        "snapshot of a save, s": f"{watch.save_s:.3f}",
        "load, s": f"{loaded.load_s:.3f}",
        "memory, MB": f"{psutil.Process().memory_info().rss / 1e6:,.0f}",
    }


def main() -> None:
    """Print a table per strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--blocks", type=int, default=24, help="of twelve parameters each")
    options = parser.parse_args()
    for quiet in ("lightning.pytorch", "lightning.fabric", "torch.distributed"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "saved.ckpt"
        save(options.blocks, checkpoint)
        figures("full_shard", 0, NODE, options.blocks, checkpoint)  # imports, and caches of code
        console = Console(width=100)
        for name in options.strategies:
            table = Table(title=f"{name}, {12 * options.blocks} parameters")
            table.add_column("ranks")
            columns: list[tuple[dict[str, str], dict[str, str]]] = []
            for size in options.ranks:
                table.add_column(f"{size:,}", justify="right")
                first, last = (
                    figures(name, rank, size, options.blocks, checkpoint) for rank in (0, size - 1)
                )
                columns.append((first, last))
            for title in columns[0][0]:
                pairs = [(first[title], last[title]) for first, last in columns]
                table.add_row(title, *(a if a == b else f"{a}, {b}" for a, b in pairs))
            console.print(table)


if __name__ == "__main__":
    main()
