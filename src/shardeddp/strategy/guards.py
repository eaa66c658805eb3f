"""Guards of a run: against signals that end it, and against errors of one rank that others would wait for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from shardeddp.comm import exchange
from shardeddp.comm.muster import Muster
from shardeddp.lightning_api import Trainer, TrainerStatus, callbacks_of
from shardeddp.plugins.foremost import Foremost
from shardeddp.plugins.interruption import Interruption
from shardeddp.plugins.preemption import Preemption
from shardeddp.strategy.process_group import ProcessGroup


class Guards:
    """Preemption, single-rank failures, and the causes of broken transfers, in one run of a Trainer at a time.

    Args:
        group: Ranks of the run.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._preemption = Preemption()
        self._interruption: Interruption | None = None  # kept over runs
        self._foremost: Foremost | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or a pickle: it guards no run yet."""
        return {**vars(self), "_interruption": None, "_foremost": None}

    def begin_run(self, trainer: Trainer, on_train_start: Callable[[], None]) -> None:
        """Guard a run, before Lightning registers its handlers of signals; calls back when training starts."""
        if self._interruption is None:
            mesh = self._group.mesh
            self._interruption = Interruption(Muster(mesh.rank, mesh.topology.world_size), mesh.rank)
        self._preemption.attach(trainer)
        self._remove_foremost(trainer)  # of a run whose setup has failed
        self._foremost = Foremost(on_train_start, self._group.explain_transfer)
        callbacks_of(trainer).insert(0, self._foremost)

    def begin_training(self, trainer: Trainer, node: int, local_rank: int) -> None:
        """Let all ranks ask for signals after each batch; a collective of all ranks."""
        control = self._group.mesh.control
        answers = exchange(json.dumps([node, local_rank, os.getpid()]).encode(), control)
        first = [node, 0, os.getppid()]  # the first rank of this machine, if that one has started this one
        self._preemption.begin(trainer, control, first[2] if first in map(json.loads, answers) else None)

    def is_alone(self, trainer: Trainer | None) -> bool:
        """Whether this rank handles an exception that others do not have, so that nothing may wait for them."""
        return self._interruption is not None and trainer is not None and self._interruption.alone(trainer)

    def may_end(self, trainer: Trainer | None) -> bool:
        """Whether the process may end as soon as the save that is asked for now has returned."""
        running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        return self._preemption.requeues or not running

    def end_run(self, trainer: Trainer | None) -> None:
        """Leave a run that is over, or has failed."""
        self._preemption.detach()
        self._remove_foremost(trainer)

    def _remove_foremost(self, trainer: Trainer | None) -> None:
        callbacks = [] if trainer is None else callbacks_of(trainer)
        if self._foremost in callbacks:  # finders, which run a Trainer inside of its run, take callbacks away meanwhile
            callbacks.remove(self._foremost)
        self._foremost = None
