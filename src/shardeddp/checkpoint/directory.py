"""Checkpoint directories and files that appear whole or not at all.

They are written under a temporary name in the same directory, flushed, and renamed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import stat
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardeddp.checkpoint.durable import (
    OPEN_DIRECTORY,
    Durability,
    Permissions,
    StrPath,
    close_directory,
    create_exclusively,
    exists,
    held,
    kernel,
    kind_of,
    lock,
    make_directories,
    make_directory,
    opened_directory,
    resolve,
    swap,
    sync_directory,
    sync_file,
    write_buffers,
)
from shardeddp.checkpoint.find import WORKING_NAME, carries_manifest
from shardeddp.checkpoint.full_read import PLAIN_SUFFIX, is_archive_of_torch
from shardeddp.checkpoint.location import AnyPath, LocalPath, disk_errors, location
from shardeddp.checkpoint.manifest import (
    DCP_METADATA,
    LIGHTNING_META,
    MANIFEST,
    PLACEMENT,
    STATE,
    Manifest,
    is_part,
    manifest_to_bytes,
)
from shardeddp.checkpoint.remote import Upload
from shardeddp.errors import CheckpointError, first_three

# -- Commit of a checkpoint directory
#
# [Note: how a checkpoint is committed] It is written into ``.tmp-checkpoint-<uuid>`` in the
# directory of its target, flushed, and gets the target's name in one step: by a rename if the name
# is free, else by a swap of the two names. The replaced checkpoint is then called ``.del-<uuid>``
# and deleted, manifest first; files in it that belong to no checkpoint are kept. Where the system
# cannot swap names, the old one is called ``.old-<name>-<uuid>`` between two renames. A process
# that dies at any point leaves the old checkpoint or the new one, and entries with names of these
# three forms. A cleanup gives ``.old`` its name back if that is free, and deletes the rest.
#
# The process that writes a staging directory holds a lock on it (on the directory itself: no lock
# file remains). The kernel frees it however that process ends, so a staging directory that can be
# locked is abandoned. A process id would be no such proof: ids are used again, and differ between
# containers. Not every file system shares locks between hosts. So names of staging entries contain
# the host and its kernel, and a cleanup on another host leaves entries that were written to in the
# last quarter of an hour, by the clock of the file system.

STAGED = re.compile(
    r"(?:checkpoint|file)(?:-(?P<host>[\w.]{1,63})-(?P<kernel>[0-9a-f]{8}))?", re.ASCII
)
"""Kind, host and kernel in the name of a working entry (after ``.tmp-``)."""

_MARKERS = (MANIFEST, LIGHTNING_META, DCP_METADATA)
"""Files that identify a checkpoint; deleted first, so that its remains are not taken for one."""


@dataclass
class LocalStaging:
    """Checkpoint being written to a file system."""

    target: Path
    """Path after the commit; absolute, with the links of its parent resolved."""

    path: LocalPath
    permissions: Permissions
    durability: Durability

    _descriptor: int | None
    """Descriptor of ``path``; its lock proves that the writer is alive. None: it was ended."""

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Make a file of the checkpoint with this content."""
        permissions, durability = self.permissions, self.durability
        with new_part(self.path, name, len(content), permissions, durability) as file:
            write_buffers(file, [content])

    def commit(self, manifest: Manifest) -> tuple[str, ...]:
        """Give the checkpoint the name of its target in one step, then delete the replaced one.

        Success closes the staging. After a failure the target is as before, unless the file system
        refuses that as well, and the staging is still to be discarded. Return harmless limitations
        of the file system that were met, as sentences to be logged once.
        """
        target, path, descriptor = self.target, self.path, self._descriptor
        if descriptor is None:
            raise RuntimeError(
                f"the staging directory of {target} was committed or discarded before; stage anew"
            )
        self.put(MANIFEST, manifest_to_bytes(manifest))
        notes: list[str] = []
        with (
            disk_errors("committing", target),
            opened_directory(target.parent) as parent,
            held(target),
        ):
            require_replaceable(target)
            can_sync = sync_directory(descriptor, self.durability)
            replaced = put_in_place(path, target)
            try:
                can_sync = sync_directory(parent, self.durability) and can_sync
            except OSError:
                with contextlib.suppress(OSError):
                    _put_back(path, target, replaced)
                raise
            self.close()
            if not can_sync:
                notes.append(
                    "This file system cannot flush directories: a loss of power may undo the newest "
                    "saves."
                )
            if replaced is not None:
                if replaced != path:
                    notes.append(
                        "This file system cannot swap two names: replacing a checkpoint takes two "
                        "renames."
                    )
                notes += delete_atomically(replaced, parent, self.durability, target.name)
        return tuple(notes)

    def discard(self) -> None:
        """Delete the directory, if it was not committed. The next cleanup tries again."""
        try:
            with contextlib.suppress(OSError):
                delete(self.path)
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock; further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            close_directory(descriptor)


