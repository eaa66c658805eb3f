"""Fit, validate, test and predict in any order, on one and several Trainers, as under DDP."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from shardeddp import ShardedDP, ShardTensor
from support.tasks import VOCABULARY, Block, EvaluatedGpt, TinyGpt, token_loader
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def sharded() -> ShardedDP:
    return ShardedDP(auto_wrap_policy={Block})


# -- order


@contextmanager
def inference_mode_as_on_cuda() -> Iterator[None]:
    """Lightning spares gloo runs its inference mode; tell it that this is none."""
    with mock.patch("lightning.pytorch.loops.utilities.dist.get_backend", return_value="nccl"):
        yield


class SeesInferenceMode(TinyGpt):
    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.seen = torch.is_inference_mode_enabled()


ORDERS = [
    "fit validate test predict fit",
    "validate fit test fit",
    "test predict fit validate",
    "predict fit fit test",
]


def run_stages(
    strategy: Callable[[], Any], order: str, several: bool, as_on_cuda: bool
) -> dict[str, Any]:
    """Everything that the stages answer; later training builds on earlier."""
    with inference_mode_as_on_cuda() if as_on_cuda else nullcontext():
        seed_everything(1, verbose=False)
        model, answers = EvaluatedGpt(), {}
        trainer, epochs = make_trainer(strategy(), max_epochs=0), 0
        loader = token_loader(8 * dist.get_world_size())
        for number, stage in enumerate(order.split()):
            if several:
                trainer, epochs = make_trainer(strategy(), max_epochs=0), 0
            if stage == "fit":
                epochs += 1
                trainer.fit_loop.max_epochs = epochs
                trainer.fit(model, loader, loader)
            elif stage == "predict":
                answers[f"{number}"] = torch.cat(trainer.predict(model, loader)).tolist()
            else:
                getattr(trainer, stage)(model, loader, verbose=False)
            answers[f"{number} {stage}"] = {
                name: value.item() for name, value in trainer.callback_metrics.items()
            }
        return {"answers": answers, "losses": model.losses, "weights": full_weights(model)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "several", "as_on_cuda"),
    [
        pytest.param(
            order,
            several,
            as_on_cuda,
            marks=[] if (several == as_on_cuda) == (number % 2 == 0) else pytest.mark.torture,
            id=f"{order}, {'several trainers' if several else 'one trainer'}"
            f", {'inference_mode' if as_on_cuda else 'no_grad'}",
        )
        for number, order in enumerate(ORDERS)
        for several in (False, True)
        for as_on_cuda in (False, True)
    ],
)
def test_stages_run_in_any_order_as_under_ddp(
    world: Worlds, reference: Callable[..., list[Any]], order: str, several: bool, as_on_cuda: bool
) -> None:
    found = world(2).run(run_stages, sharded, order, several, as_on_cuda)
    expected = reference(2, run_stages, DDPStrategy, order, several, False)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert_same_weights(ours["weights"], theirs["weights"])
        assert ours["answers"].keys() == theirs["answers"].keys()
        for stage, answer in theirs["answers"].items():
            torch.testing.assert_close(ours["answers"][stage], answer, rtol=1e-4, atol=1e-5)


def validate_as_on_cuda(strategy: Callable[[], Any]) -> bool:
    model = SeesInferenceMode()
    with inference_mode_as_on_cuda():
        make_trainer(strategy()).validate(model, token_loader(8), verbose=False)
    return model.seen


@pytest.mark.slow
def test_evaluation_never_runs_under_inference_mode(world: Worlds) -> None:
    assert world(2).run(validate_as_on_cuda, DDPStrategy) == [True] * 2, (
        "the patch no longer does what it is for"
    )
    assert world(2).run(validate_as_on_cuda, sharded) == [False] * 2


class Tokens(IterableDataset[Tensor]):
    """As many samples as a rank's number says, and no length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(6).expand(2 + 2 * dist.get_rank(), 6)


