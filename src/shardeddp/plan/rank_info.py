"""Rank infos: the node and the network of each rank, checked against the environment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardeddp.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A rank's place and its view of the run; fields are plain, they travel as JSON."""

    rank: int
    node: int
    host: str
    world_size: int
    num_nodes: int
    ranks_per_node: int
    run: str = ""
    """Versions and options, which have to be equal on all ranks."""

    problem: str = ""
    """Why this rank cannot take part; empty: it can."""

    switches: str = ""
    """Network switches from the outermost to that of its node, joined by periods; empty: unknown."""

    domain: str = ""
    """Of GPUs that NVLink connects across nodes; empty: there is none, or it is not known."""

    def agrees_with(self, other: RankInfo) -> bool:
        """Whether two ranks believe the same."""
        return (self.world_size, self.num_nodes, self.ranks_per_node) == (
            other.world_size,
            other.num_nodes,
            other.ranks_per_node,
        )


def ranks_by_node(infos: Sequence[RankInfo]) -> dict[int, list[int]]:
    """The ranks of every node, ascending; nodes in the order of their first ranks."""
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for info in sorted(infos, key=lambda info: info.rank):
        nodes[info.node].append(info.rank)
    return dict(nodes)


def check_infos(infos: Sequence[RankInfo]) -> None:
    """See that every node has the ranks that the Trainer was told of.

    Args:
        infos: Of all ranks that have come; rank 0's first.

    Raises:
        ConfigurationError: A rank cannot take part; or nodes have different numbers of ranks, or
            other ones than expected, and are listed.
    """
    unable = [info for info in infos if info.problem]
    if unable:
        raise ConfigurationError(
            f"rank {unable[0].rank} (on {unable[0].host}) {unable[0].problem}"
            + (f" (ranks like it: {_listed([it.rank for it in unable])})" if unable[1:] else "")
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
    """The ranks node by node; nodes that are near each other follow one another.

    Nodes of one NVLink domain come together, and so do nodes and domains behind one switch, from
    the innermost to the outermost. Where nothing is known of the network, and among equals, the
    first rank decides. Four nodes of one rank::

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
            # Behind the switches of its first node, wherever its others are.
            path = [*domains.setdefault(info.domain, info.switches).split("."), info.domain, *path]
        paths[node] = path
    leads: dict[tuple[str, ...], int] = {}  # by beginning of a path, the first rank that has it
    for node, path in paths.items():
        for length in range(1, len(path) + 1):
            leads.setdefault(tuple(path[:length]), nodes[node][0])

    def key(node: int) -> list[int]:
        path = paths[node]
        near = [leads[tuple(path[:length])] for length in range(1, len(path) + 1)]
        return [*near, nodes[node][0]]

    return tuple(rank for node in sorted(nodes, key=key) for rank in nodes[node])


def reach_of(infos: Sequence[RankInfo]) -> int:
    """Ranks that reach each other without the network: those of an NVLink domain, else of a node.

    Of domains, where all ranks are in one and all have as many.
    """
    node, sizes = infos[0].ranks_per_node, Counter(info.domain for info in infos)
    size = min(sizes.values())
    equal = "" not in sizes and size == max(sizes.values()) and size % node == 0
    return size if equal else node


def check_runs(infos: Sequence[RankInfo]) -> None:
    """See that all ranks are about to run the same thing, before any of them waits for another.

    Raises:
        ConfigurationError: They are not; names the ranks on either side.
    """
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
    return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} ({_listed(ranks)})"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
