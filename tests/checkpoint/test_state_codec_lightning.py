"""What Lightning itself puts into a checkpoint comes back whole: loops, callbacks, schedulers and hyper-parameters."""

import datetime
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim import lr_scheduler

from shardeddp.checkpoint.state_codec import opaque_paths
from support.state_trees import picture, through_json

pytestmark = pytest.mark.timeout(60)


class Scheduled(L.LightningModule):
    """Every scheduler that people use, on an optimizer of its own."""

    def __init__(
        self, lr: float = 0.1, betas: tuple[float, ...] = (0.9, 0.95), limit: float = math.inf
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        makers = [
            lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.9**step),
            lambda it: lr_scheduler.OneCycleLR(it, max_lr=0.1, total_steps=10),
            lambda it: lr_scheduler.MultiStepLR(it, [2, 4, 4]),
            lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 3),
            lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1),
            lambda it: lr_scheduler.ReduceLROnPlateau(it),
            lambda it: lr_scheduler.SequentialLR(
                it,
                [lr_scheduler.LinearLR(it, total_iters=2), lr_scheduler.ExponentialLR(it, 0.9)],
                milestones=[2],
            ),
            lambda it: lr_scheduler.ChainedScheduler(
                [lr_scheduler.ConstantLR(it), lr_scheduler.PolynomialLR(it)]
            ),
        ]
        optimizers = [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9) for _ in makers[:-1]]
        optimizers.append(torch.optim.AdamW(self.parameters(), lr=0.1))
        return optimizers, [
            make(optimizer) for make, optimizer in zip(makers, optimizers, strict=True)
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            loss = self.layer(batch[0]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step(*[loss.detach()] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            self.log("loss", loss)


def test_a_checkpoint_of_lightning_comes_back_whole(tmp_path: Path) -> None:
    callbacks = [
        ModelCheckpoint(tmp_path / "saved", monitor="loss", save_top_k=2, save_last=True),
        ModelCheckpoint(tmp_path / "timed", train_time_interval=datetime.timedelta(hours=1)),
        EarlyStopping("loss"),
    ]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
    )
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(6, 2)), batch_size=2
    )
    trainer.fit(Scheduled(), data)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    assert {"loops", "callbacks", "optimizer_states", "lr_schedulers", "hyper_parameters"} <= set(
        checkpoint
    )
    assert len(checkpoint["lr_schedulers"]) == 8
    tree = through_json(checkpoint)
    assert opaque_paths(tree) == []
    assert picture(tree) == picture(checkpoint)
