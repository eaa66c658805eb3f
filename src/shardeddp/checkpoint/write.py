"""Writing sharded checkpoints: one after the other, in the caller's time or in a thread's.

An error of one rank is raised on all of them, and the staged files are deleted. Checkpoints up to
``CheckpointOptions.max_file_gb`` are one file, which full_write.py writes; lightning/checkpointing.py
chooses.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from shardeddp.checkpoint.clean import directory_at
from shardeddp.checkpoint.directory import LocalStaging, new_part
from shardeddp.checkpoint.durable import Permissions, make_directories
from shardeddp.checkpoint.interop import dcp_metadata, to_bytes
from shardeddp.checkpoint.items import DataFile, block_digests, hexdigest
from shardeddp.checkpoint.location import AnyPath, LocalPath, Location, location
from shardeddp.checkpoint.manifest import (
    ALGORITHM,
    DCP_METADATA,
    LIGHTNING_META,
    PIECE,
    PLACEMENT,
    STATE,
    Item,
    Manifest,
    Section,
    StoredFile,
    StoredObject,
    TrainingRun,
    name_of,
    stored_tensors,
)
from shardeddp.checkpoint.pieces import INTERVAL, Pieces, Rows, intervals_of, placement_of
from shardeddp.checkpoint.remote import repeated
from shardeddp.checkpoint.remote_directory import RemoteStaging
from shardeddp.checkpoint.snapshot import (
    HostMemory,
    Share,
    Snapshot,
    compare_replicas,
    plain_elements,
    share_digest,
)
from shardeddp.comm import gather_to_first, run_on_all_ranks
from shardeddp.comm.agreement import gather_results
from shardeddp.comm.host_group import HostGroup
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError, first_three
from shardeddp.plan.layout import Box, Interval, boxes

# -- Writing: a data file per rank, indexes by rank 0, one commit

log = logging.getLogger(__name__)


DCP_PIECES = 2**16
"""Largest number of pieces for which ``.metadata`` is written with the checkpoint.

It has an entry per piece, which takes rank 0 some 40 us and 3 KB of memory while all ranks wait.
"""


@dataclass(frozen=True)
class Report:
    """Summary of one rank's data file, for the rank that writes the manifest."""

    file: StoredFile
    layout: str
    """Checksum of the sharded sections in this rank's snapshot, as hex."""

    intervals: Rows
    """Intervals that this rank has written of each section."""

    def to_bytes(self) -> bytes:
        """Serialize the report for rank 0 of the same job; it contains a pickle."""
        head = pickle.dumps((self.file, self.layout))
        return len(head).to_bytes(4, "little") + head + self.intervals.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Report:
        """Deserialize a report; its intervals are a view: those of many ranks take megabytes."""
        start = 4 + int.from_bytes(data[:4], "little")
        file, layout = pickle.loads(data[4:start])
        return cls(file, layout, np.frombuffer(data, dtype=INTERVAL, offset=start))


def write_data_file(
    snapshot: Snapshot, folder: Location, rank: int, options: CheckpointOptions
) -> tuple[Report, list[tuple[Share, bytes]], list[Item]]:
    """Write this rank's data file of a checkpoint.

    Returns:
        The report; shares of sharded tensors that other ranks hold as well, each with its digest;
        items of the snapshot's objects.
    """
    name, permissions = f"__{rank}_0.distcp", _permissions(options)
    rows, blocks, held = list[tuple[int, ...]](), list[bytes](), list[tuple[Share, bytes]]()
    made = new_part(folder, name, snapshot.nbytes, permissions, options.durability)
    with made as opened:
        file = DataFile(opened, name, crc=options.zip_crc)
        for share in snapshot.shares:
            elements, digests = plain_elements(share.elements), list[bytes]()
            for box, part in _boxes(share.interval, snapshot.sections[share.section].shape):
                own = elements[part.start - share.interval.start :][: part.numel]
                if not share.written:
                    digests += block_digests(own)
                    continue
                item, payload, found = file.put_tensor(own.view(box.sizes))
                place = item.offset, item.nbytes, payload
                rows.append((share.section, part.start, part.stop, *place))
                digests += found
            blocks += digests if share.written else []
            if snapshot.part is not None and share.section < snapshot.num_sharded:
                held.append((share, share_digest(digests)))
        values = snapshot.objects if rank == 0 else []
        objects = [file.put_object(value) for _, value in values]
        stored = file.close(rows, blocks)
    table = np.array(rows, dtype=PIECE)
    intervals = intervals_of(*(table[column] for column in ("section", "start", "stop")))
    return Report(stored, snapshot.layout.hex(), intervals), held, objects


