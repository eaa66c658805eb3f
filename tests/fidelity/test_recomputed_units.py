"""The user's own activation checkpointing, around and inside of units, trains as under DDP."""

from typing import Any

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.fidelity import UNITS_TOO, BesideDdp, OfUnits, ScaledBlock, case, in_bf16

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


class ReentrantCheckpointPerUse(OfUnits):
    """Each unit is recomputed twice within one backward, and its gradients are of two nested ones."""

    def run(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return x


class ReentrantCheckpointAfterPlainUse(OfUnits):
    """What is recomputed comes first in the backward, or last."""

    def run(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = checkpoint(second, first(x), use_reentrant=True)
        return second(checkpoint(first, x, use_reentrant=True))


class LayerReusedInside(ScaledBlock):
    """A layer of the unit is recomputed three times, in a forward of the unit."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.block.up, x, use_reentrant=True)[..., : x.shape[-1]]
        return x * self.scale


class ReentrantLayerReusedInUnits(OfUnits):
    unit = LayerReusedInside


CASES = [
    case(CheckpointInUnits),
    case(ReentrantCheckpointInUnits, ddp={"static_graph": True}),
    case(UnusedCheckpointInUnits),
    case(CheckpointAroundUnits),
    case(CheckpointPerUnit),
    case(ReentrantCheckpointAroundUnits, ddp={}),
    case(RecordsFeaturesUnderCheckpoints),
    *(
        of
        for model in (
            ReentrantCheckpointPerUse,
            ReentrantCheckpointAfterPlainUse,
            ReentrantLayerReusedInUnits,
        )
        for each in [case(model, ddp={"static_graph": True})]
        for of in (each, in_bf16(each))
    ),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_recomputed_units_train_as_under_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)
