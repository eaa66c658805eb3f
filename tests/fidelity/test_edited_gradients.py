"""Gradients edited between micro-batches, and parameters frozen before backward, train as under DDP."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.fidelity import UNITS_TOO, BesideDdp, OfUnits, SmallGpt, case

pytestmark = pytest.mark.timeout(300)


class Linear8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.tanh())


class HalvesTheLast(SmallGpt):
    """Of the layer that backward comes to first, whose output is that of the model."""

    def on_after_backward(self) -> None:
        self.head.weight.grad.mul_(0.5)


class HalvesAll(SmallGpt):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class ClearsRows(SmallGpt):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad[0] = 0


class AddsWeights(SmallGpt):
    """Weight decay by hand, in every micro-batch."""

    def on_after_backward(self) -> None:
        for parameter in (self.head.weight, *self.blocks[0].parameters()):
            parameter.grad.add_(parameter.detach(), alpha=0.01)


class EndsInAUnit(OfUnits):
    """Its output is that of its last unit."""

    unit = Linear8

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(self.embed(tokens))

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).sub(1).square().mean()


class HalvesItsLastUnit(EndsInAUnit):
    def on_after_backward(self) -> None:
        self.blocks[1].layer.weight.grad.mul_(0.5)


class ReplacesAndEdits(SmallGpt):
    def on_after_backward(self) -> None:
        self.head.weight.grad = self.head.weight.grad * 0.5
        self.blocks[1].up.weight.grad.mul_(0.5)


ACCUMULATED = {"accumulate_grad_batches": 4}
EDITS = [
    case(model, steps=2, batches=8, options=ACCUMULATED)
    for model in (
        *(HalvesTheLast, HalvesAll, ClearsRows, AddsWeights),
        *(ReplacesAndEdits, HalvesItsLastUnit),
    )
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_edits_between_micro_batches_count_once(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(EDITS, strategy)


class Decays(SmallGpt):
    """Momentum and weight decay move whatever has a gradient, of zeros, too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class FreezesBeforeBackward(Decays):
    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[0].requires_grad_(True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.blocks[0].requires_grad_(self.global_step % 2 == 0)


class FreezesAPartBeforeBackward(Decays):
    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[1].up.weight.requires_grad_(True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.blocks[1].up.weight.requires_grad_(self.global_step % 2 == 0)


class FreezesWhatIsUsedOutside(FreezesAPartBeforeBackward):
    """By a term of the loss that reads the weight itself."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        return loss + 0.1 * self.blocks[1].up.weight.square().sum()


class TogglesAfterTheForward(Decays):
    """Two optimizers by hand, and one forward for both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = [*self.blocks[0].parameters()]
        known = {id(it) for it in first}
        rest = [it for it in self.parameters() if id(it) not in known]
        return [torch.optim.AdamW(each, lr=0.02) for each in (first, rest)]

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        loss, optimizers = self.loss(batch), self.optimizers()
        self.losses.append(loss.item())
        turn = optimizers[batch_index % 2]
        self.toggle_optimizer(turn)
        self.manual_backward(loss)
        self.untoggle_optimizer(turn)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


FREEZES = [
    case(model, steps=6)
    for model in (
        FreezesBeforeBackward,
        FreezesAPartBeforeBackward,
        FreezesWhatIsUsedOutside,
        TogglesAfterTheForward,
    )
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_what_is_frozen_before_backward_gets_no_gradient(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(FREEZES, strategy)
