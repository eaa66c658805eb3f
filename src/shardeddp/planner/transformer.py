"""Transformer: a decoder of given dimensions, for plans of models whose code is not available."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from shardeddp.errors import ConfigurationError, UsageError

_MOST = {
    "layers": 4096,
    "width": 2**24,
    "heads": 2**16,
    "vocabulary": 2**28,
    "kv_heads": 2**16,
    "hidden": 2**24,
    "head_dim": 2**16,
}
"""Upper bound of each size: larger ones are typing errors, and would take minutes to plan."""


MODEL_TYPES = (
    *("cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt2", "granite", "llama", "mistral", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3"),
    *("seed_oss", "smollm3", "stablelm"),
)
"""Models of transformers 5.2 of which a :class:`Decoder` has the parameters, within 0.2 %."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes of a decoder-only transformer."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None
    hidden: int | None = None
    """Hidden width of the MLP; None: four times the width."""
    head_dim: int | None = None
    """Width of a head; None: the width, divided by the heads."""
    gated: bool = True
    """SwiGLU, with three matrices in the MLP instead of two."""
    tied: bool = False
    bias: bool = False
    rope: bool = True
    """Rotary position embeddings; False: a learned table."""
    rms: bool = True
    fused_attention: bool = True
    fused_loss: bool = False
    """Cross-entropy in one kernel that reads the logits in their own dtype (flash-attn, Liger)."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            size = vars(self)[name]
            optional = name in ("kv_heads", "hidden", "head_dim") and size is None
            if not optional and not (type(size) is int and 1 <= size <= most):
                raise UsageError(f"{name}={size!r}: expected a whole number from 1 to {most:,}")
        if self.head_dim is None and self.width % self.heads:
            raise UsageError(
                f"{self.heads} heads do not divide a width of {self.width}: expected a multiple"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UsageError(f"{self.kv_heads} kv_heads do not divide {self.heads} heads")
        if self.rope and self.size_of_head % 2:
            raise UsageError(
                f"heads of {self.size_of_head} features: rotary position embeddings turn pairs of them, "
                f"expected an even number. Say another head_dim, or rope=false"
            )

    @property
    def size_of_head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.width // self.heads

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Dimensions:
        """Read the dimensions from a ``config.json`` of transformers."""
        names = {
            "layers": ("num_hidden_layers", "n_layer", "n_layers"),
            "width": ("hidden_size", "n_embd", "d_model"),
            "heads": ("num_attention_heads", "n_head", "n_heads"),
            "vocabulary": ("vocab_size",),
        }
        found: dict[str, Any] = {
            name: next((config[key] for key in keys if key in config), None)
            for name, keys in names.items()
        }
        missing = [names[name][0] for name, value in found.items() if value is None]
        if missing:
            raise ConfigurationError(
                f"the config has no {', '.join(missing)}: expected that of a decoder-only "
                f"transformer. Say its sizes with --dims"
            )
        if any("expert" in key and config[key] for key in config):
            raise ConfigurationError(
                "the config has experts, and dimensions are of a dense decoder: plan the LightningModule "
                "itself, or dense dimensions of the active experts with --dims"
            )
        kind = config.get("model_type", "llama")
        if kind not in MODEL_TYPES:
            raise ConfigurationError(
                f"model_type={kind!r} is none of the decoders whose dimensions a config.json tells "
                f"({', '.join(MODEL_TYPES)}): plan the LightningModule itself, or say its sizes with "
                f"--dims"
            )
        old = kind == "gpt2"
        return cls(
            **found,
            kv_heads=config.get("num_key_value_heads"),
            hidden=config.get("intermediate_size") or config.get("n_inner"),
            head_dim=config.get("head_dim"),
            gated=not old,
            tied=bool(config.get("tie_word_embeddings", old)),
            bias=bool(config.get("attention_bias", old)),
            rope=not old,
            rms=not old,
        )

    @classmethod
    def of_text(cls, text: str) -> Dimensions:
        """Parse dimensions such as ``layers=32,width=4096,heads=32,vocabulary=32000``."""
        known = {it.name: it for it in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            flag = value.lower() in ("true", "false")
            if name not in known or not (flag or re.fullmatch("[0-9]+", value)):
                raise UsageError(
                    f"--dims: {part!r} is no NAME=NUMBER or NAME=true|false with a NAME of "
                    f"{', '.join(known)}"
                )
            if name in values:
                raise UsageError(f"--dims: expected {name} once, found it twice")
            values[name] = value.lower() == "true" if flag else int(value)
        missing = {"layers", "width", "heads", "vocabulary"} - set(values)
        if missing:
            raise UsageError(f"--dims: {', '.join(sorted(missing))} missing")
        return cls(**values)


class Attention(nn.Module):
    """Causal self-attention; grouped queries if ``kv_heads`` is smaller than ``heads``."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        self.num_heads, self.num_key_value_heads = dims.heads, dims.kv_heads or dims.heads
        self.head_dim = dims.size_of_head
        own, shared = (
            count * self.head_dim for count in (self.num_heads, 2 * self.num_key_value_heads)
        )
        self.qkv = nn.Linear(dims.width, own + shared, bias=dims.bias)
        self.out = nn.Linear(own, dims.width, bias=dims.bias)

    @override
    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        """Map (batch, length, width), or (length, batch, width) if not fused, to the same shape."""
        mix = self._fused if self.dims.fused_attention else self._unfused
        return self.out(mix(self.qkv(x), angles))

    def _fused(self, features: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        heads, shared = self.num_heads, self.num_key_value_heads
        parts = features.unflatten(-1, (-1, self.head_dim)).split([heads, shared, shared], dim=-2)
        query, key, value = (it.transpose(1, 2) for it in parts)
        if angles is not None:
            query, key = _rotate(query, angles), _rotate(key, angles)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=shared != heads
        )
        return mixed.transpose(1, 2).flatten(2)

    def _unfused(self, features: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        """Attend by separate kernels, as in Megatron-LM; scores of all heads are in memory.

        Queries, keys and values of a head lie beside each other, so that heads of all samples are
        one batch of views.
        """
        groups, each = self.num_key_value_heads, self.num_heads // self.num_key_value_heads
        parts = features.unflatten(-1, (groups, each + 2, -1)).split([each, 1, 1], dim=-2)
        query, key, value = (
            it.expand(-1, -1, -1, each, -1).flatten(1, 3).transpose(0, 1) for it in parts
        )  # (batch * heads, length, head_dim)
        if angles is not None:
            query, key = _rotate(query, angles), _rotate(key, angles)
        scores = torch.baddbmm(
            query.new_zeros(()), query, key.transpose(1, 2), beta=0, alpha=self.head_dim**-0.5
        )
        mixed = torch.bmm(F.dropout(scores.softmax(-1), 0.1), value)
        return mixed.transpose(0, 1).reshape(*features.shape[:2], -1)


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


class Block(nn.Module):
    """Pre-norm transformer block: attention and an MLP."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        hidden = dims.hidden or 4 * dims.width
        self.gated = dims.gated
        self.norms = nn.ModuleList([_norm(dims), _norm(dims)])
        self.attention = Attention(dims)
        self.up = nn.Linear(dims.width, hidden, bias=dims.bias)
        self.gate = nn.Linear(dims.width, hidden, bias=dims.bias) if dims.gated else None
        self.down = nn.Linear(hidden, dims.width, bias=dims.bias)

    @override
    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attention(self.norms[0](x), angles)
        normed = self.norms[1](x)
        hidden = self.up(normed)
        hidden = F.gelu(hidden) if self.gate is None else F.silu(self.gate(normed)) * hidden
        return x + self.down(hidden)


class Decoder(nn.Module):
    """Decoder: embedding, blocks, norm and output layer."""

    def __init__(self, dims: Dimensions, length: int) -> None:
        super().__init__()
        self.dims = dims
        self.embedding = nn.Embedding(dims.vocabulary, dims.width)
        self.positions = None if dims.rope else nn.Embedding(length, dims.width)
        self.blocks = nn.ModuleList([Block(dims) for _ in range(dims.layers)])
        self.norm = _norm(dims)
        self.output = nn.Linear(dims.width, dims.vocabulary, bias=False)
        if dims.tied:
            self.output.weight = self.embedding.weight

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scalar cross-entropy of tokens of shape (batch, length), not shifted."""
        length = tokens.shape[1]
        if not self.dims.fused_attention:
            tokens = tokens.t()
        x = self.embedding(tokens)
        angles = None
        if self.positions is not None:
            places = self.positions(torch.arange(length))
            x = x + (places if self.dims.fused_attention else places.unsqueeze(1))
        else:
            half = self.dims.size_of_head // 2
            angles = torch.empty(length, half, dtype=torch.complex64)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.output(self.norm(x)).flatten(0, 1)
        if self.dims.fused_loss:
            return _FusedCrossEntropy.apply(logits, tokens.flatten())
        return F.cross_entropy(logits.float(), tokens.flatten())


class _FusedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy that keeps the logits only, and reads them once in each direction."""

    @override
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss of logits (tokens, vocabulary) and targets (tokens)."""
        ctx.save_for_backward(logits, targets)
        chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
        return (logits.logsumexp(1) - chosen).float().mean()

    @override
    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the logits."""
        logits, targets = ctx.saved_tensors
        gradient = logits.softmax(1)
        gradient.scatter_add_(1, targets.unsqueeze(1), gradient.new_full((len(targets), 1), -1.0))
        return gradient.mul_(grad_outputs[0] / len(targets)), None


SPLITS = (
    "As the auto plans of transformers: queries, keys, values, up and gate by columns, attention's "
    "output and down by rows, an output layer that is not tied by columns, its logits gathered. "
    "Other models name their layers."
)
"""Description of the plan of :func:`tensor_plan_of`, for messages."""


def tensor_plan_of(dims: Dimensions) -> dict[str, str]:
    """Return the tensor-parallel plan of a decoder; see ``SPLITS``."""
    plan = {
        "blocks.*.attention.qkv": "packed_colwise:1",  # queries, keys, values in one weight
        "blocks.*.attention.num_heads": "divide",
        "blocks.*.attention.num_key_value_heads": "divide",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }
    if dims.gated:
        plan["blocks.*.gate"] = "colwise"
    return plan if dims.tied else {**plan, "output": "colwise_gather_output"}


def _norm(dims: Dimensions) -> nn.Module:
    return _RmsNorm(dims.width) if dims.rms else nn.LayerNorm(dims.width)


class _RmsNorm(nn.Module):
    """RMS norm of several kernels, partly in float32, as in transformers and torch before 2.8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., width) to the same shape."""
        vectors = x.float()
        scales = torch.rsqrt(vectors.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (vectors * scales).to(x.dtype)
