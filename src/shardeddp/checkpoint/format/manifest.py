"""The manifest of a sharded checkpoint: where every byte of every tensor is, and its checksum; the only index we read.

[Note: the files of a sharded checkpoint]
A checkpoint is a directory, and it is one if and only if its manifest is whole and its files have the sizes given
there:

- ``__{rank}_{k}.distcp``: data, a sequence of items. An item is what ``torch.save`` makes of one tensor (or of one
  other object): a zip archive whose records are stored as they are. The *payload* of a tensor's item, its raw elements
  in row-major order, is what this package reads.
- ``manifest.json``: this module.
- ``state.json``: everything that is not a tensor of the model or an optimizer, without pickle.
- ``.metadata``, ``meta.pt``: the indexes of ``torch.distributed.checkpoint`` and of Lightning over the same data. They
  are pickles; this package writes them and never reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from shardeddp.plan.intervals import Box

MANIFEST = "manifest.json"
STATE = "state.json"
DCP_METADATA = ".metadata"
LIGHTNING_META = "meta.pt"

INDEX = "shardeddp.json"
"""The record of a plain ``.ckpt`` file in which this package says what it has written there."""

CRC = "crc32"
"""The checksums of a plain file: those of its zip archive."""

FORMAT = "shardeddp"
VERSION = 1
BLOCK_NBYTES = 4 * 2**20
"""Payload bytes under one checksum: what has to be read to check a part of a piece."""

DATA_FILE = re.compile(r"__(0|[1-9]\d{0,8})_(0|[1-9]\d{0,8})\.distcp")

ItemPath: TypeAlias = tuple[str | int, ...]
"""Keys from the root of the checkpoint to a value: ``("model", "head.weight")``."""


SHARDED_EXTRA, PLAIN_EXTRA = ("extra", "sharded"), ("extra", "plain")
"""Under which paths tensors lie that belong neither to the model nor to an optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Bytes of a data file that ``torch.load`` reads."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor, stored in one go."""

    box: Box
    item: Item
    payload: int
    """Where the elements start in the file; row-major, without gaps."""

    checksums: tuple[str, ...]
    """Of each ``BLOCK_NBYTES`` of the payload; the last block may be shorter."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    path: ItemPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """They cover the tensor and do not overlap."""

    @property
    def name(self) -> str:
        """The path as one word, as ``torch.distributed.checkpoint`` has it."""
        return name_of(self.path)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """A value that is not a tensor, pickled for ``torch.distributed.checkpoint``; never read by this package."""

    path: ItemPath
    item: Item


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint."""

    nbytes: int
    checksum: str
    """Of all bytes that are not under the checksum of a piece."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Which training wrote a checkpoint, and where it stood."""

    uuid: str
    """Of the save."""

    step: int
    """Optimizer steps taken (Lightning's ``global_step``)."""

    epoch: int
    world_size: int
    shard_size: int
    sharding_strategy: str
    versions: Mapping[str, str]
    """Of the packages that wrote it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    run: Run
    algorithm: str
    """Of the checksums."""

    files: Mapping[str, StoredFile]
    """All files but the manifest."""

    tensors: Mapping[str, StoredTensor]
    """By name."""

    objects: Mapping[str, StoredObject]
    """By name."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.nbytes for file in self.files.values())


def name_of(path: Sequence[str | int]) -> str:
    """A path as one word."""
    return ".".join(map(str, path))
