"""On one device every strategy, precision and offload trains like the plain model; deferred init fills shards."""

import pytest
import torch
from torch import nn

from shardeddp.config import CPUOffload
from shardeddp.tensor.shard_tensor import ShardTensor
from support.deferred import recorded
from support.devices import DEVICE, Setting, Stack, Training, stack, train_plain
from training import STRATEGIES, full

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_rank")]

STEPS = 5
TOLERANCES = {None: 1e-5, torch.bfloat16: 2e-2}
"""Relative, of a loss. In bf16 a product of parameters and inputs has eight bits, and is summed up in other blocks."""
OFFLOADS = {"params": CPUOffload(params=True), "optimizer": CPUOffload(optimizer=True)}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_as_the_plain_model_does(
    strategy: str, autocast: torch.dtype | None, micro_batches: int
) -> None:
    training = Training(Setting(strategy=strategy, autocast=autocast), stack())
    expected = train_plain(STEPS, autocast, micro_batches)
    torch.testing.assert_close(
        training.train(STEPS, micro_batches), expected, rtol=TOLERANCES[autocast], atol=0
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_training_is_the_plain_one(
    offload: str, autocast: torch.dtype | None, micro_batches: int
) -> None:
    training = Training(Setting(autocast=autocast, offload=OFFLOADS[offload]), stack())
    expected = train_plain(STEPS, autocast, micro_batches)
    torch.testing.assert_close(
        training.train(STEPS, micro_batches), expected, rtol=TOLERANCES[autocast], atol=0
    )


def states_of(training: Training) -> list[torch.Tensor]:
    """The local states of all parameters that have as many elements as these."""
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    return [value.to_local() for value in states if isinstance(value, ShardTensor)]


def test_offloaded_parameters_live_in_pinned_memory_of_the_host() -> None:
    training = Training(Setting(offload=OFFLOADS["params"]), stack())
    training.train(2)
    shards = [
        group.main_shard
        for progress in training.runtime.progresses
        for group in progress.unit.groups
    ]
    gradients = [
        group.gradients.shard
        for progress in training.runtime.progresses
        for group in progress.unit.groups
    ]
    flat = [*shards, *(gradient for gradient in gradients if gradient is not None)]
    assert len(flat) == 2 * len(shards)
    assert all(each.is_cpu and each.is_pinned() for each in flat)
    states = states_of(training)
    assert len(states) == 2 * len(list(training.model.parameters()))
    assert all(state.is_cpu for state in states)


def test_parameters_show_the_device_that_they_compute_on() -> None:
    training = Training(Setting(offload=OFFLOADS["params"]), stack())
    assert {parameter.device for parameter in training.model.parameters()} == {DEVICE}


def test_offloaded_states_live_on_the_host_and_parameters_do_not() -> None:
    training = Training(Setting(offload=OFFLOADS["optimizer"]), stack())
    training.train(2)
    states = states_of(training)
    assert len(states) == 2 * len(list(training.model.parameters()))
    assert all(state.is_cpu for state in states)
    assert all(
        each.to_local().device == DEVICE
        for each in training.model.parameters()
        if isinstance(each, ShardTensor)
    )


def test_deferred_parameters_get_the_values_of_an_eager_init_on_the_device() -> None:
    torch.manual_seed(3)
    expected = Stack()
    torch.manual_seed(3)
    deferred, recording = recorded(Stack)
    training = Training(Setting(), deferred, recording=recording)
    for (name, found), values in zip(
        training.model.named_parameters(), expected.parameters(), strict=True
    ):
        assert isinstance(found, ShardTensor)
        assert found.to_local().device == DEVICE, name
        torch.testing.assert_close(full(found).cpu(), values.detach(), rtol=0, atol=0)
    assert all(torch.isfinite(torch.tensor(training.train(2))))


def test_buffers_that_were_deferred_can_be_moved_to_the_device() -> None:
    class WithBuffer(Stack):
        def __init__(self) -> None:
            super().__init__(64)
            self.statistics = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.statistics(x))

    deferred, recording = recorded(WithBuffer)
    training = Training(Setting(), deferred, recording=recording)
    deferred.statistics.to(DEVICE)  # as the strategy does it with whatever is no parameter
    assert all(torch.isfinite(torch.tensor(training.train(2))))
    assert deferred.statistics.running_mean is not None
    assert deferred.statistics.running_mean.device == DEVICE
