"""Nothing is used before it has arrived and nothing is freed before it has been used, however late a stream is.

Collectives are slow here: memory is full of NaN until, after a pause on the stream, the values are there. Or compute is
slow: the host is far ahead of it, has released what compute still is to read, and gathers other units into the same
memory. One rank that gathers in another dtype than that of its main shard gathers for real, so values can be compared
with the plain model's. Lanes that leave out one wait show that the pauses are long enough to be noticed.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardeddp.comm import CollectiveHandle, StreamHandle
from shardeddp.comm.collectives import Collectives, ReduceKind
from shardeddp.comm.mesh import Mesh
from shardeddp.comm.streams import CommStream, CudaStream
from shardeddp.config import CPUOffload, MixedPrecision
from support.devices import DEVICE, Setting, Stack, Training, stack, train_plain

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_rank")]

PAUSE = 20_000_000
"""Cycles: some 10 ms, in which the host enqueues several units."""
STEPS = 3
WIDER = MixedPrecision(param_dtype=torch.float64, reduce_dtype=torch.float64)
"""Gathered and reduced in another dtype than that of the main shards, without losing digits."""
SETTINGS = {
    "wider": Setting(options=WIDER),
    "wider, kept for backward": Setting(strategy="shard_grad_op", options=WIDER),
    "from the host": Setting(offload=CPUOffload(params=True)),
    "wider, from the host": Setting(options=WIDER, offload=CPUOffload(params=True)),
}


class SlowCollectives(Collectives):
    """Those of a group of one rank, after a pause in which everything they write to is NaN."""

    def all_gather_(self, buffer: torch.Tensor) -> CollectiveHandle:
        return self._late(buffer, buffer)

    def all_gather_uneven_(self, pieces: object) -> CollectiveHandle:
        return CollectiveHandle()

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> CollectiveHandle:
        return self._late(output, buffer)

    def all_reduce_(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> CollectiveHandle:
        return self._late(tensor, tensor)

    def all_to_all(self, arriving: object, leaving: object) -> CollectiveHandle:
        return CollectiveHandle()

    def broadcast_(self, tensor: torch.Tensor, source: int) -> CollectiveHandle:
        return CollectiveHandle()

    def _late(self, output: torch.Tensor, values: torch.Tensor) -> CollectiveHandle:
        kept = values.clone()
        values.fill_(math.nan)
        output.fill_(math.nan)
        pause()
        output.copy_(kept)
        return CollectiveHandle(keep=(values,))


class UsesBeforeArrival(CudaStream):
    """A stream whose handles wait for nothing."""

    def issue(self, action: Callable[[], CollectiveHandle]) -> StreamHandle:
        super().issue(action)
        return StreamHandle(CollectiveHandle(), None)


class FillsBeforeUse(CudaStream):
    """A stream that does not queue up behind compute."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._own = torch.cuda.Stream(device)

    def issue(self, action: Callable[[], CollectiveHandle]) -> StreamHandle:
        with torch.cuda.stream(self._own):
            pending = action()
        done = torch.cuda.Event()
        done.record(self._own)
        return StreamHandle(pending, done)


class LateHandle(StreamHandle):
    """What follows on compute's stream is late, once the collective is there."""

    def __init__(self, handle: StreamHandle) -> None:
        super().__init__(CollectiveHandle(), None)
        self._handle = handle

    def wait(self) -> None:
        self._handle.wait()
        pause()


class PausesOnArrival(CudaStream):
    """A stream whose handles hold compute up."""

    def issue(self, action: Callable[[], CollectiveHandle]) -> StreamHandle:
        return LateHandle(super().issue(action))


def pause() -> None:
    torch.cuda._sleep(PAUSE)


def slow_mesh(setting: Setting, stream: Callable[[torch.device], CommStream] | None = None) -> Mesh:
    mesh = setting.mesh()
    mesh.gather = mesh.regather = SlowCollectives([0], 0, mesh.traffic)
    mesh.reduce = SlowCollectives([0], 0, mesh.traffic)
    if stream is not None:
        mesh.gather_stream, mesh.reduce_stream = stream(DEVICE), stream(DEVICE)
    return mesh


def slow_compute(model: Stack) -> Stack:
    """The same; before it reads a block's parameters, in forward and in backward, the device pauses."""

    def before(module: nn.Module, *_: object) -> None:
        pause()

    for block in model.blocks:
        for layer in block.children():
            layer.register_forward_pre_hook(before)
            layer.register_full_backward_pre_hook(before)
    return model


def losses(setting: Setting, mesh: Mesh, model: Stack, micro_batches: int = 1) -> list[float]:
    return Training(setting, model, mesh).train(STEPS, micro_batches)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_is_used_before_it_has_arrived(name: str, micro_batches: int) -> None:
    setting = SETTINGS[name]
    found = losses(setting, slow_mesh(setting), stack(), micro_batches)
    torch.testing.assert_close(
        found, train_plain(STEPS, micro_batches=micro_batches), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_is_freed_before_it_has_been_used(name: str, micro_batches: int) -> None:
    setting = SETTINGS[name]
    found = losses(setting, slow_mesh(setting), slow_compute(stack()), micro_batches)
    torch.testing.assert_close(
        found, train_plain(STEPS, micro_batches=micro_batches), rtol=1e-4, atol=0
    )


def test_a_stream_whose_handles_wait_for_nothing_is_noticed() -> None:
    setting = SETTINGS["wider"]
    found = losses(setting, slow_mesh(setting, UsesBeforeArrival), stack())
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(found, train_plain(STEPS), rtol=1e-4, atol=0)


def test_a_stream_that_does_not_queue_up_behind_compute_is_noticed() -> None:
    setting = SETTINGS["wider"]
    found = losses(setting, slow_mesh(setting, FillsBeforeUse), slow_compute(stack()))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(found, train_plain(STEPS), rtol=1e-4, atol=0)


def test_streams_do_not_wait_for_the_host() -> None:
    """The opposite mistake: a stream that blocks the host overlaps with nothing."""
    setting = SETTINGS["wider"]
    training = Training(setting, stack(), slow_mesh(setting))
    training.step(0)
    torch.cuda.synchronize()
    training.step(1)
    assert not torch.cuda.current_stream().query(), (
        "the device is done before the host has returned"
    )
    torch.cuda.synchronize()


def test_gradients_on_the_host_are_there_when_the_backward_returns() -> None:
    """Accumulated ones are added on compute's stream, and nothing on the host waits for that by itself."""
    setting = SETTINGS["from the host"]
    mesh = setting.mesh()
    mesh.reduce_stream = PausesOnArrival(DEVICE)
    training = Training(setting, stack(), mesh)
    for micro_batch in range(2):
        training.runtime.sync_gradients = micro_batch == 1
        with training.runtime.step("training_step") as outputs:
            x = torch.ones(4, 8, device=DEVICE)
            outputs.append(training.model(x).square().mean())
        outputs[0].backward()
    gradients = [
        parameter.grad.to_local()
        for parameter in training.model.parameters()
        if parameter.grad is not None
    ]
    found = [gradient.clone() for gradient in gradients]
    torch.cuda.synchronize()
    assert len(found) == len(list(training.model.parameters()))
    assert all(each.is_cpu for each in found)
    torch.testing.assert_close(found, gradients, rtol=0, atol=0)
