"""All ranks issue the collectives of a communicator in one order, as NCCL needs it, and those of all communicators.

A rank notes (communicator, kind, bytes) of what it issues. Two ranks are compared on all communicators that both are
in: the order between communicators counts, too, for their kernels may wait for each other on one device. Streams are
virtual ones, as on a device, because collectives that follow on others are issued at once there.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.comm import CollectiveHandle, mesh
from shardeddp.comm.backends import GlooCollectives
from shardeddp.comm.streams import CudaStream
from support.race_scenarios import Scenario, check, covering
from support.stream_races import DEVICE, Checker, Issued, VirtualEvent, issued_in
from training import Sharding
from world import Worlds

pytestmark = pytest.mark.timeout(120)


def assert_same_order(logs: Mapping[int, Sequence[Issued]]) -> None:
    """Each pair of ranks issues the same in communicators that both are in; logs by rank."""
    for one, other in combinations(logs, 2):
        mine, theirs = (
            [it for it in logs[rank] if {one, other} <= {*it.ranks}] for rank in (one, other)
        )
        assert mine, f"ranks {one} and {other} have issued nothing together"
        for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            assert told(a) == told(b), f"{place}. of ranks {one} and {other}"
            assert a.transfers.get((other, True)) == b.transfers.get((one, False))
            assert a.transfers.get((other, False)) == b.transfers.get((one, True))
        assert len(mine) == len(theirs), f"ranks {one} and {other}"


def told(issued: Issued) -> tuple[str, str, int]:
    """What has to be the same."""
    return issued.communicator, issued.kind, issued.nbytes


# -- Ranks that exist, and may use different units

LOG: list[Issued] = []


def ordered(kind: str, nbytes: Callable[..., int]) -> Callable[..., CollectiveHandle]:
    """A collective that is done when it returns, as one whose order a stream keeps, and noted."""
    collective = getattr(GlooCollectives, kind)

    def issue(self: Any, *arguments: Any) -> CollectiveHandle:
        LOG.append(issued_in(self._group, kind, nbytes(*arguments)))
        collective(self, *arguments).wait()
        return CollectiveHandle()

    return issue


class OrderedCollectives(GlooCollectives):
    """Those of gloo in the order of a stream."""

    all_gather_ = ordered("all_gather_", lambda buffer: buffer.nbytes)
    all_gather_uneven_ = ordered(
        "all_gather_uneven_", lambda pieces: sum(it.nbytes for it in pieces)
    )
    reduce_scatter = ordered("reduce_scatter", lambda output, buffer: buffer.nbytes)
    all_reduce_ = ordered("all_reduce_", lambda tensor, *_: tensor.nbytes)
    broadcast_ = ordered("broadcast_", lambda tensor, source: tensor.nbytes)


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Virtual streams over gloo."""
    checker = Checker()
    LOG.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", checker.make_stream)
        patch.setattr(torch.cuda, "Event", lambda *_: VirtualEvent(checker))
        patch.setattr(torch.cuda, "current_stream", lambda *_: checker.current)
        patch.setattr(torch.cuda, "stream", checker.on)
        patch.setattr(mesh, "make_stream", lambda _: CudaStream(DEVICE))
        patch.setattr(mesh, "GlooCollectives", OrderedCollectives)
        yield


class Layers(nn.Module):
    """Layers of which a rank leaves some out."""

    def __init__(self, uneven: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.output = nn.Linear(8, 8)
        self.uneven = uneven

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Shape (rows, 8) to the same."""
        for index, layer in enumerate(self.layers):
            if not self.uneven or (dist.get_rank() + step + index) % 3:
                x = layer(x).relu()
        return self.output(x)


SHARDINGS = {
    "full_shard": Sharding(),
    "hybrid_shard": Sharding(strategy="hybrid_shard", shard_size=2),
    "hybrid_shard, world": Sharding(strategy="hybrid_shard", shard_size=2, split=True),
    "hpZ": Sharding(regather=2),
    "shard_grad_op": Sharding(strategy="shard_grad_op"),
    "shard_optimizer": Sharding(strategy="shard_optimizer"),
    "no_shard": Sharding(strategy="no_shard"),
}


def train(name: str, uneven: bool, declared: bool) -> list[Issued]:
    """Three steps of two micro-batches; what this rank has issued.

    Where ranks use the same units, one of their parameters is used outside of it, too.
    """
    warnings.simplefilter("ignore")

    with as_on_a_device():
        sharding = replace(
            SHARDINGS[name], units=("layers.0", "layers.1", "layers.2"), uneven=declared
        )
        model = Layers(uneven)
        runtime = sharding.apply(model)
        for step in range(3):
            for micro_batch in range(2):
                runtime.sync_gradients = micro_batch == 1
                with runtime.step("training_step") as outputs:
                    loss = model(torch.ones(2, 8), 2 * step + micro_batch).square().mean()
                    if not uneven:
                        weight: Any = model.layers[0].weight
                        loss = loss + weight.square().sum()
                    outputs.append(loss)
                outputs[0].backward()
            model.zero_grad()
        return LOG.copy()


@pytest.mark.loop(1)
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.torture)])
@pytest.mark.parametrize("name", SHARDINGS)
@pytest.mark.parametrize(
    ("uneven", "declared"),
    [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.slow)],
)
def test_ranks_issue_in_one_order(
    world: Worlds, ranks: int, name: str, uneven: bool, declared: bool
) -> None:
    logs = world(ranks).run(train, name, uneven, declared)
    if not uneven and name in ("full_shard", "hybrid_shard, world", "hpZ"):
        assert any(it.kind == "all_gather_uneven_" for it in logs[0])
    assert_same_order(dict(enumerate(logs)))


# -- Ranks that do not exist, under the Trainer


def logs_of(scenario: Scenario) -> dict[int, list[Issued]]:
    """What ranks issue, one after the other: the first two and the last two."""
    dist.destroy_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = (0, 1, scenario.ranks - 2, scenario.ranks - 1)
        return {rank: check(scenario, rank).collectives for rank in ranks}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.torture)])
# Ranks that do not exist cannot agree on an overflow of float16, and a rank that has one skips its step.
@pytest.mark.parametrize(
    "scenario", [it for it in covering(2)[:8] if it.precision != "16-mixed"], ids=str
)
def test_ranks_issue_in_one_order_under_the_trainer(
    world: Worlds, scenario: Scenario, ranks: int
) -> None:

    [logs] = world(1).run(logs_of, replace(scenario, ranks=ranks))
    assert_same_order(logs)


def test_another_order_is_noticed() -> None:
    def log(*kinds: str) -> list[Issued]:
        return [
            Issued(communicator="gather", ranks=(0, 1), kind=kind, nbytes=8, transfers={})
            for kind in kinds
        ]

    assert_same_order({0: log("a", "b"), 1: log("a", "b")})
    with pytest.raises(AssertionError, match=r"1\. of ranks 0 and 1"):
        assert_same_order({0: log("a", "b"), 1: log("a", "c")})
    with pytest.raises(AssertionError, match="ranks 0 and 1"):
        assert_same_order({0: log("a", "b"), 1: log("a", "b", "c")})
