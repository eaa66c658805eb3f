"""Step time and peak memory of ShardedDP against no synchronisation, DDP, torch FSDP1 and torch FSDP2, in one run.

All of them train one GPT behind the same Lightning Trainer on the same CPU ranks (gloo), in turn and several rounds
over, so that a drift of the machine meets each of them. Every measurement has fresh processes, so that peak memory is
its own.

    python benchmarks/step_time.py                                  # d=512, 8 blocks, batch 8 x 128 per rank, 2 ranks
    python benchmarks/step_time.py --rounds 5 --only ddp full_shard
    python benchmarks/step_time.py --ranks 4 --only hsdp hybrid_shard
    python benchmarks/step_time.py --precision bf16-mixed --checkpointing
    python benchmarks/step_time.py --parts                          # and where the time of each step goes
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fresh_ranks import become_rank, in_turn, resident

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from gpt.model import GPT, Block  # noqa: E402
from shardeddp import ShardedDP, StepMonitor  # noqa: E402


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
    precision: str
    checkpointing: bool
    offload: bool
    parts: bool
    """Whether our steps are taken apart by a ``StepMonitor``, which costs at most 0.5 % of them."""

    @property
    def options(self) -> str:
        """What is unlike a plain run, for the title."""
        offload = "parameters and optimizer offloaded" if self.offload else ""
        recomputed = "blocks recomputed" if self.checkpointing else ""
        return ", ".join(filter(None, (self.precision, recomputed, offload)))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One round of one strategy on one rank."""

    step_s: list[float]
    peak_nbytes: int
    """Highest resident memory during training, over that just before the strategy was set up."""
    optimizer_s: list[float]
    """Of each step, from the end of the backward to the end of the step."""
    parts: dict[str, float]
    """Mean seconds by part, where they were measured."""
    processor_s: float
    """Of all threads of the process, per step."""
    new_pages: float
    """Pages that the process was given, per step: memory that is touched for the first time."""


BF16_MIXED = "bf16-mixed"


class TorchDDP(DDPStrategy):
    """Lightning's DDP, with torch's checkpointing.

    Args:
        setting: Precision is the Trainer's for DDP, and torch's own otherwise.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting

    def configure_ddp(self) -> None:
        """Wrap the whole."""
        _checkpoint(self.lightning_module, self._setting)
        super().configure_ddp()


class TorchFSDP1(TorchDDP):
    """torch's FullyShardedDataParallel, which Lightning's own strategy refuses on CPU."""

    def configure_ddp(self) -> None:
        """Wrap blocks and root."""
        self.model = FullyShardedDataParallel(
            self.model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)
            if self._setting.precision == BF16_MIXED
            else None,
        )
        _checkpoint(self.model, self._setting)


class TorchFSDP2(TorchDDP):
    """torch's fully_shard on every block and on the whole.

    Args:
        setting: Precision and offload are torch's own.
        shard_size: Neighbouring ranks that share a model; None: all.
    """

    def __init__(self, setting: Setting, shard_size: int | None = None) -> None:
        super().__init__(setting)
        self._shard_size = shard_size

    def configure_ddp(self) -> None:
        """Shard in place."""
        gpt, setting, options = self.lightning_module.gpt, self._setting, {}
        if self._shard_size is not None:
            shape = (self.world_size // self._shard_size, self._shard_size)
            names = ("replicate", "shard")
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if setting.precision == BF16_MIXED:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if setting.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        _checkpoint(gpt, setting)
        for block in gpt.blocks:
            fully_shard(block, **options)
        fully_shard(gpt, **options)


class Unsynchronised(TorchDDP):
    """Trains every rank by itself: the floor."""

    def configure_ddp(self) -> None:
        """Wrap nothing."""
        _checkpoint(self.lightning_module, self._setting)


def _checkpoint(module: nn.Module, setting: Setting) -> None:
    """Recompute blocks as torch does."""
    if setting.checkpointing:
        apply_activation_checkpointing(module, check_fn=lambda each: isinstance(each, Block))


def sharded(strategy: str, setting: Setting, **options: Any) -> ShardedDP:
    """Ours; precision is the Trainer's."""
    return ShardedDP(
        strategy,
        activation_checkpointing={Block} if setting.checkpointing else None,
        cpu_offload=setting.offload,
        **options,
    )


