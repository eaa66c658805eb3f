"""New files that appear whole or not at all: written beside their places under other names, flushed, then renamed."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import BinaryIO

from shardeddp.checkpoint.disk.durable import create_exclusively, disk_errors, exists, opened_directory, sync_directory
from shardeddp.errors import CheckpointError


@contextlib.contextmanager
def new_files(paths: Sequence[Path], force: bool = False) -> Generator[list[BinaryIO]]:
    """Write files; they get their names, one after the other, when the block ends, and are gone if it fails.

    Args:
        paths: Where they shall be, in existing directories.
        force: Replace what is there.

    Yields:
        Each open for writing and reading, in the order of ``paths``.

    Raises:
        CheckpointError: Something is there, or the system refuses.
    """
    _refuse_taken(paths, force)
    temporary = [path.with_name(f".tmp-file-{uuid.uuid4().hex}") for path in paths]
    files: list[BinaryIO] = []
    try:
        for path, hidden in zip(paths, temporary, strict=True):
            with disk_errors("making", path):
                # A result that its user asks for, so whoever may read it is the umask's to say.
                os.close(create_exclusively(hidden, "umask"))
                files.append(open(hidden, "r+b"))  # noqa: SIM115 - closed below
        with disk_errors("writing", paths[0]):
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        _refuse_taken(paths, force)
        for path, hidden in zip(paths, temporary, strict=True):
            with disk_errors("renaming a temporary file to", path):
                os.replace(hidden, path)
        for folder in {path.parent for path in paths}:
            with disk_errors("flushing", folder), opened_directory(folder) as descriptor:
                sync_directory(descriptor, "disk")
    finally:
        for file in files:
            with contextlib.suppress(OSError):  # what matters was flushed before
                file.close()
        for hidden in temporary:
            hidden.unlink(missing_ok=True)


def _refuse_taken(paths: Sequence[Path], force: bool) -> None:
    taken = [path for path in paths if exists(path)]
    folder = next((path for path in taken if path.is_dir() and not path.is_symlink()), None)
    if folder is not None:
        raise CheckpointError(f"{folder} is a directory, expected the path of a new file")
    if taken and not force:
        raise CheckpointError(f"{', '.join(map(str, taken))} exists already; --force replaces it")
    missing = next((path.parent for path in paths if not path.parent.is_dir()), None)
    if missing is not None:
        raise CheckpointError(f"there is no directory {missing}: make it first")
