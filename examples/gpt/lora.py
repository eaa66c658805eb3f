"""Low-rank adapters for the GPT: its own weights are frozen, and what is trained is small (https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from gpt.model import GPTModule
from shardeddp import load_from_checkpoint


class LoRALinear(nn.Module):
    """A frozen linear layer, plus the product of two thin matrices that are trained.

    Args:
        base: The layer; frozen from here on.
        rank: Inner width R of the product.
        alpha: The product is scaled by `alpha / rank`.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(
            torch.zeros(base.out_features, rank)
        )  # zeros: training begins at the model as it was

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return self.base(x) + (x @ self.down.T) @ self.up.T * self.scale


class LoRAGPTModule(GPTModule):
    """A GPT of which only adapters are trained.

    Args:
        pretrained: Checkpoint of a `GPTModule` of the same size, directory or file; None: random weights.
        rank: Inner width of an adapter.
        alpha: Scale of an adapter, times its rank.
        targets: Names of the linear layers inside of a block that get one.
        vocab_size: As in `GPTModule`.
        dim: As in `GPTModule`.
        num_layers: As in `GPTModule`.
        num_heads: As in `GPTModule`.
        learning_rate: As in `GPTModule`.
        warmup_steps: As in `GPTModule`.
    """

    def __init__(
        self,
        pretrained: Path | None = None,
        rank: int = 8,
        alpha: float = 16.0,
        targets: tuple[str, ...] = ("attention.qkv", "attention.out"),
        vocab_size: int = 256,
        dim: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        learning_rate: float = 1e-3,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__(
            vocab_size, dim, num_layers, num_heads, learning_rate, warmup_steps, weight_decay=0.0
        )
        # A checkpoint of this module has all weights, so it does not need the other one again.
        self.save_hyperparameters(ignore="pretrained")
        if pretrained is not None:
            self.gpt.load_state_dict(load_from_checkpoint(GPTModule, pretrained).gpt.state_dict())
        self.gpt.requires_grad_(False)
        for block in self.gpt.blocks:
            for target in targets:
                block.set_submodule(target, LoRALinear(block.get_submodule(target), rank, alpha))
