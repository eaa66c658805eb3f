"""Ranks with different numbers of batches to evaluate: each goes through its own, and then takes part in the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from shardeddp.comm import Mesh, exchange
from shardeddp.lightning_api import Trainer, has_iterable_dataset, sized_len
from shardeddp.sharding.visits import Visits

_AT_END = ("_store_dataloader_outputs", "_on_predict_epoch_end")
"""What loops do when they are through with a loader, or with all: before any hook that says that metrics are going to
be reduced, or that predictions are there."""


class UnevenEvaluation:
    """Lets a rank that has no batch left take part in what others gather, in one run of a Trainer.

    Args:
        mesh: All ranks.
        visits: Of the model's units.
    """

    def __init__(self, mesh: Mesh, visits: Visits) -> None:
        self._mesh, self._visits = mesh, visits
        self._waiting: list[tuple[Any, str]] = []  # loops, and what they do only when all ranks have come to it

    def begin(self, trainer: Trainer) -> None:
        """Let each rank have as many batches as it has, if their numbers differ, or are not known."""
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        if loop._combined_loader is None or not self._visits.gathers:
            return
        lengths = [*_lengths(loop)]
        texts = exchange(json.dumps(lengths).encode(), self._mesh.control)
        if len(set(texts)) == 1 and None not in lengths:
            return
        self._visits.open()
        for name in _AT_END:
            then = getattr(type(loop), name, None)
            if then is not None:
                vars(loop)[name] = partial(self._wait, partial(then, loop))
                self._waiting.append((loop, name))

    def end(self) -> None:
        """The evaluation is over, or has failed."""
        self._visits.close()
        for loop, name in self._waiting:
            vars(loop).pop(name, None)
        self._waiting = []

    def _wait(self, then: Callable[[], Any]) -> Any:
        self._visits.wait()
        return then()


def _lengths(loop: Any) -> Iterator[int | None]:
    """Batches of each loader; None where it cannot tell, or is made of what it iterates over."""
    for loader, limit in zip(loop._combined_loader.flattened, loop.max_batches, strict=True):
        length = sized_len(loader)
        yield None if length is None or has_iterable_dataset(loader) else int(min(length, limit))
