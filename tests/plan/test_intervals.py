"""Intervals behave like sets of consecutive elements, and boxes cover an interval exactly, in order."""

import doctest
import itertools
import math
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardeddp.plan import layout, memory, sharding_strategy, topology
from shardeddp.plan.layout import Box, Interval, boxes

pytestmark = pytest.mark.timeout(30)


@st.composite
def some_interval(draw: st.DrawFn, numel: int = 40) -> Interval:
    """An interval inside ``numel`` elements; empty ones included."""
    start = draw(st.integers(0, numel))
    return Interval(start, draw(st.integers(start, numel)))


@st.composite
def interval_of_a_tensor(draw: st.DrawFn) -> tuple[Interval, tuple[int, ...]]:
    """A tensor's shape with up to four dims, and an interval of its elements."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return draw(some_interval(math.prod(shape))), shape


def elements_of(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Row-major numbers of a box's elements, counted one by one."""
    ranges = [
        range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)
    ]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [sum(map(int.__mul__, index, strides)) for index in itertools.product(*ranges)]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (-2, -1)])
def test_an_interval_that_runs_backwards_or_below_zero_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"0 <= start <= stop, found start={start}, stop={stop}"):
        Interval(start, stop)


@given(some_interval(), some_interval())
def test_an_intersection_has_the_elements_that_both_intervals_have(
    one: Interval, other: Interval
) -> None:
    common = one.intersect(other)
    expected = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    assert set(range(common.start, common.stop)) == expected
    assert common.numel == len(expected)


@given(some_interval(), some_interval())
def test_an_intersection_stays_inside_the_first_interval_even_when_empty(
    one: Interval, other: Interval
) -> None:
    common = one.intersect(other)
    assert one.start <= common.start <= common.stop <= one.stop


def test_intervals_apart_meet_at_the_nearer_edge() -> None:
    assert Interval(4, 8).intersect(Interval(0, 2)) == Interval(4, 4)
    assert Interval(4, 8).intersect(Interval(9, 12)) == Interval(8, 8)


@given(some_interval(), st.integers(0, 100))
def test_a_shift_there_and_back_gives_the_same_interval(interval: Interval, offset: int) -> None:
    shifted = interval.shift(offset)
    assert (shifted.start, shifted.stop) == (interval.start + offset, interval.stop + offset)
    assert shifted.shift(-offset) == interval


def test_a_shift_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="found start=-1"):
        Interval(2, 5).shift(-3)


@pytest.mark.parametrize(
    "module", [layout, memory, sharding_strategy, topology], ids=lambda it: it.__name__
)
def test_the_examples_in_the_docstrings_are_true(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted >= 1
    assert outcome.failed == 0


@given(interval_of_a_tensor())
def test_boxes_cover_exactly_the_elements_of_the_interval_in_order(
    case: tuple[Interval, tuple[int, ...]],
) -> None:
    # One box behind the other gives consecutive numbers, so each box is contiguous in the interval as well.
    interval, shape = case
    covered = [element for box in boxes(interval, shape) for element in elements_of(box, shape)]
    assert covered == list(range(interval.start, interval.stop))


@given(interval_of_a_tensor())
def test_boxes_are_few_not_empty_and_inside_the_tensor(
    case: tuple[Interval, tuple[int, ...]],
) -> None:
    interval, shape = case
    found = boxes(interval, shape)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for box in found:
        assert box.numel == math.prod(box.sizes) > 0
        assert len(box.offsets) == len(box.sizes) == len(shape)
        assert all(
            offset + size <= dim
            for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True)
        )


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_a_whole_tensor_is_one_box(shape: tuple[int, ...]) -> None:
    assert boxes(Interval(0, math.prod(shape)), shape) == [Box((0,) * len(shape), shape)]


@given(some_interval(6), st.lists(st.integers(1, 4), max_size=3))
def test_whole_rows_are_one_box(rows: Interval, row: list[int]) -> None:
    shape = (6, *row)
    interval = Interval(rows.start * math.prod(row), rows.stop * math.prod(row))
    found = boxes(interval, shape)
    assert len(found) == min(1, rows.numel)
    assert sum(box.numel for box in found) == interval.numel


def test_the_interval_drawn_in_the_docstring_is_a_tail_a_body_and_a_head() -> None:
    assert boxes(Interval(2, 10), (4, 4)) == [
        Box((0, 2), (1, 2)),
        Box((1, 0), (1, 4)),
        Box((2, 0), (1, 2)),
    ]


@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
def test_all_elements_but_the_first_and_the_last_need_the_most_boxes(ndim: int) -> None:
    shape = (3,) * ndim
    assert len(boxes(Interval(1, math.prod(shape) - 1), shape)) == 2 * ndim - 1


def test_a_scalar_is_one_box_without_dims() -> None:
    assert boxes(Interval(0, 1), ()) == [Box((), ())]
    assert boxes(Interval(0, 0), ()) == []


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_a_tensor_without_elements_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert boxes(Interval(0, 0), shape) == []


def test_boxes_of_a_huge_tensor_are_found_without_walking_its_elements() -> None:
    shape = (1_000_000, 1_000, 1_000_000)
    interval = Interval(1, math.prod(shape) - 1)
    assert sum(box.numel for box in boxes(interval, shape)) == interval.numel


def test_an_interval_behind_the_tensor_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"inside the 6 elements of shape \(2, 3\), found Interval\(start=0, stop=7\)",
    ):
        boxes(Interval(0, 7), (2, 3))
