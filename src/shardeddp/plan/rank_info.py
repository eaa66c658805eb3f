"""Rank infos: the node and the network of each rank, checked against each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardeddp.errors import ConfigurationError, listed_ranks


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Node, host and run configuration of a rank; fields are plain values, sent as JSON."""

    rank: int
    node: int
    host: str
    world_size: int
    num_nodes: int
    ranks_per_node: int
    run: str = ""
    """Versions and options, which must be equal on all ranks."""

    problem: str = ""
    """Reason why this rank cannot join the run; empty if it can."""

    switches: str = ""
    """Network switches from the outermost to the node's own, joined by periods; empty: unknown."""

    domain: str = ""
    """Name of the NVLink domain that spans nodes; empty if there is none or it is unknown."""

    def agrees_with(self, other: RankInfo) -> bool:
        """Return True if two ranks have the same world size, number of nodes and ranks per node."""
        return (self.world_size, self.num_nodes, self.ranks_per_node) == (
            other.world_size,
            other.num_nodes,
            other.ranks_per_node,
        )


def ranks_by_node(infos: Sequence[RankInfo]) -> dict[int, list[int]]:
    """Group ranks by node, ascending; nodes in the order of their first ranks."""
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for info in sorted(infos, key=lambda info: info.rank):
        nodes[info.node].append(info.rank)
    return dict(nodes)


def check_infos(infos: Sequence[RankInfo]) -> None:
    """Check that every node has the number of ranks that the Trainer expects.

    Raises:
        ConfigurationError: A rank cannot join the run; or the numbers of ranks per node differ from
            each other or from the Trainer's; the error lists the nodes.
    """
    unable = [info for info in infos if info.problem]
    if unable:
        raise ConfigurationError(
            f"rank {unable[0].rank} (on {unable[0].host}) {unable[0].problem}"
            + (
                f" (ranks like it: {listed_ranks([it.rank for it in unable])})"
                if unable[1:]
                else ""
            )
        )
    first, nodes = infos[0], ranks_by_node(infos)
    expected = [first.ranks_per_node] * first.num_nodes
    distinct = len({info.rank for info in infos}) == len(infos)
    agreed = all(info.agrees_with(first) for info in infos)
    if distinct and agreed and [len(ranks) for ranks in nodes.values()] == expected:
        return
    raise ConfigurationError(
        f"expected {first.num_nodes} nodes with {first.ranks_per_node} ranks each (the Trainer's "
        f"num_nodes and devices on rank 0), found {_describe(infos)}. Every node needs the same "
        f"number of ranks: set devices= and num_nodes= to what the launcher starts (SLURM: --nodes "
        f"and --ntasks-per-node, without --ntasks; torchrun: --nnodes and --nproc-per-node)"
    )


def node_order(infos: Sequence[RankInfo]) -> tuple[int, ...]:
    """Return the ranks ordered node by node, with nearby nodes adjacent.

    Nodes of one NVLink domain are adjacent, and so are nodes and domains of one switch, from the
    innermost to the outermost. Ties, and nodes with an unknown network, are ordered by their first
    rank. Four nodes of one rank::

        node      0      1      2      3
        switches  s0.s2  s0.s1  s0.s2  s0.s1     order: 0, 2, 1, 3
    """
    nodes = ranks_by_node(infos)
    first = {info.rank: info for info in infos}
    domains: dict[str, str] = {}
    paths: dict[int, list[str]] = {}
    for node, ranks in nodes.items():
        info = first[ranks[0]]
        path = info.switches.split(".")
        if info.domain:
            # A domain takes the switches of its first node, even if its other nodes differ.
            path = [*domains.setdefault(info.domain, info.switches).split("."), info.domain, *path]
        paths[node] = path
    leads: dict[tuple[str, ...], int] = {}  # first rank by prefix of a path
    for node, path in paths.items():
        for length in range(1, len(path) + 1):
            leads.setdefault(tuple(path[:length]), nodes[node][0])

    def key(node: int) -> list[int]:
        path = paths[node]
        near = [leads[tuple(path[:length])] for length in range(1, len(path) + 1)]
        return [*near, nodes[node][0]]

    return tuple(rank for node in sorted(nodes, key=key) for rank in nodes[node])


def reach_of(infos: Sequence[RankInfo]) -> int:
    """Number of ranks that are connected without the network: an NVLink domain's, or a node's.

    Domains count only if they contain all ranks and have equal sizes.
    """
    node, sizes = infos[0].ranks_per_node, Counter(info.domain for info in infos)
    size = min(sizes.values())
    equal = "" not in sizes and size == max(sizes.values()) and size % node == 0
    return size if equal else node


def check_runs(infos: Sequence[RankInfo]) -> None:
    """Check that all ranks run the same code and options, before any collective."""
    first = infos[0]
    odd = [info for info in infos if info.run != first.run]
    if odd:
        raise ConfigurationError(
            f"the ranks do not run the same: rank 0 (on {first.host}) has {first.run}, rank "
            f"{odd[0].rank} (on {odd[0].host}) has {odd[0].run} (ranks that differ from rank 0: "
            f"{[info.rank for info in odd]}). Start the same code with the same options and the "
            f"same packages on every rank; where the installed code of shardeddp differs under one "
            f"version, its files are not the same: install it anew"
        )


def _describe(infos: Sequence[RankInfo]) -> str:
    hosts = {info.node: info.host for info in infos}
    believed = {info.node: (info.num_nodes, info.ranks_per_node) for info in infos}
    same = len(set(believed.values())) == 1
    return "; ".join(
        f"node {node} ({hosts[node]}) with {_count(ranks)}"
        + ("" if same else f" and num_nodes={believed[node][0]}, devices={believed[node][1]}")
        for node, ranks in sorted(ranks_by_node(infos).items())
    )


def _count(ranks: Sequence[int]) -> str:
    return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} ({listed_ranks(ranks)})"
