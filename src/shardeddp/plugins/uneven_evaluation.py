"""Ranks with different numbers of batches to evaluate: each goes through its own, and then takes part in the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from shardeddp.comm import Mesh, exchange
from shardeddp.lightning_api import Trainer, TrainerFn, has_iterable_dataset, private, sized_len
from shardeddp.sharding.visits import Visits


class UnevenEvaluation:
    """Lets a rank that has no batch left take part in what others gather, in one run of a Trainer.

    Args:
        mesh: All ranks.
        visits: Of the model's units.
    """

    def __init__(self, mesh: Mesh, visits: Visits) -> None:
        self._mesh, self._visits = mesh, visits
        self._restore: Callable[[], None] | None = None  # the ends of the loop, which wait for all ranks

    def begin(self, trainer: Trainer) -> None:
        """Let each rank have as many batches as it has, if their numbers differ, or are not known."""
        loop = _loop_of(trainer)
        if private.combined_loader(loop) is None or not self._visits.gathers:
            return
        lengths = [*_lengths(loop)]
        texts = exchange(json.dumps(lengths).encode(), self._mesh.control)
        if len(set(texts)) == 1 and None not in lengths:
            return
        self._visits.open()
        self._restore = private.delay_ends(loop, self._wait)

    def end(self) -> None:
        """The evaluation is over, or has failed."""
        self._visits.close()
        if self._restore is not None:
            self._restore()
        self._restore = None

    def _wait(self, then: Callable[[], Any]) -> Any:
        self._visits.wait()
        return then()


def _loop_of(trainer: Trainer) -> Any:
    """The loop that evaluates now."""
    if trainer.predicting:
        return trainer.predict_loop
    if trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    return trainer.test_loop if trainer.testing else trainer.validate_loop


def _lengths(loop: Any) -> Iterator[int | None]:
    """Batches of each loader; None where it cannot tell, or is made of what it iterates over."""
    for loader, limit in zip(private.combined_loader(loop).flattened, loop.max_batches, strict=True):
        length = sized_len(loader)
        yield None if length is None or has_iterable_dataset(loader) else int(min(length, limit))
