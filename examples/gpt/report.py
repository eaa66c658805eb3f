"""What a training step costs on every rank, and the closing table that sets two fits side by side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from gpt.memory import MemoryGauge, start_gauge, state_nbytes
from shardeddp import ShardedDP


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The cost of one fit over its measured steps; where ranks differ, on the rank that has the most."""

    label: str
    """Name of the strategy."""
    num_steps: int
    """How many optimizer steps were measured."""
    last_step: int
    """Number of the last of them; a fit begins with step 1."""
    loss: float
    """Training loss of the last measured batch, mean over ranks."""
    step_time_s: float
    """Median time of a step."""
    tokens_per_s: float
    """Tokens that all ranks together train on in a second."""
    state_nbytes: float
    """Parameters, gradients and optimizer states of a rank."""
    peak_nbytes: float
    """The state plus the most that a step takes on top of it and gives back; nan where that cannot be measured."""
    sent_nbytes: float
    """What a rank sends in a step."""


class StepMeter(L.Callback):
    """Measure some optimizer steps of a fit, after a few that warm it up.

    Args:
        label: Name of the strategy, for the table.
        num_steps: Optimizer steps to measure.
        warmup_steps: Optimizer steps to let pass before, at least one (the first makes the optimizer states).
        stop: Whether to end the fit when the last one is measured.

    Raises:
        ValueError: If there is no step to measure or none to warm up.
    """

    def __init__(
        self, label: str, num_steps: int, warmup_steps: int = 5, stop: bool = False
    ) -> None:
        super().__init__()
        if num_steps < 1 or warmup_steps < 1:
            raise ValueError(
                f"Expected at least one step to measure and one to warm up, found num_steps={num_steps} and "
                f"warmup_steps={warmup_steps}: set both to 1 or more."
            )
        self.label = label
        self.num_steps = num_steps
        self.warmup_steps = warmup_steps
        self.stop = stop
        self.figures: Figures | None = None  # None until the last step is measured
        self._gauge: MemoryGauge | None = None  # None until the first step is measured
        self._step = (
            0  # number of the running step, which has several batches if gradients are accumulated
        )
        self._batch_began_s = 0.0
        self._sent_before_nbytes = 0  # by this rank, when the running batch began
        self._step_times_s = [
            0.0
        ]  # of the measured steps; the last entry grows with the running step
        self._sent_nbytes = 0  # by this rank in all measured steps
        self._tokens = 0  # of this rank in all measured steps
        self._state_nbytes = 0  # 0 until counted

    @property
    def last_step(self) -> int:
        """Number of the last measured step."""
        return self.warmup_steps + self.num_steps

    @property
    def _measuring(self) -> bool:
        return self.warmup_steps < self._step <= self.last_step

    def on_train_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        """Start the clock."""
        self._step = trainer.global_step + 1
        if not self._measuring:
            return
        if self._gauge is None:
            self._gauge = start_gauge(trainer.strategy.root_device)
        self._sent_before_nbytes = _sent_nbytes(trainer)
        self._batch_began_s = _now_s(trainer.strategy.root_device)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Count what training keeps, at the moment when gradients and optimizer states both exist."""
        if self._measuring and not self._state_nbytes:
            self._state_nbytes = state_nbytes(pl_module, optimizer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Mapping[str, Tensor],
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        """Stop the clock; after the last step compare with the other ranks."""
        if not self._measuring:
            return
        self._step_times_s[-1] += _now_s(trainer.strategy.root_device) - self._batch_began_s
        self._sent_nbytes += _sent_nbytes(trainer) - self._sent_before_nbytes
        self._tokens += batch[0].numel()
        if trainer.global_step < self._step:
            return  # gradients of this batch wait for those of the next ones
        if self._step < self.last_step:
            self._step_times_s.append(0.0)
            return
        loss = outputs["loss"] * trainer.accumulate_grad_batches  # Lightning divides it
        self.figures = self._conclude(
            trainer, float(trainer.strategy.reduce(loss, reduce_op="mean"))
        )
        trainer.should_stop |= self.stop

    def _conclude(self, trainer: L.Trainer, loss: float) -> Figures:
        """Take the largest figures of all ranks."""
        growth_nbytes = self._gauge.growth_nbytes() if self._gauge else math.nan
        mine = torch.tensor(
            [
                statistics.median(self._step_times_s),
                self._state_nbytes,
                self._state_nbytes + growth_nbytes,
                self._sent_nbytes / self.num_steps,
            ],
            dtype=torch.float64,
            device=trainer.strategy.root_device,
        )
        step_time_s, state, peak, sent = trainer.strategy.reduce(mine, reduce_op="max").tolist()
        return Figures(
            label=self.label,
            num_steps=self.num_steps,
            last_step=self.last_step,
            loss=loss,
            step_time_s=step_time_s,
            tokens_per_s=self._tokens / self.num_steps * trainer.world_size / step_time_s,
            state_nbytes=state,
            peak_nbytes=peak,
            sent_nbytes=sent
            if isinstance(trainer.strategy, ShardedDP)
            else _ring_all_reduce_nbytes(trainer),
        )


def _sent_nbytes(trainer: L.Trainer) -> int:
    """What this rank has sent so far; 0 under a strategy that does not count."""
    return trainer.strategy.mesh.sent_nbytes if isinstance(trainer.strategy, ShardedDP) else 0


def _ring_all_reduce_nbytes(trainer: L.Trainer) -> float:
    """What a rank sends when all gradients are all-reduced once around a ring: 2 (n - 1) / n of their bytes."""
    gradients_nbytes = sum(
        p.nbytes for p in trainer.lightning_module.parameters() if p.requires_grad
    )
    return 2 * (trainer.world_size - 1) / trainer.world_size * gradients_nbytes


def _now_s(device: torch.device) -> float:
    """The time at which the device is done with all it was given; a CPU is when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


