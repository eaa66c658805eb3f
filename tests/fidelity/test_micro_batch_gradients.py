"""Every micro-batch shows its gradients in `on_after_backward`, whichever strategy accumulates them."""

import pytest
import torch
from torch import Tensor

from shardeddp import ShardTensor
from support.fidelity import STRATEGIES, SmallGpt, case, ranks_of, train_in_turn
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
