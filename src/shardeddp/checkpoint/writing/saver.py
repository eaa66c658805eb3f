"""Saver: saves one checkpoint after the other, in the caller's time or in a thread's, and deletes in the same order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from shardeddp.checkpoint.disk.durable import Permissions, make_directories
from shardeddp.checkpoint.format.manifest import Run
from shardeddp.checkpoint.writing.host_memory import HostMemory
from shardeddp.checkpoint.writing.shards import write_checkpoint
from shardeddp.checkpoint.writing.snapshot import Snapshot
from shardeddp.comm import together
from shardeddp.config import CheckpointOptions

log = logging.getLogger(__name__)


class Saver:
    """One save at a time.

    Args:
        options: Whether in a thread, and how.
    """

    def __init__(self, options: CheckpointOptions) -> None:
        self._options = options
        self._permissions: Permissions = options.permissions or "private"
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the thread; the same on all ranks
        self._deletions: list[Callable[[], object]] = []  # wait for the save that goes on

    @property
    def started(self) -> bool:
        """Whether a save was given to the thread and nobody has waited for it yet; the same on all ranks."""
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """Whether a save is under way in the thread."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, snapshot: Snapshot, target: Path, run: Run, group: dist.ProcessGroup) -> None:
        """Save, or begin to; a collective of all ranks.

        Args:
            snapshot: What this rank has of the checkpoint.
            target: The directory.
            run: What to say of the training.
            group: Host group of all ranks, for saving alone.

        Raises:
            CheckpointError: The save failed, or the one before did in its thread.
        """
        self.wait()
        if not self._options.asynchronous:
            write_checkpoint(snapshot, target, run, group, self._options)
            return

        def copied() -> Snapshot:
            if dist.get_rank(group) == 0:
                # Callbacks may look there, or link to what is going to be there, before the thread comes to it.
                make_directories(target.parent, self._permissions, self._options.durability)
            return snapshot.copied(self._memory)

        own = together("copying the checkpoint", copied, group)
        self._thread = threading.Thread(target=self._write, args=(own, target, run, group), name="shardeddp-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when the save in the thread has ended, and what waited for it is deleted.

        Raises:
            CheckpointError: It failed. What was to be deleted is still there.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        deletions, self._deletions = self._deletions, []
        if error is not None:
            raise error
        for delete in deletions:
            delete()

    def then(self, delete: Callable[[], object]) -> None:
        """Delete something when the save that is under way has succeeded; at once if there is none."""
        if self._thread is None:
            delete()
        else:
            self._deletions.append(delete)

    def _write(self, snapshot: Snapshot, target: Path, run: Run, group: dist.ProcessGroup) -> None:
        try:
            write_checkpoint(snapshot, target, run, group, self._options)
        except BaseException as error:  # noqa: BLE001 - raised where the training is
            self._error = error
            log.error(f"saving {target} failed: {error}")  # where nobody asks any more, this is all that is said
