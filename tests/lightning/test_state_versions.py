"""Modules that convert states of older versions of themselves hear the version that was saved, as under DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp import ShardedDP, load_from_checkpoint
from shardeddp_cli import main
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)


class Scale(nn.Module):
    """Version 1 kept its scale in percent."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((2,), 2.0))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"] / 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class Scaled(TinyGpt):
    def __init__(self) -> None:
        super().__init__()
        self.measure = Scale()


class Shadowed(TinyGpt):
    """Keeps a parameter as extra state."""

    def get_extra_state(self) -> Any:
        return {"shadow": self.blocks[0].up.weight, "several": (self.blocks[0].up.weight, 3)}

    def set_extra_state(self, state: Any) -> None:
        self.shadow = state["shadow"]


def trainer_of(kind: str, steps: int) -> Any:
    strategy = ShardedDP("full_shard", None, {Block}, state_dict_type=kind)
    return make_trainer(strategy, max_steps=steps)


def save_and_resume(model: type[TinyGpt], kind: str, path: str) -> TinyGpt:
    data = token_loader(8 * dist.get_world_size())  # whole epochs
    trainer = trainer_of(kind, len(data) // dist.get_world_size())
    trainer.fit(model(), data)
    trainer.save_checkpoint(path)
    resumed = model()
    trainer_of(kind, trainer.global_step + 1).fit(resumed, data, ckpt_path=path)
    return resumed


def scales(kind: str, path: str) -> list[list[float]]:
    resumed = save_and_resume(Scaled, kind, path)
    loaded = load_from_checkpoint(Scaled, path)
    return [module.measure.scale.tolist() for module in (resumed, loaded)]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_state_of_the_version_that_a_module_has_is_not_converted(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "saved.ckpt"
    assert world(2).run(scales, kind, str(path)) == [[[2.0, 2.0]] * 2] * 2
    one = tmp_path / "one.ckpt"
    assert main(["consolidate", str(path), "-o", str(one)]) == 0
    assert load_from_checkpoint(Scaled, str(one)).measure.scale.tolist() == [2.0, 2.0]
    assert torch.load(one)["state_dict"]._metadata["measure"] == {"version": 2}


def shadow(kind: str, path: str) -> bool:
    resumed = save_and_resume(Shadowed, kind, path)
    return type(resumed.shadow) is torch.Tensor and resumed.shadow.shape == (
        resumed.blocks[0].up.weight.shape
    )


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_extra_state_may_hold_parameters(world: Worlds, tmp_path: Path, kind: str) -> None:
    assert world(2).run(shadow, kind, str(tmp_path / "saved.ckpt")) == [True, True]
