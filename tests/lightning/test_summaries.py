"""The summary of a sharded model: DDP's table with one more column."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from shardeddp import ShardedDP
from support.tasks import VOCABULARY, Block, EvaluatedGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def sharded() -> ShardedDP:
    return ShardedDP(auto_wrap_policy={Block})


class Summarized(EvaluatedGpt):
    """Has a parameter of no layer; sizes and operations of layers are found by running it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, VOCABULARY, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(10))
        self.example_input_array = torch.arange(12).view(2, 6) % 11

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.scale.mean()


class Keeps(ModelSummary):
    """Keeps what would be printed."""

    seen: dict[str, Any]

    @staticmethod
    def summarize(
        summary_data: Any, total_parameters: int, trainable_parameters: int, *args: Any, **kw: Any
    ) -> None:  # type: ignore[override]
        Keeps.seen = {
            **dict(summary_data),
            "total": total_parameters,
            "trainable": trainable_parameters,
        }


class KeepsItsWay(Keeps):
    """Summarizes in a way of its own."""

    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        return super()._summary(trainer, pl_module)


def summaries() -> None:
    seen: list[dict[str, Any]] = []
    for strategy, keeps in (
        (sharded(), Keeps()),
        (DDPStrategy(), Keeps()),
        (sharded(), KeepsItsWay()),
    ):
        Keeps.seen = {}
        make_trainer(strategy, max_steps=1, callbacks=[keeps]).fit(Summarized(), token_loader(8))
        assert "_summary" not in vars(keeps), "the next run may be under another strategy"
        seen.append(Keeps.seen)
    ours, theirs, own = seen
    if not ours:  # only rank 0 prints
        return
    assert {**own} == theirs
    column = ours.pop("Params per Device")
    assert ours == theirs
    assert list(seen[0])[:4] == [" ", "Name", "Type", "Params"]
    assert ours["Name"] == ["embed", "blocks", "head", "other params"]
    assert [count.strip() for count in column] == ["44", "444", "44", "5"]


def test_summaries_are_those_of_ddp_with_a_column_of_what_a_device_holds(world: Worlds) -> None:
    world(2).run(summaries)
