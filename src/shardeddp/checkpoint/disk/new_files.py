"""New files that appear whole or not at all: written beside their places under other names, flushed, then renamed."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import BinaryIO

from shardeddp.checkpoint.disk.directory import bury, is_sharded, put_in_place
from shardeddp.checkpoint.disk.durable import (
    Durability,
    Permissions,
    create_exclusively,
    disk_errors,
    exists,
    held,
    lock,
    opened_directory,
    sync_directory,
    sync_file,
)
from shardeddp.errors import CheckpointError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def new_files(
    paths: Sequence[Path], force: bool = False, permissions: Permissions = "umask", durability: Durability = "disk"
) -> Generator[list[BinaryIO]]:
    """Write files; they get their names, one after the other, when the block ends, and are gone if it fails.

    Args:
        paths: Where they shall be, in existing directories.
        force: Replace what is there: a file, a link, or a sharded checkpoint.
        permissions: Of the files. They are results that their users ask for, so the umask says who may read them.
        durability: ``process`` flushes nothing.

    Yields:
        Each open for writing and reading, in the order of ``paths``.

    Raises:
        CheckpointError: Something is there, or the system refuses.
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
            with contextlib.suppress(OSError):  # what matters was flushed before
                file.close()
        for working in hidden:
            with contextlib.suppress(IsADirectoryError, PermissionError):  # a replaced checkpoint that is left
                working.unlink(missing_ok=True)


def _open_locked(folder: Path, permissions: Permissions) -> BinaryIO:
    """A new file under a working name, locked: a sweep by another process leaves it alone."""
    while True:
        path = folder / f".tmp-file-{uuid.uuid4().hex}"
        os.close(create_exclusively(path, permissions))
        try:
            file = open(path, "r+b")  # noqa: SIM115 - the caller closes it
        except FileNotFoundError:
            continue  # a sweep has come in between
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
        for note in () if replaced is None else bury(replaced, parent, durability):
            log.warning(note)


def _refuse_taken(paths: Sequence[Path], force: bool) -> None:
    taken = [path for path in paths if exists(path)]
    folders = (path for path in taken if path.is_dir() and not path.is_symlink())
    folder = next((path for path in folders if not is_sharded(path)), None)
    if folder is not None:
        raise CheckpointError(
            f"{folder} is a directory, expected the path of a new file, or a sharded checkpoint to replace"
        )
    if taken and not force:
        raise CheckpointError(f"{', '.join(map(str, taken))} exists already; --force replaces it")
    missing = next((path.parent for path in paths if not path.parent.is_dir()), None)
    if missing is not None:
        raise CheckpointError(f"there is no directory {missing}: make it first")
