"""A gradient that a function's backward leaves on a parameter is averaged; explicit offsets are the parameter's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.fidelity import UNITS_TOO, BesideDdp, OfUnits, ScaledBlock, SmallGpt, case, in_bf16

pytestmark = pytest.mark.timeout(300)


def leave(weight: Tensor, gradient: Tensor) -> None:
    """As kernels do that add weight gradients up by themselves."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad = weight.grad + gradient


def add_in_place(weight: Tensor, gradient: Tensor) -> None:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    weight.grad.data.add_(gradient)


class _KeptOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.how = weight, how
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gradient = gradient.to(x.dtype)  # narrower under autocast
        ctx.how(ctx.weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2))
        return gradient @ ctx.weight.detach(), None, None


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)  # narrower under autocast
        ctx.how(weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2))
        return gradient @ weight, None, None


class LinearBlock(ScaledBlock):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _KeptOnContext.apply(x, self.linear.weight, leave)


class SavedBlock(LinearBlock):
    def forward(self, x: Tensor) -> Tensor:
        return ScaledBlock.forward(self, x) + _Saved.apply(x, self.linear.weight, add_in_place)


class LeftInUnits(OfUnits):
    unit = LinearBlock


class LeftOnSavedWeights(OfUnits):
    unit = SavedBlock


class UsedNormallyToo(OfUnits):
    unit = LinearBlock

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(
            block.linear.weight.square().sum()  # type: ignore[union-attr]
            for block in self.blocks
        )


class LeftOnTheRoot(SmallGpt):
    """By the first function that the backward comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return _KeptOnContext.apply(x, self.head.weight, leave)


class LeftOutsideOfTheUnit(OfUnits):
    unit = LinearBlock

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        outside = _KeptOnContext.apply(x, self.blocks[0].linear.weight, leave)  # type: ignore[union-attr]
        return super().loss(batch) + outside.square().mean()


class StridedBlock(ScaledBlock):
    """Views by explicit offsets, from the parameter's first element on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 80))

    def forward(self, x: Tensor) -> Tensor:
        part = self.table.as_strided((8, 8), (8, 1), 16)
        again = self.table.as_strided((8,), (1,), self.table.storage_offset() + 3)
        return super().forward(x) + F.linear(x, part) + again + self.table.as_strided((8,), (2,))


class StridedInUnits(OfUnits):
    unit = StridedBlock


class SeesItsStorage(ScaledBlock):
    """A parameter's storage is its own, from its first element to its last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 80))
        self.other = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        part = torch.as_strided(self.table, (8, 8), (8, 1), 16)
        kept = self.table.detach().as_strided((8,), (3,), 5)
        mixed = torch.as_strided_scatter(self.table, self.other, (8,), (1,), 40)[40:]
        raw = torch.empty(0).set_(self.other.detach().untyped_storage(), 0, (8,), (1,))  # type: ignore[call-overload]
        self.other.data.as_strided((2,), (1,), 6).mul_(1.01)
        assert self.table.untyped_storage().nbytes() == 80 * self.table.element_size()
        assert self.table[16:].storage_offset() == 16
        return super().forward(x) + F.linear(x, part) + kept + mixed[:8] * mixed[8:16] + raw


class StoragesInUnits(OfUnits):
    unit = SeesItsStorage


class StridedRoot(OfUnits):
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.embed.weight.as_strided((8,), (1,), 8).square().sum()


class OutOfBounds(StridedInUnits):
    """Torch refuses it, too."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.blocks[0].table.as_strided((80,), (1,), 8).sum()  # type: ignore[union-attr]


ACCUMULATED = {"accumulate_grad_batches": 2}
CASES = [
    case(LeftInUnits),
    case(LeftInUnits, options=ACCUMULATED, batches=6),
    case(LeftOnSavedWeights),
    case(UsedNormallyToo),
    case(LeftOnTheRoot),
    case(LeftOutsideOfTheUnit),
    case(StridedInUnits),
    case(StoragesInUnits),
    case(StridedRoot),
]


@pytest.mark.fidelity
@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_gradients_left_by_functions_and_offsets_train_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)


@pytest.mark.fidelity
def test_they_do_in_bf16(beside_ddp: BesideDdp) -> None:
    beside_ddp([in_bf16(CASES[index]) for index in (0, 4, 7)], "full_shard")
