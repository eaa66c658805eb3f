"""Ranks with different numbers of batches to evaluate: each goes through its own, and then takes part in the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from typing_extensions import override

from shardeddp.comm import Mesh, exchange
from shardeddp.lightning_api import Callback, EvaluationLoop, LightningModule, Trainer, callbacks_of
from shardeddp.plugins.uneven_training import UNKNOWN, number_of_batches
from shardeddp.sharding.visits import Visits


class UnevenEvaluation(Callback):
    """Lets a rank that has no batch left take part in what others gather, in one run of a Trainer.

    Args:
        mesh: All ranks.
        visits: Of the model's units.
    """

    def __init__(self, mesh: Mesh, visits: Visits) -> None:
        super().__init__()
        self._mesh, self._visits = mesh, visits

    def begin(self, trainer: Trainer) -> None:
        """Let each rank have as many batches as it has, if their numbers differ, or are not known."""
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        if loop._combined_loader is None or not self._visits.gathers:
            return
        loaders = zip(loop._combined_loader.flattened, loop.max_batches, strict=True)
        texts = exchange(
            json.dumps([number_of_batches(loader, [loader], limit) for loader, limit in loaders]).encode(),
            self._mesh.control,
        )
        if len(set(texts)) == 1 and UNKNOWN not in json.loads(texts[0]):
            return
        self._visits.open()
        if isinstance(loop, EvaluationLoop):
            # Where metrics are reduced, once for each loader: before any hook that says that they are going to be.
            vars(loop)["_store_dataloader_outputs"] = partial(
                self._wait, partial(EvaluationLoop._store_dataloader_outputs, loop)
            )

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for ranks that have more batches."""
        self._visits.wait()
        self._visits.close()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
            vars(loop).pop("_store_dataloader_outputs", None)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def attach(self, trainer: Trainer) -> None:
        """Hear of everything before other callbacks do."""
        callbacks_of(trainer).insert(0, self)

    def detach(self, trainer: Trainer) -> None:
        """Leave a run that is over, or has failed."""
        self._visits.close()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
            vars(loop).pop("_store_dataloader_outputs", None)
        if self in callbacks_of(trainer):
            callbacks_of(trainer).remove(self)

    def _wait(self, then: Callable[[], None]) -> None:
        self._visits.wait()
        then()
