"""States that an optimizer keeps of no parameter, under any key, go on after a resume as under DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardeddp import ShardedDP
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)

KEYS: list[Any] = [("ema", 1), "global", 3.5, None, -7, 10**6]


class Keeps(torch.optim.SGD):
    """Counts its steps under keys of its own."""

    def step(self, closure: Any = None) -> Any:
        for key in KEYS:
            self.state[key]["steps"] = self.state[key].get("steps", 0) + 1
        return super().step(closure)


class Counted(TinyGpt):
    momentum = 0.9

    def configure_optimizers(self) -> Keeps:
        return Keeps(self.parameters(), lr=0.1, momentum=self.momentum)


class Stateless(Counted):
    momentum = 0.0


def count(model: type[Counted], scope: Any, kind: str, path: str) -> list[int]:
    """Steps under each key after two epochs, the second of a resumed run."""
    data = token_loader(8 * dist.get_world_size())

    def fit(epochs: int, resumed: str | None) -> Any:
        strategy = ShardedDP(
            "full_shard",
            None,
            {Block},
            state_dict_type=kind,
            optimizer_scope={"Keeps": scope},
        )
        trainer = make_trainer(strategy, max_steps=-1, max_epochs=epochs)
        trainer.fit(model(), data, ckpt_path=resumed)
        return trainer

    first = fit(1, None)
    first.save_checkpoint(path)
    second = fit(2, path)
    state = second.optimizers[0].state
    assert second.global_step == 2 * first.global_step
    return [state[key]["steps"] - second.global_step for key in KEYS]


@pytest.mark.loop(1)
@pytest.mark.parametrize(
    ("model", "scope", "kind"),
    [
        (Counted, "element", "full"),
        (Stateless, "element", "sharded"),
        (Counted, "parameter", "sharded"),
        (Stateless, "model", "full"),
    ],
)
def test_states_under_other_keys_than_parameters_are_resumed(
    world: Worlds, tmp_path: Path, model: type[Counted], scope: str, kind: str
) -> None:
    path = str(tmp_path / "x.ckpt")
    assert world(2).run(count, model, scope, kind, path) == [[0] * len(KEYS)] * 2


class Noted(TinyGpt):
    """Notes something among the states of an optimizer whose states are checked."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        for key in KEYS:
            self.trainer.optimizers[0].state[key] = {"sum": torch.ones(2), "step": 1}


def resume_noted(kind: str, path: str) -> list[bool]:
    data = token_loader(8 * dist.get_world_size())

    def fit(epochs: int, resumed: str | None) -> Any:
        strategy = ShardedDP("full_shard", None, {Block}, state_dict_type=kind)
        trainer = make_trainer(strategy, max_steps=-1, max_epochs=epochs)
        trainer.fit(Noted(), data, ckpt_path=resumed)
        return trainer

    fit(1, None).save_checkpoint(path)
    state = fit(1, path).optimizers[0].state  # nothing is left to train
    return [key in state and torch.equal(state[key]["sum"], torch.ones(2)) for key in KEYS]


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_tensors_under_other_keys_are_resumed_beside_states_that_are_checked(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    assert world(2).run(resume_noted, kind, str(tmp_path / "x.ckpt")) == [[True] * len(KEYS)] * 2
