"""The manifest as a file, and the index in a plain file: JSON, and what is checked when it is read."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardeddp.checkpoint.format.manifest import (
    BLOCK_NBYTES,
    CRC,
    DATA_FILE,
    DCP_METADATA,
    FORMAT,
    INDEX,
    LIGHTNING_META,
    MANIFEST,
    STATE,
    VERSION,
    Item,
    ItemPath,
    Manifest,
    Piece,
    Run,
    StoredFile,
    StoredObject,
    StoredTensor,
    name_of,
)
from shardeddp.checkpoint.format.strict_json import JsonLimits, parse_json
from shardeddp.errors import CheckpointError
from shardeddp.plan.intervals import Box, Interval, interval_of

_OTHER_FILES = frozenset({STATE, DCP_METADATA, LIGHTNING_META})
_DIGEST = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n"manifest":')
_PREFIX_NBYTES = len('{"sha256":"",\n"manifest":') + 64


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """The content of ``manifest.json``; the sha256 in it is the identity of the checkpoint."""
    tensors = [
        [list(tensor.path), _dtype_name(tensor.dtype), tensor.shape, [_piece_to_json(it) for it in tensor.pieces]]
        for tensor in manifest.tensors.values()
    ]
    body = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "run": {**vars(manifest.run), "versions": dict(manifest.run.versions)},
            "algorithm": manifest.algorithm,
            "block_nbytes": BLOCK_NBYTES,
            "files": {name: [file.nbytes, file.checksum] for name, file in manifest.files.items()},
            "objects": [[list(it.path), *_item_to_json(it.item)] for it in manifest.objects.values()],
            "tensors": tensors,
        },
        separators=(",", ":"),
    ).encode()
    return b'{"sha256":"%s",\n"manifest":%s}' % (hashlib.sha256(body).hexdigest().encode(), body)


def manifest_from_bytes(data: bytes, memory_nbytes: int = 0) -> Manifest:
    """Read what :func:`manifest_to_bytes` has made.

    Args:
        data: The file.
        memory_nbytes: It may take as much memory as this, if that is more than what any JSON may.

    Raises:
        CheckpointError: It is damaged, of another format, or contradicts itself: says where.
    """
    digest = _DIGEST.match(data)
    if digest is None or not data.endswith(b"}"):
        raise CheckpointError(f"{MANIFEST} is no manifest of a sharded checkpoint: it does not start as one")
    body = data[_PREFIX_NBYTES:-1]
    found = hashlib.sha256(body).hexdigest()
    if found.encode() != digest[1]:
        raise CheckpointError(
            f"{MANIFEST} is damaged: expected sha256 {digest[1].decode()} over its {len(body):,} bytes, found {found}"
        )
    limits = JsonLimits()
    limits = replace(limits, memory_nbytes=max(limits.memory_nbytes, memory_nbytes))
    return _read(parse_json(body, MANIFEST, limits))


def index_to_bytes(
    run: Run, tensors: Iterable[tuple[ItemPath, torch.dtype, Sequence[int], int]], objects: Iterable[ItemPath]
) -> bytes:
    """The record of a plain file that says which training wrote it and what its other records are.

    Args:
        run: The training.
        tensors: Path, dtype and shape of each, and the number of the record that has its elements.
        objects: The paths of what is no tensor and belongs to the model or an optimizer.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "run": {**vars(run), "versions": dict(run.versions)},
        "objects": [list(path) for path in objects],
        "tensors": [[list(path), _dtype_name(dtype), list(shape), record] for path, dtype, shape, record in tensors],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def index_from_bytes(data: bytes, file: str, nbytes: int, records: Mapping[int, Interval]) -> Manifest:
    """Read what :func:`index_to_bytes` has made.

    Args:
        data: The record.
        file: The name of the plain file.
        nbytes: Of the plain file.
        records: The bytes of the file that each numbered record has.

    Returns:
        One file, one piece for each tensor, and no checksums: the archive has CRCs.

    Raises:
        CheckpointError: It is of another format, or contradicts the records.
    """
    whole = Item(file=file, offset=0, nbytes=nbytes)
    try:
        document = parse_json(data, INDEX)
        _check_format(document)
        tensors = [_indexed(whole, records, *entry) for entry in document["tensors"]]
        objects = [StoredObject(path=_path(path), item=whole) for path in document["objects"]]
        run = _run(**document["run"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{INDEX} contradicts itself: {type(error).__name__}: {error}") from error
    return Manifest(
        run=run,
        algorithm=CRC,
        files={file: StoredFile(nbytes=nbytes, checksum="")},
        tensors={tensor.name: tensor for tensor in tensors},
        objects={name_of(it.path): it for it in objects},
    )


def _indexed(
    item: Item, records: Mapping[int, Interval], path: Any, dtype: Any, shape: Any, record: Any
) -> StoredTensor:
    sizes, bytes_of_it = tuple(map(_count, shape)), records[_count(record)]
    piece = Piece(box=Box((0,) * len(sizes), sizes), item=item, payload=bytes_of_it.start, checksums=())
    tensor = StoredTensor(path=_path(path), dtype=_dtype(dtype), shape=sizes, pieces=(piece,))
    if tensor.nbytes != bytes_of_it.numel:
        raise ValueError(f"{tensor.name} has {tensor.nbytes} bytes, its record {bytes_of_it.numel}")
    return tensor


def _check_format(document: dict[str, Any]) -> None:
    if document["format"] != FORMAT or document["version"] != VERSION:
        raise ValueError(
            f"expected format {FORMAT!r} version {VERSION}, found {document['format']!r} {document['version']!r}; "
            f"a newer shardeddp may read it"
        )


def _item_to_json(item: Item) -> list[Any]:
    return [item.file, item.offset, item.nbytes]


def _piece_to_json(piece: Piece) -> list[Any]:
    return [piece.box.offsets, piece.box.sizes, *_item_to_json(piece.item), piece.payload, piece.checksums]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(value: Any) -> Manifest:
    """Check everything that can be checked without the other files."""
    try:
        return _Reader(value).manifest()
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST} contradicts itself: {type(error).__name__}: {error}") from error


class _Reader:
    """Turns the parsed document into a manifest; raises KeyError, TypeError or ValueError where it is wrong.

    Args:
        document: As it was parsed.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        _check_format(document)
        if document["block_nbytes"] != BLOCK_NBYTES:
            raise ValueError(f"expected blocks of {BLOCK_NBYTES} bytes, found {document['block_nbytes']!r}")
        self._document = document
        self._files = {
            _file_name(name): StoredFile(nbytes=_count(nbytes), checksum=_text(checksum))
            for name, (nbytes, checksum) in document["files"].items()
        }
        self._nbytes = sum(file.nbytes for file in self._files.values())

    def manifest(self) -> Manifest:
        document = self._document
        tensors = [self._tensor(*it) for it in document["tensors"]]
        objects = [StoredObject(path=_path(path), item=self._item(*item)) for path, *item in document["objects"]]
        entries = [*tensors, *objects]
        names = [name_of(entry.path) for entry in entries]
        if len(set(names)) != len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise ValueError(f"expected different names, found {twice!r} twice")
        return Manifest(
            run=_run(**document["run"]),
            algorithm=_text(document["algorithm"]),
            files=self._files,
            tensors={tensor.name: tensor for tensor in tensors},
            objects={name_of(it.path): it for it in objects},
        )

    def _tensor(self, path: Any, dtype: Any, shape: Any, pieces: Any) -> StoredTensor:
        tensor = StoredTensor(
            path=_path(path),
            dtype=_dtype(dtype),
            shape=tuple(map(_count, shape)),
            pieces=tuple(self._piece(*piece) for piece in pieces),
        )
        end = 0
        for piece in sorted(tensor.pieces, key=lambda piece: interval_of(piece.box, tensor.shape).start):
            interval = interval_of(piece.box, tensor.shape)
            self._check_payload(tensor, piece)
            if interval.start != end:
                raise ValueError(f"the pieces of {tensor.name} do not tile it: {interval} comes after element {end}")
            end = interval.stop
        if end != tensor.numel:
            raise ValueError(f"the pieces of {tensor.name} end at element {end} of {tensor.numel}")
        if tensor.nbytes > self._nbytes:  # pieces that share bytes could ask for any amount of memory
            raise ValueError(f"{tensor.name} has {tensor.nbytes} bytes, all files together {self._nbytes}")
        return tensor

    def _piece(self, offsets: Any, sizes: Any, file: Any, offset: Any, nbytes: Any, *rest: Any) -> Piece:
        payload, checksums = rest
        return Piece(
            box=Box(tuple(map(_count, offsets)), tuple(map(_count, sizes))),
            item=self._item(file, offset, nbytes),
            payload=_count(payload),
            checksums=tuple(map(_text, checksums)),
        )

    def _item(self, file: Any, offset: Any, nbytes: Any) -> Item:
        item = Item(file=_text(file), offset=_count(offset), nbytes=_count(nbytes))
        if item.offset + item.nbytes > self._files[item.file].nbytes:
            raise ValueError(f"{item} ends behind the {self._files[item.file].nbytes} bytes of its file")
        return item

    def _check_payload(self, tensor: StoredTensor, piece: Piece) -> None:
        nbytes = piece.box.numel * tensor.dtype.itemsize
        item = piece.item
        if not item.offset <= piece.payload <= piece.payload + nbytes <= item.offset + item.nbytes:
            raise ValueError(f"{tensor.name} has a payload of {nbytes} bytes at {piece.payload} outside of {item}")
        if len(piece.checksums) != -(-nbytes // BLOCK_NBYTES):
            raise ValueError(f"{tensor.name} has {len(piece.checksums)} checksums for {nbytes} bytes")


def _run(*, versions: dict[str, Any], **fields: Any) -> Run:
    counts = {name: _count(fields.pop(name)) for name in ("step", "epoch", "world_size", "shard_size")}
    texts = {name: _text(text) for name, text in fields.items()}
    return Run(versions={name: _text(text) for name, text in versions.items()}, **counts, **texts)  # type: ignore[arg-type]


def _file_name(name: str) -> str:
    if name not in _OTHER_FILES and DATA_FILE.fullmatch(name) is None:
        raise ValueError(f"expected names like __0_0.distcp, {', '.join(sorted(_OTHER_FILES))}; found {name!r}")
    return name


def _path(value: Any) -> ItemPath:
    if not value or not all(type(key) in (str, int) for key in value):
        raise TypeError(f"expected a path of texts and numbers, found {value!r}")
    return tuple(value)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, _text(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a number of at least 0, found {value!r}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a text, found {value!r}")
    return value
