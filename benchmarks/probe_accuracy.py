"""Step times planned after `shardeddp probe`, beside measured ones: the demo's GPT on CPU ranks, strategies x batches.

    python benchmarks/probe_accuracy.py              # 2 ranks
    python benchmarks/probe_accuracy.py --ranks 4

Planned twice: with what the probe has measured, and with what a run of full_shard has recorded as well. The steps that
are judged are of fresh processes, in turn and several rounds over. Use a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fresh_ranks import become_rank, in_turn

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from gpt.model import GPTModule  # noqa: E402
from shardeddp import ShardedDP, StepMonitor  # noqa: E402
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES  # noqa: E402

LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How it is measured."""

    ranks: int
    rounds: int
    steps: int
    folder: str
    """Of the recorded run."""


class Clock(L.Callback):
    """Notes when every step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """A step has ended."""
        self.ends.append(time.perf_counter())


def measure(rank: int, name: str, setting: Setting, port: int, folder: str) -> None:
    """Train on one rank and leave the steps' seconds in ``folder``."""
    become_rank(rank, setting.ranks, port)
    strategy, batch = name.split()
    clock = Clock()
    record = Path(setting.folder, "run.json")
    monitors = [StepMonitor(record=record)] if name == RECORDED and not record.exists() else []
    trainer = L.Trainer(
        accelerator="cpu", devices=setting.ranks, max_steps=setting.steps + 4,
        strategy=ShardedDP(strategy, shard_size=2 if strategy == "hybrid_shard" else None),
        callbacks=[clock, *monitors],
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(256, (setting.ranks * int(batch) * (setting.steps + 5), LENGTH + 1))
    data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    trainer.fit(GPTModule(), torch.utils.data.DataLoader(data, batch_size=int(batch)))
    steps = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)][3:]
    Path(folder, f"{rank}.json").write_text(json.dumps(steps))


RECORDED = "full_shard 8"


def planned(name: str, ranks: int, files: Sequence[Path]) -> tuple[float, float]:
    """Seconds of a step, and the share within which they are said to lie."""
    strategy, batch = name.split()
    if strategy == "hybrid_shard" and ranks == 2:
        strategy = "full_shard"  # which it is, among two ranks
    plan = ShardedDP.plan(
        GPTModule(),
        gpus=ranks,
        per_node=ranks,
        inputs=["int64:B,S", "int64:B,S"],
        length=LENGTH,
        strategies=(strategy,),
        precisions=("32-true",),
        recomputes=("none",),
        micro_batches=(int(batch),),
        calibrate=files,
    )
    return plan.best.step.total, plan.best.interval


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"ranks": 2, "rounds": 3, "steps": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8], help="default 4 8")
    options = parser.parse_args()
    names = [f"{it} {batch}" for it in SHARDING_STRATEGIES for batch in options.batches]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "probe.json"), Path(folder, "run.json")]
        setting = Setting(
            ranks=options.ranks, rounds=options.rounds, steps=options.steps, folder=folder
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        command = [*torchrun, str(options.ranks), "-m", "shardeddp", "probe", "-o", str(files[0])]
        began = time.perf_counter()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        print(f"the probe took {time.perf_counter() - began:.0f} s")
        steps: defaultdict[str, list[float]] = defaultdict(list)
        for name, found in in_turn(measure, names, setting, Path(folder)):
            steps[name] += map(max, zip(*found, strict=True))
        report(steps, setting, files)


def report(steps: Mapping[str, Sequence[float]], setting: Setting, files: Sequence[Path]) -> None:
    """A line for each setting, and the errors of all."""
    errors: list[list[float]] = [[], []]
    print(f"{'strategy, batch':20s}  measured (quartiles)       after probe      and a run")
    for name, seconds in steps.items():
        lower, middle, upper = statistics.quantiles(seconds, n=4)
        line = f"{name:20s} {1e3 * middle:6.1f} ms ({1e3 * lower:.1f} to {1e3 * upper:.1f})"
        for count, column in enumerate(errors, start=1):
            predicted, interval = planned(name, setting.ranks, files[:count])
            column.append(predicted / middle - 1)
            line += (
                f"  {1e3 * predicted:6.1f} ms {100 * column[-1]:+6.1f} % (+-{100 * interval:.0f})"
            )
        print(line)
    for text, column in zip(("after probe", "and a run"), errors, strict=True):
        sizes = sorted(map(abs, column))
        print(
            f"{text:12s} mean {100 * statistics.fmean(sizes):.1f} %  median "
            f"{100 * statistics.median(sizes):.1f} %  max {100 * sizes[-1]:.1f} %  bias "
            f"{100 * statistics.fmean(column):+.1f} %"
        )


if __name__ == "__main__":
    main()
