"""HostMemory: one buffer that copies of shards are made into, save after save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGNMENT = 64


class HostMemory:
    """Keeps its memory: pages that the system has not handed out yet cost ten times what a copy into known ones costs.

    It is pinned where there are devices to copy from.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, 1D and contiguous, to the host; valid until the next call. Returns when they have arrived."""
        offsets = [0]
        for tensor in tensors:
            offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        if self._buffer.numel() < offsets[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old memory goes before the new one comes
            self._buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies = [
            self._buffer[offset : offset + tensor.nbytes].view(tensor.dtype).copy_(tensor, non_blocking=True)
            for offset, tensor in zip(offsets, tensors, strict=False)
        ]
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return copies
