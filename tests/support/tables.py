"""Pieces of a checkpoint, and tables and placements that are changed under checksums that fit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardeddp.checkpoint.find import read_manifest
from shardeddp.checkpoint.items import hexdigest
from shardeddp.checkpoint.manifest import DIGEST_NBYTES, EXTENT, MANIFEST, PIECE, PLACEMENT
from shardeddp.checkpoint.pieces import Piece, Pieces
from shardeddp.plan.layout import Interval

Files = dict[str, bytes]
"""Content by name."""


def seal(document: Mapping[str, Any]) -> bytes:
    """A manifest of this content, with the sha256 that belongs to it."""
    return seal_bytes(json.dumps(document, separators=(",", ":")).encode())


def seal_bytes(body: bytes) -> bytes:
    return b'{"sha256":"%s",\n"manifest":%s}' % (hashlib.sha256(body).hexdigest().encode(), body)


def unsealed(manifest: bytes) -> Any:
    """The content of a manifest."""
    return json.loads(manifest)["manifest"]


def edit_manifest(files: Files, change: Callable[[Any], object]) -> None:
    """Change the manifest so that its sha256 fits again."""
    document = unsealed(files[MANIFEST])
    change(document)
    files[MANIFEST] = seal(document)


def pieces_of(path: str | os.PathLike[str], name: str) -> list[Piece]:
    """All pieces of a tensor."""
    manifest = read_manifest(path)
    tensor = manifest.tensors[name]
    return Pieces(path, manifest).of(*tensor.sections, Interval(0, tensor.numel))


def table_of(files: Files, name: str) -> tuple[Any, list[bytes]]:
    """Rows and checksums of a data file, to be changed."""
    _, _, pieces, blocks, _ = unsealed(files[MANIFEST])["files"][name]
    nbytes = pieces * PIECE.itemsize
    table = files[name][len(files[name]) - nbytes - blocks * DIGEST_NBYTES :]
    rows = np.frombuffer(table, PIECE, pieces).copy()
    digests = [table[nbytes + at * DIGEST_NBYTES :][:DIGEST_NBYTES] for at in range(blocks)]
    return rows, digests


def put_table(files: Files, name: str, rows: Any, digests: list[bytes], **lies: int) -> None:
    """Give a data file another table; ``pieces`` and ``blocks`` may be given wrong."""
    old, old_digests = table_of(files, name)
    end = len(files[name]) - old.nbytes - len(old_digests) * DIGEST_NBYTES
    table = rows.tobytes() + b"".join(digests)
    files[name] = files[name][:end] + table

    def change(manifest: Any) -> None:
        counts = {"pieces": len(rows), "blocks": len(digests), **lies}
        frames = manifest["files"][name][1]
        manifest["files"][name] = [len(files[name]), frames, *counts.values(), hexdigest(table)]

    edit_manifest(files, change)


def edit_table(files: Files, name: str, change: Callable[[Any, list[bytes]], Any]) -> None:
    """Change a table; what ``change`` returns are other rows, None: the same ones."""
    rows, digests = table_of(files, name)
    other = change(rows, digests)
    put_table(files, name, rows if other is None else other, digests)


def edit_placement(files: Files, change: Callable[[Any], Any]) -> None:
    """Change rows of the placement; each section keeps as many."""
    rows = np.frombuffer(files[PLACEMENT], EXTENT).copy()
    other = change(rows)
    rows = rows if other is None else other
    files[PLACEMENT] = rows.tobytes()

    def seal(manifest: Any) -> None:
        manifest["files"][PLACEMENT] = [len(files[PLACEMENT]), hexdigest(files[PLACEMENT])]
        first = 0
        for section in manifest["sections"]:
            section[4] = hexdigest(rows[first : first + section[3]].tobytes())
            first += section[3]

    edit_manifest(files, seal)