def stage(
    target: StrPath, permissions: Permissions = "private", durability: Durability = "disk"
) -> LocalStaging:
    """Make the staging directory of a checkpoint, and missing directories above it.

    A checkpoint, a plain ``.ckpt`` file or a link at the target will be replaced; all else is
    refused.
    """
    with disk_errors("making a temporary directory for", target):
        parent, name = resolve(target)
        if not name or WORKING_NAME.fullmatch(name):
            raise ValueError(
                f"expected the path of a new checkpoint, found {os.fspath(target)!r}: name it "
                f"otherwise"
            )
        require_replaceable(parent / name)
        make_directories(parent, permissions, durability)
        while True:
            path = _staging(parent, "checkpoint")
            descriptor = _make_locked(path, permissions)
            if descriptor is not None:
                return LocalStaging(parent / name, path, permissions, durability, descriptor)


@contextlib.contextmanager
def new_part(
    folder: AnyPath,
    name: str,
    nbytes: int,
    permissions: Permissions = "private",
    durability: Durability = "disk",
) -> Generator[int | Upload]:
    """Make a file of a checkpoint from the bytes, about ``nbytes``, that are written in the block.

    Any rank may do so, in the staging directory or in the folder of a store.
    """
    if not is_part(name):
        raise ValueError(
            f"expected {MANIFEST}, {PLACEMENT}, {STATE}, {DCP_METADATA}, {LIGHTNING_META} or "
            f"__N_M.distcp, got {name!r}"
        )
    path = location(folder) / name
    with (
        disk_errors("writing", path, nbytes),
        path.create(nbytes, permissions, durability) as file,
    ):
        yield file


def _staging(folder: Path, kind: str) -> LocalPath:
    """Return a new name for an entry that this host writes.

    It does not contain the target's name: Lightning looks for version numbers in every entry whose
    name contains that of its own checkpoints.
    """
    return LocalPath(folder, f".tmp-{kind}-{'-'.join(kernel())}-{uuid.uuid4().hex}")


