"""A parameter as an argument of a custom autograd function, wherever that is applied, trains as under DDP."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.custom_functions import (
    AddInPlace,
    Adjoint,
    Fading,
    FusedLinearCrossEntropy,
    KeepsTheWeight,
    Reversed,
    Rounded,
    SavedAdjoint,
    Scale,
    affine,
    linear,
)
from support.fidelity import UNITS_TOO, BesideDdp, SmallGpt, case, in_bf16
from support.tasks import Block

pytestmark = pytest.mark.timeout(300)


class FusedHead(SmallGpt):
    """The everyday use: the loss of a large vocabulary, on the tied head's weight, in the training step."""

    def features(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return self.fused(self.features(batch).flatten(0, 1), batch[:, 1:].flatten())

    def fused(self, x: Tensor, labels: Tensor) -> Tensor:
        return FusedLinearCrossEntropy.apply(x, self.head.weight, labels)


class FusedUntiedHead(FusedHead):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)


class FusedHeadOfHalfAVocabulary(FusedUntiedHead):
    """A view of the parameter is the argument."""

    def fused(self, x: Tensor, labels: Tensor) -> Tensor:
        return FusedLinearCrossEntropy.apply(x, self.head.weight[:6], labels % 6)


class FusedHeadTwiceInAStep(FusedUntiedHead):
    def fused(self, x: Tensor, labels: Tensor) -> Tensor:
        return (
            super().fused(x, labels)
            + 0.5 * super().fused(x.detach(), (labels + 1) % 11)
            + self.head(x).std()
        )


