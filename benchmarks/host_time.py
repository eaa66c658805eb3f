"""What the host does for each unit of a sharded model, in a step whose kernels are too small to count.

On a GPU with small units it is the host that decides how long a step takes. Here it is all there is: 40 blocks of a
few tiny parameters, trained behind the Lightning Trainer in one process, as rank 0 of eight on torch's fake process
group, which has no peers and transfers nothing. Collectives are issued as on a GPU, one call of torch each; streams
and events, which only a GPU has, are not in it.

Figures are per block and step, beyond those of the plain module behind the same Trainer. The contestants train in turn
in one process, several rounds over; the time of the processor stands beside that of the clock, which counts whoever
else uses the machine. Counts of calls depend on no machine.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --parameters 10 --only plain fsdp2 full_shard --rounds 9
    python benchmarks/host_time.py --counts
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed import fake_pg as _registers_fake  # noqa: F401 - the backend
from torch.utils.data import DataLoader
from typing_extensions import override

from shardeddp import ShardedDP
from shardeddp.comm import mesh
from shardeddp.comm.backends import NativeCollectives

RANKS = 8
BLOCKS = 40
WIDTH = 4
WARMUP = 4
"""Steps before those that are measured: orders are recorded, optimizer states and gradients made."""

PHASES = ("forward", "backward", "optimizer")


class Block(nn.Module):
    """Linear layers one after the other, two parameters each."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Blocks(L.LightningModule):
    """All blocks, with AdamW as it is by default on a GPU."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(parameters) for _ in range(BLOCKS)))

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.blocks(batch).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


# -- contestants


class Plain(DDPStrategy):
    """Every rank trains by itself."""

    @override
    def configure_ddp(self) -> None:
        pass


class TorchDDP(DDPStrategy):
    """DistributedDataParallel, whose own reduction takes the fake group's for a bug of its own."""

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(None, lambda _, bucket: _reduce(bucket))


def _reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """One all-reduce, as without a hook."""
    dist.all_reduce(bucket.buffer())
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


class TorchFSDP1(DDPStrategy):
    """FullyShardedDataParallel, every block wrapped."""

    @override
    def configure_ddp(self) -> None:
        self.model = FullyShardedDataParallel(
            self.model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )


class TorchFSDP2(DDPStrategy):
    """fully_shard of every block and of the whole."""

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)


def sharded_dp(name: str) -> Callable[[], Strategy]:
    """ShardedDP with every block a unit."""
    return lambda: ShardedDP(name, auto_wrap_policy={Block})


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "plain": Plain,
    "ddp": TorchDDP,
    "fsdp1": TorchFSDP1,
    "fsdp2": TorchFSDP2,
    **{
        name: sharded_dp(name)
        for name in ("full_shard", "shard_grad_op", "shard_optimizer", "no_shard")
    },
}


class RankZero(ClusterEnvironment):
    """Rank 0 of ranks that nobody starts."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return RANKS

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


@contextmanager
def world() -> Iterator[None]:
    """Be rank 0 of ranks that are not there; collectives are issued as NCCL's, and come back at once."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    with patch.object(mesh, "GlooCollectives", NativeCollectives):
        yield
    dist.destroy_process_group()


# -- measuring


class Phases(L.Callback):
    """Cuts steps into phases: forward, backward, and the optimizer's step with what comes before the next batch."""

    def begin(self, phase: str) -> None:
        """A phase of a step begins, and the one before it ends."""
        raise NotImplementedError

    def end(self) -> None:
        """A step ends."""
        raise NotImplementedError

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.begin("forward")

    @override
    def on_before_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.begin("optimizer")

    @override
    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        self.begin("backward")

    @override
    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        self.begin("optimizer")

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.end()


