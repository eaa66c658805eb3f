"""Fit, validate, test and predict in any order, on one and several Trainers; what hooks, samplers and callbacks see."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardeddp import ShardedDP, ShardTensor
from support.tasks import Block, EvaluatedGpt, TinyConvNet, TinyGpt, image_loader, token_loader
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

TOKENS = torch.arange(12).view(2, 6) % 11


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


def run_stages(strategy: Callable[[], Any], order: str, several: bool, as_on_cuda: bool) -> dict[str, Any]:
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
            answers[f"{number} {stage}"] = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return {"answers": answers, "losses": model.losses, "weights": full_weights(model)}


@pytest.mark.parametrize("as_on_cuda", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("several", [False, True], ids=["one_trainer", "several_trainers"])
@pytest.mark.parametrize("order", ORDERS)
def test_stages_run_in_any_order_as_under_ddp(world: Worlds, order: str, several: bool, as_on_cuda: bool) -> None:
    found = world(2).run(run_stages, sharded, order, several, as_on_cuda)
    expected = world(2).run(run_stages, DDPStrategy, order, several, False)
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


def test_evaluation_never_runs_under_inference_mode(world: Worlds) -> None:
    assert world(2).run(validate_as_on_cuda, DDPStrategy) == [True] * 2, "the patch no longer does what it is for"
    assert world(2).run(validate_as_on_cuda, sharded) == [False] * 2


class Tokens(IterableDataset[Tensor]):
    """As many samples as a rank's number says, and no length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(6).expand(2 + 2 * dist.get_rank(), 6)


