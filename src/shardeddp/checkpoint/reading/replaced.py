"""What a model was before a checkpoint was loaded into it, kept until the rest of the checkpoint is known to fit."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn


class Replaced:
    """The parameters and buffers of a model at one moment: this rank's part of them, once more.

    Args:
        module: A sharded model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(tensor, tensor.detach().clone()) for tensor in chain(module.parameters(), module.buffers())]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the model what it was, without communication."""
        for tensor, was in self._kept:
            tensor.copy_(was)