class FusedHeadByHand(FusedUntiedHead):
    """Manual optimization; two backwards in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        self.optimizers().zero_grad()
        for part in batch.chunk(2):
            loss = self.loss(part)
            self.manual_backward(loss)
            self.losses.append(loss.item())
        self.optimizers().step()


class AppliedAtImport(FusedHead):
    """A bias that is of the module itself, and a function that was bound when the file was imported."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(11))

    def fused(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(linear(x, self.head.weight, self.bias), labels)


class WeightOfAnInnerUnit(FusedHead):
    """The step borrows a block's weight; the function's other argument needs no gradient."""

    def fused(self, x: Tensor, labels: Tensor) -> Tensor:
        block = self.blocks[1]
        kept = linear(x.detach(), block.up.weight, block.up.bias)
        return super().fused(x, labels) + kept.square().mean()


class FrozenWeightOfAnInnerUnit(WeightOfAnInnerUnit):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight.requires_grad_(False)


class FadingWeightOfAnInnerUnit(FusedHead):
    """A function writes to a frozen parameter of a unit that is not at work."""

    def __init__(self) -> None:
        super().__init__()
        self.faded = nn.Sequential(nn.Linear(8, 8, bias=False)).requires_grad_(False)

    def fused(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().fused(Fading.apply(x, self.faded[0].weight), labels)


class Gated(FusedHead):
    """One parameter of the module itself, given to `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def features(self, batch: Tensor) -> Tensor:
        return self.gate(super().features(batch))

    def gate(self, x: Tensor) -> Tensor:
        return KeepsTheWeight.apply(x, 3, self.scale)


class DirtyActivation(Gated):
    def gate(self, x: Tensor) -> Tensor:
        return AddInPlace.apply(x * 2, self.scale)


class NewStyle(Gated):
    def gate(self, x: Tensor) -> Tensor:
        return Scale.apply(x, self.scale)


class NewStyleOverSamples(Gated):
    def gate(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: Scale.apply(row, self.scale))(x)


class CustomOperator(Gated):
    """`torch.library`, with two parameters of which one is of an inner unit."""

    def gate(self, x: Tensor) -> Tensor:
        return affine(x, self.scale, self.blocks[0].norm.bias)


class ReversedParameter(Gated):
    """A minimax game: the parameter itself ascends."""

    def gate(self, x: Tensor) -> Tensor:
        return x * Reversed.apply(self.scale)


class CheckpointedWithAParameter(Gated):
    def gate(self, x: Tensor) -> Tensor:
        return checkpoint(torch.mul, x, self.scale, use_reentrant=False)


class ReentrantCheckpointWithAParameter(Gated):
    def gate(self, x: Tensor) -> Tensor:
        return checkpoint(torch.mul, x, self.scale, use_reentrant=True)


class CheckpointAroundAFunction(Gated):
    def gate(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: KeepsTheWeight.apply(y, 2, self.scale), x, use_reentrant=False)


class Quantized(Gated):
    """Weights of inner units are rounded by the step, as if a copy of the model were deployed."""

    def gate(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.linear(x, Rounded.apply(block.down.weight).t()[:8, :8]) * Rounded.apply(
                self.scale
            )
        return x


class QuantizedBlock(Block):
    """The same inside of a unit's forward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(self.norm(x), Rounded.apply(self.up.weight), self.up.bias)
        return x + linear(F.gelu(hidden), self.down.weight, self.down.bias)


class QuantizedInItsUnits(FusedHead):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(QuantizedBlock(8) for _ in range(2))


class OdeBlock(Gated):
    """A field that is a closure over parameters of the root and of a unit, all of them arguments, too."""

    def gate(self, x: Tensor) -> Tensor:
        norm = self.blocks[1].norm

        def field(y: Tensor) -> Tensor:
            return torch.tanh(y * self.scale) * norm.weight

        return Adjoint.apply(field, x, self.scale, norm.weight)


class OdeOverAModule(Gated):
    """A field that is a module, whose parameters are arguments, too."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def gate(self, x: Tensor) -> Tensor:
        return Adjoint.apply(self.field, x, *self.field.parameters()) * self.scale


class OdeOverAUnit(Gated):
    """A field that is a unit of its own; its parameters are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.field = Block(8)

    def gate(self, x: Tensor) -> Tensor:
        return SavedAdjoint.apply(self.field, x, *self.field.parameters()) * self.scale


class OdeThatUsesArgumentsToo(OdeOverAUnit):
    """A field that is a unit, whose parameters are used beside it."""

    def gate(self, x: Tensor) -> Tensor:
        weight = self.field.norm.weight

        def field(y: Tensor) -> Tensor:
            return self.field(y) * weight + self.scale

        return SavedAdjoint.apply(field, x, *self.field.parameters(), self.scale)


ACCUMULATED = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}

CASES = [
    case(FusedHead),
    case(FusedUntiedHead, options=ACCUMULATED, batches=6),
    case(FusedHeadOfHalfAVocabulary, options={"gradient_clip_val": 0.1}),
    case(FusedHeadTwiceInAStep),
    case(FusedHeadByHand),
    case(AppliedAtImport, options=ACCUMULATED, batches=6),
    case(WeightOfAnInnerUnit),
    case(FrozenWeightOfAnInnerUnit),
    case(FadingWeightOfAnInnerUnit),
    case(Gated),
    case(DirtyActivation),
    case(NewStyle),
    case(NewStyleOverSamples),
    case(CustomOperator),
    case(ReversedParameter),
    case(CheckpointedWithAParameter),
    case(ReentrantCheckpointWithAParameter),
    case(CheckpointAroundAFunction),
    case(Quantized),
    case(QuantizedInItsUnits),
    case(OdeBlock),
    case(OdeOverAModule),
    case(OdeOverAUnit),
    case(OdeThatUsesArgumentsToo),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_parameters_in_custom_functions_train_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)


OF_BF16 = FusedUntiedHead, AppliedAtImport, Gated, QuantizedInItsUnits
IN_BF16 = [in_bf16(each) for each in CASES if each.model in OF_BF16]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard in one unit"])
def test_parameters_in_custom_functions_train_as_under_ddp_in_bf16(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(IN_BF16, strategy)
