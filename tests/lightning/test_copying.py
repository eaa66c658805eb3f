"""Copies and pickles of a Trainer and its parts, as tuners, loggers and callbacks make them: in a fit and after it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from shardeddp import ShardedDP
from support.tasks import Block, EvaluatedGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


class Copied(EvaluatedGpt):
    """Has a schedule that can be pickled."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


PARTS: dict[str, Callable[[Trainer], Any]] = {
    "trainer": lambda trainer: trainer,
    "strategy": lambda trainer: trainer.strategy,
    "callbacks": lambda trainer: trainer.callbacks,  # type: ignore[attr-defined]
    "module": lambda trainer: trainer.lightning_module,
    "optimizers": lambda trainer: trainer.optimizers,
    "loops": lambda trainer: trainer.fit_loop,
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda part: pickle.loads(pickle.dumps(part)),
}


def copy_all(trainer: Trainer) -> None:
    for part in PARTS.values():
        for way in WAYS.values():
            way(part(trainer))


class CopiesAll(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        copy_all(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        copy_all(trainer)


def train(*callbacks: Callback, name: str, epochs: int = 2) -> tuple[Trainer, Copied]:
    strategy = ShardedDP(name, 2 if name == "hybrid_shard" else None, {Block})
    trainer = make_trainer(
        strategy, max_epochs=epochs, callbacks=[EarlyStopping("val"), *callbacks]
    )
    torch.manual_seed(1)
    model = Copied()
    trainer.fit(model, token_loader(8), token_loader(8))
    return trainer, model


def train_with_copies(name: str) -> None:
    expected = full_weights(train(name=name)[1])
    trainer, model = train(CopiesAll(), name=name)
    found = full_weights(model)
    assert all(torch.equal(found[key], value) for key, value in expected.items()), (
        "copying changed the training"
    )
    copy_all(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name"),
    [
        (1, "full_shard"),
        (2, "full_shard"),
        pytest.param(2, "shard_grad_op", marks=pytest.mark.torture),
        pytest.param(2, "shard_optimizer", marks=pytest.mark.torture),
        (2, "no_shard"),
        (4, "hybrid_shard"),
    ],
)
def test_a_trainer_and_its_parts_can_be_copied_at_any_time_and_training_goes_on(
    world: Worlds, size: int, name: str
) -> None:
    world(size).run(train_with_copies, name)


def run_copies() -> None:
    trainer, model = train(name="full_shard", epochs=1)
    [expected] = trainer.validate(model, token_loader(8), verbose=False)
    trained = []
    for way in WAYS.values():
        copied = way(trainer)
        assert copied.callbacks is not trainer.callbacks
        assert copied.validate(model, token_loader(8), verbose=False) == [expected]
        twin = way(model)
        assert all(
            torch.equal(value, full_weights(model)[key])
            for key, value in full_weights(twin).items()
        )
        copied.fit_loop.max_epochs = 2
        copied.fit(twin, token_loader(8), token_loader(8))
        assert copied.current_epoch == 2
        trained.append(full_weights(twin))
    assert all(torch.equal(trained[0][key], value) for key, value in trained[1].items())


@pytest.mark.slow
def test_the_copy_of_a_trainer_validates_and_trains_on(world: Worlds) -> None:
    world(2).run(run_copies)
