"""Interruption: after an exception, whether all ranks are in it together and may save, or this one is alone."""

import logging

from shardeddp.comm.muster import PATIENCE_S, Muster
from shardeddp.lightning_api import Trainer, TrainerStatus

log = logging.getLogger(__name__)


class Interruption:
    """Keeps callbacks that act on an exception from waiting for ranks that have none.

    Lightning marks a run as interrupted before it calls them, so that a rank can ask, before it enters a collective,
    whether the others have come there as well. It asks once per interruption.

    Args:
        muster: Of all ranks.
        rank: This rank.
    """

    def __init__(self, muster: Muster, rank: int) -> None:
        self._muster = muster
        self._rank = rank
        self._alone: bool | None = None  # None: not interrupted, or nobody has asked yet

    def alone(self, trainer: Trainer) -> bool:
        """Whether this rank handles an exception that not all ranks have, so that it must not wait for them.

        Waits a few seconds for the others the first time.

        Args:
            trainer: Of the run.
        """
        if trainer.state.status != TrainerStatus.INTERRUPTED:
            self._alone = None
            return False
        if self._alone is None:
            place = f"batch {trainer.fit_loop.epoch_loop.total_batch_idx}, step {trainer.global_step}"
            self._alone = not self._muster.all_here(place)
            if self._alone:
                log.error(
                    f"rank {self._rank}: not all ranks have come to {place} with an exception within {PATIENCE_S:g} s, "
                    f"so nothing is saved on exception: that needs every rank. The newest checkpoint is the one that "
                    f"was saved before; the error itself follows"
                )
        return self._alone
