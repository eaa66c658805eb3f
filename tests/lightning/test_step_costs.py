"""What a step costs beside its arithmetic: no wait for the device that one process does not have, no extra barrier."""

import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardeddp
from shardeddp import ShardedDP
from support.deferred import shard
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)

# Operations that have to know what is in a tensor before Python goes on.
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique", "masked_select", "item"}


class Watch(TorchDispatchMode):
    """Counts operations that wait for a tensor, and those of process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.counts["waits"] += 1
        if func.namespace == "c10d":
            self.counts[name.rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


STEPS = 3


class WatchSteps(Callback):
    """Watches some steps when everything that is done once has been done."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self._watch.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        if rest[-1] == 1 + STEPS:
            self._watch.__exit__(None, None, None)


class Logs(TinyGpt):
    """Logs as many values of all ranks as it is told."""

    values = 0

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("own", loss, prog_bar=True)
        for value in range(self.values):
            self.log(f"value {value}", loss * value, sync_dist=True)
        return loss


def watch_steps(strategy: Any, values: int = 0, **options: Any) -> Counter[str]:
    watch, module = Watch(), Logs()
    module.values = values
    trainer = make_trainer(strategy, max_steps=6, callbacks=[WatchSteps(watch)], **options)
    trainer.fit(module, token_loader(24 * dist.get_world_size()))
    return watch.counts


CLIPPED = {"gradient_clip_val": 0.5}


def waits_of_one_process() -> int:
    return watch_steps("auto", **CLIPPED)["waits"]


def waits_of_ranks(name: str) -> int:
    return watch_steps(ShardedDP(name, auto_wrap_policy={Block}), **CLIPPED)["waits"]


@pytest.mark.loop(1)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["full_shard", "no_shard"])
def test_a_step_waits_for_its_device_no_more_often_than_one_process(
    world: Worlds, name: str, size: int
) -> None:
    expected = world(1).run(waits_of_one_process)[0]
    assert expected > 0, "the optimizer's step counts were looked at: the watch does its work"
    # The agreement on signals looks at a number in the host's memory, wherever the model is.
    assert max(world(size).run(waits_of_ranks, name)) <= expected + STEPS


@pytest.mark.slow
@on_ranks(2)
def test_a_logged_value_costs_one_reduction_and_no_barrier() -> None:
    for name in ("full_shard", "no_shard"):
        without, having = (
            watch_steps(ShardedDP(name, auto_wrap_policy={Block}), values) for values in (0, 3)
        )
        having.subtract(without)
        assert +having == {"allreduce": 3 * STEPS}
    without, having = (watch_steps(DDPStrategy(), values) for values in (0, 3))
    having.subtract(without)
    assert having["barrier"] == 3 * STEPS, "what is spared"


# -- calls


class Scales(nn.Module):
    """Element-wise weights, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class OfScales(LightningModule):
    """Two units of many parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.units = nn.Sequential(Scales(count), Scales(count))

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return self.units(batch.float()[:, :4]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class CountCalls(Callback):
    """Counts calls of Python functions in the fifth step.

    Args:
        source: Where they are defined.
    """

    def __init__(self, source: str = os.path.dirname(shardeddp.__file__)) -> None:
        self._source = source
        self.calls: Counter[str] = Counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 4:
            sys.setprofile(self._count)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._source):
            code, begin = frame.f_code, len(self._source)
            self.calls[f"{code.co_filename[begin:]}:{code.co_firstlineno} {code.co_name}"] += 1


@pytest.mark.slow
@on_ranks(2)
def test_few_functions_are_called_for_each_parameter_in_a_step() -> None:
    # What lives beside it, after a fit that failed say, costs nothing.
    others = [nn.Linear(2, 2) for _ in range(3)]
    for other in others:
        shard(other, recording=None)
    for strategy, most in (("full_shard", 23), ("shard_grad_op", 15), ("no_shard", 16)):
        calls: list[Counter[str]] = []
        for count in (10, 30):
            counter = CountCalls()
            trainer = make_trainer(
                ShardedDP(strategy, auto_wrap_policy={Scales}), max_steps=5, callbacks=[counter]
            )
            trainer.fit(OfScales(count), token_loader(40))
            calls.append(counter.calls)
        more = calls[1] - calls[0]
        listed = "\n".join(f"{number / 40:5.2f} {name}" for name, number in more.most_common())
        assert 0 < more.total() / 40 <= most, f"{strategy}\n{listed}"


def calls_on_one_rank(strategy: Any) -> Counter[str]:
    counter = CountCalls(source="")
    trainer = make_trainer(strategy, max_steps=5, callbacks=[counter])
    trainer.fit(OfScales(2), token_loader(40))
    return counter.calls


@on_ranks(1)
def test_few_functions_are_called_on_one_rank_beyond_a_single_device() -> None:
    alone = calls_on_one_rank("auto")
    for name in ("full_shard", "no_shard"):
        more = calls_on_one_rank(ShardedDP(name))
        more.subtract(alone)
        listed = "\n".join(f"{number} {each}" for each, number in more.most_common(40))
        assert 0 < more.total() <= 70, listed
