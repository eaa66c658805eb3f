"""Micro-batches show their gradients in `on_after_backward`, and go on with their own buffers."""

import pytest
import torch
from torch import Tensor

from shardeddp import ShardTensor
from support.fidelity import STRATEGIES, BesideDdp, SmallGpt, case, ranks_of, train_in_turn
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
