"""Plans of visits: ranks that use units of their own ask when a pass begins and when it ends, and train as one process."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardeddp.comm.agreement import begun
from training import WIDTH, Sharding, Trial, another_order, batch
from world import on_ranks

pytestmark = pytest.mark.timeout(120)


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

    def forward(self, x: torch.Tensor, runs: list[tuple[list[int], bool | None]]) -> torch.Tensor:
        """Run stages.

        Args:
            x: Shape (rows, WIDTH).
            runs: Stages, and whether they are recomputed by reentrant checkpointing; None: they are not.
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


def drawn_runs(seed: int, rank: int, step: int) -> list[tuple[list[int], bool | None]]:
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
    runs: list[tuple[list[int], bool | None]] = []
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", [plain, penalized, twice])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
@on_ranks(2)
def test_drawn_programs_of_ranks_are_those_of_one_process(
    strategy: str, loss: Callable[..., torch.Tensor], seed: int
) -> None:
    train_drawn(seed, Sharding(strategy=strategy, units=UNITS, uneven=True), loss)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("micro", [1, 3])
@on_ranks(4)
def test_drawn_programs_of_replicas_are_those_of_one_process(micro: int, seed: int) -> None:
    for split in (False, True):
        sharding = Sharding(
            strategy="hybrid_shard", shard_size=2, units=UNITS, uneven=True, split=split
        )
        train_drawn(seed, sharding, plain, steps=6, micro=micro)


@pytest.mark.parametrize("every", [True, False])
@on_ranks(3)
def test_drawn_micro_batches_are_those_of_one_process(every: bool) -> None:
    sharding = Sharding(units=UNITS, uneven=True, reduce_every_backward=every)
    train_drawn(0, sharding, plain, steps=6, micro=3)


# -- How often ranks ask


def rounds(trial: Trial) -> int:
    """How often this rank has asked so far."""
    return begun(trial.runtime.mesh.control).get("agreement on units", 0)


def count_rounds(
    runs: Callable[[int, int], list[tuple[list[int], bool | None]]], steps: int, **options: object
) -> list[int]:
    """By step, how often ranks ask."""
    trial = Trial(Program(), Sharding(units=UNITS, uneven=True, **options))  # type: ignore[arg-type]

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 4, WIDTH), runs(rank, step)).pow(2).mean()

    found = []
    with another_order():
        for step in range(steps):
            before = rounds(trial)
            trial.backward(loss, step)
            found.append(rounds(trial) - before)
            trial.check_gradients()
            trial.step()
    trial.check_parameters()
    return found


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_in_the_steady_state_ranks_ask_when_a_pass_begins_and_ends(strategy: str) -> None:
    own = [[([0, 2, 3], None)], [([1, 2], None), ([5, 4], False)]]
    found = count_rounds(lambda rank, step: own[rank], 5, strategy=strategy)
    assert found[0] > 20 and found[-2:] == [4, 4], found


@on_ranks(2)
def test_units_that_run_several_times_are_planned_as_often() -> None:
    own = [[([0, 1, 0, 1, 0], None)], [([1, 1, 1], None)]]
    found = count_rounds(lambda rank, step: own[rank], 5)
    assert found[-2:] == [4, 4], found


@on_ranks(2)
def test_what_no_rank_has_expected_is_asked_about_and_planned_from_then_on() -> None:
    def runs(rank: int, step: int) -> list[tuple[list[int], bool | None]]:
        return [([0, 1, 3, 4, 5] if rank or step < 4 else [0, 1, 2, 4, 5], None)]

    found = count_rounds(runs, 9)
    assert found[3] == 4 and found[4] > 4 and found[-1] == 4, found


@on_ranks(2)
def test_what_no_rank_needs_any_more_is_gathered_once_more_in_vain() -> None:
    gathered = []
    for own in ([], [4, 5]):
        trial = Trial(Program(), Sharding(units=UNITS, uneven=True))

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            stages = [0, 1, *(own if step < 3 else [])]
            return model(batch(rank, step, 4, WIDTH), [(stages, None)]).pow(2).mean()

        with another_order():
            for step in range(6):
                issued = trial.runtime.mesh.gather_stream.issued
                trial.backward(loss, step)
                gathered.append(trial.runtime.mesh.gather_stream.issued - issued)
                trial.step()
    without, with_more = gathered[:6], gathered[6:]
    assert with_more[2] > without[2] and with_more[3] > without[3]
    assert with_more[4:] == without[4:]
