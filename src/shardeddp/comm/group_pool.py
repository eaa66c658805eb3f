"""Group pool: process groups of torch, which later runs of a process use again.

Torch keeps a group, its threads and its connections until the group is destroyed, which needs all
of its ranks to be done with it. So a mesh gives its groups back when its run has ended, and the
next mesh that asks for equal ones gets these. Requests to a model of an earlier run still travel in
them: all ranks ask in one order, and wait. A run that was refused gives back the groups in which no
transfer has broken; the next mesh uses them if all ranks have begun the same operations in each.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from shardeddp.comm.host_group import Channel, HostGroup, grid_of
from shardeddp.comm.store import StoreClient
from shardeddp.comm.transfers import count_begun
from shardeddp.torch_private import new_group_of_its_ranks

_Key = tuple[str, tuple[tuple[int, ...], ...], timedelta, str | None]

_Returned = dict[_Key, tuple[dist.ProcessGroup, int]]
_RETURNED: weakref.WeakKeyDictionary[dist.ProcessGroup, _Returned] = weakref.WeakKeyDictionary()
"""Groups of runs that have ended on this rank, by the default process group.

Each with the number of transfers that its run had issued on streams.
"""

_Channels = dict[int, Channel]
_CHANNELS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Channels] = weakref.WeakKeyDictionary()
"""Channels of host groups by number, in all meshes, by an axis of the groups."""


class GroupPool:
    """Process groups of one mesh; making them is a collective of all ranks."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self._rank = rank
        self._client = StoreClient("groups", rank, patient=True)
        self._own: dict[_Key, dist.ProcessGroup] = {}
        self._of_users = set[str]()
        self._returned = _RETURNED.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
        if (
            dist.get_world_size() > 1
            and dist.get_backend() != "fake"
            and not self._all_have_the_same(timeout)
        ):
            self._returned.clear()

    def get(
        self,
        purpose: str,
        ranks: Sequence[Sequence[int]],
        timeout: timedelta,
        backend: str | None = None,
    ) -> dist.ProcessGroup:
        """Return the group of this rank: one of an earlier run, or a new one.

        Args:
            purpose: Use of the group; two meshes at a time may not share groups of one purpose.
            ranks: Ranks of all groups of the kind; each rank is in one.
            timeout: Timeout of a collective.
            backend: Backend of the group; None: that of the default process group.
        """
        key = (purpose, tuple(tuple(each) for each in ranks), timeout, backend)
        if key not in self._own:
            returned = self._returned.pop(key, None)
            self._own[key] = self._make(key) if returned is None else returned[0]
        return self._own[key]

    def get_for_users(
        self, purpose: str, ranks: Sequence[Sequence[int]], timeout: timedelta
    ) -> dist.ProcessGroup:
        """Return a group as :meth:`get` does, for communication of users."""
        group = self.get(purpose, ranks, timeout)
        self._of_users.add(group.group_name)
        return group

    def host(
        self,
        purpose: str,
        ranks: Sequence[Sequence[int]],
        timeout: timedelta,
        *,
        channel: int = 0,
        patience: timedelta | None = None,
    ) -> HostGroup:
        """Return the host group of this rank; see :meth:`get` and :class:`HostGroup`."""
        own = next(each for each in ranks if self._rank in each)
        rows, columns = grid_of(len(own))
        # On torch's fake process group, which stands for ranks that are not there, gloo finds no
        # peers.
        backend = "fake" if dist.get_backend() == "fake" else "gloo"
        axes: list[dist.ProcessGroup] = []
        if columns > 1:
            of_rows = [
                each[row * columns : (row + 1) * columns] for each in ranks for row in range(rows)
            ]
            axes.append(self.get(purpose, of_rows, timeout, backend))
        if rows > 1:
            of_columns = [each[column::columns] for each in ranks for column in range(columns)]
            axes.append(self.get(f"{purpose}, columns", of_columns, timeout, backend))
        channels = _CHANNELS.get(axes[0]) if axes else None
        channels = {} if channels is None else channels
        _CHANNELS.update(dict.fromkeys(axes, channels))
        return HostGroup(
            axes,
            own,
            name=f"{self._client.number}/{purpose}/{channel}/{own[0]}",
            timeout=max(timeout, patience or timeout),
            channel=channels.setdefault(channel, Channel(channel)),
            patience=patience,
            mirrors=backend == "fake",
        )

    def give_back(self, issued: int) -> None:
        """Return the groups to the pool, for later meshes of this process.

        No transfer has failed in them, and all ranks have begun those that are under way.
        """
        self._returned.update({key: (group, issued) for key, group in self._own.items()})

    def names(self) -> set[str]:
        """Return torch's names of the groups in which users do not communicate."""
        groups = self._own.values()
        return {it.group_name for it in groups if it.group_name not in self._of_users}

    def _make(self, key: _Key) -> dist.ProcessGroup:
        purpose, ranks, timeout, backend = key
        own = list(next(each for each in ranks if self._rank in each))
        if len(ranks) == 1:
            made = dist.new_group(own, timeout=timeout, backend=backend)
            return cast(dist.ProcessGroup, made)
        # One call for all groups of the kind: each rank makes its own, and where communicators are
        # split off the default group's, the calls of all ranks are one split of it. What a process
        # has cached of a DeviceMesh finds the groups of an equal one by their names.
        name = f"shardeddp/{self._client.number}/{purpose}/{own[0]}"
        return new_group_of_its_ranks(own, name, timeout, backend)

    def _all_have_the_same(self, timeout: timedelta) -> bool:
        """Return whether all ranks have returned the same groups; not so after some failures."""
        client = self._client
        begun = [
            f"{key} {issued} {_begun_in(group)}" for key, (group, issued) in self._returned.items()
        ]
        mine = str(zlib.crc32(repr(sorted(begun)).encode()))
        if client.claim("returned", mine) != mine:
            client.count("others")
        if client.count("arrived") == dist.get_world_size():
            client.write("verdict", "differ" if client.count("others", 0) else "same")
        return client.wait_for(["verdict"], timeout.total_seconds()).get("verdict") == "same"


def _begun_in(group: dist.ProcessGroup) -> str:
    # A rank of a tree sends more messages than another, all of one operation.
    channels = _CHANNELS.get(group)
    if channels is None:
        return str(count_begun(group))
    return str({number: channel.begun for number, channel in sorted(channels.items())})
