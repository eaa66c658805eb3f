"""With ``debug=True`` a user's communication that differs between ranks is an error that names both lines."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from shardeddp import ShardedDP
from shardeddp.lightning.run_group import torch_compares
from support.tasks import Block, EvaluatedGpt
from support.trainers import make_trainer
from support.uneven import loader
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def gather_other_shapes(module: LightningModule) -> None:
    module.all_gather(torch.zeros(2 + module.global_rank))


def reduce_other_dtypes(module: LightningModule) -> None:
    module.trainer.strategy.reduce(
        torch.zeros(3, dtype=(torch.float32, torch.float64)[module.global_rank])
    )


def do_other_things(module: LightningModule) -> None:
    if module.global_rank:
        module.trainer.strategy.barrier("evaluation")
    else:
        module.trainer.strategy.broadcast("found")


def log_on_one_rank(module: LightningModule) -> None:
    if module.global_rank == 0:
        module.log("odd", 1.0, sync_dist=True, on_step=True)
    module.trainer.strategy.barrier()


def do_the_same(module: LightningModule) -> None:
    module.all_gather(torch.zeros(2))
    module.log("even", 1.0, sync_dist=True)
    module.trainer.strategy.barrier()
    assert module.trainer.strategy.broadcast("found") == "found"


class Communicates(EvaluatedGpt):
    """Does something of its own in the third step."""

    def __init__(self, action: Callable[[LightningModule], None]) -> None:
        super().__init__()
        self.action = action
        self.began = 0.0

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """One loss."""
        if batch_index == 2:
            self.began = time.monotonic()
            self.action(self)
        return super().training_step(batch, batch_index)


def train(strategy: str, action: Callable[[LightningModule], None]) -> tuple[str, float]:
    """What it ends with, and after which seconds."""
    model = Communicates(action)
    trainer = make_trainer(
        ShardedDP(strategy, auto_wrap_policy={Block}, debug=True),
        use_distributed_sampler=False,
        max_epochs=1,
    )
    said = ""
    try:
        trainer.fit(model, loader((4, 4), True), loader((1, 1), True))
    except RuntimeError as error:
        said = str(error)
    return said, time.monotonic() - model.began


ODD = {
    gather_other_shapes: ["all_gather(float32 of shape (2,))", "all_gather(float32 of shape (3,))"],
    reduce_other_dtypes: [
        "reduce(float32 of shape (3,), mean)",
        "reduce(float64 of shape (3,), mean)",
    ],
    do_other_things: ["broadcast(src=0)", "barrier(evaluation)"],
    log_on_one_rank: ["reduce(float32 of shape (), mean)", "barrier()"],
}


@pytest.mark.loop(1)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("action", ODD)
def test_ranks_that_communicate_otherwise_are_told_both_lines(
    world: Worlds, strategy: str, action: Callable[[LightningModule], None]
) -> None:
    lines, first = inspect.getsourcelines(action)
    for rank, (said, seconds) in enumerate(world(2).run(train, strategy, action)):
        assert seconds < 5
        assert (
            f"on rank {rank} needs ranks [{1 - rank}] to do the same, and others do something else"
            in said
        )
        for operation in ODD[action]:
            assert operation in said
        places = [int(place.split()[0].rstrip(",.:")) for place in said.split(f"{__file__}:")[1:]]
        assert len(set(places)) in (1, 2)
        assert all(first <= place < first + len(lines) for place in places)


def test_ranks_that_do_the_same_train_on(world: Worlds) -> None:
    assert [said for said, _ in world(2).run(train, "full_shard", do_the_same)] == ["", ""]


def call_torch() -> str:
    with torch_compares():
        group = dist.new_group(backend="gloo")
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.zeros(2 + dist.get_rank()), group=group)
    return str(caught.value)


def test_what_is_asked_of_torch_itself_is_compared_by_torch(world: Worlds) -> None:
    for said in world(2).run(call_torch):
        assert "Detected mismatch between collectives on ranks" in said
        assert "TensorShape=[2]" in said
        assert "TensorShape=[3]" in said
