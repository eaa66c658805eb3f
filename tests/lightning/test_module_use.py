"""What a LightningModule may do with its parameters and its Trainer while it trains: all that DDP lets it do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from shardeddp import ShardedDP, ShardTensor
from support.parity import Run, Trained, assert_same_training
from support.tasks import VOCABULARY, Block, HasAnOptimizerOfItsOwn, Recorded, TinyGpt, token_loader
from support.trainers import make_trainer
from world import World, Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)

UNITS = {"auto_wrap_policy": {Block}}


def assert_equals_ddp(world: World, run: Run) -> list[Trained]:
    found = world.run(run.sharded_by, UNITS)
    assert_same_training(found, world.run(run.under_ddp))
    return found


# -- parameters


class PartlyFrozen(TinyGpt):
    """A whole block, part of another, and the tied embedding do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)

    def on_train_end(self) -> None:
        optimizer = self.optimizers()
        frozen = {parameter for parameter in self.parameters() if not parameter.requires_grad}
        assert len(frozen) == 1 + 6 + 2
        assert all(parameter.grad is None for parameter in frozen)
        assert not frozen & set(optimizer.state)


def test_frozen_parameters_stay_as_they_are_and_cost_no_gradient_and_no_state(
    world: Worlds,
) -> None:
    trained = assert_equals_ddp(world(2), Run(model=PartlyFrozen, loader=token_loader))
    torch.manual_seed(1)
    fresh = PartlyFrozen().state_dict()
    changed = {
        name for name, weight in trained[0].weights.items() if not torch.equal(weight, fresh[name])
    }
    assert changed == {
        *(f"blocks.1.{name}" for name in ("norm.weight", "norm.bias", "down.weight", "down.bias")),
        *(name for name in fresh if name.startswith("blocks.2.")),
    }


class BuildsInConfigureModel(Recorded):
    """Has no parameters before the hook that Lightning calls for it, again in every fit."""

    def configure_model(self) -> None:
        if not self._modules:
            self.inner = TinyGpt()

    def loss(self, batch: Tensor) -> Tensor:
        return self.inner.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class MakesItsOptimizerEarly(TinyGpt):
    """Holds parameters from before they were sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [BuildsInConfigureModel, MakesItsOptimizerEarly, HasAnOptimizerOfItsOwn]
)
def test_where_the_model_and_its_optimizer_come_from_makes_no_difference(
    world: Worlds, model: type[Recorded]
) -> None:
    assert_equals_ddp(
        world(2), Run(model=model, loader=token_loader, options={"gradient_clip_val": 0.5})
    )


class UsesParametersAnywhere(Recorded):
    """Parameters of the module itself, of children that it does not call, in steps and in helper methods."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def encode(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embed.weight)
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        logits = self.encode(batch[:, :-1]) @ self.embed.weight.T / self.temperature + self.bias
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def test_parameters_are_usable_in_steps_and_helper_methods_without_a_forward(world: Worlds) -> None:
    assert_equals_ddp(world(2), Run(model=UsesParametersAnywhere, loader=token_loader))


