"""Safetensors files: the format, its writer and its reader, and which weights of a model they are.

https://github.com/huggingface/safetensors

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
byte offsets of each tensor), and the elements of all tensors in sequence. Several files have an
index (JSON: the file of each tensor).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from shardeddp.checkpoint.location import AnyPath, location
from shardeddp.checkpoint.read import Progress, chunks, silent
from shardeddp.errors import CheckpointError, first_three, printable

# -- Writing

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
"""Alignment in bytes of the elements in the file."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Tensor to be written."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    """Dtype in the file."""

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.tensor.numel() * self.dtype.itemsize


def write_safetensors(
    file: BinaryIO,
    entries: Sequence[Entry],
    metadata: Mapping[str, str],
    progress: Progress = silent,
) -> dict[str, int]:
    """Write one file, with the tensors in this order.

    Return by tensor the number of finite elements that are infinite in the dtype of the file.
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
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.tensor.shape),
            **offsets,
        }
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(content)) + content)
    overflows: Counter[str] = Counter()
    for entry in entries:
        dtype = None if entry.dtype == entry.tensor.dtype else entry.dtype
        count = partial(_count, overflows, entry.name)
        for chunk in chunks(entry.tensor, dtype, count):
            file.write(chunk)
            progress(len(chunk))
    return +overflows


def _count(counter: Counter[str], name: str, number: int) -> None:
    counter[name] += number


def split(entries: Sequence[Entry], max_nbytes: int) -> list[list[Entry]]:
    """Spread tensors over files in order; a tensor larger than the limit gets its own file."""
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
    """Return paths like ``model-00001-of-00003.safetensors``; a single file keeps its name."""
    if count == 1:
        return [path]
    return [
        path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")
        for number in range(1, count + 1)
    ]


def index_path(path: Path) -> Path:
    """Return the path of the index of several files: ``model.safetensors.index.json``."""
    return path.with_name(f"{path.name}.index.json")


def index_bytes(files: Mapping[str, Sequence[Entry]], metadata: Mapping[str, str]) -> bytes:
    """Return the content of the index of several files."""
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    file_of = {entry.name: name for name, entries in files.items() for entry in entries}
    return (
        json.dumps({"metadata": {**metadata, "total_size": total}, "weight_map": file_of}, indent=2)
        + "\n"
    ).encode()


# -- Reading

_NAME = "model.safetensors"
"""Name of a folder's single file; an index of several adds ``.index.json``."""


def safetensors_in(path: AnyPath) -> Path | None:
    """Return the safetensors file or index that a path refers to; None if it is neither.

    A path is a file, an index, or a folder with ``model.safetensors`` or the index of several.
    """
    place = location(path)
    if place.name.endswith((".safetensors", ".safetensors.index.json")):
        reason = "safetensors are read from a file system; copy it there"
        return place.local_only(reason) if place.is_file() else None
    found = [place / name for name in (_NAME, index_path(Path(_NAME)).name) if place.holds(name)]
    return next((each.local_only("") for each in found if each.is_file()), None)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return tensors of a file, or of all files of an index, by name; mapped, not read at once."""
    try:
        if path.suffix != ".json":
            return _read_file(path)
        file_of = cast("dict[str, Any]", json.loads(path.read_bytes())["weight_map"])
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted({Path(str(place)).name for place in file_of.values()}):
            tensors |= _read_file(path.with_name(name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not to be read as safetensors, or was cut off: "
            f"{type(error).__name__}: {printable(str(error))}"
        ) from error
    if missing := sorted(file_of.keys() - tensors.keys()):
        raise CheckpointError(f"{path} names tensors that its files lack: {first_three(missing)}")
    return tensors


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header: dict[str, Any] = json.loads(file.read(length))
        # Private, copy-on-write: writes to a tensor stay in this process.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        dtype, shape = dtypes[entry["dtype"]], [int(size) for size in entry["shape"]]
        start, stop = (8 + length + int(offset) for offset in entry["data_offsets"])
        numel = math.prod(shape)
        in_file = 8 + length <= start <= stop <= size and min(shape, default=0) >= 0
        if not in_file or stop - start != numel * dtype.itemsize:
            raise ValueError(f"{name} of {shape} and {dtype} in bytes {start} to {stop} of {size}")
        tensors[name] = (
            torch.frombuffer(mapped, dtype=dtype, count=numel, offset=start).view(shape)
            if numel
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
    return tensors


# -- Names of the weights in a model


def names_in_model(stored: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Map tensor names of a file to the model's names; the file may be of a submodule.

    A file has the names of the saved model, as ``layers.0.weight``. A LightningModule has them with
    the path of that model as a prefix, as ``model.layers.0.weight``. If the file is of a model with
    a head and the module holds the body alone, the file's names have a first component that those
    of the module lack. Tensors that the model does not have are left out.

    Raises:
        CheckpointError: The model has none of them, or two submodules fit equally well.
    """
    ends: dict[str, list[str]] = defaultdict(list)
    for name in own:
        parts = name.split(".")
        for start in range(len(parts)):
            ends[".".join(parts[start:])].append("".join(f"{part}." for part in parts[:start]))
    fits: Counter[tuple[str, str]] = Counter()  # of (dropped prefix, added prefix)
    for dropped in {"", *(f"{name.partition('.')[0]}." for name in stored if "." in name)}:
        for name in stored:
            if name.startswith(dropped):
                rest = name[len(dropped) :]
                # A prefix that ends with the dropped one is the match of the whole name.
                fits.update(
                    (dropped, front)
                    for front in ends.get(rest, ())
                    if not dropped or not front.endswith(dropped)
                )
    if not fits:
        raise CheckpointError(
            f"none of {first_three(sorted(stored))} is in the model, nor in a submodule of it, "
            f"which has {first_three(sorted(own))}"
        )
    # Whole names come first: one name without its first component matches in many modules.
    rank = {pair: (count, not pair[0]) for pair, count in fits.items()}
    best = sorted(pair for pair in fits if rank[pair] == max(rank.values()))
    if len(best) > 1:
        prefixes = [front.rstrip(".") or "the model itself" for _, front in best]
        raise CheckpointError(
            f"the file fits {first_three(prefixes)} alike: load it in configure_model, where it goes"
        )
    dropped, front = best[0]
    named = {name: front + name[len(dropped) :] for name in stored if name.startswith(dropped)}
    known = set(own)
    return {name: target for name, target in named.items() if target in known}
