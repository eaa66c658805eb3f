"""Finding checkpoints: directories by manifest, plain files, and the last one of some folders."""

from __future__ import annotations

import errno
import os
import pickle
import re
import stat
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardeddp.checkpoint.durable import (
    Location,
    StrPath,
    disk_errors,
    is_directory,
    is_remote,
    kind_of,
    location,
    open_regular,
    open_source,
    opened_directory,
    read_into,
    read_text,
)
from shardeddp.checkpoint.items import checksum, records_of
from shardeddp.checkpoint.manifest import (
    DCP_METADATA,
    FORMAT,
    MANIFEST,
    PLACEMENT,
    Manifest,
    manifest_from_bytes,
)
from shardeddp.checkpoint.plain_file import (
    PLAIN_SUFFIX,
    carries_index,
    opened_file,
    read_index,
    require_data,
)
from shardeddp.checkpoint.remote import RemotePath
from shardeddp.checkpoint.schema import check_fields, count_in
from shardeddp.errors import CheckpointError, printable
from shardeddp.plan.layout import Interval
from shardeddp.wrap.tree import first_three

# -- Whole checkpoints in a directory, ordered by step

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


def content_id(path: Location) -> bytes:
    """An id of a checkpoint: 16 bytes of the content of its manifest, or of its archive's records.

    Zeros where neither can be read, and for files in stores.
    """
    try:
        with disk_errors("reading", path):
            directory = is_directory(path)
        if directory:
            with opened_file(path / MANIFEST) as (source, item):
                content = bytearray(item.nbytes)
                read_into(source, memoryview(content), 0)
        elif isinstance(path, RemotePath):
            return bytes(16)
        else:
            with opened_file(path) as (source, item):
                content = repr(records_of(source, item)).encode()
    except CheckpointError:
        return bytes(16)
    return bytes.fromhex(checksum(content))


def has_lost_manifest(path: Path) -> bool:
    """Whether a directory has what this package writes beside a manifest, and no manifest."""
    return os.path.lexists(path / PLACEMENT) and not os.path.lexists(path / MANIFEST)


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


def checkpoints_in(directory: StrPath | RemotePath) -> list[Location]:
    """The checkpoints in a directory, newest first; those that are not whole, or not ours, last."""
    found, folder = find_checkpoints(directory), location(directory)
    whole = [candidate.path for candidate in reversed(found.checkpoints)]
    if isinstance(folder, RemotePath):
        return whole + [folder / name for name in found.skipped]
    with disk_errors("looking for checkpoints in", folder):
        rest = [folder / name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    seen = {path.name for path in whole}
    return whole + [
        path
        for path in rest
        if path.name not in seen
        and (os.path.lexists(path / MANIFEST) or os.path.lexists(path / DCP_METADATA))
    ]


def what_lies_beside(path: Location) -> str:
    """End of an error about a path where there is nothing: the checkpoints beside it."""
    folder = path.parent
    if isinstance(folder, Path) and not folder.is_dir():
        return ", nor is there the directory that it would lie in"
    try:
        names = [each.name for each in checkpoints_in(folder)]
    except (CheckpointError, NotImplementedError):  # nobody may list it
        return ""
    if isinstance(folder, Path):  # those of other strategies, which say no step
        others = sorted(each.name for each in folder.glob(f"[!.]*{PLAIN_SUFFIX}"))
        names += [name for name in others if name not in names]
    return f"; beside it there are {first_three(names) if names else 'none'}"


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
    require_data(path)
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        # The file holds objects of others, so its step is unknown.
        return _Candidate(True, -1, True, path)
    check_fields(content, path)
    # Files that others have put together may leave it out.
    step = count_in(content, "global_step", -1)
    return _Candidate("optimizer_states" in content, step, True, path)
