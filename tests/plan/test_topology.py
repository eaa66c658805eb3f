"""Shard groups and replicate groups each partition the world, and cross in exactly one rank."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardeddp.plan.topology import Topology

pytestmark = pytest.mark.timeout(30)


@st.composite
def some_topology(draw: st.DrawFn) -> Topology:
    """Any mesh of up to 12 x 12 ranks."""
    shard_size = draw(st.integers(1, 12))
    return Topology(world_size=draw(st.integers(1, 12)) * shard_size, shard_size=shard_size)


@given(some_topology())
def test_each_kind_of_group_partitions_the_world(topology: Topology) -> None:
    for groups in (topology.shard_groups(), topology.replicate_groups()):
        assert sorted(itertools.chain(*groups)) == list(range(topology.world_size))
        assert all(group == sorted(group) for group in groups)


@given(some_topology())
def test_groups_are_as_many_and_as_large_as_the_mesh_says(topology: Topology) -> None:
    assert topology.replicate_size * topology.shard_size == topology.world_size
    assert [len(group) for group in topology.shard_groups()] == [
        topology.shard_size
    ] * topology.replicate_size
    assert [len(group) for group in topology.replicate_groups()] == [
        topology.replicate_size
    ] * topology.shard_size


@given(some_topology())
def test_a_shard_group_and_a_replicate_group_cross_in_one_rank(topology: Topology) -> None:
    for shard_group, replicate_group in itertools.product(
        topology.shard_groups(), topology.replicate_groups()
    ):
        assert len(set(shard_group) & set(replicate_group)) == 1


@given(some_topology())
def test_a_rank_sits_in_its_groups_where_its_two_numbers_say(topology: Topology) -> None:
    for rank in range(topology.world_size):
        shard_rank, replicate_rank = topology.shard_rank(rank), topology.replicate_rank(rank)
        assert topology.shard_groups()[replicate_rank][shard_rank] == rank
        assert topology.replicate_groups()[shard_rank][replicate_rank] == rank


@given(some_topology())
def test_ranks_that_share_a_model_are_neighbours(topology: Topology) -> None:
    for group in topology.shard_groups():
        assert group == list(range(group[0], group[0] + topology.shard_size))


def test_the_mesh_drawn_in_the_docstring_is_what_is_built() -> None:
    topology = Topology(world_size=6, shard_size=2)
    assert topology.shard_groups() == [[0, 1], [2, 3], [4, 5]]
    assert topology.replicate_groups() == [[0, 2, 4], [1, 3, 5]]
    assert (topology.shard_rank(3), topology.replicate_rank(3)) == (1, 1)


def test_full_sharding_has_one_shard_group_and_every_rank_is_its_own_replicate_group() -> None:
    topology = Topology(world_size=4, shard_size=4)
    assert topology.shard_groups() == [[0, 1, 2, 3]]
    assert topology.replicate_groups() == [[0], [1], [2], [3]]


def test_no_sharding_has_one_replicate_group_and_every_rank_is_its_own_shard_group() -> None:
    topology = Topology(world_size=4, shard_size=1)
    assert topology.shard_groups() == [[0], [1], [2], [3]]
    assert topology.replicate_groups() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("ranks", [(0, 0, 1, 1), (0, 1, 2), (1, 2, 3, 4)])
@pytest.mark.parametrize("name", ["order", "nearest"])
def test_an_order_has_each_rank_once(name: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"each of 4 ranks once in {name}"):
        Topology(world_size=4, shard_size=2, **{name: ranks})


@pytest.mark.parametrize("shard_size", [-2, 0, 4, 5, 12])
def test_a_shard_size_that_does_not_divide_the_world_is_refused_with_those_that_do(
    shard_size: int,
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"shard_size={shard_size} .* 6 ranks of this run; use one of \[1, 2, 3, 6\]",
    ):
        Topology(world_size=6, shard_size=shard_size)


@pytest.mark.parametrize("world_size", [-2, 0])
def test_a_world_without_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"world_size of at least 1, found {world_size}"):
        Topology(world_size=world_size, shard_size=1)


def test_neighbours_split_layers_and_share_a_place_on_the_data_axis() -> None:
    """Two replicas of two shards of two tensor ranks."""
    topology = Topology(world_size=8, shard_size=2, tensor_size=2)
    assert topology.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.data_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert topology.shard_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert topology.replicate_groups() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert topology.holder_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (topology.data_size, topology.replicate_size, topology.num_slices) == (4, 2, 2)
    assert [topology.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [topology.tensor_rank(rank) for rank in range(8)] == [0, 1] * 4
    assert [topology.shard_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [topology.replicate_rank(rank) for rank in range(8)] == [0] * 4 + [1] * 4


def test_ranks_that_split_layers_are_neighbours_in_the_order_of_nodes() -> None:
    topology = Topology(world_size=4, shard_size=2, tensor_size=2, order=(0, 2, 1, 3))
    assert topology.tensor_groups() == [[0, 2], [1, 3]]
    assert topology.shard_groups() == [[0, 1], [2, 3]]


def test_experts_are_shared_by_as_many_ranks_as_the_rest_or_by_all_that_have_the_same() -> None:
    whole = Topology(world_size=8, shard_size=4)
    of_pairs, of_all = whole.over_experts(2), whole.over_experts(8)
    assert of_pairs.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert of_pairs.shard_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert (of_all.shard_size, of_all.replicate_size) == (1, 1)
    assert Topology(world_size=8, shard_size=2).over_experts(2).replicate_size == 2


def test_a_tensor_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide the 4 ranks"):
        Topology(world_size=4, shard_size=1, tensor_size=3)
    with pytest.raises(ValueError, match="does not divide the 2 ranks"):
        Topology(world_size=4, shard_size=4, tensor_size=2)
    with pytest.raises(ValueError, match="expert_parallel_size=3 does not divide the 4 ranks"):
        Topology(world_size=4, shard_size=4).over_experts(3)
