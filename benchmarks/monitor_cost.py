"""What StepMonitor costs: steps with its clock and without it, in turn inside of one run, and the time in its hooks.

Run ``python benchmarks/monitor_cost.py``: a GPT of 8 blocks, d=512, batch 8 x 128 per rank, on 2 gloo ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fresh_ranks import become_rank, in_turn
from shardeddp import ShardedDP, StepMonitor
from step_time import Language, Setting

BLOCK = 4
"""Steps with the clock, and then without it: short, so that a drift of the machine meets both."""


class Timed(StepMonitor):
    """Times its own hook, and takes its clock away in every second block of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.hooks: list[float] = []
        self._clock: Any = None
        self._begin = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """End of a step."""
        mesh: Any = trainer.strategy.mesh
        now = time.perf_counter()
        if trainer.global_step > 2 * BLOCK:
            self.steps[mesh.run.clock is not None].append(now - self._begin)
        super().on_train_batch_end(trainer, *args, **kwargs)
        self.hooks.append(time.perf_counter() - now)
        self._clock = self._clock or mesh.run.clock
        mesh.measure(self._clock if trainer.global_step // BLOCK % 2 else None)
        self._begin = time.perf_counter()


def measure(rank: int, name: str, setting: Setting, port: int, folder: str) -> None:
    """Train on one rank and leave the figures in ``folder``."""
    become_rank(rank, setting.ranks, port)
    monitor, module = Timed(), Language(setting)
    size = (setting.ranks * setting.batch * (setting.steps + 1), setting.length + 1)
    trainer = L.Trainer(
        accelerator="cpu", devices=setting.ranks, strategy=ShardedDP(name), max_steps=setting.steps,
        callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.randint(0, 256, size), batch_size=setting.batch)
    trainer.fit(module, data)
    figures = {
        "on": statistics.median(monitor.steps[True]),
        "off": statistics.median(monitor.steps[False]),
        "hook": statistics.mean(monitor.hooks[1:]),  # the first one plans
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(figures))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"ranks": 2, "dim": 512, "blocks": 8, "batch": 8, "length": 128, "steps": 64}
    for name, default in {**sizes, "rounds": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", default="full_shard")
    asked = vars(parser.parse_args())
    strategy = asked.pop("strategy")
    with tempfile.TemporaryDirectory() as folder:
        for _, found in in_turn(measure, [strategy], Setting(**asked, warmup=0), Path(folder)):
            on, off, hook = (found[0][key] for key in ("on", "off", "hook"))
            print(
                f"{strategy}: median step {1e3 * on:.2f} ms with the clock, {1e3 * off:.2f} ms without "
                f"({100 * (on / off - 1):+.2f} %); hook {1e3 * hook:.3f} ms ({100 * hook / off:.3f} %)"
            )


if __name__ == "__main__":
    main()
