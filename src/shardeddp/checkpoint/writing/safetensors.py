"""Writes safetensors files (https://github.com/huggingface/safetensors), tensor by tensor, and the index over several.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor),
and the elements of one tensor behind the other.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from shardeddp.checkpoint.reading.stream import Progress, chunks, silent

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_ALIGNMENT = 8
"""Bytes; where the elements start in the file."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor to be written."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    """In the file."""

    @property
    def nbytes(self) -> int:
        """In the file."""
        return self.tensor.numel() * self.dtype.itemsize


def write_safetensors(
    file: BinaryIO, entries: Sequence[Entry], metadata: Mapping[str, str], progress: Progress = silent
) -> None:
    """Write one file.

    Args:
        file: Open for writing, empty.
        entries: The tensors, in the order of the file.
        metadata: About them.
        progress: Told of each chunk.

    Raises:
        NotImplementedError: The format has no such dtype.
    """
    if sys.byteorder != "little":
        raise NotImplementedError("safetensors files are written on little-endian machines only")
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise NotImplementedError(
                f"{entry.name} is {entry.dtype}, which safetensors files cannot hold: use --dtype"
            )
        start, end = end, end + entry.nbytes
        offsets = {"data_offsets": [start, end]}
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.tensor.shape), **offsets}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(content)) + content)
    for entry in entries:
        for chunk in chunks(entry.tensor, None if entry.dtype == entry.tensor.dtype else entry.dtype):
            file.write(chunk)
            progress(len(chunk))


def split(entries: Sequence[Entry], max_nbytes: int) -> list[list[Entry]]:
    """Spread tensors over files in their order; a tensor larger than a file may be gets one of its own."""
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if files[-1] and filled + entry.nbytes > max_nbytes:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.nbytes
    return files


def file_paths(path: Path, count: int) -> list[Path]:
    """Where that many files go: ``model-00001-of-00003.safetensors`` and so on; one keeps its name."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}") for number in range(1, count + 1)]


def index_path(path: Path) -> Path:
    """Where the index over several files goes: ``model.safetensors.index.json``."""
    return path.with_name(f"{path.name}.index.json")


def index_bytes(files: Mapping[str, Sequence[Entry]], metadata: Mapping[str, str]) -> bytes:
    """The index over several files.

    Args:
        files: The tensors of each, by its name.
        metadata: About them.
    """
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    places = {entry.name: name for name, entries in files.items() for entry in entries}
    return (json.dumps({"metadata": {**metadata, "total_size": total}, "weight_map": places}, indent=2) + "\n").encode()
