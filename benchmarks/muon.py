"""What a training step with Muon costs against AdamW's: on sharded ranks, and in one process without any sharding.

Muon steps the matrices of a GPT's blocks, AdamW the rest; compared with AdamW for everything. The model and the batch
of a rank are those of `configs/demo.yaml` unless said otherwise. One process alone shows what of the ratio is Muon's
arithmetic (five Newton-Schulz iterations per matrix), which every way of training has to pay. The steps of both
contestants alternate within one run, so that a drift of the machine meets both.

    python benchmarks/muon.py
    python benchmarks/muon.py --dim 512 --layers 8 --heads 8 --strategies full_shard no_shard
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn, optim

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from gpt.model import GPT  # noqa: E402
from shardeddp.comm import Mesh  # noqa: E402
from shardeddp.config import parse_options  # noqa: E402
from shardeddp.engine.runtime import Runtime  # noqa: E402
from shardeddp.engine.shard_model import shard_model  # noqa: E402
from shardeddp.optim.attach import attach_optimizer  # noqa: E402
from shardeddp.plan.topology import Topology  # noqa: E402
from shardeddp.wrap import build_units, resolve_policy  # noqa: E402

ALONE = "one process"


def make_optimizers(model: nn.Module, name: str) -> list[optim.Optimizer]:
    """AdamW for everything; or Muon for the matrices of the blocks, and AdamW for the rest."""
    if name == "AdamW":
        return [optim.AdamW(model.parameters(), lr=1e-3)]
    matrices = [it for key, it in model.named_parameters() if it.ndim == 2 and "blocks" in key]
    chosen = {id(it) for it in matrices}
    rest: Iterable[nn.Parameter] = [it for it in model.parameters() if id(it) not in chosen]
    return [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=1e-3)]


class Contestant:
    """A model with its optimizers; sharded, or alone in this process.

    Args:
        name: Of the optimizer.
        options: Of the command line.
        strategy: How the model is sharded, or ``ALONE``.
    """

    def __init__(self, name: str, options: argparse.Namespace, strategy: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(256, options.dim, options.layers, options.heads)
        self.runtime: Runtime | None = None
        if strategy != ALONE:
            size = 1 if strategy == "no_shard" else options.ranks
            mesh = Mesh(
                Topology(world_size=options.ranks, shard_size=size),
                torch.device("cpu"),
                timedelta(minutes=1),
            )
            units = build_units(self.model, resolve_policy("auto"))
            self.runtime = shard_model(units, mesh, parse_options({"sharding_strategy": strategy}))
        self.optimizers = make_optimizers(self.model, name)
        if self.runtime is not None:
            for optimizer in self.optimizers:
                attach_optimizer(optimizer)

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        """One training step on tokens (batch, length + 1); seconds of all of it, and of the optimizers alone."""
        start = time.perf_counter()
        if self.runtime is None:
            loss = self._loss(tokens)
        else:
            with self.runtime.step("training_step") as outputs:
                outputs.append(self._loss(tokens))
            loss = outputs[0]
        loss.backward()
        before = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        end = time.perf_counter()
        return end - start, end - before

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def measure(rank: int, options: argparse.Namespace, strategy: str, port: int, folder: str) -> None:
    """Let both contestants step in turn, on one rank, and leave the seconds in ``folder``."""
    torch.set_num_threads(1)
    if strategy != ALONE:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options.ranks)
    contestants = {name: Contestant(name, options, strategy) for name in ("AdamW", "Muon")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    generator = torch.Generator().manual_seed(rank)
    for step in range(options.steps + options.warmup):
        tokens = torch.randint(0, 256, (options.batch, options.length + 1), generator=generator)
        for name, contestant in contestants.items():
            seconds = contestant.step(tokens)
            if step >= options.warmup:
                times[name].append(seconds)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    if strategy != ALONE:
        dist.destroy_process_group()


def run(
    options: argparse.Namespace, strategy: str, number: int
) -> dict[str, list[tuple[float, float]]]:
    """Measure one strategy in fresh processes."""
    ranks = 1 if strategy == ALONE else options.ranks
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            measure,
            (options, strategy, 20000 + (os.getpid() + number) % 20000, folder),
            nprocs=ranks,
        )
        return json.loads(Path(folder, "times.json").read_text())


def undisturbed(seconds: list[float]) -> float:
    """The fastest tenth's slowest: what a step takes where nothing else runs, also on a machine where much does."""
    return sorted(seconds)[len(seconds) // 10]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"dim": 256, "layers": 4, "heads": 4, "batch": 8, "length": 128}
    for name, default in {**sizes, "ranks": 2, "steps": 15, "warmup": 3, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--strategies", nargs="+", default=["full_shard"], help="default full_shard"
    )
    options = parser.parse_args()
    strategies = [ALONE, *options.strategies]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {"AdamW": [], "Muon": []} for name in strategies
    }
    for round_ in range(options.rounds):
        for place, strategy in enumerate(strategies):
            for name, times in run(options, strategy, len(strategies) * round_ + place).items():
                found[strategy][name] += times
    shown = Table(
        title=f"GPT d={options.dim}, {options.layers} blocks, batch {options.batch} x {options.length}, "
        f"{options.ranks} gloo ranks, torch {torch.__version__}: time of a step, of it the optimizers'"
    )
    columns = ("AdamW", "optimizer", "Muon", "optimizers", "ratio", "undisturbed")
    for column in ("", *columns):
        shown.add_column(column, justify="right" if column else "left")
    for strategy, times in found.items():
        steps = {
            name: [list(seconds) for seconds in zip(*times[name], strict=True)]
            for name in ("AdamW", "Muon")
        }
        figures = [
            f"{1e3 * statistics.median(seconds):.0f} ms"
            for name in steps
            for seconds in steps[name]
        ]
        ratios = [
            summary(steps["Muon"][0]) / summary(steps["AdamW"][0])
            for summary in (statistics.median, undisturbed)
        ]
        shown.add_row(strategy, *figures, *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(shown)


if __name__ == "__main__":
    main()