HYBRID_SHARD_SIZE = 2

STRATEGIES: dict[str, Callable[[Setting], Strategy]] = {
    "floor": Unsynchronised,
    "ddp": TorchDDP,
    "fsdp1": TorchFSDP1,
    "fsdp2": TorchFSDP2,
    "no_shard": partial(sharded, "no_shard"),
    "shard_optimizer": partial(sharded, "shard_optimizer"),
    "shard_grad_op": partial(sharded, "shard_grad_op"),
    "full_shard": partial(sharded, "full_shard"),
    "hsdp": partial(TorchFSDP2, shard_size=HYBRID_SHARD_SIZE),
    "hybrid_shard": partial(sharded, "hybrid_shard", shard_size=HYBRID_SHARD_SIZE),
}
HYBRIDS = ("hsdp", "hybrid_shard")
"""Compared only where they are asked for: on as many ranks as a shard group has they are the fully sharded ones."""
OF_TORCH = ("fsdp1", "fsdp2", "hsdp")
"""Their precision is an option of torch's, not of the Trainer's."""
NOT_OFFLOADED = ("floor", "ddp", "no_shard", "fsdp1")
"""Replicas have nothing to offload; FSDP1 pins memory, for which it needs an accelerator."""


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
    """Notes when every step begins, what the process has used by then, and how long its optimizer takes."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.used: list[tuple[float, int]] = []  # processor time of all threads, new pages
        self.optimizer_s: list[float] = []
        self._backward_end = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A step begins, optimizer step included."""
        self.starts.append(time.perf_counter())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.used.append((usage.ru_utime + usage.ru_stime, usage.ru_minflt))

    def on_before_optimizer_step(self, *_: Any) -> None:
        """The backward has ended."""
        self._backward_end = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """The optimizer has stepped."""
        self.optimizer_s.append(time.perf_counter() - self._backward_end)


def measure(rank: int, name: str, setting: Setting, port: int, folder: str) -> None:
    """Train on one rank and leave the figures in ``folder``."""
    become_rank(rank, setting.ranks, port)
    strategy = STRATEGIES[name](setting)
    clock = Clock()
    taken_apart = setting.parts and isinstance(strategy, ShardedDP)
    monitors = [StepMonitor()] if taken_apart else []
    module = Language(setting)
    data = torch.randint(
        0,
        256,
        (setting.ranks * setting.batch * (setting.steps + setting.warmup + 1), setting.length + 1),
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=setting.ranks, strategy=strategy, max_steps=setting.steps + setting.warmup + 1,
        precision=None if name in OF_TORCH else setting.precision,
        callbacks=[clock, *monitors], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, barebones=False,
    )  # fmt: skip
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # peak resident memory starts anew
    before = resident("VmRSS")
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=setting.batch))
    steps = [end - start for start, end in zip(clock.starts, clock.starts[1:], strict=False)][
        setting.warmup :
    ]
    report = monitors[0].report if monitors else None
    first, last = clock.used[setting.warmup], clock.used[setting.warmup + len(steps)]
    figures = Measured(
        step_s=steps,
        peak_nbytes=resident("VmHWM") - before,
        optimizer_s=clock.optimizer_s[setting.warmup : setting.warmup + len(steps)],
        parts={} if report is None else dict(report.parts),
        processor_s=(last[0] - first[0]) / len(steps),
        new_pages=(last[1] - first[1]) / len(steps),
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(asdict(figures)))


def run(names: list[str], setting: Setting, folder: Path) -> dict[str, list[Measured]]:
    """Measure every strategy in turn, ``rounds`` times; the figures of rank 0, peak memory of the worst rank."""
    results: dict[str, list[Measured]] = {name: [] for name in names}
    for name, found in in_turn(measure, names, setting, folder):
        ranks = [Measured(**figures) for figures in found]
        results[name].append(
            replace(ranks[0], peak_nbytes=max(measured.peak_nbytes for measured in ranks))
        )
    return results


