"""Locations: paths of checkpoints with one interface, in file systems and in object stores."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import ClassVar, TypeAlias

from shardeddp.checkpoint.durable import (
    Durability,
    Permissions,
    StrPath,
    create_exclusively,
    free_nbytes,
    kind_of,
    open_regular,
    opened_directory,
    sync_file,
)
from shardeddp.checkpoint.remote import RemotePath
from shardeddp.errors import CheckpointError

_LOCAL = ("file://", "file:", "local://", "local:")


def is_remote(path: StrPath) -> bool:
    """Return True if a path is a URL (``s3://bucket/name``), which only a client can open."""
    return "://" in local_path(path)


def local_path(path: StrPath) -> str:
    """Return a path without a leading ``file://``, which fsspec drops as well.

    Other paths are unchanged.
    """
    text = os.fspath(path)
    return next((text.removeprefix(scheme) for scheme in _LOCAL if text.startswith(scheme)), text)


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class LocalPath(PosixPath):
    """Path in a file system."""

    transient: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors of a write that is then repeated from its start."""

    num_readers: ClassVar[int] = 8
    """Files that a verification reads at a time, each in one thread."""

    def is_taken(self) -> bool:
        """Return True if the name is taken, also by a dangling link."""
        return os.path.lexists(self)

    def is_committed(self, marker: str) -> bool:
        """Return True if the name is taken: a commit is what gives it the name."""
        return self.is_taken()

    def is_archive(self) -> bool:
        """Return True for a zip archive."""
        return zipfile.is_zipfile(self)

    def kind(self) -> str:
        """Return the kind of the entry, of a link the kind of its target."""
        if not self.is_taken():
            return "nothing"
        return kind_of((self.stat() if self.exists() else self.lstat()).st_mode)

    def holds(self, name: str) -> bool:
        """Return True if this directory has an entry of this name."""
        return os.path.lexists(self / name)

    def names(self) -> list[str]:
        """Return the names in this directory, sorted; none if it does not exist."""
        return sorted(os.listdir(self)) if os.path.lexists(self) else []

    def kinds(self) -> dict[str, str]:
        """Return the kinds of all entries; links are not followed."""
        return {name: kind_of(os.lstat(self / name).st_mode) for name in self.names()}

    def real(self) -> LocalPath:
        """Return the path with its links resolved."""
        return LocalPath(os.path.realpath(self))

    def reading_ahead(self) -> LocalPath:
        """Return the path as it is: the system reads ahead."""
        return self

    def open_source(self) -> AbstractContextManager[tuple[int, int]]:
        """Open a regular file; yield its descriptor and size."""
        return open_regular(self)

    @contextlib.contextmanager
    def files(self) -> Generator[LocalFiles]:
        """Open this directory; its files stay the same if another one gets the name."""
        with opened_directory(self) as descriptor:
            yield LocalFiles(descriptor)

    @contextlib.contextmanager
    def create(
        self, nbytes: int, permissions: Permissions, durability: Durability
    ) -> Generator[int]:
        """Make a file, which must not exist, and flush it at the end of the block."""
        descriptor = create_exclusively(self, permissions)
        try:
            yield descriptor
            with disk_errors("flushing", self):
                sync_file(descriptor, durability)
        except BaseException:
            os.close(descriptor)
            raise
        with disk_errors("flushing", self):
            os.close(descriptor)

    def local_only(self, reason: str) -> Path:
        """Return the plain path, for code that reads file systems."""
        return Path(self)

    def local_copy(self, require_room: Callable[[str, int], None]) -> AbstractContextManager[str]:
        """Yield the path itself."""
        return contextlib.nullcontext(str(self))

    def advice(self, error: OSError, nbytes: int | None) -> str:
        """Return advice on space, names and permissions."""
        if error.errno in _FULL:
            needed = "" if nbytes is None else f"{nbytes:,} bytes were needed, "
            return f"; {needed}{_free_text(self)}. Make room there, or save to another file system"
        if error.errno == errno.ENAMETOOLONG:
            return (
                "; while it is being written a checkpoint's name is 38 bytes longer. Take a "
                "shorter name"
            )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return ". The directory must be writable for this process"
        if error.errno == errno.EEXIST:
            return (
                ". Only one writer may make a file, and nothing is overwritten: remove it, or take "
                "another name"
            )
        return ""


@dataclass(frozen=True)
class LocalFiles:
    """Files of one directory that is open."""

    descriptor: int

    def open_source(self, name: str, /) -> AbstractContextManager[tuple[int, int]]:
        """Open a regular file."""
        return open_regular(name, self.descriptor)

    def check_sizes(self, folder: str, sizes: Mapping[str, int]) -> None:
        """Refuse files that are missing, no regular ones, or have other sizes."""
        for name, nbytes in sizes.items():
            file = os.path.join(folder, name)
            try:
                found = os.stat(file, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                raise CheckpointError(
                    f"{file} is missing, expected a file of {nbytes:,} bytes"
                ) from None
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(
                    f"{file} is {kind_of(found.st_mode)}, expected an ordinary file"
                )
            if found.st_size != nbytes:
                raise CheckpointError(f"{file} has {found.st_size:,} bytes, expected {nbytes:,}")


Location: TypeAlias = LocalPath | RemotePath
"""Path of a checkpoint, or of a file of it, in a file system or in a store."""

AnyPath: TypeAlias = "StrPath | RemotePath"
"""Location, or its text or path."""


def location(path: AnyPath) -> Location:
    """Return a local path or an address in a store, by the form of ``path``."""
    if not isinstance(path, (str, os.PathLike)):
        return path
    text = local_path(path)
    return RemotePath(text) if is_remote(text) else LocalPath(text)


@contextlib.contextmanager
def disk_errors(doing: str, path: AnyPath, nbytes: int | None = None) -> Generator[None]:
    """Turn system errors inside into a :class:`CheckpointError` with the path and advice.

    The path completes ``doing``, a noun phrase: ``writing``. ``nbytes`` were to be written, if
    known.
    """
    try:
        yield
    except OSError as error:
        advice = location(path).advice(error, nbytes)
        raise CheckpointError(
            f"{doing} {path} failed: {error.strerror or error}{advice}."
        ) from error


def preflight(parent: StrPath, nbytes: int) -> None:
    """Refuse a save that the file system has no room for, before anything is written.

    A replaced checkpoint is deleted after the save, so it makes no room. The directory need not
    exist yet.
    """
    with disk_errors("asking for the free space of", parent):
        free = free_nbytes(_existing(parent))
    if free is not None and free < nbytes:
        raise CheckpointError(
            f"not enough space for a checkpoint in {os.fspath(parent)}: {nbytes:,} bytes are "
            f"needed, {free:,} are free (a checkpoint is replaced only when the new one is whole, "
            f"so both need room). Make room there, keep fewer checkpoints, or save to another file "
            f"system."
        )


def why_outside(place: Location, roots: Sequence[Location]) -> str | None:
    """Return the reason to keep a checkpoint that lies in none of these directories."""
    if any(place.parent.is_relative_to(str(root.real())) for root in roots):
        return None
    return f"it lies outside of {' and '.join(map(str, roots)) or 'all directories'}."


def _existing(path: StrPath) -> str:
    """Return the nearest existing directory at or above a path."""
    here = os.path.abspath(path)
    while not os.path.isdir(here):
        here = os.path.dirname(here)
    return here


def _free_text(path: StrPath) -> str:
    try:
        free = free_nbytes(_existing(path))
    except OSError:
        free = None
    return "the file system or the quota is full" if free is None else f"{free:,} are free"
