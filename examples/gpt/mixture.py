"""A mixture of experts in place of the GPT's feed-forward layers (https://arxiv.org/abs/2101.03961, section 2).

With `ShardedDP(expert_parallel_size=...)` each rank has some of the experts and `TokenDispatch` sends tokens to them;
under any other strategy, or on one process, a rank has all of them and nothing is sent.

Shape letters: N tokens, D model width, E experts, C experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model import GPTModule, SwiGLU
from shardeddp import TokenDispatch


class Mixture(nn.Module):
    """Feed-forward layers of which a router chooses some for each token.

    Args:
        dim: Width of the stream D.
        num_experts: Such layers E.
        chosen: Experts of a token C.
    """

    imbalance: Tensor
    """Of the last forward: 1 where all experts have equally many tokens, E where one has all."""

    def __init__(self, dim: int, num_experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(dim) for _ in range(num_experts))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position (B, T, D) by its experts."""
        tokens = x.flatten(0, 1)
        odds = self.router(tokens).float().softmax(-1)  # N, E
        weights, index = odds.topk(self.chosen)  # N, C
        share = F.one_hot(index, len(self.experts)).float().mean((0, 1))
        self.imbalance = len(self.experts) * (share * odds.mean(0)).sum()
        routed = TokenDispatch(index, self.experts)
        arrived = routed.dispatch(tokens).split(routed.counts)
        rows = [self.experts[e](part) for e, part in zip(routed.experts, arrived, strict=True)]
        made = routed.combine(torch.cat(rows))  # N, C, D
        weights = weights / weights.sum(-1, keepdim=True)
        return (made * weights.unsqueeze(-1)).sum(1).view_as(x).to(x.dtype)


class MixtureGPTModule(GPTModule):
    """A GPT whose blocks have a mixture of experts each.

    Args:
        num_experts: Experts of a block E.
        chosen: Experts of a token C.
        balance: Weight of the loss that keeps experts equally busy.
        vocab_size: As in `GPTModule`.
        dim: As in `GPTModule`.
        num_layers: As in `GPTModule`.
        num_heads: As in `GPTModule`.
        learning_rate: As in `GPTModule`.
        warmup_steps: As in `GPTModule`.
    """

    def __init__(
        self,
        num_experts: int = 8,
        chosen: int = 2,
        balance: float = 0.01,
        vocab_size: int = 256,
        dim: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        learning_rate: float = 1e-3,
        warmup_steps: int = 40,
    ) -> None:
        super().__init__(vocab_size, dim, num_layers, num_heads, learning_rate, warmup_steps)
        self.save_hyperparameters()
        self.balance = balance
        for block in self.gpt.blocks:
            block.mlp = Mixture(dim, num_experts, chosen)
        self.gpt.initialise()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy in nats per token, and the loss that balances experts."""
        loss = super().training_step(batch, batch_idx)
        imbalance = torch.stack([block.mlp.imbalance for block in self.gpt.blocks]).mean()
        self.log("train/imbalance", imbalance)
        return loss + self.balance * imbalance
