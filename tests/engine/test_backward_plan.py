"""Backwards of ranks that use units of their own: planned when they begin, and those of one process."""

import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardeddp.comm.agreement import HostReduction, begun
from shardeddp.engine import order
from shardeddp.engine.order import ForwardRecord
from shardeddp.engine.progress import UnitProgress
from shardeddp.errors import DesyncError
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import is_in_backward
from training import WIDTH, Sharding, Trial, another_order, batch
from world import on_ranks

pytestmark = pytest.mark.timeout(120)


Runs = list[tuple[list[int], bool | None]]
"""Stages that run one after the other, and whether they are recomputed, by reentrant checkpointing or not."""


class Stage(nn.Module):
    """A unit with another one inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skips_inner: bool) -> torch.Tensor:
        y = self.before(x).tanh()
        return x + (y if skips_inner else self.inner(y))


class Program(nn.Module):
    """A stem, stages in any order and number, some of them recomputed, and a head."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)  # registered before what runs before it
        self.stages = nn.ModuleList(Stage() for _ in range(count))

    def forward(self, x: torch.Tensor, runs: Runs) -> torch.Tensor:
        """Run stages.

        Args:
            x: Shape (rows, WIDTH).
            runs: What runs.
        """
        x = self.stem(x)
        for stages, reentrant in runs:
            if reentrant is None or not torch.is_grad_enabled():
                x = self.run(stages, x)
            else:
                x = checkpoint(self.run, stages, x, use_reentrant=reentrant)
        return self.head(x)

    def run(self, stages: list[int], x: torch.Tensor) -> torch.Tensor:
        """Some stages, one after the other; of those above 10 without the inner unit."""
        for index in stages:
            x = self.stages[index % 10](x, index >= 10)
        return x


UNITS = ("stages.*", "stages.*.inner", "head")


def drawn_runs(seed: int, rank: int, step: int) -> Runs:
    """Mostly the same stages for some steps, now and then others, in any order, twice, or none."""
    usual = random.Random(f"{seed} {step // 4} {rank}")
    draws = usual if usual.random() < 0.6 else random.Random(f"{seed} {step} {rank}")
    stages = sorted(draws.sample(range(6), draws.randrange(7)))
    if draws.random() < 0.2:
        draws.shuffle(stages)
    stages = [index + 10 * (draws.random() < 0.2) for index in stages]
    if draws.random() < 0.2:
        stages += stages[:2]
    kinds = [None, None, False, True] if random.Random(seed).random() < 0.7 else [None]
    runs: Runs = []
    while stages:
        count = 1 + draws.randrange(3)
        runs.append((stages[:count], draws.choice(kinds)))
        stages = stages[count:]
    return runs


def output(seed: int, model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input, and what the drawn stages make of it."""
    x = batch(rank, step, 4, WIDTH).requires_grad_()
    return x, model(x, drawn_runs(seed, rank, step))


def plain(seed: int, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return output(seed, model, rank, step)[1].pow(2).mean()


def penalized(seed: int, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """With a penalty on the gradient of the input, whose backward runs inside of the step."""
    x = batch(rank, step, 4, WIDTH).requires_grad_()
    runs = [(stages, None) for stages, _ in drawn_runs(seed, rank, step)]
    y = model(x, runs)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.pow(2).mean() + slope.pow(2).mean()


def twice(seed: int, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Two forwards of one step, each with stages of its own."""
    return plain(seed, model, rank, step) + plain(seed + 1000, model, rank, step)


def train_drawn(
    seed: int,
    sharding: Sharding,
    loss: Callable[..., torch.Tensor],
    steps: int = 12,
    micro: int = 1,
) -> None:
    trial = Trial(Program(), sharding)
    backwards = 2 if loss is plain and seed % 3 == 1 else 1
    with another_order():
        for number in range(steps * micro):
            last = number % micro == micro - 1
            trial.runtime.sync_gradients = last
            mine = trial.forward(partial(loss, seed), number)
            expected = trial.reference_loss(partial(loss, seed), number)
            for left in reversed(range(backwards)):
                keeps = bool(left) and not any(
                    reentrant
                    for rank in range(dist.get_world_size())
                    for _, reentrant in drawn_runs(seed, rank, number)
                )
                mine.backward(retain_graph=keeps)
                expected.backward(retain_graph=keeps)
                if not keeps:
                    break
            if last:
                trial.check_gradients()
                trial.step()
                trial.check_parameters()
                trial.check_rest()
            if number % 5 == 4:
                with torch.no_grad():
                    found = trial.forward(partial(plain, seed + 7), number)
                    torch.testing.assert_close(
                        found,
                        plain(seed + 7, trial.reference, dist.get_rank(), number),
                        rtol=2e-5,
                        atol=1e-6,
                    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", [plain, penalized, twice])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
@on_ranks(2)
def test_drawn_programs_of_ranks_are_those_of_one_process(
    strategy: str, loss: Callable[..., torch.Tensor], seed: int
) -> None:
    train_drawn(seed, Sharding(strategy=strategy, units=UNITS, uneven=True), loss)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.torture)])
