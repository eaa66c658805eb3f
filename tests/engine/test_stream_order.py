"""A backward overlaps with reductions across replicas: streams of a device wait for no more than they have to.

That they wait for enough is what ``test_stream_races.py`` finds out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.comm import mesh
from shardeddp.comm.backends import NativeCollectives
from shardeddp.comm.streams import CudaStream
from shardeddp.plan.memory import WAITING_UNITS
from training import Sharding
from world import Worlds

pytestmark = pytest.mark.timeout(60)

LOG: list[tuple[str, str, str]] = []
NAMES = ("gathers", "reductions", "replicas", "copies in", "copies out")
COMPUTE = "compute"


class Stream:
    """Writes down what it is asked to wait for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        """What comes behind all that the other one has."""
        LOG.append((self.name, "waits for", other.name))

    def wait_event(self, event: "Event") -> None:
        """What comes behind what the event was recorded behind."""
        LOG.append((self.name, "waits for", event.recorded_on))


class Event:
    """Knows where it was recorded."""

    recorded_on = ""

    def record(self, stream: Stream) -> None:
        """On a stream."""
        self.recorded_on = stream.name


@contextmanager
def streams_that_log(size: int) -> Iterator[None]:
    """A rank of a world without peers, whose communication is issued as on a CUDA device."""
    current = [Stream(COMPUTE)]
    names = iter(NAMES)

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(next(names)))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(mesh, "make_stream", lambda _: CudaStream(torch.device("cuda", 0)))
        patch.setattr(mesh, "GlooCollectives", NativeCollectives)
        yield


def log_of(
    sharding: Sharding, size: int, micro_batches: int, drop_gradients: bool = False
) -> list[tuple[str, str, str]]:
    """What the streams are asked for in a step of a stack of units and the root."""
    with streams_that_log(size):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in sharding.units))
        runtime = sharding.apply(model)
        step(runtime, model, micro_batches)
        if drop_gradients:
            model.zero_grad()
        LOG.clear()
        step(runtime, model, micro_batches)
        return LOG.copy()


def step(runtime: Any, model: nn.Module, micro_batches: int) -> None:
    for micro_batch in range(micro_batches):
        runtime.sync_gradients = micro_batch == micro_batches - 1
        with runtime.step("training_step") as outputs:
            outputs.append(model(torch.ones(2, 8)).square().mean())
        outputs[0].backward()


UNITS = ("0", "1", "2", "3")


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_a_backward_of_few_units_waits_for_replicas_only_at_its_end(
    world: Worlds, micro_batches: int, split: bool
) -> None:
    sharding = Sharding(units=UNITS, strategy="hybrid_shard", shard_size=4, split=split)
    (log,) = world(1).run(log_of, sharding, 8, micro_batches)
    issued = [
        place for place, each in enumerate(log) if each == ("replicas", "waits for", "reductions")
    ]
    waited = [place for place, each in enumerate(log) if each == (COMPUTE, "waits for", "replicas")]
    assert len(issued) == len(waited) >= len(UNITS)
    assert max(issued) < min(waited)
    # Their memory is of the other stream, which is behind compute before it is released.
    assert all(("reductions", "waits for", COMPUTE) in log[place:] for place in waited)


@pytest.mark.parametrize("split", [False, True])
def test_no_more_than_some_reductions_wait_for_replicas_beside_the_gradient_shard(
    world: Worlds, split: bool
) -> None:
    units = tuple(map(str, range(12)))
    sharding = Sharding(units=units, strategy="hybrid_shard", shard_size=4, split=split)
    # Gradients are left from the step before, so what arrives is added to them, beside them.
    (log,) = world(1).run(log_of, sharding, 8, 1)
    waiting = most = 0
    for each in log:
        waiting += each == ("replicas", "waits for", "reductions")
        waiting -= each == (COMPUTE, "waits for", "replicas")
        most = max(most, waiting)
    assert waiting == 0
    assert most == WAITING_UNITS + 1


def test_reductions_that_arrive_in_the_gradient_shard_wait_for_nobody(world: Worlds) -> None:
    units = tuple(map(str, range(12)))
    sharding = Sharding(units=units, strategy="hybrid_shard", shard_size=4)
    (log,) = world(1).run(log_of, sharding, 8, 1, True)
    issued = [
        place for place, each in enumerate(log) if each == ("replicas", "waits for", "reductions")
    ]
    assert len(issued) >= len(units)
    assert max(issued) < log.index((COMPUTE, "waits for", "replicas"))
    # Once each, and not again for each unit that is reduced after them.
    assert log.count((COMPUTE, "waits for", "reductions")) == len(issued)
