"""Collectives for gloo among ranks of several nodes, whose link nothing crosses twice.

What other nodes need of this one's slices is sent to one rank of each, which passes it on to its neighbours. With
``P`` bytes in a buffer and two nodes, a gather or a reduction sends ``P / 2`` each way, however many ranks a node has;
point to point it is that once per rank of a node.
"""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from shardeddp.comm.collectives import Pending, Work
from shardeddp.comm.gloo import GlooCollectives, scaled_sum
from shardeddp.comm.relay import Relay
from shardeddp.comm.traffic import Traffic

_PASSED_ON = 1
"""The tag of what relays send: ranks send in one order on each of their two threads, but not across them."""


class LinkedCollectives(GlooCollectives):
    """Collectives among the ranks of a gloo group that has as many ranks on each of several nodes.

    Ranks that have the same place on their nodes are *counterparts*. Only counterparts send gathers and reductions to
    each other across nodes.

    Args:
        group: The process group.
        ranks: Its global ranks, ascending.
        traffic: Where bytes are counted.
        nodes: The group ranks on each node.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], traffic: Traffic, nodes: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(group, ranks, traffic)
        self._relay = Relay(group)
        weakref.finalize(self, self._relay.end).atexit = False
        node = next(number for number, members in enumerate(nodes) if self.rank in members)
        place = nodes[node].index(self.rank)
        near, far = len(nodes[node]), len(nodes)
        # (to send to, to receive from), another pair in each round
        self._neighbours = [
            (nodes[node][(place + distance) % near], nodes[node][(place - distance) % near])
            for distance in range(1, near)
        ]
        self._counterparts = [
            (nodes[(node + distance) % far][place], nodes[(node - distance) % far][place]) for distance in range(1, far)
        ]
        self._columns = {
            member: [nodes[(node - distance) % far][place] for distance in range(far)]
            for place, member in enumerate(nodes[node])
        }
        """By neighbour, itself and its counterparts, in the order in which theirs arrive here."""

    # What is received is asked for before anything is sent: else the request waits behind what goes to the same rank,
    # and the two directions of a link take turns.

    def _exchange_own(self, slices: Sequence[torch.Tensor]) -> list[Work]:
        works: list[Work] = []
        for _, source in self._counterparts:
            arriving = self._receive(slices[source], source)
            if arriving:
                works.append(self._relay.then(arriving, partial(self._pass_on, slices[source])))
        for _, source in self._neighbours:
            works += self._receive(slices[source], source)
            for origin in self._columns[source][1:]:
                works += self._receive(slices[origin], source, _PASSED_ON)
        for target, _ in (*self._counterparts, *self._neighbours):
            works += self._send(slices[self.rank], target)
        return works

    def _pass_on(self, arrived: torch.Tensor) -> list[Work]:
        return [work for target, _ in self._neighbours for work in self._send(arrived, target, _PASSED_ON)]

    def _scatter_mean(self, output: torch.Tensor, slices: Sequence[torch.Tensor]) -> Pending:
        """Add up on the node first, each rank for its counterparts too, then across nodes."""
        column = [slices[rank] for rank in self._columns[self.rank]]
        arrived = column[0].new_empty(len(self._neighbours), len(column), column[0].numel())
        across = column[0].new_empty(len(self._counterparts), column[0].numel())
        works: list[Work] = []
        arriving: list[Work] = []
        for row, (_, source) in zip(across, self._counterparts, strict=True):
            works += self._receive(row, source, _PASSED_ON)
        for rows, (_, source) in zip(arrived, self._neighbours, strict=True):
            for row in rows:
                arriving += self._receive(row, source)
        for target, _ in self._neighbours:
            for owner in self._columns[target]:
                works += self._send(slices[owner], target)
        sums = arrived[0]  # (column, numel of a slice)
        if arriving:
            works.append(self._relay.then(arriving, partial(self._share_sums, sums, column, arrived)))

        def finish() -> None:
            scaled_sum(output, sums[0], across, 1.0 / self.size)

        return Pending(works, finish, keep=(*slices, arrived, across))

    def _share_sums(self, sums: torch.Tensor, column: Sequence[torch.Tensor], arrived: torch.Tensor) -> list[Work]:
        for place, own in enumerate(column):
            scaled_sum(sums[place], own, arrived[:, place], 1.0)
        others = self._columns[self.rank][1:]
        return [work for place, owner in enumerate(others, 1) for work in self._send(sums[place], owner, _PASSED_ON)]
