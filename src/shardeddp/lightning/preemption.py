"""Preemption: a signal sets a flag; at the end of a batch all ranks agree, save together, and end.

SIGTERM ends a run with exit code 143, and so does SIGUSR1 where SLURM does not use it. SLURM's
requeue signal saves and requeues the job instead, and training goes on until the SIGTERM that
follows (docs/cluster.md). One signal to one rank is enough, more change nothing: who cannot wait
sends SIGKILL.

A batch whose gradients are still to be accumulated, and the last of an epoch, before validation,
are not the right moment: a run that is saved there does not resume exactly. The end comes with the
next batch or the end of the epoch.
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
"""Exit code expected of a process that SIGTERM has ended."""

FILE_NAME = "last-preempted.ckpt"
LINGER_S = 60.0
"""How long a rank that was started by another one waits for that one to end first."""

_NOTHING, _REQUEUE, _END = 0, 1, 2  # the highest that any rank has seen decides


class Preemption:
    """Answers to signals during one run of a Trainer at a time."""

    def __init__(self) -> None:
        self._seen = _NOTHING
        self._requeued = False
        self.requeues = False
        """Whether the job is given back as soon as the save that is asked for now has returned."""

        self._owner = 0  # the process whose signals count: workers of loaders inherit handlers
        self._trainer: Trainer | None = None
        self._boundary: _Boundary | None = None
        self._is_alone = False

    def __reduce__(self) -> Any:
        """A copy, of a Trainer for instance, is at work in no run."""
        return type(self), ()

    def attach(self, trainer: Trainer) -> None:
        """Replace Lightning's handlers, which it registers after this, beside those of the user.

        Lightning's communicate, wherever the signal finds them; and it broadcasts before each batch
        whether a signal has come, which is not needed any more.
        """
        self._trainer, self._owner = trainer, os.getpid()
        self._seen, self._requeued = _NOTHING, False
        private.replace_signal_handlers(trainer, self._on_end, self._on_requeue)

    def begin(self, trainer: Trainer, group: HostGroup, launcher: int | None) -> None:
        """Ask all ranks from now on after each batch; one that is alone, once it has a signal.

        Args:
            trainer: Of the run.
            group: The host group of all ranks.
            launcher: The process that has started this one as a rank beside itself; None: something
                else has.
        """
        self._is_alone = group.size == 1
        boundary = _Boundary(AsyncMaximum(group), self._answer, lambda: self._seen)
        if not self._is_alone:
            callbacks_of(trainer).append(boundary)
        self._boundary = boundary
        if self._seen:
            self._look()
        if launcher is not None:
            self._boundary.launcher = launcher
        if not _requeues(trainer) and not _is_caught(signal.SIGUSR1):
            private.register_signal(trainer, signal.SIGUSR1, self._on_end)

    def detach(self) -> None:
        """Leave a run that is over; Lightning restores the handlers that were there before."""
        if self._trainer is None:
            return
        trainer, boundary = self._trainer, self._boundary
        self._trainer, self._boundary = None, None  # a signal adds nothing from here on
        callbacks = callbacks_of(trainer)
        # Tuner callbacks run a Trainer inside of its run, and remove callbacks meanwhile.
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
            # Nothing would be saved, so nobody has to be asked; ranks that this one has started end
            # with it.
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
        """Let a rank that is alone look at the ends of batches, from its first signal on."""
        trainer, boundary = self._trainer, self._boundary
        if self._is_alone and trainer is not None and boundary is not None:
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
        # Not before: Lightning ends the run by itself where it is set, on one rank alone.
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
            # The process that has started this one kills its job when a rank is gone before it has
            # ended itself.
            atexit.register(_outlive, launcher)
        raise SIGTERMException(EXIT_CODE)


class _Boundary(SilentCallback, Checkpoint):
    """Ends of batches and epochs, after the hooks of other callbacks.

    The answer to a question asked at one end is read at the next, so no rank waits for it.
    """

    def __init__(
        self, signals: AsyncMaximum, answer: Callable[[Trainer, int], None], seen: Callable[[], int]
    ) -> None:
        super().__init__()
        self.launcher: int | None = None
        self._signals, self._answer, self._seen = signals, answer, seen
        self._agreed = _NOTHING

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Answer, where a run can resume from; micro-batches before that ask nothing."""
        # By number: ranks may have different numbers of batches, and so different last ones.
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._ask(trainer, _is_complete)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answer."""
        self._ask(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answer for the last time: nothing is on its way after that."""
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
    """Whether the step of a batch is complete, and the epoch is not."""
    loop = trainer.fit_loop
    return not private.accumulates(loop) and not loop.epoch_loop.batch_progress.is_last_batch


def _save(trainer: Trainer) -> str:
    """Save where ``ckpt_path="last"`` looks; all ranks call it.

    As the ``last`` of a ``ModelCheckpoint(save_last=True)``; by callbacks that save on exceptions;
    else beside the checkpoints of the first ``ModelCheckpoint``, or in ``default_root_dir``, also
    with ``enable_checkpointing=False``: what a signal ends should not be lost.
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
    """Whether somebody handles a signal, also in C (faulthandler), where Python does not see it."""
    if signal.getsignal(signum) not in (None, signal.SIG_DFL):
        return True
    try:
        status = Path("/proc/self/status").read_text()
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
