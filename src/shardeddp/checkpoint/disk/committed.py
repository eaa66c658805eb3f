"""Which checkpoints are whole: directories and plain files of this package, found in a directory, ordered by step."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardeddp.checkpoint.disk.durable import StrPath, disk_errors, kind_of, open_regular, opened_directory
from shardeddp.checkpoint.disk.plain_file import carries_index, read_index
from shardeddp.checkpoint.format.manifest import FORMAT, MANIFEST, Manifest
from shardeddp.checkpoint.format.manifest_file import manifest_from_bytes
from shardeddp.errors import CheckpointError

PLAIN_SUFFIX = ".ckpt"
"""How names of checkpoints end, of those that are one file as well."""

MAX_MANIFEST_NBYTES = 64 * 2**20
"""No manifest that is larger is read, unless asked for."""

WORKING_NAME = re.compile(
    r"\.(?:(?P<kind>tmp|old)-(?P<name>.+)-(?P<uuid>[0-9a-f]{32})|del-[0-9a-f]{32})", flags=re.DOTALL
)
"""What is being written, replaced or deleted; never a checkpoint, whatever is in it."""

_BEGINNING = re.compile(rb'\{"sha256":"[0-9a-f]{64}",\n"manifest":\{"format":"%s",' % FORMAT.encode())
_VERSION = re.compile(r"-v(\d{1,9})(?=\.|$)")


def carries_manifest(path: StrPath) -> bool:
    """Whether a directory is a checkpoint of this package, maybe a damaged one: its manifest begins as ours do."""
    try:
        descriptor, _ = open_regular(os.path.join(path, MANIFEST))
    except (OSError, CheckpointError):
        return False
    with os.fdopen(descriptor, "rb") as file:
        return _BEGINNING.match(file.read(256)) is not None


def read_manifest(path: StrPath, max_nbytes: int = MAX_MANIFEST_NBYTES) -> Manifest:
    """Read the manifest of a checkpoint, and hold the files against it: that they are there, ordinary, of their size.

    What is in them is not read. Of a plain file it is the index that stands in it.

    Args:
        path: The checkpoint's directory, a plain file of this package, or a link to either.
        max_nbytes: No longer manifest is read.

    Raises:
        CheckpointError: It is not a whole checkpoint; says which file is wrong, and how.
    """
    if os.path.isfile(path):
        return read_index(path)
    with disk_errors("reading the checkpoint", path), opened_directory(path) as directory:
        try:
            data = _read_bounded(directory, max_nbytes)
            manifest = manifest_from_bytes(data, memory_nbytes=_allocated_nbytes(directory))
            for name, file in manifest.files.items():
                _check_file(directory, name, file.nbytes)
        except CheckpointError as error:
            raise CheckpointError(f"{os.fspath(path)} is not a whole checkpoint: {error}") from error
    return manifest


@dataclass(frozen=True, kw_only=True, order=True)
class Candidate:
    """A whole checkpoint of a directory; the greater one is the later one.

    At one step the later epoch is later, then the higher ``-v2`` that Lightning puts into the names of later runs, then
    the name in the order of its characters (``last.ckpt`` after ``epoch=3.ckpt``). A clock is never asked.
    """

    step: int
    epoch: int
    version: int
    name: str
    path: Path = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The checkpoints of a directory."""

    checkpoints: tuple[Candidate, ...]
    """The latest is last."""

    skipped: Mapping[str, str]
    """Why entries that look like checkpoints are none, by name."""


def find_checkpoints(directory: StrPath) -> Found:
    """The checkpoints of this package in a directory, not below it, by the step at which they were saved.

    Args:
        directory: It need not exist.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    candidates: list[Candidate] = []
    skipped: dict[str, str] = {}
    if not os.path.lexists(directory):
        return Found(checkpoints=(), skipped=skipped)
    with disk_errors("looking for checkpoints in", directory):
        names = sorted(os.listdir(directory))
    for name in names:
        path = Path(directory) / name
        if WORKING_NAME.fullmatch(name) or not _looks_like_one(path):
            continue
        try:
            run = read_manifest(path).run
        except CheckpointError as error:
            skipped[name] = str(error)
            continue
        version = max(map(int, _VERSION.findall(name)), default=0)
        candidates.append(Candidate(step=run.step, epoch=run.epoch, version=version, name=name, path=path))
    return Found(checkpoints=tuple(sorted(candidates)), skipped=skipped)


def _looks_like_one(path: Path) -> bool:
    if path.is_dir():
        return path.name.endswith(PLAIN_SUFFIX) or os.path.lexists(path / MANIFEST)
    if path.is_file():
        return path.suffix == PLAIN_SUFFIX and carries_index(path)
    return path.is_symlink() and path.name.endswith(PLAIN_SUFFIX) and not path.exists()


def _read_bounded(directory: int, max_nbytes: int) -> bytes:
    try:
        descriptor, nbytes = open_regular(MANIFEST, directory)
    except FileNotFoundError:
        raise CheckpointError(
            f"it has no {MANIFEST}: either its save was cut short, or another tool wrote it (load it as a foreign one)"
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        if nbytes > max_nbytes:
            raise CheckpointError(f"{MANIFEST} has {nbytes:,} bytes, expected at most {max_nbytes:,}")
        data = file.read(nbytes + 1)
    if len(data) != nbytes:
        raise CheckpointError(f"{MANIFEST} changed while it was read: {nbytes:,} bytes were expected")
    return data


def _allocated_nbytes(directory: int) -> int:
    """What the files of a directory take on the disk: whoever has much to index may have a large index."""
    with os.scandir(directory) as entries:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)


def _check_file(directory: int, name: str, nbytes: int) -> None:
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing, expected a file of {nbytes:,} bytes") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{name} is {kind_of(found.st_mode)}, expected an ordinary file")
    if found.st_size != nbytes:
        raise CheckpointError(f"{name} has {found.st_size:,} bytes, expected {nbytes:,}")
