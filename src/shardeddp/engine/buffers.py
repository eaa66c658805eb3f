"""Synchronisation of module buffers with rank 0, as in DistributedDataParallel.

Ranks keep their own buffers of kinds that DistributedDataParallel cannot broadcast (sparse, nested,
quantized, expanded), as there with ``broadcast_buffers=False``.
"""

from __future__ import annotations

import torch
from torch import nn

from shardeddp.comm import Mesh, during
from shardeddp.tensor.operations import overlaps_itself
from shardeddp.torch_private import foreach_copy_, preserve_versions


class BufferBroadcast:
    """Broadcasts the buffers that a model has at setup."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (each, name)
            for each in module.modules()
            for name, buffer in each._buffers.items()
            if isinstance(buffer, torch.Tensor)
        ]

    def by_dtype(self) -> dict[torch.dtype, list[torch.Tensor]]:
        """Return the buffers that are broadcast, by dtype."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for module, name in self._places:
            # Scripted modules have no get().
            buffer = module._buffers[name] if name in module._buffers else None  # noqa: SIM401
            if buffer is not None and has_elements_of_its_own(buffer):
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        return by_dtype

    @torch.no_grad()
    def broadcast(self, mesh: Mesh) -> None:
        """Overwrite every rank's buffers with rank 0's; one broadcast per dtype."""
        for buffers in self.by_dtype().values() if mesh.data.size > 1 else ():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            # As bytes, which every backend broadcasts.
            with during(mesh.run.clock, "ranks"):
                mesh.data.broadcast_(flat.view(torch.uint8), 0).wait()
            if mesh.rank != 0:
                pieces = flat.split([buffer.numel() for buffer in buffers])
                pairs = [(b, p.view(b.shape)) for b, p in zip(buffers, pieces, strict=True)]
                plain = [pair for pair in pairs if not (pair[0].is_conj() or pair[0].is_neg())]
                # Versions stay, as in DDP: a second forward may come before the backward of the
                # first, which does not read running statistics but would reject changed ones.
                with preserve_versions(tuple(it for it in buffers if not it.is_inference())):
                    if plain:
                        foreach_copy_(*map(list, zip(*plain, strict=True)))
                    for buffer, piece in pairs if len(plain) < len(pairs) else ():
                        buffer.copy_(piece)


def has_elements_of_its_own(buffer: torch.Tensor) -> bool:
    """Return whether every element of a buffer has memory of its own.

    Elements of sparse, nested, quantized and expanded buffers do not.
    """
    if (
        buffer.layout is not torch.strided
        or buffer.is_nested
        or buffer.is_quantized
        or not buffer.numel()
    ):
        return False
    return not overlaps_itself(buffer)
