"""Sharded checkpoints of odd models, and at odd times."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardeddp import CheckpointError, CheckpointOptions, ShardedDP, load_from_checkpoint
from shardeddp.checkpoint.verify import verify
from support.resuming import Make, fit, full_shard, in_one_file, no_shard
from support.tasks import Block, TinyGpt
from support.trainers import full_weights
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def save_after_the_run(path: str) -> str:
    strategy = ShardedDP(
        auto_wrap_policy={Block},
        state_dict_type="sharded",
        checkpoint_options=CheckpointOptions(asynchronous=True),
    )
    model = fit(strategy, 1)
    with pytest.raises(CheckpointError) as caught:
        model.trainer.save_checkpoint(path)
    return str(caught.value)


def test_a_save_after_the_run_is_waited_for_even_if_it_is_asynchronous(
    world: Worlds, tmp_path: Path
) -> None:
    (tmp_path / "taken.ckpt" / "inside").mkdir(parents=True)
    assert (
        "taken.ckpt is a directory"
        in world(1).run(save_after_the_run, str(tmp_path / "taken.ckpt"))[0]
    )


class KeepsAnObject(TinyGpt):
    def get_extra_state(self) -> Any:
        return {"odd": object()}

    def set_extra_state(self, state: Any) -> None:
        pass


def save_an_object(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        fit(full_shard(), 1, None, path, KeepsAnObject)
    return str(caught.value)


def test_a_model_whose_state_only_pickle_can_save_is_refused_when_it_is_saved(
    world: Worlds, tmp_path: Path
) -> None:
    message = world(2).run(save_an_object, str(tmp_path / "state.ckpt"))[1]
    assert "model._extra_state is a dict that only pickle can save" in message
    assert os.listdir(tmp_path) == []


class Scaled(TinyGpt):
    """With a parameter that has the shape of an optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().loss(tokens) * self.scale


def resume_scaled(path: str) -> tuple[Any, list[type], Any]:
    make = full_shard()
    model = fit(make, 2, path, None, Scaled)
    kinds = [
        type(state["step"]) for state in model.trainer.optimizers[0].state_dict()["state"].values()
    ]
    return full_weights(model), kinds, full_weights(fit(full_shard(), 2, None, None, Scaled))


@pytest.mark.slow
def test_a_parameter_of_one_number_resumes_like_any_other(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "state.ckpt")
    world(2).run(fit_scaled, path)
    for resumed, kinds, straight in world(2).run(resume_scaled, path):
        assert set(kinds) == {torch.Tensor}
        assert all(torch.equal(resumed[name], weight) for name, weight in straight.items())


def fit_scaled(path: str) -> None:
    fit(full_shard(), 1, None, path, Scaled)


class OddBuffers(TinyGpt):
    """Buffers that are not elements one after the other."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(24.0)
        self.register_buffer("expanded", base[3].expand(7))
        self.register_buffer("matrix", base[:4].expand(3, 4))
        self.register_buffer("strided", base[::5])
        self.register_buffer("transposed", base.reshape(4, 6).t())
        self.register_buffer("conjugated", torch.complex(base[:3], base[3:6]).conj())
        self.register_buffer("empty", torch.empty(0, 3))


def save_odd_buffers(make: Make, path: str) -> bool:
    saved = fit(make(), 1, None, path, OddBuffers)
    loaded = fit(make(), 1, path, None, OddBuffers)
    return all(
        torch.equal(buffer, dict(loaded.named_buffers())[name])
        for name, buffer in saved.named_buffers()
    )


@pytest.mark.loop(1)
@pytest.mark.parametrize("make", [full_shard, in_one_file, no_shard])
def test_buffers_of_any_strides_are_saved(world: Worlds, tmp_path: Path, make: Make) -> None:
    assert world(2).run(save_odd_buffers, make, str(tmp_path / "odd.ckpt")) == [True, True]
    assert verify(tmp_path / "odd.ckpt") == []


class InHalf(TinyGpt):
    def __init__(self) -> None:
        super().__init__()
        self.head.to(torch.bfloat16)


def test_a_conversion_of_what_is_loaded_is_said(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "state.ckpt"
    world(2).run(fit_and_save, str(path))
    with pytest.warns(UserWarning, match=r"head.weight from torch.float32 to torch.bfloat16"):
        load_from_checkpoint(InHalf, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_from_checkpoint(TinyGpt, path)


def fit_and_save(path: str) -> None:
    fit(full_shard(), 1, None, path)
