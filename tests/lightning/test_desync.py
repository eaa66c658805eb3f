"""Where one rank enters a collective and the others another one or none, all end soon and are told of both."""

import inspect
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import MeanMetric

from shardeddp import ShardedDP
from shardeddp.comm import desync
from shardeddp.errors import DesyncError
from support.tasks import Block, EvaluatedGpt, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(90)

SOON_S = 15.0
"""Seconds where the timeout is minutes: two or three, and what a busy machine adds."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

Action = Callable[[LightningModule], object]


def save(module: LightningModule) -> None:
    module.trainer.save_checkpoint("/dev/null/nowhere/file.ckpt")


def log_everywhere(module: LightningModule) -> None:
    module.log("odd", 1.0, sync_dist=True, on_step=True, on_epoch=False)


def barrier(module: LightningModule) -> None:
    module.trainer.strategy.barrier("mine")


def gather(module: LightningModule) -> None:
    module.all_gather(torch.zeros(2))


def broadcast(module: LightningModule) -> None:
    module.trainer.strategy.broadcast("found")


def read_a_weight(module: LightningModule) -> None:
    module.blocks[1].up.weight.data.sum().item()


def barrier_of_torch(module: LightningModule) -> None:
    dist.barrier()


def reduce_by_torch(module: LightningModule) -> None:
    dist.all_reduce(torch.zeros(3))


def describe_optimizer(module: LightningModule) -> None:
    module.trainer.optimizers[0].state_dict()
    module.trainer.strategy.lightning_module_state_dict()
    [parameter.data.norm().item() for parameter in module.parameters()]


def summon(module: LightningModule) -> None:
    with module.trainer.strategy.summon_full_params():
        pass


class Odd(EvaluatedGpt):
    """Does something on one rank in one step.

    Args:
        action: What.
        rank: Which.
        step: When; steps are counted from 0.
    """

    def __init__(self, action: Action, rank: int, step: int) -> None:
        super().__init__()
        self.action, self.rank, self.step = action, rank, step
        self.began = time.monotonic()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """One loss."""
        if batch_index == self.step:
            self.began = time.monotonic()
            if self.global_rank == self.rank:
                self.action(self)
        return super().training_step(batch, batch_index)


@dataclass(frozen=True)
class Ended:
    """How a rank has ended."""

    kind: str
    said: str
    seconds: float


def ended_with(run: Callable[[], object], began: Callable[[], float]) -> Ended:
    """The type of what explains a run's error, its own text, and the seconds since a moment."""
    try:
        run()
    except RuntimeError as error:
        kind = DesyncError if isinstance(error, DesyncError) else type(error.__cause__)
        return Ended(kind.__name__, str(error), time.monotonic() - began())
    return Ended("", "trained", time.monotonic() - began())


def make_strategy(name: str, **options: Any) -> ShardedDP:
    return ShardedDP(
        name,
        auto_wrap_policy={Block},
        **({"shard_size": 2} if name == "hybrid_shard" else {}),
        **options,
    )


def train(
    strategy: str,
    action: Action,
    rank: int = 0,
    step: int = 2,
    options: Mapping[str, Any] = NOTHING,
) -> Ended:
    """A training in which one rank does something alone."""
    model = Odd(action, rank, step)
    trainer = make_trainer(make_strategy(strategy, **options), max_steps=6)
    data = token_loader(24 * dist.get_world_size()), token_loader(8)
    return ended_with(lambda: trainer.fit(model, *data), lambda: model.began)


def check(answers: list[Ended], action: Callable[..., object]) -> None:
    lines, first = inspect.getsourcelines(action)
    places = [f"{__file__}:{number}" for number in range(first, first + len(lines))]
    for ended in answers:
        assert ended.kind == "DesyncError", ended
        assert ended.seconds < SOON_S
        assert any(place in ended.said for place in places), ended.said
        assert sum(f"rank {rank}" in ended.said for rank in range(len(answers))) > 1
        assert (
            "All ranks have to communicate alike" in ended.said
            or "used by all ranks alike" in ended.said
        )


IN_STEPS = [
    save,
    log_everywhere,
    barrier,
    gather,
    broadcast,
    read_a_weight,
    barrier_of_torch,
    reduce_by_torch,
    describe_optimizer,
    summon,
]


@pytest.mark.slow
@pytest.mark.parametrize("action", IN_STEPS)
def test_what_one_rank_does_alone_ends_all_of_them(world: Worlds, action: Action) -> None:
    check(world(2).run(train, "full_shard", action), action)


