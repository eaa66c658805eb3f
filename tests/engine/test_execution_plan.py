"""The first pass is recorded, later passes are predicted from it, and a changed order is reported and survived."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardeddp.engine.order import ExecutionOrder

pytestmark = pytest.mark.timeout(30)

some_pass = st.lists(st.integers(0, 6), min_size=1, max_size=12)
different_units = st.lists(st.integers(0, 20), min_size=2, max_size=10, unique=True)


def recorded(*visits: int) -> ExecutionOrder:
    """An order that has recorded ``visits`` and stands at the start of its second pass."""
    order = ExecutionOrder()
    order.begin()
    for unit in visits:
        order.visit(unit)
    order.begin()
    return order


def changes(order: ExecutionOrder, *visits: int) -> list[tuple[int | None, int]]:
    """The visits that were not expected, each behind the one that was."""
    return [
        (expected, unit) for unit in visits for expected in [order.next()] if not order.visit(unit)
    ]


@pytest.mark.slow
@given(some_pass)
def test_the_first_pass_is_recorded_and_predicts_nothing(visits: list[int]) -> None:
    order = ExecutionOrder()
    order.begin()
    for unit in visits:
        assert order.visit(unit)
        assert order.upcoming(3) == []
        assert not order.at_end()
    assert order.record == tuple(visits)


@given(some_pass, st.integers(0, 4))
def test_an_equal_pass_is_predicted_at_every_visit(visits: list[int], depth: int) -> None:
    order = recorded(*visits)
    for _ in range(2):
        for position, unit in enumerate(visits):
            assert order.upcoming(depth) == list(dict.fromkeys(visits[position:]))[:depth]
            assert order.upcoming(1) == [unit]
            assert order.visit(unit)
            assert order.at_end() == (position == len(visits) - 1)
        assert order.upcoming(depth) == []
        order.begin()


@given(some_pass, st.lists(st.integers(0, 9), max_size=20))
def test_any_later_pass_leaves_the_record_alone_and_is_forgotten_at_the_next(
    visits: list[int], others: list[int]
) -> None:
    order = recorded(*visits)
    changes(order, *others)
    assert order.record == tuple(visits)
    order.begin()
    assert changes(order, *visits) == []
    assert order.at_end()


@given(some_pass, st.lists(st.integers(0, 9), max_size=20))
def test_after_any_visit_of_a_recorded_unit_its_successor_in_the_record_is_expected(
    visits: list[int], others: list[int]
) -> None:
    order = recorded(*visits)
    for unit in others:
        order.visit(unit)
        if unit not in visits:
            continue
        successors = [
            visits[place + 1 : place + 2] for place, known in enumerate(visits) if known == unit
        ]
        assert order.upcoming(1) in successors


@given(different_units, st.data())
def test_one_or_more_skipped_units_are_reported_once(
    visits: list[int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(visits) - 2))
    behind = data.draw(st.integers(first + 1, len(visits) - 1))
    order = recorded(*visits)
    found = changes(order, *visits[:first], *visits[behind:])
    assert found == [(visits[first], visits[behind])]
    assert order.at_end()


@given(different_units)
def test_a_pass_that_stops_early_is_not_at_its_end(visits: list[int]) -> None:
    order = recorded(*visits)
    assert changes(order, *visits[:-1]) == []
    assert not order.at_end()
    assert order.upcoming(2) == visits[-1:]


@given(different_units, st.data())
def test_a_unit_that_the_record_does_not_know_is_reported_and_costs_nothing_else(
    visits: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(visits)))
    order = recorded(*visits)
    found = changes(order, *visits[:place], 99, *visits[place:])
    assert found == [(visits[place] if place < len(visits) else None, 99)]
    assert order.at_end()


def test_a_unit_visited_once_more_is_followed_back_and_the_rest_is_found_again() -> None:
    order = recorded(0, 1, 2, 3)
    assert changes(order, 0, 1, 0) == [(2, 0)]
    assert order.upcoming(2) == [1, 2]
    assert changes(order, 2, 3) == [(1, 2)]
    assert order.at_end()


def test_the_record_is_taken_up_at_the_next_occurrence_and_not_at_an_earlier_one() -> None:
    order = recorded(0, 1, 0, 2, 0, 3)
    changes(order, 0, 1, 0)
    assert changes(order, 0) == [(2, 0)]
    assert order.upcoming(1) == [3]


def test_a_visit_behind_the_end_starts_over_without_an_expectation() -> None:
    order = recorded(0, 1, 2)
    assert changes(order, 0, 1, 2) == []
    assert changes(order, 0, 1, 2) == [(None, 0)]
    assert order.at_end()


def test_units_visited_repeatedly_are_recorded_with_their_repeats_and_predicted_once_each() -> None:
    order = recorded(0, 1, 1, 2, 0)
    assert order.record == (0, 1, 1, 2, 0)
    assert order.upcoming(9) == [0, 1, 2]
    assert changes(order, 0, 1) == []
    assert order.upcoming(3) == [1, 2, 0]
    assert changes(order, 1, 2, 0) == []
    assert order.at_end()


def test_a_pass_without_visits_records_nothing_and_the_next_one_is_recorded() -> None:
    order = ExecutionOrder()
    order.begin()
    order.begin()
    assert changes(order, 3, 1) == []
    assert order.record == (3, 1)
    order.begin()
    assert order.upcoming(2) == [3, 1]


def test_visits_before_any_begin_belong_to_the_first_pass() -> None:
    order = ExecutionOrder()
    order.visit(4)
    order.begin()
    assert order.upcoming(1) == [4]
