"""A checkpoint goes on in a run that is not quite the same: as under DDP, or with one message that says what to do."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import nn, optim

from shardeddp import ShardedDP
from support.resuming import same_batches
from support.tasks import Block, EvaluatedGpt
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


class Plain(EvaluatedGpt):
    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters(), lr=1e-2)


class Scheduled(EvaluatedGpt):
    def configure_optimizers(self) -> Any:
        optimizer = optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1)]


class OtherHyperParameters(EvaluatedGpt):
    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters(), lr=1e-4, betas=(0.5, 0.6))


class NoOptimizer(EvaluatedGpt):
    def configure_optimizers(self) -> None:
        return None


class Descends(EvaluatedGpt):
    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class TwoGroups(EvaluatedGpt):
    def configure_optimizers(self) -> Any:
        return optim.AdamW(
            [{"params": self.blocks.parameters()}, {"params": [self.embed.weight]}], lr=1e-2
        )


class TwoOptimizers(EvaluatedGpt):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [optim.AdamW(self.blocks.parameters()), optim.AdamW([self.embed.weight])]


class HasAnExtraLayer(Plain):
    """One that the checkpoint does not have, and that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.extra = nn.Linear(3, 3).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class InsistsOnIt(HasAnExtraLayer):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = True


def sharded() -> ShardedDP:
    return ShardedDP(auto_wrap_policy={Block})


def go_on(strategy: Any, model: type[EvaluatedGpt], path: str) -> list[float] | str:
    """Losses of another epoch after the first, or the error."""
    seed_everything(2, verbose=False)
    module = model()
    trainer = make_trainer(strategy, max_epochs=2)
    warnings.filterwarnings("ignore", "`LightningModule.configure_optimizers` returned `None`")
    try:
        trainer.fit(module, same_batches(), ckpt_path=path)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test compares it
        return f"{type(error).__name__}: {error}"
    return module.losses


def save_one_epoch(strategy: Any, model: type[EvaluatedGpt], path: str, **options: Any) -> None:
    seed_everything(1, verbose=False)
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(model(), same_batches())
    trainer.save_checkpoint(path, **options)


def go_on_otherwise(folder: str) -> None:
    paths = {}
    for name, make in (("ddp", DDPStrategy), ("ours", sharded)):
        for model in (Plain, Scheduled):
            paths[name, model] = f"{folder}/{name}-{model.__name__}.ckpt"
            save_one_epoch(make(), model, paths[name, model])
    for before, after in (
        (Plain, Scheduled),
        (Scheduled, Plain),
        (Plain, OtherHyperParameters),
        (Plain, NoOptimizer),
        (Plain, HasAnExtraLayer),
    ):
        found = go_on(sharded(), after, paths["ours", before])
        expected = go_on(DDPStrategy(), after, paths["ddp", before])
        assert found == pytest.approx(expected, rel=1e-4), f"{before.__name__} -> {after.__name__}"


@pytest.mark.long
@pytest.mark.slow
def test_schedulers_hyper_parameters_and_layers_may_change_as_under_ddp(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(go_on_otherwise, str(tmp_path))


OTHER = "train with the optimizer that it was saved with, or load its weights alone"


def refuse(folder: str) -> None:
    path = f"{folder}/a.ckpt"
    save_one_epoch(sharded(), Plain, path)
    save_one_epoch(sharded(), Plain, f"{folder}/weights.ckpt", weights_only=True)
    for model, words in (
        (
            Descends,
            [
                "not one of SGD: expected dampening, momentum, nesterov",
                "found amsgrad, betas",
                OTHER,
            ],
        ),
        (TwoGroups, ["fit AdamW: expected 2 groups of [18, 1] parameters, found 1 of [19]", OTHER]),
        (TwoOptimizers, ["the states of 1 optimizers, expected 2", "or load its weights alone"]),
        (
            InsistsOnIt,
            [
                'Missing key(s) in the checkpoint: "extra.weight", "extra.bias"',
                "nothing was loaded",
            ],
        ),
    ):
        found = go_on(sharded(), model, path)
        assert isinstance(found, str) and found.startswith("CheckpointError: "), (
            f"{model.__name__}: {found}"
        )
        assert all(word in found for word in words), found
        assert "Traceback" not in found
    only_weights = go_on(sharded(), Plain, f"{folder}/weights.ckpt")
    assert "KeyError" in only_weights and "checkpoint contains only the model" in only_weights


@pytest.mark.slow
def test_another_optimizer_is_refused_with_one_message(world: Worlds, tmp_path: Path) -> None:
    world(2).run(refuse, str(tmp_path))


def validate_loosely(folder: str) -> None:
    save_one_epoch(sharded(), Plain, f"{folder}/a.ckpt")
    seed_everything(3, verbose=False)
    module = HasAnExtraLayer()
    extra = module.extra.weight.detach().clone()
    trainer = make_trainer(sharded())
    trainer.validate(module, same_batches(), ckpt_path=f"{folder}/a.ckpt", verbose=False)
    assert torch.equal(full_weights(module)["extra.weight"], extra)


@pytest.mark.slow
def test_what_a_checkpoint_lacks_stays_as_it_was_where_loading_is_not_strict(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(validate_loosely, str(tmp_path))
