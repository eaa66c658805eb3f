"""Finding checkpoints: directories by manifest, plain files, and the last one of some folders."""

from __future__ import annotations

import errno
import os
import pickle
import re
import stat
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardeddp.checkpoint.durable import (
    Location,
    Source,
    StrPath,
    disk_errors,
    is_remote,
    kind_of,
    location,
    open_regular,
    open_source,
    opened_directory,
    read_into,
    read_text,
)
from shardeddp.checkpoint.items import Record, crc_of, read_record, records_of
from shardeddp.checkpoint.manifest import (
    DCP_METADATA,
    FORMAT,
    INDEX,
    MANIFEST,
    Item,
    Manifest,
    index_from_bytes,
    manifest_from_bytes,
)
from shardeddp.checkpoint.remote import RemotePath
from shardeddp.checkpoint.schema import check_fields
from shardeddp.errors import CheckpointError, DamagedCheckpointError, printable
from shardeddp.plan.layout import Interval
from shardeddp.wrap.tree import first_three

# -- Plain checkpoints: one file, and the index of its bytes

_ELEMENTS = re.compile(r"(?:.*/)?data/(\d{1,9})")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One place where a checkpoint is not what was written."""

    file: str
    """Its name in the checkpoint; empty if it is the checkpoint as a whole."""

    tensor: str = ""
    """Tensor with bytes there, or record of an archive where it is no tensor's; empty if none."""

    where: Interval | None = None
    """Bytes of the file; None if it is the file as a whole."""

    expected: str
    found: str

    def __str__(self) -> str:
        """All of it in one line."""
        where = f" bytes {self.where.start:,} to {self.where.stop:,}" if self.where else ""
        of = f" of {self.tensor}" if self.tensor else ""
        return f"{self.file}{where}{of}: expected {self.expected}, found {self.found}".lstrip(": ")


def read_index(path: StrPath | RemotePath) -> Manifest:
    """What this package says of a plain checkpoint that it has written; elements are not read."""
    with _opened(path) as (descriptor, item):
        return _index(descriptor, item, records_of(descriptor, item))[0]


def carries_index(path: StrPath | RemotePath) -> bool:
    """Whether a file is a plain checkpoint that this package has written."""
    try:
        with _opened(path) as (descriptor, item):
            return any(_is_index(record) for record in records_of(descriptor, item))
    except (CheckpointError, OSError):
        return False


def damaged_records(
    path: StrPath | RemotePath,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Damage]:
    """Compare the records of a plain checkpoint with their CRCs.

    ``torch.save`` has written those, or this package. Where CRCs were left out
    (``torch.serialization.set_crc32_options``), nothing is compared.

    Args:
        path: The file, or a link to it.
        part: Which records: ``(1, 3)`` is the second of three parts.
        progress: Told how many more bytes have been compared.
    """
    damaged: list[Damage] = []
    with _opened(path) as (descriptor, item):
        records = records_of(descriptor, item)
        if not any(record.crc for record in records):
            return []
        names = _names(descriptor, item, records)
        for record in records[part[0] :: part[1]]:
            found = crc_of(descriptor, item, record)
            if found != record.crc:
                damaged.append(
                    Damage(
                        file=location(path).name,
                        tensor=names.get(record.offset, record.name),
                        where=Interval(record.offset, record.offset + record.nbytes),
                        expected=f"{record.crc:08x}",
                        found=f"{found:08x}",
                    )
                )
            progress(record.nbytes)
    return damaged


def require_intact(path: StrPath, part: tuple[int, int] = (0, 1)) -> None:
    """Refuse a plain checkpoint of which a record, among a part of them, is not what its CRC says."""
    damaged = damaged_records(path, part)
    if damaged:
        raise DamagedCheckpointError(
            f"{path} is damaged (CRCs of records): {first_three(map(str, damaged))}"
        )


