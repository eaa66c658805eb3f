"""Lightning's own callbacks, finders and profilers under sharding: they run, and what they find is what DDP finds."""

import contextlib
import io
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.utils.data import DataLoader

from shardeddp import ShardedDP
from support.resuming import same_batches
from support.tasks import Block, EvaluatedGpt, Recorded, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


STOCK_WARNINGS = (
    "The PyTorch Profiler default schedule will be overridden",
    r"`\.fit\(ckpt_path=None\)` was called without a model",  # of OnExceptionCheckpoint, which looks for its own file
    r"\.fit\(ckpt_path=.last.\) is set, but there is no last checkpoint",  # the same
)


def sharded() -> ShardedDP:
    return ShardedDP(auto_wrap_policy={Block})


class Finds(EvaluatedGpt):
    """Has what finders look for, and keeps the norms of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-2, 2
        self.norms: list[float] = []

    def train_dataloader(self) -> DataLoader[Tensor]:
        return token_loader(64, self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return token_loader(8)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.note_norms()

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.note_norms()

    def note_norms(self) -> None:
        norms = grad_norm(self, 2)
        self.norms += [float(norm) for norm in norms.values()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(
    strategy: Any, *callbacks: Callback, model: type[Recorded] = Finds, **options: Any
) -> tuple[Any, Trainer]:
    """Train quietly for two epochs."""
    seed_everything(1, verbose=False)
    module = model()
    trainer = make_trainer(
        strategy, callbacks=list(callbacks), max_epochs=2, limit_train_batches=4, **options
    )
    for message in STOCK_WARNINGS:
        warnings.filterwarnings("ignore", message)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, None if model is Finds else token_loader(32))
    return module, trainer


# -- gradients


def norms_after(strategy: Any, **clipping: Any) -> list[float]:
    return fit(strategy, **clipping)[0].norms


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2)
def test_gradient_norms_before_and_after_clipping_are_those_of_ddp() -> None:
    for clipping in (
        {},
        {"gradient_clip_val": 0.1},
        {
            "gradient_clip_val": 0.01,
            "gradient_clip_algorithm": "value",
            "accumulate_grad_batches": 2,
        },
    ):
        expected = norms_after(DDPStrategy(), **clipping)
        for strategy in (sharded(), ShardedDP("no_shard")):
            assert norms_after(strategy, **clipping) == pytest.approx(expected, rel=1e-4)
        if clipping:
            assert min(expected[19::20]) < 0.2 or clipping["gradient_clip_val"] == 0.01


@pytest.mark.slow
@on_ranks(2)
def test_accumulation_that_changes_between_epochs_steps_as_under_ddp() -> None:
    found, expected = (
        (module.norms, module.losses, trainer.global_step)
        for module, trainer in (
            fit(each, GradientAccumulationScheduler({1: 2})) for each in (sharded(), DDPStrategy())
        )
    )
    assert found[2] == expected[2] == 4 + 2
    assert found[:2] == tuple(pytest.approx(each, rel=1e-4) for each in expected[:2])


# -- finders


def find_learning_rate(strategy: Any, folder: str) -> tuple[Any, ...]:
    finder = LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=8)
    module, _ = fit(strategy, finder, default_root_dir=folder)
    found = finder.optimal_lr
    assert found is not None
    assert not [name for name in os.listdir(folder) if name.startswith(".lr_find")], (
        "what it saved is still there"
    )
    return found.results["loss"], module.losses[-8:], module.lr


def look_for_a_learning_rate(folder: str) -> None:
    found, expected = (find_learning_rate(each, folder) for each in (sharded(), DDPStrategy()))
    assert found == tuple(pytest.approx(each, rel=1e-4) for each in expected)


@pytest.mark.slow
def test_the_learning_rate_finder_leaves_training_as_it_was(world: Worlds, tmp_path: Path) -> None:
    world(2).run(look_for_a_learning_rate, str(tmp_path))


def find_batch_size(strategy: Any) -> tuple[int, list[float]]:
    module, _ = fit(strategy, BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=2))
    return module.batch_size, module.losses[-8:]


def tune(strategy: Any) -> tuple[list[float], list[float]]:
    seed_everything(1, verbose=False)
    module, trainer = Finds(), make_trainer(strategy, max_epochs=1, limit_train_batches=4)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        finder = Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=1.0, num_training=8)
        trainer.fit(module)
    assert finder is not None
    return finder.results["loss"], module.losses[-4:]


# Finders give the Trainer other callbacks for a while; what was added to those in between is gone afterwards.


@pytest.mark.slow
@on_ranks(2)
def test_a_tuner_finds_what_it_finds_under_ddp() -> None:
    found, expected = tune(sharded()), tune(DDPStrategy())
    assert found == tuple(pytest.approx(each, rel=1e-4) for each in expected)


@on_ranks(1)
def test_the_batch_size_finder_works_on_one_device() -> None:
    found, expected = find_batch_size(sharded()), find_batch_size("auto")
    assert found == (expected[0], pytest.approx(expected[1], rel=1e-4)) and expected[0] > 2


@on_ranks(1)
def test_one_device_is_not_told_to_synchronise_what_it_logs() -> None:
    fit(sharded())  # with validation; warnings are errors here


# -- monitors and profilers


def watch(strategy: Any, folder: str) -> tuple[set[str], list[float]]:
    """The names that everything that watches a training logs, and its losses."""

    class Counts(TinyGpt):
        flops_per_batch = 1000

        def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
            loss = super().training_step(batch, batch_index)
            self.log("loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)
            return loss

    watchers = (
        LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
        DeviceStatsMonitor(cpu_stats=True),
        ThroughputMonitor(batch_size_fn=len, window_size=2),
        Timer("00:00:10:00"),
        EarlyStopping("loss_epoch"),
        LambdaCallback(on_train_start=lambda trainer, module: None),
        RichProgressBar(),
        RichModelSummary(),
    )
    logger = CSVLogger(folder)
    options = {"enable_progress_bar": True, "enable_model_summary": True, "log_every_n_steps": 1}
    module, trainer = fit(strategy, *watchers, model=Counts, logger=logger, **options)
    trainer.strategy.barrier()
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return set(file.readline().strip().split(",")), module.losses


def watch_both(folder: str) -> None:
    pytest.importorskip("psutil")
    found, expected = watch(sharded(), f"{folder}/ours"), watch(DDPStrategy(), f"{folder}/theirs")
    assert found[0] == expected[0]
    assert found[0] >= {"lr-AdamW/pg1", "loss_epoch", "loss_step", "train/device/batches_per_sec"}
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.slow
def test_monitors_log_what_they_log_under_ddp(world: Worlds, tmp_path: Path) -> None:
    world(2).run(watch_both, str(tmp_path))


def profile(folder: str) -> None:
    plain = fit(sharded())[0].losses
    for name in ("simple", "advanced", "pytorch"):
        assert fit(sharded(), profiler=name, default_root_dir=folder)[0].losses == plain


@pytest.mark.long
@pytest.mark.slow
def test_profilers_change_nothing(world: Worlds, tmp_path: Path) -> None:
    world(2).run(profile, str(tmp_path))


# -- what happens in the middle of training


class Fails(TinyGpt):
    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if self.global_step == 2:
            raise LookupError("a bad batch")
        return super().training_step(batch, batch_index)


def fail(folder: str) -> None:
    with pytest.raises(LookupError, match="a bad batch"):
        fit(sharded(), OnExceptionCheckpoint(folder), model=Fails, enable_checkpointing=True)
    module, trainer = TinyGpt(), make_trainer(sharded(), max_steps=3)
    warnings.filterwarnings(
        "ignore", "You're resuming from a checkpoint that ended before the epoch"
    )
    trainer.fit(module, token_loader(32), ckpt_path=f"{folder}/on_exception.ckpt")
    assert (trainer.global_step, len(module.losses)) == (3, 1)


@pytest.mark.slow
def test_a_checkpoint_of_an_exception_resumes(world: Worlds, tmp_path: Path) -> None:
    world(2).run(fail, str(tmp_path))


class HasABackbone(TinyGpt):
    """Trains a few parameters at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class NotesMemory(Callback):
    """What is held for the backbone while it is frozen: nothing."""

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        frozen = [p for p in pl_module.parameters() if not p.requires_grad]
        assert all(p.grad is None and p not in optimizer.state for p in frozen)
        assert len(frozen) == (0 if trainer.current_epoch else 18)


