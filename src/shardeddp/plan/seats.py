"""Seats: which rank is on which node, and whether that is what the run was told."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardeddp.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank is, and what it believes about the run; fields are plain, they travel as JSON."""

    rank: int
    node: int
    local_rank: int
    host: str
    world_size: int
    num_nodes: int
    ranks_per_node: int
    run: str = ""
    """What else has to be the same everywhere: versions and options."""

    def agrees_with(self, other: "Seat") -> bool:
        """Whether two ranks believe the same."""
        return (self.world_size, self.num_nodes, self.ranks_per_node) == (
            other.world_size,
            other.num_nodes,
            other.ranks_per_node,
        )


def ranks_by_node(seats: Sequence[Seat]) -> dict[int, list[int]]:
    """The ranks of every node, ascending; nodes in the order of their first ranks."""
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for seat in sorted(seats, key=lambda seat: seat.rank):
        nodes[seat.node].append(seat.rank)
    return dict(nodes)


def check_seats(seats: Sequence[Seat]) -> None:
    """See that every node has the ranks that the Trainer was told of.

    Args:
        seats: Of all ranks that have come; rank 0's first.

    Raises:
        ConfigurationError: Nodes have different numbers of ranks, or other ones than expected; lists the nodes.
    """
    first, nodes = seats[0], ranks_by_node(seats)
    expected = [first.ranks_per_node] * first.num_nodes
    distinct = len({seat.rank for seat in seats}) == len(seats)
    agreed = all(seat.agrees_with(first) for seat in seats)
    if distinct and agreed and [len(ranks) for ranks in nodes.values()] == expected:
        return
    raise ConfigurationError(
        f"expected {first.num_nodes} nodes with {first.ranks_per_node} ranks each (the Trainer's num_nodes and devices "
        f"on rank 0), found {_describe(seats)}. Every node needs the same number of ranks: set devices= and num_nodes= "
        f"to what the launcher starts (SLURM: --nodes and --ntasks-per-node, without --ntasks; torchrun: --nnodes and "
        f"--nproc-per-node)"
    )


def node_order(seats: Sequence[Seat]) -> tuple[int, ...]:
    """The ranks node by node."""
    return tuple(rank for ranks in ranks_by_node(seats).values() for rank in ranks)


def check_runs(seats: Sequence[Seat]) -> None:
    """See that all ranks are about to run the same thing, before any of them waits for another.

    Args:
        seats: Of all ranks, by rank.

    Raises:
        ConfigurationError: They are not; names the ranks on either side.
    """
    first = seats[0]
    odd = [seat for seat in seats if seat.run != first.run]
    if odd:
        raise ConfigurationError(
            f"the ranks do not run the same: rank 0 (on {first.host}) has {first.run}, rank {odd[0].rank} (on "
            f"{odd[0].host}) has {odd[0].run} (ranks that differ from rank 0: {[seat.rank for seat in odd]}). Start "
            f"the same code with the same options and the same packages on every rank; where the installed code of "
            f"shardeddp differs under one version, its files are not the same: install it anew"
        )


def _describe(seats: Sequence[Seat]) -> str:
    hosts = {seat.node: seat.host for seat in seats}
    believed = {seat.node: (seat.num_nodes, seat.ranks_per_node) for seat in seats}
    same = len(set(believed.values())) == 1
    return "; ".join(
        f"node {node} ({hosts[node]}) with {_count(ranks)}"
        + ("" if same else f" and num_nodes={believed[node][0]}, devices={believed[node][1]}")
        for node, ranks in sorted(ranks_by_node(seats).items())
    )


def _count(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{len(ranks)} ranks ({shown})" if len(ranks) > 1 else f"1 rank ({shown})"
