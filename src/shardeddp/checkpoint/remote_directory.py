"""Checkpoint directories in object stores: a folder for each save, and the manifest as last object."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardeddp.checkpoint.durable import disk_errors
from shardeddp.checkpoint.find import carries_manifest, read_manifest_alone
from shardeddp.checkpoint.full_read import PLAIN_SUFFIX
from shardeddp.checkpoint.manifest import FOLDER, MANIFEST, is_part
from shardeddp.checkpoint.remote import READ_ONLY, RemotePath
from shardeddp.errors import CheckpointError, first_three

# [Note: how a checkpoint is committed to a store] ``last.ckpt`` is a prefix of names there: of
# ``last.ckpt/manifest.json``, and of the manifest's files in ``last.ckpt/<uuid>/``. Every save has
# a ``<uuid>`` of its own, under which each rank uploads its file. When all have done so, rank 0
# lists the uploaded files and puts the manifest: one object, which appears, or replaces the former
# one, in one step. After that the folder of the former one is deleted.
#
# A process that dies at any point leaves the old checkpoint or the new one, and folders that no
# manifest names. No lock can show that a folder is still written to, so a sweep takes it for
# abandoned when its newest object is a day old. Interrupted multipart uploads have no name;
# lifecycle rules of the bucket delete them.

_DELETIONS = 16
"""Objects deleted at a time."""

ABANDONED_S = 24 * 3600.0
"""Age in seconds of the newest object after which a folder that no manifest names is deleted."""


@dataclass
class RemoteStaging:
    """Checkpoint being written to a store; made by :func:`stage`."""

    target: RemotePath
    """Path of the checkpoint after the commit."""

    path: RemotePath
    """Folder of its files, where they stay after the commit."""

    attempted: bool = False
    """True once the manifest may exist: from then on none of its files is deleted."""


def stage(target: RemotePath) -> RemoteStaging:
    """Begin a checkpoint that will replace an existing one, or a plain ``.ckpt`` object."""
    with disk_errors("looking for a checkpoint at", target):
        require_replaceable(target)
    return RemoteStaging(target, target / uuid.uuid4().hex)


def require_replaceable(target: RemotePath) -> None:
    """Refuse to replace an object or folder that may not be a checkpoint."""
    plain = target.suffix == PLAIN_SUFFIX or not target.is_file()
    if not plain or not (
        carries_manifest(target) or all(FOLDER.fullmatch(name) for name in target.list())
    ):
        raise CheckpointError(
            f"{target} is no checkpoint of this package, expected nothing there, a sharded "
            f"checkpoint (names with {MANIFEST}), or an object named *{PLAIN_SUFFIX}. Move it, or "
            f"save elsewhere."
        )


def commit(staging: RemoteStaging, sizes: Mapping[str, int], manifest: bytes) -> tuple[str, ...]:
    """Put the manifest of a written checkpoint, then delete the one that it replaces.

    Args:
        staging: The checkpoint.
        sizes: Bytes of each file in the manifest.
        manifest: Content of the manifest.

    Returns:
        Sentences on objects that could not be deleted, to be logged once.
    """
    target, replaced = staging.target, list[RemotePath]()
    with disk_errors("committing", target):
        found = staging.path.list()
        if wrong := [name for name, nbytes in sizes.items() if found.get(name) != nbytes]:
            raise CheckpointError(
                f"{target} was not committed: the store has {first_three(wrong)} not as written "
                f"({found.get(wrong[0])} bytes, expected {sizes[wrong[0]]})"
            )
        with contextlib.suppress(CheckpointError):  # there is none, or one that cannot be read
            former = read_manifest_alone(target)
            replaced = [target / former.folder / name for name in former.files]
        staging.attempted = True
        _put_manifest(target / MANIFEST, manifest)
        if target.is_file():
            replaced.append(target)
    return _delete(replaced)


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


def discard(staging: RemoteStaging) -> None:
    """Delete the files of a save that was never committed; for error handling, so no OSError.

    If the manifest may exist, all files stay: a later sweep can tell.
    """
    if not staging.attempted:
        with contextlib.suppress(OSError):
            _delete([staging.path / name for name in staging.path.list() if is_part(name)])


def remove(target: RemotePath, roots: Sequence[RemotePath], written: bool) -> str | None:
    """Delete a checkpoint, the manifest first; return the reason if it is not one of this run.

    Args:
        target: A sharded checkpoint or a plain object.
        roots: Folders, one of which has to contain it.
        written: True if this run has written it: it may then be anywhere.
    """
    if not written and not any(target.parent.is_relative_to(root) for root in roots):
        return f"it lies outside of {' and '.join(map(str, roots)) or 'all directories'}."
    with disk_errors("deleting", target):
        if carries_manifest(target):
            return next(iter(remove_directory(target)), None)
        if not target.is_file():
            ours = all(FOLDER.fullmatch(name) for name in target.list())
            return None if ours else f"there is no {MANIFEST} of this package in it."
        if target.suffix != PLAIN_SUFFIX:
            return f"it is no object named *{PLAIN_SUFFIX}."
        target.delete()
    return None


def remove_directory(target: RemotePath) -> tuple[str, ...]:
    """Delete a sharded checkpoint, the manifest first; return sentences on remains."""
    if not carries_manifest(target):
        return ()
    parts = list[RemotePath]()
    with contextlib.suppress(CheckpointError):  # its files are left for a sweep
        stored = read_manifest_alone(target)
        parts = [target / stored.folder / name for name in stored.files]
    (target / MANIFEST).delete()
    return _delete(parts)


def sweep(folder: RemotePath) -> tuple[str, ...]:
    """Delete remains of killed saves in a folder of checkpoints, if they are a day old or older.

    Returns:
        Sentences on remains that could not be deleted.
    """
    left = list[str]()
    if folder.protocol in READ_ONLY:
        return ()
    with disk_errors("cleaning up", folder):
        for name, nbytes in folder.list().items():
            if nbytes is None and name.endswith(PLAIN_SUFFIX):
                for leftover in _leftovers(folder / name):
                    if _is_abandoned(leftover):
                        left += _delete([leftover / each for each in leftover.list()])
    return tuple(left)


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
