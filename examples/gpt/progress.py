"""A progress bar that leaves one line per epoch behind."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

REFRESHES_PER_S = 4  # drawing takes a core's time away from training


class EpochLines(RichProgressBar):
    """Lightning's rich progress bar, narrow enough for a terminal of 80 columns."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=REFRESHES_PER_S, leave=True)

    def configure_columns(self, trainer: L.Trainer) -> list[ProgressColumn]:
        """Epoch, bar, batches, time; Lightning appends the metrics."""
        return [
            TextColumn("{task.description}"),
            BarColumn(18, complete_style="cyan", finished_style="cyan"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        ]

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What the module logs for the bar, without the number of the run."""
        return {
            name: value
            for name, value in super().get_metrics(trainer, pl_module).items()
            if name != "v_num"
        }
