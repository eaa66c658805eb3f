"""Ranks with different numbers of batches: training stops for all, evaluation goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

from typing_extensions import override

from shardeddp.comm import Mesh, exchange
from shardeddp.comm.vote import Vote
from shardeddp.errors import ConfigurationError
from shardeddp.lightning_api import Callback, EvaluationLoop, LightningModule, Trainer, has_iterable_dataset, sized_len
from shardeddp.sharding.visits import Visits

UnevenBatches = Literal["error", "min"]
"""What training does when a rank has no batch left and others have: raise on all ranks, or end the epoch on all."""

_UNKNOWN = -1  # number of batches of a loader that cannot tell


def check_uneven_batches(value: str) -> UnevenBatches:
    """The option as it is.

    Raises:
        ConfigurationError: There is no such value.
    """
    if value not in get_args(UnevenBatches):
        raise ConfigurationError(
            f"uneven_batches={value!r}: expected one of {', '.join(get_args(UnevenBatches))}; 'min' ends each epoch "
            f"with the first rank that has no batch left"
        )
    return cast(UnevenBatches, value)


class Evenness(Callback):
    """Keeps ranks together whose loaders have different numbers of batches, in one run of a Trainer.

    Numbers that are known are compared when training starts. Where a loader does not know its own, ranks tell each
    other before each batch whether it is their last, and wait for the answer: what Lightning does next depends on it.
    In evaluation a rank that has no batch left goes on to take part in what others gather.

    Args:
        mesh: All ranks.
        visits: Of the model's units.
        choice: What to do in training.
    """

    def __init__(self, mesh: Mesh, visits: Visits, choice: UnevenBatches) -> None:
        super().__init__()
        self._mesh, self._visits, self._choice = mesh, visits, choice
        self._vote: Vote | None = None  # where lengths are not known

    # -- training

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare what is known."""
        self._compare(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare again what loaders that were made anew know."""
        if vars(trainer).get("reload_dataloaders_every_n_epochs"):  # set where a type checker does not look
            self._compare(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Find out whether this batch is some rank's last."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if self._vote is None:
            if progress.current.ready >= trainer.num_training_batches:
                progress.is_last_batch = True  # also where the loader has more
            return
        self._vote.cast(int(progress.is_last_batch))
        if not self._vote.count():
            return
        left = [json.loads(text) for text in exchange(json.dumps(progress.is_last_batch).encode(), self._mesh.control)]
        if not all(left):
            ready = progress.current.ready
            self._refuse([f"{ready}" if last else f"more than {ready}" for last in left])
            progress.is_last_batch = True

    def _compare(self, trainer: Trainer) -> None:
        loader = trainer.fit_loop._combined_loader
        mine = _UNKNOWN if loader is None else _length(loader, loader.flattened)
        counts = [json.loads(text) for text in exchange(json.dumps(mine).encode(), self._mesh.control)]
        self._vote = Vote(self._mesh.control) if _UNKNOWN in counts and len(counts) > 1 else None
        if _UNKNOWN in counts or len(set(counts)) == 1 or _ends_before(trainer, min(counts)):
            return
        self._refuse([str(count) for count in counts])
        trainer.fit_loop.max_batches = min(counts)
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(min(counts) * trainer.val_check_interval))

    def _refuse(self, counts: Sequence[str]) -> None:
        if self._choice == "min":
            return
        listed = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
        raise ConfigurationError(
            f"ranks have different numbers of batches to train on: {listed}. A step takes all ranks, so "
            f"training cannot go on when one has no batch left. Give every rank the same number (a DistributedSampler "
            f"with drop_last=True, or limit_train_batches), or set ShardedDP(uneven_batches='min') to end each epoch "
            f"on all ranks with the first that has none left"
        )

    # -- evaluation

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Let each rank have as many batches as it has, if their numbers differ, or are not known."""
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        if loop._combined_loader is None or not self._visits.gathers:
            return
        loaders = zip(loop._combined_loader.flattened, loop.max_batches, strict=True)
        texts = exchange(
            json.dumps([_length(loader, [loader], limit) for loader, limit in loaders]).encode(), self._mesh.control
        )
        if len(set(texts)) == 1 and _UNKNOWN not in json.loads(texts[0]):
            return
        self._visits.open()
        if isinstance(loop, EvaluationLoop):
            # Where metrics are reduced, once for each loader: before any hook that says that they are going to be.
            vars(loop)["_store_dataloader_outputs"] = partial(
                self._wait, partial(EvaluationLoop._store_dataloader_outputs, loop)
            )

    def _wait(self, then: Callable[[], None]) -> None:
        self._visits.wait()
        then()

    def _end_evaluation(self, trainer: Trainer) -> None:
        self._visits.wait()
        self._visits.close()
        vars(trainer._evaluation_loop).pop("_store_dataloader_outputs", None)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for ranks that have more batches."""
        self._end_evaluation(trainer)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same."""
        self._end_evaluation(trainer)

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same."""
        self._visits.wait()
        self._visits.close()

    # -- a run

    def attach(self, trainer: Trainer) -> None:
        """Hear of everything before other callbacks do."""
        vars(trainer)["callbacks"].insert(0, self)

    def detach(self, trainer: Trainer) -> None:
        """Leave a run that is over, or has failed."""
        self._visits.close()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
            vars(loop).pop("_store_dataloader_outputs", None)
        if self in vars(trainer)["callbacks"]:
            vars(trainer)["callbacks"].remove(self)


def _length(loader: Any, parts: Sequence[Any], limit: int | float = float("inf")) -> int:
    """How many batches a loader gives; what a data set that is iterated over says of itself is not relied on."""
    length = sized_len(loader)
    if length is None or any(has_iterable_dataset(part) for part in parts):
        return _UNKNOWN
    return int(min(length, limit))


def _ends_before(trainer: Trainer, count: int) -> bool:
    """Whether training ends by its number of steps before any rank has used up a number of batches."""
    steps = trainer.max_steps - trainer.global_step
    return trainer.max_steps >= 0 and steps * trainer.accumulate_grad_batches <= count
