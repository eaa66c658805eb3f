"""Handlers of signals do no more than set a flag, leave those of others in place, and go with the run."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from shardeddp import ShardedDP
from shardeddp.lightning.preemption import EXIT_CODE, FILE_NAME, Preemption
from support.host_groups import all_ranks
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from world import on_ranks


def quiet_trainer() -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


@pytest.fixture
def trainer() -> Trainer:
    """A Trainer that is about to fit."""
    made = quiet_trainer()
    made.state.fn = TrainerFn.FITTING
    return made


def test_a_signal_while_fitting_interrupts_nothing_and_handlers_go_with_the_run(
    trainer: Trainer,
) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: heard.append(signum))
    try:
        preemption = Preemption()
        preemption.attach(trainer)
        trainer._signal_connector.register_signal_handlers()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
        assert not trainer.received_sigterm
        preemption.detach()
        trainer._signal_connector.teardown()
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(heard) == 3
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("stage", [TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING])
def test_a_signal_while_nothing_is_trained_ends_the_process_at_once(
    trainer: Trainer, stage: TrainerFn
) -> None:
    preemption = Preemption()
    preemption.attach(trainer)
    trainer.state.fn = stage
    trainer._signal_connector.register_signal_handlers()
    try:
        with pytest.raises(SIGTERMException) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == EXIT_CODE == 143
        assert trainer.received_sigterm
    finally:
        trainer._signal_connector.teardown()


def say_and_wait(ready: Event) -> None:
    ready.set()
    for _ in range(600):
        time.sleep(0.1)  # a signal just before a sleep is answered behind it


def test_a_worker_that_has_inherited_the_handler_ends_as_if_it_had_not(trainer: Trainer) -> None:
    preemption = Preemption()
    preemption.attach(trainer)
    trainer._signal_connector.register_signal_handlers()
    try:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        worker = context.Process(target=say_and_wait, args=(ready,), daemon=True)
        worker.start()
        assert ready.wait(10)
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == -signal.SIGTERM
    finally:
        worker.kill()
        trainer._signal_connector.teardown()


@on_ranks(1)
def test_sigusr1_is_left_to_whom_it_belongs() -> None:
    # faulthandler handles it in C, which Python does not know of; a Trainer that ran here before has taken that away.
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=Path(os.devnull).open("w"))  # noqa: SIM115 - lives as long as the rank
    made = quiet_trainer()
    for owned in (True, False):
        if not owned:
            faulthandler.unregister(signal.SIGUSR1)
        preemption = Preemption()
        preemption.attach(made)
        made._signal_connector.register_signal_handlers()
        preemption.begin(made, all_ranks(), None)
        assert (signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL) is owned
        preemption.detach()
        made._signal_connector.teardown()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


class SignalsItself(Callback):
    """Sends its process a signal within a batch."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.callbacks: set[int] = set()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.callbacks.add(len(trainer.callbacks))
        if batch_idx == self._batch:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("batch", [0, 1, 5])
@on_ranks(1)
def test_a_rank_that_is_alone_asks_nobody_and_saves_all_the_same(batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sends = SignalsItself(batch)
        trainer = make_trainer(
            ShardedDP(), max_epochs=1, callbacks=[sends], default_root_dir=folder
        )
        with pytest.raises(SIGTERMException):
            trainer.fit(TinyGpt(), token_loader(24))
        # One more from the signal on, which looks at the ends of batches.
        assert len(sends.callbacks) <= 2
        assert batch < trainer.global_step <= batch + 3
        assert Path(folder, FILE_NAME).exists()
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        again = make_trainer(ShardedDP(), max_epochs=1, default_root_dir=folder)
        again.fit(TinyGpt(), token_loader(24), ckpt_path="last")
        assert again.ckpt_path == str(Path(folder, FILE_NAME))
        assert again.global_step == 6


def boundaries(made: Trainer) -> int:
    return sum(type(each).__module__ == Preemption.__module__ for each in made.callbacks)


@contextmanager
def attached(made: Trainer) -> Iterator[Preemption]:
    """Preemption in a Trainer that fits; signals of this process reach it."""
    preemption = Preemption()
    preemption.attach(made)
    made._signal_connector.register_signal_handlers()
    made.state.fn = TrainerFn.FITTING
    try:
        yield preemption
    finally:
        preemption.detach()
        made._signal_connector.teardown()


def begun(made: Trainer, times: int, signals: bool) -> int:
    """Boundaries after a signal in a run in which others have begun, as those of tuners."""
    outer = made.callbacks
    with attached(made) as preemption:
        for nested in range(times):
            made.callbacks = [*outer] if nested else outer
            preemption.begin(made, all_ranks(), None)
        made.callbacks = outer
        for _ in range(2 * signals):
            signal.raise_signal(signal.SIGTERM)
        return boundaries(made)


@pytest.mark.parametrize("times", [1, 2])
@on_ranks(2)
def test_a_signal_adds_nothing_where_all_ranks_ask(times: int) -> None:
    assert begun(quiet_trainer(), times, signals=True) == 1


@on_ranks(1)
def test_a_rank_that_is_alone_looks_once_from_the_first_signal_on() -> None:
    assert begun(quiet_trainer(), 1, signals=False) == 0
    assert begun(quiet_trainer(), 1, signals=True) == 1
    made = quiet_trainer()
    with attached(made) as preemption:
        signal.raise_signal(signal.SIGTERM)  # before there is anything to look with
        preemption.begin(made, all_ranks(), None)
        assert boundaries(made) == 1
    assert boundaries(made) == 0


@on_ranks(1)
def test_what_a_signal_saved_is_not_the_last_of_a_run_whose_callbacks_keep_checkpoints() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = make_trainer(
            ShardedDP(), max_epochs=1, callbacks=[SignalsItself(1)], default_root_dir=folder
        )
        with pytest.raises(SIGTERMException):
            ends.fit(TinyGpt(), token_loader(24))
        assert Path(folder, FILE_NAME).exists()
        warnings.filterwarnings("ignore", ".*no last checkpoint available")
        other = make_trainer(
            ShardedDP(), max_epochs=1, default_root_dir=folder, enable_checkpointing=True
        )
        other.fit(TinyGpt(), token_loader(24), ckpt_path="last")
        assert not other.ckpt_path