def predict_and_train(strategy: str, loader: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = EvaluatedGpt()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(ShardedDP(strategy, auto_wrap_policy={Block}))
        predictions = trainer.predict(model, loader)
    assert predictions is not None
    batches = list(trainer.predict_dataloaders)
    sharded_again = all(isinstance(parameter, ShardTensor) for parameter in model.parameters())
    make_trainer(ShardedDP(strategy, auto_wrap_policy={Block}), max_steps=1).fit(model, token_loader(8))
    with torch.no_grad():
        right = all(torch.allclose(p, plain(b), atol=1e-5) for p, b in zip(predictions, batches, strict=True))
    return {
        "sizes": [len(prediction) for prediction in predictions],
        "right": right,
        "told": [str(each.message)[:66] for each in caught if "different numbers" in str(each.message)],
        "sharded again": sharded_again,
    }


# Five samples are three and two; a loader without a length may hold anything.
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize(
    ("loader", "sizes", "told"),
    [
        (token_loader(8, batch_size=2), [[2, 2], [2, 2]], None),
        (token_loader(5, batch_size=2), [[2, 1], [2]], "[2, 1]"),
        (DataLoader(Tokens(), batch_size=2), [[2], [2, 2]], "[inf, inf]"),
    ],
    ids=["even", "uneven", "unknown"],
)
def test_prediction_ends_on_all_ranks_however_many_batches_each_has(
    world: Worlds, strategy: str, loader: Any, sizes: list[list[int]], told: str | None
) -> None:
    answers = world(2).run(predict_and_train, strategy, loader)
    assert [each["sizes"] for each in answers] == sizes
    assert [(each["right"], each["sharded again"]) for each in answers] == [(True, True)] * 2
    gathers = strategy != "no_shard" and told is not None
    warning = [f"ranks have different numbers of batches to predict ({told}): the whole"[:66]] if gathers else []
    assert [each["told"] for each in answers] == [warning, []]


# -- training is left alone


def train_with_sanity_check(sanity_steps: int) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model, loader = EvaluatedGpt(), token_loader(16)
    make_trainer(sharded(), max_epochs=2, num_sanity_val_steps=sanity_steps).fit(model, loader, loader)
    return {"losses": model.losses, "weights": full_weights(model)}


def test_the_sanity_check_leaves_training_as_it_is(world: Worlds) -> None:
    for without, having in zip(
        world(2).run(train_with_sanity_check, 0), world(2).run(train_with_sanity_check, 2), strict=True
    ):
        assert without["losses"] == having["losses"]
        assert all(torch.equal(without["weights"][name], having["weights"][name]) for name in without["weights"])


# -- hooks


class CallsItselfInHooks(EvaluatedGpt):
    """Runs its own forward where no step is going on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}

    def look(self, hook: str) -> None:
        with torch.no_grad():
            self.seen[hook] = self(TOKENS)

    def on_fit_start(self) -> None:
        self.look("on_fit_start")

    def on_train_epoch_start(self) -> None:
        self.look("on_train_epoch_start")

    def on_validation_epoch_end(self) -> None:
        self.look("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.look("on_train_epoch_end")

    def on_train_end(self) -> None:
        self.look("on_train_end")

    def on_fit_end(self) -> None:
        self.look("on_fit_end")


def call_in_hooks(strategy: Callable[[], Any]) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    model, loader = CallsItselfInHooks(), token_loader(16)
    make_trainer(strategy(), max_epochs=2).fit(model, loader, loader)
    model.look("after fit")
    return model.seen


def test_a_module_calls_itself_in_every_hook_as_under_ddp(world: Worlds) -> None:
    found, expected = world(2).run(call_in_hooks, sharded)[0], world(2).run(call_in_hooks, DDPStrategy)[0]
    assert found.keys() == expected.keys()
    assert len(found) == 7
    for hook, logits in expected.items():
        torch.testing.assert_close(found[hook], logits, rtol=1e-4, atol=1e-5, msg=f"other logits in {hook}")


class LooksAround(EvaluatedGpt):
    """Notes what Lightning tells of the device and of the parameters."""

    def setup(self, stage: str) -> None:
        self.sizes = {name: (tuple(p.shape), p.ndim, p.numel()) for name, p in self.named_parameters()}
        self.before = dict(self.named_parameters())

    def on_fit_start(self) -> None:
        after = dict(self.named_parameters())
        self.unchanged = {
            "names": list(after) == list(self.before),
            "identity": all(after[name] is self.before[name] for name in after),
            "sizes": {name: (tuple(p.shape), p.ndim, p.numel()) for name, p in after.items()} == self.sizes,
            "type": all(isinstance(p, torch.nn.Parameter) for p in after.values()),
            "sharded": all(isinstance(p, ShardTensor) for p in after.values()),
            "tied": self.head.weight is self.embed.weight,
            "device": (self.device, self.dtype) == (torch.device("cpu"), torch.float32),
        }


def look_around() -> dict[str, bool]:
    model = LooksAround()
    make_trainer(sharded(), max_steps=1).fit(model, token_loader(8))
    return model.unchanged


def test_parameters_keep_identity_name_and_size(world: Worlds) -> None:
    assert {key for answers in world(2).run(look_around) for key, value in answers.items() if not value} == set()


# -- what Lightning's own parts see


def count_batches(num_nodes: int) -> dict[str, Any]:
    trainer = make_trainer(ShardedDP(), max_epochs=1, num_nodes=num_nodes)
    model = EvaluatedGpt()
    trainer.fit(model, token_loader(64, batch_size=1), token_loader(64, batch_size=1))
    sampler = trainer.train_dataloader.sampler
    return {
        "batches": (trainer.num_training_batches, trainer.num_val_batches, len(model.losses)),
        "sampler": (sampler.num_replicas, sampler.rank),
        "ranks": (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank),
        "zero": trainer.is_global_zero,
    }


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_every_rank_gets_its_share_of_the_data(world: Worlds, num_nodes: int) -> None:
    for rank, found in enumerate(world(2).run(count_batches, num_nodes)):
        place = (rank, 0) if num_nodes == 1 else (0, rank)
        assert found == {
            "batches": (32, [32], 32),
            "sampler": (2, rank),
            "ranks": (2, rank, *place),
            "zero": rank == 0,
        }


def hybrid_groups(num_nodes: int, shard_size: int | None) -> tuple[int, int]:
    strategy = ShardedDP("hybrid_shard", shard_size)
    make_trainer(strategy, max_steps=1, num_nodes=num_nodes).fit(TinyGpt(), token_loader(16))
    return strategy.mesh.topology.replicate_size, strategy.mesh.topology.shard_size


@pytest.mark.parametrize(
    ("num_nodes", "shard_size", "expected"), [(1, None, (1, 4)), (2, None, (2, 2)), (1, 2, (2, 2)), (2, 1, (4, 1))]
)
def test_hybrid_sharding_shards_inside_of_a_node(
    world: Worlds, num_nodes: int, shard_size: int | None, expected: tuple[int, int]
) -> None:
    assert world(4).run(hybrid_groups, num_nodes, shard_size) == [expected] * 4


def summary_totals() -> tuple[int, int]:
    model = TinyGpt()
    model.blocks[0].requires_grad_(False)
    make_trainer(sharded(), max_steps=1).fit(model, token_loader(8))
    summary = summarize(model)
    return summary.total_parameters, summary.trainable_parameters


def test_the_model_summary_counts_whole_parameters(world: Worlds) -> None:
    model = TinyGpt()
    total = sum(parameter.numel() for parameter in model.parameters())
    frozen = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert world(2).run(summary_totals) == [(total, total - frozen)] * 2


def run_callbacks(folder: str) -> dict[str, Any]:
    checkpoints = ModelCheckpoint(f"{folder}/checkpoints", "{epoch}", monitor="val", save_top_k=2, save_last=True)
    stopping = EarlyStopping("val", patience=1, min_delta=100.0)
    trainer = make_trainer(
        sharded(),
        max_epochs=9,
        callbacks=[LearningRateMonitor("step"), checkpoints, stopping],
        enable_checkpointing=True,
        enable_model_summary=True,
        log_every_n_steps=1,
        logger=CSVLogger(folder),
    )
    trainer.fit(EvaluatedGpt(), token_loader(16), token_loader(16))
    rate = trainer.callback_metrics["lr-AdamW/pg1"].item()
    trainer.test(ckpt_path="best", dataloaders=token_loader(16), verbose=False)
    return {
        "epochs": trainer.current_epoch,
        "best": Path(checkpoints.best_model_path).name,
        "rate": rate,
        "test": trainer.callback_metrics["test"].item(),
        "val": checkpoints.best_model_score.item(),
    }


def test_stock_callbacks_run(world: Worlds, tmp_path: Path) -> None:
    first, second = world(2).run(run_callbacks, str(tmp_path))
    assert first == second
    assert first["epochs"] == 2, "no improvement by 100 in the second epoch: training should have stopped"
    assert first["best"] == "epoch=1.ckpt"
    assert first["rate"] == pytest.approx(1e-2 / (1 + 0.1 * 3))
    assert first["test"] == pytest.approx(first["val"])
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*")) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]


def buffers_after_fit(stages: Sequence[str]) -> dict[str, Tensor]:
    """Buffers once more than training has touched them."""
    seed_everything(1, verbose=False)

    class Evaluated(TinyConvNet):
        def validation_step(self, batch: Any, batch_index: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

    model, trainer = Evaluated(), make_trainer(ShardedDP(), max_epochs=1)
    trainer.fit(model, image_loader(16))
    for stage in stages:
        getattr(trainer, stage)(model, image_loader(16), verbose=False)
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_evaluation_sees_rank_zeros_running_statistics_on_every_rank(world: Worlds) -> None:
    after_training = world(2).run(buffers_after_fit, [])
    first, second = world(2).run(buffers_after_fit, ["validate"])
    assert any(not torch.equal(after_training[0][name], after_training[1][name]) for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], after_training[0][name]) for name in first)
