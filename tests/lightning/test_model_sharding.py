"""Whole parameters and lone ranks in runs of a Trainer: summoned in every hook, and errors where a rank would wait."""

import copy
import io
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from shardeddp import ShardedDP, ShardTensor
from support.tasks import Block, EvaluatedGpt, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

HOOKS = (
    *(
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_zero_grad",
    ),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start"),
    *(
        "on_validation_epoch_end",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
    ),
    *("on_test_start", "on_test_end", "on_predict_end"),
)


def train(model: TinyGpt, **options: Any) -> TinyGpt:
    make_trainer(ShardedDP(auto_wrap_policy={Block}), max_steps=2, **options).fit(
        model, token_loader(8)
    )
    return model


class Summons(EvaluatedGpt):
    """Saves its whole weights on rank 0 wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.summed: dict[str, float] = {}

    def summon(self, hook: str) -> None:
        with self.trainer.strategy.summon_full_params():
            assert not any(isinstance(p, ShardTensor) for p in self.parameters())
            if self.trainer.is_global_zero:
                torch.save(self.state_dict(), io.BytesIO())
                if hook == "on_train_batch_end":
                    with torch.no_grad():
                        self.blocks[0].up.bias.add_(1.0)
            self.summed[hook] = sum(p.detach().double().sum().item() for p in self.parameters())


for name in HOOKS:
    setattr(Summons, name, lambda self, *_, hook=name: self.summon(hook))


def summon_everywhere() -> dict[str, float]:
    model = Summons()
    trainer = make_trainer(
        ShardedDP(auto_wrap_policy={Block}), max_steps=2, enable_progress_bar=False
    )
    trainer.fit(model, token_loader(8), token_loader(8))
    trainer.test(model, token_loader(8), verbose=False)
    trainer.predict(model, token_loader(8))
    model.summon("after all")
    assert model.summed["after all"] == sum(
        w.double().sum().item() for w in full_weights(model).values()
    ) - (
        full_weights(model)["head.weight"].double().sum().item()  # tied
    )
    return model.summed


@pytest.mark.slow
def test_whole_parameters_are_had_in_every_hook_and_after_the_run(world: Worlds) -> None:
    found = world(2).run(summon_everywhere)
    written = [each.pop("on_train_batch_end") for each in found]
    assert set(found[0]) == {*HOOKS, "after all"} - {"on_train_batch_end"} and found[0] == found[1]
    assert written[0] == pytest.approx(written[1] + 16.0)  # by rank 0, before the others see it
    assert found[0]["on_fit_start"] != found[0]["on_fit_end"] == found[0]["after all"]


class SavesOnRankZero(TinyGpt):
    @rank_zero_only
    def save_norm(self) -> None:
        self.norm = self.blocks[0].up.weight.detach().norm().item()

    def on_train_batch_end(self, *_: Any) -> None:
        self.save_norm()


class AsksOnRankZero(TinyGpt):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            self.blocks[0].up.weight.detach().sum()


class RunsOnRankZero(TinyGpt):
    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self(torch.zeros(1, 3, dtype=torch.int64))


def train_alone(model: type[TinyGpt]) -> None:
    train(model())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            SavesOnRankZero,
            r"norm of blocks\.0\.up\.weight at .*SavesOnRankZero\.save_norm, which rank_zero_only runs",
        ),
        (
            AsksOnRankZero,
            r"sum of blocks\.0\.up\.weight at .*test_model_\w+\.py:\d+.*rank 1 (waits|is) in Trainer\.fit",
        ),
        (
            RunsOnRankZero,
            r"the forward of \(root\) at .*test_model_\w+\.py:\d+.*rank 1 (waits|is) in Trainer\.fit",
        ),
    ],
)
def test_what_only_rank_zero_asks_of_sharded_parameters_is_an_error_soon(
    world: Worlds, model: type[TinyGpt], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message + r"(.|\n)*strategy\.summon_full_params"):
        world(2).run(train_alone, model, timeout_s=30)


class ChoosesInputs(TinyGpt):
    """Leaves gradients on two parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch), inputs=[self.blocks[0].up.weight, self.embed.weight])
        self.trained = sorted(name for name, p in self.named_parameters() if p.grad is not None)


def choose_inputs() -> list[str]:
    return train(ChoosesInputs(), max_epochs=1).trained


def test_a_backward_to_chosen_parameters_reaches_those_of_units(world: Worlds) -> None:
    assert world(2).run(choose_inputs) == 2 * [["blocks.0.up.weight", "embed.weight"]]


class Teaches(EvaluatedGpt):
    """A teacher that is copied from the sharded model and follows it."""

    def on_fit_start(self) -> None:
        self.teacher = [copy.deepcopy(self.blocks).requires_grad_(False)]

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        with torch.no_grad():
            taught = self.teacher[0][0](x)
        return (
            super().training_step(batch, batch_index) + (self.blocks[0](x) - taught).square().mean()
        )

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for average, p in zip(self.teacher[0].parameters(), self.blocks.parameters(), strict=True):
            average.lerp_(p, 0.5)


def teach(strategy: str) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = Teaches()
    chosen = "ddp" if strategy == "ddp" else ShardedDP(strategy, auto_wrap_policy={Block})
    make_trainer(chosen, max_steps=3).fit(model, token_loader(24))
    teacher = model.teacher[0].parameters()
    return model.losses, [
        p.full_tensor() if isinstance(p, ShardTensor) else p.detach() for p in teacher
    ]


def test_a_copy_of_the_sharded_model_follows_and_teaches_it_as_under_ddp(world: Worlds) -> None:
    found, expected = world(2).run(teach, "full_shard"), world(2).run(teach, "ddp")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
