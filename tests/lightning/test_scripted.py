"""Scripted and traced modules inside of a LightningModule, with parameters and without, trained beside DDP."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardeddp import ShardedDP
from support.parity import Run, assert_same_training
from support.tasks import Block, Recorded, TinyGpt, token_loader
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)


class ScriptedBlocks(TinyGpt):
    """Every block is scripted; the embedding is Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.jit.script(block) for block in self.blocks)


class TracedBlock(TinyGpt):
    """One block in the middle is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = torch.jit.trace(self.blocks[1], torch.zeros(2, 5, 8))


class FrozenTeacher(TinyGpt):
    """A scripted teacher whose parameters do not train, and a function without any."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.jit.script(Block(8).requires_grad_(False))
        self.activation = torch.jit.script(nn.GELU())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        with torch.no_grad():
            target = self.teacher(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.activation(x) + target)


class TiedToScript(TinyGpt):
    """A scripted part and one of Python's have a weight in common; another scripted one is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        lower = nn.Linear(8, 8)
        upper = nn.Linear(8, 8)
        upper.weight = lower.weight
        self.lower = torch.jit.script(lower)
        self.again = self.lower
        self.upper = upper

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.blocks[0](self.upper(F.gelu(self.again(self.lower(x)))))
        return self.head(x)


class ScriptedBatchNorm(TinyGpt):
    """Buffers that a scripted module changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = torch.jit.script(
            nn.Sequential(nn.Linear(8, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).unflatten(0, tokens.shape)


MODELS = [ScriptedBatchNorm, ScriptedBlocks, TracedBlock, FrozenTeacher, TiedToScript]
OPTIONS: list[tuple[int, Mapping[str, Any]]] = [
    (2, {"sharding_strategy": "full_shard"}),
    (2, {"sharding_strategy": "shard_grad_op"}),
    (2, {"sharding_strategy": "shard_optimizer"}),
    (2, {"sharding_strategy": "no_shard"}),
    (4, {"sharding_strategy": "hybrid_shard", "shard_size": 2}),
]


CASES = [(model, *OPTIONS[0]) for model in MODELS] + [
    (ScriptedBlocks, *option) for option in OPTIONS[1:]
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks", "options"), CASES)
def test_scripted_and_traced_modules_train_as_under_ddp(
    world: Worlds,
    reference: Callable[..., list[Any]],
    model: type[Recorded],
    ranks: int,
    options: Mapping[str, Any],
) -> None:
    ddp = {"find_unused_parameters": model is TiedToScript}
    clip = {"gradient_clip_val": 0.5}
    run = Run(model=model, loader=token_loader, options=clip, ddp=ddp, warns=".*jit|.*find_unused")
    assert_same_training(world(ranks).run(run.sharded_by, options), reference(ranks, run.under_ddp))


class UsesScripts(ScriptedBlocks):
    """Everything else that is done with parameters, between steps."""

    def on_train_epoch_end(self) -> None:
        weight = self.blocks[0].up.weight
        with torch.no_grad():
            weight.mul_(0.9)
            weight[0].zero_()
            nn.init.normal_(self.blocks[1].down.weight, std=0.1)
        self.load_state_dict({name: 1.01 * tensor for name, tensor in self.state_dict().items()})
        with (
            self.trainer.strategy.summon_full_params()
            if hasattr(self.trainer.strategy, "runtime")
            else nullcontext()
        ):
            if self.global_rank == 0 or not hasattr(self.trainer.strategy, "runtime"):
                self.blocks[2].up.bias.data.add_(0.1)
                assert type(self.blocks[2].up.bias).__name__ != "ShardTensor"


@pytest.mark.slow
def test_what_is_done_with_parameters_between_steps_reaches_scripted_modules(world: Worlds) -> None:
    run = Run(model=UsesScripts, loader=token_loader, warns=".*jit")
    assert_same_training(world(2).run(run.sharded_by, {}), world(2).run(run.under_ddp))


@pytest.mark.loop(1)
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_trains_scripted_modules_as_without_a_strategy(
    world: Worlds, model: type[Recorded]
) -> None:
    run = Run(model=model, loader=token_loader, warns=".*jit")
    assert_same_training(world(1).run(run.sharded_by, {}), world(1).run(run.alone, 1))


@pytest.mark.slow
@pytest.mark.parametrize("model", [ScriptedBlocks, TracedBlock])
def test_scripted_modules_train_in_mixed_precision(world: Worlds, model: type[Recorded]) -> None:
    run = Run(model=model, loader=token_loader, warns=".*jit", options={"precision": "bf16-mixed"})
    assert_same_training(world(2).run(run.sharded_by, {}), world(2).run(run.under_ddp), rtol=3e-2)


def save_and_load(path: str, kind: str) -> None:
    warnings.filterwarnings("ignore", ".*jit")
    trainer = make_trainer(ShardedDP(state_dict_type=kind), max_steps=2)
    model = ScriptedBlocks()
    trainer.fit(model, token_loader(16))
    trainer.save_checkpoint(path)
    again = ScriptedBlocks()
    make_trainer(ShardedDP(), max_steps=2).fit(again, token_loader(16), ckpt_path=path)
    assert_same_weights(full_weights(again), full_weights(model))


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_scripted_modules_are_saved_and_loaded(world: Worlds, tmp_path: Path, kind: str) -> None:
    world(2).run(save_and_load, str(tmp_path / "saved"), kind)
