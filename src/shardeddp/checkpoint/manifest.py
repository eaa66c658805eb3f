"""Manifest of a checkpoint: its fields, its file in JSON, and the checks when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import gt
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from shardeddp.checkpoint.strict_json import parse_json
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Box, Interval, check_cover, interval_of, whole_of

# -- Manifest: contents of a checkpoint, and checksums of its files
#
# [Note: the files of a sharded checkpoint] A checkpoint is a directory, and it is one if and only
# if its manifest is whole and its files have the sizes given there:
#
# - ``__{rank}_0.distcp``: data, a sequence of items, and at its end the table of its *pieces* with
#   their checksums. A piece is a box of a tensor, stored in one item. An item is an archive of
#   ``torch.save``, of one tensor or one other object: a zip archive of uncompressed records. The
#   *payload* of a tensor's item is its raw elements in row-major order, which this package reads.
# - ``placement.bin``: the data files that have the elements of each tensor.
# - ``manifest.json``: this module. It grows with the number of tensors and files, not of pieces.
# - ``state.json``: all values that are not tensors of the model or an optimizer, without pickle.
# - ``.metadata``, ``meta.pt``: indexes of the same data for ``torch.distributed.checkpoint`` and
#   for Lightning. They are pickles; this package writes them and never reads them.
#
# A rank reads the manifest, the rows of the placement of the tensors that it needs, and the tables
# of the files that have their elements: at 4,096 ranks and 405 billion parameters some 20 MB. Each
# of them has a checksum of its own in the manifest. Elements that are stored once, of one tensor or
# of tied parameters, are a *section*: rows of tables have its number.
#
# In an object store the manifest names a folder in its directory, which has the other files.
#
# In checkpoints of version 1 (release 0.1.0) the manifest held all pieces. They are converted to
# placement and tables when it is read.

MANIFEST = "manifest.json"
PLACEMENT = "placement.bin"
STATE = "state.json"
DCP_METADATA = ".metadata"
LIGHTNING_META = "meta.pt"

INDEX = "shardeddp.json"
"""Record of a plain ``.ckpt`` file with the index of this package."""

ALGORITHM = "xxh3_128"
"""Algorithm name of the checksums in a sharded checkpoint."""

CRC = "crc32"
"""Algorithm name of a plain file's checksums: the CRCs of its zip archive."""

FORMAT = "shardeddp"
VERSION = 2
INDEX_VERSION = 1
BLOCK_NBYTES = 4 * 2**20
"""Payload bytes under one checksum; they have to be read to check any of them."""

DATA_FILE = re.compile(r"__(0|[1-9]\d{0,8})_(0|[1-9]\d{0,8})\.distcp")

FOLDER = re.compile(r"[0-9a-f]{32}")
"""Folder names of a checkpoint's files in an object store; each save has its own."""

_OTHER_FILES = frozenset({PLACEMENT, STATE, DCP_METADATA, LIGHTNING_META})

PIECE = np.dtype(
    [
        ("section", "<u4"),
        ("start", "<u8"),  # elements of the flattened tensor; row-major, a box of its shape
        ("stop", "<u8"),
        ("item", "<u8"),  # bytes of the file
        ("item_nbytes", "<u8"),
        ("payload", "<u8"),  # offset of the elements in the file
    ]
)
"""Row of a table, sorted by section and start; the checksums of all blocks follow the rows."""

EXTENT = np.dtype([("start", "<u8"), ("file", "<u4")])
"""Row of the placement: elements from ``start`` to the next row's are in one data file.

Files are numbered in the order of the manifest.
"""

DIGEST_NBYTES = 16

MAX_NBYTES = 2**62
"""Limit of all files together: the sum of any two sizes or offsets in them fits into 64 bits."""


def is_part(name: str) -> bool:
    """Return True if a checkpoint may have a file of this name."""
    return name == MANIFEST or name in _OTHER_FILES or DATA_FILE.fullmatch(name) is not None


ItemPath: TypeAlias = tuple[str | int, ...]
"""Keys from the root of the checkpoint to a value: ``("model", "head.weight")``."""


SHARDED_EXTRA, PLAIN_EXTRA = ("extra", "sharded"), ("extra", "plain")
"""Path prefixes of tensors that belong neither to the model nor to an optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Byte range of a data file that ``torch.load`` reads."""

    file: str
    offset: int
    nbytes: int


