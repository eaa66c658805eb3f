"""Groups of torch's are made once for the runs of a process that end well."""

import gc
import os
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardeddp import ShardedDP
from shardeddp.comm import Mesh, group_pool
from shardeddp.comm.group_pool import GroupPool
from shardeddp.plan.topology import Topology
from shardeddp.torch_private import new_group_of_its_ranks, process_groups
from support.tasks import Block, EvaluatedGpt, token_loader
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(90)

TIMEOUT = timedelta(seconds=20)


def make() -> list[dist.ProcessGroup]:
    """Of a new mesh: one of all ranks, and one of this rank's half."""
    groups = GroupPool(dist.get_rank(), TIMEOUT)
    size = dist.get_world_size()
    halves = [range(size // 2), range(size // 2, size)]
    made = [groups.get("all", [range(size)], TIMEOUT), groups.get("half", halves, TIMEOUT, "gloo")]
    assert groups.get("all", [range(size)], TIMEOUT) is made[0]
    assert groups.names() == {group.group_name for group in made}
    GIVE_BACK.append(partial(groups.give_back, 0))
    return made


GIVE_BACK = []


def check_they_work(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == group.size()


@on_ranks(4)
def test_groups_that_were_given_back_are_used_again() -> None:
    first = make()
    GIVE_BACK.pop()()
    second = make()
    assert all(one is other for one, other in zip(first, second, strict=True))
    check_they_work(second)


@on_ranks(4)
def test_groups_that_were_not_are_not() -> None:
    first, second = make(), make()
    assert not any(one is other for one, other in zip(first, second, strict=True))
    check_they_work(second)


@pytest.mark.parametrize("rank", [0, 3])
@on_ranks(4)
def test_groups_that_some_ranks_have_not_given_back_are_made_anew_on_all(rank: int) -> None:
    first = make()
    give_back = GIVE_BACK.pop()
    if dist.get_rank() != rank:
        give_back()
    second = make()
    assert not any(one is other for one, other in zip(first, second, strict=True))
    GIVE_BACK.pop()()
    assert make()[1] is second[1]
    check_they_work(second)


@on_ranks(2)
def test_groups_of_another_purpose_timeout_or_backend_are_others() -> None:
    groups = GroupPool(dist.get_rank(), TIMEOUT)
    everyone = [range(2)]
    made = [
        groups.get("one", everyone, TIMEOUT),
        groups.get("other", everyone, TIMEOUT),
        groups.get("one", everyone, 2 * TIMEOUT),
        groups.get("one", everyone, TIMEOUT, "gloo"),
    ]
    assert len({id(group) for group in made}) == 4


class Refused(EvaluatedGpt):
    def setup(self, stage: str) -> None:
        raise LookupError("before anything is sharded")


class Fails(EvaluatedGpt):
    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        raise LookupError("all ranks alike")


def train(module: LightningModule, resumes: str | None = None, save: str = "") -> tuple[int, int]:
    """The descriptors and threads of this process after a run."""
    trainer = make_trainer(ShardedDP(auto_wrap_policy={Block}), max_steps=2)
    with suppress(Exception):
        trainer.fit(module, token_loader(16), ckpt_path=resumes)
        if save:
            trainer.save_checkpoint(save)
    del trainer
    gc.collect()
    # Under load a thread may be a moment from closing one.
    descriptors = [len(os.listdir("/proc/self/fd"))]
    while len(descriptors) < 10:
        time.sleep(0.05)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    return min(descriptors), len(os.listdir("/proc/self/task"))


def train_often() -> list[tuple[int, int]]:
    modules = [EvaluatedGpt() for _ in range(4)]
    well = [train(module) for module in modules]
    for module in modules:  # they are still to be asked
        assert all(parameter.detach().isfinite().all() for parameter in module.parameters())
    return well


def be_refused(folder: str) -> tuple[list[tuple[int, int]], int]:
    saved = os.path.join(folder, "saved.ckpt")
    found = [train(EvaluatedGpt(), save=saved)]
    for _ in range(2):
        found += [
            train(Refused()),
            train(EvaluatedGpt(), os.path.join(folder, "missing.ckpt")),
            train(EvaluatedGpt(dim=4), saved),
            train(Fails()),
            train(EvaluatedGpt(), saved),
        ]
    trainer = make_trainer(ShardedDP(auto_wrap_policy={Block}), max_steps=2)
    trainer.fit(EvaluatedGpt(), token_loader(16))
    return found, trainer.global_step


@on_ranks(4)
def test_groups_of_some_ranks_are_made_where_ranks_have_different_numbers_of_groups() -> None:
    dist.new_group([0, 1])  # ranks 2 and 3 are in one group less, by which torch would name others
    check_they_work(make())


def groups_of_a_fake_world(
    rank: int, size: int, shard_size: int, split_replicas: bool, fake_store: bool
) -> tuple[int, int]:
    """How many groups a rank makes for its mesh, and how many calls to torch it takes."""
    dist.destroy_process_group()
    store = FakeStore() if fake_store else dist.HashStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    with (
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as public,
        mock.patch.object(
            group_pool, "new_group_of_its_ranks", wraps=new_group_of_its_ranks
        ) as own,
    ):
        topology = Topology(world_size=size, shard_size=shard_size, split_replicas=split_replicas)
        Mesh(topology, torch.device("cpu"), TIMEOUT)
        return len(process_groups()) - 1, public.call_count + own.call_count


@pytest.mark.parametrize("fake_store", [False, True])
@pytest.mark.parametrize(
    ("shard_size", "split_replicas", "number"),
    [(1, False, 3), (1024, False, 4), (8, False, 5), (8, True, 7)],
)
@pytest.mark.parametrize("rank", [0, 1023])
def test_a_rank_of_a_thousand_makes_a_handful_of_groups(
    world: Worlds, rank: int, shard_size: int, split_replicas: bool, number: int, fake_store: bool
) -> None:
    arguments = (rank, 1024, shard_size, split_replicas, fake_store)
    assert world(1).run(groups_of_a_fake_world, *arguments) == [(number, number)]


@pytest.mark.slow
def test_runs_of_one_process_share_descriptors(world: Worlds) -> None:
    for well in world(2).run(train_often):
        assert len({descriptors for descriptors, _ in well[1:]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_that_are_refused_keep_no_more_than_the_first_and_the_next_one_trains(
    world: Worlds, tmp_path: Path, ranks: int
) -> None:
    for found, steps in world(ranks).run(be_refused, str(tmp_path)):
        assert len({descriptors for descriptors, _ in found}) == 1 and steps == 2
        # The thread that answers other ranks ends soon after its mesh, not with it.
        assert max(threads for _, threads in found) <= found[0][1] + 1
