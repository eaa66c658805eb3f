"""Step time and peak memory of ShardedDP against no synchronisation, DDP, torch FSDP1 and torch FSDP2, in one run.

All of them train one GPT behind the same Lightning Trainer on the same CPU ranks (gloo), in turn and several rounds
over, so that a drift of the machine meets each of them. Every measurement has fresh processes, so that peak memory is
its own.

    python benchmarks/step_time.py                                  # d=512, 8 blocks, batch 8 x 128 per rank, 2 ranks
    python benchmarks/step_time.py --rounds 5 --only ddp full_shard
    python benchmarks/step_time.py --ranks 4 --only hsdp hybrid_shard
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fresh_ranks import become_rank, in_turn, resident

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from gpt.model import GPT, Block  # noqa: E402
from shardeddp import ShardedDP  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how often it is measured."""

    ranks: int
    dim: int
    blocks: int
    batch: int
    length: int
    steps: int
    warmup: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One round of one strategy on one rank."""

    step_s: list[float]
    peak_nbytes: int
    """Highest resident memory during training, over that just before the strategy was set up."""


class Unsynchronised(DDPStrategy):
    """Trains every rank by itself: the floor."""

    def configure_ddp(self) -> None:
        """Wrap nothing."""


class TorchFSDP1(DDPStrategy):
    """torch's FullyShardedDataParallel, which Lightning's own strategy refuses on CPU."""

    def configure_ddp(self) -> None:
        """Wrap blocks and root."""
        self.model = FullyShardedDataParallel(
            self.model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )


class TorchFSDP2(DDPStrategy):
    """torch's fully_shard on every block and on the whole."""

    def configure_ddp(self) -> None:
        """Shard in place."""
        gpt = self.lightning_module.gpt
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(gpt)


class TorchHSDP(DDPStrategy):
    """torch's fully_shard on a mesh of replicas, two ranks to a shard group."""

    def configure_ddp(self) -> None:
        """Shard in place."""
        shape = (self.world_size // HYBRID_SHARD_SIZE, HYBRID_SHARD_SIZE)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        gpt = self.lightning_module.gpt
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(gpt, mesh=mesh)


HYBRID_SHARD_SIZE = 2

STRATEGIES: dict[str, Any] = {
    "floor": Unsynchronised,
    "ddp": DDPStrategy,
    "fsdp1": TorchFSDP1,
    "fsdp2": TorchFSDP2,
    "no_shard": lambda: ShardedDP("no_shard"),
    "shard_optimizer": lambda: ShardedDP("shard_optimizer"),
    "shard_grad_op": lambda: ShardedDP("shard_grad_op"),
    "full_shard": lambda: ShardedDP("full_shard"),
    "hsdp": TorchHSDP,
    "hybrid_shard": lambda: ShardedDP("hybrid_shard", shard_size=HYBRID_SHARD_SIZE),
}
HYBRIDS = ("hsdp", "hybrid_shard")
"""Compared only where they are asked for: on as many ranks as a shard group has they are the fully sharded ones."""


class Language(L.LightningModule):
    """The GPT on random tokens with AdamW."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.gpt = GPT(vocab_size=256, dim=setting.dim, num_layers=setting.blocks, num_heads=8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Next-token loss."""
        logits = self.gpt(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with stock options."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Notes when every step begins."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A step begins, optimizer step included."""
        self.starts.append(time.perf_counter())


def measure(rank: int, name: str, setting: Setting, port: int, folder: str) -> None:
    """Train on one rank and leave the figures in ``folder``."""
    become_rank(rank, setting.ranks, port)
    strategy: Strategy = STRATEGIES[name]()
    clock = Clock()
    module = Language(setting)
    data = torch.randint(
        0,
        256,
        (setting.ranks * setting.batch * (setting.steps + setting.warmup + 1), setting.length + 1),
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=setting.ranks, strategy=strategy, max_steps=setting.steps + setting.warmup + 1,
        callbacks=[clock], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, barebones=False,
    )  # fmt: skip
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # peak resident memory starts anew
    before = resident("VmRSS")
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=setting.batch))
    steps = [end - start for start, end in zip(clock.starts, clock.starts[1:], strict=False)][
        setting.warmup :
    ]
    figures = Measured(step_s=steps, peak_nbytes=resident("VmHWM") - before)
    Path(folder, f"{rank}.json").write_text(json.dumps(asdict(figures)))


def run(names: list[str], setting: Setting, folder: Path) -> dict[str, list[Measured]]:
    """Measure every strategy in turn, ``rounds`` times; the figures of rank 0, peak memory of the worst rank."""
    results: dict[str, list[Measured]] = {name: [] for name in names}
    for name, found in in_turn(measure, names, setting, folder):
        ranks = [Measured(**figures) for figures in found]
        results[name].append(
            Measured(
                step_s=ranks[0].step_s, peak_nbytes=max(measured.peak_nbytes for measured in ranks)
            )
        )
    return results


def table(results: dict[str, list[Measured]], setting: Setting) -> Table:
    """Medians, and their ratios to everybody that a user may come from."""
    medians = {
        name: statistics.median(step for measured in rounds for step in measured.step_s)
        for name, rounds in results.items()
    }
    anchors = [name for name in ("floor", "ddp", "fsdp1", "fsdp2", "hsdp") if name in results]
    shown = Table(
        title=f"GPT d={setting.dim}, {setting.blocks} blocks, batch {setting.batch} x {setting.length}, "
        f"{setting.ranks} gloo ranks, torch {torch.__version__}, {platform.machine()}, {date.today()}"
    )
    shown.add_column("strategy")
    shown.add_column("step", justify="right")
    for anchor in anchors:
        shown.add_column(f"/ {anchor}", justify="right")
    shown.add_column("peak memory", justify="right")
    for name, rounds in results.items():
        peak = statistics.median(measured.peak_nbytes for measured in rounds)
        ratios = [f"{medians[name] / medians[anchor]:.2f}" for anchor in anchors]
        shown.add_row(name, f"{1e3 * medians[name]:.0f} ms", *ratios, f"{peak / 2**20:.0f} MiB")
    return shown


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(STRATEGIES),
        default=[name for name in STRATEGIES if name not in HYBRIDS],
        help="what to compare",
    )
    sizes = {
        "ranks": 2,
        "dim": 512,
        "blocks": 8,
        "batch": 8,
        "length": 128,
        "steps": 12,
        "warmup": 3,
        "rounds": 3,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--save", type=Path, help="write the figures of every step to this file")
    options = vars(parser.parse_args())
    names, save = options.pop("only"), options.pop("save")
    setting = Setting(**options)
    with tempfile.TemporaryDirectory() as folder:
        results = run(names, setting, Path(folder))
    Console().print(table(results, setting))
    if save is not None:
        save.write_text(
            json.dumps(
                {name: [asdict(item) for item in items] for name, items in results.items()},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