def _make_locked(path: Path, permissions: Permissions) -> int | None:
    """Make and lock a directory; None if a cleanup has locked or deleted it in between."""
    make_directory(path, permissions)
    try:
        descriptor = os.open(path, OPEN_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if lock(descriptor) is not False and exists(path):
            return descriptor
    except OSError:
        close_directory(descriptor)
        raise
    close_directory(descriptor)
    return None


def require_replaceable(target: Path, *, plain: bool = False) -> None:
    """Refuse to replace an entry that may not be a checkpoint.

    A plain file may replace further files; :func:`new_files` refuses directories for it.
    """
    try:
        found = os.lstat(target)
    except FileNotFoundError:
        return
    mode = found.st_mode
    with disk_errors("reading", target):
        if stat.S_ISREG(mode):
            fits = target.suffix == PLAIN_SUFFIX or (
                plain and (not found.st_size or is_archive_of_torch(target))
            )
        elif stat.S_ISDIR(mode):
            fits = plain or carries_manifest(target) or not os.listdir(target)
        else:
            fits = stat.S_ISLNK(mode)
    if not fits:
        other = "a file of torch.save" if plain else f"a sharded one (a directory with {MANIFEST})"
        raise CheckpointError(
            f"{target} is {kind_of(mode)} that is no checkpoint of this package, expected nothing "
            f"there, {other}, or a file named *{PLAIN_SUFFIX}. Move it, or save elsewhere."
        )


def put_in_place(path: Path, target: Path) -> Path | None:
    """Rename a finished entry to its target; return the path of the replaced one, if any."""
    if not exists(target):
        os.rename(path, target)
        return None
    if swap(path, target):
        return path
    replaced = path.with_name(f".old-{target.name}-{path.name[-32:]}")
    os.rename(target, replaced)
    try:
        os.rename(path, target)
    except OSError:
        os.rename(replaced, target)
        raise
    return replaced


def _put_back(path: Path, target: Path, replaced: Path | None) -> None:
    """Undo :func:`put_in_place`."""
    if replaced == path:
        swap(path, target)
    elif replaced is None:
        os.rename(target, path)
    elif exists(replaced):
        os.rename(target, path)
        os.rename(replaced, target)


def delete_atomically(
    path: Path, parent: int, durability: Durability, name: str
) -> tuple[str, ...]:
    """Delete a checkpoint so that it is never incomplete under its name.

    Return sentences on remains; the next cleanup tries again. ``parent`` is the descriptor of the
    directory around it, ``name`` the name that it had before it was replaced: other files in it are
    kept in a directory of that name or a similar one.
    """
    try:
        renamed = path.with_name(f".del-{uuid.uuid4().hex}")
        os.rename(path, renamed)
        sync_directory(parent, durability)
        others = delete_parts(renamed)
        if not others:
            return ()
        kept = _free(path.with_name(name))
        os.rename(renamed, kept)
    except FileNotFoundError:
        return ()  # a cleanup has come first
    except OSError as error:
        return (left_text(path, error),)
    return (f"{first_three(others)} in {name} is no part of a checkpoint, and is left in {kept}.",)


def delete(path: Path) -> tuple[str, ...]:
    """Delete remains of an interrupted save or deletion; return a sentence on other files there."""
    others = delete_parts(path)
    return (
        (f"{first_three(others)} in {path} is no part of a checkpoint, and is left.",)
        if others
        else ()
    )


def delete_parts(path: Path) -> tuple[str, ...]:
    """Delete a file, a link, or a directory with its checkpoint files; links are not followed.

    Return the names of all other entries of the directory, which is then kept with them.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return ()
    if not stat.S_ISDIR(mode):
        os.unlink(path)
        return ()
    for name in dict.fromkeys((*_MARKERS, *filter(is_part, os.listdir(path)))):
        with contextlib.suppress(FileNotFoundError):
            part = os.path.join(path, name)
            if not stat.S_ISDIR(os.lstat(part).st_mode):
                os.unlink(part)
    # On NFS, files that are still open have other names for a while.
    others = tuple(sorted(name for name in os.listdir(path) if not name.startswith(".nfs")))
    if not others:
        os.rmdir(path)
    return others


def _free(path: Path) -> Path:
    """Return an unused path: this one, or a similar one."""
    numbers = itertools.count(1)
    found = path
    while exists(found):
        found = path.with_name(f"{path.name}-kept-{next(numbers)}")
    return found


def left_text(path: Path, error: OSError) -> str:
    """Return the message on an entry that could not be deleted."""
    return f"{path} could not be deleted ({error.strerror or error}); the next start tries again."


# -- Atomic creation of files
#
# A file is written in the same directory under another name, flushed, then renamed.

log = logging.getLogger(__name__)


@contextlib.contextmanager
def new_files(
    paths: Sequence[Path],
    force: bool = False,
    permissions: Permissions = "umask",
    durability: Durability = "disk",
) -> Generator[list[BinaryIO]]:
    """Write files that are renamed, one by one, at the end of the block, or deleted if it fails.

    ``force`` replaces an existing file, link or sharded checkpoint. The files are results that
    users ask for, so the umask decides on permissions by default. They are open for writing and
    reading.
    """
    _refuse_taken(paths, force)
    hidden: list[Path] = []
    files: list[BinaryIO] = []
    try:
        for path in paths:
            with disk_errors("making", path):
                files.append(_open_locked(path.parent, permissions))
                hidden.append(Path(files[-1].name))
        with disk_errors("writing", paths[0]):
            yield files
            for file in files:
                file.flush()
                sync_file(file.fileno(), durability)
        _refuse_taken(paths, force)
        for path, working in zip(paths, hidden, strict=True):
            with disk_errors("renaming a temporary file to", path):
                _rename(working, path, durability)
        for folder in {path.parent for path in paths}:
            with disk_errors("flushing", folder), opened_directory(folder) as descriptor:
                sync_directory(descriptor, durability)
    finally:
        for file in files:
            with contextlib.suppress(OSError):  # the data was flushed before
                file.close()
        for working in hidden:
            # A replaced checkpoint is a directory, and is left.
            with contextlib.suppress(IsADirectoryError, PermissionError):
                working.unlink(missing_ok=True)


def _open_locked(folder: Path, permissions: Permissions) -> BinaryIO:
    """Open a new file under a working name, locked against cleanups by other processes."""
    while True:
        path = _staging(folder, "file")
        os.close(create_exclusively(path, permissions))
        try:
            file = open(path, "r+b")  # noqa: SIM115 - the caller closes it
        except FileNotFoundError:
            continue  # a cleanup has come in between
        if lock(file.fileno()) is not False and exists(path):
            return file
        file.close()


def _rename(working: Path, path: Path, durability: Durability) -> None:
    if not path.is_dir() or path.is_symlink():
        os.replace(working, path)
        return
    with opened_directory(path.parent) as parent, held(path):
        replaced = put_in_place(working, path)
        sync_directory(parent, durability)
        for note in (
            () if replaced is None else delete_atomically(replaced, parent, durability, path.name)
        ):
            log.warning(note)


def _refuse_taken(paths: Sequence[Path], force: bool) -> None:
    taken = [path for path in paths if exists(path)]
    folders = (path for path in taken if path.is_dir() and not path.is_symlink())
    folder = next((path for path in folders if not carries_manifest(path)), None)
    if folder is not None:
        raise CheckpointError(
            f"{folder} is a directory, expected the path of a new file, or a sharded checkpoint to "
            f"replace"
        )
    if taken and not force:
        raise CheckpointError(f"{', '.join(map(str, taken))} exists already; --force replaces it")
    missing = next((path.parent for path in paths if not path.parent.is_dir()), None)
    if missing is not None:
        raise CheckpointError(f"there is no directory {missing}: make it first")