class Section(NamedTuple):
    """Elements that are stored once, of one tensor or of several that share their memory.

    A tensor that ranks have split along other dims than the first (a weight's columns) has several
    sections, each a box of it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int = 0
    """First row in the placement; the rows of all sections follow each other."""

    parts: int = 0
    """Number of rows, one per interval of elements in one file; 0 without elements."""

    checksum: str = ""
    """Checksum of the rows."""

    offsets: tuple[int, ...] = ()
    """Offsets of this box in a larger tensor; empty: the section is the whole tensor."""

    whole: tuple[int, ...] = ()
    """Shape of the larger tensor; empty: the section is the whole tensor."""

    @property
    def numel(self) -> int:
        """Number of elements of the section."""
        return math.prod(self.shape)

    @property
    def box(self) -> Box:
        """Box of the section in its tensors."""
        return Box(self.offsets, self.shape) if self.whole else whole_of(self.shape)

    @property
    def rows(self) -> Interval:
        """Bytes of its rows in the placement."""
        return Interval(self.first * EXTENT.itemsize, (self.first + self.parts) * EXTENT.itemsize)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Tensor of a checkpoint."""

    path: ItemPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    sections: tuple[int, ...]
    """Numbers of its sections, or of the record of a plain file; tied parameters have the same.

    A tensor has several if ranks have split it into boxes, which together are the whole tensor.
    """

    @property
    def name(self) -> str:
        """Path joined by dots, as in ``torch.distributed.checkpoint``."""
        return name_of(self.path)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """Pickled non-tensor for ``torch.distributed.checkpoint``; never read by this package."""

    path: ItemPath
    item: Item


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """File of a checkpoint."""

    nbytes: int
    checksum: str
    """Checksum of all bytes outside of payloads and of the table."""

    pieces: int = 0
    """Rows of the table at its end."""

    blocks: int = 0
    """Checksums in that table."""

    table: str = ""
    """Checksum of the table; empty without one."""

    @property
    def table_nbytes(self) -> int:
        """Size of the table."""
        return self.pieces * PIECE.itemsize + self.blocks * DIGEST_NBYTES


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Training run that wrote a checkpoint, and its progress."""

    uuid: str
    """Unique id of the save."""

    step: int
    """Optimizer steps taken (Lightning's ``global_step``)."""

    epoch: int
    world_size: int
    shard_size: int
    sharding_strategy: str
    versions: Mapping[str, str]
    """Versions of the packages that wrote it."""

    tensor_size: int = 1
    """Size of the tensor-parallel group."""

    expert_size: int = 1
    """Size of the expert-parallel group."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON; without the sizes of axes that there were not."""
        sizes = [name for name in _AXES if vars(self)[name] == 1]
        known = {name: value for name, value in vars(self).items() if name not in sizes}
        return {**known, "versions": dict(self.versions)}


_COUNTS = ("step", "epoch", "world_size", "shard_size")
_AXES = ("tensor_size", "expert_size")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint."""

    run: TrainingRun
    algorithm: str
    """Algorithm of the checksums."""

    files: Mapping[str, StoredFile]
    """All files but the manifest."""

    tensors: Mapping[str, StoredTensor]
    """Tensors by name."""

    objects: Mapping[str, StoredObject]
    """Other values by name."""

    sections: Sequence[Section] = ()
    folder: str = ""
    """Folder of the other files, in the manifest's directory; empty: that directory itself."""

    inline: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Placement and tables by file, if they are not in the files: in checkpoints of 0.1.0."""

    @property
    def nbytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file.nbytes for file in self.files.values())

    @cached_property
    def data_files(self) -> tuple[str, ...]:
        """Names of the files with tensors, in the order of their numbers."""
        return tuple(name for name in self.files if DATA_FILE.fullmatch(name))

    @cached_property
    def owners(self) -> Mapping[int, str]:
        """Name of the first tensor of each section."""
        found: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            for section in tensor.sections:
                found.setdefault(section, name)
        return found

    def table_of(self, name: str) -> Interval:
        """Return the bytes of a data file's table; after its end if the table is inline."""
        file = self.files[name]
        end = file.nbytes + (file.table_nbytes if name in self.inline else 0)
        return Interval(end - file.table_nbytes, end)


def name_of(path: Sequence[str | int]) -> str:
    """Return a path joined by dots."""
    return ".".join(map(str, path))


# -- The manifest as JSON, and its checks

_DIGEST = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n"manifest":')
_PREFIX_NBYTES = len('{"sha256":"",\n"manifest":') + 64


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """Return the content of ``manifest.json``; its sha256 identifies the checkpoint."""
    body = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "run": manifest.run.as_json(),
            "algorithm": manifest.algorithm,
            "block_nbytes": BLOCK_NBYTES,
            **({"folder": manifest.folder} if manifest.folder else {}),
            "files": {name: _file_to_json(file) for name, file in manifest.files.items()},
            "objects": [
                [list(it.path), it.item.file, it.item.offset, it.item.nbytes]
                for it in manifest.objects.values()
            ],
            "sections": [
                [paths, _dtype_name(it.dtype), it.shape, it.parts, it.checksum]
                + ([it.offsets, it.whole] if it.whole else [])
                for paths, it in zip(_paths_by_section(manifest), manifest.sections, strict=True)
            ],
        },
        separators=(",", ":"),
    ).encode()
    return b'{"sha256":"%s",\n"manifest":%s}' % (hashlib.sha256(body).hexdigest().encode(), body)


