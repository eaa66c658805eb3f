"""Cleaning: deletion of checkpoints and of leftovers of killed processes, and of nothing else."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardeddp.checkpoint.directory import (
    STAGED,
    LocalStaging,
    delete,
    delete_atomically,
    left_text,
    new_files,
    require_replaceable,
    stage,
)
from shardeddp.checkpoint.durable import (
    exists,
    held,
    kernel,
    kind_of,
    lock,
    make_directories,
    opened_directory,
    resolve,
    sync_directory,
)
from shardeddp.checkpoint.find import WORKING_NAME, carries_manifest
from shardeddp.checkpoint.full_read import carries_index
from shardeddp.checkpoint.location import (
    AnyPath,
    LocalPath,
    Location,
    disk_errors,
    location,
    preflight,
    why_outside,
)
from shardeddp.checkpoint.manifest import MANIFEST
from shardeddp.checkpoint.remote import RemotePath
from shardeddp.checkpoint.remote_directory import RemoteDirectory
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError

SILENT_S = 900.0
"""Time in seconds without a write after which an entry of another host is taken for abandoned."""


def remove(target: AnyPath, roots: Sequence[AnyPath] = (), *, written: bool = False) -> None:
    """Delete a checkpoint: a directory with our manifest, a plain file, or a link (not its target).

    Anything else is kept, with a warning that gives the reason: the path may come from a file of
    another author.

    Args:
        target: Path of the checkpoint, also in a store; it need not exist.
        roots: Directories, links resolved, one of which has to contain it. Its content has to be a
            checkpoint of this package.
        written: True if this run has written it: any location and any plain file are then allowed.
    """
    try:
        kept = directory_at(target).remove([*map(location, roots)], written)
    except FileNotFoundError:
        return
    except (OSError, ValueError, CheckpointError) as error:  # a name that no file system takes, too
        kept = str(error)
    if kept is not None:
        warnings.warn(f"The checkpoint {str(target)!r} was not deleted: {kept}", stacklevel=2)


def remove_leftovers(directory: AnyPath) -> tuple[str, ...]:
    """Remove leftovers of killed processes from a directory; files of living ones stay.

    In a store, only leftovers of a day ago and earlier. One process cleans up a directory at a
    time, the others return at once. The directory need not exist. Return sentences on failures.
    """
    return directory_at(directory).remove_leftovers()


def directory_at(path: AnyPath) -> LocalDirectory | RemoteDirectory:
    """Return the operations that save and delete checkpoints at a location."""
    place = location(path)
    if isinstance(place, RemotePath):
        return RemoteDirectory(place)
    return LocalDirectory(place)


@dataclass(frozen=True)
class LocalDirectory:
    """Checkpoint, or directory of some, in a file system."""

    path: Path

    def stage(self, nbytes: int, options: CheckpointOptions) -> LocalStaging:
        """Make the staging directory of a checkpoint, if there is room for it."""
        preflight(self.path.parent, nbytes)
        return stage(self.path, options.permissions or "private", options.durability)

    @contextlib.contextmanager
    def new_file(self, nbytes: int, options: CheckpointOptions) -> Generator[BinaryIO]:
        """Open a file in the same directory, which is renamed when the block ends."""
        permissions, durability = options.permissions or "umask", options.durability
        with disk_errors("making the directory of", self.path):
            make_directories(self.path.parent, permissions, durability)
        preflight(self.path.parent, nbytes)
        require_replaceable(self.path, plain=True)
        with new_files([self.path], True, permissions, durability) as (opened,):
            yield opened

    def remove(self, roots: Sequence[Location], written: bool) -> str | None:
        """Delete a directory with our manifest, a plain file, or a link."""
        parent, name = resolve(self.path)
        path = LocalPath(parent, name)
        mode = os.lstat(path).st_mode
        kept = _why_kept(path, name, mode, None if written else roots)
        if kept is not None:
            return kept
        if stat.S_ISDIR(mode):
            with opened_directory(parent) as descriptor:
                return next(iter(delete_atomically(path, descriptor, "disk", name)), None)
        os.unlink(path)
        return None

    def remove_leftovers(self) -> tuple[str, ...]:
        """Delete what killed processes have left in this directory, or give it its name back."""
        with disk_errors("cleaning up", self.path):
            return _remove_leftovers(self.path) if exists(self.path) else ()


def _remove_leftovers(directory: Path) -> tuple[str, ...]:
    with opened_directory(directory) as here:
        ours = lock(here)
        if ours is False:
            return ()  # another process is cleaning up
        if ours is None:
            return (f"{directory} was not cleaned up: its file system has no locks.",)
        cleanup = _Cleanup(directory, here)
        for name in sorted(os.listdir(here)):
            match = WORKING_NAME.fullmatch(name)
            if match is None:
                continue
            if match["kind"] != "tmp":
                cleanup.clean(name, match["name"], None)
            elif staged := STAGED.fullmatch(match["name"]):
                elsewhere = staged["kernel"] not in (None, kernel()[1])
                cleanup.clean(name, None, staged["host"] if elsewhere else None)
        return tuple(cleanup.left)


class _Cleanup:
    """Cleanup of a directory that is open and locked."""

    def __init__(self, directory: Path, descriptor: int) -> None:
        self._directory = directory
        self._descriptor = descriptor
        self.left: list[str] = []

    def _is_silent(self, path: Path, host: str) -> bool:
        """Return True if an entry of another host has had no write for ``SILENT_S``."""
        entries = [path, *path.iterdir()] if stat.S_ISDIR(os.lstat(path).st_mode) else [path]
        last = max(os.lstat(entry).st_mtime for entry in entries)
        silent = self._now() - last > SILENT_S
        if not silent:
            self.left.append(
                f"{path} is being written by the host {host}, or was left by it less than "
                f"{SILENT_S / 60:.0f} minutes ago: the host {kernel()[0]} leaves it alone. A later "
                f"start deletes it, if no process writes to it any more."
            )
        return silent

    def _now(self) -> float:
        """Return the time by the clock of the file system, which may differ from the host's."""
        with tempfile.TemporaryFile(dir=self._directory) as file:
            return os.fstat(file.fileno()).st_mtime

    def clean(self, name: str, replaced: str | None, host: str | None) -> None:
        """Delete an entry, or rename it back to the checkpoint that it was before a replacement.

        Args:
            name: Name of the entry.
            replaced: Name of the checkpoint that it was; None: it was none.
            host: Other host that made it; its lock may be visible there alone. None: this host.
        """
        path = self._directory / name
        try:
            with held(path) as abandoned:
                if not abandoned or (host is not None and not self._is_silent(path, host)):
                    return
                if replaced is None:
                    self.left += delete(path)
                elif exists(path.with_name(replaced)):
                    self.left += delete_atomically(path, self._descriptor, "disk", replaced)
                else:
                    os.rename(path, path.with_name(replaced))
                    sync_directory(self._descriptor, "disk")
        except FileNotFoundError:
            pass  # another process has deleted it
        except OSError as error:
            self.left.append(left_text(path, error))


def _why_kept(
    path: LocalPath, name: str, mode: int, roots: Sequence[Location] | None
) -> str | None:
    """Return the reason to keep an entry; None if it may be deleted."""
    if not name:
        return "the path does not end in a name."
    if roots is not None and (outside := why_outside(path, roots)):
        return outside
    if stat.S_ISDIR(mode) and not carries_manifest(path):
        return f"it is a directory without a {MANIFEST} of this package."
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        return f"it is {kind_of(mode)}, expected a directory, a file or a link."
    if roots is not None and not (carries_manifest(path) or carries_index(path)):
        return f"it is {kind_of(mode)} that this run has not written, and no checkpoint of this package."
    return None
