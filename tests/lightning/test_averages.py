"""Averages of weights (EMA, SWA) under sharding: DDP's numbers, a shard per rank, and nothing communicated for them."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from shardeddp import ShardedDP, ShardTensor
from support.tasks import (
    Block,
    ConvBlock,
    EvaluatedGpt,
    Recorded,
    TinyConvNet,
    image_loader,
    token_loader,
)
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


class EvaluatedConvNet(TinyConvNet):
    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class NotesValidation(Callback):
    """Keeps every value of ``val``."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(trainer.callback_metrics["val"].item())


def ema() -> Callback:
    return EMAWeightAveraging(decay=0.6, update_every_n_steps=2)


def ema_of_parameters() -> Callback:
    return EMAWeightAveraging(decay=0.6, use_buffers=False)


def mean() -> Callback:
    return WeightAveraging()


def swa() -> Callback:
    return StochasticWeightAveraging(0.03, swa_epoch_start=2, annealing_epochs=2)


def sharded(model: type, name: str = "full_shard", **options: Any) -> ShardedDP:
    return ShardedDP(
        name, auto_wrap_policy={Block} if model is EvaluatedGpt else {ConvBlock}, **options
    )


def ddp() -> DDPStrategy:
    return DDPStrategy()


def train(
    strategy: Any,
    make_callback: Callable[[], Callback] | None,
    make_model: Callable[[], Recorded] | Recorded = EvaluatedGpt,
    ckpt_path: str | None = None,
    keeper: Callback | None = None,
) -> dict[str, Any]:
    """A training with validations, and what it leaves."""
    seed_everything(1, verbose=False)
    model = make_model if isinstance(make_model, Recorded) else make_model()
    validations = NotesValidation()
    samples = (token_loader if isinstance(model, EvaluatedGpt) else image_loader)(16).dataset
    loader = DataLoader(samples, 4, sampler=DistributedSampler(samples, shuffle=False))
    callbacks = [validations] if make_callback is None else [make_callback(), validations]
    callbacks += [] if keeper is None else [keeper]
    trainer = make_trainer(
        strategy, max_epochs=4, callbacks=callbacks, enable_checkpointing=keeper is not None
    )
    warnings.filterwarnings("ignore", "SWA is currently only supported every epoch")
    trainer.fit(model, loader, loader, ckpt_path=ckpt_path)
    return {
        "losses": model.losses,
        "val": validations.seen,
        "weights": full_weights(model),
        "callback": callbacks[0],
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Up to rounding."""
    assert found["losses"][-len(expected["losses"]) :] == pytest.approx(
        expected["losses"], rel=1e-5
    )
    assert found["val"] == pytest.approx(expected["val"], rel=1e-5)
    if dist.get_rank() == 0:  # whose buffers count
        assert_same_weights(found["weights"], expected["weights"])


# -- training


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("average", "model", "names"),
    [
        (ema, EvaluatedConvNet, ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")),
        (ema_of_parameters, EvaluatedConvNet, ("full_shard",)),
        (mean, EvaluatedGpt, ("full_shard", "no_shard")),
        (swa, EvaluatedConvNet, ("full_shard", "no_shard")),
        (swa, EvaluatedGpt, ("full_shard",)),
    ],
)
@on_ranks(2)
def test_averages_and_what_validation_sees_of_them_are_those_of_ddp(
    average: Any, model: Any, names: Sequence[str]
) -> None:
    expected, without = train(ddp(), average, model), train(ddp(), None, model)
    assert not all(
        torch.equal(expected["weights"][name], weight)
        for name, weight in without["weights"].items()
    )
    for name in names:
        found = train(sharded(model, name), average, model)
        assert_same(found, expected)
        copy = found["callback"]._average_model
        assert all(isinstance(parameter, ShardTensor) for parameter in copy.parameters())
        held = sum(parameter.to_local().numel() for parameter in copy.parameters())
        total = sum(parameter.numel() for parameter in copy.parameters())
        ranks = 1 if name == "no_shard" else dist.get_world_size()
        assert held <= total / ranks + 8, "more than a share of the average on this rank"


def traffic_of_training(make_callback: Any) -> tuple[dict[str, int], dict[str, int]]:
    strategy = sharded(EvaluatedGpt)
    callbacks = [FromZero()] if make_callback is None else [FromZero(), make_callback()]
    trainer = make_trainer(strategy, max_epochs=2, callbacks=callbacks)
    trainer.fit(EvaluatedGpt(), token_loader(32))
    return dict(strategy.traffic.calls), dict(strategy.traffic.nbytes)


class FromZero(Callback):
    """Leaves out what is communicated to set things up."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.traffic.reset()


@pytest.mark.slow
@on_ranks(2)
def test_an_average_communicates_nothing() -> None:
    alone = traffic_of_training(None)
    assert sum(alone[0].values()) > 20
    assert traffic_of_training(ema) == traffic_of_training(mean) == alone


# -- resuming


def resume(average: Any, model: Any, form: str, folder: str) -> None:
    """From the middle of a run that keeps a checkpoint of every epoch."""
    keeper = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    strategy = ddp() if form == "ddp" else sharded(model, state_dict_type=form)
    straight = train(strategy, average, model, keeper=keeper)
    again = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    second = train(sharded(model), average, model, f"{folder}/epoch=1.ckpt", again)
    assert_same(second, {**straight, **{name: straight[name][-2:] for name in ("losses", "val")}})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sharded", "full", "ddp"])
@pytest.mark.parametrize(("average", "model"), [(ema, EvaluatedConvNet), (swa, EvaluatedGpt)])
def test_an_average_is_resumed_with_the_weights_that_are_trained(
    world: Worlds, tmp_path: Path, average: Any, model: Any, form: str
) -> None:
    world(2).run(resume, average, model, form, str(tmp_path))


def start_anywhere(folder: str) -> None:
    """A module that has been sharded before takes a checkpoint; one of a run without averages begins them."""
    straight = train(
        sharded(EvaluatedGpt), ema, keeper=ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    )
    module = EvaluatedGpt()
    make_trainer(sharded(EvaluatedGpt)).validate(module, token_loader(8), verbose=False)
    path = f"{folder}/epoch=1.ckpt"
    again = train(
        sharded(EvaluatedGpt), ema, module, path, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    )
    assert_same(again, {**straight, **{name: straight[name][-2:] for name in ("losses", "val")}})

    average, module = ema(), EvaluatedGpt()
    make_trainer(sharded(EvaluatedGpt), max_epochs=1).fit(module, token_loader(8))
    weights = full_weights(module)
    module.trainer.save_checkpoint(f"{folder}/plain.ckpt")
    trainer = make_trainer(sharded(EvaluatedGpt), max_epochs=1, callbacks=[average])
    warnings.filterwarnings("ignore", "The checkpoint was not created with WeightAveraging")
    trainer.fit(
        EvaluatedGpt(), token_loader(8), ckpt_path=f"{folder}/plain.ckpt"
    )  # nothing is left to train
    assert_same_weights(full_weights(average._average_model.module), weights)


@pytest.mark.long
@pytest.mark.slow
def test_averages_begin_and_go_on_from_any_checkpoint(world: Worlds, tmp_path: Path) -> None:
    world(2).run(start_anywhere, str(tmp_path))


@pytest.mark.slow
@on_ranks(2)
def test_the_average_of_a_deferred_module_begins_with_its_values() -> None:
    def fit(deferred: bool) -> dict[str, Tensor]:
        seed_everything(1, verbose=False)
        average = ema()
        trainer = make_trainer(
            sharded(EvaluatedGpt), max_epochs=1, callbacks=[average], num_sanity_val_steps=1
        )
        with trainer.init_module(empty_init=deferred):
            model = EvaluatedGpt()
        trainer.fit(model, token_loader(16), token_loader(16))
        # A copy that is whole on each rank is sent from rank 0.
        assert bool(trainer.strategy.traffic.nbytes["broadcast"]) != deferred
        return full_weights(average._average_model.module)

    assert_same_weights(fit(True), fit(False))


# -- what cannot be


class BuildsLate(EvaluatedGpt):
    """Makes a layer when Lightning asks for it."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(2, 2)


class WritesToTheModel(Callback):
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        with torch.no_grad():
            pl_module.blocks[0].up.weight.zero_()


def refusals(folder: str) -> list[tuple[str, str]]:
    """The errors of callbacks that cannot do what they are for."""
    path = f"{folder}/a.ckpt"
    trainer = make_trainer(sharded(EvaluatedGpt), max_steps=1)
    trainer.fit(EvaluatedGpt(), token_loader(8))
    trainer.save_checkpoint(path)
    found = []
    for callback, model, ckpt_path in (
        (StochasticWeightAveraging(0.1), BuildsLate, None),
        (WritesToTheModel(), EvaluatedGpt, path),
        (ModelPruning("l1_unstructured"), EvaluatedGpt, None),
    ):
        trainer = make_trainer(sharded(EvaluatedGpt), max_epochs=2, callbacks=[callback])
        try:
            trainer.fit(model(), token_loader(8), ckpt_path=ckpt_path)
            found.append(("nothing", ""))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test compares it
            found.append((type(error).__name__, str(error)))
    return found


def test_a_callback_that_cannot_do_its_work_is_refused_before_training(
    world: Worlds, tmp_path: Path
) -> None:
    for late, writes, prunes in world(2).run(refusals, str(tmp_path)):
        assert {kind for kind, _ in (late, writes, prunes)} == {"ConfigurationError"}, (
            late,
            writes,
            prunes,
        )
        assert (
            "expected late.weight of shape (2, 2), found nothing" in late[1]
            and "use WeightAveraging" in late[1]
        )
        assert (
            "written to parameter blocks.0.up.weight" in writes[1]
            and "pl_module.load_state_dict()" in writes[1]
        )
        assert "ModelPruning replaces parameters while they are sharded" in prunes[1]
        assert "torch.nn.utils.prune before trainer.fit()" in prunes[1]
