"""What hooks, samplers, summaries and stock callbacks see of a sharded run: what they see under DDP."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor

from shardeddp import ShardedDP, ShardTensor
from support.tasks import Block, EvaluatedGpt, TinyConvNet, TinyGpt, image_loader, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

TOKENS = torch.arange(12).view(2, 6) % 11


def sharded() -> ShardedDP:
    return ShardedDP(auto_wrap_policy={Block})


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
    found, expected = (
        world(2).run(call_in_hooks, sharded)[0],
        world(2).run(call_in_hooks, DDPStrategy)[0],
    )
    assert found.keys() == expected.keys()
    assert len(found) == 7
    for hook, logits in expected.items():
        torch.testing.assert_close(
            found[hook], logits, rtol=1e-4, atol=1e-5, msg=f"other logits in {hook}"
        )


class LooksAround(EvaluatedGpt):
    """Notes what Lightning tells of the device and of the parameters."""

    def setup(self, stage: str) -> None:
        self.sizes = {
            name: (tuple(p.shape), p.ndim, p.numel()) for name, p in self.named_parameters()
        }
        self.before = dict(self.named_parameters())

    def on_fit_start(self) -> None:
        after = dict(self.named_parameters())
        self.unchanged = {
            "names": list(after) == list(self.before),
            "identity": all(after[name] is self.before[name] for name in after),
            "sizes": {name: (tuple(p.shape), p.ndim, p.numel()) for name, p in after.items()}
            == self.sizes,
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
    assert {
        key for answers in world(2).run(look_around) for key, value in answers.items() if not value
    } == set()


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_nodes", "shard_size", "expected"),
    [(1, None, (1, 4)), (2, None, (2, 2)), (1, 2, (2, 2)), (2, 1, (4, 1))],
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
    checkpoints = ModelCheckpoint(
        f"{folder}/checkpoints", "{epoch}", monitor="val", save_top_k=2, save_last=True
    )
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


@pytest.mark.slow
def test_stock_callbacks_run(world: Worlds, tmp_path: Path) -> None:
    first, second = world(2).run(run_callbacks, str(tmp_path))
    assert first == second
    assert first["epochs"] == 2, (
        "no improvement by 100 in the second epoch: training should have stopped"
    )
    assert first["best"] == "epoch=1.ckpt"
    assert first["rate"] == pytest.approx(1e-2 / (1 + 0.1 * 3))
    assert first["test"] == pytest.approx(first["val"])
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*")) == [
        "epoch=0.ckpt",
        "epoch=1.ckpt",
        "last.ckpt",
    ]


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
