"""Reading: elements of stored tensors by interval, every block checked against its checksum before it is used."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardeddp.checkpoint.disk.committed import read_manifest
from shardeddp.checkpoint.disk.durable import open_regular
from shardeddp.checkpoint.format.checksums import ALGORITHM, checksum, memory_of
from shardeddp.checkpoint.format.manifest import BLOCK_NBYTES, CRC, STATE, Manifest, Piece, StoredTensor
from shardeddp.checkpoint.format.strict_json import parse_json
from shardeddp.errors import CheckpointError, DamagedCheckpointError
from shardeddp.plan.intervals import Interval, interval_of


class CheckpointReader:
    """Reads a sharded checkpoint of this package.

    Args:
        path: Its directory.

    Raises:
        CheckpointError: It is not a whole checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        if self.manifest.algorithm == CRC:
            raise CheckpointError(f"{self.path} is one plain file, expected a directory: torch.load() reads it")
        if self.manifest.algorithm != ALGORITHM:
            raise CheckpointError(
                f"{self.path} has checksums by {self.manifest.algorithm!r}, expected {ALGORITHM}: a newer shardeddp "
                f"may read it"
            )

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By name."""
        return self.manifest.tensors

    def tree(self) -> Any:
        """What ``state.json`` holds: JSON with names in place of tensors."""
        return parse_json(self.file(STATE), STATE)

    def file(self, name: str) -> bytes:
        """All of a file that holds no tensors, checked."""
        expected = self.manifest.files[name]
        data = bytearray(expected.nbytes)
        with self._opened(name) as descriptor:
            whole = Interval(0, len(data))
            self._read_checked(descriptor, name, "", whole, memoryview(data), expected.checksum)
        return bytes(data)

    def read(self, name: str, interval: Interval) -> torch.Tensor:
        """Elements of a flattened tensor.

        Returns:
            1D, on the host, ``interval.numel`` elements.

        Raises:
            CheckpointError: Some block of them is not what was written.
        """
        tensor = self.tensors[name]
        elements = torch.empty(interval.numel, dtype=tensor.dtype)
        memory = memory_of(elements)
        itemsize = tensor.dtype.itemsize
        for piece in tensor.pieces:
            stored = interval_of(piece.box, tensor.shape)
            common = stored.intersect(interval)
            if common.numel:
                wanted = common.shift(-stored.start)
                start = (common.start - interval.start) * itemsize
                out = memory[start : start + common.numel * itemsize]
                nbytes = Interval(wanted.start * itemsize, wanted.stop * itemsize)
                self._read_piece(name, piece, stored.numel * itemsize, nbytes, out)
        return elements

    def _read_piece(self, name: str, piece: Piece, nbytes: int, wanted: Interval, out: memoryview) -> None:
        """Read some bytes of a payload, block by block: in place where a block is wanted whole, else beside."""
        with self._opened(piece.item.file) as descriptor:
            for index in range(wanted.start // BLOCK_NBYTES, -(-wanted.stop // BLOCK_NBYTES)):
                block = Interval(index * BLOCK_NBYTES, min(nbytes, (index + 1) * BLOCK_NBYTES))
                common = block.intersect(wanted)
                target = out[common.start - wanted.start : common.stop - wanted.start]
                data = target if common == block else memoryview(bytearray(block.numel))
                where = block.shift(piece.payload)
                self._read_checked(descriptor, piece.item.file, name, where, data, piece.checksums[index])
                if data is not target:
                    target[:] = data[common.start - block.start : common.stop - block.start]

    @contextmanager
    def _opened(self, file: str) -> Generator[int]:
        descriptor, _ = open_regular(self.path / file)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _read_checked(
        self, descriptor: int, file: str, name: str, where: Interval, out: memoryview, expected: str
    ) -> None:
        """Fill ``out`` with some bytes of a file and compare their checksum."""
        done = 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], where.start + done)
            if count == 0:
                raise DamagedCheckpointError(
                    f"{self.path / file} ends at byte {where.start + done:,}, expected {where.stop:,}"
                )
            done += count
        found = checksum(out)
        if found != expected:
            of = f" of {name}" if name else ""
            raise DamagedCheckpointError(
                f"{self.path / file} is damaged: bytes {where.start:,} to {where.stop:,}{of} have checksum {found}, "
                f"expected {expected}"
            )
