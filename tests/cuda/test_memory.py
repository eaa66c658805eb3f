"""What the allocator has handed out is what the cost model says: at rest, and at the worst moment of a step.

This rank is the first of several whose peers do not exist, so every size is that of the real run.
"""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardeddp.config import CPUOffload, MixedPrecision
from support.deferred import recorded
from support.devices import DEVICE, ROWS, Setting, Stack, Training, alone, stack, without_peers

pytestmark = pytest.mark.timeout(120)

WIDTH = 2048
TOLERANCE = 0.05
LOWER = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
STRATEGIES = ("full_shard", "shard_grad_op", "shard_optimizer", "no_shard")
ACTIVATIONS = 100 * ROWS * WIDTH * 4
"""Bytes; all that five blocks keep for so few rows, several times over."""


@pytest.fixture(scope="module", params=[1, 8], ids=["alone", "of eight"])
def ranks(request: pytest.FixtureRequest, device: None) -> Iterator[int]:
    """Worlds of one real rank, and of one rank that has no peers."""
    with alone() if request.param == 1 else without_peers(request.param):
        yield request.param


def held() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(DEVICE)


def warm_up() -> None:
    """Let the libraries take what they keep: work space per thread and stream."""
    layer = nn.Linear(WIDTH, WIDTH, device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype)
        layer(
            torch.ones(ROWS, WIDTH, device=DEVICE, dtype=dtype, requires_grad=True)
        ).sum().backward()


def check_peak(setting: Setting) -> None:
    warm_up()
    before = held()
    training = Training(setting, stack(WIDTH))
    training.train(2)
    plan = training.plan()
    # What is not sharded has gradients of autograd, which are dropped after a step.
    dropped = plan.gradient_shard_nbytes if training.runtime.is_passthrough else 0
    assert abs(held() - before - plan.resting_nbytes + dropped) <= TOLERANCE * plan.peak_nbytes
    torch.cuda.reset_peak_memory_stats(DEVICE)
    training.train(1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    assert (
        plan.peak_nbytes * (1 - TOLERANCE)
        <= peak
        <= plan.peak_nbytes * (1 + TOLERANCE) + ACTIVATIONS
    ), (
        f"{peak:,} bytes at the peak, {plan.peak_nbytes:,} planned, {plan.resting_nbytes:,} of them at rest"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_peak_is_what_was_planned(ranks: int, strategy: str) -> None:
    check_peak(Setting(strategy=strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_where_parameters_are_gathered_in_half_the_bytes(ranks: int, strategy: str) -> None:
    check_peak(Setting(strategy=strategy, options=LOWER))


@pytest.mark.parametrize(
    "offload", [CPUOffload(params=True), CPUOffload(optimizer=True)], ids=["params", "optimizer"]
)
def test_what_is_offloaded_is_off_the_device(ranks: int, offload: CPUOffload) -> None:
    warm_up()
    before = held()
    training = Training(Setting(offload=offload), stack(WIDTH))
    training.train(2)
    plan = training.plan()
    assert plan.host_nbytes > 0
    assert abs(held() - before - plan.resting_nbytes) <= TOLERANCE * (
        plan.resting_nbytes + plan.host_nbytes
    )


def test_a_deferred_model_is_never_whole_on_the_device(ranks: int) -> None:
    deferred, recording = recorded(lambda: Stack(WIDTH))
    whole = sum(parameter.nbytes for parameter in deferred.parameters())
    largest = max(parameter.nbytes for parameter in deferred.parameters())
    before = held()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    training = Training(Setting(), deferred, recording=recording)
    torch.cuda.synchronize()
    added = torch.cuda.max_memory_allocated(DEVICE) - before
    shards = training.plan().main_shard_nbytes
    # Beside the shards one unit, whose buffer is made and released, and the values of one parameter on their way.
    unit = max(sum(p.nbytes for p in block.parameters()) for block in Stack(WIDTH).blocks)
    assert added <= shards + unit + 2 * largest
    assert ranks == 1 or added < whole
