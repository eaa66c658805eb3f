"""Processes that are forked or spawned from a rank, as workers of data loaders are: an error at once, never a wait."""

import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shardeddp import ShardedDP, ShardTensor
from shardeddp.garbage import collector_paused
from support.tasks import Block, Recorded, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(90)

GATHERS = ["full_shard", "shard_grad_op", "shard_optimizer"]


class ReadsWeights(Dataset[Tensor]):
    """Data that are made of the weights of a module, or of a copy of one."""

    def __init__(
        self, module: nn.Module | None, weight: Tensor | None = None, frozen: bool = False
    ) -> None:
        self.module, self.weight, self.frozen = module, weight, frozen
        self.data = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        model: Any = self.module
        weights = self.weight if model is None else model.table if self.frozen else model.net.weight
        with torch.no_grad():
            return self.data[index] + weights[index % 6]  # type: ignore[index]


class Model(Recorded):
    """Makes its own loader.

    Args:
        takes: ``module``: the data set reads its weights; ``frozen``: those that are not trained;
            ``copy``: it reads a copy of them.
        start_method: Of the worker; None: there is none.
    """

    def __init__(self, takes: str, start_method: str | None = "fork") -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.table = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.takes, self.start_method = takes, start_method

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        weight = self.net.weight
        if isinstance(weight, ShardTensor):
            weight = weight.full_tensor()
        data = (
            ReadsWeights(None, weight.detach().clone())
            if self.takes == "copy"
            else ReadsWeights(self, frozen=self.takes == "frozen")
        )
        return DataLoader(
            data,
            batch_size=4,
            num_workers=0 if self.start_method is None else 1,
            multiprocessing_context=self.start_method,
        )


def train(name: str | None, takes: str, start_method: str = "fork") -> list[float] | str:
    """The losses, or what a worker says, which comes soon; without a strategy: as everybody does it."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    warnings.filterwarnings("ignore", ".*used outside the forward|Consider setting `persistent")
    seed_everything(1, verbose=False)
    # A worker sees weights as they were when it was forked; other data are the same without one.
    model = Model(takes, None if name is None and takes != "module" else start_method)
    plain: Any = DDPStrategy() if dist.get_world_size() > 1 else "auto"
    epochs = 2 if start_method == "fork" else 1
    trainer = make_trainer(plain if name is None else ShardedDP(name), max_epochs=epochs)
    began = time.monotonic()
    try:
        trainer.fit(model)
    except RuntimeError as error:
        assert time.monotonic() - began < 20, str(error)
        return str(error)
    return model.losses


@pytest.mark.parametrize("name", GATHERS)
def test_a_worker_that_reads_a_sharded_parameter_is_told_so(world: Worlds, name: str) -> None:
    for said in world(2).run(train, name, "module"):
        assert isinstance(said, str)
        assert "select of net.weight at" in said
        assert f"{__file__}:" in said
        assert "needs ranks [0, 1] together, and this process is none of them" in said
        assert "parameter.full_tensor()" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "takes", "start_method"),
    [
        *((name, "copy", "fork") for name in [*GATHERS, "no_shard"]),
        ("no_shard", "module", "fork"),
        # DDP's spawned workers share the memory of the weights, and race with the optimizer.
        pytest.param("full_shard", "frozen", "spawn", marks=pytest.mark.slow),
        pytest.param("no_shard", "frozen", "spawn", marks=pytest.mark.torture),
    ],
)
@pytest.mark.timeout(300)
def test_workers_train_as_under_ddp(
    world: Worlds, name: str, takes: str, start_method: str
) -> None:
    found = world(2).run(train, name, takes, start_method, timeout_s=140)
    expected = world(2).run(train, None, takes, start_method, timeout_s=140)
    torch.testing.assert_close(found, expected)


def test_a_worker_of_one_rank_reads_parameters(world: Worlds) -> None:
    found = world(1).run(train, "full_shard", "module")
    torch.testing.assert_close(found, world(1).run(train, None, "module"))


# -- everything else that a forked process may try


class Trained(TinyGpt):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


TOKENS = torch.zeros(2, 4, dtype=torch.int64)

NEEDS_OTHERS: dict[str, Callable[[Any, Trained, str], object]] = {
    "a sum": lambda trainer, model, path: model.embed.weight.detach().sum(),
    "a whole parameter": lambda trainer, model, path: model.embed.weight.full_tensor(),  # type: ignore[operator]
    "a loss term": lambda trainer, model, path: model.embed.weight.square().sum().backward(),
    "a copy of it": lambda trainer, model, path: model.embed.weight.data[0],
    "its gradient": lambda trainer, model, path: model.embed.weight.grad.norm(),  # type: ignore[union-attr]
    "a forward": lambda trainer, model, path: model(TOKENS),
    "a unit's forward": lambda trainer, model, path: model.blocks[0](torch.zeros(1, 8)),
    "a step": lambda trainer, model, path: trainer.strategy.training_step(TOKENS, 0),
    "an optimizer's step": lambda trainer, model, path: trainer.optimizers[0].step(),
    "summoning": lambda trainer, model, path: trainer.strategy.summon_full_params().__enter__(),
    "saving weights": lambda trainer, model, path: torch.save(model.state_dict(), io.BytesIO()),
    "saving a checkpoint": lambda trainer, model, path: trainer.save_checkpoint(path),
    "validation": lambda trainer, model, path: trainer.validate(
        model, token_loader(8), verbose=False
    ),
    "a new setup": lambda trainer, model, path: make_trainer(ShardedDP("no_shard")).validate(
        model, token_loader(8), verbose=False
    ),
    "a barrier": lambda trainer, model, path: trainer.strategy.barrier(),
    "a broadcast": lambda trainer, model, path: trainer.strategy.broadcast([1]),
    "a reduction": lambda trainer, model, path: trainer.strategy.reduce(torch.ones(2)),
}
NEEDS_NOBODY: dict[str, Callable[[Any, Trained, str], object]] = {
    "a buffer": lambda trainer, model, path: model.noted.sum(),  # type: ignore[operator]
    "its shard": lambda trainer, model, path: model.embed.weight.to_local().sum(),  # type: ignore[operator]
    "its shape": lambda trainer, model, path: (repr(model), model.embed.weight.shape),
    "a state dict": lambda trainer, model, path: model.state_dict(),
    "an element-wise write": lambda trainer, model, path: model.embed.weight.data.mul_(0.5),
}
FORKED_S = 10.0


def in_fork(action: Callable[[], object]) -> str:
    """What an action says in a forked process: nothing, its error, or where it stands still."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = ""
        faulthandler.enable(writer)
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - the parent looks at it
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + FORKED_S
    hangs = ""
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            hangs = "it hangs\n"
            os.kill(child, signal.SIGABRT)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    with os.fdopen(reader, "rb") as pipe:
        return hangs + pipe.read().decode()


