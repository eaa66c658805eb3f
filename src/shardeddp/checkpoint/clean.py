"""Cleaning: deletion of checkpoints and of leftovers of killed processes, and of nothing else."""

from __future__ import annotations

import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

from shardeddp.checkpoint.directory import MARKERS, bury, left_text
from shardeddp.checkpoint.durable import (
    Durability,
    StrPath,
    delete_tree,
    disk_errors,
    exists,
    held,
    kind_of,
    lock,
    opened_directory,
    resolve,
    sync_directory,
)
from shardeddp.checkpoint.find import PLAIN_SUFFIX, WORKING_NAME, carries_manifest
from shardeddp.checkpoint.manifest import MANIFEST


def remove(target: StrPath, root: StrPath | None = None, durability: Durability = "disk") -> bool:
    """Delete a checkpoint: a directory with our manifest, a plain file, or a link (not its target).

    Anything else is left, with a warning that says why: the path may come from a file that somebody
    else wrote.

    Args:
        target: The checkpoint; nothing happens if it does not exist.
        root: It has to lie in this directory, links resolved. Without, a plain file has to be named
            ``*.ckpt``.
        durability: ``process`` flushes nothing.

    Returns:
        Whether this call has taken it away.
    """
    try:
        parent, name = resolve(target)
        path = parent / name
        mode = os.lstat(path).st_mode
        kept = _why_kept(path, name, mode, None if root is None else Path(os.path.realpath(root)))
        if kept is None and stat.S_ISDIR(mode):
            with opened_directory(parent) as descriptor:
                kept = next(iter(bury(path, descriptor, durability)), None)
        elif kept is None:
            os.unlink(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:  # ValueError: a name that no file system takes
        kept = str(error)
    if kept is not None:
        warnings.warn(f"The checkpoint {os.fspath(target)!r} was not deleted: {kept}", stacklevel=2)
    return kept is None


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What a sweep has done."""

    removed: tuple[str, ...] = ()
    """Names of entries that are gone."""

    restored: tuple[str, ...] = ()
    """Names of checkpoints that are there again."""

    left: tuple[str, ...] = ()
    """Sentences about what could not be done; what other processes are writing is not mentioned."""


def sweep(directory: StrPath, durability: Durability = "disk") -> Swept:
    """Remove leftovers of killed processes from a directory; what a living one writes stays.

    Only one process sweeps a directory at a time, the others return at once.

    Args:
        directory: Where checkpoints lie; it need not exist.
        durability: ``process`` flushes nothing.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    with disk_errors("cleaning up", directory):
        return _sweep(Path(directory), durability) if exists(directory) else Swept()


def _sweep(directory: Path, durability: Durability) -> Swept:
    with opened_directory(directory) as here:
        ours = lock(here)
        if not ours:
            why = "another process is at it" if ours is False else "its file system has no locks"
            return Swept(left=(f"{directory} was not cleaned up: {why}.",))
        sweeper = _Sweeper(directory, here, durability)
        for name in sorted(os.listdir(here)):
            if match := WORKING_NAME.fullmatch(name):
                sweeper.clean(name, match["name"] if match["kind"] == "old" else None)
        return Swept(
            removed=tuple(sweeper.removed),
            restored=tuple(sweeper.restored),
            left=tuple(sweeper.left),
        )


class _Sweeper:
    """One sweep of a directory that is open and locked."""

    def __init__(self, directory: Path, descriptor: int, durability: Durability) -> None:
        self._directory = directory
        self._descriptor = descriptor
        self._durability: Durability = durability
        self.removed: list[str] = []
        self.restored: list[str] = []
        self.left: list[str] = []

    def clean(self, name: str, replaced: str | None) -> None:
        """Delete an entry, or rename it to the checkpoint that it was before it was replaced."""
        path = self._directory / name
        try:
            with held(path) as abandoned:
                if not abandoned:
                    return
                if replaced is None:
                    delete_tree(path, MARKERS)
                elif exists(path.with_name(replaced)):
                    self.left += bury(path, self._descriptor, self._durability)
                else:
                    os.rename(path, path.with_name(replaced))
                    sync_directory(self._descriptor, self._durability)
                    self.restored.append(replaced)
                    return
            self.removed.append(name)
        except FileNotFoundError:
            pass  # whoever deletes it has come first
        except OSError as error:
            self.left.append(left_text(path, error))


def _why_kept(path: Path, name: str, mode: int, root: Path | None) -> str | None:
    """Why something is not ours to delete."""
    if not name:
        return "the path does not end in a name."
    if root is not None and not path.parent.is_relative_to(root):
        return f"it lies outside of {root}."
    if stat.S_ISDIR(mode) and not carries_manifest(path):
        return f"it is a directory without a {MANIFEST} of this package."
    if stat.S_ISREG(mode) and root is None and path.suffix != PLAIN_SUFFIX:
        return f"it is a file, expected one named *{PLAIN_SUFFIX}."
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        return f"it is {kind_of(mode)}, expected a directory, a file or a link."
    return None
