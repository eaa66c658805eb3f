"""Writing sharded checkpoints: one after the other, in the caller's time or in a thread's."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from shardeddp.checkpoint import directory
from shardeddp.checkpoint.directory import Staging
from shardeddp.checkpoint.durable import Permissions, disk_errors, make_directories, preflight
from shardeddp.checkpoint.interop import dcp_metadata, to_bytes
from shardeddp.checkpoint.items import ALGORITHM, DataFile, block_checksums, checksum
from shardeddp.checkpoint.manifest import (
    DCP_METADATA,
    LIGHTNING_META,
    MANIFEST,
    STATE,
    Item,
    Manifest,
    Piece,
    Run,
    StoredFile,
    StoredObject,
    StoredTensor,
    manifest_to_bytes,
    name_of,
)
from shardeddp.checkpoint.snapshot import (
    BoxKey,
    Described,
    HostMemory,
    Snapshot,
    compare_replicas,
    plain_elements,
)
from shardeddp.comm import run_on_all_ranks
from shardeddp.comm.agreement import gather_results
from shardeddp.config import CheckpointOptions
from shardeddp.plan.layout import Box

# -- Writing: each rank its shares into a data file of its own, rank 0 the indexes; committed when
#    all agree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What one rank has written, for the rank that writes the manifest."""

    file: StoredFile
    pieces: dict[BoxKey, tuple[Item, int, tuple[str, ...]]]
    """Item, start of the payload and checksums of each box that it has written."""

    copies: dict[BoxKey, tuple[str, ...]]
    """Checksums of each box that a replica has written."""

    objects: list[Item]

    def to_bytes(self) -> bytes:
        """For the other ranks."""
        return json.dumps(
            [
                vars(self.file),
                [[*key, asdict(item), *rest] for key, (item, *rest) in self.pieces.items()],
                [[*key, checksums] for key, checksums in self.copies.items()],
                [asdict(item) for item in self.objects],
            ]
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        """What :meth:`to_bytes` has made of one."""
        file, pieces, copies, objects = json.loads(data)
        return cls(
            StoredFile(**file),
            {_key(*key): (Item(**item), start, tuple(sums)) for *key, item, start, sums in pieces},
            {_key(*key): tuple(checksums) for *key, checksums in copies},
            [Item(**item) for item in objects],
        )


def write_checkpoint(
    snapshot: Snapshot,
    target: Path,
    run: Run,
    group: dist.ProcessGroup | None,
    options: CheckpointOptions,
) -> None:
    """Write a checkpoint and commit it; a collective of all ranks that ends the same way on each.

    Args:
        snapshot: What this rank has of it.
        target: The directory that it becomes; what is there is replaced when the new one is whole
            and on the disk.
        run: What to say of the training.
        group: Host group of all ranks that nothing else uses meanwhile; None for a process that
            saves alone.
        options: How safe, and for whom to read.

    Raises:
        CheckpointError: Some rank could not write, or replicas differ. What was at ``target`` is
            still there.
    """
    _Writing(snapshot, target, run, group, options).run()


class _Writing:
    """One save, from the side of one rank."""

    def __init__(
        self,
        snapshot: Snapshot,
        target: Path,
        run: Run,
        group: dist.ProcessGroup | None,
        options: CheckpointOptions,
    ) -> None:
        self._snapshot = snapshot
        self._target = target
        self._run = run
        self._group = group
        self._options = options
        self._permissions: Permissions = options.permissions or "private"
        self._rank = 0 if group is None else dist.get_rank(group)
        self._staging: Staging | None = None  # rank 0's
        self._folder = target  # of the staging, when rank 0 has said where that is

    def run(self) -> None:
        """Do it all; see :func:`write_checkpoint`."""
        sizes = self._gather("planning the checkpoint", lambda: str(self._snapshot.nbytes).encode())
        try:
            needed = sum(map(int, sizes))
            folders = self._gather("preparing the checkpoint", lambda: self._prepare(needed))
            self._folder = Path(os.fsdecode(folders[0]))
            reports = self._gather(f"writing {self._target}", self._write)
            self._gather(f"committing {self._target}", lambda: self._commit(reports))
        except Exception:
            if self._staging is not None:
                directory.discard(self._staging)
            raise

    def _gather(self, step: str, action: Callable[[], bytes]) -> Sequence[bytes]:
        return [action()] if self._group is None else gather_results(step, action, self._group)

    def _prepare(self, needed: int) -> bytes:
        """Rank 0 alone: the directory to write in."""
        if self._rank:
            return b""
        options = self._options
        preflight(self._target.parent, needed)
        self._staging = directory.stage(self._target, self._permissions, options.durability)
        return os.fsencode(self._staging.path)

    def _write(self) -> bytes:
        """This rank's data file."""
        name = f"__{self._rank}_0.distcp"
        pieces: dict[BoxKey, tuple[Item, int, tuple[str, ...]]] = {}
        copies: dict[BoxKey, tuple[str, ...]] = {}
        with (
            self._created(name) as descriptor,
            disk_errors("writing", self._folder / name, self._snapshot.nbytes),
        ):
            file = DataFile(descriptor, name, crc=self._options.zip_crc)
            for share in self._snapshot.shares:
                elements = plain_elements(share.elements)
                key = share.name, share.box.offsets, share.box.sizes
                if share.written:
                    pieces[key] = file.put_tensor(elements.view(share.box.sizes))
                else:
                    copies[key] = block_checksums(elements)
            objects = (
                [file.put_object(value) for _, value in self._snapshot.objects]
                if self._rank == 0
                else []
            )
            return Report(file.close(), pieces, copies, objects).to_bytes()

    def _commit(self, reports: Sequence[bytes]) -> bytes:
        """On rank 0: write the indexes, the manifest last, and rename to make it a checkpoint."""
        if self._staging is None:
            return b""
        merged = [Report.from_bytes(report) for report in reports]
        written = [{key: sums for key, (_, _, sums) in report.pieces.items()} for report in merged]
        compare_replicas(written, [report.copies for report in merged])
        files = {f"__{rank}_0.distcp": report.file for rank, report in enumerate(merged)}
        manifest = Manifest(
            run=self._run,
            algorithm=ALGORITHM,
            files=files,
            tensors=_index(self._snapshot.tensors, merged),
            objects={
                name_of(path): StoredObject(path=path, item=item)
                for (path, _), item in zip(self._snapshot.objects, merged[0].objects, strict=True)
            },
        )
        contents = {
            STATE: json.dumps(self._snapshot.tree, separators=(",", ":")).encode(),
            DCP_METADATA: to_bytes(dcp_metadata(manifest)),
            LIGHTNING_META: self._snapshot.rest,
        }
        for name, content in contents.items():
            self._put(name, content)
            files[name] = StoredFile(nbytes=len(content), checksum=checksum(content))
        self._put(MANIFEST, manifest_to_bytes(replace(manifest, files=files)))
        for note in directory.commit(self._staging):
            log.warning(note)  # no warning that a filter makes an error of: it is committed
        return b""

    def _put(self, name: str, content: bytes) -> None:
        directory.write_file(
            self._folder, name, content, self._permissions, self._options.durability
        )

    @contextmanager
    def _created(self, name: str) -> Generator[int]:
        """A new file, flushed and closed at the end."""
        descriptor = directory.create_file(self._folder, name, self._permissions)
        try:
            yield descriptor
        except BaseException:
            os.close(descriptor)
            raise
        directory.finish(descriptor, self._folder / name, self._options.durability)


def _index(described: Sequence[Described], reports: Sequence[Report]) -> dict[str, StoredTensor]:
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    for report in reports:
        for (name, offsets, sizes), (item, payload, checksums) in report.pieces.items():
            pieces[name].append(
                Piece(box=Box(offsets, sizes), item=item, payload=payload, checksums=checksums)
            )
    return {
        name_of(it.path): StoredTensor(
            path=it.path,
            dtype=it.dtype,
            shape=it.shape,
            pieces=tuple(pieces[it.same_as or name_of(it.path)]),
        )
        for it in described
    }


def _key(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> BoxKey:
    return name, tuple(offsets), tuple(sizes)


# -- Saver: saves one checkpoint after the other, in the caller's time or in a thread's, and deletes
#    in the same order


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
        """Whether the thread got a save that nobody has waited for yet; the same on all ranks."""
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
                # Callbacks may look there, or link to what is going to be there, before the thread
                # comes to it.
                make_directories(target.parent, self._permissions, self._options.durability)
            return snapshot.copied(self._memory)

        own = run_on_all_ranks("copying the checkpoint", copied, group)
        self._thread = threading.Thread(
            target=self._write, args=(own, target, run, group), name="shardeddp-checkpoint"
        )
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
        """Delete something once the save under way has succeeded; at once if there is none."""
        if self._thread is None:
            delete()
        else:
            self._deletions.append(delete)

    def _write(self, snapshot: Snapshot, target: Path, run: Run, group: dist.ProcessGroup) -> None:
        try:
            write_checkpoint(snapshot, target, run, group, self._options)
        except BaseException as error:  # noqa: BLE001 - raised where the training is
            self._error = error
            log.error(
                f"saving {target} failed: {error}"
            )  # where nobody asks any more, this is all that is said
