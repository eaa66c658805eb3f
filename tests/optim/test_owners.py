"""Ownership deals out parameters evenly, for good, and the same wherever it is computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardeddp.optim.whole_parameter import assign_owners, step_cost

pytestmark = pytest.mark.timeout(60)

shapes_of_models = st.lists(st.lists(st.integers(0, 64), max_size=3), max_size=30)


@given(shapes=shapes_of_models, num_ranks=st.integers(1, 9))
def test_no_rank_has_more_than_a_fair_share_and_one_parameter(
    shapes: list[list[int]], num_ranks: int
) -> None:
    totals = [0] * num_ranks
    owners = assign_owners(shapes, totals)
    costs = [step_cost(shape) for shape in shapes]
    for rank in range(num_ranks):
        mine = [cost for cost, owner in zip(costs, owners, strict=True) if owner == rank]
        assert totals[rank] == sum(mine)
        assert sum(mine) <= sum(costs) / num_ranks + max(costs, default=0)


@given(first=shapes_of_models, second=shapes_of_models, num_ranks=st.integers(1, 9))
def test_what_comes_later_changes_nothing_and_every_rank_deals_alike(
    first: list[list[int]], second: list[list[int]], num_ranks: int
) -> None:
    one, other = [0] * num_ranks, [0] * num_ranks
    owners = assign_owners(first, one)
    assert owners == assign_owners(first, other)
    assert assign_owners(second, one) == assign_owners(second, other)
    assert len(owners) == len(first)


def test_equal_blocks_are_divided_evenly() -> None:
    block = [(768, 256), (256, 256), (1408, 256), (256, 704)]
    costs = [0, 0]
    assign_owners(block * 4, costs)
    assert max(costs) <= 1.1 * min(costs)
