"""States of optimizers go to the parameters that they were of, whatever order those are in now."""

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from shardeddp.checkpoint.read import LazyTensor
from shardeddp.checkpoint.schema import KEY, NAMES
from shardeddp.lightning.resume import Resume
from support.resuming import Make, full_shard, in_one_file, shard_grad_op
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)


class Ordered(TinyGpt):
    """AdamW over parameters of the same shapes, in an order that a subclass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return super().loss(tokens) + (self.second(self.first(x)) - 0.1).square().mean()

    def order(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.order(), lr=1e-2)


class Reversed(Ordered):
    def order(self) -> list[nn.Parameter]:
        return super().order()[::-1]


class InGroups(Ordered):
    def configure_optimizers(self) -> Any:
        """One group of those that are decayed, one of the others, as many of each as before."""
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])


class InReversedGroups(Ordered):
    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1][::-1]
        others = [p for p in self.parameters() if p.dim() <= 1][::-1]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])


class DeclaredInAnotherOrder(Ordered):
    def __init__(self) -> None:
        super().__init__()
        first, second = self.first, self.second
        del self.first, self.second
        self.second = second
        self.first = first


class Renamed(Ordered):
    """The model's own keys are renamed by its hook; the optimizer's parameters follow by number."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.second
        del self.second

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return TinyGpt.loss(self, tokens) + (self.other(self.first(x)) - 0.1).square().mean()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            key.replace("second.", "other."): value for key, value in state.items()
        }


def trained(
    strategy: Any, model: TinyGpt, epochs: int, path: str | None = None
) -> tuple[Any, dict[str, torch.Tensor], list[str]]:
    """The trainer, the first moments by name when training goes on, and what was warned of."""
    moments: dict[str, torch.Tensor] = {}

    def note(*_: Any) -> None:
        optimizer = model.trainer.optimizers[0]
        for name, parameter in model.named_parameters():
            value = optimizer.state[parameter].get("exp_avg")
            if value is not None:
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                moments[name] = value.detach().clone()

    if path is not None:
        model.on_train_start = note  # type: ignore[method-assign]
    trainer = make_trainer(strategy, max_epochs=epochs)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(model, token_loader(8), ckpt_path=path)
    if path is None:
        note()
    return trainer, moments, [str(each.message) for each in said]


def resume(make: Any, path: str, saver: type[TinyGpt], loader: type[TinyGpt]) -> list[str]:
    trainer, expected, _ = trained(make(), saver(), 1)
    trainer.save_checkpoint(path)
    _, found, said = trained(full_shard(), loader(), 2, path)
    for name, moment in expected.items():
        name = name.replace("second.", "other.") if loader is Renamed else name
        assert torch.equal(found[name], moment), name
    return [text for text in said if "optimizer" in text]


@pytest.mark.loop(1)
@pytest.mark.parametrize("make", [full_shard, in_one_file, shard_grad_op])
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (Ordered, Reversed),
        (Reversed, Ordered),
        (InGroups, InReversedGroups),
        (Ordered, DeclaredInAnotherOrder),
    ],
)
def test_states_follow_their_parameters_by_name(
    world: Worlds, tmp_path: Path, make: Make, saver: type[TinyGpt], loader: type[TinyGpt]
) -> None:
    assert world(2).run(resume, make, str(tmp_path / "a.ckpt"), saver, loader) == [[], []]


@pytest.mark.loop(1)
@pytest.mark.parametrize("make", [full_shard, in_one_file])
def test_a_renamed_parameter_takes_the_state_by_number_and_is_named(
    world: Worlds, tmp_path: Path, make: Make
) -> None:
    said = world(2).run(resume, make, str(tmp_path / "a.ckpt"), Ordered, Renamed)[0]
    assert any("second.weight to other.weight" in text for text in said)


def ddp() -> DDPStrategy:
    return DDPStrategy()


def resume_from_ddp(path: str, loader: type[TinyGpt]) -> list[str]:
    trainer, _, _ = trained(ddp(), Ordered(), 1)
    trainer.save_checkpoint(path)
    return [text for text in trained(full_shard(), loader(), 2, path)[2] if "optimizer" in text]


@pytest.mark.slow
def test_states_without_names_are_loaded_by_number_and_another_order_is_said(
    world: Worlds, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    assert world(2).run(resume_from_ddp, path, Ordered) == [[], []]
    said = world(2).run(resume_from_ddp, path, DeclaredInAnotherOrder)[0]
    assert any("by number" in text and "first.weight" in text for text in said)


def resume_without_names(path: str) -> list[str]:
    """A directory of a release that kept no list: names of tensors tell it."""
    trainer, expected, _ = trained(full_shard(), Ordered(), 1)
    extended = Resume.extended

    def without(*args: Any) -> dict[str, Any]:
        checkpoint = extended(*args)
        assert checkpoint[KEY].pop(NAMES)
        return checkpoint

    with mock.patch.object(Resume, "extended", without):
        trainer.save_checkpoint(path)

    class Older(Reversed):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["optimizer_states"][0]["state"][0]
            assert isinstance(state["exp_avg"], LazyTensor)

    _, found, _ = trained(full_shard(), Older(), 2, path)
    return [name for name, moment in expected.items() if not torch.equal(found[name], moment)]


def test_names_are_those_of_stored_tensors_where_there_is_no_list(
    world: Worlds, tmp_path: Path
) -> None:
    assert world(2).run(resume_without_names, str(tmp_path / "a.ckpt")) == [[], []]