class PenalizesBlocks(TinyGpt):
    """Reads parameters that inner units hold, outside the forward of those units."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + 0.01 * sum(
            block.up.weight.square().sum() for block in self.blocks
        )


def test_a_penalty_on_the_parameters_of_units_is_right_and_says_what_it_costs(
    world: Worlds,
) -> None:
    run = Run(
        model=PenalizesBlocks,
        loader=token_loader,
        warns=r"parameter blocks\.\d\.up\.weight is used outside",
    )
    assert_equals_ddp(world(2), run)


class SkipsBlocks(TinyGpt):
    """Another block in every step, and on every rank."""

    def forward(self, tokens: Tensor) -> Tensor:
        used = self.blocks[(self.global_step + self.global_rank) % 3]
        return self.head(used(self.embed(tokens)))


# Ranks have to gather the same units; inside of a unit, and where nothing is gathered, each may use what it likes.
@pytest.mark.parametrize(("strategy", "units"), [("full_shard", None), ("no_shard", {Block})])
def test_parameters_that_only_some_ranks_use_in_a_step_need_no_flag(
    world: Worlds, reference: Callable[..., list[Any]], strategy: str, units: Any
) -> None:
    run = Run(
        model=SkipsBlocks,
        loader=token_loader,
        warns="units run in another",
        ddp={"find_unused_parameters": True},
    )
    found = world(2).run(run.sharded_by, {"sharding_strategy": strategy, "auto_wrap_policy": units})
    assert_same_training(found, reference(2, run.under_ddp))


class LooksAtItsHead(TinyGpt):
    """Reads the whole of a weight of the root unit, and this rank's elements, in its step."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.seen = self.head.weight.full_tensor(), self.head.weight.to_local()  # type: ignore[operator]
        return super().training_step(batch, batch_index)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_a_whole_weight_is_read_in_a_step_as_outside_of_it(strategy: str) -> None:
    module = LooksAtItsHead()
    trainer = make_trainer(ShardedDP(strategy), max_steps=2, precision="bf16-mixed")
    trainer.fit(module, token_loader(16))
    whole, local = module.seen
    last = module.head.weight.full_tensor()  # type: ignore[operator]
    assert (whole.shape, whole.dtype) == (last.shape, torch.float32)
    assert not torch.equal(whole, last)  # a step lies between
    assert local.shape == module.head.weight.to_local().shape  # type: ignore[operator]


# -- logging


class Logs(TinyGpt):
    """Values that differ between ranks, and metrics that are states of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCABULARY)
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        rank = float(self.global_rank)
        self.log("synced", rank, sync_dist=True, on_step=False, on_epoch=True)
        self.log("summed", rank + 1, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(
            "largest",
            torch.tensor(rank),
            sync_dist=True,
            reduce_fx="max",
            on_step=False,
            on_epoch=True,
        )
        self.log("own", rank)
        self.mean.update(rank)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.accuracy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_index)


def log_under(sharding_strategy: str | None) -> dict[str, float]:
    trainer = make_trainer(
        "ddp" if sharding_strategy is None else ShardedDP(sharding_strategy), max_epochs=1
    )
    trainer.fit(Logs(), token_loader(16 * dist.get_world_size()))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_logged_values_and_metrics_are_those_of_all_ranks(world: Worlds, strategy: str) -> None:
    found, expected = world(2).run(log_under, strategy), world(2).run(log_under, None)
    for rank in range(2):
        assert found[rank] == pytest.approx(expected[rank], rel=1e-5)
        assert found[rank] | {"accuracy": 0} == {
            "synced": 0.5,
            "summed": 4 * (1.0 + 2.0),
            "largest": 1.0,
            "own": float(rank),
            "mean": 0.5,
            "accuracy": 0,
        }


# -- communication


class Communicates(TinyGpt):
    """Asks its Trainer's strategy for everything that a strategy offers."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        strategy, rank = self.trainer.strategy, self.global_rank
        strategy.barrier("in the middle of a step")
        self.answers = {
            "gathered": self.all_gather(torch.tensor([rank, 7])).tolist(),
            "gathered tree": [
                x.tolist() for x in self.all_gather({"a": rank, "b": torch.ones(1)}).values()
            ],
            "mean": strategy.reduce(torch.tensor(float(rank))).item(),
            "mean of integers": strategy.reduce(torch.tensor(rank)).item(),
            "sum": strategy.reduce(torch.tensor(rank + 1), reduce_op="sum").item(),
            "maximum": strategy.reduce(torch.tensor(rank), reduce_op=dist.ReduceOp.MAX).item(),
            "no tensor": strategy.reduce("as it is"),
            "broadcast": strategy.broadcast({"rank": rank}, src=1),
            "all": [strategy.reduce_boolean_decision(x) for x in (True, rank == 0, False)],
            "any": [
                strategy.reduce_boolean_decision(x, all=False) for x in (True, rank == 0, False)
            ],
        }
        weighted = self.all_gather(self(batch[:, :-1]).mean(), sync_grads=True)
        loss = (weighted * torch.tensor([1.0, 3.0])).sum()
        self.losses.append(loss.item())
        return loss


