"""Experts in one module, as transformers has them."""

import torch
from torch import nn


class StackedExperts(nn.Module):
    """Experts in one parameter.

    Args:
        number: Number of experts.
        width: Features of a token.
        hidden: Features inside an expert.
    """

    def __init__(self, number: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, hidden, width) / 3)
        self.down = nn.Parameter(torch.randn(number, width, hidden) / 3)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Shape (rows, width) to the same."""
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if token.numel():
                row = torch.relu(hidden_states[token] @ self.up[expert].T) @ self.down[expert].T
                row = row * top_k_weights[token, place, None]
                out = out.index_add(0, token, row.to(out.dtype))
        return out
