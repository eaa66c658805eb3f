"""Checkpoint directories in object stores: a folder for each save, and the manifest as last object."""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from shardeddp.checkpoint.find import carries_manifest, read_manifest_alone
from shardeddp.checkpoint.full_read import PLAIN_SUFFIX
from shardeddp.checkpoint.location import Location, disk_errors, preflight, why_outside
from shardeddp.checkpoint.manifest import FOLDER, MANIFEST, Manifest, is_part, manifest_to_bytes
from shardeddp.checkpoint.remote import READ_ONLY, RemotePath
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError, first_three

# [Note: how a checkpoint is committed to a store] ``last.ckpt`` is a prefix of names there: of
# ``last.ckpt/manifest.json``, and of the manifest's files in ``last.ckpt/<uuid>/``. Every save has
# a ``<uuid>`` of its own, under which each rank uploads its file. When all have done so, rank 0
# lists the uploaded files and puts the manifest: one object, which appears, or replaces the former
# one, in one step. After that the folder of the former one is deleted.
#
# A process that dies at any point leaves the old checkpoint or the new one, and folders that no
# manifest names. No lock can show that a folder is still written to, so a cleanup takes it for
# abandoned when its newest object is a day old. Interrupted multipart uploads have no name;
# lifecycle rules of the bucket delete them.

_DELETIONS = 16
"""Objects deleted at a time."""

ABANDONED_S = 24 * 3600.0
"""Age in seconds of the newest object after which a folder that no manifest names is deleted."""