def finetune(strategy: Any, folder: str, ckpt_path: str | None = None) -> list[float]:
    seed_everything(1, verbose=False)
    module = HasABackbone()
    finetuning = BackboneFinetuning(
        1, lambda_func=lambda epoch: 1.5, backbone_initial_ratio_lr=0.5, verbose=False
    )
    callbacks = [finetuning, NotesMemory(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    trainer = make_trainer(strategy, max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, same_batches(), ckpt_path=ckpt_path)
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [1, 18]
    return module.losses


# DDP is no reference: it never reduces the gradients of what was frozen when it was made.
@pytest.mark.slow
def test_a_backbone_that_is_unfrozen_trains_as_in_one_process_and_resumes(
    world: Worlds, tmp_path: Path
) -> None:
    expected = world(1).run(finetune, "auto", str(tmp_path / "one"))[0]
    found = world(2).run(finetune, sharded(), str(tmp_path / "two"))
    assert [sum(losses) / 2 for losses in zip(*found, strict=True)] == pytest.approx(
        expected, rel=1e-4
    )
    # Before that epoch: Lightning unfreezes nothing in a run that resumes behind it.
    again = world(2).run(
        finetune, sharded(), str(tmp_path / "two"), str(tmp_path / "two" / "epoch=0.ckpt")
    )
    for resumed, straight in zip(again, found, strict=True):
        assert resumed == pytest.approx(straight[-len(resumed) :], rel=1e-5) and len(resumed) == 8
