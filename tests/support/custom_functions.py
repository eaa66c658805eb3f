"""Custom autograd functions of every kind that users write, for models that give them parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


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
    def forward(
        ctx: Any, field: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
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


class SavedAdjoint(torch.autograd.Function):
    """The same, with parameters among the saved tensors, and several steps (odeint_adjoint)."""

    steps = 2

    @staticmethod
    def forward(
        ctx: Any, field: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.field = field
        with torch.no_grad():
            for _ in range(SavedAdjoint.steps):
                x = x + field(x)
        ctx.save_for_backward(x, *parameters)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        totals = [torch.zeros_like(each) for each in parameters]
        for _ in range(SavedAdjoint.steps):
            x = (x - ctx.field(x)).detach().requires_grad_()
            with torch.enable_grad():
                out = x + ctx.field(x)
            slope, *found = torch.autograd.grad(out, (x, *parameters), slope, allow_unused=True)
            totals = [
                total if each is None else total + each
                for total, each in zip(totals, found, strict=True)
            ]
        return None, slope, *totals


class Fading(torch.autograd.Function):
    """A linear map whose weight is not trained, and fades with every use: the forward writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight.mul_(0.9)
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return slope @ weight, None


@torch.library.custom_op("fidelity::affine", mutates_args=())
def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight + bias


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _affine_backward(ctx: Any, slope: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return slope * weight, (slope * x).flatten(0, -2).sum(0), slope.flatten(0, -2).sum(0)


affine.register_autograd(_affine_backward, setup_context=_keep)
