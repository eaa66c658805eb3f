"""Companions: what lets the callbacks and data loaders of one run work with a model that is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardeddp.config import UnevenBatches, check_uneven_batches
from shardeddp.errors import ConfigurationError
from shardeddp.lightning_api import LightningModule, ModelPruning, Trainer, TrainerFn, callbacks_of
from shardeddp.plugins.summary import complete_summaries, restore_summaries
from shardeddp.plugins.uneven_evaluation import UnevenEvaluation
from shardeddp.plugins.uneven_training import EvenTraining
from shardeddp.sharding.runtime import Runtime
from shardeddp.strategy.averages import Averages


class Companions:
    """Accompanies the runs of a Trainer: averages and summaries of callbacks, numbers of batches.

    Args:
        uneven_batches: What training does when a rank has no batch left and others have.
    """

    def __init__(self, uneven_batches: UnevenBatches) -> None:
        self.averages = Averages()
        self.uneven_batches: UnevenBatches = check_uneven_batches(uneven_batches)
        self._training: EvenTraining | None = None  # both: in a run of several ranks
        self._evaluation: UnevenEvaluation | None = None

    def __reduce__(self) -> Any:
        """A copy, of a Trainer for instance, accompanies no run yet."""
        return type(self), (self.uneven_batches,)

    def meet(self, trainer: Trainer, module: LightningModule) -> None:
        """The module of a run is about to be sharded.

        Raises:
            ConfigurationError: A callback cannot do its work on a sharded module.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_callbacks(trainer)
        self.averages.meet_shards(module)

    def join(self, trainer: Trainer, module: LightningModule, runtime: Runtime) -> Callable[[], None] | None:
        """The module has been sharded; a collective of all ranks.

        Returns:
            What loads into it and its averages what callbacks had to wait with; None if there is nothing.
        """
        if runtime.mesh.world.size > 1:
            self._training = EvenTraining(runtime.mesh, self.uneven_batches)
            self._evaluation = UnevenEvaluation(runtime.mesh, runtime.visits)
        complete_summaries(trainer)
        return self.averages.shard(trainer, module, runtime.mesh)

    def meet_loaders(self, trainer: Trainer) -> bool:
        """Training loaders are there before training starts, for who has asked how many steps there are going to be.

        Returns:
            Whether the answer was wrong: ranks have different numbers of batches.
        """
        return self._training is not None and self._training.align(trainer)

    def begin_training(self, trainer: Trainer) -> None:
        """Training starts."""
        if self._training is not None:
            self._training.begin(trainer)

    def begin_batch(self, trainer: Trainer) -> None:
        """A batch is about to be trained on."""
        if self._training is not None:
            self._training.begin_batch(trainer)

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Validation, test or prediction starts."""
        self.averages.sync_buffers()
        if self._evaluation is not None:
            self._evaluation.begin(trainer)

    def end_evaluation(self) -> None:
        """It ends."""
        if self._evaluation is not None:
            self._evaluation.end()

    def weigh(self, loss: torch.Tensor) -> None:
        """Let a loss count as it does in training."""
        if self._training is not None:
            self._training.weigh(loss)

    def leave(self, trainer: Trainer, module: LightningModule) -> None:
        """The run is over, or has failed."""
        self.end_evaluation()
        self._training = self._evaluation = None
        restore_summaries(trainer)
        self.averages.forget(module)


def _refuse_callbacks(trainer: Trainer) -> None:
    """Look through the callbacks of a training that is about to begin.

    Raises:
        ConfigurationError: One of them would fail in the middle of training, or do something else than it says.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} cannot be used with ShardedDP: ModelPruning replaces parameters while they "
                f"are sharded, and finds the smallest of whole tensors. Prune with torch.nn.utils.prune before "
                f"trainer.fit(), whose masks then hold in training, or train with strategy='ddp'"
            )