@dataclass
class RemoteStaging:
    """Checkpoint being written to a store."""

    target: RemotePath
    """Path of the checkpoint after the commit."""

    path: RemotePath
    """Folder of its files, where they stay after the commit."""

    attempted: bool = False
    """True once the manifest may exist: from then on none of its files is deleted."""

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Make a file of the checkpoint with this content."""
        with disk_errors("writing", self.path / name):
            (self.path / name).put(bytes(content))

    def commit(self, manifest: Manifest) -> tuple[str, ...]:
        """Put the manifest of a written checkpoint, then delete the one that it replaces.

        Return sentences on objects that could not be deleted, to be logged once.
        """
        target, replaced = self.target, list[RemotePath]()
        content = manifest_to_bytes(replace(manifest, folder=self.path.name))
        sizes = {name: file.nbytes for name, file in manifest.files.items()}
        with disk_errors("committing", target):
            found = self.path.list()
            if wrong := [name for name, nbytes in sizes.items() if found.get(name) != nbytes]:
                raise CheckpointError(
                    f"{target} was not committed: the store has {first_three(wrong)} not as "
                    f"written ({found.get(wrong[0])} bytes, expected {sizes[wrong[0]]})"
                )
            with contextlib.suppress(CheckpointError):  # there is none, or one that cannot be read
                former = read_manifest_alone(target)
                replaced = [target / former.folder / name for name in former.files]
            self.attempted = True
            _put_manifest(target / MANIFEST, content)
            if target.is_file():
                replaced.append(target)
        return _delete(replaced)

    def discard(self) -> None:
        """Delete the files. If the manifest may exist, all stay: a later cleanup can tell."""
        if not self.attempted:
            with contextlib.suppress(OSError):
                _delete([self.path / name for name in self.path.list() if is_part(name)])


@dataclass(frozen=True)
class RemoteDirectory:
    """Checkpoint, or folder of some, in a store."""

    path: RemotePath

    def stage(self, nbytes: int, options: CheckpointOptions) -> RemoteStaging:
        """Begin a checkpoint that will replace an existing one, or a plain ``.ckpt`` object."""
        self._require_replaceable()
        return RemoteStaging(self.path, self.path / uuid.uuid4().hex)

    @contextlib.contextmanager
    def new_file(self, nbytes: int, options: CheckpointOptions) -> Generator[BinaryIO]:
        """Open a temporary file that is uploaded when the block ends."""
        self._require_replaceable()
        with tempfile.TemporaryDirectory(prefix="shardeddp-") as folder:
            local = Path(folder) / self.path.name
            preflight(folder, nbytes)
            with disk_errors("writing", local, nbytes), open(local, "w+b") as opened:
                yield opened
            with disk_errors("writing", self.path):
                self.path.put_file(str(local))
                if carries_manifest(self.path):
                    self._remove_sharded()

    def remove(self, roots: Sequence[Location], written: bool) -> str | None:
        """Delete a sharded checkpoint, the manifest first, or a plain object."""
        if not written and (outside := why_outside(self.path, roots)):
            return outside
        with disk_errors("deleting", self.path):
            if carries_manifest(self.path):
                return next(iter(self._remove_sharded()), None)
            if not self.path.is_file():
                ours = self._has_saves_only()
                return None if ours else f"there is no {MANIFEST} of this package in it."
            if self.path.suffix != PLAIN_SUFFIX:
                return f"it is no object named *{PLAIN_SUFFIX}."
            self.path.delete()
        return None

    def remove_leftovers(self) -> tuple[str, ...]:
        """Delete what killed saves have left in this folder, if it is a day old or older."""
        left = list[str]()
        if self.path.protocol in READ_ONLY:
            return ()
        try:
            with disk_errors("cleaning up", self.path):
                for name, nbytes in self.path.list().items():
                    if nbytes is None and name.endswith(PLAIN_SUFFIX):
                        for leftover in filter(_is_abandoned, _leftovers(self.path / name)):
                            left += _delete([leftover / each for each in leftover.list()])
        except CheckpointError as error:  # reported like an object that could not be deleted
            return (str(error),)
        return tuple(left)

    def _require_replaceable(self) -> None:
        """Refuse to replace an object or folder that may not be a checkpoint."""
        with disk_errors("looking for a checkpoint at", self.path):
            plain = self.path.suffix == PLAIN_SUFFIX or not self.path.is_file()
            if plain and (carries_manifest(self.path) or self._has_saves_only()):
                return
        raise CheckpointError(
            f"{self.path} is no checkpoint of this package, expected nothing there, a sharded "
            f"checkpoint (names with {MANIFEST}), or an object named *{PLAIN_SUFFIX}. Move it, or "
            f"save elsewhere."
        )

    def _has_saves_only(self) -> bool:
        """Return True if all names here are folders of saves, or if there are none."""
        return all(FOLDER.fullmatch(name) for name in self.path.list())

    def _remove_sharded(self) -> tuple[str, ...]:
        """Delete a sharded checkpoint, the manifest first; return sentences on remains."""
        parts = list[RemotePath]()
        with contextlib.suppress(CheckpointError):  # its files are left for a cleanup
            stored = read_manifest_alone(self.path)
            parts = [self.path / stored.folder / name for name in stored.files]
        (self.path / MANIFEST).delete()
        return _delete(parts)


def _put_manifest(path: RemotePath, content: bytes) -> None:
    """Put the manifest; ignore an error if the store has it nevertheless."""
    try:
        path.put(content)
    except OSError:
        try:
            held = path.get(0, path.nbytes())
        except OSError:
            held = b""
        if held != content:
            raise


def _leftovers(checkpoint: RemotePath) -> list[RemotePath]:
    """Return folders of saves that no manifest names; none if the manifest cannot be read."""
    names = checkpoint.list()
    found = [name for name, nbytes in names.items() if nbytes is None and FOLDER.fullmatch(name)]
    if found and MANIFEST in names:
        try:
            held = read_manifest_alone(checkpoint).folder
        except CheckpointError:
            return []
        found = [name for name in found if name != held]
    return [checkpoint / name for name in found]


def _is_abandoned(folder: RemotePath) -> bool:
    """Return True if a folder has checkpoint files only, all older than the longest save."""
    names = folder.list()
    if not all(is_part(name) for name in names):
        return False
    newest = max((folder / name).modified() for name in names) if names else 0.0
    return time.time() - newest > ABANDONED_S


def _delete(objects: Sequence[RemotePath]) -> tuple[str, ...]:
    """Delete objects, and folders that are empty then; return sentences on remains."""
    try:
        with ThreadPoolExecutor(_DELETIONS) as threads:
            deque(threads.map(RemotePath.delete, objects), maxlen=0)
        for folder in {each.parent: None for each in objects}:
            folder.delete_folder()
            folder.parent.delete_folder()
    except OSError as error:
        return (
            f"{error.filename or objects[0]} could not be deleted ({error.strerror or error}).",
        )
    return ()
