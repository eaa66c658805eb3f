"""Nodes with other ranks than the Trainer was told of are listed; groups stay inside nodes wherever they are."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardeddp.config import choose_sharding
from shardeddp.errors import ConfigurationError
from shardeddp.plan.rank_info import RankInfo, check_infos, node_order, reach_of
from shardeddp.plan.topology import Topology

pytestmark = pytest.mark.timeout(30)


def infos(nodes: Sequence[int], **believed: Any) -> list[RankInfo]:
    """Ranks by the node that each is on."""
    common = {"world_size": len(nodes), "num_nodes": 2, "ranks_per_node": 2, **believed}
    return [
        RankInfo(rank=rank, node=node, host=f"h{node}", **common) for rank, node in enumerate(nodes)
    ]


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]])
def test_as_many_ranks_on_each_node_as_expected_are_right_in_any_order(nodes: list[int]) -> None:
    check_infos(infos(nodes))


@pytest.mark.parametrize(
    ("nodes", "believed", "found"),
    [
        ([0, 0, 1], {}, "node 0 (h0) with 2 ranks (0, 1); node 1 (h1) with 1 rank (2)"),
        ([0, 0, 0, 1], {}, "node 0 (h0) with 3 ranks (0, 1, 2); node 1 (h1) with 1 rank (3)"),
        ([0, 0, 0, 0], {}, "node 0 (h0) with 4 ranks (0, 1, 2, 3)."),
        ([0, 0, 1, 1], {"num_nodes": 3}, "expected 3 nodes with 2 ranks each"),
    ],
)
def test_nodes_that_differ_are_listed(
    nodes: list[int], believed: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(found)):
        check_infos(infos(nodes, **believed))


def test_nodes_that_were_told_otherwise_say_so() -> None:
    mixed = [
        *infos([0, 0, 1], world_size=4)[:2],
        *infos([0, 0, 1], world_size=2, ranks_per_node=1)[2:],
    ]
    with pytest.raises(
        ConfigurationError, match=r"num_nodes=2, devices=2; node 1 .* num_nodes=2, devices=1"
    ):
        check_infos(mixed)


def test_a_rank_that_is_there_twice_is_not_taken_for_two() -> None:
    twice = infos([0, 0, 1, 1])
    with pytest.raises(ConfigurationError, match=r"node 0 \(h0\) with 3 ranks \(0, 1, 1\)"):
        check_infos([*twice[:3], infos([0, 0])[1]])


# -- groups


def hybrid(
    num_nodes: int, ranks_per_node: int, nodes: Sequence[int], shard_size: int | None = None
) -> Topology:
    order = node_order(infos(nodes, num_nodes=num_nodes, ranks_per_node=ranks_per_node))
    return choose_sharding("hybrid_shard", shard_size).topology(num_nodes, ranks_per_node, order)


@pytest.mark.parametrize("shard_size", [None, 2, 1])
@pytest.mark.parametrize("nodes", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4, [0, 0, 1, 1, 0, 0, 1, 1]])
def test_no_shard_group_crosses_a_node_unless_asked(
    nodes: list[int], shard_size: int | None
) -> None:
    topology = hybrid(2, 4, nodes, shard_size)
    assert all(len({nodes[rank] for rank in group}) == 1 for group in topology.shard_groups())
    assert sorted(rank for group in topology.replicate_groups() for rank in group) == list(range(8))
    for replica, group in enumerate(topology.shard_groups()):
        assert [topology.shard_rank(rank) for rank in group] == list(range(len(group)))
        assert {topology.replicate_rank(rank) for rank in group} == {replica}
    for group in topology.replicate_groups():
        assert [topology.replicate_rank(rank) for rank in group] == list(range(len(group)))


def test_asked_for_it_a_shard_group_spans_whole_nodes() -> None:
    assert hybrid(4, 2, [0, 1, 2, 3] * 2, shard_size=4).shard_groups() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]


def test_ranks_that_count_node_by_node_need_no_order() -> None:
    assert hybrid(2, 2, [0, 0, 1, 1]).order is None
    full = choose_sharding("full_shard").topology(2, 2, (0, 2, 1, 3))
    assert full.order is None, "a group of all ranks lists them as they count"


def test_a_shard_size_that_lets_only_some_groups_cross_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"shard_size=3 does not divide the 4 ranks of a node.*\[1, 2, 4\]"
    ):
        hybrid(3, 4, [node for node in range(3) for _ in range(4)], shard_size=3)


def test_replicas_need_no_common_order() -> None:
    """Rank 2 is of the later replica and before rank 3, of the earlier one."""
    topology = hybrid(2, 2, [0, 1, 1, 0])
    assert topology.shard_groups() == [[0, 3], [1, 2]]
    assert topology.replicate_groups() == [[0, 1], [2, 3]]
    assert [topology.shard_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [topology.replicate_rank(rank) for rank in range(4)] == [0, 1, 0, 1]


# -- nodes that are near each other


def placed(
    nodes: Sequence[int], switches: Sequence[str] = (), domains: Sequence[str] = ()
) -> list[RankInfo]:
    """Ranks by node, and what is known of the nodes."""
    return [
        replace(
            info,
            switches=switches[info.node] if switches else "",
            domain=domains[info.node] if domains else "",
        )
        for info in infos(nodes)
    ]


@pytest.mark.parametrize(
    ("switches", "domains", "order"),
    [
        ((), (), (0, 1, 2, 3)),
        (("s0.s2", "s0.s1", "s0.s2", "s0.s1"), (), (0, 2, 1, 3)),
        (("a.x", "b.y", "a.z", "a.x"), (), (0, 3, 2, 1)),
        (("a", "b", "", "a"), (), (0, 3, 1, 2)),
        ((), ("u/0", "u/1", "u/1", "u/0"), (0, 3, 1, 2)),
        # One NVLink domain behind two switches; its nodes come before others of the first switch.
        (("a", "a", "b", "b"), ("u", "", "u", ""), (0, 2, 1, 3)),
        (("a", "b", "b", "a"), ("u", "v", "v", "u"), (0, 3, 1, 2)),
    ],
)
def test_nodes_behind_one_switch_or_in_one_domain_follow_one_another(
    switches: Sequence[str], domains: Sequence[str], order: tuple[int, ...]
) -> None:
    found = placed([0, 1, 2, 3], switches, domains)
    assert node_order(found) == order
    assert node_order(found[::-1]) == order
    pairs = [0, 0, 1, 1, 2, 2, 3, 3]
    by_node = [rank for node in order for rank in (2 * node, 2 * node + 1)]
    assert node_order(placed(pairs, switches, domains)) == tuple(by_node)


def test_shard_groups_of_several_nodes_are_behind_one_switch() -> None:
    order = node_order(placed([0, 0, 1, 1, 2, 2, 3, 3], ["s0.a", "s0.b", "s0.b", "s0.a"]))
    topology = choose_sharding("hybrid_shard", 4).topology(4, 2, order)
    assert topology.shard_groups() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    full = choose_sharding("full_shard", reshard_after_forward=4).topology(4, 2, order)
    assert full.shard_groups() == [[*range(8)]]
    assert full.subgroups(4) == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("domains", "reach"),
    [
        ((), 2),
        (("u", "u", "u", "u"), 8),
        (("u", "v", "u", "v"), 4),
        (("u", "u", "u", "v"), 2),
        (("u", "u", "", ""), 2),
    ],
)
def test_ranks_reach_each_other_in_domains_that_are_as_large_or_else_in_nodes(
    domains: Sequence[str], reach: int
) -> None:
    assert reach_of(placed([0, 0, 1, 1, 2, 2, 3, 3], (), domains)) == reach
