"""A flat layout divides every parameter over the ranks without loss, aligned, and in the order it was given."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardeddp.plan.layout import (
    ALIGNMENT_NBYTES,
    FlatLayout,
    Interval,
    OwnedIntervals,
    ParameterSlot,
)

pytestmark = pytest.mark.timeout(30)

# Up to three dims, so scalars, and dims of 0, so parameters without elements.
some_shape = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def build(*shapes: tuple[int, ...], itemsize: int = 4, num_slices: int = 2) -> FlatLayout:
    """A layout of parameters ``p0``, ``p1``, ..."""
    names = [f"p{index}" for index in range(len(shapes))]
    return FlatLayout.build(names, shapes, itemsize=itemsize, num_slices=num_slices)


@st.composite
def some_layout(draw: st.DrawFn) -> FlatLayout:
    """Any layout, that of no parameters and those of more ranks than parameters included."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    return build(
        *draw(st.lists(some_shape, max_size=6)),
        itemsize=itemsize,
        num_slices=draw(st.integers(1, 9)),
    )


def elements(interval: Interval) -> range:
    """The numbers of an interval's elements."""
    return range(interval.start, interval.stop)


def owned_elements(layout: FlatLayout, slot: ParameterSlot) -> list[list[int]]:
    """For every rank the elements of the parameter that it owns."""
    return [
        list(elements(layout.parameter_interval(slot, rank))) for rank in range(layout.num_slices)
    ]


@given(some_layout())
def test_every_element_of_every_parameter_is_owned_by_exactly_one_rank(layout: FlatLayout) -> None:
    for slot in layout.slots:
        # In the order of the ranks and nothing twice: what a rank owns is consecutive, and so are the ranks.
        assert list(itertools.chain(*owned_elements(layout, slot))) == list(range(slot.numel))


@given(some_layout())
def test_slices_are_equal_aligned_and_tile_the_flat_buffer(layout: FlatLayout) -> None:
    slices = [layout.slice_interval(rank) for rank in range(layout.num_slices)]
    assert list(itertools.chain(*map(elements, slices))) == list(range(layout.padded_numel))
    assert {part.numel for part in slices} == {layout.slice_numel}
    assert all(part.start * layout.itemsize % ALIGNMENT_NBYTES == 0 for part in slices)
    assert all(part.stop * layout.itemsize % ALIGNMENT_NBYTES == 0 for part in slices)


@given(st.lists(some_shape, max_size=6), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9))
def test_slots_keep_the_order_the_names_and_the_shapes_of_the_parameters(
    shapes: list[tuple[int, ...]], itemsize: int, num_slices: int
) -> None:
    layout = build(*shapes, itemsize=itemsize, num_slices=num_slices)
    assert [slot.fqn for slot in layout.slots] == [f"p{index}" for index in range(len(shapes))]
    assert [slot.shape for slot in layout.slots] == shapes
    assert [slot.numel for slot in layout.slots] == [math.prod(shape) for shape in shapes]
    for one, other in itertools.pairwise(layout.slots):
        assert one.interval.stop <= other.interval.start


@given(some_layout())
def test_slots_start_aligned(layout: FlatLayout) -> None:
    assert all(slot.offset * layout.itemsize % ALIGNMENT_NBYTES == 0 for slot in layout.slots)


@pytest.mark.parametrize("itemsize", [3, 12, 24, 32])
def test_slots_and_slices_are_aligned_for_element_sizes_that_do_not_divide_the_alignment(
    itemsize: int,
) -> None:
    layout = build((1,), (5,), itemsize=itemsize, num_slices=3)
    assert all(slot.offset * itemsize % ALIGNMENT_NBYTES == 0 for slot in layout.slots)
    assert layout.slice_numel * itemsize % ALIGNMENT_NBYTES == 0


@given(some_layout())
def test_no_more_is_padded_than_the_alignment_needs(layout: FlatLayout) -> None:
    alignment = ALIGNMENT_NBYTES // layout.itemsize
    end = 0
    for slot in layout.slots:
        assert 0 <= slot.offset - end < alignment
        end = slot.interval.stop
    assert 0 <= layout.padded_numel - end < alignment * layout.num_slices
    assert layout.numel + layout.padding_numel == layout.padded_numel
    assert layout.numel == sum(slot.numel for slot in layout.slots)


@given(some_layout())
def test_parameters_cut_into_slices_and_put_together_again_are_whole(layout: FlatLayout) -> None:
    flat: list[tuple[str, int] | None] = [None] * layout.padded_numel
    for slot in layout.slots:
        flat[slot.interval.start : slot.interval.stop] = [
            (slot.fqn, index) for index in range(slot.numel)
        ]
    for rank, slot in itertools.product(range(layout.num_slices), layout.slots):
        part = layout.slice_interval(rank)
        mine = flat[part.start : part.stop]
        local = layout.local_interval(slot, rank)
        expected = [(slot.fqn, index) for index in elements(layout.parameter_interval(slot, rank))]
        assert mine[local.start : local.stop] == expected


@given(some_layout())
def test_intervals_that_are_worked_out_when_asked_for_are_those_of_each_owner(
    layout: FlatLayout,
) -> None:
    ranks = list(reversed(range(layout.num_slices)))
    for slot in layout.slots:
        found = OwnedIntervals(layout, slot, ranks)
        expected = tuple(layout.parameter_interval(slot, rank) for rank in ranks)
        assert (len(found), tuple(found), found[1:]) == (len(ranks), expected, expected[1:])
        assert found == expected and expected == found
        assert found[-1] == expected[-1]
        assert found != (*expected, Interval(0, 0)) and found != 3
        assert OwnedIntervals(layout, slot, ranks) == found


