"""Buffers and metrics on the device of a rank."""

import torch
from torch import nn


def place_module(module: nn.Module, device: torch.device) -> None:
    """Move everything but parameters to ``device``; parameters are there already, as shards."""
    for child in module.children():
        place_module(child, device)
    if next(module.parameters(), None) is None:
        module.to(device)  # metrics move states that are no buffers
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)
