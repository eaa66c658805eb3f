"""What a run can save, it can load: large and deep states of callbacks, hyper-parameters and modules."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from shardeddp import load_from_checkpoint
from shardeddp.checkpoint.export import to_ckpt
from shardeddp.checkpoint.verify import verify
from support.resuming import Make, full_shard, in_one_file
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)
SLOW, TORTURE = pytest.mark.slow, pytest.mark.torture


def _nested(depth: int) -> Any:
    value: Any = (1.5,)
    for level in range(depth):
        value = {"inner": value, level: (level,)} if level % 2 else [value]
    return value


STATES: dict[str, Callable[[], Any]] = {
    "identifiers": lambda: list(range(10**12, 10**12 + 400_000)),
    "words": lambda: {f"word {number}": number for number in range(400_000)},
    "bytes": lambda: bytes(range(256)) * 200_000,
    "history": lambda: [{"step": step, "loss": 0.1 * step} for step in range(60_000)],
    "losses": lambda: [float("inf"), -0.0, *(0.1 * step for step in range(300_000))],
    "large integers": lambda: [2**63, -(2**63), *range(5000)],
    "mixed numbers": lambda: [1, 1.0, True] * 2000,
    "nested": lambda: _nested(40),
    "text": lambda: "\u00fc\U0001f600" * 2_000_000,
    "pairs": lambda: {(left, left + 1): {left} for left in range(20_000)},
    "small tensors": lambda: [torch.full((2,), float(number)) for number in range(3_000)],
    "one tensor many times": lambda: [torch.arange(5.0)] * 500,
}


QUICK = ("large integers", "nested", "one tensor many times")
IN_ONE_FILE = (*QUICK, "bytes", "pairs", "small tensors")
"""`torch.save` writes them, and what is read of a file is checked alike for all of them."""


class Keeps(Callback):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["kept"]


class Described(TinyGpt):
    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and one and isinstance(one[0], torch.Tensor):
        return len(one) == len(other) and all(map(torch.equal, one, other))
    return repr(one) == repr(other)


def _trainer(make: Make, epochs: int, state: Any) -> Any:
    return make_trainer(make(), max_epochs=epochs, callbacks=[Keeps(state)])


def save(make: Make, folder: str, name: str) -> bool:
    state = STATES[name]()
    trainer = _trainer(make, 1, state)
    trainer.fit(Described(state), token_loader(8))
    trainer.save_checkpoint(os.path.join(folder, "large.ckpt"))
    resumed = _trainer(make, 2, None)
    resumed.fit(Described(), token_loader(8), ckpt_path=os.path.join(folder, "large.ckpt"))
    return _same(resumed.callbacks[0].state, state) and resumed.current_epoch == 2


@pytest.mark.loop(1)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, full_shard) for name in QUICK),
        *(pytest.param(name, full_shard, marks=SLOW) for name in STATES if name not in QUICK),
        *(
            pytest.param(name, in_one_file, marks=SLOW if name in IN_ONE_FILE else TORTURE)
            for name in STATES
        ),
    ],
)
def test_what_is_saved_is_resumed_loaded_verified_and_exported(
    world: Worlds, tmp_path: Path, name: str, make: Make
) -> None:
    assert world(2).run(save, make, str(tmp_path), name) == [True, True]
    path = tmp_path / "large.ckpt"
    assert verify(path) == []
    state = STATES[name]()
    if "tensor" not in name:  # Lightning keeps hyper-parameters as YAML shows them
        assert _same(load_from_checkpoint(Described, path).hparams["kept"], state)
    if path.is_dir():
        to_ckpt(path, tmp_path / "exported.ckpt")
        exported = torch.load(tmp_path / "exported.ckpt", weights_only=True)
        assert _same(exported["callbacks"]["Keeps"]["kept"], state)