@pytest.mark.slow
@pytest.mark.parametrize("action", [save, read_a_weight, barrier, log_everywhere])
def test_it_does_so_in_the_first_step_where_ranks_agree_on_each_unit(
    world: Worlds, action: Action
) -> None:
    check(world(2).run(train, "full_shard", action, 1, 0), action)


@pytest.mark.parametrize(
    "strategy", ["hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard"]
)
def test_it_does_so_under_each_strategy(world: Worlds, strategy: str) -> None:
    size = 4 if strategy == "hybrid_shard" else 2
    answers = world(size).run(train, strategy, save, 1, 2, {"state_dict_type": "full"})
    for ended in answers:
        assert (
            ended.kind == "DesyncError"
            and "Trainer.save_checkpoint" in ended.said
            and ended.seconds < SOON_S
        )
    check(world(size).run(train, strategy, log_everywhere, 0, 2), log_everywhere)


class Measured(Odd):
    """Computes a metric of torchmetrics in validation, which gathers by itself; one rank reads a weight before."""

    def __init__(self, action: Action, rank: int, step: int) -> None:
        super().__init__(action, rank, -1)
        self.metric = MeanMetric()

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        """Update a metric."""
        self.metric.update(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        """Where people look at their weights."""
        self.began = time.monotonic()
        if self.global_rank == self.rank:
            self.action(self)
        self.log("val", self.metric.compute())


def validate(rank: int) -> Ended:
    model = Measured(read_a_weight, rank, 0)
    trainer = make_trainer(make_strategy("full_shard"), max_epochs=1)
    return ended_with(
        lambda: trainer.fit(model, token_loader(16), token_loader(8)), lambda: model.began
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_weight_read_while_others_compute_a_metric_is_told_with_the_metric(
    world: Worlds, rank: int
) -> None:
    answers = world(2).run(validate, rank)
    check(answers, read_a_weight)
    assert all("(torch.distributed.barrier) at " in ended.said for ended in answers)


def after_the_run(alone: int, others: str) -> Ended:
    """One rank saves when training is over; others do something else, or nothing for a while."""
    model = Odd(barrier, 0, -1)
    trainer = make_trainer(make_strategy("full_shard"), max_steps=2)
    trainer.fit(model, token_loader(16))
    began = time.monotonic()

    def run() -> None:
        if dist.get_rank() == alone:
            save(model)
        elif others == "test":
            trainer.test(model, token_loader(8), verbose=False)
        else:
            barrier(model)

    return ended_with(run, lambda: began)


@pytest.mark.slow
@pytest.mark.parametrize(("alone", "others"), [(0, "barrier"), (1, "test")])
def test_what_one_rank_does_alone_after_a_run_ends_all_of_them(
    world: Worlds, alone: int, others: str
) -> None:
    check(world(2).run(after_the_run, alone, others), save)


class OddFreezer(Odd):
    """Does something on one rank to a block after a step; one weight of another block is not trained."""

    def __init__(self, action: Action, rank: int, step: int) -> None:
        super().__init__(action, rank, -1)
        self.moment = step
        self.blocks[0].up.weight.requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        """Between two steps."""
        if batch_index == self.moment:
            self.began = time.monotonic()
            if self.global_rank == self.rank:
                self.action(self)

    def configure_optimizers(self) -> Any:
        """Of what is trained."""
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


def freeze(module: LightningModule) -> None:
    module.blocks[1].requires_grad_(False)


def unfreeze(module: LightningModule) -> None:
    module.blocks[0].requires_grad_(True)


def write(module: LightningModule) -> None:
    with torch.no_grad():
        module.blocks[0].up.weight.zero_()


def train_odd_freezer(strategy: str, action: Action, rank: int) -> Ended:
    model = OddFreezer(action, rank, 2)
    trainer = make_trainer(make_strategy(strategy), max_steps=6)
    return ended_with(
        lambda: trainer.fit(model, token_loader(24 * dist.get_world_size())), lambda: model.began
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("action", [freeze, unfreeze, write])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_what_one_rank_does_alone_to_parameters_is_told_by_name(
    world: Worlds, strategy: str, action: Action, rank: int
) -> None:
    name = (
        "blocks.0"
        if action is unfreeze
        else "blocks.1"
        if action is freeze
        else "blocks.0.up.weight"
    )
    for ended in world(2).run(train_odd_freezer, strategy, action, rank):
        assert ended.said != "trained" and ended.seconds < SOON_S
        assert name in ended.said, ended.said


class OddSchedule(Odd):
    """The learning rate follows what one rank has seen."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        """As a scheduler on a metric that is not shared."""
        if self.global_rank == self.rank and batch_index >= 1:
            self.optimizers().param_groups[0]["lr"] *= 0.5


def warnings_of_a_run(strategy: str) -> list[str]:
    trainer = make_trainer(make_strategy(strategy), max_steps=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(OddSchedule(barrier, 1, -1), token_loader(24 * dist.get_world_size()))
    return [
        str(each.message) for each in caught if "step with different options" in str(each.message)
    ]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_optimizers_that_step_with_different_options_are_told_of_once(
    world: Worlds, strategy: str
) -> None:
    (said,), others = world(2).run(warnings_of_a_run, strategy)
    assert "lr of" in said and "sync_dist=True" in said and not others


# -- ranks that are slow, and ranks that have failed and go on


def sleep(module: LightningModule) -> None:
    time.sleep(LATE_S)


def compute(module: LightningModule) -> None:
    began = time.monotonic()
    while time.monotonic() - began < LATE_S:
        torch.randn(200, 200).svd()


def late_for_a_weight(module: LightningModule) -> None:
    time.sleep(LATE_S * (module.global_rank == 0))
    read_a_weight(module)
    time.sleep(LATE_S * (module.global_rank == 1))
    barrier(module)
    reduce_by_torch(module)


LATE_S = 7.0
"""More than it takes to find ranks that never come."""


class Late(Odd):
    """All ranks do it."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """One loss."""
        self.rank = self.global_rank
        return super().training_step(batch, batch_index)


def train_late(strategy: str, action: Action, step: int, everybody: bool) -> Ended:
    model = (Late if everybody else Odd)(action, 0, step)
    trainer = make_trainer(make_strategy(strategy), max_steps=3)
    return ended_with(
        lambda: trainer.fit(model, token_loader(24 * dist.get_world_size())), lambda: model.began
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "action", "step", "everybody"),
    [
        ("full_shard", sleep, 0, False),
        ("full_shard", compute, 2, False),
        pytest.param("no_shard", sleep, 1, False, marks=pytest.mark.torture),
        ("full_shard", late_for_a_weight, 1, True),
    ],
)
def test_a_rank_that_is_late_is_waited_for(
    world: Worlds, strategy: str, action: Action, step: int, everybody: bool
) -> None:
    for ended in world(2).run(train_late, strategy, action, step, everybody):
        assert ended.said == "trained" and ended.seconds > LATE_S - 1


def fail(module: LightningModule) -> None:
    raise LookupError("no such token")


class StoreClient(Callback):
    """Hears of exceptions, as those that send messages do."""

    heard = ""

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Keep the text."""
        self.heard = str(exception)


def fail_and_live(linger_s: float) -> Ended:
    """The rank that fails does not end: a notebook, or a script that catches errors."""
    model, client = Odd(fail, 1, 2), StoreClient()
    trainer = make_trainer(make_strategy("full_shard"), max_steps=6, callbacks=[client])

    def run() -> None:
        try:
            trainer.fit(model, token_loader(48))
        except LookupError:
            time.sleep(linger_s)
        except RuntimeError as error:
            assert client.heard == str(error)
            raise

    return ended_with(run, lambda: model.began)


@pytest.mark.long
@pytest.mark.slow
def test_a_rank_that_has_failed_and_lives_on_keeps_nobody_waiting(world: Worlds) -> None:
    survivor, _ = world(2).run(fail_and_live, 6.0)
    assert survivor.kind == "RankError" and survivor.seconds < 5.0
    assert survivor.said.startswith("rank 1 failed: LookupError: no such token\n")


class ReadsOnAThread(EvaluatedGpt):
    """A logger of the user's own that looks at a weight every now and then."""

    def on_train_start(self) -> None:
        self.said: list[str] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.read, name="my logger")
        self.thread.start()

    def read(self) -> None:
        while not self.over.wait(0.01):
            try:
                self.blocks[0].up.weight.detach().norm()
            except DesyncError as error:
                self.said.append(str(error))

    def on_train_end(self) -> None:
        self.over.set()
        self.thread.join()


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
@on_ranks(2)
def test_a_read_on_another_thread_is_refused_there_and_training_goes_on(strategy: str) -> None:
    weights: list[Tensor] = []
    for model in (EvaluatedGpt, ReadsOnAThread):
        torch.manual_seed(0)
        module = model()
        make_trainer(ShardedDP(strategy), max_steps=10).fit(module, token_loader(32))
        weights.append(module.blocks[0].up.weight.full_tensor())
    assert torch.equal(*weights)
    for each in module.said:  # type: ignore[union-attr]
        assert "of blocks.0.up.weight at" in each
        assert "on thread 'my logger' while another thread trains" in each
    assert module.said  # type: ignore[union-attr]
    found: list[Tensor] = []
    later = threading.Thread(
        target=lambda: found.append(module.blocks[0].up.weight.full_tensor())
    )  # between runs one thread may do it as well as another
    later.start()
    later.join()
    assert torch.equal(found[0], weights[1])


def a_row(module: LightningModule) -> Tensor:
    return module.blocks[1].up.weight.data[0]


def receive_from(rank: int) -> Tensor:
    row = torch.zeros(8)
    dist.irecv(row, rank).wait()
    return row


def hand_out(module: LightningModule) -> None:
    if dist.get_rank():
        receive_from(0)
    else:
        row = a_row(module)
        for rank in range(1, dist.get_world_size()):
            dist.isend(row, rank).wait()


def hand_on(module: LightningModule) -> None:
    rank = dist.get_rank()
    row = receive_from(rank - 1) if rank else a_row(module)
    if rank + 1 < dist.get_world_size():
        dist.isend(row, rank + 1).wait()


def hand_from_the_last(module: LightningModule) -> None:
    last = dist.get_world_size() - 1
    if dist.get_rank() == 1:
        receive_from(last)
    else:
        row = a_row(module)
        if dist.get_rank() == last:
            dist.isend(row, 1).wait()


def hand_late(module: LightningModule) -> None:
    """All read, one of them after it has waited for a rank that computes for long."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        time.sleep(5.0)
        dist.isend(torch.ones(8), 1).wait()
    elif rank == 1:
        receive_from(last)
    a_row(module)


class HandsRows(Odd):
    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if batch_index == self.step:
            self.began = time.monotonic()
            self.action(self)
        return EvaluatedGpt.training_step(self, batch, batch_index)


def train_handing(strategy: str, action: Action) -> Ended:
    """A training beside an earlier one, whose Trainer somebody still refers to."""
    data = token_loader(24 * dist.get_world_size())
    former = make_trainer(make_strategy(strategy), max_steps=1)
    former.fit(EvaluatedGpt(), data)
    model = HandsRows(action, 0, 2)
    trainer = make_trainer(make_strategy(strategy), max_steps=4)
    with pytest.MonkeyPatch.context() as soon:
        soon.setattr(desync, "TRANSFER_S", 2.0)
        ended = ended_with(lambda: trainer.fit(model, data), lambda: model.began)
    assert former.global_step == 1
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "strategy", "action"),
    [
        (3, "full_shard", hand_out),
        (3, "full_shard", hand_on),
        (3, "full_shard", hand_from_the_last),
        (4, "shard_optimizer", hand_out),
    ],
)
def test_a_weight_that_one_rank_reads_for_others_who_wait_for_handles_is_told_by_name(
    world: Worlds, size: int, strategy: str, action: Action
) -> None:
    for ended in world(size).run(train_handing, strategy, action):
        assert ended.kind == "DesyncError", ended
        assert "blocks.1.up.weight" in ended.said
        assert "the wait() of a handle at " in ended.said
        assert ended.seconds < SOON_S


def train_twice(strategy: str) -> Ended:
    """A read of one rank alone in the second of two Trainers that are both referred to."""
    former = make_trainer(make_strategy("full_shard"), max_steps=1)
    former.fit(EvaluatedGpt(), token_loader(24 * dist.get_world_size()))
    ended = train(strategy, read_a_weight)
    assert former.global_step == 1
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_what_one_rank_does_alone_in_a_second_training_is_told_by_name(
    world: Worlds, strategy: str
) -> None:
    check(world(2).run(train_twice, strategy), read_a_weight)


@pytest.mark.long
@pytest.mark.slow
def test_a_handle_that_waits_for_a_rank_at_work_is_waited_for(world: Worlds) -> None:
    for ended in world(3).run(train_handing, "full_shard", hand_late):
        assert ended.said == "trained"


class OddOptimizer(TinyGpt):
    """Has another optimizer on one rank."""

    def configure_optimizers(self) -> Any:
        kind = torch.optim.SGD if dist.get_rank() else torch.optim.AdamW
        return kind(self.parameters(), lr=0.1)


def warnings_of_optimizers() -> list[str]:
    trainer = make_trainer(make_strategy("full_shard"), max_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(OddOptimizer(), token_loader(32))
    return [str(each.message) for each in caught if "ranks" in str(each.message)]


def test_ranks_that_step_with_different_optimizers_are_told_once(world: Worlds) -> None:
    (said,), others = world(2).run(warnings_of_optimizers)
    assert "rank 0 AdamW, rank 1 SGD" in said
    assert not others
