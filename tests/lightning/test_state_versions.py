"""Modules that convert states of older versions of themselves hear the version that was saved, as under DDP."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from shardeddp import CheckpointError, ShardedDP, load_from_checkpoint
from shardeddp.checkpoint.schema import check_entries
from shardeddp.checkpoint.state_codec import versions_of, without_prefix
from shardeddp.fabric import ShardedDP as FabricStrategy
from shardeddp.torch_private import STATE_VERSIONS
from shardeddp_cli import main
from support.fabric_runs import launched
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


@pytest.mark.loop(1)
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


class Plugin(TorchCheckpointIO):
    """A plugin of the user's, which is handed whole states."""


def scale_of_plugin(path: str) -> list[float]:
    strategy = ShardedDP("full_shard", None, {Block}, checkpoint_io=Plugin())
    trainer = make_trainer(strategy, max_steps=1)
    trainer.fit(Scaled(), token_loader(8))
    trainer.save_checkpoint(path)
    return load_from_checkpoint(Scaled, path).measure.scale.tolist()


@pytest.mark.slow
def test_files_of_plugins_have_versions(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(scale_of_plugin, str(tmp_path / "x.ckpt")) == [[2.0, 2.0]] * 2


def scales_of_fabric(kind: Any, path: str) -> list[list[float]]:
    """After a load of one module, and of one of two modules that have been saved together."""
    found = list[list[float]]()
    for keys in (["one"], ["one", "two"]):
        place, loaded = f"{path}-{len(keys)}", Scaled()
        with launched(FabricStrategy(state_dict_type=kind)) as fabric:
            fabric.save(place, {key: fabric.setup(Scaled()) for key in keys})
            fabric.load(place, {keys[-1]: fabric.setup(loaded)})
        found.append(loaded.measure.scale.tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_fabric_tells_them_as_well(world: Worlds, tmp_path: Path, kind: str) -> None:
    found = world(2).run(scales_of_fabric, kind, str(tmp_path / "saved.ckpt"))
    assert found == [[[2.0, 2.0]] * 2] * 2


def test_names_and_versions_lose_a_prefix_together() -> None:
    model = nn.ModuleDict({"model": nn.ModuleDict({"scale": Scale()}), "scale": nn.Linear(1, 1)})
    state = without_prefix(model.state_dict(), "model.")
    assert "scale.scale" in state
    assert versions_of(state)["scale"] == {"version": 2}


@pytest.mark.parametrize("odd", ["2", 2.0, -1, [1], {"version": "2"}])
def test_versions_that_no_module_has_are_refused(odd: Any) -> None:
    state = OrderedDict(x=torch.ones(1))
    vars(state)[STATE_VERSIONS] = OrderedDict(x=odd if isinstance(odd, dict) else {"version": odd})
    with pytest.raises(
        CheckpointError, match=r"versions of state_dict\.x\.version: expected a count"
    ):
        check_entries({"state_dict": state}, "a.ckpt")


class Named(Scale):
    _version = "two"  # type: ignore[assignment]


def save_named(path: str) -> str:
    model = TinyGpt()
    model.measure = Named()
    trainer = trainer_of("sharded", 1)
    trainer.fit(model, token_loader(8))
    with pytest.raises(CheckpointError) as refused:
        trainer.save_checkpoint(path)
    return str(refused.value)


def test_a_directory_refuses_a_version_that_is_no_integer(world: Worlds, tmp_path: Path) -> None:
    for said in world(2).run(save_named, str(tmp_path / "x.ckpt")):
        assert "the version of the state of module 'measure' is no integer" in said


def shadow(kind: str, path: str) -> bool:
    resumed = save_and_resume(Shadowed, kind, path)
    return type(resumed.shadow) is torch.Tensor and resumed.shadow.shape == (
        resumed.blocks[0].up.weight.shape
    )


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_extra_state_may_hold_parameters(world: Worlds, tmp_path: Path, kind: str) -> None:
    assert world(2).run(shadow, kind, str(tmp_path / "saved.ckpt")) == [True, True]