@pytest.mark.parametrize("micro", [1, 3])
@on_ranks(4)
def test_drawn_programs_of_replicas_are_those_of_one_process(micro: int, seed: int) -> None:
    for split in (False, True):
        sharding = Sharding(
            strategy="hybrid_shard", shard_size=2, units=UNITS, uneven=True, split=split
        )
        train_drawn(seed, sharding, plain, steps=6, micro=micro)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("every", [True, False])
@on_ranks(3)
def test_drawn_micro_batches_are_those_of_one_process(every: bool) -> None:
    sharding = Sharding(units=UNITS, uneven=True, reduce_every_backward=every)
    train_drawn(0, sharding, plain, steps=6, micro=3)


# -- How often ranks ask, and what they gather


def count(runs: Callable[[int, int], Runs], steps: int, **options: object) -> list[tuple[int, int]]:
    """By step, how often ranks ask in the forward and in the backward."""
    trial = Trial(Program(), Sharding(units=UNITS, uneven=True, **options))  # type: ignore[arg-type]
    rounds: list[int] = []

    def note() -> None:
        rounds.append(begun(trial.runtime.mesh.control).get("agreement on units", 0))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 4, WIDTH), runs(rank, step)).pow(2).mean()

    found = []
    with another_order():
        for step in range(steps):
            note()
            mine = trial.forward(loss, step)
            note()
            mine.backward()
            note()
            trial.reference_loss(loss, step).backward()
            before, between, after = rounds[-3:]
            found.append((between - before, after - between))
            trial.check_gradients()
            trial.step()
    trial.check_parameters()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_ranks_ask_when_a_backward_begins_and_when_it_ends(strategy: str) -> None:
    own: list[Runs] = [[([0, 2, 3], None)], [([1, 2], None), ([5, 4], None)]]
    found = count(lambda rank, step: own[(rank + step) % 2], 4, strategy=strategy)
    # The root, the head, six stages with an inner unit each, and the end.
    assert all(forward > 14 for forward, _ in found), found
    assert found[0][1] > 14, found  # the first is not planned
    assert [backward for _, backward in found[1:]] == [2, 2, 2], found


@on_ranks(2)
def test_units_that_run_several_times_are_planned_as_often() -> None:
    own: list[Runs] = [[([0, 1, 0, 1, 0], None)], [([1, 1, 1], None)]]
    found = count(lambda rank, step: own[rank], 3)
    assert [backward for _, backward in found[1:]] == [2, 2], found


@pytest.mark.slow
@on_ranks(2)
def test_backwards_that_recompute_units_are_agreed_on_visit_by_visit() -> None:
    for reentrant in (True, False):
        own: list[Runs] = [[([0, 2, 3], reentrant)], [([1, 2], reentrant), ([5, 4], reentrant)]]
        found = count(lambda rank, step: own[rank], 3)  # noqa: B023
        assert all(backward > 12 for _, backward in found), found