MIB = 2**20

ROWS: dict[str, Callable[[Figures], float]] = {
    "training loss at the last step": lambda figures: figures.loss,
    "step time (ms)": lambda figures: figures.step_time_s * 1e3,
    "tokens per second, all ranks": lambda figures: figures.tokens_per_s,
    "state per rank (MiB)": lambda figures: figures.state_nbytes / MIB,
    "peak memory per rank (MiB)": lambda figures: figures.peak_nbytes / MIB,
    "sent per rank and step (MiB)": lambda figures: figures.sent_nbytes / MIB,
}

NOTES = (
    "Step time: median, on the slowest rank; with DDP beside it, of three rounds in turn. State: parameters, gradients "
    "and optimizer states, counted tensor by tensor. Peak memory: the state plus the most that a step takes on top of "
    "it and gives back, which is activations, gathered parameters and buffers (on a CPU the growth of the process as "
    "the kernel sees it, on a GPU of allocated memory). Sent: as a ring would send it, counted by ShardedDP; for DDP "
    "one all-reduce of all gradients."
)


def middle(fits: Sequence[Figures | None]) -> Figures | None:
    """The first of several fits, with the median of their step times; None if one measured nothing."""
    found = [fit for fit in fits if fit is not None]
    if len(found) < len(fits):
        return None
    first, step_time_s = found[0], statistics.median(fit.step_time_s for fit in found)
    tokens = first.tokens_per_s * first.step_time_s  # of all ranks in a step
    return replace(first, step_time_s=step_time_s, tokens_per_s=tokens / step_time_s)


@rank_zero_only
def print_closing_table(this: Figures, ddp: Figures | None, folder: Path | None = None) -> None:
    """Print the figures of a fit, next to those of the same model under DDP if there are any.

    Args:
        this: The fit to report.
        ddp: The comparison, measured over the same steps.
        folder: The table is kept there as `report.txt` and as a picture, `report.svg`; None: it is not.
    """
    fits = [this] if ddp is None else [this, ddp]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"steps {this.last_step - this.num_steps + 1} to {this.last_step}")
    for fit in fits:
        table.add_column(fit.label, justify="right")
    if ddp is not None:
        table.add_column("ratio", justify="right", style="bold")
    for row, value_of in ROWS.items():
        values = [value_of(fit) for fit in fits]
        ratio = [] if ddp is None else [_ratio(*values)]
        table.add_row(row, *map(_four_digits, values), *ratio)
    console = Console(record=True)
    console.print(table)
    console.print(f"[dim]{NOTES}[/]")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        console.save_text(str(folder / "report.txt"), clear=False)
        console.save_svg(str(folder / "report.svg"), title=f"{this.label}, {this.num_steps} steps")


def _four_digits(value: float) -> str:
    """A dash for what could not be measured."""
    if math.isnan(value):
        return "-"
    decimals = 3 - math.floor(math.log10(max(1.0, abs(value))))
    return f"{value:,.{max(0, decimals)}f}"


def _ratio(this: float, other: float) -> str:
    """A dash where there is nothing to compare, as with bytes sent by a single rank."""
    return f"{this / other:.3f}" if other > 0 and not math.isnan(this) else "-"