class Clock(Phases):
    """Seconds of each phase.

    Args:
        now: Reads a clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.steps: list[dict[str, float]] = []
        self._now = now
        self._phase, self._since = "", 0.0
        self._step: dict[str, float] = {}

    @override
    def begin(self, phase: str) -> None:
        now = self._now()
        if self._phase:
            self._step[self._phase] = self._step.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, self._now()

    @override
    def end(self) -> None:
        self.begin("")
        self.steps.append(self._step)
        self._step = {}


class Calls(Phases):
    """Calls in the last step: of Python functions by their name, and of functions of C by phase."""

    def __init__(self, steps: int) -> None:
        self.python: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        self.c: Counter[str] = Counter()
        self._steps, self._step = steps, 1
        self._phase = ""

    @override
    def begin(self, phase: str) -> None:
        self._phase = phase
        if self._step == self._steps:
            sys.setprofile(self._count)

    @override
    def end(self) -> None:
        sys.setprofile(None)
        self._step += 1

    def _count(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.python[self._phase][f"{code.co_filename}:{code.co_qualname}"] += 1
        elif event == "c_call":
            self.c[self._phase] += 1


def train(name: str, parameters: int, steps: int, callbacks: list[L.Callback]) -> None:
    """Train a new model."""
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, plugins=[RankZero()], strategy=STRATEGIES[name](), max_steps=steps,
        callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Blocks(parameters), DataLoader(torch.randn(steps, WIDTH)))


@dataclass(frozen=True, kw_only=True)
class Round:
    """Milliseconds per block and step, by phase, of one training: the median of its steps, and the least."""

    median: dict[str, float]
    least: dict[str, float]


def in_round(clock: Clock) -> Round:
    """What a clock has seen after the warm-up."""
    columns = {
        phase: [1e3 * step[phase] / BLOCKS for step in clock.steps[WARMUP:]] for phase in PHASES
    }
    columns["step"] = [sum(each) for each in zip(*columns.values(), strict=True)]
    return Round(
        median={phase: statistics.median(times) for phase, times in columns.items()},
        least={phase: min(times) for phase, times in columns.items()},
    )


CLOCKS: dict[str, Callable[[], float]] = {
    "processor": time.process_time,
    "wall": time.perf_counter,
}


def measure_times(
    names: list[str], parameters: int, steps: int, rounds: int
) -> dict[str, dict[str, list[Round]]]:
    """Rounds by clock and contestant."""
    found: dict[str, dict[str, list[Round]]] = {
        kind: {name: [] for name in names} for kind in CLOCKS
    }
    jobs = [name for number in range(rounds) for name in names[:: -1 if number % 2 else 1]]
    for name in track(jobs, f"{parameters} parameters", console=Console(stderr=True)):
        gc.collect()
        clocks = {kind: Clock(now) for kind, now in CLOCKS.items()}
        train(name, parameters, steps + WARMUP, [*clocks.values()])
        for kind, clock in clocks.items():
            found[kind][name].append(in_round(clock))
    return found


def times_table(kind: str, rounds: dict[str, list[Round]], parameters: int) -> Table:
    """Medians over rounds of what a contestant takes beyond the plain module; in brackets, beyond the least of both."""
    columns = (*PHASES, "step")
    shown = Table(
        title=f"{parameters} parameters in a block, {kind} time: ms per block and step beyond the plain module, "
        "median (least)"
    )
    for column in ("strategy", *columns):
        shown.add_column(column, justify="left" if column == "strategy" else "right")
    for name, mine in rounds.items():
        if name == "plain":
            continue
        cells: list[str] = []
        for phase in columns:
            pairs = zip(mine, rounds["plain"], strict=True)
            beyond = statistics.median(
                one.median[phase] - other.median[phase] for one, other in pairs
            )
            least = min(each.least[phase] for each in mine) - min(
                each.least[phase] for each in rounds["plain"]
            )
            cells.append(f"{beyond:.3f} ({least:.3f})")
        shown.add_row(name, *cells)
    return shown


def counts_table(found: dict[str, Calls], parameters: int) -> Table:
    """Calls per block and step that a contestant makes beyond the plain module."""
    shown = Table(
        title=f"{parameters} parameters in a block: calls of Python functions (and of C functions from Python) per "
        "block and step beyond the plain module"
    )
    for column in ("strategy", *PHASES, "step"):
        shown.add_column(column, justify="left" if column == "strategy" else "right")
    plain = found["plain"]
    for name, mine in found.items():
        if name == "plain":
            continue
        python = [(mine.python[each].total() - plain.python[each].total()) for each in PHASES]
        c = [mine.c[each] - plain.c[each] for each in PHASES]
        pairs = zip([*python, sum(python)], [*c, sum(c)], strict=True)
        shown.add_row(
            name, *(f"{calls / BLOCKS:.1f} ({others / BLOCKS:.1f})" for calls, others in pairs)
        )
    return shown


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parameters", nargs="+", type=int, default=[2, 10, 40], help="of a block; even numbers"
    )
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=20, help="measured ones in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", action="store_true", help="count calls, time nothing")
    options = parser.parse_args()
    names: list[str] = [name for name in STRATEGIES if name in {"plain", *options.only}]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console(width=140)
    with world():
        for parameters in options.parameters:
            if options.counts:
                calls = {name: Calls(WARMUP + 1) for name in names}
                for name in names:
                    train(name, parameters, WARMUP + 1, [calls[name]])
                console.print(counts_table(calls, parameters))
                continue
            found = measure_times(names, parameters, options.steps, options.rounds)
            for kind, rounds in found.items():
                console.print(times_table(kind, rounds, parameters))


if __name__ == "__main__":
    main()
