"""Finding checkpoints: directories by manifest, plain files, and the last one of some folders."""

from __future__ import annotations

import errno
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from shardeddp.checkpoint.durable import Source, read_into, read_text
from shardeddp.checkpoint.full_read import (
    PLAIN_SUFFIX,
    carries_index,
    opened_file,
    read_index,
    require_data,
)
from shardeddp.checkpoint.items import hexdigest, records_of
from shardeddp.checkpoint.location import AnyPath, Location, disk_errors, is_remote, location
from shardeddp.checkpoint.manifest import (
    DCP_METADATA,
    FORMAT,
    MANIFEST,
    PLACEMENT,
    Manifest,
    manifest_from_bytes,
)
from shardeddp.checkpoint.schema import check_entries, count_in
from shardeddp.errors import CheckpointError, first_three, printable
from shardeddp.plan.layout import Interval

# -- Whole checkpoints in a directory, ordered by step

WORKING_NAME = re.compile(
    r"\.(?:(?P<kind>tmp|old)-(?P<name>.+)-(?P<uuid>[0-9a-f]{32})|del-[0-9a-f]{32})", flags=re.DOTALL
)
"""Names of entries being written, replaced or deleted; never checkpoints, despite their content."""

_BEGINNING = re.compile(
    rb'\{"sha256":"[0-9a-f]{64}",\n"manifest":\{"format":"%s",' % FORMAT.encode()
)
_VERSION = re.compile(r"-v(\d{1,9})(?=\.|$)")


_NO_MANIFEST = {errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG}


def content_id(path: AnyPath) -> bytes:
    """Return 16 bytes that identify the content of a manifest, or of an archive's record list.

    They are zeros if neither can be read, and for files in stores.
    """
    path = location(path)
    try:
        with disk_errors("reading", path):
            directory = path.is_dir()
        if directory:
            with opened_file(path / MANIFEST) as (source, item):
                content = bytearray(item.nbytes)
                read_into(source, memoryview(content), 0)
        else:
            file = path.local_only("the records of an archive are listed in file systems")
            with opened_file(file) as (source, item):
                content = repr(records_of(source, item)).encode()
    except CheckpointError:
        return bytes(16)
    return bytes.fromhex(hexdigest(content))


def has_lost_manifest(path: Location) -> bool:
    """Return True if a directory has a placement of this package, but no manifest."""
    return path.holds(PLACEMENT) and not path.holds(MANIFEST)


def carries_manifest(path: AnyPath) -> bool:
    """Return True if a directory is a checkpoint of this package, even a damaged one.

    The beginning of its manifest decides.

    Raises:
        CheckpointError: Permissions, the disk, or the limit of open files prevent reading it, so
            its content is unknown.
    """
    file, beginning = location(path) / MANIFEST, bytearray(256)
    with disk_errors("reading", file):
        try:
            with file.open_source() as (source, _):
                read_into(source, memoryview(beginning), 0)
            return _BEGINNING.match(beginning) is not None
        except CheckpointError:
            return False
        except OSError as error:
            if error.errno in _NO_MANIFEST:
                return False
            raise


def read_manifest(path: AnyPath, part: tuple[int, int] = (0, 1)) -> Manifest:
    """Read the manifest of a checkpoint; check that its files are regular and have their sizes.

    Their content is not read. A plain file has an index instead of a manifest.

    Args:
        path: The checkpoint's directory, a plain file of this package, or a link to either.
        part: Share of the files to look for: ``(1, 3)`` is the second of three. Thousands of ranks
            that each look for thousands of files would keep a file system busy.

    Raises:
        CheckpointError: The checkpoint is not whole.
    """
    target = location(path)
    with disk_errors("reading the checkpoint", target):
        try:
            with target.files() as files:
                manifest = _manifest_in(files.open_source)
                listed = list(manifest.files.items())[part[0] :: part[1]]
                files.check_sizes(manifest.folder, {name: file.nbytes for name, file in listed})
        except (CheckpointError, NotADirectoryError) as error:
            if target.is_file():
                return read_index(target)
            raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    return manifest


def read_manifest_alone(path: Location) -> Manifest:
    """Read the manifest of a checkpoint without checking its files; an ``OSError`` stays one."""
    return _manifest_in(lambda name: (path / name).open_source())


def _manifest_in(opened: Callable[[str], AbstractContextManager[tuple[Source, int]]]) -> Manifest:
    try:
        with opened(MANIFEST) as (source, nbytes):
            return manifest_from_bytes(read_text(source, Interval(0, nbytes), MANIFEST))
    except FileNotFoundError:
        raise CheckpointError(
            f"it has no {MANIFEST}: either its save was cut short, or another tool wrote it (load "
            f"it as a foreign one)"
        ) from None


@dataclass(frozen=True, kw_only=True, order=True)
class Candidate:
    """Whole checkpoint of a directory; a greater one is later.

    The order is by step, then epoch, then the ``-v2`` that Lightning appends to names of later
    runs, then name (``last.ckpt`` after ``epoch=3.ckpt``). Time stamps are not used.
    """

    step: int
    epoch: int
    version: int
    name: str
    path: Location = field(compare=False)
    resumable: bool = field(compare=False)
    """True if it has optimizer states, not only weights."""

    called_last: bool = field(default=False, compare=False)
    """True if it is called the last one."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Checkpoints of a directory."""

    checkpoints: tuple[Candidate, ...]
    """Whole checkpoints, the latest last."""

    skipped: Mapping[str, str]
    """Reasons why entries that look like checkpoints are not whole, by name."""


