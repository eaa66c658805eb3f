"""Staging: the interface by which checkpoints are saved and deleted, in any location."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

from shardeddp.checkpoint.location import Location
from shardeddp.checkpoint.manifest import Manifest
from shardeddp.config import CheckpointOptions


class Staging(Protocol):
    """Checkpoint being written; :meth:`commit` or :meth:`discard` ends it."""

    @property
    def path(self) -> Location:
        """Directory in which all ranks make its files until the commit."""
        ...

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Make a file of the checkpoint with this content."""
        ...

    def commit(self, manifest: Manifest) -> tuple[str, ...]:
        """Write the manifest and replace the target in one step, then delete the former one.

        Returns:
            Harmless limitations and remains, as sentences to be logged once.
        """
        ...

    def discard(self) -> None:
        """Delete the files, if they were not committed; for error handling, so no OSError."""
        ...


class CheckpointDirectory(Protocol):
    """Location of a checkpoint, or of several, to be written to; see ``clean.directory_at``."""

    def stage(self, nbytes: int, options: CheckpointOptions) -> Staging:
        """Begin a checkpoint here, which replaces an existing one or a plain ``.ckpt`` file.

        Raises:
            CheckpointError: Anything else lies here, or there is no room for ``nbytes``.
        """
        ...

    def new_file(self, nbytes: int, options: CheckpointOptions) -> AbstractContextManager[BinaryIO]:
        """Open a file that replaces a checkpoint here when the block ends; deleted on failure."""
        ...

    def remove(self, roots: Sequence[Location], written: bool) -> str | None:
        """Delete the checkpoint here; return the reason if it is kept.

        Args:
            roots: Directories, one of which has to contain it.
            written: True if this run has written it: it may then be anywhere.
        """
        ...

    def remove_leftovers(self) -> tuple[str, ...]:
        """Delete what killed processes have left among the checkpoints in here.

        Returns:
            Sentences on failures.
        """
        ...


def why_outside(place: Location, roots: Sequence[Location]) -> str | None:
    """Return the reason to keep a checkpoint that lies in none of these directories."""
    if any(place.parent.is_relative_to(str(root.real())) for root in roots):
        return None
    return f"it lies outside of {' and '.join(map(str, roots)) or 'all directories'}."