def _paths_by_section(manifest: Manifest) -> list[list[ItemPath]]:
    paths: list[list[ItemPath]] = [[] for _ in manifest.sections]
    for tensor in manifest.tensors.values():
        for section in tensor.sections:
            paths[section].append(tensor.path)
    return paths


def manifest_from_bytes(data: bytes | bytearray) -> Manifest:
    """Parse and check the result of :func:`manifest_to_bytes`."""
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
    document = parse_json(body, MANIFEST)
    try:
        return _manifest_of(document)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{MANIFEST} contradicts itself: {type(error).__name__}: {error}"
        ) from error


def index_to_bytes(
    run: TrainingRun,
    tensors: Iterable[tuple[ItemPath, torch.dtype, Sequence[int], int]],
    objects: Iterable[ItemPath],
) -> bytes:
    """Return the record of a plain file with its training run and the content of its records.

    Tensors are given by path, dtype, shape and record number; of the model's and optimizers' other
    values, the paths.
    """
    document = {
        "format": FORMAT,
        "version": INDEX_VERSION,
        "run": run.as_json(),
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
    """Parse and check the result of :func:`index_to_bytes` in a plain file.

    The manifest has one file, a record for each tensor, and no checksums: the archive has CRCs.
    ``records`` are the bytes in the file of each numbered record.
    """
    whole = Item(file=file, offset=0, nbytes=nbytes)
    try:
        document = parse_json(data, INDEX)
        _check_format(document, INDEX_VERSION)
        tensors = [_indexed(records, *entry) for entry in document["tensors"]]
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
    records: Mapping[int, Interval], path: Any, dtype: Any, shape: Any, record: Any
) -> StoredTensor:
    number, sizes = _count(record), tuple(map(_count, shape))
    tensor = StoredTensor(path=_path(path), dtype=_dtype(dtype), shape=sizes, sections=(number,))
    if tensor.nbytes != records[number].numel:
        raise ValueError(
            f"{tensor.name} has {tensor.nbytes} bytes, its record {records[number].numel}"
        )
    return tensor


def _check_format(document: dict[str, Any], *versions: int) -> None:
    if document["format"] != FORMAT or document["version"] not in versions:
        raise ValueError(
            f"expected format {FORMAT!r} version {max(versions)}, found {document['format']!r} "
            f"{document['version']!r}; a newer shardeddp may read it"
        )


def _file_to_json(file: StoredFile) -> list[Any]:
    table = [file.pieces, file.blocks, file.table] if file.pieces else []
    return [file.nbytes, file.checksum, *table]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _manifest_of(document: dict[str, Any]) -> Manifest:
    """Return the manifest of a parsed document, after all checks that need no other file.

    Raises KeyError, TypeError or ValueError for a wrong document.
    """
    _check_format(document, 1, VERSION)
    if document["block_nbytes"] != BLOCK_NBYTES:
        raise ValueError(
            f"expected blocks of {BLOCK_NBYTES} bytes, found {document['block_nbytes']!r}"
        )
    if document["algorithm"] != ALGORITHM:
        raise ValueError(
            f"expected checksums by {ALGORITHM}, found {document['algorithm']!r}; a newer "
            f"shardeddp may read it"
        )
    files = {_file_name(name): _file(name, *fields) for name, fields in document["files"].items()}
    nbytes = sum(file.nbytes for file in files.values())
    if nbytes > MAX_NBYTES:
        raise ValueError(f"all files have {nbytes} bytes, more than files can have")
    manifest = Manifest(
        run=_run(**document["run"]),
        algorithm=ALGORITHM,
        files=files,
        tensors={},
        objects={},
        folder=_folder_name(document.get("folder", "")),
    )
    if document["version"] == 1:
        manifest, tensors = _converted(manifest, document["tensors"])
    else:
        sections, tensors = _sections(document["sections"], files)
        manifest = replace(manifest, sections=sections)
    objects = [
        StoredObject(path=_path(path), item=_item(files, *item))
        for path, *item in document["objects"]
    ]
    names = [name_of(entry.path) for entry in (*tensors, *objects)]
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"expected different names, found {twice!r} twice")
    return replace(
        manifest,
        tensors={tensor.name: tensor for tensor in tensors},
        objects={name_of(it.path): it for it in objects},
    )


