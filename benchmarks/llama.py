"""A Llama-style decoder for benchmarks: grouped-query attention, SwiGLU, RMSNorm, no state but its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 500_000.0


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a model; ``length`` is that of the sequences it is measured on."""

    vocab_size: int
    dim: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    length: int

    def narrow(self) -> LlamaConfig:
        """As many modules and parameters, all of them tiny: what is left of a step is the host's part."""
        return replace(
            self, vocab_size=512, dim=256, hidden=512, num_heads=4, num_kv_heads=2, length=16
        )


CONFIGS = {
    "tiny": LlamaConfig(
        vocab_size=512, dim=128, hidden=256, num_layers=3, num_heads=4, num_kv_heads=2, length=32
    ),
    "1B": LlamaConfig(
        vocab_size=32_000,
        dim=2048,
        hidden=5632,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        length=2048,
    ),
    "8B": LlamaConfig(
        vocab_size=128_256,
        dim=4096,
        hidden=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        length=2048,
    ),
}


class Attention(nn.Module):
    """Causal attention in which several query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        narrow = config.num_kv_heads * self.head_dim
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, narrow, bias=False)
        self.v = nn.Linear(config.dim, narrow, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix every position of x (B, T, D) with the positions before it."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer layer: a unit of sharding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add what both halves find to the stream (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        inner = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    """Tokens to logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of tokens (B, T)."""
        x = self.embedding(tokens)
        cos, sin = rotary_table(tokens.size(1), self.head_dim, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotary_table(length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (T, K / 2), in dtype and on device of ``like``."""
    exponent = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    angle = torch.outer(
        torch.arange(length, device=like.device, dtype=torch.float32), ROPE_BASE**-exponent
    )
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate entry i of x (B, H, T, K) together with entry i + K / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
