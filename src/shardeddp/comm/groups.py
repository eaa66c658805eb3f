"""Groups: torch's process groups by what they are for and who is in them; one run of a process uses them after another.

Torch keeps a group, its threads and its connections until somebody destroys it, and destroying one needs all of its
ranks to be done with it. So a mesh gives its groups back when its run has ended well, and the next mesh that asks for
the same ones is given those. What a model of an earlier run is asked for still travels in them: all ranks ask in one
order, and wait.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from shardeddp.comm.notes import Notes

_Key = tuple[str, tuple[tuple[int, ...], ...], timedelta, str | None]

_RETURNED: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""By the default process group, the groups whose runs have ended well on this rank."""


class Groups:
    """The process groups of one mesh; making them is a collective of all ranks.

    Args:
        rank: This rank.
        timeout: How long to wait for ranks that have not come to it yet.
    """

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self._rank = rank
        self._own: dict[_Key, dist.ProcessGroup] = {}
        self._returned = _RETURNED.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
        if dist.get_world_size() > 1 and dist.get_backend() != "fake" and not self._all_have_the_same(timeout):
            self._returned.clear()

    def get(
        self, purpose: str, ranks: Sequence[Sequence[int]], timeout: timedelta, backend: str | None = None
    ) -> dist.ProcessGroup:
        """The group that this rank is in.

        Args:
            purpose: What it is for; groups of one purpose may not be in use twice at a time.
            ranks: Of all groups of the kind; each rank is in one.
            timeout: After how long a collective in it gives up.
            backend: None: that of the default process group.
        """
        key = (purpose, tuple(tuple(each) for each in ranks), timeout, backend)
        if key not in self._own:
            self._own[key] = self._returned.pop(key, None) or self._make(key)
        return self._own[key]

    def give_back(self) -> None:
        """Let later meshes of this process use them, too: nothing has failed in them, and nothing is under way."""
        self._returned.update(self._own)

    def names(self) -> set[str]:
        """What torch calls them."""
        return {group.group_name for group in self._own.values()}

    def _make(self, key: _Key) -> dist.ProcessGroup:
        _, ranks, timeout, backend = key
        # Torch wants every rank to make every group; what is no group of this rank's stands for those of others.
        made = [dist.new_group(list(each), timeout=timeout, backend=backend) for each in ranks]
        own = next(group for group, each in zip(made, ranks, strict=True) if self._rank in each)
        return cast(dist.ProcessGroup, own)

    def _all_have_the_same(self, timeout: timedelta) -> bool:
        """Whether the same groups have been returned on all ranks; after a failure they may not."""
        notes = Notes("groups", self._rank)
        mine = str(zlib.crc32(repr(sorted(map(repr, self._returned))).encode()))
        if notes.claim("returned", mine) != mine:
            notes.count("others")
        if notes.count("arrived") == dist.get_world_size():
            notes.write("verdict", "differ" if notes.count("others", 0) else "same")
        return notes.wait_for(["verdict"], timeout.total_seconds()).get("verdict") == "same"
