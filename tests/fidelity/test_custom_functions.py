"""A parameter as an argument of a custom autograd function, wherever that is applied, trains as under DDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from support.fidelity import UNITS_TOO, BesideDdp, SmallGpt, case, in_bf16
from support.tasks import Block

pytestmark = pytest.mark.timeout(120)


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Logits are never kept: gradients are computed in forward, as the kernels do that large vocabularies need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        x = x.to(weight.dtype)
        logits = x @ weight.t()
        slope = logits.softmax(-1)
        slope[torch.arange(len(labels)), labels] -= 1
        slope /= len(labels)
        ctx.save_for_backward(slope @ weight, slope.t() @ x)
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return of_x * scale, of_weight * scale, None


class LinearFunction(torch.autograd.Function):
    """As in torch's notes on extending it: an optional bias, gradients that are asked for, and autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return x @ weight.t() if bias is None else x @ weight.t() + bias

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = slope @ weight
        if ctx.needs_input_grad[1]:
            of_weight = slope.flatten(0, -2).t() @ x.flatten(0, -2).to(slope.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = slope.flatten(0, -2).sum(0)
        return of_x, of_weight, of_bias


linear = LinearFunction.apply


class KeepsTheWeight(torch.autograd.Function):
    """The weight is the last argument, and an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight, ctx.power = x, weight, power
        return x * weight**power

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        of_weight = slope * ctx.x * ctx.power * ctx.weight ** (ctx.power - 1)
        return slope * ctx.weight**ctx.power, None, of_weight.flatten(0, -2).sum(0)


class AddInPlace(torch.autograd.Function):
    """Changes an activation that the caller holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        x.add_(bias)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return slope, slope.flatten(0, -2).sum(0)


class Scale(torch.autograd.Function):
    """The newer form with `setup_context`, and a rule for `vmap`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return slope * weight, (slope * x).sum_to_size(weight.shape)


class Rounded(torch.autograd.Function):
    """Straight-through: quantised in forward, as it is in backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return (weight * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


class Reversed(torch.autograd.Function):
    """Reverses gradients on a view of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return -0.5 * slope


class Adjoint(torch.autograd.Function):
    """Integrates without a graph; its backward builds one and asks for the gradients of parameters."""

    @staticmethod
    def forward(ctx: Any, field: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.field, ctx.parameters = field, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + field(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = x + ctx.field(x)
        return None, *torch.autograd.grad(out, (x, *ctx.parameters), slope, allow_unused=True)


@torch.library.custom_op("fidelity::affine", mutates_args=())
def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight + bias


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _affine_backward(ctx: Any, slope: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return slope * weight, (slope * x).flatten(0, -2).sum(0), slope.flatten(0, -2).sum(0)


affine.register_autograd(_affine_backward, setup_context=_keep)


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
        return super().fused(x, labels) + 0.5 * super().fused(x.detach(), (labels + 1) % 11) + self.head(x).std()


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
            x = x + F.linear(x, Rounded.apply(block.down.weight).t()[:8, :8]) * Rounded.apply(self.scale)
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
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_parameters_in_custom_functions_train_as_under_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)


IN_BF16 = [in_bf16(each) for each in CASES if each.model in (FusedUntiedHead, AppliedAtImport, Gated, QuantizedInItsUnits)]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard in one unit"])
def test_parameters_in_custom_functions_train_as_under_ddp_in_bf16(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(IN_BF16, strategy)