def _sections(
    entries: Iterable[Any], files: Mapping[str, StoredFile]
) -> tuple[tuple[Section, ...], list[StoredTensor]]:
    sections, first = list[Section](), 0
    entries_of_tensors = list[tuple[ItemPath, int]]()
    data_nbytes = _data_nbytes(files)
    for paths, dtype, shape, parts, checksum, *rest in entries:
        offsets, whole = rest or ((), ())
        section = Section(
            _dtype(dtype),
            tuple(map(_count, shape)),
            first,
            _count(parts),
            _text(checksum),
            tuple(map(_count, offsets)),
            tuple(map(_count, whole)),
        )
        _check_section(section, data_nbytes)
        entries_of_tensors += [(_path(path), len(sections)) for path in paths]
        sections.append(section)
        first += section.parts
    placement = files[PLACEMENT].nbytes if sections else 0
    # Overlapping rows could take any amount of time to read.
    if first * EXTENT.itemsize != placement:
        raise ValueError(
            f"all tensors together have {first} rows of {EXTENT.itemsize} bytes in "
            f"{PLACEMENT}, which has {placement} bytes"
        )
    return tuple(sections), stored_tensors(entries_of_tensors, sections)


def _item(files: Mapping[str, StoredFile], file: Any, offset: Any, nbytes: Any) -> Item:
    item = Item(file=_text(file), offset=_count(offset), nbytes=_count(nbytes))
    if item.offset + item.nbytes > files[item.file].nbytes:
        raise ValueError(f"{item} ends behind the {files[item.file].nbytes} bytes of its file")
    return item


def stored_tensors(
    entries_of_tensors: Iterable[tuple[ItemPath, int]], sections: Sequence[Section]
) -> list[StoredTensor]:
    """Return the tensors that consist of sections.

    Args:
        entries_of_tensors: Path and section number of each tensor; an entry for each of its sections.
        sections: All sections.

    Raises:
        ValueError: The sections of a tensor do not cover its elements once.
    """
    numbers: defaultdict[ItemPath, list[int]] = defaultdict(list)
    for path, number in entries_of_tensors:
        numbers[path].append(number)
    return [_stored_tensor(path, own, sections) for path, own in numbers.items()]


def _stored_tensor(
    path: ItemPath, numbers: Sequence[int], sections: Sequence[Section]
) -> StoredTensor:
    own = [sections[number] for number in numbers]
    first, *more = own
    shape = first.whole or first.shape
    if more and any(not it.whole or (it.whole, it.dtype) != (shape, first.dtype) for it in own):
        raise ValueError(f"expected different names, found {name_of(path)!r} twice")
    if first.whole:
        check_cover(name_of(path), shape, [it.box for it in own if it.numel])
    return StoredTensor(path=path, dtype=first.dtype, shape=shape, sections=tuple(numbers))


def _data_nbytes(files: Mapping[str, StoredFile]) -> int:
    return sum(file.nbytes for name, file in files.items() if DATA_FILE.fullmatch(name))


def _check_section(section: Section, data_nbytes: int) -> None:
    # Limits the memory that a manifest can make a reader allocate.
    if section.numel * section.dtype.itemsize > data_nbytes:
        raise ValueError(
            f"a tensor of shape {section.shape} has more than the {data_nbytes} bytes of all data "
            f"files"
        )
    ends = map(sum, zip(section.offsets, section.shape, strict=False))
    if not len(section.offsets) == len(section.whole) or (
        section.whole
        and (len(section.shape) != len(section.whole) or any(map(gt, ends, section.whole)))
    ):
        raise ValueError(f"{section.box} is no box of a tensor of shape {section.whole}")
    if (section.parts > 0) != (section.numel > 0):
        raise ValueError(
            f"a tensor of shape {section.shape} has {section.parts} parts in data files"
        )