def _names(descriptor: Source, item: Item, records: list[Record]) -> dict[int, str]:
    """Names of tensors by where their elements are, if this package has written the file."""
    try:
        manifest, elements = _index(descriptor, item, records)
    except CheckpointError:
        return {}
    tensors = manifest.tensors.values()
    return {elements[it.sections[0]].start: it.name for it in tensors if it.numel}


def _index(
    descriptor: Source, item: Item, records: list[Record]
) -> tuple[Manifest, dict[int, Interval]]:
    """What the package says of a file, and the bytes of each numbered record."""
    record = next(filter(_is_index, records), None)
    if record is None:
        raise CheckpointError(
            f"there is no {INDEX} in it: another tool wrote it, or an older release"
        )
    found = ((_ELEMENTS.fullmatch(each.name), each) for each in records)
    elements = {
        int(match[1]): Interval(each.offset, each.offset + each.nbytes)
        for match, each in found
        if match is not None
    }
    data = read_record(descriptor, item, record)
    return index_from_bytes(data, item.file, item.nbytes, elements), elements


def _is_index(record: Record) -> bool:
    return Path(record.name).name == INDEX


@contextmanager
def _opened(path: StrPath | RemotePath) -> Generator[tuple[Source, Item]]:
    place = location(path)
    real = place if isinstance(place, RemotePath) else Path(os.path.realpath(place))
    try:
        with disk_errors("reading", place), open_source(real) as (descriptor, nbytes):
            yield descriptor, Item(file=real.name, offset=0, nbytes=nbytes)
    except CheckpointError as error:
        raise (error if str(path) in str(error) else type(error)(f"{path}: {error}")) from error


# -- Whole checkpoints in a directory, ordered by step

PLAIN_SUFFIX = ".ckpt"
"""How names of checkpoints end, of those that are one file as well."""

WORKING_NAME = re.compile(
    r"\.(?:(?P<kind>tmp|old)-(?P<name>.+)-(?P<uuid>[0-9a-f]{32})|del-[0-9a-f]{32})", flags=re.DOTALL
)
"""What is being written, replaced or deleted; never a checkpoint, whatever is in it."""

_BEGINNING = re.compile(
    rb'\{"sha256":"[0-9a-f]{64}",\n"manifest":\{"format":"%s",' % FORMAT.encode()
)
_VERSION = re.compile(r"-v(\d{1,9})(?=\.|$)")


def is_checkpoint(directory: StrPath | RemotePath) -> bool:
    """Whether a directory is a checkpoint of this package, or of another tool."""
    place = location(directory)
    return carries_manifest(place) or (
        not isinstance(place, RemotePath) and os.path.lexists(place / DCP_METADATA)
    )


_NO_MANIFEST = {errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG}


def carries_manifest(path: StrPath | RemotePath) -> bool:
    """Whether a directory is a checkpoint of this package, even a damaged one.

    That is so if its manifest begins as those of this package do.

    Raises:
        CheckpointError: Permissions, the disk, or the number of open files do not let it be read:
            that says nothing about what is in there.
    """
    file, beginning = location(path) / MANIFEST, bytearray(256)
    with disk_errors("reading", file):
        try:
            with open_source(file) as (source, _):
                read_into(source, memoryview(beginning), 0)
            return _BEGINNING.match(beginning) is not None
        except CheckpointError:
            return False
        except OSError as error:
            if error.errno in _NO_MANIFEST:
                return False
            raise


def read_manifest(path: StrPath | RemotePath, part: tuple[int, int] = (0, 1)) -> Manifest:
    """Read the manifest of a checkpoint; check that its files are there, ordinary, of their size.

    What is in them is not read. Of a plain file it is the index that stands in it.

    Args:
        path: The checkpoint's directory, a plain file of this package, or a link to either.
        part: Which files are looked for: ``(1, 3)`` is the second of three parts. Thousands of
            ranks that each look for thousands of files would keep a file system busy.
    """
    place = location(path)
    if isinstance(place, RemotePath):
        return _read_remote(place, part)
    if place.is_file():
        return read_index(place)
    with disk_errors("reading the checkpoint", place), opened_directory(place) as directory:
        try:
            manifest = manifest_from_bytes(_read(directory))
            for name, file in list(manifest.files.items())[part[0] :: part[1]]:
                _check_file(directory, os.path.join(manifest.folder, name), file.nbytes)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    return manifest