def find_checkpoints(directory: AnyPath) -> Found:
    """Return the checkpoints of this package directly in a directory, ordered by step.

    In a store, names without a manifest or an index are no checkpoints: remains of interrupted
    saves are not mentioned.
    """
    candidates: list[Candidate] = []
    skipped: dict[str, str] = {}
    folder = location(directory)
    with disk_errors("looking for checkpoints in", folder):
        names = folder.names()
    for name in names:
        path = folder / name
        if WORKING_NAME.fullmatch(name) or not _looks_like_one(path):
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            skipped[name] = str(error)
            continue
        candidates.append(_candidate(path, manifest))
    return Found(checkpoints=tuple(sorted(candidates)), skipped=skipped)


def _candidate(path: Location, manifest: Manifest) -> Candidate:
    return Candidate(
        step=manifest.run.step,
        epoch=manifest.run.epoch,
        version=max(map(int, _VERSION.findall(path.name)), default=0),
        name=path.name,
        path=path,
        resumable=any(str(it.path[0]).startswith("optimizer_") for it in manifest.objects.values()),
    )


def checkpoints_in(directory: AnyPath) -> list[Location]:
    """Return checkpoints of a directory, newest first; damaged and foreign ones come last."""
    found, folder = find_checkpoints(directory), location(directory)
    whole = [candidate.path for candidate in reversed(found.checkpoints)]
    with disk_errors("looking for checkpoints in", folder):
        rest = [folder / name for name in folder.names() if not name.startswith(".")]
        return whole + [
            path
            for path in rest
            if path not in whole and (_looks_like_one(path) or path.holds(DCP_METADATA))
        ]


def what_lies_beside(path: Location) -> str:
    """Return the end of an error about a missing path: the checkpoints in its directory."""
    folder = path.parent
    try:
        with disk_errors("looking for checkpoints in", folder):
            if not folder.is_dir():
                return ", nor is there the directory that it would lie in"
            names = [each.name for each in checkpoints_in(folder)]
            # And those of other strategies, which have no index with a step.
            for name in folder.names():
                if name.endswith(PLAIN_SUFFIX) and not name.startswith(".") and name not in names:
                    names += [name] * (folder / name).is_committed(MANIFEST)
    except (CheckpointError, NotImplementedError):  # it cannot be listed
        return ""
    return f"; beside it there are {first_three(names) if names else 'none'}"


def _looks_like_one(path: Location) -> bool:
    with disk_errors("reading", path):
        if path.is_file():
            return path.suffix == PLAIN_SUFFIX and carries_index(path)
        named = path.suffix == PLAIN_SUFFIX and path.is_committed(MANIFEST)
        return named or (path / MANIFEST).is_taken()


def _is_of_other_tool(path: Location) -> bool:
    with disk_errors("reading", path):
        return path.holds(DCP_METADATA) and not (path / MANIFEST).is_taken()


# -- The last checkpoint: the usable one of the highest step, regardless of time stamps


def last_checkpoints(named: Iterable[str], folders: Iterable[str]) -> list[Location]:
    """Return checkpoints to resume from, the best first; one warning names the unusable ones.

    Args:
        named: Paths of checkpoints called "last", directories or files.
        folders: Directories with checkpoints of this package that count as well, unless they hold
            weights alone: a run that was killed between two saves of one step has only the first
            of them.

    Raises:
        CheckpointError: There are some, and none can be used.
    """
    candidates: dict[str, Candidate] = {}
    skipped: dict[str, str] = {}
    for path in named:
        try:
            candidates[_identity(path)] = replace(_called_last(path), called_last=True)
        except Exception as error:  # noqa: BLE001 - pickles raise anything
            skipped[path] = str(error) if str(path) in str(error) else f"{path}: {error}"
    for folder in folders:
        found, place = find_checkpoints(folder), location(folder)
        skipped |= {
            str(place / name): why
            for name, why in found.skipped.items()
            if not _is_of_other_tool(place / name)
        }
        for each in found.checkpoints:
            if each.resumable:
                candidates.setdefault(_identity(str(each.path)), each)
    if skipped:
        left = printable("; ".join(skipped.values()))
        warnings.warn(f"not whole, left aside: {left}", stacklevel=2)
    if skipped and not candidates:
        raise CheckpointError(
            f"no checkpoint is whole among {', '.join(skipped)}. Leave ckpt_path out to train from "
            f"the beginning"
        )
    found = sorted(
        candidates.values(),
        key=lambda it: (it.resumable, it.step, it.called_last, str(it.path)),
        reverse=True,
    )
    return [candidate.path for candidate in found]


def _identity(path: str) -> str:
    return str(location(path)) if is_remote(path) else os.path.realpath(path)


def _called_last(path: str) -> Candidate:
    target = location(path)
    if target.is_file() and not (carries_manifest(target) or carries_index(target)):
        return _candidate_of_other_tool(target)
    return _candidate(target, read_manifest(target))


def _candidate_of_other_tool(place: Location) -> Candidate:
    unknown = Candidate(step=-1, epoch=0, version=0, name=place.name, path=place, resumable=True)
    try:
        path = place.local_only("the steps of other tools' files are read in file systems")
    except CheckpointError:
        return unknown
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is neither a sharded checkpoint nor a file that torch.save wrote"
        )
    require_data(path)
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        return unknown  # the file has objects that are not data
    check_entries(content, path)
    # Files of other tools may leave it out.
    step = count_in(content, "global_step", -1)
    return replace(unknown, resumable="optimizer_states" in content, step=step)
