"""Parameters that a step does not use: on all ranks, on some of them, in turns, without any flag."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.comm.host_group import HostGroup
from training import RUNTIMES, WIDTH, Loss, Sharding, Trial, another_order, square
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)


class Optional(nn.Module):
    """A layer with a second weight that is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.use = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use:
            x = x + self.sometimes(x)  # so its backward is the unit's last
        return x + self.always(x).tanh()


class Layers(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Optional() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def use(self, *layers: int) -> None:
        for index, layer in enumerate(self.layers):
            layer.use = index in layers


@every_strategy
@on_ranks(2)
def test_what_no_rank_uses_has_no_gradient_and_is_not_decayed(strategy: str) -> None:
    trial = Trial(Layers(), Sharding(strategy=strategy, units=("layers.*",)))
    trial.model.use(1)
    trial.reference.use(1)
    before = trial.reference.layers[0].sometimes.weight.detach().clone()
    trial.train(square)
    assert torch.equal(before, trial.reference.layers[0].sometimes.weight)


def used_by_some(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Rank 1 uses the first, the last and a middle layer's second weight, rank 0 none."""
    model.use(*((0, 2, 4) if rank == 1 else ()))
    return square(model, rank, step)


def used_in_turns(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    model.use(*range((rank + step) % 3, 5, 2))
    return square(model, rank, step)


@pytest.mark.slow
@every_strategy
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("loss", [used_by_some, used_in_turns])
@on_ranks(2, timeout_s=30)
def test_what_some_ranks_use_gets_the_mean_over_all_ranks(
    strategy: str, prefetch: int, loss: Loss
) -> None:
    trial = Trial(Layers(), Sharding(strategy=strategy, units=("layers.*",), prefetch=prefetch))
    trial.train(loss, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [used_by_some, used_in_turns])
@on_ranks(4)
def test_replicas_use_different_parameters(loss: Loss) -> None:
    Trial(Layers(), Sharding(strategy="hybrid_shard", shard_size=2, units=("layers.*",))).train(
        loss, steps=5
    )


@pytest.mark.loop(1)
@every_strategy
@pytest.mark.parametrize("reduce_each_time", [True, False])
@on_ranks(2)
def test_micro_batches_use_different_parameters(strategy: str, reduce_each_time: bool) -> None:
    accumulate(
        Sharding(strategy=strategy, units=("layers.*",), reduce_every_backward=reduce_each_time)
    )


@pytest.mark.slow
@pytest.mark.parametrize("reduce_each_time", [True, False])
@pytest.mark.parametrize(("shard_size", "split"), [(1, False), (2, False), (2, True)])
@on_ranks(4)
def test_replicas_share_what_any_micro_batch_of_any_replica_has_used(
    shard_size: int, split: bool, reduce_each_time: bool
) -> None:
    accumulate(
        Sharding(
            strategy="hybrid_shard",
            shard_size=shard_size,
            units=("layers.*",),
            reduce_every_backward=reduce_each_time,
            split=split,
        )
    )


def accumulate(sharding: Sharding) -> None:
    """Steps of three micro-batches, in which ranks use different parameters."""
    trial = Trial(Layers(), sharding)
    for step in range(9):
        trial.runtime.sync_gradients = step % 3 == 2
        trial.backward(used_in_turns, step)
        if step % 3 == 2:
            trial.check_gradients()
            trial.step()
            trial.check_parameters()


# -- Steps that use other parameters than all former ones

LATER = {4: {1: (0, 2)}, 6: {0: (1,), 1: (1,)}, 7: {0: (1,), 1: (1,)}, 8: {0: (3,)}, 11: {1: (4,)}}
"""By step and rank, the layers whose second weight is used; none in all other steps."""


def used_later(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    model.use(*LATER.get(step, {}).get(rank, ()))
    return square(model, rank, step)


def used_first(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The reverse: what former steps have used is not."""
    model.use(*({(1 + rank) % 3, 3} - {*LATER.get(step, {}).get(rank, ())}))
    return square(model, rank, step)


either_loss = pytest.mark.parametrize("loss", [used_later, used_first])


def train_unseen(trial: Trial, loss: Loss, micro_batches: int, steps: int) -> list[int]:
    """Nobody looks at gradients: the optimizer alone.

    Returns:
        By backward, the number of agreements in it and in the step that follows.
    """
    with pytest.MonkeyPatch.context() as patch:
        keep_highest, count = HostGroup.keep_highest_, 0

        def counting(group: HostGroup, message: torch.Tensor, tag: int) -> None:
            nonlocal count
            count += 1
            keep_highest(group, message, tag)

        patch.setattr(HostGroup, "keep_highest_", counting)
        found = []
        for number in range(micro_batches * steps):
            count = 0
            last = number % micro_batches == micro_batches - 1
            trial.runtime.sync_gradients = last
            trial.backward(loss, number)
            if last:
                trial.step()
            found.append(count)
    trial.check_parameters()
    return found


@pytest.mark.slow
@every_strategy
@either_loss
@on_ranks(2)
def test_a_step_may_use_what_no_former_one_has_used(strategy: str, loss: Loss) -> None:
    sharding = Sharding(strategy=strategy, units=("layers.*",))
    train_unseen(Trial(Layers(), sharding), loss, micro_batches=1, steps=13)
    Trial(Layers(), sharding).train(loss, steps=13)


@pytest.mark.slow
@every_strategy
@either_loss
@on_ranks(2)
def test_a_micro_batch_may_use_what_no_former_one_has_used(strategy: str, loss: Loss) -> None:
    sharding = Sharding(strategy=strategy, units=("layers.*",))
    for first in (0, 2):
        shifted = partial(shift, loss, 12 - first)
        train_unseen(Trial(Layers(), sharding), shifted, micro_batches=3, steps=9)


def shift(loss: Loss, by: int, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return loss(model, rank, step - by)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [used_later, used_first])
@pytest.mark.parametrize("micro_batches", [1, 3])
@on_ranks(4)
def test_replicas_may_use_what_no_former_step_has_used(loss: Loss, micro_batches: int) -> None:
    sharding = Sharding(strategy="hybrid_shard", shard_size=2, units=("layers.*",))
    shifted = partial(shift, loss, 12 if micro_batches > 1 else 0)
    train_unseen(Trial(Layers(), sharding), shifted, micro_batches, steps=9)


@every_strategy
@on_ranks(2)
def test_ranks_agree_once_in_each_backward_that_reduces(strategy: str) -> None:
    sharding = Sharding(strategy=strategy, units=("layers.*",))
    found = train_unseen(Trial(Layers(), sharding), square, micro_batches=1, steps=6)
    assert found[-3:] == [1] * 3
    for reduce_each_time in (False, True):
        sharding = replace(sharding, reduce_every_backward=reduce_each_time)
        found = train_unseen(Trial(Layers(), sharding), square, micro_batches=3, steps=4)
        early = int(reduce_each_time)
        assert found[-6:] == [early, early, 1] * 2


@every_strategy
@on_ranks(2)
def test_a_hook_on_a_complete_gradient_hears_what_ranks_agree_on(strategy: str) -> None:
    trial = Trial(Layers(), Sharding(strategy=strategy, units=("layers.*",)))
    heard: list[str] = []
    for name, parameter in trial.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    for step in range(9):
        heard.clear()
        trial.backward(used_later, step)
        named = trial.reference.named_parameters()
        assert {*heard} == {name for name, each in named if each.grad is not None}
        trial.step()


# -- Drawn steps


class Skipping(Layers):
    """Layers of which some are left out."""

    skipped: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index in self.skipped else layer(x)
        return x


def drawn(seed: int, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Layers that all ranks leave out, and second weights that each of them uses; half of the steps are alike."""
    common = random.Random(f"{seed} {step}")
    own = random.Random(f"{seed} {step} {rank}")
    usual = common.random() < 0.5
    model.skipped = frozenset() if usual else frozenset(common.sample(range(5), 2))
    model.use(*(() if usual or own.random() < 0.4 else own.sample(range(5), 2)))
    return square(model, rank, step)


def train_drawn(seed: int, sharding: Sharding) -> None:
    draws = random.Random(seed)
    trial = Trial(Skipping(), sharding)
    with another_order():
        for number in range(40):
            last = draws.random() < 0.4
            trial.runtime.sync_gradients = last
            trial.backward(partial(drawn, seed), number)
            if last and draws.random() < 0.2:
                trial.check_gradients()
            if last:
                trial.step()
                trial.check_parameters()
            elif number > 20 and draws.random() < 0.2:
                index = draws.randrange(
                    20
                )  # whose gradient is replaced before the next micro-batch
                for model in (trial.model, trial.reference):
                    parameter = [*model.parameters()][index]
                    parameter.grad = parameter.detach() * 0.1


@pytest.mark.long
@pytest.mark.slow
@every_strategy
@pytest.mark.parametrize("seed", range(4))
@on_ranks(2)
def test_drawn_steps_are_those_of_the_whole_model(strategy: str, seed: int) -> None:
    train_drawn(seed, Sharding(strategy=strategy, units=("layers.*",)))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(it, marks=pytest.mark.torture) for it in (1, 2))]
)
@pytest.mark.parametrize("split", [False, True])
@on_ranks(4)
def test_drawn_steps_of_replicas_are_those_of_the_whole_model(seed: int, split: bool) -> None:
    sharding = Sharding(strategy="hybrid_shard", shard_size=2, units=("layers.*",), split=split)
    train_drawn(seed, sharding)


def skipped_in_turns(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    model.skipped = frozenset({(rank + step) % 5, (rank * step) % 5})
    return square(model, rank, step)


@on_ranks(2)
def test_one_rank_alone_may_look_at_gradients_before_all_go_on() -> None:
    trial = Trial(Skipping(), Sharding(strategy="no_shard", units=("layers.*",)))
    with another_order():
        for step in range(8):
            trial.backward(skipped_in_turns, step)
            if dist.get_rank() == 0:
                for mine, expected in zip(
                    trial.model.parameters(), trial.reference.parameters(), strict=True
                ):
                    assert (mine.grad is None) == (expected.grad is None)
            trial.check_parameters()  # which all ranks do together
            trial.step()
        trial.check_parameters()


@on_ranks(2)
def test_a_unit_that_others_gather_again_computes_with_what_was_written_meanwhile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    runtime = Sharding(units=("0",), uneven=True).apply(model, autocast=torch.bfloat16)
    unit = next(it.unit for it in runtime.progresses if it.unit.spec.name == "0")
    with runtime.step("training_step") as outputs, torch.autocast("cpu", torch.bfloat16):
        unit.unshard()
        unit.wait()
        with torch.no_grad():
            model[0].weight.fill_(2.0)
        unit.unshard_with_others()
        gathers = runtime.mesh.traffic.calls["all_gather"]
        outputs.append(model[0](torch.ones(1, 4)).sum())
        assert runtime.mesh.traffic.calls["all_gather"] == gathers
