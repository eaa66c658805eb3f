"""Inspection: what is in a checkpoint, from its manifest alone; no byte of a tensor is read."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardeddp.checkpoint.format.manifest import Manifest, StoredTensor, name_of

_WILD = frozenset("*?[")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor, or some that are shown as one."""

    name: str
    num_tensors: int
    shape: tuple[int, ...] | None
    """None for several."""

    dtypes: tuple[str, ...]
    numel: int
    nbytes: int
    """In the checkpoint; what shares the memory of something named before has none of its own."""

    num_pieces: int
    same_as: str = ""
    """The name of the tensor whose elements these are, too."""


def tensor_rows(manifest: Manifest, pattern: str = "*") -> list[Row]:
    """One row for each tensor.

    Args:
        manifest: Of the checkpoint.
        pattern: Of the names, as in a shell, with or without what they begin with (``model.``); a pattern without
            wildcards is a part of the name.
    """
    wanted = pattern if _WILD & set(pattern) else f"*{pattern}*"
    owners: dict[Any, str] = {}
    rows: list[Row] = []
    for tensor in manifest.tensors.values():
        places = tuple((piece.item.file, piece.payload) for piece in tensor.pieces)
        owner = owners.setdefault(places, tensor.name) if places else tensor.name
        names = tensor.name, name_of(tensor.path[1:])
        if any(fnmatch.fnmatchcase(name, wanted) for name in names):
            rows.append(_row(tensor, owner))
    return rows


def module_rows(manifest: Manifest) -> list[Row]:
    """One row for each outermost module that has more than one neighbour, and for each kind of optimizer state."""
    roots: defaultdict[str, list[tuple[StoredTensor, Row]]] = defaultdict(list)
    for row in tensor_rows(manifest):
        tensor = manifest.tensors[row.name]
        roots[str(tensor.path[0])].append((tensor, row))
    rows: list[Row] = []
    for root, found in roots.items():
        groups: defaultdict[str, list[Row]] = defaultdict(list)
        if root.startswith("optimizer_"):
            for tensor, row in found:
                groups[f"{root} {tensor.path[-1]}"].append(row)
        else:
            words = [[root, *".".join(map(str, tensor.path[1:])).split(".")] for tensor, _ in found]
            depth = _common(words) + 1
            if all(name[depth - 1].isdigit() for name in words):  # repeated blocks and nothing beside them
                depth -= 1
            for (_, row), name in zip(found, words, strict=True):
                groups[".".join(name[:depth])].append(row)
        rows += [_merged(name, group) for name, group in groups.items()]
    return rows


def total(rows: Iterable[Row]) -> Row:
    """All rows as one."""
    return _merged("total", list(rows))


def as_json(path: Path, manifest: Manifest, rows: Iterable[Row]) -> dict[str, Any]:
    """What there is to know, for other programs.

    Args:
        path: Of the checkpoint.
        manifest: Of the checkpoint.
        rows: The tensors to list.
    """
    tensors: list[Mapping[str, Any]] = [
        {
            "name": row.name,
            "path": list(manifest.tensors[row.name].path),
            "shape": list(row.shape or ()),
            "dtype": row.dtypes[0],
            "nbytes": manifest.tensors[row.name].nbytes,
            "pieces": row.num_pieces,
            "same_as": row.same_as or None,
        }
        for row in rows
    ]
    return {
        "path": str(path),
        **vars(manifest.run),
        "versions": dict(manifest.run.versions),
        "nbytes": manifest.nbytes,
        "files": {name: file.nbytes for name, file in manifest.files.items()},
        "objects": list(manifest.objects),
        "tensors": tensors,
    }


def _row(tensor: StoredTensor, owner: str) -> Row:
    shared = owner != tensor.name
    return Row(
        name=tensor.name,
        num_tensors=1,
        shape=tensor.shape,
        dtypes=(str(tensor.dtype).removeprefix("torch."),),
        numel=tensor.numel,
        nbytes=0 if shared else tensor.nbytes,
        num_pieces=len(tensor.pieces),
        same_as=owner if shared else "",
    )


def _merged(name: str, rows: list[Row]) -> Row:
    if len(rows) == 1 and rows[0].shape is not None:
        return rows[0]
    return Row(
        name=name,
        num_tensors=sum(row.num_tensors for row in rows),
        shape=None,
        dtypes=tuple(dict.fromkeys(dtype for row in rows for dtype in row.dtypes)),
        numel=sum(row.numel for row in rows),
        nbytes=sum(row.nbytes for row in rows),
        num_pieces=sum(row.num_pieces for row in rows),
    )


def _common(words: list[list[str]]) -> int:
    """How many words all names begin with, before their last one."""
    depth = 0
    while all(len(name) > depth + 1 and name[depth] == words[0][depth] for name in words):
        depth += 1
    return depth