@pytest.mark.slow
@on_ranks(2)
def test_only_a_backward_that_recomputes_what_the_first_has_not_gathers_in_vain() -> None:
    own = [[0, 1, 2], [0, 3, 4]]
    for recomputed_from in (0, 1):
        trial = Trial(Program(), Sharding(units=UNITS, uneven=True))
        stream, gathered = trial.runtime.mesh.gather_stream, list[int]()
        for step in range(4):
            with trial.runtime.step("training_step") as outputs:
                runs: Runs = [(own[dist.get_rank()], False if step >= recomputed_from else None)]
                outputs.append(trial.model(batch(dist.get_rank(), step, 4, WIDTH), runs).sum())
            before = stream.issued
            outputs[0].backward()
            gathered.append(stream.issued - before)
        # The head and five stages with an inner unit each.
        in_vain = [count - 11 for count in gathered]
        assert in_vain[0] == in_vain[2] == in_vain[3] == 0, in_vain
        assert (in_vain[1] > 0) == (recomputed_from == 1), in_vain


@on_ranks(2)
def test_a_backward_gathers_what_forwards_have_gathered() -> None:
    trial = Trial(Program(), Sharding(units=UNITS, uneven=True))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        drawn = random.Random(f"{step} {rank}").sample(range(6), 3)
        return model(batch(rank, step, 4, WIDTH), [(sorted(drawn), None)]).pow(2).mean()

    stream = trial.runtime.mesh.gather_stream
    for step in range(6):
        before = stream.issued
        mine = trial.forward(loss, step)
        forward = stream.issued - before
        mine.backward()
        # Each forward but that of the root, which stays gathered.
        assert stream.issued - before - forward == forward - 1


@on_ranks(2)
def test_messages_get_no_longer_from_step_to_step() -> None:
    trial, own, lengths = Trial(Program(), Sharding(units=UNITS, uneven=True)), [[0, 1], [2]], []

    def agree(message: torch.Tensor, *arguments: Any) -> HostReduction:
        lengths[-1].append(message.numel())
        return HostReduction(message, *arguments)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 4, WIDTH), [(own[rank], None)]).pow(2).mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "HostReduction", agree)
        for step in range(4):
            lengths.append([])
            trial.forward(loss, step).backward()
    assert lengths[1] == lengths[2] == lengths[3], lengths


@on_ranks(2)
def test_units_are_reduced_once_and_while_the_backward_goes_on() -> None:
    trial = Trial(Program(), Sharding(units=UNITS, uneven=True))
    own = [[0, 1, 3], [0, 2, 3, 5]]
    stream, early = trial.runtime.mesh.reduce_stream, list[int]()

    def note(gradient: torch.Tensor) -> None:
        early.append(stream.issued)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        assert isinstance(model, Program)
        x = model.run(own[rank][:1], batch(rank, step, 4, WIDTH).requires_grad_())
        if model is trial.model:
            x.register_hook(note)
        return model.run(own[rank][1:], x).pow(2).mean()

    for step in range(3):
        mine, before = trial.forward(loss, step), stream.issued
        mine.backward()
        # Of five stages with an inner unit each the last two, before any rank comes to the first.
        assert early[-1] - before >= 4, early[-1] - before
        # The root is learnt to have no gradients.
        assert stream.issued - before == (10 if step else 11), stream.issued - before


class Wrapping(nn.Module):
    """A unit whose output is that of a unit inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.before(x).tanh())


class Wrapped(nn.Module):
    """Without parameters of its own: its output is that of its last unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(Wrapping() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard"])
@pytest.mark.parametrize("uneven", [False, True], ids=["alike", "uneven"])
@on_ranks(2)
def test_units_that_have_the_output_of_an_inner_one_are_reduced_once(
    strategy: str, uneven: bool
) -> None:
    size = 1 if strategy == "hybrid_shard" else None
    sharding = Sharding(strategy=strategy, units=UNITS[:2], shard_size=size, uneven=uneven)
    trial, counts = Trial(Wrapped(), sharding), list[int]()

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 4, WIDTH)).pow(2).mean()

    for step in range(3):
        before = trial.runtime.mesh.reduce_stream.issued
        trial.backward(loss, step)
        counts.append(trial.runtime.mesh.reduce_stream.issued - before)
        trial.check_gradients()
        trial.step()
    assert counts == [6, 6, 6]


