"""The user's own activation checkpointing, around and inside of units, trains as under DDP."""

from typing import Any

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.fidelity import UNITS_TOO, BesideDdp, OfUnits, ScaledBlock, case

pytestmark = pytest.mark.timeout(300)


class CheckpointsInside(ScaledBlock):
    reentrant = False

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.auxiliary = (x * self.scale).square().mean()
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointInUnits(OfUnits):
    """A loss is kept aside as well."""

    unit: type[ScaledBlock] = CheckpointsInside

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(block.auxiliary for block in self.blocks)


class ReentrantCheckpointsInside(CheckpointsInside):
    reentrant = True


class ReentrantCheckpointInUnits(CheckpointInUnits):
    unit = ReentrantCheckpointsInside


class UnusedCheckpointInUnits(OfUnits):
    """What is recomputed is not used: the loss is of the auxiliary loss alone."""

    unit = CheckpointsInside

    def loss(self, batch: Tensor) -> Tensor:
        self(batch)
        return sum(block.auxiliary for block in self.blocks)


class CheckpointAroundUnits(OfUnits):
    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        def all_of_them(y: Tensor) -> Tensor:
            for block in self.blocks:
                y = block(y)
            return y

        return checkpoint(all_of_them, x, use_reentrant=self.reentrant)


class ReentrantCheckpointAroundUnits(CheckpointAroundUnits):
    reentrant = True


class CheckpointPerUnit(OfUnits):
    """Each unit by itself, called by the caller's checkpoint."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class RecordsFeaturesUnderCheckpoints(CheckpointPerUnit):
    """Recorded by hooks in the first forward, so the loss's backward comes to it and not to the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.features = list[Tensor]()
        for module in (self.blocks[0].block.up, self.blocks[1].block.norm, self.blocks[1]):
            module.register_forward_hook(lambda module, args, out: self.features.append(out))

    def loss(self, batch: Tensor) -> Tensor:
        self.features.clear()
        loss = super().loss(batch)
        return loss + 0.1 * sum((feature - 0.1).square().mean() for feature in self.features[:3])


CASES = [
    case(CheckpointInUnits),
    case(ReentrantCheckpointInUnits, ddp={"static_graph": True}),
    case(UnusedCheckpointInUnits),
    case(CheckpointAroundUnits),
    case(CheckpointPerUnit),
    case(ReentrantCheckpointAroundUnits, ddp={}),
    case(RecordsFeaturesUnderCheckpoints),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_recomputed_units_train_as_under_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)