def _permissions(options: CheckpointOptions) -> Permissions:
    return options.permissions or "private"


def _boxes(interval: Interval, shape: Sequence[int]) -> Iterator[tuple[Box, Interval]]:
    """Yield the boxes of an interval, each with its interval of elements."""
    start = interval.start
    for box in boxes(interval, shape):
        yield box, Interval(start, start + box.numel)
        start += box.numel


def index(
    snapshot: Snapshot, run: TrainingRun, reports: Sequence[Report], objects: Sequence[Item]
) -> tuple[Manifest, memoryview]:
    """Return the manifest of all ranks' data files, and the placement; for rank 0.

    Reports are those of all ranks, in order, objects the items of the snapshot's objects.
    """
    layout = snapshot.layout.hex()
    if odd := [rank for rank, report in enumerate(reports) if report.layout != layout]:
        raise CheckpointError(
            f"the ranks do not save the same sharded tensors: others than rank 0 on ranks "
            f"{first_three(map(str, odd))}. Let every rank keep the same ones, in the same order, "
            f"in what it saves"
        )
    numels = [section.numel for section in snapshot.sections]
    rows, counts = placement_of([report.intervals for report in reports], numels, snapshot.names)
    sections, first = list[Section](), 0
    for section, parts in zip(snapshot.sections, counts, strict=True):
        own = hexdigest(rows[first : first + parts].tobytes())
        place = section.offsets, section.whole
        sections.append(Section(section.dtype, section.shape, first, parts, own, *place))
        first += parts
    tensors = stored_tensors(dict.fromkeys(snapshot.tensors), sections)
    stored = [
        StoredObject(path=path, item=item)
        for (path, _), item in zip(snapshot.objects, objects, strict=True)
    ]
    manifest = Manifest(
        run=run,
        algorithm=ALGORITHM,
        files={f"__{rank}_0.distcp": report.file for rank, report in enumerate(reports)},
        tensors={tensor.name: tensor for tensor in tensors},
        objects={name_of(it.path): it for it in stored},
        sections=tuple(sections),
    )
    return manifest, rows.view(np.uint8).data


def write_checkpoint(
    snapshot: Snapshot,
    target: AnyPath,
    run: TrainingRun,
    group: HostGroup,
    options: CheckpointOptions,
) -> None:
    """Write a checkpoint and commit it; a collective of all ranks that ends the same way on each.

    An existing one is replaced when the new one is complete and on the disk. Nothing else may use
    the host group meanwhile.

    Raises:
        CheckpointError: Some rank could not write, or replicas differ. ``target`` is as before, or,
            if the undo of the last rename has failed too, the new checkpoint (see the table of
            ``docs/checkpoints.md``).
        RankError: A rank has failed otherwise.
    """
    _Writing(snapshot, location(target), run, group, options).save()


