"""Micro-batches show their gradients in `on_after_backward`, and go on with their own buffers."""

from typing import Any

import pytest
import torch
from torch import Tensor, optim

from shardeddp import ShardTensor
from support.fidelity import (
    STRATEGIES,
    BesideDdp,
    SmallGpt,
    case,
    in_bf16,
    ranks_of,
    train_in_turn,
)
from support.parity import Trained
from world import Worlds

pytestmark = pytest.mark.timeout(300)

MICRO_BATCHES = 3


class LooksAtGradients(SmallGpt):
    """Records all gradients after each backward, in one row, and whether their norms are theirs.

    What is missing is not a number.
    """

    def on_after_backward(self) -> None:
        rows = [self.row(parameter) for parameter in self.parameters()]
        self.losses += torch.cat(rows).tolist()

    def row(self, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.full((parameter.numel() + 1,), torch.nan)
        whole = (gradient.full_tensor() if isinstance(gradient, ShardTensor) else gradient).detach()
        return torch.cat([whole.flatten(), gradient.norm().view(1) / whole.norm()])


RUN = case(LooksAtGradients, steps=2, batches=6, options={"accumulate_grad_batches": MICRO_BATCHES})


def gradients(trained: list[Trained]) -> Tensor:
    """A row per backward."""
    return torch.tensor(trained[0].losses).view(MICRO_BATCHES * RUN.steps, -1)[:, 1:]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_every_micro_batch_are_there(world: Worlds, strategy: str) -> None:
    """The complete gradient is the average.

    Before, it is the average so far, that of the rank's shard group where that is all that has been reduced, or, as
    under DDP, this rank's own.
    """
    ranks = world(ranks_of(strategy))
    expected = [gradients(trained) for trained in ranks.run(train_in_turn, [RUN], None)]
    found = [gradients(trained) for trained in ranks.run(train_in_turn, [RUN], strategy)]
    average = torch.stack(expected).mean(0)
    shard_size = STRATEGIES[strategy].get("shard_size", ranks.size)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        first = rank - rank % shard_size
        of_shard_group = torch.stack(expected[first : first + shard_size]).mean(0)
        for index in range(len(ours)):
            assert not ours[index].isnan().any(), f"no gradient after backward {index}"
            complete = index % MICRO_BATCHES == MICRO_BATCHES - 1
            allowed = (
                [average[index]]
                if complete
                else [average[index], of_shard_group[index], theirs[index]]
            )
            distances = [float((ours[index] - each).norm() / each.norm()) for each in allowed]
            assert min(distances) < 1e-5, f"after backward {index}: {distances}"


# -- buffers: rank 0's come to all with the first micro-batch, and not with the others


class Centered(SmallGpt):
    """Each rank moves a buffer that the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch) - self.center
        self.center = 0.5 * self.center + 0.5 * x.detach().mean((0, 1))
        return self.head(self.blocks[0](x)).square().mean()


class CenteredOverEpochs(Centered):
    """Epochs that end within an accumulation."""


class CenteredInPlace(Centered):
    """The same in a unit, in place."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        with torch.no_grad():
            self.center.lerp_(x.mean((0, 1)), 0.5)
        return self.head(self.blocks[0](x - self.center)).square().mean()


class CenteredByHand(Centered):
    """Two backwards in a step, the first without synchronisation."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(float(loss.detach()))


class CenteredWithoutGradients(Centered):
    """A forward without gradients before that with them."""

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            super().loss(batch)
        return super().loss(batch)


ACCUMULATED = {"accumulate_grad_batches": MICRO_BATCHES}
OF_BUFFERS = [
    case(Centered, steps=2, batches=6, options=ACCUMULATED),
    case(CenteredOverEpochs, steps=4, batches=5, options={"accumulate_grad_batches": 2}),
    case(CenteredInPlace, steps=2, batches=6, options=ACCUMULATED),
    case(CenteredByHand),
    case(CenteredWithoutGradients, steps=2, batches=6, options=ACCUMULATED),
]


@pytest.mark.parametrize("place", range(len(OF_BUFFERS)))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_go_on_with_their_own_buffers_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str, place: int
) -> None:
    beside_ddp([OF_BUFFERS[place]], strategy)


class ZeroesInPlace(SmallGpt):
    """What an earlier step has left is there, as zeros, while micro-batches add to it."""

    def optimizer_zero_grad(self, epoch: int, batch_index: int, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class NeverZeroes(ZeroesInPlace):
    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


class DropsInPlace(ZeroesInPlace):
    """By hand: a micro-batch that is zeroed or turned round before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_after_backward(self) -> None:
        pass

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        if batch_index % 2:
            self.zero_grad(set_to_none=False)
        else:
            for parameter in self.parameters():
                parameter.grad.neg_()
        self.manual_backward(super().training_step(batch, batch_index))
        self.optimizers().step()
        self.embed.zero_grad()
        self.blocks[0].zero_grad(set_to_none=False)


ON_FORMER = [
    case(ZeroesInPlace, steps=3, batches=6, options={"accumulate_grad_batches": 2}),
    case(NeverZeroes, steps=3, batches=6, options={"accumulate_grad_batches": 2}),
    case(DropsInPlace),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_and_what_an_earlier_step_has_left_are_one_gradient(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(ON_FORMER, strategy)


class LooksOnOneRank(SmallGpt):
    """Gradients are halved and never dropped; one rank looks for missing ones between micro-batches."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def on_after_backward(self) -> None:
        if self.global_rank == 0:
            self.look()

    def look(self) -> None:
        missing = [parameter.grad is None for parameter in self.parameters()]
        self.losses.append(float(sum(missing)))


class MeasuresOnOneRank(LooksOnOneRank):
    def look(self) -> None:
        self.losses.append(float(self.blocks[0].up.weight.grad.norm()))


class UsesOnOneRank(LooksOnOneRank):
    """All look at the gradient of a block that one rank, which is another one in each step, uses."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        last = self.global_step % self.trainer.world_size
        return self.head(self.blocks[1](x) if self.global_rank == last else x)

    def on_after_backward(self) -> None:
        self.look()


class WritesOnOneRank(LooksOnOneRank):
    """What a rank does to its own sum takes part in the average."""

    def look(self) -> None:
        self.blocks[0].up.weight.grad.mul_(0.5)


def looks(model: type[SmallGpt], **options: Any) -> Any:
    return case(model, steps=3, batches=6, options={"accumulate_grad_batches": 2}, **options)


WITHOUT_OTHERS = {
    "no_shard": [LooksOnOneRank, MeasuresOnOneRank, UsesOnOneRank, WritesOnOneRank],
    "hybrid_shard": [LooksOnOneRank, UsesOnOneRank],
    "shard_optimizer": [UsesOnOneRank],
}


@pytest.mark.parametrize("strategy", WITHOUT_OTHERS)
def test_what_was_left_counts_once_whoever_looks_at_it_and_uses_its_parameter(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp([looks(each) for each in WITHOUT_OTHERS[strategy]], strategy)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer"])
def test_a_rank_that_looks_alone_at_what_has_to_be_gathered_is_told_its_name(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    named = r"DesyncError.*blocks\.0\.up\.weight|none of them can go on: .*blocks\.0\.up\.weight"
    beside_ddp([looks(MeasuresOnOneRank, refused=named)], strategy)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_one_rank_alone_may_ask_whether_there_is_a_gradient(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp([looks(LooksOnOneRank)], strategy)


def test_one_rank_alone_may_not_where_the_answer_takes_a_gather(beside_ddp: BesideDdp) -> None:
    named = r"none of them can go on: .*\.weight"
    beside_ddp([looks(LooksOnOneRank, refused=named)], "shard_optimizer")


class LooksAtDtypes(SmallGpt):
    """Between micro-batches: of gradients that are read, written and handed to NumPy."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad.dtype is parameter.dtype
            parameter.grad.mul_(1 + 1e-4)  # which bfloat16 does not tell from 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_between_micro_batches_have_the_dtype_of_their_parameter(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp([in_bf16(looks(LooksAtDtypes))], strategy)


class StepsWithoutSynchronisation(SmallGpt):
    """Local descent: DDP lets each rank step on its own gradient."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, _: int) -> None:
        optimizer = self.optimizers()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class StepsByAnUnknownOptimizer(StepsWithoutSynchronisation):
    """One that is stepped on sharded tensors."""

    def configure_optimizers(self) -> Any:
        return Descent(self.parameters(), {"lr": 0.1})


class Descent(optim.Optimizer):
    """On the sharded tensors themselves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)


class DropsWhatWasNotAveraged(StepsWithoutSynchronisation):
    """The gradient of the backward before is forgotten."""

    def training_step(self, batch: Tensor, _: int) -> None:
        optimizer = self.optimizers()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        optimizer.zero_grad()
        optimizer.step()
        self.manual_backward(self.loss(batch))
        optimizer.step()


NOT_AVERAGED = "an optimizer steps on .*weight, whose gradient ranks have not averaged"


@pytest.mark.parametrize("model", [StepsWithoutSynchronisation, StepsByAnUnknownOptimizer])
@pytest.mark.parametrize("strategy", ["hybrid_shard", "shard_optimizer", "no_shard"])
def test_a_step_on_gradients_that_are_not_averaged_is_refused_by_name(
    beside_ddp: BesideDdp, strategy: str, model: type[SmallGpt]
) -> None:
    beside_ddp([case(model, refused=NOT_AVERAGED)], strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_not_averaged_may_be_dropped(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp([case(DropsWhatWasNotAveraged)], strategy)


class DropsWhatOneRankUsed(DropsWhatWasNotAveraged):
    """A parameter that some ranks use in some steps: what is dropped has no sign on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = torch.nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer = self.optimizers()
        with self.trainer.strategy.block_backward_sync():
            loss = self.loss(batch)
            if batch_index and self.global_rank:
                loss = loss + self.sometimes(self.embed(batch)).square().mean()
            self.manual_backward(loss)
        optimizer.zero_grad()
        loss = self.loss(batch) + self.sometimes(self.embed(batch)).square().mean()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_one_rank_used_may_be_dropped_before_others_hear_of_it(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp([case(DropsWhatOneRankUsed, ddp={"find_unused_parameters": True})], strategy)
