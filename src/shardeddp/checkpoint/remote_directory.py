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
from shardeddp.checkpoint.manifest import FOLDER, MANIFEST, is_part
from shardeddp.checkpoint.plain_file import PLAIN_SUFFIX
from shardeddp.checkpoint.remote import READ_ONLY, RemotePath
from shardeddp.errors import CheckpointError
from shardeddp.wrap.tree import first_three

# [Note: how a checkpoint is committed to a store] ``last.ckpt`` is the beginning of names there:
# ``last.ckpt/manifest.json``, and the files that the manifest speaks of in ``last.ckpt/<uuid>/``.
# Every save has a ``<uuid>`` of its own, into which each rank uploads its file. When all have done
# so, rank 0 lists what is there, and puts the manifest: one object, which appears, or takes the
# place of the one before, in one step. After that the folder of the one before is deleted.
#
# A process that dies anywhere leaves the old checkpoint or the new one, and folders that no
# manifest speaks of. There are no locks that would say whether somebody still writes to one, so a
# sweep takes it for abandoned when the newest of its objects is a day old. Uploads in parts that
# were cut short have no name; rules of the bucket clear them away.

_DELETIONS = 16
"""Objects that are deleted at a time."""

ABANDONED_S = 24 * 3600.0
"""After so long without a new object, a folder that no manifest speaks of is deleted."""


@dataclass
class RemoteStaging:
    """Checkpoint that is written to a store; made by :func:`stage`."""

    target: RemotePath
    """What it becomes."""

    path: RemotePath
    """Where its files are written, and stay."""

    attempted: bool = False
    """Whether the manifest may be there: nothing that it speaks of is deleted from then on."""


def stage(target: RemotePath) -> RemoteStaging:
    """Begin a checkpoint; one that is there, or a plain ``.ckpt`` object, will be replaced."""
    with disk_errors("looking for a checkpoint at", target):
        require_replaceable(target)
    return RemoteStaging(target, target / uuid.uuid4().hex)


def require_replaceable(target: RemotePath) -> None:
    """Refuse to replace what may not be a checkpoint."""
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
    """Put the manifest of a written checkpoint, then delete what was there.

    Args:
        staging: The checkpoint.
        sizes: Bytes of each file that the manifest speaks of.
        manifest: Content of the manifest.

    Returns:
        What could not be deleted, in sentences to be logged once.
    """
    target, replaced = staging.target, list[RemotePath]()
    with disk_errors("committing", target):
        found = staging.path.list()
        if wrong := [name for name, nbytes in sizes.items() if found.get(name) != nbytes]:
            raise CheckpointError(
                f"{target} was not committed: the store has {first_three(wrong)} not as written "
                f"({found.get(wrong[0])} bytes, expected {sizes[wrong[0]]})"
            )
        with contextlib.suppress(CheckpointError):  # there is none, or one that nobody reads
            former = read_manifest_alone(target)
            replaced = [target / former.folder / name for name in former.files]
        staging.attempted = True
        _put_manifest(target / MANIFEST, manifest)
        if target.is_file():
            replaced.append(target)
    return _delete(replaced)


def _put_manifest(path: RemotePath, content: bytes) -> None:
    """Put it; an error after which the store has it nevertheless is none."""
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
    """Delete what was written and never committed; for the handling of an error, so it raises none.

    Where the manifest may be there, everything stays: a later sweep knows.
    """
    if not staging.attempted:
        with contextlib.suppress(OSError):
            _delete([staging.path / name for name in staging.path.list() if is_part(name)])


def remove(target: RemotePath, roots: Sequence[RemotePath], written: bool) -> str | None:
    """Delete a checkpoint, the manifest first; why not, if it is not one of this run.

    Args:
        target: A sharded checkpoint or a plain object.
        roots: It has to lie in one of them.
        written: This run has written it: it may lie anywhere.
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
    """Delete a sharded checkpoint, the manifest first; what is left, in sentences."""
    if not carries_manifest(target):
        return ()
    parts = list[RemotePath]()
    with contextlib.suppress(CheckpointError):  # its files are left for a sweep
        stored = read_manifest_alone(target)
        parts = [target / stored.folder / name for name in stored.files]
    (target / MANIFEST).delete()
    return _delete(parts)


def sweep(folder: RemotePath) -> tuple[str, ...]:
    """Delete what killed saves have left in a folder of checkpoints a day ago and earlier.

    Returns:
        What could not be done, in sentences.
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
    """Folders of saves that no manifest speaks of; none where the manifest cannot be understood."""
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
    """Whether all of it is older than any save takes; not where something else lies in it."""
    names = folder.list()
    if not all(is_part(name) for name in names):
        return False
    newest = max((folder / name).modified() for name in names) if names else 0.0
    return time.time() - newest > ABANDONED_S


def _delete(objects: Sequence[RemotePath]) -> tuple[str, ...]:
    """Delete objects, and the folders that are empty then; what is left, in sentences."""
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
