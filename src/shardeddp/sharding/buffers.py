"""BufferSync: buffers follow rank 0, as under DistributedDataParallel.

Those that DistributedDataParallel cannot broadcast (sparse, nested, quantized, expanded) stay each rank's own, as they
do there with ``broadcast_buffers=False``.
"""

import torch
from torch import nn

from shardeddp.comm import Mesh


class BufferSync:
    """Broadcasts the buffers that a model has when it is set up.

    Args:
        module: The model.
        mesh: Through which rank 0's values travel.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._places = [
            (owner, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if isinstance(buffer, torch.Tensor)
        ]

    @torch.no_grad()
    def sync(self) -> None:
        """Overwrite every rank's buffers by rank 0's; one broadcast per dtype."""
        if self._mesh.world.size == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for owner, name in self._places:
            # Scripted modules have no get().
            buffer = owner._buffers[name] if name in owner._buffers else None  # noqa: SIM401
            if buffer is not None and _has_elements_of_its_own(buffer):
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self._mesh.world.broadcast_(flat.view(torch.uint8), 0).wait()  # whatever the backend thinks of the dtype
            if self._mesh.rank != 0:
                pieces = flat.split([buffer.numel() for buffer in buffers])
                torch._foreach_copy_(buffers, [p.view(b.shape) for p, b in zip(pieces, buffers, strict=True)])


def _has_elements_of_its_own(buffer: torch.Tensor) -> bool:
    """Whether elements lie in memory one by one; those of sparse, nested, quantized and expanded buffers do not."""
    if buffer.layout is not torch.strided or buffer.is_nested or buffer.is_quantized or not buffer.numel():
        return False
    return all(stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True) if size > 1)
