"""Writing of full checkpoints: one plain `.ckpt` file, gathered to rank 0, without the whole in memory."""

from __future__ import annotations

import struct
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO

import torch

from shardeddp.checkpoint.clean import directory_at
from shardeddp.checkpoint.items import TensorPickler
from shardeddp.checkpoint.location import AnyPath
from shardeddp.checkpoint.manifest import INDEX, TrainingRun, index_to_bytes
from shardeddp.checkpoint.read import LazyTensor, Progress, chunks, silent
from shardeddp.checkpoint.snapshot import (
    ParameterNames,
    Share,
    compare_shares,
    describe_contents,
    memory_key,
    refuse_tensors,
    tensors_of,
    where_pickling_fails,
)
from shardeddp.checkpoint.state_codec import with_leaves
from shardeddp.comm import Mesh, run_on_all_ranks
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.tensor.views import GatheredView

# -- Full state, gathered to the host one tensor at a time


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of one that may be sharded; if it is, a collective of all ranks.

    No gradient flows through it.
    """
    return tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor


def gather_full(state: Any, keep: bool) -> Any:
    """Replace sharded tensors anywhere in a nested state by full ones; a collective of all ranks.

    One tensor at a time is full on the device. All ranks pass the same structure of mappings, lists
    and tuples. The result is on the CPU; ranks that do not ``keep`` it get empty tensors.
    """

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, ShardTensor):
            return leaf
        full = leaf.full_tensor().detach()
        return full.cpu() if keep else torch.empty(0, dtype=full.dtype, device="cpu")

    return with_leaves(state, gathered)


def with_plain_views(state: Any) -> Any:
    """Replace views of sharded tensors in a nested state by their elements.

    It is a collective of all ranks if a parameter has changed since the view was taken.
    """
    if not any(isinstance(tensor, GatheredView) for tensor in tensors_of(state)):
        return state

    def plain(leaf: Any) -> Any:
        return leaf.plain().detach().clone() if isinstance(leaf, GatheredView) else leaf

    return with_leaves(state, plain)


def save_full(state: Any, name: str, write: Callable[[Any], None], mesh: Mesh | None) -> None:
    """Gather a state and let rank 0 write it; every rank raises if that fails.

    There is no mesh in the process that spawned the ranks: it holds full states and writes by
    itself.
    """
    keep = mesh is None or mesh.rank == 0
    full = gather_full(state, keep)
    if mesh is None:
        write(full)
    else:
        run_on_all_ranks(f"writing {name}", lambda: write(full) if keep else None, mesh.control)


def stream_full(
    checkpoint: Mapping[str, Any],
    path: AnyPath,
    mesh: Mesh,
    names: ParameterNames,
    run: TrainingRun,
    options: CheckpointOptions,
) -> None:
    """Write a checkpoint as one file that ``torch.load`` reads; a collective of all ranks.

    One tensor at a time is full, on the device and in rank 0's host memory. The file gets its name
    when it is complete and on the disk; until then an existing one is untouched.

    For a store rank 0 writes it to its temporary directory first, and uploads it from there. The
    same sharded tensors are in the checkpoint in the same order on every rank.

    Raises:
        CheckpointError: Some rank could not pickle the state or write the file; on all ranks.
        Exception: A gather has failed on this rank. The others wait in it until the process group
            ends it, with this rank's error as the reason if they have received it
            (comm/propagation.py).
    """
    file, index, shares, sharded = run_on_all_ranks(
        f"pickling {path}", partial(_prepare, checkpoint, mesh, names, run), mesh.saving
    )
    compare_shares(shares, sharded, mesh)
    broken: list[Exception] = []

    def gather() -> Iterator[torch.Tensor]:
        try:
            for tensor in file.tensors:
                if isinstance(tensor, ShardTensor):
                    yield tensor.full_tensor().detach()
        except Exception as error:
            broken.append(error)
            raise

    gathered = gather()

    def read(tensor: torch.Tensor) -> Iterator[memoryview]:
        if isinstance(tensor, ShardTensor):
            tensor = next(gathered)
        return chunks(tensor if isinstance(tensor, LazyTensor) else tensor.cpu())

    def write() -> None:
        if mesh.rank == 0:
            nbytes = sum(tensor.nbytes for tensor in file.tensors)
            with directory_at(path).new_file(nbytes, options) as opened:
                file.write(opened, read, more={INDEX: index})

    failures: list[Exception] = []
    try:
        write()
    except Exception as error:  # noqa: BLE001 - raised on all ranks below
        failures.append(error)
    if not broken:
        deque(gathered, maxlen=0)  # the other ranks gather everything, even if the file has failed
    if broken:  # they wait in this gather, and not for a message of this rank
        raise broken[0] from next((it for it in failures if it is not broken[0]), None)

    def end() -> None:
        if failures:
            raise failures[0]

    run_on_all_ranks(f"writing {path}", end, mesh.saving)


def _prepare(
    checkpoint: Mapping[str, Any], mesh: Mesh, names: ParameterNames, run: TrainingRun
) -> tuple[TorchFile, bytes, list[Share], list[str]]:
    """Pickle a checkpoint without its elements; no communication.

    Returns:
        The file to write, its index, this rank's shares of sharded tensors, and the first name of
        each section.
    """
    refuse_tensors(checkpoint, pickled=True)
    try:
        file = TorchFile(checkpoint, memory_key)
    except Exception as error:  # of any class: it is the user's code that is pickled
        where = where_pickling_fails(checkpoint, lambda it: TorchFile(it, memory_key))
        raise CheckpointError(
            f"The state cannot be saved: {where} cannot be pickled: {type(error).__name__}: "
            f"{str(error)[:300]}"
        ) from error
    found, objects, shares, sharded = describe_contents(checkpoint, names, mesh)
    strided = [
        (tensor, at)
        for tensor, at in found
        if tensor.layout == torch.strided and not tensor.is_quantized
    ]
    tensors = [
        (at, tensor.dtype, tuple(tensor.shape), file.record_of(tensor)) for tensor, at in strided
    ]
    return file, index_to_bytes(run, tensors, objects), shares, sharded


# -- Streaming writer of the ``torch.save`` format
#
# ``torch.save`` needs every tensor in memory at once. The pickle only describes the tensors; their
# elements are records of their own in the zip archive, so they can be read, checked and written a
# chunk at a time.

ROOT = "archive"
"""Folder of all records."""

_ALIGNMENT = 64
"""Alignment in bytes of elements in the file, for ``torch.load(mmap=True)``."""

_LOCAL_HEADER_NBYTES = 30
_ZIP64_EXTRA_NBYTES = 20
_ZIP64_NBYTES = 2**31 // 2
"""Limit safely below the size from which `zipfile` writes 64-bit sizes by itself."""


class TorchFile:
    """Writer of a tree as a file that ``torch.load`` reads.

    Tensors may be lazy or sharded ones. Tensors with the same elements, for which ``memory``
    returns equal keys, are stored once.
    """

    def __init__(self, tree: Any, memory: Callable[[torch.Tensor], Hashable] = id) -> None:
        self._pickler = TensorPickler(memory)
        self._content = self._pickler.pickled(tree)
        self.tensors = self._pickler.storages
        """Tensors with stored elements, in the order of writing."""

    def record_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the record with the elements of a tensor of the tree."""
        return self._pickler.key_of(tensor)

    def write(
        self,
        file: BinaryIO,
        read: Callable[[torch.Tensor], Iterator[memoryview]] = chunks,
        progress: Progress = silent,
        more: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Write the file.

        Args:
            file: Empty, seekable file, open for writing.
            read: Called for each of :attr:`tensors`, in order; yields its elements as chunks of
                bytes.
            progress: Called with the bytes of each written chunk.
            more: Further records by name, which ``torch.load`` ignores.
        """
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.writestr(_info("data.pkl"), self._content)
            archive.writestr(_info("byteorder"), sys.byteorder)
            for key, tensor in enumerate(self.tensors):
                nbytes = tensor.numel() * tensor.element_size()
                info = _aligned(file, f"data/{key}", nbytes)
                with archive.open(info, "w", force_zip64=nbytes >= _ZIP64_NBYTES) as record:
                    for part in read(tensor):
                        record.write(part)
                        progress(len(part))
            archive.writestr(_info("version"), "3\n")
            for name, content in more.items():
                archive.writestr(_info(name), content)


def _info(name: str) -> zipfile.ZipInfo:
    # ZipInfo has a fixed date by default, so equal trees make equal files.
    return zipfile.ZipInfo(f"{ROOT}/{name}")


def _aligned(file: BinaryIO, name: str, nbytes: int) -> zipfile.ZipInfo:
    """Return a record with data at a multiple of ``_ALIGNMENT``.

    A private extra field pads it, as in ``torch.save``.
    """
    info = _info(name)
    info.file_size = nbytes
    header = (
        _LOCAL_HEADER_NBYTES
        + len(info.filename)
        + 4
        + (_ZIP64_EXTRA_NBYTES if nbytes >= _ZIP64_NBYTES else 0)
    )
    padding = -(file.tell() + header) % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return info
