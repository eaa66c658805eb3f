"""Progress bars: one line per epoch with tokens per second, and one bar over several short fits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities import rank_zero_only
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from torch import Tensor

REFRESHES_PER_S = 4  # drawing takes a core's time away from training
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(7, complete_style="cyan", finished_style="cyan"),
    MofNCompleteColumn(),
    TimeRemainingColumn(elapsed_when_finished=True),
)


class EpochLines(RichProgressBar):
    """Lightning's rich progress bar, narrow enough for a terminal of 80 columns."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=REFRESHES_PER_S, leave=True)
        self._epoch_began_s = 0.0
        self._tokens = 0  # of all ranks, in this epoch
        self._tokens_per_s = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to count."""
        self._epoch_began_s, self._tokens = time.perf_counter(), 0
        super().on_train_epoch_start(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Mapping[str, Tensor],
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        """Count the tokens of the batch; all ranks have as many."""
        self._tokens += batch[0].numel() * trainer.world_size
        self._tokens_per_s = self._tokens / (time.perf_counter() - self._epoch_began_s)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def configure_columns(self, trainer: L.Trainer) -> list[ProgressColumn]:
        """Epoch, bar, batches, time that is left (at the end: that it took); Lightning appends the metrics."""
        return [*COLUMNS]

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What the module logs for the bar, without the number of the run, and tokens per second."""
        logged = super().get_metrics(trainer, pl_module)
        logged.pop("v_num", None)
        rate = {"tok/s": f"{self._tokens_per_s:,.0f}"} if self._tokens else {}
        return {**rate, **logged}


class StepsBar(L.Callback):
    """One bar over the optimizer steps of several fits, on rank 0, drawn between steps only.

    Args:
        total: Steps of all fits.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        hidden = rank_zero_only.rank != 0
        self._bar = Progress(*COLUMNS, transient=True, auto_refresh=False, disable=hidden)
        self._task = self._bar.add_task("", total=total)
        self._step = 0  # of the running fit

    def __enter__(self) -> StepsBar:
        """Show it."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it away."""
        self._bar.stop()

    def begin(self, label: str) -> None:
        """Name the next fit."""
        self._step = 0
        self._bar.update(self._task, description=f"{label:<22}")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Advance by the steps that have been made."""
        self._bar.advance(self._task, trainer.global_step - self._step)
        self._step = trainer.global_step
        self._bar.refresh()