def read_manifest_alone(path: Location) -> Manifest:
    """The manifest of a checkpoint; its files are not looked for. An ``OSError`` stays one."""
    try:
        with open_source(path / MANIFEST) as (source, nbytes):
            return manifest_from_bytes(read_text(source, Interval(0, nbytes), MANIFEST))
    except FileNotFoundError:
        raise CheckpointError(_NO_MANIFEST_TEXT) from None


def _read_remote(path: RemotePath, part: tuple[int, int]) -> Manifest:
    """The same of a checkpoint in a store."""
    with disk_errors("reading the checkpoint", path):
        try:
            manifest = read_manifest_alone(path)
            wanted = dict(list(manifest.files.items())[part[0] :: part[1]])
            found = (path / manifest.folder).sizes(wanted)
            for name, file in wanted.items():
                if found[name] is None:
                    raise CheckpointError(
                        f"{name} is missing, expected an object of {file.nbytes:,} bytes"
                    )
                if found[name] != file.nbytes:
                    raise CheckpointError(
                        f"{name} has {found[name]:,} bytes, expected {file.nbytes:,}"
                    )
        except CheckpointError as error:
            if path.is_file():
                return read_index(path)
            raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    return manifest


@dataclass(frozen=True, kw_only=True, order=True)
class Candidate:
    """A whole checkpoint of a directory; the greater one is the later one.

    At one step the later epoch is later, then the higher ``-v2`` that Lightning puts into the names
    of later runs, then the name in the order of its characters (``last.ckpt`` after
    ``epoch=3.ckpt``). A clock is never asked.
    """

    step: int
    epoch: int
    version: int
    name: str
    path: Location = field(compare=False)
    resumable: bool = field(compare=False)
    """Whether there is more in it than weights: states of optimizers."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The checkpoints of a directory."""

    checkpoints: tuple[Candidate, ...]
    """The latest is last."""

    skipped: Mapping[str, str]
    """Why entries that look like checkpoints are none, by name."""


def find_checkpoints(directory: StrPath | RemotePath) -> Found:
    """Checkpoints of this package directly in a directory, by the step at which they were saved.

    In a store, names without a manifest or an index are no checkpoints: what a save that was cut
    short has left is not mentioned.
    """
    candidates: list[Candidate] = []
    skipped: dict[str, str] = {}
    folder = location(directory)
    if not isinstance(folder, RemotePath) and not os.path.lexists(folder):
        return Found(checkpoints=(), skipped=skipped)
    with disk_errors("looking for checkpoints in", folder):
        remote = isinstance(folder, RemotePath)
        names = list(folder.list()) if remote else sorted(os.listdir(folder))
    for name in names:
        path = folder / name
        if WORKING_NAME.fullmatch(name) or not _looks_like_one(path):
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            skipped[name] = str(error)
            continue
        candidates.append(
            Candidate(
                step=manifest.run.step,
                epoch=manifest.run.epoch,
                version=max(map(int, _VERSION.findall(name)), default=0),
                name=name,
                path=path,
                resumable=_has_optimizers(manifest),
            )
        )
    return Found(checkpoints=tuple(sorted(candidates)), skipped=skipped)


def _has_optimizers(manifest: Manifest) -> bool:
    return any(str(it.path[0]).startswith("optimizer_") for it in manifest.objects.values())