def table(results: dict[str, list[Measured]], setting: Setting) -> Table:
    """Medians and fastest steps, how far rounds lie apart, and ratios to everybody that a user may come from."""
    steps = {
        name: [step for measured in rounds for step in measured.step_s]
        for name, rounds in results.items()
    }
    anchors = [name for name in ("floor", "ddp", "fsdp1", "fsdp2", "hsdp") if name in results]
    shown = Table(
        title=f"GPT d={setting.dim}, {setting.blocks} blocks, batch {setting.batch} x {setting.length}, "
        f"{setting.options}, {setting.ranks} gloo ranks, torch {torch.__version__}, "
        f"{platform.machine()}, {date.today()}",
        caption="ms; medians of rounds, from the fastest to the slowest; ratios of medians, and of fastest steps",
    )
    shown.add_column("strategy")
    for column in ("median", "rounds", "fastest", *(f"/ {anchor}" for anchor in anchors)):
        shown.add_column(column, justify="right")
    shown.add_column("peak, MiB", justify="right")
    for name, rounds in results.items():
        of_rounds = [statistics.median(measured.step_s) for measured in rounds]
        ratios = [
            " ".join(
                f"{by(steps[name]) / by(steps[anchor]):.2f}" for by in (statistics.median, min)
            )
            for anchor in anchors
        ]
        peak = statistics.median(measured.peak_nbytes for measured in rounds)
        shown.add_row(
            name,
            f"{1e3 * statistics.median(steps[name]):.0f}",
            f"{1e3 * min(of_rounds):.0f} to {1e3 * max(of_rounds):.0f}",
            f"{1e3 * min(steps[name]):.0f}",
            *ratios,
            f"{peak / 2**20:.0f}",
        )
    return shown


def table_of_parts(results: dict[str, list[Measured]]) -> Table:
    """Where the time of a step goes: of ours by part, of all what the optimizer takes."""
    names = [*dict.fromkeys(part for rounds in results.values() for part in rounds[0].parts)]
    shown = Table(
        title="Parts of a step",
        caption="ms: medians over rounds of mean steps of rank 0; of gathers and reductions what compute waits for; "
        "processor: of all threads; new pages: 4 KiB each, thousands",
    )
    shown.add_column("strategy")
    for column in ("step", "over floor", "processor", "new pages", "optimizer step", *names):
        shown.add_column(column, justify="right")
    floor: float | None = None
    for name, rounds in results.items():
        step = statistics.median(statistics.mean(each.step_s) for each in rounds)
        floor = step if name == "floor" else floor
        optimizer = statistics.median(statistics.mean(each.optimizer_s) for each in rounds)
        over = "" if floor is None else f"{1e3 * (step - floor):.0f}"
        processor = statistics.median(each.processor_s for each in rounds)
        pages = statistics.median(each.new_pages for each in rounds)
        parts = [
            f"{1e3 * statistics.median(each.parts[part] for each in rounds):.1f}"
            for part in names
            if rounds[0].parts
        ]
        of_process = f"{1e3 * processor:.0f}", f"{pages / 1e3:.1f}"
        shown.add_row(
            name, f"{1e3 * step:.0f}", over, *of_process, f"{1e3 * optimizer:.1f}", *parts
        )
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
        help="what to compare; default: all but hybrids, with --offload only what can",
    )
    parser.add_argument("--precision", choices=["32-true", BF16_MIXED], default="32-true")
    parser.add_argument("--checkpointing", action="store_true", help="recompute every block")
    parser.add_argument(
        "--offload", action="store_true", help="keep shards and optimizer in host memory"
    )
    parser.add_argument("--parts", action="store_true", help="say where the time of a step goes")
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
    left_out = {*HYBRIDS, *(NOT_OFFLOADED if setting.offload else ())}
    names = names or [name for name in STRATEGIES if name not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        results = run(names, setting, Path(folder))
    Console().print(table(results, setting))
    if setting.parts:
        Console().print(table_of_parts(results))
    if save is not None:
        save.write_text(
            json.dumps(
                {name: [asdict(item) for item in items] for name, items in results.items()},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
