"""Guards of a run against signals that end it and one rank's errors that others would wait for."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from shardeddp.comm import all_gather_bytes
from shardeddp.comm.store import PATIENCE_S, StoreBarrier
from shardeddp.lightning.api import (
    LightningModule,
    SilentCallback,
    Trainer,
    TrainerStatus,
    callbacks_of,
)
from shardeddp.lightning.preemption import Preemption
from shardeddp.lightning.run_group import RunGroup

log = logging.getLogger(__name__)


class Guards:
    """Handling of preemption, single-rank failures and broken transfers, one run at a time."""

    def __init__(self, group: RunGroup) -> None:
        self._group = group
        self._preemption = Preemption()
        self._interruption: _Interruption | None = None  # kept over runs
        self._foremost: _FirstCallback | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the state of a run from copies and pickles."""
        return {**vars(self), "_interruption": None, "_foremost": None}

    def begin_run(self, trainer: Trainer, on_train_start: Callable[[], None]) -> None:
        """Guard a run, before Lightning registers signal handlers.

        Calls ``on_train_start`` when training starts.
        """
        if self._interruption is None:
            mesh = self._group.mesh
            self._interruption = _Interruption(
                StoreBarrier(mesh.rank, mesh.topology.world_size), mesh.rank
            )
        self._preemption.attach(trainer)
        self._remove_foremost(trainer)  # left by a run that failed in setup
        self._foremost = _FirstCallback(on_train_start, self._group.explain_transfer)
        callbacks_of(trainer).insert(0, self._foremost)

    def begin_training(self, trainer: Trainer, node: int, local_rank: int) -> None:
        """Start the agreement on signals after each batch; a collective of all ranks."""
        control = self._group.mesh.control
        answers = all_gather_bytes(json.dumps([node, local_rank, os.getpid()]).encode(), control)
        # First rank of this node, if it is the parent process of this rank.
        first = [node, 0, os.getppid()]
        self._preemption.begin(
            trainer, control, first[2] if first in map(json.loads, answers) else None
        )

    def is_single_rank_failure(self, trainer: Trainer | None) -> bool:
        """True if only some ranks have an exception, so that no collective may run."""
        return (
            self._interruption is not None
            and trainer is not None
            and self._interruption.is_of_single_rank(trainer)
        )

    def may_end(self, trainer: Trainer | None) -> bool:
        """True if the process may exit right after the current save."""
        running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        return self._preemption.requeues or not running

    def end_run(self, trainer: Trainer | None) -> None:
        """Drop the state of a run that has ended or failed."""
        self._preemption.detach()
        self._remove_foremost(trainer)

    def _remove_foremost(self, trainer: Trainer | None) -> None:
        callbacks = [] if trainer is None else callbacks_of(trainer)
        # Tuner callbacks run a Trainer inside its own run, and remove callbacks meanwhile.
        if self._foremost in callbacks:
            callbacks.remove(self._foremost)
        self._foremost = None


class _Interruption:
    """Check that all ranks have an exception, so that callbacks do not wait for ranks without one.

    Lightning marks a run as interrupted before it calls its callbacks. So a rank can run a store
    barrier before it enters a collective. There is one barrier per interruption.
    """

    def __init__(self, barrier: StoreBarrier, rank: int) -> None:
        self._barrier = barrier
        self._rank = rank
        self._alone: bool | None = None  # None: not interrupted, or not checked yet

    def is_of_single_rank(self, trainer: Trainer) -> bool:
        """Return True if only some ranks have an exception, so that this one must not wait for all.

        The first call waits up to ``PATIENCE_S`` seconds for the others.
        """
        if trainer.state.status != TrainerStatus.INTERRUPTED:
            self._alone = None
            return False
        if self._alone is None:
            place = (
                f"batch {trainer.fit_loop.epoch_loop.total_batch_idx}, step {trainer.global_step}"
            )
            self._alone = not self._barrier.wait_for_all(place)
            if self._alone:
                log.error(
                    f"rank {self._rank}: not all ranks have come to {place} with an exception "
                    f"within {PATIENCE_S:g} s, so nothing is saved on exception: that needs every "
                    f"rank. The newest checkpoint is the one that was saved before; the error "
                    f"itself follows"
                )
        return self._alone


class _FirstCallback(SilentCallback):
    """First callback of a run, which calls functions on events."""

    def __init__(
        self, on_train_start: Callable[[], None], on_exception: Callable[[BaseException], None]
    ) -> None:
        super().__init__()
        self._on_train_start, self._on_exception = on_train_start, on_exception

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call the function for the start of training."""
        self._on_train_start()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Call the function for exceptions."""
        self._on_exception(exception)
