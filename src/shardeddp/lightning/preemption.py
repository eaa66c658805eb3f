"""Preemption: a signal sets a flag; at the end of a batch all ranks agree, save together, and end.

SIGTERM ends a run with exit code 143, and so does SIGUSR1 unless SLURM uses it. SLURM's requeue
signal saves and requeues the job instead, and training continues until the SIGTERM that follows
(docs/cluster.md). One signal to one rank is enough; further ones change nothing. Only SIGKILL ends
a run at once.

A run does not resume exactly from the middle of gradient accumulation, nor from the last batch of
an epoch before validation. There the end is postponed to the next batch or the end of the epoch.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import override

from shardeddp.comm.agreement import AsyncMaximum
from shardeddp.comm.host_group import HostGroup
from shardeddp.lightning import private
from shardeddp.lightning.api import (
    Checkpoint,
    LightningModule,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    SIGTERMException,
    SilentCallback,
    SLURMEnvironment,
    Trainer,
    TrainerFn,
    callbacks_of,
    cluster_environment_of,
    rank_zero_info,
)

log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""Conventional exit code of a process that SIGTERM has ended."""

FILE_NAME = "last-preempted.ckpt"
LINGER_S = 60.0
"""Maximum seconds that a rank waits for the exit of its parent process, if that is a rank."""

_NOTHING, _REQUEUE, _END = 0, 1, 2  # the maximum over all ranks decides


class Preemption:
    """Signal handling of one run of a Trainer at a time."""

    def __init__(self) -> None:
        self._seen = _NOTHING
        self._requeued = False
        self.requeues = False
        """True if the job is requeued right after the current save."""

        self._owner = 0  # id of the process to act in: loader workers inherit the handlers
        self._trainer: Trainer | None = None
        self._boundary: _Boundary | None = None
        self._is_single_rank = False

    def __reduce__(self) -> Any:
        """Copy without the state of a run, for example with a Trainer."""
        return type(self), ()

    def attach(self, trainer: Trainer) -> None:
        """Replace the handlers that Lightning registers after this call; keep those of the user.

        Lightning's handlers run collectives at any point of the program. Its broadcast of received
        signals before each batch becomes unnecessary and is removed.
        """
        self._trainer, self._owner = trainer, os.getpid()
        self._seen, self._requeued = _NOTHING, False
        private.replace_signal_handlers(trainer, self._on_end, self._on_requeue)

    def begin(self, trainer: Trainer, group: HostGroup, launcher: int | None) -> None:
        """Start the agreement of all ranks after each batch; a single rank waits for a signal.

        Args:
            trainer: Trainer of the run.
            group: Host group of all ranks.
            launcher: Process id of the rank that started this one; None: another launcher did.
        """
        self._is_single_rank = group.size == 1
        boundary = _Boundary(AsyncMaximum(group), self._answer, lambda: self._seen, launcher)
        if not self._is_single_rank:
            callbacks_of(trainer).append(boundary)
        self._boundary = boundary
        if self._seen:
            self._look()

        if not _requeues(trainer) and not _is_caught(signal.SIGUSR1):
            private.register_signal(trainer, signal.SIGUSR1, self._on_end)

    def detach(self) -> None:
        """Drop the state of a run; Lightning restores the previous handlers."""
        if self._trainer is None:
            return
        trainer, boundary = self._trainer, self._boundary
        self._trainer, self._boundary = None, None  # a signal adds nothing from here on
        callbacks = callbacks_of(trainer)
        # Tuner callbacks run a Trainer inside its own run, and remove callbacks meanwhile.
        if boundary in callbacks:
            callbacks.remove(boundary)
        private.restore_broadcast(trainer)

    # -- Signal handlers

    def _on_end(self, signum: int, frame: FrameType | None = None) -> None:
        if os.getpid() != self._owner:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        trainer = self._trainer
        if trainer is None:
            return
        if _requeues(trainer) and not self._requeued:
            log.info(f"Bypassing SIGTERM: {signum}")
            return
        if trainer.state.fn != TrainerFn.FITTING:
            # Nothing is saved, so no agreement is needed; ranks started by this one end with it.
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signum)
            private.note_sigterm(trainer)
            raise SIGTERMException(EXIT_CODE)
        self._see(_END)

    def _on_requeue(self, signum: int, frame: FrameType | None = None) -> None:
        if os.getpid() == self._owner and not self._requeued:
            self._see(_REQUEUE)

    def _see(self, signal_: int) -> None:
        self._seen = max(self._seen, signal_)
        self._look()

    def _look(self) -> None:
        """Add the boundary callback of a single rank, after its first signal."""
        trainer, boundary = self._trainer, self._boundary
        if self._is_single_rank and trainer is not None and boundary is not None:
            callbacks = callbacks_of(trainer)
            if boundary not in callbacks:
                callbacks.append(boundary)

    # -- Decisions of all ranks

    def _answer(self, trainer: Trainer, seen: int) -> None:
        if seen == _REQUEUE:
            if not self._requeued:
                self._seen, self._requeued = _NOTHING, True
                self.requeues = True
                try:
                    private.save_and_requeue(trainer)
                finally:
                    self.requeues = False
            return
        # Not earlier: once it is set, Lightning ends the run, on this rank only.
        private.note_sigterm(trainer)
        if self._requeued:
            rank_zero_info(
                f"The job was given back to SLURM, which ends it now, at step {trainer.global_step}"
            )
            raise SIGTERMException(EXIT_CODE)
        rank_zero_info("A signal asks for the end of this run: saving a checkpoint")
        path = _save(trainer)
        keeps = any(not isinstance(each, _Boundary) for each in trainer.checkpoint_callbacks)
        rank_zero_info(
            f"Preempted at step {trainer.global_step}: {path} holds it"
            + (
                ""
                if keeps
                else ", although no callback keeps checkpoints: delete it if you do not go on"
            )
            + f"; exit code {EXIT_CODE}"
        )
        launcher = self._boundary.launcher if self._boundary is not None else None
        if launcher is not None:
            # The parent rank kills its job if a child rank exits before the parent does.
            atexit.register(_outlive, launcher)
        raise SIGTERMException(EXIT_CODE)


