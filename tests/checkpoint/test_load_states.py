"""What a load replaces is kept until optimizers have taken their states, in memory that the load has read into."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardeddp import ShardedDP
from shardeddp.checkpoint.load_states import Replaced, load_model, read_shards_ahead
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

WIDTH = 512
SHARD = WIDTH * WIDTH // 2


class Layers(LightningModule):
    """Two layers, the second twice in the model where they are tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.again.weight = self.second.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.again(self.second(self.first(batch))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LoadsInItsOwnWay(Layers):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Two entries change places."""
        names = ("first.weight", "second.weight")
        state_dict = dict(state_dict) | dict(
            zip(names, (state_dict[it] for it in names[::-1]), strict=True)
        )
        return super().load_state_dict(state_dict, *args, **kwargs)


class Clones(TorchDispatchMode):
    """Sizes of the copies that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.sizes.append(args[0].numel())
        return made


def load_and_go_back(path: str, kind: type[Layers], tied: bool) -> list[int]:
    saved, model = kind(tied), kind(tied)
    data: Any = torch.randn(4, WIDTH)
    for module in (saved, model):
        strategy = ShardedDP(auto_wrap_policy={nn.Linear}, state_dict_type="sharded")
        trainer = make_trainer(strategy, max_epochs=1)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1))
        if module is saved:
            trainer.save_checkpoint(path)
    expected, before = full_weights(saved), full_weights(model)
    if kind is LoadsInItsOwnWay:
        first, second = expected["first.weight"], expected["second.weight"]
        expected = expected | {"first.weight": second, "second.weight": first}
    state = strategy.load_checkpoint(path)["state_dict"]
    replaced = Replaced()
    read_shards_ahead([state], model)
    with Clones() as clones:
        load_model(model, state, True, False, replaced)
    loaded = full_weights(model)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert not any(torch.equal(loaded[name], value) for name, value in before.items())
    replaced.restore_values()
    back = full_weights(model)
    assert all(torch.equal(back[name], value) for name, value in before.items())
    return clones.sizes


def test_a_load_keeps_what_it_replaces_without_more_memory(world: Worlds, tmp_path: Path) -> None:
    for sizes in world(2).run(load_and_go_back, str(tmp_path / "a.ckpt"), Layers, False):
        assert max(sizes) < SHARD


@pytest.mark.parametrize(("kind", "tied"), [(LoadsInItsOwnWay, False), (Layers, True)])
def test_parts_that_a_module_may_use_twice_are_copied(
    world: Worlds, tmp_path: Path, kind: type[Layers], tied: bool
) -> None:
    for sizes in world(2).run(load_and_go_back, str(tmp_path / "a.ckpt"), kind, tied):
        assert max(sizes) >= SHARD
