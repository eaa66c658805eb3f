"""Muster: find out without a collective whether all ranks have come to one point, so that nobody enters one alone."""

import json
import time

from shardeddp.comm.notes import ANSWER_S, LostStoreError, Notes, SilentStoreError

PATIENCE_S = 5.0
"""How long a rank waits for the others."""

_BARRIER_POLL_S = 0.05
_ALL, _SOME = "all", "some"


class Muster:
    """Names in the store of the process group; whatever is decided first holds for all ranks.

    Args:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._calls = 0
        self._notes = Notes("muster", rank)

    def all_here(self, place: str, patience_s: float = PATIENCE_S) -> bool:
        """Whether every rank calls this within the time, from one place; the answer is the same on all that do.

        A rank that comes later, or finds the store gone, gets False; one that finds it silent asks on, since others may
        have had their answer.

        Args:
            place: Where this rank is; ranks in different places are not together.
            patience_s: How long to wait for the others.
        """
        self._calls += 1
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._decide(json.dumps(place), deadline) == _ALL
            except SilentStoreError:
                if time.monotonic() > deadline + ANSWER_S:
                    return False
                time.sleep(_BARRIER_POLL_S)
            except LostStoreError:
                return False

    def _decide(self, place: str, deadline: float) -> str:
        """What is decided; it may be asked again, which changes nothing."""
        decision, here = f"{self._calls}/decision", f"{self._calls}/here/{{}}".format
        if self._notes.claim(f"{self._calls}/place", place) != place:
            return self._notes.claim(decision, _SOME)
        self._notes.write(here(self._rank), "1")
        if self._notes.has([here(rank) for rank in range(self._world_size)]):
            return self._notes.claim(decision, _ALL)
        while not self._notes.has([decision]) and time.monotonic() < deadline:
            time.sleep(_BARRIER_POLL_S)
        return self._notes.claim(decision, _SOME)