class _Boundary(SilentCallback, Checkpoint):
    """Callback at the ends of batches and epochs, after the hooks of other callbacks.

    The maximum contributed at one end is read at the next, so that no rank waits for it.
    """

    def __init__(
        self,
        signals: AsyncMaximum,
        answer: Callable[[Trainer, int], None],
        seen: Callable[[], int],
        launcher: int | None,
    ) -> None:
        super().__init__()
        self.launcher = launcher
        self._signals, self._answer, self._seen = signals, answer, seen
        self._agreed = _NOTHING

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Agree after a complete optimizer step; other micro-batches are skipped."""
        # By batch index: ranks may have different numbers of batches, and so different last ones.
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._ask(trainer, _is_complete)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree at the end of the epoch."""
        self._ask(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree for the last time; no message is in flight afterwards."""
        self._ask(trainer)
        self._ask(trainer)
        self._signals.result()

    def _ask(self, trainer: Trainer, is_ready: Callable[[Trainer], bool] | None = None) -> None:
        self._agreed = max(self._agreed, self._signals.result())
        if self._agreed and (is_ready is None or is_ready(trainer)):
            agreed, self._agreed = self._agreed, _NOTHING
            self._answer(trainer, agreed)
        self._signals.contribute(self._seen())


def _is_complete(trainer: Trainer) -> bool:
    """True if the optimizer step is complete and the epoch is not."""
    loop = trainer.fit_loop
    return not private.accumulates(loop) and not loop.epoch_loop.batch_progress.is_last_batch


def _save(trainer: Trainer) -> str:
    """Save a checkpoint that ``ckpt_path="last"`` finds, and return its path; all ranks call it.

    It is the ``last`` of a ``ModelCheckpoint(save_last=True)``, or that of a callback that saves on
    exceptions. Else it is in the directory of the first ``ModelCheckpoint`` or in
    ``default_root_dir``, even with ``enable_checkpointing=False``, so that no progress is lost.
    """
    keepers = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    for keeper in keepers:
        if keeper.save_last is True and not keeper.save_weights_only:
            private.save_last_checkpoint(keeper, trainer)
            return keeper.last_model_path
    if any(
        isinstance(callback, OnExceptionCheckpoint) for callback in callbacks_of(trainer)
    ) or any(
        private.saves_on_exception(keeper, trainer) and not keeper.save_weights_only
        for keeper in keepers
    ):
        return "the checkpoint of a callback that saves on exceptions"
    folder = (
        next((keeper.dirpath for keeper in keepers if keeper.dirpath), None)
        or trainer.default_root_dir
    )
    path = os.path.join(folder, FILE_NAME)
    trainer.save_checkpoint(path)
    return path


def _requeues(trainer: Trainer) -> bool:
    environment = cluster_environment_of(trainer)
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def _is_caught(signum: signal.Signals) -> bool:
    """True if a signal has a handler, in Python or in C (faulthandler), which Python cannot see."""
    if signal.getsignal(signum) not in (None, signal.SIG_DFL):
        return True
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return False
    mask = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(mask, 16) >> (signum - 1) & 1)


def _outlive(process: int) -> None:
    deadline = time.monotonic() + LINGER_S
    while os.getppid() == process and time.monotonic() < deadline:
        time.sleep(0.02)
