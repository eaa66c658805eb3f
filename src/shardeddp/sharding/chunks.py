"""What ``torch.distributed.checkpoint`` asks of a tensor that only holds a part of itself: its chunks, as boxes.

The three methods are that package's own protocol, so ``dcp.save`` and ``dcp.load`` take the state dict of a sharded
model as it is. Checkpoints of the Trainer do not come this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardeddp.plan.intervals import Box, boxes

if TYPE_CHECKING:
    from shardeddp.sharding.shard_tensor import ShardTensor


class Chunked:
    """The part of ``ShardTensor`` that ``torch.distributed.checkpoint`` calls."""

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        sharded = cast("ShardTensor", self)
        properties = TensorProperties.create_from_tensor(sharded.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=sharded.spec.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The elements of one of its boxes; loading writes to it."""
        sharded, position = cast("ShardTensor", self), 0
        for box in self._boxes():
            if index.offset is None or box.offsets == tuple(index.offset):
                return sharded.to_local().detach()[position : position + box.numel].view(box.sizes)
            position += box.numel
        raise ValueError(f"rank {sharded.spec.mesh.rank} has no box of {sharded.spec.fqn} at {index.offset}")

    def _boxes(self) -> list[Box]:
        spec = cast("ShardTensor", self).spec
        return boxes(spec.interval, spec.shape)
