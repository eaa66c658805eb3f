"""Step times planned after `shardeddp probe`, beside measured ones: the demo's GPT on CPU ranks, strategies x batches.

    python benchmarks/probe_accuracy.py              # 2 ranks
    python benchmarks/probe_accuracy.py --ranks 4

Each round measures with the probe, then all strategies and batches in turn, in fresh processes. Its steps are compared
with two plans of its own: after the probe, and after a recorded run of full_shard as well. So a machine whose speed
drifts between rounds is planned as it was in each. Use a machine on which nothing else runs.
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
from itertools import islice
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
    recorded: str
    """Strategy and batch of the run that is recorded."""


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
    monitors = [StepMonitor(record=Path(folder, "run.json"))] if name == setting.recorded else []
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
    result: dict[str, Any] = {"steps": steps}
    if monitors and rank == 0:
        result["run"] = Path(folder, "run.json").read_text()
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


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
    return plan.best.step.total, plan.best.relative_error


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
    setting = Setting(
        ranks=options.ranks,
        rounds=options.rounds,
        steps=options.steps,
        recorded=f"full_shard {options.batches[-1]}",
    )
    rows: defaultdict[str, list[Row]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        measured = in_turn(measure, names, setting, Path(folder))
        for round_ in range(setting.rounds):
            files = [Path(folder, f"{kind}-{round_}.json") for kind in ("probe", "run")]
            probe(files[0], setting.ranks)
            steps: dict[str, list[float]] = {}
            for name, found in islice(measured, len(names)):
                steps[name] = [*map(max, zip(*(it["steps"] for it in found), strict=True))]
                if name == setting.recorded:
                    files[1].write_text(found[0]["run"])
            for name, seconds in steps.items():
                plans = [planned(name, setting.ranks, files[:count]) for count in (1, 2)]
                rows[name].append(Row(seconds, plans))
    report(rows)


def probe(path: Path, ranks: int) -> None:
    """Measure the machine as a user does."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    began = time.perf_counter()
    subprocess.run(
        [*torchrun, "-m", "shardeddp", "probe", "-o", str(path)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    print(f"the probe took {time.perf_counter() - began:.0f} s")


@dataclass(frozen=True)
class Row:
    """One setting in one round."""

    steps: Sequence[float]
    """Measured seconds."""
    plans: Sequence[tuple[float, float]]
    """Planned seconds with their interval: after the probe, and after a run as well."""

    def error(self, column: int) -> float:
        """Relative error of a plan beside the median step."""
        return self.plans[column][0] / statistics.median(self.steps) - 1


def report(rows: Mapping[str, Sequence[Row]]) -> None:
    """A line for each setting, medians over its rounds; and the errors of all."""
    errors: list[list[float]] = [[], []]
    print(f"{'strategy, batch':20s}  measured (quartiles)       after probe      and a run")
    for name, rounds in rows.items():
        steps = [seconds for row in rounds for seconds in row.steps]
        lower, middle, upper = statistics.quantiles(steps, n=4)
        line = f"{name:20s} {1e3 * middle:6.1f} ms ({1e3 * lower:.1f} to {1e3 * upper:.1f})"
        for index, column in enumerate(errors):
            each = [row.error(index) for row in rounds]
            column.append(statistics.median(each))
            interval = statistics.median(row.plans[index][1] for row in rounds)
            line += f"  {100 * column[-1]:+6.1f} % (+-{100 * interval:.0f}; "
            line += f"{100 * min(each):+.0f} to {100 * max(each):+.0f})"
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
