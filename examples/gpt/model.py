"""A GPT language model as a plain LightningModule: RoPE, RMSNorm, SwiGLU, tied embeddings.

Nothing in this file knows that parameters may be sharded: it is what one would write for a single process.

Shape letters: B batch, T position, D model width, H head, K width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics.text import Perplexity

ROPE_BASE = 10_000.0
ADAM_BETAS = (0.9, 0.95)
FINAL_LEARNING_RATE = 0.1  # of the peak


def rotary_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines that rotate the query or key at position t by t times one frequency per pair of entries.

    Computed in every forward rather than kept as a buffer: it costs less than a thousandth of a block, and a model
    without buffers has none to broadcast.

    Args:
        length: Number of positions T.
        head_dim: Width of one head K, even.
        device: Where the table is needed.

    Returns:
        Cosines and sines, fp32, each of shape (T, K / 2).
    """
    frequency = ROPE_BASE ** -(
        torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate entry i together with entry i + K / 2 (https://arxiv.org/abs/2104.09864).

    Args:
        x: Queries or keys, shape (B, H, T, K).
        cos: Shape (T, K / 2), from `rotary_table`.
        sin: Shape (T, K / 2), from `rotary_table`.

    Returns:
        The rotated tensor, in the shape and dtype of `x`.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix every position (B, T, D) with the positions before it."""
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )  # each B, H, T, K
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer (https://arxiv.org/abs/2002.05202), as many weights as a plain one of width 4 D."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 32 * math.ceil(8 * dim / 3 / 32)
        self.gate_and_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position (B, T, D) on its own."""
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = SwiGLU(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add what attention and the feed-forward layer find to the stream (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Decoder-only transformer whose input embedding is also its output projection.

    Args:
        vocab_size: Number of tokens V.
        dim: Width of the residual stream D.
        num_layers: Number of blocks.
        num_heads: Heads per block; `dim / num_heads` must be even, because RoPE rotates pairs.

    Raises:
        ValueError: If `dim` cannot be split into heads of even width.
    """

    def __init__(self, vocab_size: int, dim: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            raise ValueError(
                f"Expected dim to be a multiple of 2 * num_heads, so that every head has an even width, "
                f"found dim={dim} and num_heads={num_heads}: the nearest dim that fits is "
                f"{2 * num_heads * max(1, round(dim / (2 * num_heads)))}."
            )
        self.head_dim = dim // num_heads
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.initialise()

    def initialise(self) -> None:
        """Draw all weights."""
        self.apply(partial(_initialise, residual_scale=(2 * len(self.blocks)) ** -0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict every next token.

        Args:
            tokens: Token ids, shape (B, T).

        Returns:
            Logits, shape (B, T, V); row t sees tokens 0 to t only.
        """
        cos, sin = rotary_table(tokens.size(1), self.head_dim, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _initialise(module: nn.Module, residual_scale: float) -> None:
    """Keep the stream's variance near one at any depth, and the first logits near zero (hence the small embedding)."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, Attention):
        nn.init.normal_(module.qkv.weight, std=module.qkv.in_features**-0.5)
        nn.init.normal_(module.out.weight, std=module.out.in_features**-0.5 * residual_scale)
    elif isinstance(module, SwiGLU):
        nn.init.normal_(module.gate_and_up.weight, std=module.gate_and_up.in_features**-0.5)
        nn.init.normal_(module.down.weight, std=module.down.in_features**-0.5 * residual_scale)


class GPTModule(L.LightningModule):
    """Next-token training of a GPT with AdamW, a warm-up and a cosine.

    Args:
        vocab_size: Number of tokens; 256 for bytes.
        dim: Width of the residual stream.
        num_layers: Number of transformer blocks.
        num_heads: Attention heads per block.
        learning_rate: Peak of the schedule.
        warmup_steps: Optimizer steps of linear warm-up before the cosine begins.
        weight_decay: Decay of matrices; norms (one-dimensional parameters) are never decayed.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        dim: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        learning_rate: float = 3e-3,
        warmup_steps: int = 40,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.gpt = GPT(vocab_size, dim, num_layers, num_heads)
        self.val_perplexity = Perplexity()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the tokens that follow `tokens` (B, T)."""
        return self.gpt(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy in nats per token."""
        tokens, targets = batch  # each B, T
        loss = F.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and perplexity over the held-out text."""
        tokens, targets = batch  # each B, T
        logits = self(tokens).float()
        self.val_perplexity.update(logits, targets)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("val/loss", loss, prog_bar=True, sync_dist=True)
        self.log("val/perplexity", self.val_perplexity)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with decay on matrices only; the learning rate moves every step."""
        groups = decay_groups(self, self.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=ADAM_BETAS)
        total_steps = int(self.trainer.estimated_stepping_batches)
        factor = partial(
            warmup_then_cosine, warmup_steps=self.warmup_steps, total_steps=total_steps
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, num_tokens: int, context: int, temperature: float = 1.0
    ) -> Tensor:
        """Sample a continuation, one forward per token.

        The draw comes from a generator of its own, seeded alike on every rank: all ranks sample the same text, and
        training that continues afterwards sees the random numbers it would have seen.

        Args:
            prompt: Token ids, shape (B, T), T at least 1.
            num_tokens: How many tokens to append.
            context: At most this many last tokens are looked at.
            temperature: Below 1 the likely tokens become likelier.

        Returns:
            Prompt and continuation, shape (B, T + num_tokens).
        """
        draw = torch.Generator().manual_seed(0)
        tokens = prompt
        for _ in range(num_tokens):
            logits = self(tokens[:, -context:])[:, -1].float().cpu()
            chosen = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=draw)
            tokens = torch.cat((tokens, chosen.to(tokens.device)), dim=1)
        return tokens


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split trainable parameters by their number of dims: matrices are decayed, vectors are not."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def warmup_then_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Factor on the learning rate: a line from 0 to 1 over the warm-up, then half a cosine down to a tenth."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * 0.5 * (
        1 + math.cos(math.pi * progress)
    )
