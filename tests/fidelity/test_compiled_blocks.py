"""Blocks that are compiled, and traced again in the middle of a training, train as under DDP."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.fidelity import EXPECTED, BesideDdp, OfUnits, ScaledBlock, case

pytestmark = pytest.mark.timeout(300)


class CompiledBlocks(OfUnits):
    """Without a backend that rounds otherwise."""

    unit = ScaledBlock

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class OtherLengths(CompiledBlocks):
    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return super().training_step(
            batch[:, : batch.shape[1] - 2 * (batch_index % 3)], batch_index
        )


class FreezesABlock(CompiledBlocks):
    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        if batch_index == 2:
            self.blocks[0].requires_grad_(False)


class ThawsABlock(CompiledBlocks):
    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        self.blocks[0].requires_grad_(batch_index > 1)


class ChangesAnOption(CompiledBlocks):
    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        if batch_index == 2:
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.eps = 0.1


class Accumulates(OtherLengths):
    """Gradients of earlier micro-batches are there when a block is traced."""


class KeepsGradients(OtherLengths):
    """So are those of the last step, as copies and as they are."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.kept = (
            [it.grad for it in self.parameters()],
            [None if it.grad is None else it.grad.clone() for it in self.parameters()],
        )


class WritesToAWeight(CompiledBlocks):
    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        with torch.no_grad():
            self.blocks[1].scale.mul_(0.5)


WARNS = {"warns": EXPECTED + "|The .grad attribute of a Tensor"}  # torch's compiler reads it
CASES = [
    case(OtherLengths, **WARNS),
    case(FreezesABlock, **WARNS),
    case(ThawsABlock, **WARNS),
    case(ChangesAnOption, **WARNS),
    case(Accumulates, options={"accumulate_grad_batches": 2}, **WARNS),
    case(KeepsGradients, **WARNS),
    case(WritesToAWeight, **WARNS),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "full_shard in one unit"],
)
def test_blocks_that_are_traced_again_train_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)
