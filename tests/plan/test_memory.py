"""The cost model agrees with figures worked out by hand, and moves with its knobs in the right direction."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.memory import GroupCost, MemoryPlan, plan_memory
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES

pytestmark = pytest.mark.timeout(30)


def group(
    *numels: int,
    shard_size: int = 2,
    itemsize: int = 4,
    trainable: bool = True,
    on_host: bool = False,
) -> GroupCost:
    """The flat buffer of 1-D parameters with so many elements."""
    names = [f"p{index}" for index in range(len(numels))]
    shapes = [(numel,) for numel in numels]
    layout = FlatLayout.build(names, shapes, itemsize=itemsize, num_slices=shard_size)
    return GroupCost(
        plan=BufferPlan(layout=layout, on_host=on_host),
        trainable=trainable,
        main_itemsize=itemsize,
        param_itemsize=itemsize,
        reduce_itemsize=itemsize,
    )


def mixed(numel: int, shard_size: int = 2) -> GroupCost:
    """The flat buffers of one float32 parameter that is gathered in bfloat16 and reduced in float32."""
    layout = FlatLayout.build(["p"], [(numel,)], itemsize=2, num_slices=shard_size)
    return GroupCost(
        plan=BufferPlan(layout=layout, casts_params=True),
        trainable=True,
        main_itemsize=4,
        param_itemsize=2,
        reduce_itemsize=4,
    )


def plan(
    units: Sequence[Sequence[GroupCost]],
    strategy: str = "full_shard",
    prefetch: int = 1,
    **options: Any,
) -> MemoryPlan:
    """The plan under one of the strategies."""
    return plan_memory(units, SHARDING_STRATEGIES[strategy], prefetch=prefetch, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param_itemsize": 2}, "param_itemsize=4 without a cast, found 2"),
        ({"reduce_itemsize": 8}, "reduce_itemsize=4 without a cast, found 8"),
        ({"replicas": 4, "splitting_replicas": 2}, "all 4 replicas split a shard or none does"),
        (
            {"replicas": 3, "splitting_replicas": 3},
            "divide the 2 slices, found splitting_replicas=3",
        ),
    ],
)
def test_a_cost_that_is_at_odds_with_its_plan_is_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(group(10), **changes)


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
    assert (cost.gathered_nbytes, cost.slice_nbytes) == (64, 32)


def test_a_flat_buffer_of_one_rank_is_its_own_slice_and_costs_nothing_to_unshard() -> None:
    cost = group(10, shard_size=1)
    assert (cost.gathered_nbytes, cost.slice_nbytes) == (0, 48)


def test_a_plan_of_root_and_blocks_agrees_with_the_figures_worked_out_by_hand() -> None:
    # Whole buffers of 64, 128, 256 and 192 bytes over 2 ranks; 640 bytes in all.
    units = [[group(16)], [group(32)], [group(64)], [group(48)]]
    assert plan(units) == MemoryPlan(
        main_shard_nbytes=320,
        gradient_shard_nbytes=320,
        optimizer_nbytes=2 * 320,
        # The root unit and its gradients; the unit of 256 at its last gradient and the one of 128 gathered ahead; the
        # packed gradients of the one of 192 behind it, and the half of them that arrive.
        in_flight_nbytes=2 * 64 + 256 + (256 + 128) + (192 + 96),
    )


def test_resting_and_peak_bytes_are_the_sums_of_their_parts() -> None:
    planned = MemoryPlan(
        main_shard_nbytes=1, gradient_shard_nbytes=20, optimizer_nbytes=300, in_flight_nbytes=4000
    )
    assert planned.resting_nbytes == 321
    assert planned.peak_nbytes == 4321


def test_frozen_parameters_are_gathered_but_have_neither_gradients_nor_optimizer_states() -> None:
    # A unit of 128 trainable and 512 frozen bytes, behind a frozen root unit of 64.
    units = [[group(16, trainable=False)], [group(32), group(128, trainable=False)]]
    assert plan(units, prefetch=0) == MemoryPlan(
        main_shard_nbytes=352,
        gradient_shard_nbytes=64,
        optimizer_nbytes=128,
        in_flight_nbytes=64 + 640 + 128,
    )


def test_a_unit_of_two_dtypes_counts_both_by_their_own_element_sizes() -> None:
    # 32 float32 elements are 128 bytes, 32 bfloat16 elements 64.
    planned = plan([[group(32), group(32, itemsize=2)]], prefetch=1)
    assert (planned.main_shard_nbytes, planned.gradient_shard_nbytes) == (96, 96)
    assert (
        planned.in_flight_nbytes == 192 + 2 * 192
    )  # unsharded, and its gradients twice while they are packed


def test_a_root_unit_alone_is_in_flight_once_whatever_the_prefetch() -> None:
    assert [plan([[group(16)]], prefetch=depth).in_flight_nbytes for depth in (0, 1, 5)] == [
        64 + 2 * 64
    ] * 3


def test_a_large_root_unit_counts_its_gradients_and_is_never_prefetched_twice() -> None:
    planned = plan([[group(256)], [group(16)]], prefetch=1)
    assert (
        planned.in_flight_nbytes == 1024 + 2 * 1024 + 64
    )  # its gradients are packed while the other's still wait


def test_one_rank_has_everything_at_rest_and_nothing_in_flight_but_gradients() -> None:
    units = [[group(16, shard_size=1)], [group(32, shard_size=1)], [group(24, shard_size=1)]]
    assert plan(units) == MemoryPlan(
        main_shard_nbytes=288,
        gradient_shard_nbytes=288,
        optimizer_nbytes=576,
        in_flight_nbytes=64 + 128,
    )


def test_parameters_that_stay_until_the_backward_are_all_there_when_it_begins() -> None:
    units = [[group(16)], [group(32)], [group(64)], [group(48)]]
    planned = plan(units, "shard_grad_op")
    # All of them, with the gradients of the root unit and of the unit at work; less of them at each later moment.
    assert planned.in_flight_nbytes == max(640 + 64 + 192, 64 + 128 + 256 + 64 + 256 + 192 + 96)
    assert replace(planned, in_flight_nbytes=0) == replace(plan(units), in_flight_nbytes=0)


def test_parameters_that_are_never_resharded_rest_beside_the_shards() -> None:
    units = [[group(16)], [group(32)], [group(64)], [group(48)]]
    planned = plan(units, "shard_optimizer")
    assert planned.retained_nbytes == 640
    assert planned.in_flight_nbytes == 64 + 256 + 192 + 96


def test_gradients_that_accumulate_unsharded_are_all_in_flight_with_the_one_that_is_packed() -> (
    None
):
    units = [[group(16)], [group(32)], [group(64)], [group(48)]]
    assert plan(units, "shard_optimizer", accumulates=True).in_flight_nbytes == (640 + 256 + 96)
    assert plan(units, "full_shard", accumulates=True) == plan(units, "full_shard")


def test_sums_that_replicas_have_not_shared_yet_are_in_flight_once_more() -> None:
    units = [[replace(group(numel), replicas=2)] for numel in (16, 32, 64, 48)]
    accumulated, alone = (plan(units, "hybrid_shard", accumulates=it) for it in (True, False))
    # A shard of everything that is trained.
    assert accumulated.in_flight_nbytes == alone.in_flight_nbytes + 320


def test_gathering_in_half_the_bytes_halves_the_unsharded_parameters_and_not_the_packed_gradients() -> (
    None
):
    units = [[mixed(16)], [mixed(32)], [mixed(64)], [mixed(48)]]
    planned = plan(units)
    assert (planned.main_shard_nbytes, planned.gradient_shard_nbytes) == (320, 320)
    assert planned.in_flight_nbytes == 2 * 32 + 128 + (128 + 64) + (192 + 96)


def test_what_is_offloaded_is_on_the_host_and_not_on_the_device() -> None:
    units = [[group(16)], [group(32)]]
    on_device = plan(units)
    states = plan(units, offload_optimizer=True)
    # Pinned blocks are powers of two: 32 + 64 for 96 bytes in two slices.
    assert (states.optimizer_nbytes, states.host_nbytes) == (0, on_device.optimizer_nbytes + 2 * 96)
    assert states.peak_nbytes == on_device.peak_nbytes - on_device.optimizer_nbytes
    everything = plan([[group(16, on_host=True)], [group(32, on_host=True)]])
    assert (everything.resting_nbytes, everything.host_nbytes) == (0, on_device.resting_nbytes)
    odd = plan([[group(24, on_host=True)]])
    assert odd.host_nbytes == plan([[group(24)]]).resting_nbytes + 2 * (64 - 48)


def test_a_model_on_the_host_is_on_the_device_once_if_it_is_never_resharded() -> None:
    units = [[group(numel, shard_size=1, on_host=True)] for numel in (16, 32, 64)]
    everything = plan(units, "no_shard", needs_receive_buffer=False)
    assert everything.retained_nbytes == everything.resting_nbytes == 64 + 128 + 256
    # The root's gradients twice while they are packed, the next unit's, and all averages on their
    # way to the host.
    assert everything.in_flight_nbytes == 2 * 64 + 128 + (64 + 128 + 256)


@pytest.mark.parametrize("units", [[], [[]], [[], []], [[group()]]])
def test_a_model_without_parameters_costs_nothing(units: list[list[GroupCost]]) -> None:
    assert plan(units, prefetch=1).peak_nbytes == 0


@pytest.mark.parametrize(("states", "expected"), [(0, 0), (1, 32), (2, 64), (3, 96)])
def test_optimizer_states_are_counted_per_trainable_element(states: int, expected: int) -> None:
    assert plan([[group(16)]], prefetch=1, states_per_element=states).optimizer_nbytes == expected


@given(some_units())
def test_a_deeper_prefetch_never_costs_less_and_ends_with_every_unit_in_flight(
    units: list[list[GroupCost]],
) -> None:
    peaks = [plan(units, prefetch=depth).in_flight_nbytes for depth in range(len(units) + 2)]
    assert peaks == sorted(peaks)
    parameters = sum(cost.gathered_nbytes for unit in units for cost in unit)
    gradients = sum(cost.gradient_nbytes for unit in units for cost in unit)
    assert parameters <= peaks[-1] <= parameters + 2 * gradients


@pytest.mark.parametrize("ranks", [2, 4])
def test_contributions_arrive_beside_the_packed_gradients_unless_the_transport_adds_them_up(
    ranks: int,
) -> None:
    units = [[group(64, shard_size=ranks)] for _ in range(4)]
    needs_receive_buffer, added = (
        plan(units, prefetch=1, needs_receive_buffer=needs_receive_buffer).in_flight_nbytes
        for needs_receive_buffer in (True, False)
    )
    assert needs_receive_buffer - added == 256 * (ranks - 1) // ranks


def test_gradients_of_one_inner_unit_have_none_of_another_in_flight() -> None:
    planned = plan([[group(16)], [group(64)]], prefetch=1)
    assert planned.in_flight_nbytes == 2 * 64 + 2 * 256


@given(some_units())
def test_slices_of_all_ranks_add_up_to_the_whole_model(units: list[list[GroupCost]]) -> None:
    groups = [cost for unit in units for cost in unit]
    padded = sum(cost.layout.padded_numel * cost.layout.itemsize for cost in groups)
    ranks = groups[0].layout.num_slices if groups else 1
    assert plan(units, prefetch=1).main_shard_nbytes * ranks == padded
