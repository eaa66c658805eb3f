"""Layers split over tensor-parallel ranks train as one process does, under every strategy; the rest is refused."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardeddp import ShardedDP, ShardTensor
from shardeddp.errors import ConfigurationError
from support.trainers import make_trainer
from world import Worlds

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
STEPS, BATCH = 20, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def data() -> torch.Tensor:
    """(batches, batch, sequence, features)."""
    return torch.randn(2 * STEPS * BATCH, 4, 8, generator=torch.Generator().manual_seed(3))


class Split(LightningModule):
    """Blocks whose first layer is split by columns and whose second is split by rows."""

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 1)
        self.is_split = False
        self.seen: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None and not self.is_split:
            self.is_split = True
            for block in self.blocks:
                parallelize_module(block, self.device_mesh["tensor_parallel"], self.plan)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.blocks(x)) - x.sum(-1, keepdim=True)).pow(2).mean()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.loss(batch[0])
        self.log("mean", loss, sync_dist=True)
        self.log("count", torch.ones(()), sync_dist=True, reduce_fx="sum")
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["mean"]))

    def train_dataloader(self) -> Any:
        ranks = self.trainer.strategy.distributed_sampler_kwargs
        own = DistributedSampler(dataset := TensorDataset(data()), shuffle=False, **ranks)
        return DataLoader(dataset, batch_size=BATCH // ranks["num_replicas"], sampler=own)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class SequenceSplit(Split):
    """The same, with activations between blocks split along the sequence."""

    def configure_model(self) -> None:
        if self.device_mesh is None or self.is_split:
            return
        self.is_split = True
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput

        mesh = self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(block, mesh, plan)
        whole = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
        parallelize_module(self.blocks, mesh, PrepareModuleInput(**whole, use_local_output=False))
        parallelize_module(
            self.blocks,
            mesh,
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        )


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    every = list(module.parameters())
    return torch.optim.AdamW(
        [
            {"params": [it for it in every if it.ndim > 1], "weight_decay": 0.1},
            {"params": [it for it in every if it.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def reference(clips: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What one process trains on the whole batches, and its losses."""
    module, losses = Split(), list[float]()
    optimizer = optimizer_of(module)
    for number, batch in enumerate(data().split(BATCH)):
        loss = module.loss(batch)
        losses.append(loss.item())
        (loss / 2).backward()
        if number % 2:
            if clips == "norm":
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            else:
                nn.utils.clip_grad_value_(module.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return {name: it.detach().clone() for name, it in module.named_parameters()}, losses


def train(
    name: str,
    size: int,
    clips: str = "norm",
    kind: type[Split] = Split,
    path: str = "",
    **more: Any,
) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """The parameters that ranks have trained together, logged means, and a logged sum."""
    if name == "hybrid_shard":
        more["shard_size"] = max(1, dist.get_world_size() // size // 2)
    strategy = ShardedDP(name, tensor_parallel_size=size, auto_wrap_policy={Block}, **more)
    trainer = make_trainer(
        strategy,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5 if clips == "norm" else 0.05,
        gradient_clip_algorithm=clips,
        use_distributed_sampler=False,
    )
    module = kind()
    trainer.fit(module)
    count = float(trainer.callback_metrics["count"])
    if path:
        trainer.save_checkpoint(path)
    assert all(isinstance(it, ShardTensor) for it in module.parameters())
    assert module.blocks[0].up.weight.shape == (12, 8)
    # A state dict and a summoned model are whole.
    state = {key: value.full_tensor() for key, value in module.state_dict().items()}
    with strategy.summon_full_params(module):
        for key, whole in module.named_parameters():
            assert torch.equal(whole, state[key])
    return state, module.seen, count


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("name", STRATEGIES)
def test_four_ranks_train_as_one_process_does(world: Worlds, name: str) -> None:
    expected, losses = reference("norm")
    answers = world(4).run(train, name, 2)
    for found, seen, count in answers:
        assert distance(found, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-4
        assert count == 2  # ranks that split layers are counted once


def test_trainings_are_equal_to_the_bit(world: Worlds) -> None:
    (first, *_), *_ = world(4).run(train, "full_shard", 2)
    for found, *_ in world(4).run(train, "full_shard", 2):
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_all_ranks_may_split_layers_and_clip_by_value(world: Worlds) -> None:
    expected, _ = reference("value")
    for found, *_ in world(4).run(train, "full_shard", 4, "value"):
        assert distance(found, expected) < 1e-5


def test_sequences_may_be_split_as_well(world: Worlds) -> None:
    expected, _ = reference("norm")
    for found, *_ in world(4).run(train, "full_shard", 2, "norm", SequenceSplit):
        assert distance(found, expected) < 1e-5


def load(path: str, size: int) -> dict[str, torch.Tensor]:
    """What a run with another number of tensor ranks finds in a checkpoint, and goes on from."""
    strategy = ShardedDP("full_shard", tensor_parallel_size=size, auto_wrap_policy={Block})
    trainer = make_trainer(
        strategy, max_steps=STEPS, accumulate_grad_batches=2, use_distributed_sampler=False
    )
    module = Split()
    trainer.fit(module, ckpt_path=path, weights_only=False)
    (optimizer,) = trainer.optimizers
    moments = {
        name: optimizer.state[parameter]["exp_avg"].full_tensor()
        for name, parameter in module.named_parameters()
    }
    state = {key: value.full_tensor() for key, value in module.state_dict().items()}
    return state | {f"moment of {name}": moment for name, moment in moments.items()}


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_is_loaded_with_other_numbers_of_tensor_ranks(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    path = str(tmp_path / "a.ckpt")
    (saved, *_), *_ = world(4).run(
        partial(train, "full_shard", 2, "norm", Split, path, state_dict_type=kind)
    )
    loaded = [world(ranks).run(load, path, size) for ranks, size in ((4, 4), (4, 2), (2, 1))]
    for answers in loaded:
        for found in answers:
            assert all(torch.equal(found[name], saved[name]) for name in saved)
            assert all(torch.equal(found[name], loaded[0][0][name]) for name in found)
    if kind == "full":  # which is what DDP reads
        content = torch.load(path, weights_only=False)["state_dict"]
        assert all(torch.equal(content[name], saved[name]) for name in saved)


def refuse(size: int, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        ShardedDP(tensor_parallel_size=size, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "options", "what"),
    [
        (0, {}, "whole number of at least 1"),
        (2, {"cpu_offload": True}, "cpu_offload"),
        (2, {"mixed_precision": "bfloat16"}, "mixed_precision"),
        (2, {"activation_checkpointing": "auto"}, "activation_checkpointing"),
        (2, {"uneven_units": True}, "uneven_units"),
        (2, {"uneven_batches": "join"}, "uneven_batches"),
        (2, {"reshard_after_forward": 2}, "reshard_after_forward"),
    ],
)
def test_options_that_were_not_tried_with_it_are_refused(
    size: int, options: dict[str, Any], what: str
) -> None:
    assert what in refuse(size, options)


class Uneven(Split):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up, self.blocks[0].down = nn.Linear(8, 13), nn.Linear(13, 8)


class Descending(Split):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Compiled(Split):
    def configure_model(self) -> None:
        super().configure_model()
        self.head.compile()


def refused(kind: type[Split], **options: Any) -> str:
    # torch's compiler imports scripted code, Lightning's callback doubts `configure_model`.
    warnings.simplefilter("ignore")
    strategy = ShardedDP(tensor_parallel_size=2, auto_wrap_policy={Block})
    trainer = make_trainer(strategy, max_steps=1, use_distributed_sampler=False, **options)
    with pytest.raises(Exception, match=r"tensor_parallel_size") as caught:
        trainer.fit(kind())
    return str(caught.value)


def refused_with_average() -> str:
    return refused(Split, callbacks=[WeightAveraging()])


@pytest.mark.parametrize(
    ("case", "arguments", "what"),
    [
        (refused, (Uneven,), "dims that tensor_parallel_size=2 divides"),
        (refused, (Descending,), "LBFGS"),
        (refused, (Compiled,), "torch.compile"),
        (refused_with_average, (), "WeightAveraging"),
    ],
)
def test_modules_that_were_not_tried_with_it_are_refused(
    world: Worlds, case: Any, arguments: tuple[Any, ...], what: str
) -> None:
    for message in world(2).run(case, *arguments):
        assert what in message
