"""The modules of drawn programs: layers that use their parameters in every way, and residual blocks of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.drawn_programs import Block

LENGTH = 3
"""Tokens of a sample."""


class Scaled(torch.autograd.Function):
    """Input times a vector of the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (gradient * weight).to(x.dtype), (gradient * x).flatten(0, -2).sum(0).to(
            weight.dtype
        )


class FusedLinear(torch.autograd.Function):
    """Input times a transposed matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2).to(weight.dtype)
        return (gradient @ weight).to(x.dtype), of_weight


class MeanSquare(torch.autograd.Function):
    """Mean of the squares of a parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient * weight * (2 / weight.numel())


class Prefix(torch.autograd.Function):
    """Input times the first elements of a parameter of any shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.reshape(-1)[: x.shape[-1]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        used = (gradient * x).flatten(0, -2).sum(0).to(weight.dtype)
        padded = F.pad(used, (0, weight.numel() - used.numel()))
        return (gradient * weight.reshape(-1)[: x.shape[-1]]).to(x.dtype), padded.reshape(
            weight.shape
        )


class Layer(nn.Module):
    """A layer by its name in ``PARTS``; its own parameters are used in the way that the name says."""

    def __init__(self, kind: str, width: int, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.kept: Tensor | None = None
        if kind in (
            "linear",
            "mlp",
            "inplace",
            "relu_",
            "standardized",
            "cosine",
            "checkpoint",
            "reentrant",
        ):
            self.inner = nn.Linear(width, width)
        if kind == "weight_norm":
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        if kind in ("mlp", "checkpoint", "reentrant"):
            self.outer = nn.Linear(width, width, bias=False)
        if kind == "norm":
            self.inner = nn.LayerNorm(width)
        if kind == "conv":
            self.inner = nn.Conv1d(width, width, 3, padding=1)
        if kind == "attention":
            self.inner = nn.MultiheadAttention(width, 2, batch_first=True)
        if kind == "lstm":
            self.inner = nn.LSTM(width, width, batch_first=True)
        if kind == "embedding":
            self.inner = nn.Embedding(LENGTH, width)
        shapes = {
            "scale": 1,
            "bias": 1,
            "prompt": 1,
            "function": 1,
            "keeps": 1,
            "unbind": 2,
            "slice": 2,
            "fused": width,
        }
        if kind in shapes:
            size = (
                (shapes[kind], width)
                if kind in ("unbind", "fused", "prompt")
                else (shapes[kind] * width,)
            )
            self.weight = nn.Parameter(torch.randn(size) * 0.3 + (kind not in ("bias", "fused")))
        self.dropout = nn.Dropout(dropout)

    def mlp(self, x: Tensor) -> Tensor:
        """Two matrices."""
        return self.outer(F.gelu(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, length, width) to the same."""
        match self.kind:
            case "linear" | "norm" | "weight_norm":
                return self.inner(x)
            case "mlp":
                return self.mlp(x)
            case "checkpoint" | "reentrant":
                return checkpoint(self.mlp, x, use_reentrant=self.kind == "reentrant")
            case "conv":
                return self.inner(x.transpose(1, 2)).transpose(1, 2)
            case "attention":
                return self.inner(x, x, x)[0]
            case "lstm":
                return self.inner(x)[0]
            case "embedding":
                return x + self.inner(torch.arange(LENGTH))
            case "bias":
                return x + self.weight
            case "prompt":
                return x + self.weight.expand(len(x), -1, -1)
            case "unbind":
                factor, offset = self.weight.unbind(0)
                return x * factor + offset
            case "slice":
                return x * self.weight[: x.shape[-1]] + self.weight[x.shape[-1] :]
            case "function":
                return Scaled.apply(x, self.weight)
            case "fused":
                return FusedLinear.apply(x, self.weight)
            case "standardized":
                weight = self.inner.weight
                return F.linear(x, (weight - weight.mean()) / (weight.std() + 0.1), self.inner.bias)
            case "cosine":
                return (
                    F.linear(F.normalize(x, dim=-1), F.normalize(self.inner.weight, dim=-1))
                    + self.inner.bias
                )
            case "inplace":
                y = self.inner(x)
                y[..., :2].mul_(0.5)
                return y
            case "relu_":
                return F.leaky_relu_(self.inner(x), 0.3)
            case "keeps":
                self.kept = self.weight.detach()
                return x * self.weight
            case "dropout":
                return self.dropout(x)
            case _:  # scale
                return x * self.weight


class DrawnBlock(nn.Module):
    """A residual block; called with its input and a list for auxiliary losses."""

    def __init__(self, block: Block, width: int, dropout: float) -> None:
        super().__init__()
        self.output, self.how = block.output, block.call
        self.parts = nn.ModuleList(
            make_block(part, width, dropout)
            if isinstance(part, Block)
            else Layer(part, width, dropout)
            for part in block.parts
        )
        self.aux: Tensor | None = None
        if self.output in ("prompt", "slice", "unbind"):
            self.table = nn.Parameter(
                torch.randn({"prompt": 1, "slice": 4, "unbind": 2}[self.output], width) * 0.3
            )

    def forward(self, x: Tensor, losses: list[Tensor]) -> Any:
        """Shape (batch, length, width) to the same, in the form that the program has drawn."""
        h = x.clone() if self.output == "input_inplace" else x
        for part in self.parts:
            h = part(h) if isinstance(part, Layer) else call(part, h, losses)
        if self.output == "input_inplace":
            return x.add_(h, alpha=0.5)
        out = x + 0.5 * h
        match self.output:
            case "tuple":
                return out, h.square().mean()
            case "dict":
                return {"out": out, "loss": h.square().mean()}
            case "view" | "view_inplace":
                return out.flatten(0, 1)
            case "attribute":
                self.aux = h.square().mean()
            case "list":
                losses.append(h.square().mean())
            case "prompt":
                return out, self.table.expand(len(x), -1, -1)
            case "slice":
                return out, self.table[1:3]
            case "unbind":
                return out, self.table.unbind(0)
        return out


class DrawnUnit(DrawnBlock):
    """One that the policy "blocks" chooses."""


def make_block(block: Block, width: int, dropout: float) -> DrawnBlock:
    """The module of a drawn block."""
    return (DrawnUnit if block.unit else DrawnBlock)(block, width, dropout)


def call(block: DrawnBlock, x: Tensor, losses: list[Tensor]) -> Tensor:
    """What a caller does with a block and with all that it returns."""
    if block.how == "plain":
        result = block(x, losses)
    else:
        result = checkpoint(block, x, losses, use_reentrant=block.how == "reentrant")
    match block.output:
        case "tuple":
            out, loss = result
            losses.append(loss)
            return out
        case "dict":
            losses.append(result["loss"])
            return result["out"]
        case "view":
            return result.reshape(x.shape)
        case "view_inplace":
            result += torch.linspace(-1, 1, result.shape[-1])
            return result.reshape(x.shape)
        case "prompt":
            return result[0] + result[1]
        case "slice":
            return result[0] * (1 + result[1][0]) + result[1][1]
        case "unbind":
            return result[0] + result[1][0] * result[1][1]
    return result


def first_tensor(result: Any) -> Tensor:
    """The features in whatever a block returns."""
    if isinstance(result, dict):
        return result["out"]
    return result[0] if isinstance(result, tuple) else result


def auxiliary(module: nn.Module) -> Iterator[Tensor]:
    """The losses that blocks have kept as attributes; they are forgotten."""
    for block in module.modules():
        if isinstance(block, DrawnBlock):
            if block.aux is not None and block.aux.requires_grad:
                yield block.aux
            block.aux = None