def try_all(name: str, folder: str) -> dict[str, str]:
    """What each of them says, and what follows in the ranks themselves."""
    warnings.filterwarnings("ignore", ".*used outside the forward")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    model = Trained()
    model.register_buffer("noted", torch.ones(2))
    trainer = make_trainer(ShardedDP(name, auto_wrap_policy={Block}), max_steps=1)
    trainer.fit(model, token_loader(8))
    model.loss(TOKENS).backward()
    before = full_weights(model)
    said = {
        what: in_fork(lambda action=action: action(trainer, model, f"{folder}/{name}.ckpt"))
        for what, action in [*NEEDS_OTHERS.items(), *NEEDS_NOBODY.items()]
    }
    assert all(torch.equal(found, before[key]) for key, found in full_weights(model).items())
    trainer.validate(model, token_loader(8), verbose=False)
    make_trainer(ShardedDP(name, auto_wrap_policy={Block}), max_steps=1).fit(model, token_loader(8))
    return said


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", GATHERS)
def test_what_needs_other_ranks_is_refused_at_once(world: Worlds, name: str, tmp_path: Any) -> None:
    for said in world(2).run(try_all, name, str(tmp_path)):
        for what in NEEDS_OTHERS:
            # What such a strategy has gathered, and nothing has changed since, is there.
            if name == "shard_optimizer" and "forward" in what:
                continue
            refusal = "and this process is none of them: it was forked from one"
            assert refusal in said[what], f"{what}: {said[what]}"
        assert [what for what in NEEDS_NOBODY if said[what]] == []
    assert not list(tmp_path.iterdir())


def fitted() -> Trained:
    """A model after a run, in a process that may be forked without a warning."""
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    model = Trained()
    make_trainer(ShardedDP(), max_steps=1).fit(model, token_loader(8))
    return model


@on_ranks(2)
def test_a_forked_process_leaves_the_garbage_of_its_rank_alone() -> None:
    """A process group that was garbage waits, where it is freed, for threads that only the rank has."""
    fitted()
    gc.disable()
    try:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group(group)
        circle: list[Any] = [group]
        circle.append(circle)
        del group, circle
        assert in_fork(gc.collect) == ""
    finally:
        gc.enable()


@on_ranks(2)
def test_a_process_that_is_forked_during_a_look_at_frames_collects_its_own_garbage() -> None:
    fitted()
    looking, over = threading.Event(), threading.Event()

    def look() -> None:
        with collector_paused():
            looking.set()
            over.wait(0.5)

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait()

    def collects() -> None:
        assert gc.isenabled()

    assert in_fork(collects) == ""
    over.set()
    thread.join()


@on_ranks(1)
def test_a_process_that_is_forked_from_a_single_rank_may_compute() -> None:
    model = fitted()
    said = in_fork(lambda: model.loss(TOKENS).backward())
    assert said == "", said
    assert dist.is_initialized()