def communicate() -> dict[str, Any]:
    model = Communicates()
    make_trainer(ShardedDP(**UNITS), max_steps=1).fit(model, token_loader(8))
    return model.answers


def test_collectives_for_users_answer_as_ddp_documents_them(world: Worlds) -> None:
    assert world(2).run(communicate) == 2 * [
        {
            "gathered": [[0, 7], [1, 7]],
            "gathered tree": [[0, 1], [[1.0], [1.0]]],
            "mean": 0.5,
            "mean of integers": 0.5,
            "sum": 3,
            "maximum": 1,
            "no tensor": "as it is",
            "broadcast": {"rank": 1},
            "all": [True, False, False],
            "any": [True, True, False],
        }
    ]


@pytest.mark.slow
def test_gradients_flow_through_a_gather_of_all_ranks_as_under_ddp(world: Worlds) -> None:
    assert_equals_ddp(world(2), Run(model=Communicates, loader=token_loader))


def reduce_parameters() -> bool:
    model, strategy = TinyGpt(), ShardedDP(**UNITS)
    make_trainer(strategy, max_steps=1).fit(model, token_loader(8))
    weight = model.blocks[0].up.weight
    assert isinstance(weight, ShardTensor)
    full = weight.full_tensor()
    both = strategy.all_gather(weight)
    return torch.equal(strategy.reduce(weight), full) and all(
        torch.equal(each, full) for each in both
    )


def test_a_sharded_parameter_is_reduced_and_gathered_as_a_whole(world: Worlds) -> None:
    assert world(2).run(reduce_parameters) == [True, True]


# -- accumulation


class FromZero(Callback):
    """Leaves out what Lightning reduces before training, the number of batches for instance."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.traffic.reset()


def count_reductions(
    strategy: str, reduce_every_backward: bool | None
) -> tuple[dict[str, int], Trained]:
    chosen = ShardedDP(strategy, reduce_every_backward=reduce_every_backward, **UNITS)
    torch.manual_seed(1)
    model = TinyGpt()
    trainer = make_trainer(chosen, max_epochs=1, accumulate_grad_batches=2, callbacks=[FromZero()])
    trainer.fit(model, token_loader(4 * 5 * 2))
    calls = {kind: chosen.traffic.calls[kind] for kind in ("reduce_scatter", "all_reduce")}
    weights = {
        name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, ShardTensor)
    }
    return calls, Trained(losses=model.losses, weights=weights)


# Five micro-batches make three steps, the last of them from one; there are four units.
@pytest.mark.loop(1)
@pytest.mark.parametrize(
    ("strategy", "reduce_every_backward", "backwards"),
    [
        ("full_shard", None, 5),
        ("full_shard", True, 5),
        ("full_shard", False, 3),
        ("shard_optimizer", None, 3),
        ("shard_optimizer", True, 5),
    ],
)
def test_accumulation_communicates_as_often_as_it_was_told(
    world: Worlds, strategy: str, reduce_every_backward: bool | None, backwards: int
) -> None:
    for calls, _ in world(2).run(count_reductions, strategy, reduce_every_backward):
        assert calls == {"reduce_scatter": 4 * backwards, "all_reduce": 0}


def test_without_shards_accumulation_all_reduces_once_per_step(world: Worlds) -> None:
    for calls, _ in world(2).run(count_reductions, "no_shard", None):
        assert calls == {"reduce_scatter": 0, "all_reduce": 4 * 3}


@pytest.mark.slow
def test_accumulation_gives_one_result_wherever_it_happens(world: Worlds) -> None:
    results = [
        [trained for _, trained in world(2).run(count_reductions, "full_shard", x)]
        for x in (True, False)
    ]
    assert_same_training(*results)
