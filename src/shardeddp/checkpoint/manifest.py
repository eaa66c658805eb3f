"""Manifest of a checkpoint: its fields, its file in JSON, and the checks when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from shardeddp.checkpoint.state_codec import parse_json
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Box, Interval, interval_of

# -- The manifest of a sharded checkpoint: where every byte of every tensor is, and its checksum;
#    the only index we read
#
# [Note: the files of a sharded checkpoint] A checkpoint is a directory, and it is one if and only
# if its manifest is whole and its files have the sizes given there:
#
# - ``__{rank}_{k}.distcp``: data, a sequence of items. An item is what ``torch.save`` makes of one tensor (or of one
#   other object): a zip archive whose records are stored as they are. The *payload* of a tensor's item, its raw
#   elements in row-major order, is what this package reads.
# - ``manifest.json``: this module.
# - ``state.json``: everything that is not a tensor of the model or an optimizer, without pickle.
# - ``.metadata``, ``meta.pt``: the indexes of ``torch.distributed.checkpoint`` and of Lightning over the same data.
#   They are pickles; this package writes them and never reads them.

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

_OTHER_FILES = frozenset({STATE, DCP_METADATA, LIGHTNING_META})


def is_part(name: str) -> bool:
    """Whether a checkpoint's directory has a file of this name."""
    return name == MANIFEST or name in _OTHER_FILES or DATA_FILE.fullmatch(name) is not None


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
    """A pickled non-tensor for ``torch.distributed.checkpoint``; never read by this package."""

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


# -- The manifest as a file, and the index in a plain file: JSON, and what is checked when it is
#    read

_DIGEST = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n"manifest":')
_PREFIX_NBYTES = len('{"sha256":"",\n"manifest":') + 64


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """The content of ``manifest.json``; the sha256 in it is the identity of the checkpoint."""
    tensors = [
        [
            list(tensor.path),
            _dtype_name(tensor.dtype),
            tensor.shape,
            [_piece_to_json(it) for it in tensor.pieces],
        ]
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
            "objects": [
                [list(it.path), *_item_to_json(it.item)] for it in manifest.objects.values()
            ],
            "tensors": tensors,
        },
        separators=(",", ":"),
    ).encode()
    return b'{"sha256":"%s",\n"manifest":%s}' % (hashlib.sha256(body).hexdigest().encode(), body)


def manifest_from_bytes(data: bytes | bytearray) -> Manifest:
    """Read what :func:`manifest_to_bytes` has made.

    Args:
        data: The file.

    Raises:
        CheckpointError: It is damaged, of another format, or contradicts itself: says where.
    """
    digest = _DIGEST.match(data)
    if digest is None or not data.endswith(b"}"):
        raise CheckpointError(
            f"{MANIFEST} is no manifest of a sharded checkpoint: it does not start as one"
        )
    body = data[_PREFIX_NBYTES:-1]
    found = hashlib.sha256(body).hexdigest()
    if found.encode() != digest[1]:
        raise CheckpointError(
            f"{MANIFEST} is damaged: expected sha256 {digest[1].decode()} over its {len(body):,} "
            f"bytes, found {found}"
        )
    return _read(parse_json(body, MANIFEST))


def index_to_bytes(
    run: Run,
    tensors: Iterable[tuple[ItemPath, torch.dtype, Sequence[int], int]],
    objects: Iterable[ItemPath],
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
        "tensors": [
            [list(path), _dtype_name(dtype), list(shape), record]
            for path, dtype, shape, record in tensors
        ],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def index_from_bytes(
    data: bytes | bytearray, file: str, nbytes: int, records: Mapping[int, Interval]
) -> Manifest:
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
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{INDEX} contradicts itself: {type(error).__name__}: {error}"
        ) from error
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
    piece = Piece(
        box=Box((0,) * len(sizes), sizes), item=item, payload=bytes_of_it.start, checksums=()
    )
    tensor = StoredTensor(path=_path(path), dtype=_dtype(dtype), shape=sizes, pieces=(piece,))
    if tensor.nbytes != bytes_of_it.numel:
        raise ValueError(f"{tensor.name} has {tensor.nbytes} bytes, its record {bytes_of_it.numel}")
    return tensor


def _check_format(document: dict[str, Any]) -> None:
    if document["format"] != FORMAT or document["version"] != VERSION:
        raise ValueError(
            f"expected format {FORMAT!r} version {VERSION}, found {document['format']!r} "
            f"{document['version']!r}; a newer shardeddp may read it"
        )


