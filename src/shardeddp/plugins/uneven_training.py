"""Ranks with different numbers of batches to train on: an error, an end of the epoch for all, or batches repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
from typing_extensions import override

from shardeddp.comm import Mesh, agree_on_any, exchange
from shardeddp.errors import ConfigurationError
from shardeddp.lightning_api import (
    Callback,
    LightningModule,
    PrefetchDataFetcher,
    Trainer,
    callbacks_of,
    has_iterable_dataset,
    reloads_dataloaders,
    sized_len,
)

UnevenBatches = Literal["error", "min", "join"]
"""What training does when a rank has no batch left and others have: raise on all ranks, or end the epoch on all, or go
on with that rank's last batch at no weight."""

UNKNOWN = -1
"""Number of batches of a loader that cannot tell."""


def check_uneven_batches(value: str) -> UnevenBatches:
    """The option as it is.

    Raises:
        ConfigurationError: There is no such value.
    """
    if value not in get_args(UnevenBatches):
        raise ConfigurationError(
            f"uneven_batches={value!r}: expected one of {', '.join(get_args(UnevenBatches))}; 'min' ends each epoch "
            f"with the first rank that has no batch left, 'join' with the last"
        )
    return cast(UnevenBatches, value)


class EvenTraining(Callback):
    """Keeps ranks together whose training loaders have different numbers of batches, in one run of a Trainer.

    Numbers that are known are compared when training starts. Where a loader does not know its own, ranks tell each
    other before each batch whether it is their last, and wait for the answer: what Lightning does next depends on it.

    A rank that joins others with no batch of its own goes through all that a batch does, with the last that it had:
    whatever the module communicates meets what the others communicate. Its loss has no weight (:meth:`weigh`).

    Args:
        mesh: All ranks.
        choice: What to do.
    """

    def __init__(self, mesh: Mesh, choice: UnevenBatches) -> None:
        super().__init__()
        self._mesh, self._choice = mesh, choice
        self._asks = False  # before each batch, as lengths are not known
        self._repeats = False  # the batch that is trained on, which has been trained on before
        self._source: Repeating | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare what is known."""
        self._compare(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare again what loaders that were made anew know."""
        if reloads_dataloaders(trainer):
            self._compare(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Find out whether this batch is some rank's last."""
        self._repeats = self._source is not None and self._source.repeats
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if not self._asks:
            over = progress.current.ready >= trainer.num_training_batches  # also where the loader has more
            over |= progress.is_last_batch and self._choice != "join"
        elif agree_on_any([progress.is_last_batch], self._mesh.control)[0]:
            over = self._is_over(progress.is_last_batch, progress.current.ready)
        else:
            return
        if progress.is_last_batch and not over and self._source is not None:
            self._source.repeat()
        progress.is_last_batch = over

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss as it counts: with gradients of zero where the batch was trained on before."""
        if self._repeats and loss.requires_grad:
            loss.register_hook(torch.zeros_like)
        return loss

    def attach(self, trainer: Trainer) -> None:
        """Hear of everything before other callbacks do."""
        callbacks_of(trainer).insert(0, self)

    def detach(self, trainer: Trainer) -> None:
        """Leave a run that is over, or has failed."""
        self._repeats, self._source = False, None
        if self in callbacks_of(trainer):
            callbacks_of(trainer).remove(self)

    def _compare(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop
        loader = loop._combined_loader
        mine = UNKNOWN if loader is None else number_of_batches(loader, loader.flattened)
        counts = [json.loads(text) for text in exchange(json.dumps(mine).encode(), self._mesh.control)]
        self._asks = UNKNOWN in counts
        if self._choice == "join":
            self._source = loop._data_fetcher = self._repeating(loop._data_fetcher)
        if self._asks or len(set(counts)) == 1 or _ends_before(trainer, min(counts)):
            return
        self._refuse([str(count) for count in counts])
        loop.max_batches = max(counts) if self._choice == "join" else min(counts)
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))

    def _repeating(self, fetcher: object) -> Repeating:
        if not isinstance(fetcher, PrefetchDataFetcher):
            raise ConfigurationError(
                "uneven_batches='join' cannot give a batch again to a training_step(self, dataloader_iter), which "
                "takes its batches itself: write training_step(self, batch, batch_idx), or use 'min'"
            )
        return Repeating(fetcher, self._mesh.rank)

    def _is_over(self, is_last: bool, ready: int) -> bool:
        """Whether the epoch ends with this batch, which is the last of some ranks."""
        left = [json.loads(text) for text in exchange(json.dumps(is_last).encode(), self._mesh.control)]
        if not all(left):
            self._refuse([f"{ready}" if last else f"more than {ready}" for last in left])
        return all(left) or self._choice != "join"

    def _refuse(self, counts: Sequence[str]) -> None:
        if self._choice != "error":
            return
        listed = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
        raise ConfigurationError(
            f"ranks have different numbers of batches to train on: {listed}. A step takes all ranks, so "
            f"training cannot go on when one has no batch left. Give every rank the same number (a DistributedSampler "
            f"with drop_last=True, or limit_train_batches), or set ShardedDP(uneven_batches='min') to end each epoch "
            f"on all ranks with the first that has none left, or 'join' to end it with the last"
        )


class Repeating(PrefetchDataFetcher):
    """Gives the batches that another fetcher gives, and the last of them again when told so.

    Args:
        fetcher: In whose place it comes, with all that it has fetched.
        rank: This rank.
    """

    def __init__(self, fetcher: PrefetchDataFetcher, rank: int) -> None:
        vars(self).update(vars(fetcher))
        self._rank = rank
        self._last: Any = None
        self._told = False
        self.repeats = False
        """Whether what was given last had been given before."""

    def repeat(self) -> None:
        """Give the last batch once more."""
        self._told = True

    @override
    def __next__(self) -> Any:
        self.repeats, self._told = self._told, False
        if not self.repeats:
            self._last = self._next()
        return self._last

    def _next(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            if self._last is not None:
                raise
            raise RuntimeError(
                f"rank {self._rank} has no batch at all in this epoch, and uneven_batches='join' repeats a rank's last "
                f"one: give every rank one batch at least, or use 'min'"
            ) from None

    @override
    def reset(self) -> None:
        super().reset()
        self._last, self._told = None, False


def number_of_batches(loader: Any, parts: Sequence[Any], limit: int | float = float("inf")) -> int:
    """How many batches a loader gives; what a data set that is iterated over says of itself is not relied on.

    Args:
        loader: The loader.
        parts: The loaders that it is made of.
        limit: Of the Trainer.
    """
    length = sized_len(loader)
    if length is None or any(has_iterable_dataset(part) for part in parts):
        return UNKNOWN
    return int(min(length, limit))


def _ends_before(trainer: Trainer, count: int) -> bool:
    """Whether training ends by its number of steps before any rank has used up a number of batches."""
    steps = trainer.max_steps - trainer.global_step
    return trainer.max_steps >= 0 and steps * trainer.accumulate_grad_batches <= count