def _file(
    name: str, nbytes: Any, checksum: Any, pieces: Any = 0, blocks: Any = 0, table: Any = ""
) -> StoredFile:
    file = StoredFile(
        nbytes=_count(nbytes),
        checksum=_text(checksum),
        pieces=_count(pieces),
        blocks=_count(blocks),
        table=_text(table),
    )
    if file.table_nbytes > file.nbytes or (file.pieces and not DATA_FILE.fullmatch(name)):
        raise ValueError(
            f"{name} of {file.nbytes} bytes cannot have a table of {file.pieces} pieces and "
            f"{file.blocks} checksums"
        )
    return file


def _converted(manifest: Manifest, entries: Sequence[Any]) -> tuple[Manifest, list[StoredTensor]]:
    """Convert a manifest of version 1, which held all pieces, to placement and tables."""
    if any(file.pieces or file.blocks or file.table for file in manifest.files.values()):
        raise ValueError("a manifest of version 1 has tables of pieces in its files")
    numbers = {name: number for number, name in enumerate(manifest.data_files)}
    data_nbytes = _data_nbytes(manifest.files)
    rows: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    digests: defaultdict[str, list[bytes]] = defaultdict(list)
    sections = list[Section]()
    by_box = dict[Any, int]()
    extents = list[tuple[int, int]]()
    tensors = list[StoredTensor]()
    for path, dtype_name, shape, pieces in entries:
        dtype, sizes = _dtype(dtype_name), tuple(map(_count, shape))
        found = sorted(
            (
                (interval_of(_box(offsets, boxed), sizes), _text(file), *map(_count, numbers_of))
                for offsets, boxed, file, *numbers_of, _ in pieces
            ),
            key=lambda piece: piece[0].start,
        )
        sums = {(_text(piece[2]), piece[5]): piece[6] for piece in pieces}
        box = dtype, sizes, tuple(found)
        number = by_box.setdefault(box, len(sections))
        tensors.append(StoredTensor(path=_path(path), dtype=dtype, shape=sizes, sections=(number,)))
        if number < len(sections):
            continue
        first = len(extents)
        for interval, file, item, nbytes, payload in found:
            rows[file].append((number, interval.start, interval.stop, item, nbytes, payload))
            digests[file] += map(bytes.fromhex, sums[file, payload])
            if len(extents) == first or extents[-1][1] != numbers[file]:
                extents.append((interval.start, numbers[file]))
        section = Section(dtype, sizes, first, len(extents) - first, "")
        _check_section(section, data_nbytes)
        sections.append(section)
    if any(len(each) != DIGEST_NBYTES for found in digests.values() for each in found):
        raise ValueError(f"expected checksums of {DIGEST_NBYTES} bytes")
    tables = {
        name: np.array(rows[name], dtype=PIECE).tobytes() + b"".join(digests[name])
        for name in manifest.data_files
    }
    files = {
        name: replace(file, pieces=len(rows[name]), blocks=len(digests[name]))
        if name in numbers
        else file
        for name, file in manifest.files.items()
    }
    inline = {**tables, PLACEMENT: np.array(extents, dtype=EXTENT).tobytes()}
    return replace(manifest, files=files, sections=tuple(sections), inline=inline), tensors


def _box(offsets: Any, sizes: Any) -> Box:
    return Box(tuple(map(_count, offsets)), tuple(map(_count, sizes)))


def _run(*, versions: dict[str, Any], **fields: Any) -> TrainingRun:
    named_counts = (*_COUNTS, *(name for name in _AXES if name in fields))
    counts = {name: _count(fields.pop(name)) for name in named_counts}
    texts = {name: _text(text) for name, text in fields.items()}
    named = {name: _text(text) for name, text in versions.items()}
    return TrainingRun(versions=named, **counts, **texts)  # type: ignore[arg-type]


def _file_name(name: str) -> str:
    if name == MANIFEST or not is_part(name):
        raise ValueError(
            f"expected names like __0_0.distcp, {', '.join(sorted(_OTHER_FILES))}; found {name!r}"
        )
    return name


def _folder_name(name: Any) -> str:
    if _text(name) and not FOLDER.fullmatch(name):
        raise ValueError(f"expected the name of a folder of 32 hexadecimal digits, found {name!r}")
    return name


def _path(value: Any) -> ItemPath:
    if type(value) is not list or not value or {*map(type, value)} - {str, int}:
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
