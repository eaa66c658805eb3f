"""Training starts from the weights in safetensors files, and evaluation runs with them."""

import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule

from shardeddp import CheckpointError, ShardedDP
from shardeddp.checkpoint.safetensors import (
    Entry,
    index_bytes,
    index_path,
    write_safetensors,
)
from support.tasks import VOCABULARY, Block, TinyGpt
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)


class Wraps(LightningModule):
    """A model in a module, as LightningModules hold them, and perhaps a part that is new."""

    def __init__(self, *, more: bool = False) -> None:
        super().__init__()
        self.net = TinyGpt()
        self.steps_before: int | None = None
        self.before: dict[str, torch.Tensor] = {}
        if more:
            self.more = torch.nn.Linear(2, 2)
            self.strict_loading = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net.loss(batch)

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.before = full_weights(self)

    def on_train_start(self) -> None:
        self.steps_before, self.before = self.trainer.global_step, full_weights(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def pretrained() -> dict[str, torch.Tensor]:
    """Weights in bfloat16 of the inner model; those of the head are the embedding's."""
    torch.manual_seed(11)
    state = TinyGpt().state_dict()
    return {
        name: torch.randn_like(it).bfloat16() for name, it in state.items() if name != "head.weight"
    }


def put(folder: Path) -> None:
    """Two files and their index."""
    entries = [Entry(name=name, tensor=it, dtype=it.dtype) for name, it in pretrained().items()]
    parts = {"first.safetensors": entries[::2], "second.safetensors": entries[1::2]}
    for name, part in parts.items():
        with (folder / name).open("wb") as file:
            write_safetensors(file, part, {})
    index_path(folder / "model.safetensors").write_bytes(index_bytes(parts, {}))


def start(folder: str, strategy: str, more: bool = False, test: bool = False) -> dict[str, object]:
    model = Wraps(more=more)
    trainer = make_trainer(ShardedDP(strategy, auto_wrap_policy={Block}), max_epochs=1)
    data = torch.utils.data.DataLoader(torch.randint(0, VOCABULARY, (8, 9)), batch_size=4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if test:
            trainer.test(model, data, ckpt_path=folder, verbose=False)
        else:
            trainer.fit(model, data, ckpt_path=folder)
    return {
        "told": [str(it.message) for it in told if folder in str(it.message)],
        "steps": model.steps_before,
        "weights": {name.removeprefix("net."): it for name, it in model.before.items()},
        "after": {name.removeprefix("net."): it for name, it in full_weights(model).items()},
    }


def check(found: dict[str, object]) -> None:
    weights = found["weights"]
    for name, value in pretrained().items():
        assert torch.equal(weights[name], value.float()), name  # type: ignore[index]


def test_training_starts_at_step_0_with_the_weights_of_the_files(
    world: Worlds, tmp_path: Path
) -> None:
    put(tmp_path)
    for found in world(2).run(start, str(tmp_path), "full_shard"):
        check(found)
        assert found["steps"] == 0
        assert any(
            not torch.equal(found["after"][name], value.float())
            for name, value in pretrained().items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["shard_grad_op", "shard_optimizer", "no_shard"])
def test_so_it_does_under_every_strategy(strategy: str, world: Worlds, tmp_path: Path) -> None:
    put(tmp_path)
    check(world(2).run(start, str(tmp_path), strategy)[0])


def test_evaluation_runs_with_the_weights_of_the_files(world: Worlds, tmp_path: Path) -> None:
    put(tmp_path)
    check(world(2).run(start, str(tmp_path), "full_shard", False, True)[0])


def test_a_part_that_the_files_lack_is_refused_or_named(world: Worlds, tmp_path: Path) -> None:
    put(tmp_path)
    found = world(2).run(start, str(tmp_path), "full_shard", True)[0]
    check(found)
    assert found["told"] == [f"{tmp_path} has nothing for more.weight, more.bias: as initialized"]
    (tmp_path / "second.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"second\.safetensors"):
        world(2).run(start, str(tmp_path), "full_shard")
