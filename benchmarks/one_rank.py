"""What a strategy adds to a training step of a model that is too small to measure anything else, on one rank.

The model has ten parameters, the batch one row: what is timed is Lightning, and what each strategy puts on top of it.
The Trainer is as it comes, with progress bar and checkpoints, unless ``--bare``.

    python benchmarks/one_rank.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from fresh_ranks import become_rank, in_turn
from shardeddp import ShardedDP

WARMUP = 50


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured."""

    steps: int
    rounds: int
    bare: bool
    ranks: int = 1


class TenParameters(L.LightningModule):
    """A linear layer of nine inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 1)

    @override
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Clock(L.Callback):
    """The beginnings of steps."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.starts.append(time.perf_counter())


def strategies() -> dict[str, Strategy]:
    """The contestants; the first is what the others are compared with."""
    return {
        "single device": SingleDeviceStrategy("cpu"),
        "DDP": DDPStrategy(process_group_backend="gloo"),
        **{f"ShardedDP {name}": ShardedDP(name) for name in ("full_shard", "no_shard")},
    }


def measure(rank: int, name: str, setting: Setting, port: int, folder: str) -> None:
    """Leave the seconds of each step in ``folder``."""
    become_rank(rank, 1, port)
    torch.set_num_threads(1)
    clock = Clock()
    off: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar"), False
    )
    trainer = L.Trainer(
        strategy=strategies()[name], accelerator="cpu", devices=1, max_steps=setting.steps, callbacks=[clock],
        default_root_dir=folder, **(off if setting.bare else {}),
    )  # fmt: skip
    trainer.fit(TenParameters(), DataLoader(TensorDataset(torch.randn(setting.steps, 9))))
    steps = [end - start for start, end in zip(clock.starts, clock.starts[1:], strict=False)][
        WARMUP:
    ]
    Path(folder, f"{rank}.json").write_text(json.dumps({"step_s": statistics.median(steps)}))


def main() -> None:
    """Measure in turn, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--bare", action="store_true", help="without progress bar, logger and checkpoints"
    )
    setting = Setting(**vars(parser.parse_args()))
    names = list(strategies())
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for name, ranks in in_turn(measure, names, setting, Path(folder)):
            found[name].append(ranks[0]["step_s"])
    table = Table("strategy", "step (us)", "ratio", title="ten parameters, one rank")
    for name, steps in found.items():
        ratios = [ours / theirs for ours, theirs in zip(steps, found[names[0]], strict=True)]
        table.add_row(
            name, f"{statistics.median(steps) * 1e6:.0f}", f"{statistics.median(ratios):.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
