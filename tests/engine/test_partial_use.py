"""Parameters that a step does not use: on all ranks, on some of them, in turns, without any flag."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

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


# -- Units that leave a parameter out are released when their own backward is over


class Watched(Layers):
    """Notes which layers are unsharded when the backward comes to the input of each one."""

    way = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.seen: list[str] = []
        self.watch = lambda: ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way != "inputs without gradients":
            x = self.stem(x)
        shared = x if self.way == "shared input" else None
        for index, layer in enumerate(self.layers):
            if x.requires_grad:
                x.register_hook(partial(self.note, index))
            if self.way == "recomputed":
                x = checkpoint(layer, x, use_reentrant=True)
            elif self.way == "twice" and index % 2:
                x = layer(layer(x))
            else:
                x = layer(x) if shared is None else layer(x, shared)
        return x

    def note(self, index: int, _: torch.Tensor) -> None:
        self.seen.append(f"{index}:{self.watch()}")


class WithShared(Optional):
    """The layer, with an input that others get as well."""

    def forward(self, x: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if shared is None else x + shared.tanh())


def watched(way: str, strategy: str, loss: Loss = square) -> tuple[Trial, Watched]:
    """A model, trained without prefetching, that notes what is unsharded."""
    model = Watched()
    model.layers = nn.ModuleList([WithShared() for _ in range(5)])
    trial = Trial(model, Sharding(strategy=strategy, units=("layers.*",), prefetch=0))
    for each in (trial.model, trial.reference):
        each.way = way
    layers = trial.runtime.progresses[1:]
    model.watch = lambda: "".join(
        it.unit.label[-1] for it in layers if it.unit.state.value != "sharded"
    )
    return trial, model


def unsharded_at(layer: int, strategy: str, way: str) -> str:
    """The layers that are unsharded before the backward leaves one."""
    if way == "recomputed":
        return ""  # without gradients before, and by then the inner backward is over
    return "01234"[: layer + 1] if strategy == "shard_grad_op" else str(layer)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize(
    "way", ["plain", "recomputed", "twice", "shared input", "inputs without gradients"]
)
@on_ranks(2)
def test_a_unit_with_a_parameter_that_is_not_used_is_resharded_when_its_backward_is_over(
    strategy: str, way: str
) -> None:
    trial, model = watched(way, strategy)
    for step in range(3):
        model.seen.clear()
        trial.train(square, steps=1)
        # Of inputs that units share, ranks know after the first backward that they do not count.
        if step or way != "shared input":
            first = 1 if way == "inputs without gradients" else 0
            expected = [
                f"{it}:{unsharded_at(it, strategy, way)}" for it in reversed(range(first, 5))
            ]
            assert model.seen == expected, model.seen


@on_ranks(2)
def test_a_rank_releases_units_whose_second_weight_only_others_use() -> None:
    trial, model = watched("plain", "full_shard")
    for _ in range(3):
        model.seen.clear()
        trial.train(used_by_some, steps=1)
        # With all gradients it is released before its input is reached.
        assert [it.rstrip("01234") for it in model.seen] == ["4:", "3:", "2:", "1:", "0:"]
        assert all(it.partition(":")[2] in ("", it[0]) for it in model.seen), model.seen


@every_strategy
@on_ranks(2)
def test_nothing_is_gathered_again_for_units_that_are_released_early(strategy: str) -> None:
    for way in ("plain", "shared input", "twice"):
        trial, _ = watched(way, strategy)
        found = []
        for used in ((), range(5)):
            trial.model.use(*used)
            for step in range(3):
                trial.runtime.mesh.traffic.reset()
                trial.forward(square, step).backward()
            found.append(trial.runtime.mesh.traffic.calls["all_gather"])
        assert found[0] == found[1], way


class Odd(nn.Module):
    """A layer whose parameters are read where neither its gradients nor its inputs tell it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 2)
        self.way = ""

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        if self.way == "detached":
            x = nn.functional.linear(x, self.other.weight.detach()).tanh()
        elif self.way == "captured":
            x = x + nn.functional.linear(
                self.context, self.unused.weight[:1].detach().T.repeat(1, 6)
            )
        elif self.way == "recomputed":
            dummy = torch.ones((), requires_grad=True)
            x = x + checkpoint(lambda y, _: self.other(y).tanh(), x, dummy, use_reentrant=True)
        return x + self.own(x).tanh()


class OddLayers(nn.Module):
    """Such layers behind each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Odd() for _ in range(4)])
        self.way = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x if self.way in ("detached", "recomputed") else self.stem(x)
        x = first
        for layer in self.layers:
            layer.way, layer.context = self.way, first
            x = layer(x)
        for layer in self.layers:
            layer.context = None
        return x


@every_strategy
@pytest.mark.parametrize("way", ["", "detached", "captured", "recomputed"])
@on_ranks(2)
def test_units_that_are_released_early_train_as_in_one_process(strategy: str, way: str) -> None:
    trial = Trial(OddLayers(), Sharding(strategy=strategy, units=("layers.*",)))
    for each in (trial.model, trial.reference):
        each.way = way
    with another_order():
        trial.train(square, steps=4)


@every_strategy
@on_ranks(2)
def test_several_backwards_of_units_that_leave_out_parameters_train_as_in_one_process(
    strategy: str,
) -> None:
    trial = Trial(OddLayers(), Sharding(strategy=strategy, units=("layers.*",)))
    with another_order():
        for step in range(4):
            for loss, each in (
                (trial.forward(square, step), trial.model),
                (trial.reference_loss(square, step), trial.reference),
            ):
                asked = [it.own.weight for it in each.layers]
                loss.backward(inputs=asked if step % 2 else None, retain_graph=True)
                loss.backward()
            trial.check_gradients()
            trial.step()
            trial.check_parameters()
            trial.check_rest()


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
