"""Indexes for other tools.

They are ``.metadata`` of ``torch.distributed.checkpoint`` and ``meta.pt`` of Lightning.

Both are pickles, which this package writes and never reads.
"""

import io
import pickle
from collections.abc import Container
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardeddp.checkpoint.directory import new_files
from shardeddp.checkpoint.find import read_manifest
from shardeddp.checkpoint.manifest import DCP_METADATA, Item, Manifest
from shardeddp.checkpoint.pieces import Pieces
from shardeddp.checkpoint.state_codec import plain
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval, boxes
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import StorageInfo

DCP_VERSION = "1.0.0"
"""Layout version of ``torch.distributed.checkpoint`` that is written."""


def dcp_metadata(manifest: Manifest, pieces: Pieces) -> Metadata:
    """Return the index with which ``torch.distributed.checkpoint`` loads tensors and objects."""
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    places: dict[MetadataIndex, StorageInfo] = {}
    for name, tensor in manifest.tensors.items():
        chunks: list[ChunkStorageMetadata] = []
        for number in tensor.sections:
            section = manifest.sections[number]
            for piece in pieces.of(number, Interval(0, section.numel)):
                box, *more = boxes(piece.interval, section.shape)
                if more:
                    raise CheckpointError(
                        f"{name} has a piece of elements {piece.interval.start} to "
                        f"{piece.interval.stop}, which are no box of shape {section.shape}"
                    )
                box = box.outside(section.box)
                offsets = torch.Size(box.offsets)
                places[MetadataIndex(name, offsets, len(chunks))] = _place(piece.item)
                chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes)))
        stored[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
            chunks=chunks,
        )
        paths[name] = tensor.path
    for name, value in manifest.objects.items():
        stored[name] = BytesStorageMetadata()
        paths[name] = value.path
        places[MetadataIndex(name)] = _place(value.item)
    return Metadata(
        state_dict_metadata=stored,
        planner_data=paths,
        storage_data=places,
        # Without the path: a checkpoint may be moved.
        storage_meta=StorageMeta(save_id=manifest.run.uuid),
        version=DCP_VERSION,
    )


def write_metadata(path: Path, force: bool = False) -> int:
    """Write ``.metadata`` into a checkpoint that was saved without, since it has many pieces.

    Return their number. Each takes some kilobytes of memory meanwhile.
    """
    manifest = read_manifest(path)
    if DCP_METADATA in manifest.files:
        raise CheckpointError(f"{path} was saved with {DCP_METADATA}: there is nothing to do")
    content = to_bytes(dcp_metadata(manifest, Pieces(path / manifest.folder, manifest)))
    with new_files([path / manifest.folder / DCP_METADATA], force) as (file,):
        file.write(content)
    return sum(file.pieces for file in manifest.files.values())


def to_bytes(metadata: Metadata) -> bytes:
    """Return the content of ``.metadata``."""
    return pickle.dumps(metadata, protocol=4)  # every supported Python reads it


def lightning_meta(tree: Any, kept: Container[int] = frozenset()) -> bytes:
    """Return the content of ``meta.pt``: a checkpoint without tensors of model and optimizers.

    Containers of other types become plain ones, but for those with ids in ``kept``, and tensors
    come to the CPU without the rest of their storage, so that ``torch.load(...,
    weights_only=True)`` reads the result unless it has a value of a type that is refused.
    """
    buffer = io.BytesIO()
    torch.save(plain(tree, _compact, kept), buffer, pickle_module=_PICKLE)
    return buffer.getvalue()


class _PicklerOfOneRank(pickle.Pickler):
    """Pickler that refuses tensors that all ranks would have to gather."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ShardTensor):
            raise pickle.PicklingError(pickled_alone(obj))
        return NotImplemented


def pickled_alone(tensor: ShardTensor) -> str:
    """Return the reason, for a message, why a value with a sharded tensor cannot be pickled."""
    return (
        f"it leads to {tensor.spec.fqn}, which is sharded, and one rank pickles it alone. Keep "
        f"parameters in dicts, lists and tuples, and leave modules out, whose parameters are saved "
        f"as the model's: save_hyperparameters(ignore=[...])"
    )


_PICKLE = ModuleType("pickle of one rank")
vars(_PICKLE).update(Pickler=_PicklerOfOneRank)


def _place(item: Item) -> StorageInfo:
    return StorageInfo(item.file, item.offset, item.nbytes)


def _compact(value: Any) -> Any:
    """Return a tensor on the CPU without the rest of its storage; other values as they are."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value
    tensor = value.detach().cpu()
    whole = tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()