def _looks_like_one(path: Location) -> bool:
    if isinstance(path, RemotePath):
        return carries_manifest(path) or (path.suffix == PLAIN_SUFFIX and carries_index(path))
    if path.is_dir():
        return path.name.endswith(PLAIN_SUFFIX) or os.path.lexists(path / MANIFEST)
    if path.is_file():
        return path.suffix == PLAIN_SUFFIX and carries_index(path)
    return path.is_symlink() and path.name.endswith(PLAIN_SUFFIX) and not path.exists()


_NO_MANIFEST_TEXT = (
    f"it has no {MANIFEST}: either its save was cut short, or another tool wrote it (load it as a "
    f"foreign one)"
)


def _read(directory: int) -> bytearray:
    try:
        with open_regular(MANIFEST, directory) as (descriptor, nbytes):
            return read_text(descriptor, Interval(0, nbytes), MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(_NO_MANIFEST_TEXT) from None


def _check_file(directory: int, name: str, nbytes: int) -> None:
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing, expected a file of {nbytes:,} bytes") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{name} is {kind_of(found.st_mode)}, expected an ordinary file")
    if found.st_size != nbytes:
        raise CheckpointError(f"{name} has {found.st_size:,} bytes, expected {nbytes:,}")


# -- The last checkpoint: the usable one of the highest step
#
# Time stamps do not matter.


@dataclass(frozen=True, order=True)
class _Candidate:
    resumable: bool
    step: int
    called_last: bool
    path: str


def last_checkpoints(named: Iterable[str], folders: Iterable[str]) -> list[Location]:
    """Checkpoints to resume from, the best first; one warning names those that cannot be used.

    Args:
        named: Paths of checkpoints that are called "last", of either kind.
        folders: Directories whose checkpoints of this package count as well: a run that was killed
            between two saves of one step has only the first of them.

    Raises:
        CheckpointError: There are some, and none can be used.
    """
    candidates: dict[str, _Candidate] = {}
    skipped: dict[str, str] = {}
    for path in named:
        try:
            candidates[_identity(path)] = _candidate(path)
        except Exception as error:  # noqa: BLE001 - pickles raise anything
            skipped[path] = str(error) if str(path) in str(error) else f"{path}: {error}"
    for folder in folders:
        found = find_checkpoints(folder)
        skipped |= {str(location(folder) / name): why for name, why in found.skipped.items()}
        for each in found.checkpoints:
            path = str(each.path)
            own = _Candidate(each.resumable, each.step, False, path)
            candidates.setdefault(_identity(path), own)
    if skipped:
        left = printable("; ".join(skipped.values()))
        warnings.warn(f"not whole, left aside: {left}", stacklevel=2)
    if skipped and not candidates:
        raise CheckpointError(
            f"no checkpoint is whole among {', '.join(skipped)}. Leave ckpt_path out to train from "
            f"the beginning"
        )
    return [location(candidate.path) for candidate in sorted(candidates.values(), reverse=True)]


def _identity(path: str) -> str:
    return str(location(path)) if is_remote(path) else os.path.realpath(path)


def _candidate(path: str) -> _Candidate:
    """Of a checkpoint that is called "last"."""
    place = location(path)
    remote = isinstance(place, RemotePath)
    if remote and not (carries_manifest(place) or carries_index(place)) and place.is_file():
        return _Candidate(True, -1, True, path)  # of others, so its step is unknown
    if remote or os.path.isdir(path) or carries_index(path):
        manifest = read_manifest(path)
        return _Candidate(_has_optimizers(manifest), manifest.run.step, True, path)
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is neither a sharded checkpoint nor a file that torch.save wrote"
        )
    with _opened(path) as (descriptor, item):
        records_of(descriptor, item)  # what is compressed may take any amount of memory
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        # The file holds objects of others, so its step is unknown.
        return _Candidate(True, -1, True, path)
    check_fields(content, path)
    step = content.get("global_step", -1)  # files that others have put together may leave it out
    return _Candidate("optimizer_states" in content, step, True, path)