def _item_to_json(item: Item) -> list[Any]:
    return [item.file, item.offset, item.nbytes]


def _piece_to_json(piece: Piece) -> list[Any]:
    return [
        piece.box.offsets,
        piece.box.sizes,
        *_item_to_json(piece.item),
        piece.payload,
        piece.checksums,
    ]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(value: Any) -> Manifest:
    """Check everything that can be checked without the other files."""
    try:
        return _Reader(value).manifest()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{MANIFEST} contradicts itself: {type(error).__name__}: {error}"
        ) from error


class _Reader:
    """Turns the parsed document into a manifest.

    Raises KeyError, TypeError or ValueError where the document is wrong.

    Args:
        document: As it was parsed.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        _check_format(document)
        if document["block_nbytes"] != BLOCK_NBYTES:
            raise ValueError(
                f"expected blocks of {BLOCK_NBYTES} bytes, found {document['block_nbytes']!r}"
            )
        self._document = document
        self._files = {
            _file_name(name): StoredFile(nbytes=_count(nbytes), checksum=_text(checksum))
            for name, (nbytes, checksum) in document["files"].items()
        }

    def manifest(self) -> Manifest:
        document = self._document
        tensors = [self._tensor(*it) for it in document["tensors"]]
        self._check_bytes(tensors)
        objects = [
            StoredObject(path=_path(path), item=self._item(*item))
            for path, *item in document["objects"]
        ]
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
        if len({(piece.item.file, piece.payload) for piece in tensor.pieces}) < len(tensor.pieces):
            raise ValueError(f"{tensor.name} has two pieces of the same bytes")
        end = 0
        for piece in sorted(
            tensor.pieces, key=lambda piece: interval_of(piece.box, tensor.shape).start
        ):
            interval = interval_of(piece.box, tensor.shape)
            self._check_payload(tensor, piece)
            if not interval.numel:
                raise ValueError(f"{tensor.name} has a piece without elements")
            if interval.start != end:
                raise ValueError(
                    f"the pieces of {tensor.name} do not tile it: {interval} comes after element "
                    f"{end}"
                )
            end = interval.stop
        if end != tensor.numel:
            raise ValueError(f"the pieces of {tensor.name} end at element {end} of {tensor.numel}")
        return tensor

    def _check_bytes(self, tensors: Iterable[StoredTensor]) -> None:
        """Bytes belong to one piece, which may be of several tensors (tied parameters).

        Pieces that overlap otherwise could ask for any amount of memory.
        """
        places = {
            (piece.item.file, piece.payload, piece.box.numel * tensor.dtype.itemsize): tensor.name
            for tensor in tensors
            for piece in tensor.pieces
        }
        last, end = "", 0
        for (file, start, nbytes), name in sorted(places.items()):
            if file == last and start < end:
                raise ValueError(
                    f"{name} has a piece that overlaps another one at {start} of {file}"
                )
            last, end = file, start + nbytes

    def _piece(
        self, offsets: Any, sizes: Any, file: Any, offset: Any, nbytes: Any, *rest: Any
    ) -> Piece:
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
            raise ValueError(
                f"{item} ends behind the {self._files[item.file].nbytes} bytes of its file"
            )
        return item

    def _check_payload(self, tensor: StoredTensor, piece: Piece) -> None:
        nbytes = piece.box.numel * tensor.dtype.itemsize
        item = piece.item
        if not item.offset <= piece.payload <= piece.payload + nbytes <= item.offset + item.nbytes:
            raise ValueError(
                f"{tensor.name} has a payload of {nbytes} bytes at {piece.payload} outside of "
                f"{item}"
            )
        if len(piece.checksums) != -(-nbytes // BLOCK_NBYTES):
            raise ValueError(
                f"{tensor.name} has {len(piece.checksums)} checksums for {nbytes} bytes"
            )


def _run(*, versions: dict[str, Any], **fields: Any) -> Run:
    counts = {
        name: _count(fields.pop(name)) for name in ("step", "epoch", "world_size", "shard_size")
    }
    texts = {name: _text(text) for name, text in fields.items()}
    return Run(versions={name: _text(text) for name, text in versions.items()}, **counts, **texts)  # type: ignore[arg-type]


def _file_name(name: str) -> str:
    if name == MANIFEST or not is_part(name):
        raise ValueError(
            f"expected names like __0_0.distcp, {', '.join(sorted(_OTHER_FILES))}; found {name!r}"
        )
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