@given(some_layout())
def test_local_and_parameter_intervals_are_the_same_elements_from_two_origins(
    layout: FlatLayout,
) -> None:
    for rank, slot in itertools.product(range(layout.num_slices), layout.slots):
        owned, local = layout.parameter_interval(slot, rank), layout.local_interval(slot, rank)
        part = layout.slice_interval(rank)
        assert local.numel == owned.numel
        assert local.stop <= layout.slice_numel
        if owned.numel:
            assert layout.slice_interval(rank).start + local.start == slot.offset + owned.start
        else:
            assert owned == Interval(0, 0)
            assert 0 <= local.start == local.stop <= part.numel


@given(some_layout())
def test_parameters_follow_each_other_in_every_slice_also_those_without_elements_there(
    layout: FlatLayout,
) -> None:
    alignment = max(1, 16 // layout.itemsize)
    for rank in range(layout.num_slices):
        found = [layout.local_interval(slot, rank) for slot in layout.slots]
        for one, other in itertools.pairwise(found):
            assert 0 <= other.start - one.stop < alignment


@given(some_layout())
def test_ranks_that_build_alone_build_the_same_layout(layout: FlatLayout) -> None:
    again = build(
        *(slot.shape for slot in layout.slots),
        itemsize=layout.itemsize,
        num_slices=layout.num_slices,
    )
    assert again == layout
    assert hash(again) == hash(layout)


def test_the_layout_drawn_in_the_docstring_is_what_is_built() -> None:
    layout = build((6,), (5,), itemsize=4, num_slices=2)
    assert (layout.padded_numel, layout.slice_numel, layout.padding_numel) == (16, 8, 5)
    assert [slot.offset for slot in layout.slots] == [0, 8]
    assert [owned_elements(layout, slot) for slot in layout.slots] == [
        [[0, 1, 2, 3, 4, 5], []],
        [[], [0, 1, 2, 3, 4]],
    ]


def test_a_parameter_across_two_ranks_is_cut_inside_a_row() -> None:
    layout = build((3,), (3, 3), itemsize=4, num_slices=2)
    slot = layout.slots[1]
    assert (slot.offset, layout.slice_numel) == (4, 8)
    assert [layout.parameter_interval(slot, rank) for rank in (0, 1)] == [
        Interval(0, 4),
        Interval(4, 9),
    ]
    assert [layout.local_interval(slot, rank) for rank in (0, 1)] == [
        Interval(4, 8),
        Interval(0, 5),
    ]


def test_a_scalar_belongs_to_one_rank_and_the_others_own_nothing() -> None:
    layout = build((), num_slices=3)
    assert owned_elements(layout, layout.slots[0]) == [[0], [], []]
    assert layout.slice_numel == 4


def test_parameters_without_elements_take_no_room_and_no_rank_owns_them() -> None:
    layout = build((4,), (0,), (3, 0), (4,), num_slices=2)
    assert [slot.offset for slot in layout.slots] == [0, 4, 4, 4]
    assert layout.padding_numel == 0
    assert (
        owned_elements(layout, layout.slots[1])
        == owned_elements(layout, layout.slots[2])
        == [[], []]
    )


def test_ranks_behind_the_last_parameter_own_a_slice_of_padding() -> None:
    layout = build((2,), num_slices=8)
    assert owned_elements(layout, layout.slots[0]) == [[0, 1], *[[]] * 7]
    assert layout.slice_interval(7) == Interval(28, 32)


def test_a_layout_of_no_parameters_is_empty_on_every_rank() -> None:
    layout = build(num_slices=4)
    assert (layout.numel, layout.padded_numel, layout.slice_numel) == (0, 0, 0)
    assert layout.slice_interval(3) == Interval(0, 0)


def test_a_single_rank_owns_every_parameter_whole() -> None:
    layout = build((5, 2), (3,), num_slices=1)
    assert [owned_elements(layout, slot) for slot in layout.slots] == [
        [list(range(10))],
        [list(range(3))],
    ]


@pytest.mark.parametrize("slice_rank", [-1, 2])
def test_a_rank_outside_the_shard_group_is_refused(slice_rank: int) -> None:
    layout = build((4,), num_slices=2)
    with pytest.raises(ValueError, match=rf"slice rank in \[0, 2\), found {slice_rank}"):
        layout.slice_interval(slice_rank)
    with pytest.raises(ValueError, match=rf"slice rank in \[0, 2\), found {slice_rank}"):
        layout.parameter_interval(layout.slots[0], slice_rank)


@pytest.mark.parametrize("num_slices", [0, -2])
def test_less_than_one_slice_is_refused(num_slices: int) -> None:
    with pytest.raises(ValueError, match=rf"at least one slice, found num_slices={num_slices}"):
        build((4,), num_slices=num_slices)


def test_names_without_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        FlatLayout.build(["weight", "bias"], [(2, 2)], itemsize=4, num_slices=2)


@pytest.mark.parametrize(
    ("offsets", "padded_numel", "message"),
    [
        ((0, 4), 9, "padded_numel that num_slices=2 divides, found 9"),
        ((0, 3), 16, "slot p1 starts at 3, before the end 4"),
        ((8, 0), 16, "slot p1 starts at 0, before the end 12"),
        ((0, 4), 6, "slots end at 8, behind padded_numel=6"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(
    offsets: tuple[int, int], padded_numel: int, message: str
) -> None:
    slots = tuple(
        ParameterSlot(fqn=f"p{index}", shape=(4,), offset=offset)
        for index, offset in enumerate(offsets)
    )
    with pytest.raises(ValueError, match=message):
        FlatLayout(itemsize=4, num_slices=2, slots=slots, padded_numel=padded_numel)
