"""Muster: find out without a collective whether all ranks have come to one point, so that nobody enters one alone."""

import json
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE_S = 5.0
"""How long a rank waits for the others."""

_POLL = timedelta(milliseconds=50)
_TOGETHER, _APART = "together", "apart"


class Muster:
    """A roll call in the store of the process group; whatever is decided first holds for all ranks.

    Args:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._calls = 0
        store = dist.PrefixStore("shardeddp/muster", distributed_c10d._get_default_store())
        # All ranks make the same ones in the same order; each has names of its own in the store, which outlives them.
        self._store = dist.PrefixStore(str(store.add(f"made/{rank}", 1)), store)

    def all_here(self, place: str, patience_s: float = PATIENCE_S) -> bool:
        """Whether every rank calls this within the time, from one place; the answer is the same on all that do.

        A rank that comes later, or finds the store gone, gets False.

        Args:
            place: Where this rank is; ranks in different places are not together.
            patience_s: How long to wait for the others.
        """
        self._calls += 1
        store = dist.PrefixStore(str(self._calls), self._store)
        try:
            store.set(f"place/{self._rank}", json.dumps(place))
            proposal = _TOGETHER if self._everybody(store, json.dumps(place), patience_s) else _APART
            return store.compare_set("decision", "", proposal).decode() == _TOGETHER
        except (RuntimeError, ValueError):
            return False  # the store went with the rank that hosts it

    def _everybody(self, store: dist.Store, place: str, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        keys = [f"place/{rank}" for rank in range(self._world_size)]
        while not store.check(keys):
            if store.check(["decision"]) or time.monotonic() > deadline:
                return False
            time.sleep(_POLL.total_seconds())
        return all(store.get(key).decode() == place for key in keys)