@pytest.mark.slow
@on_ranks(2)
def test_gradients_that_somebody_refers_to_while_autograd_takes_them_are_no_collective() -> None:
    """As a thread that looks at frames does, on one rank."""
    trial, held = Trial(Program(), Sharding(units=UNITS)), list[Any]()

    def hold(frame: FrameType, event: str, value: Any) -> None:
        taken = event == "return" and issubclass(type(value), ShardTensor) and is_in_backward()
        if taken and not any(value is parameter for parameter in trial.model.parameters()):
            held.append(value)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        mine = model(batch(rank, step, 4, WIDTH), [([0, 1], None)]).pow(2).mean()
        return mine + sum(parameter.square().sum() for parameter in model.parameters())

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "parameter .* is used outside")
        sys.setprofile(hold if dist.get_rank() else None)
        try:
            trial.train(loss, steps=3)
        finally:
            sys.setprofile(None)
    assert bool(held) == bool(dist.get_rank())


@pytest.mark.slow
@on_ranks(2)
def test_a_collective_of_users_between_units_meets_that_of_ranks_that_use_others() -> None:
    trial = Trial(Program(), Sharding(units=UNITS, uneven=True))
    own = [[0, 1, 2, 4, 5], [0, 3, 4, 5]]

    def hear(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient.clone())

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        assert isinstance(model, Program)
        stages = own[0 if step < 3 else rank]
        x = batch(rank, step, 4, WIDTH).requires_grad_()
        for stage in stages:
            x = model.run([stage], x)
            if stage == 4 and model is trial.model:
                dist.all_reduce(x.detach().clone())
                x.register_hook(hear)
        return x.pow(2).mean()

    trial.train(loss, steps=6)


@on_ranks(2)
def test_ranks_that_have_left_out_different_parts_of_a_plan_hear_so() -> None:
    # Nothing is gathered or reduced in this backward: ranks wait for nothing that others leave out.
    sharding = Sharding(
        strategy="shard_grad_op", units=UNITS, uneven=True, reduce_every_backward=False
    )
    trial = Trial(Program(), sharding)
    trial.runtime.sync_gradients = False

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        assert isinstance(model, Program)
        x = batch(rank, step, 4, WIDTH).requires_grad_()
        for stage in range(6):
            x = model.run([stage], x)
            if step and stage == 2 + 2 * rank:
                x.register_hook(fail)
        return x.pow(2).mean()

    trial.forward(loss, 0).backward()
    with pytest.raises(ArithmeticError):
        trial.forward(loss, 1).backward()
    trial.runtime.reset()
    with pytest.raises(DesyncError, match="that were left out"):
        trial.forward(loss, 0)


@pytest.mark.slow
@on_ranks(2)
def test_ranks_that_leave_a_plan_at_the_same_place_go_on() -> None:
    trial, own = Trial(Program(), Sharding(units=UNITS, uneven=True)), [[0, 1, 3], [0, 2, 3]]

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        assert isinstance(model, Program)
        x = model.run(own[rank], batch(rank, step, 4, WIDTH))
        if step == 2:
            x.register_hook(fail)
        return model.run([4], x).pow(2).mean()

    for step in range(5):
        if step == 2:
            with pytest.raises(ArithmeticError):
                trial.forward(loss, step).backward()
            trial.runtime.reset()
            continue
        trial.backward(loss, step)
        trial.check_gradients()
        trial.step()
    trial.check_parameters()


# -- The order of backwards


def test_a_backward_comes_to_units_in_the_opposite_order_of_the_ends_of_their_forwards() -> None:
    inner = {0: {1, 2, 3, 4}, 1: {2}}
    record = ForwardRecord(
        [
            UnitProgress(unit=None, index=unit, inner=frozenset(inner.get(unit, ())))  # type: ignore[arg-type]
            for unit in range(5)
        ]
    )
    #                0  1  2  3  4  5  6  7
    record.units += [0, 1, 2, 3, 1, 4, 2, 4]
    assert record.backwards() == [0, 7, 4, 6, 5, 3, 1, 2]
