"""What is not a parameter goes to the device that the model computes on; parameters stay where the shards are."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from shardeddp.engine.shard_model import place_module
from shardeddp.lightning import private

pytestmark = pytest.mark.timeout(30)

ELSEWHERE = torch.device("meta")


class Child(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.metric = MeanMetric()
        self.register_buffer("none", None)
        self.register_buffer("table", torch.ones(2), persistent=False)


class Parent(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child()
        self.own = nn.Parameter(torch.ones(2))
        self.metrics = nn.ModuleDict({"mean": MeanMetric()})


def test_buffers_and_metrics_move_and_parameters_do_not() -> None:
    module = Parent()
    place_module(module, ELSEWHERE)
    assert {buffer.device for buffer in module.buffers()} == {ELSEWHERE}
    assert {parameter.device for parameter in module.parameters()} == {torch.device("cpu")}
    assert module.child.metric.device == module.metrics["mean"].device == ELSEWHERE
    assert module.child.metric.mean_value.device == ELSEWHERE


def test_lightning_modules_know_their_device() -> None:
    module = Parent()
    private.set_device(module, ELSEWHERE)
    assert module.device == module.child.device == ELSEWHERE
