"""The first rank that fails is heard by those whose transfers break because of it."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardeddp.comm import Mesh
from shardeddp.plan.topology import Topology
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def end_with_errors() -> str:
    """Rank 1 fails by itself, then rank 0's transfer breaks; returns what is the cause of this rank's error."""
    mesh = Mesh(Topology(world_size=2, shard_size=2), torch.device("cpu"), timedelta(seconds=20))
    own = ValueError("no such token")
    broken = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
    if dist.get_rank() == 1:
        mesh.failures.explain(own)
    dist.barrier()
    if dist.get_rank() == 0:
        mesh.failures.explain(broken)
        return str(broken.__cause__)
    return str(own.__cause__)


def break_without_a_reason() -> object:
    """A transfer breaks and nobody has left an error."""
    mesh = Mesh(Topology(world_size=1, shard_size=1), torch.device("cpu"), timedelta(seconds=20))
    broken = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
    mesh.failures.explain(broken)
    return broken.__cause__


def test_a_broken_transfer_gets_the_traceback_of_the_rank_that_failed_as_its_cause(world: Worlds) -> None:
    heard, own = world(2).run(end_with_errors)
    assert "training failed on rank 1" in heard
    assert "ValueError: no such token" in heard
    assert own == "None"


def test_a_broken_transfer_without_an_origin_stays_as_it_is(world: Worlds) -> None:
    assert world(1).run(break_without_a_reason) == [None]
