"""torchmetrics in training, validation and test, logged, as modules, in collections and resumed: DDP's values."""

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from shardeddp import ShardedDP
from support.resuming import same_batches
from support.tasks import VOCABULARY, Block, TinyGpt
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


class Measured(TinyGpt):
    """Measures in all the ways that torchmetrics' and Lightning's documents show."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(VOCABULARY)
        self.mean_loss = MeanMetric()
        self.scores = MetricCollection(
            {"accuracy": MulticlassAccuracy(VOCABULARY), "f1": MulticlassF1Score(VOCABULARY)},
            prefix="val_",
        )
        self.test_scores = self.scores.clone(prefix="test_")
        self.auroc = MulticlassAUROC(VOCABULARY)  # its states are lists
        self.targets = CatMetric()
        self.confusion = MulticlassConfusionMatrix(VOCABULARY)
        self.batches = SumMetric()
        self.batches.persistent(True)  # travels in the state dict
        self.seen: list[Any] = []

    def answers(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        self.train_accuracy(*self.answers(batch))
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.mean_loss.update(loss)
        self.batches.update(1)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.batches.compute().item())

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        logits, targets = self.answers(batch)
        self.scores.update(logits, targets)
        self.auroc.update(logits.softmax(-1), targets)
        self.targets.update(targets.float())
        self.confusion.update(logits, targets)
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        self.log("auroc", self.auroc)
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(
            sorted(self.targets.compute().tolist()) + self.confusion.compute().flatten().tolist()
        )
        self.targets.reset()
        self.confusion.reset()

    def test_step(self, batch: Tensor, batch_index: int) -> None:
        self.test_scores.update(*self.answers(batch))

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.test_scores.compute())
        self.test_scores.reset()


def measure(strategy: Any, folder: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Everything that is measured in two epochs, or in the second."""
    seed_everything(1, verbose=False)
    module, logger = Measured(), CSVLogger(folder)
    keeper = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = make_trainer(
        strategy,
        max_epochs=2,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[keeper],
        enable_checkpointing=True,
    )
    warnings.filterwarnings(
        "ignore", "It is recommended to use `self.log.'test_"
    )  # they are of all ranks already
    trainer.fit(module, same_batches(), same_batches(), ckpt_path=ckpt_path)
    found = {
        "fit": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "seen": module.seen,
    }
    found["test"] = trainer.test(module, same_batches(), verbose=False)[0]
    dist.barrier()
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    found["logged"] = [{name: float(value) for name, value in row.items() if value} for row in rows]
    return found


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    else:
        assert found == pytest.approx(expected, rel=1e-4)


def measure_all(folder: str) -> None:
    expected = measure(DDPStrategy(), f"{folder}/ddp")
    assert {
        "train_accuracy_step",
        "train_accuracy_epoch",
        "loss_epoch",
        "val_f1",
        "auroc",
    } <= expected["fit"].keys()
    for name in ("full_shard", "no_shard"):
        found = measure(ShardedDP(name, auto_wrap_policy={Block}), f"{folder}/{name}")
        assert_same(found, expected)
        resumed = measure(
            ShardedDP(name, auto_wrap_policy={Block}),
            f"{folder}/{name}",
            f"{folder}/{name}/epoch=0.ckpt",
        )
        assert_same(resumed["fit"], expected["fit"])
        theirs = measure(DDPStrategy(), f"{folder}/ddp", f"{folder}/ddp/epoch=0.ckpt")
        assert_same(resumed["seen"], theirs["seen"])


@pytest.mark.long
@pytest.mark.slow
def test_metrics_are_those_of_ddp_everywhere_and_go_on_when_resumed(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(measure_all, str(tmp_path))
