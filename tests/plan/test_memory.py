"""The cost model agrees with figures worked out by hand, and moves with its knobs in the right direction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.memory import GroupCost, MemoryPlan, plan_memory

pytestmark = pytest.mark.timeout(30)
bounded = settings(deadline=None, max_examples=200, derandomize=True)


def group(*numels: int, shard_size: int = 2, itemsize: int = 4, trainable: bool = True) -> GroupCost:
    """The flat buffer of 1-D parameters with so many elements."""
    names = [f"p{index}" for index in range(len(numels))]
    shapes = [(numel,) for numel in numels]
    layout = FlatLayout.build(names, shapes, dtype="any", itemsize=itemsize, shard_size=shard_size)
    return GroupCost(layout=layout, trainable=trainable)


@st.composite
def some_group(draw: st.DrawFn, shard_size: int) -> GroupCost:
    """One flat buffer of up to three parameters."""
    numels = draw(st.lists(st.integers(0, 60), max_size=3))
    itemsize = draw(st.sampled_from([2, 4]))
    return group(*numels, shard_size=shard_size, itemsize=itemsize, trainable=draw(st.booleans()))


@st.composite
def some_units(draw: st.DrawFn) -> list[list[GroupCost]]:
    """Units of up to two flat buffers each, all over the same number of ranks."""
    shard_size = draw(st.integers(1, 4))
    return draw(st.lists(st.lists(some_group(shard_size), max_size=2), max_size=6))


def test_a_flat_buffer_costs_its_padded_bytes_whole_and_a_share_of_them_per_rank() -> None:
    # 10 elements, padded to 16 so that 2 ranks own 8 each; 4 bytes per element.
    cost = group(10)
    assert (cost.full_nbytes, cost.shard_nbytes) == (64, 32)


def test_a_flat_buffer_of_one_rank_is_its_own_slice_and_costs_nothing_to_unshard() -> None:
    cost = group(10, shard_size=1)
    assert (cost.full_nbytes, cost.shard_nbytes) == (0, 48)


def test_a_plan_of_root_and_blocks_agrees_with_the_figures_worked_out_by_hand() -> None:
    # Whole buffers of 64, 128, 256 and 192 bytes over 2 ranks; 640 bytes in all.
    units = [[group(16)], [group(32)], [group(64)], [group(48)]]
    assert plan_memory(units, prefetch=1) == MemoryPlan(
        main_shard_nbytes=320,
        gradient_shard_nbytes=320,
        optimizer_nbytes=2 * 320,
        # The root unit and its gradients, the two largest of the others with theirs, and half of 256 that arrive.
        in_flight_nbytes=2 * 64 + 2 * (256 + 192) + 128,
    )


def test_resting_and_peak_bytes_are_the_sums_of_their_parts() -> None:
    plan = MemoryPlan(main_shard_nbytes=1, gradient_shard_nbytes=20, optimizer_nbytes=300, in_flight_nbytes=4000)
    assert plan.resting_nbytes == 321
    assert plan.peak_nbytes == 4321


def test_frozen_parameters_are_gathered_but_have_neither_gradients_nor_optimizer_states() -> None:
    # A unit of 128 trainable and 512 frozen bytes, behind a frozen root unit of 64.
    units = [[group(16, trainable=False)], [group(32), group(128, trainable=False)]]
    assert plan_memory(units, prefetch=0) == MemoryPlan(
        main_shard_nbytes=352, gradient_shard_nbytes=64, optimizer_nbytes=128, in_flight_nbytes=64 + 640 + 128
    )


def test_a_unit_of_two_dtypes_counts_both_by_their_own_element_sizes() -> None:
    # 32 float32 elements are 128 bytes, 32 bfloat16 elements 64.
    plan = plan_memory([[group(32), group(32, itemsize=2)]], prefetch=1)
    assert (plan.main_shard_nbytes, plan.gradient_shard_nbytes) == (96, 96)
    assert plan.in_flight_nbytes == 192 + 2 * 192  # unsharded, and its gradients twice while they are packed


def test_a_root_unit_alone_is_in_flight_once_whatever_the_prefetch() -> None:
    assert [plan_memory([[group(16)]], prefetch=depth).in_flight_nbytes for depth in (0, 1, 5)] == [64 + 2 * 64] * 3


def test_a_large_root_unit_counts_its_gradients_and_is_never_prefetched_twice() -> None:
    plan = plan_memory([[group(256)], [group(16)]], prefetch=1)
    assert plan.in_flight_nbytes == 1024 + 2 * 1024 + 64  # its gradients are packed while the other's still wait


def test_one_rank_has_everything_at_rest_and_nothing_in_flight() -> None:
    plan = plan_memory([[group(16, shard_size=1)], [group(32, shard_size=1)]], prefetch=1)
    assert plan == MemoryPlan(
        main_shard_nbytes=192, gradient_shard_nbytes=192, optimizer_nbytes=384, in_flight_nbytes=0
    )


@pytest.mark.parametrize("units", [[], [[]], [[], []], [[group()]]])
def test_a_model_without_parameters_costs_nothing(units: list[list[GroupCost]]) -> None:
    assert plan_memory(units, prefetch=1).peak_nbytes == 0


@pytest.mark.parametrize(("states", "expected"), [(0, 0), (1, 32), (2, 64), (3, 96)])
def test_optimizer_states_are_counted_per_trainable_element(states: int, expected: int) -> None:
    assert plan_memory([[group(16)]], prefetch=1, states_per_element=states).optimizer_nbytes == expected


@bounded
@given(some_units())
def test_a_deeper_prefetch_never_costs_less_and_ends_with_every_unit_in_flight(units: list[list[GroupCost]]) -> None:
    peaks = [plan_memory(units, prefetch=depth).in_flight_nbytes for depth in range(len(units) + 2)]
    assert peaks == sorted(peaks)
    parameters = sum(cost.full_nbytes for unit in units for cost in unit)
    gradients = sum(cost.gradient_nbytes for unit in units for cost in unit)
    assert parameters <= peaks[-1] <= parameters + 2 * gradients


@pytest.mark.parametrize("ranks", [2, 4])
def test_contributions_arrive_beside_the_packed_gradients_unless_the_transport_adds_them_up(ranks: int) -> None:
    units = [[group(64, shard_size=ranks)] for _ in range(4)]
    staged, added = (plan_memory(units, prefetch=1, staged=staged).in_flight_nbytes for staged in (True, False))
    assert staged - added == 256 * (ranks - 1) // ranks


def test_gradients_of_one_inner_unit_have_none_of_another_in_flight() -> None:
    plan = plan_memory([[group(16)], [group(64)]], prefetch=1)
    assert plan.in_flight_nbytes == 2 * 64 + 2 * 256


@bounded
@given(some_units(), st.integers(0, 3))
def test_the_order_of_the_inner_units_does_not_matter(units: list[list[GroupCost]], prefetch: int) -> None:
    backwards = [*units[:1], *reversed(units[1:])]
    assert plan_memory(backwards, prefetch=prefetch) == plan_memory(units, prefetch=prefetch)


@bounded
@given(some_units())
def test_slices_of_all_ranks_add_up_to_the_whole_model(units: list[list[GroupCost]]) -> None:
    groups = [cost for unit in units for cost in unit]
    padded = sum(cost.layout.padded_numel * cost.layout.itemsize for cost in groups)
    ranks = groups[0].layout.shard_size if groups else 1
    assert plan_memory(units, prefetch=1).main_shard_nbytes * ranks == padded