def predict_and_train(strategy: str, loader: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = EvaluatedGpt()
    plain = copy.deepcopy(model)
    trainer = make_trainer(ShardedDP(strategy, auto_wrap_policy={Block}))
    predictions = trainer.predict(model, loader)
    assert predictions is not None
    batches = list(trainer.predict_dataloaders)
    sharded_again = all(isinstance(parameter, ShardTensor) for parameter in model.parameters())
    make_trainer(ShardedDP(strategy, auto_wrap_policy={Block}), max_steps=1).fit(
        model, token_loader(8)
    )
    with torch.no_grad():
        right = all(
            torch.allclose(p, plain(b), atol=1e-5)
            for p, b in zip(predictions, batches, strict=True)
        )
    return {
        "sizes": [len(prediction) for prediction in predictions],
        "right": right,
        "sharded again": sharded_again,
    }


# Five samples are three and two; a loader without a length may hold anything.
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize(
    ("loader", "sizes"),
    [
        (token_loader(8, batch_size=2), [[2, 2], [2, 2]]),
        (token_loader(5, batch_size=2), [[2, 1], [2]]),
        (DataLoader(Tokens(), batch_size=2), [[2], [2, 2]]),
    ],
    ids=["even", "uneven", "unknown"],
)
def test_prediction_ends_on_all_ranks_however_many_batches_each_has(
    world: Worlds, strategy: str, loader: Any, sizes: list[list[int]]
) -> None:
    answers = world(2).run(predict_and_train, strategy, loader)
    assert [each["sizes"] for each in answers] == sizes
    assert [(each["right"], each["sharded again"]) for each in answers] == [(True, True)] * 2


def train_two_modules_in_turn(strategy: Callable[[], Any]) -> list[list[float]]:
    seed_everything(1, verbose=False)
    models, trainer = [TinyGpt(), TinyGpt()], make_trainer(strategy(), max_epochs=0)
    for turn in range(4):
        trainer.fit_loop.max_epochs = turn + 1
        trainer.fit(models[turn % 2], token_loader(8))
    return [model.losses for model in models]


@pytest.mark.slow
def test_one_trainer_trains_two_modules_in_turn(world: Worlds) -> None:
    found, expected = (
        world(2).run(train_two_modules_in_turn, sharded),
        world(2).run(train_two_modules_in_turn, DDPStrategy),
    )
    assert [len(losses) for losses in expected[0]] == [2, 2]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def share_communicators() -> dict[str, Any]:
    """Two modules; one is trained on three Trainers, one of which had the other before."""
    first, second, third = (make_trainer(sharded(), max_epochs=0) for _ in range(3))
    here, there = TinyGpt(), TinyGpt()
    counts = []
    for trainer, model in [(first, here), (second, here), (third, there), (third, here)]:
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(model, token_loader(8))
        counts.append(trainer.strategy.traffic.calls["reduce_scatter"])
        trainer.strategy.traffic.reset()
    meshes = [trainer.strategy.mesh for trainer in (first, second, third)]
    return {"shared": all(mesh is meshes[0] for mesh in meshes), "counts": counts}


def test_a_module_brings_its_communicators_along_and_its_traffic_is_counted(world: Worlds) -> None:
    assert world(2).run(share_communicators) == [{"shared": True, "counts": [4, 4, 4, 4]}] * 2


# -- training is left alone


def train_with_sanity_check(sanity_steps: int) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model, loader = EvaluatedGpt(), token_loader(16)
    make_trainer(sharded(), max_epochs=2, num_sanity_val_steps=sanity_steps).fit(
        model, loader, loader
    )
    return {"losses": model.losses, "weights": full_weights(model)}


@pytest.mark.slow
def test_the_sanity_check_leaves_training_as_it_is(world: Worlds) -> None:
    for without, having in zip(
        world(2).run(train_with_sanity_check, 0),
        world(2).run(train_with_sanity_check, 2),
        strict=True,
    ):
        assert without["losses"] == having["losses"]
        assert all(
            torch.equal(without["weights"][name], having["weights"][name])
            for name in without["weights"]
        )


# -- without parameters


class HasNoParameters(LightningModule):
    """A baseline: counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(VOCABULARY))

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.counts += torch.bincount(batch.flatten(), minlength=VOCABULARY)
        self.log("most", self.counts.argmax().float(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return batch.float().mean()


class IsFrozen(HasNoParameters):
    """Nothing of it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(1, 1).requires_grad_(False)
        torch.nn.init.constant_(self.scale.weight, 2.0)

    def predict_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return self.scale(super().predict_step(batch, batch_index).view(1))


class HasOnlyMetrics(HasNoParameters):
    """Its state is a metric's."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.mean(batch.float())
        self.log("mean", self.mean)

    test_step = validation_step


class HasAnEmptyParameter(HasNoParameters):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))

    def predict_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return super().predict_step(batch, batch_index) + self.nothing.sum()


def evaluate_without_parameters(
    module_class: type[LightningModule], build: Callable[..., Any], arguments: dict[str, Any]
) -> list[Any]:
    torch.manual_seed(1)
    model, loader = module_class(), token_loader(8 * dist.get_world_size())
    trainer = make_trainer(build(**arguments))
    return [
        trainer.validate(model, loader, verbose=False),
        trainer.test(model, loader, verbose=False),
        trainer.predict(model, loader),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [{}, {"sharding_strategy": "no_shard"}, {"auto_wrap_policy": None}]
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "module_class", [HasNoParameters, IsFrozen, HasOnlyMetrics, HasAnEmptyParameter]
)
def test_a_module_without_parameters_that_train_is_evaluated(
    world: Worlds, module_class: type[LightningModule], ranks: int, arguments: dict[str, Any]
) -> None:
    found = world(ranks).run(evaluate_without_parameters, module_class, ShardedDP, arguments)
    assert found == world(ranks).run(evaluate_without_parameters, module_class, DDPStrategy, {})


# -- an encoder that looks at weights of its layers


class Encodes(LightningModule):
    """Padded positions, which torch leaves out in evaluation, are zeros."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.outputs: list[Tensor] = []

    def encode(self, batch: Tensor) -> Tensor:
        padded = torch.arange(batch.shape[1]) >= batch.shape[1] - 3
        x = batch.float().unsqueeze(-1).expand(*batch.shape, 8) / VOCABULARY
        return self.encoder(x, src_key_padding_mask=padded.expand(batch.shape))

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return self.encode(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.outputs.append(self.encode(batch))

    predict_step = test_step = validation_step

    def on_train_batch_end(self, *_: Any) -> None:
        self.eval()
        with torch.no_grad():
            self.outputs.append(self.encode(torch.arange(16).view(2, 8)))
        self.train()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def encode(build: Callable[..., Any], *arguments: Any, **options: Any) -> list[Tensor]:
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
    seed_everything(1, verbose=False)
    model, trainer = Encodes(), make_trainer(build(*arguments, **options), max_epochs=1)
    loader = token_loader(8 * dist.get_world_size())
    trainer.fit(model, loader, loader)
    trainer.test(model, loader, verbose=False)
    return model.outputs


@pytest.mark.parametrize(
    "units", [{nn.TransformerEncoderLayer}, {nn.TransformerEncoderLayer, nn.Linear}]
)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_an_encoder_leaves_padded_positions_out_as_under_ddp(
    world: Worlds, reference: Callable[..., Any], strategy: str, units: Any
) -> None:
    expected = reference(2, encode, DDPStrategy)
    found = world(2).run(encode, ShardedDP, strategy, None, units)
    for mine, theirs in zip(found, expected, strict=True):
        assert any((each[:, -3:] == 0).all() for each in theirs), "DDP takes torch's fast path"
        torch.testing.assert_close(mine, theirs)