@dataclass
class _Writing:
    """One save on one rank; fields are the arguments of :func:`write_checkpoint`."""

    snapshot: Snapshot
    target: Location
    run: TrainingRun
    group: HostGroup
    options: CheckpointOptions
    staging: LocalStaging | RemoteStaging | None = None  # on rank 0 only
    folder: Location = field(init=False)  # the staging folder, once rank 0 has sent its path
    # Of this rank's data file, once it is written; see :func:`write_data_file`.
    held: list[tuple[Share, bytes]] = field(default_factory=list[tuple[Share, bytes]])
    objects: list[Item] = field(default_factory=list[Item])

    def save(self) -> None:
        """Run all steps of the save."""
        group, part = self.group, self.snapshot.part
        planned = str(self.snapshot.nbytes).encode()
        sizes = gather_to_first("planning the checkpoint", lambda: planned, group)
        try:
            needed = sum(map(int, sizes))
            prepare = partial(self._prepare, needed)
            folders = gather_results("preparing the checkpoint", prepare, group)
            self.folder = location(os.fsdecode(folders[0]))
            reports = gather_to_first(f"writing {self.target}", self._write, group)
            if part is not None:
                shares = [share for share, _ in self.held]
                digests = [found for _, found in self.held]
                compare_replicas(shares, lambda: digests, part, self.snapshot.names, group)
            gather_results(f"committing {self.target}", lambda: self._commit(reports), group)
        except Exception:
            if self.staging is not None:
                self.staging.discard()
            raise

    def _prepare(self, needed: int) -> bytes:
        """On rank 0: make the staging folder and return its path; b"" on other ranks."""
        if self.group.rank:
            return b""
        self.staging = directory_at(self.target).stage(needed, self.options)
        return os.fsencode(str(self.staging.path))

    def _write(self) -> bytes:
        """Write this rank's data file; return the serialized report."""
        write = partial(write_data_file, self.snapshot, self.folder, self.group.rank, self.options)
        report, self.held, self.objects = repeated(write, self.folder.transient)
        return report.to_bytes()

    def _commit(self, reports: Sequence[bytes | memoryview]) -> bytes:
        """On rank 0: write the indexes, the manifest last, and commit."""
        if self.staging is None:
            return b""
        parsed = [*map(Report.from_bytes, reports)]
        manifest, placement = index(self.snapshot, self.run, parsed, self.objects)
        contents: dict[str, bytes | memoryview] = {
            PLACEMENT: placement,
            STATE: json.dumps(self.snapshot.tree, separators=(",", ":")).encode(),
            LIGHTNING_META: self.snapshot.rest,
        }
        num_pieces = sum(file.pieces for file in manifest.files.values())
        if num_pieces > DCP_PIECES:
            log.warning(
                f"{self.target} has {num_pieces:,} pieces, too many to write {DCP_METADATA} while "
                f"all ranks wait. torch.distributed.checkpoint reads the checkpoint after: "
                f"shardeddp metadata {self.target}"
            )
        files = dict(manifest.files)
        for name, content in contents.items():
            self.staging.put(name, content)
            files[name] = StoredFile(nbytes=len(content), checksum=hexdigest(content))
        if num_pieces <= DCP_PIECES:
            at_hand = replace(manifest, inline={PLACEMENT: bytes(placement)})
            pieces = Pieces(self.folder, at_hand)
            pieces.read_tables()
            content = to_bytes(dcp_metadata(manifest, pieces))
            self.staging.put(DCP_METADATA, content)
            files[DCP_METADATA] = StoredFile(nbytes=len(content), checksum=hexdigest(content))
        notes = self.staging.commit(replace(manifest, files=files))
        for note in notes:
            log.warning(note)  # no Python warning, which a filter may raise: it is committed
        return b""


# -- Saver: one save after the other, in the caller's thread or in its own


class Saver:
    """Saves checkpoints one at a time, in the caller's thread or in a thread of its own."""

    def __init__(self, options: CheckpointOptions) -> None:
        self._options = options
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the thread; the same on all ranks
        self._deletions: list[Callable[[], object]] = []  # deferred until the save has ended

    @property
    def started(self) -> bool:
        """True if the thread has a save that was not waited for yet; the same on all ranks."""
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """True if the thread is still saving."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, snapshot: Snapshot, target: Location, run: TrainingRun, group: HostGroup
    ) -> None:
        """Raise an error of the save before, then save or begin to; a collective of all ranks."""
        self.wait()
        if not self._options.asynchronous:
            write_checkpoint(snapshot, target, run, group, self._options)
            return

        def copied() -> Snapshot:
            if group.rank == 0 and isinstance(target, LocalPath):
                # Callbacks may look there, or link to the future checkpoint, before the thread has
                # made the directory. Those of a store are prefixes of names.
                permissions, durability = _permissions(self._options), self._options.durability
                make_directories(target.parent, permissions, durability)
            return snapshot.copied(self._memory)

        own = run_on_all_ranks("copying the checkpoint", copied, group)
        self._thread = threading.Thread(
            target=self._write, args=(own, target, run, group), name="shardeddp-checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in the thread, then run the deferred deletions.

        Raises:
            CheckpointError: The save failed; nothing was deleted.
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
        """Run a deletion once the save under way has succeeded; at once if there is none."""
        if self._thread is None:
            delete()
        else:
            self._deletions.append(delete)

    def _write(
        self, snapshot: Snapshot, target: Location, run: TrainingRun, group: HostGroup
    ) -> None:
        try:
            write_checkpoint(snapshot, target, run, group, self._options)
        except BaseException as error:  # noqa: BLE001 - raised where the training is
            self._error = error
            # An error that no later save raises is at least in the log.
            log.error(f"saving {target} failed: {error}")
