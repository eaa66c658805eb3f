"""The mesh of a rank: which ranks its groups hold, that they work, and what they count."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardeddp.comm import Mesh, agree_on_any
from shardeddp.comm.backends import GlooCollectives
from shardeddp.comm.collectives import SoloCollectives
from shardeddp.comm.mesh import count_connections
from shardeddp.plan.topology import Topology
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


def make_mesh(shard_size: int) -> Mesh:
    topology = Topology(world_size=dist.get_world_size(), shard_size=shard_size)
    return Mesh(topology, torch.device("cpu"), timedelta(seconds=20))


@on_ranks(4)
def test_a_mesh_of_two_by_two_has_the_groups_of_its_rows_and_columns() -> None:
    mesh, rank = make_mesh(2), dist.get_rank()
    row, column = [(0, 1), (2, 3)][rank // 2], [(0, 2), (1, 3)][rank % 2]
    assert mesh.rank == rank and mesh.shard_rank == rank % 2
    for group in (mesh.gather, mesh.reduce):
        assert (group.ranks, group.rank, group.size) == (row, rank % 2, 2)
    assert (mesh.replicate.ranks, mesh.replicate.rank) == (column, rank // 2)
    assert (mesh.world.ranks, mesh.world.rank) == ((0, 1, 2, 3), rank)
    assert mesh.control.size == 4


@on_ranks(4)
def test_its_groups_reduce_among_their_own_ranks() -> None:
    mesh, rank = make_mesh(2), dist.get_rank()
    for group in (mesh.gather, mesh.reduce, mesh.replicate, mesh.world):
        number = torch.tensor([10.0**rank])
        group.all_reduce_(number).wait()
        assert number.item() == sum(10.0**other for other in group.ranks)


@on_ranks(4)
def test_gathers_and_reductions_of_one_group_do_not_wait_for_each_other() -> None:
    mesh = make_mesh(4)
    gathered, reduced = torch.full((8,), float(mesh.rank)), torch.tensor([float(mesh.rank)])
    # Issued in either order on different ranks: only with a communicator each can they meet their own.
    issue = [lambda: mesh.gather.all_gather_(gathered), lambda: mesh.reduce.all_reduce_(reduced)]
    pendings = [action() for action in (issue if mesh.rank % 2 else reversed(issue))]
    for pending in pendings:
        pending.wait()
    assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0] and reduced.item() == 6.0


@pytest.mark.parametrize(
    ("shard_size", "tensor_size", "expert_size"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 1, 4)],
)
@pytest.mark.parametrize("split_replicas", [False, True])
@on_ranks(4)
def test_a_mesh_opens_as_many_connections_as_are_counted_before(
    shard_size: int, split_replicas: bool, tensor_size: int, expert_size: int
) -> None:
    topology = Topology(
        world_size=4, shard_size=shard_size, split_replicas=split_replicas, tensor_size=tensor_size
    )
    before = len(os.listdir("/proc/self/fd"))
    timeout = timedelta(seconds=20)
    mesh = Mesh(topology, torch.device("cpu"), timeout, expert_size=expert_size)
    if tensor_size > 1:
        mesh.device_mesh(("replicas", "parts"))
    if mesh.experts is not None:
        mesh.experts.device_mesh(("replicas", "parts"))
    opened = len(os.listdir("/proc/self/fd")) - before
    # The default process group and a connection to its store were there before.
    counted = count_connections(topology, 1, mesh.device, None, expert_size) - (4 + 3) - 1
    assert 0 <= counted - opened <= 2, (counted, opened)


@on_ranks(4)
def test_a_device_mesh_has_groups_for_users_that_later_runs_have_too() -> None:
    topology = Topology(world_size=4, shard_size=2, tensor_size=2)
    used: list[list[str]] = []
    for _ in range(2):
        mesh = Mesh(topology, torch.device("cpu"), timedelta(seconds=20))
        axes = mesh.device_mesh(("replicas", "parts"))
        for name, ranks in (("replicas", mesh.data.ranks), ("parts", mesh.tensor.ranks)):
            total = torch.tensor(10.0**mesh.rank)
            dist.all_reduce(total, group=axes[name].get_group())
            assert total == sum(10.0**rank for rank in ranks)
        used.append([axes[name].get_group().group_name for name in ("replicas", "parts")])
        others = " ".join(mesh.begun_by_others())
        assert all(name in others for name in used[-1])
        mesh.give_back()
    assert used[0] == used[1]


def kinds(shard_size: int) -> dict[str, type]:
    mesh = make_mesh(shard_size)
    return {name: type(getattr(mesh, name)) for name in ("gather", "reduce", "replicate", "world")}


def test_a_group_of_one_rank_is_an_ordinary_group_that_costs_nothing(world: Worlds) -> None:
    alone, several = SoloCollectives, GlooCollectives
    assert world(1).run(kinds, 1)[0] == dict(
        gather=alone, reduce=alone, replicate=alone, world=alone
    )
    assert world(2).run(kinds, 1)[0] == dict(
        gather=alone, reduce=alone, replicate=several, world=several
    )
    assert world(2).run(kinds, 2)[0] == dict(
        gather=several, reduce=several, replicate=alone, world=several
    )


@on_ranks(2)
def test_all_groups_count_into_one_record() -> None:
    mesh = make_mesh(2)
    mesh.gather.all_gather_(torch.zeros(8)).wait()
    mesh.reduce.reduce_scatter(torch.zeros(4), torch.zeros(8)).wait()
    mesh.replicate.all_reduce_(torch.zeros(8)).wait()  # a group of one
    mesh.world.broadcast_(torch.zeros(8), 0).wait()
    assert mesh.traffic.nbytes == {"all_gather": 16, "reduce_scatter": 16, "broadcast": 16}


@on_ranks(2)
def test_a_stream_of_a_cpu_run_issues_at_once_and_waits_when_asked() -> None:
    mesh = make_mesh(2)
    tensor = torch.tensor([float(mesh.rank + 1)])
    handle = mesh.reduce_stream.issue(lambda: mesh.reduce.all_reduce_(tensor))
    handle.wait()
    handle.wait()
    assert tensor.item() == 3.0


def wait_in_a_save() -> tuple[str, float]:
    """What the first rank ends with that waits for the second, and when; other groups wait on."""
    topology = Topology(world_size=2, shard_size=2)
    mesh = Mesh(
        topology, torch.device("cpu"), timedelta(seconds=20), saving_timeout=timedelta(seconds=1)
    )
    said, started = "", time.monotonic()
    if mesh.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            agree_on_any([True], mesh.saving)
        said = str(caught.value)
    else:
        time.sleep(2.5)
    passed = time.monotonic() - started
    agree_on_any([True], mesh.control)
    return said, passed


@pytest.mark.slow
def test_a_save_has_a_time_limit_of_its_own(world: Worlds) -> None:
    (said, passed), _ = world(2).run(wait_in_a_save)
    assert "imed out" in said
    assert 1.0 <= passed < 15.0
