"""Verification and inspection: checksums of every byte; rows of tensors and modules."""

from __future__ import annotations

import contextlib
import fnmatch
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import xxhash

from shardeddp.checkpoint.durable import Source, kind_of, open_regular, read_into
from shardeddp.checkpoint.find import find_checkpoints, has_lost_manifest, read_manifest_alone
from shardeddp.checkpoint.full_read import (
    PLAIN_SUFFIX,
    Damage,
    carries_index,
    damaged_records,
    read_index,
)
from shardeddp.checkpoint.import_foreign import FOREIGN, ForeignCheckpoint
from shardeddp.checkpoint.items import check_item_crc, hexdigest
from shardeddp.checkpoint.location import AnyPath, Location, disk_errors, location
from shardeddp.checkpoint.manifest import (
    BLOCK_NBYTES,
    DCP_METADATA,
    LIGHTNING_META,
    MANIFEST,
    PLACEMENT,
    PLAIN_EXTRA,
    Item,
    Manifest,
    StoredTensor,
    name_of,
)
from shardeddp.checkpoint.pieces import Pieces, PieceTable, Rows
from shardeddp.checkpoint.read import Progress, silent
from shardeddp.errors import CheckpointError, first_three
from shardeddp.plan.layout import Interval

# -- Inspection of a manifest, without reading tensors

_WILD = frozenset("*?[")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor, or several that are shown as one."""

    name: str
    num_tensors: int
    shape: tuple[int, ...] | None
    """Shape of the tensor; None for several."""

    dtypes: tuple[str, ...]
    numel: int
    nbytes: int
    """Stored bytes; 0 for a tensor that shares the memory of one named before."""

    num_parts: int
    """Number of intervals in different files; 1 in a plain file."""

    same_as: str = ""
    """Name of the tensor that shares these elements; "" if none does."""


def tensor_rows(manifest: Manifest, pattern: str = "*") -> list[Row]:
    """Return one row for each tensor: those of the model, of each optimizer, and others.

    The pattern is that of :func:`is_like`, of names with or without their prefix (``model.``).
    """
    rows: list[Row] = []
    # In the manifest, tensors that are not sharded follow all sharded ones.
    roots = {root: at for at, root in enumerate(_roots(manifest))}
    for tensor in sorted(manifest.tensors.values(), key=lambda it: roots[it.path[0]]):
        owner = manifest.owners[tensor.sections[0]] if tensor.numel else tensor.name
        if is_like(pattern, tensor.name, name_of(tensor.path[1:])):
            # In a plain file there are no sections: a tensor is one record of it.
            parts = (
                sum(manifest.sections[each].parts for each in tensor.sections)
                if manifest.sections
                else 1
            )
            rows.append(_row(tensor, owner, parts))
    return rows


def is_like(pattern: str, *names: str) -> bool:
    """Return True if a name matches a shell pattern; one without wildcards is a substring."""
    wanted = pattern if _WILD & set(pattern) else f"*{pattern}*"
    return any(fnmatch.fnmatchcase(name, wanted) for name in names)


def module_rows(manifest: Manifest) -> list[Row]:
    """Return a row per outermost module with several siblings, and per kind of optimizer state."""
    roots: defaultdict[str, list[tuple[StoredTensor, Row]]] = defaultdict(list)
    for row in tensor_rows(manifest):
        tensor = manifest.tensors[row.name]
        roots[str(tensor.path[0])].append((tensor, row))
    rows: list[Row] = []
    for root, found in roots.items():
        groups: defaultdict[str, list[Row]] = defaultdict(list)
        if root.startswith("optimizer_"):
            for tensor, row in found:
                groups[f"{root} {tensor.path[-1]}"].append(row)
        else:
            words = [[root, *".".join(map(str, tensor.path[1:])).split(".")] for tensor, _ in found]
            depth = _common(words) + 1
            # Only numbered blocks: one row for their list.
            if all(name[depth - 1].isdigit() for name in words):
                depth -= 1
            for (_, row), name in zip(found, words, strict=True):
                groups[".".join(name[:depth])].append(row)
        rows += [_merged(name, group) for name, group in groups.items()]
    return rows


def total(rows: Iterable[Row]) -> Row:
    """Return the sum of all rows."""
    return _merged("total", list(rows))


def as_json(path: Location, manifest: Manifest, rows: Iterable[Row]) -> dict[str, Any]:
    """Return the manifest and its rows as JSON, for other programs."""
    tensors: list[Mapping[str, Any]] = [
        {
            "name": row.name,
            "path": list(manifest.tensors[row.name].path),
            "shape": list(row.shape or ()),
            "dtype": row.dtypes[0],
            "nbytes": manifest.tensors[row.name].nbytes,
            "parts": row.num_parts,
            "same_as": row.same_as or None,
        }
        for row in rows
    ]
    return {
        "path": str(path),
        **manifest.run.as_json(),
        "nbytes": manifest.nbytes,
        "files": {name: file.nbytes for name, file in manifest.files.items()},
        "objects": list(manifest.objects),
        "tensors": tensors,
    }


def _roots(manifest: Manifest) -> list[str | int]:
    """Return the first keys of tensor paths: the model, then the optimizers, then the rest."""
    found = dict.fromkeys(tensor.path[0] for tensor in manifest.tensors.values())
    return sorted(found, key=lambda root: root == PLAIN_EXTRA[0])


def _row(tensor: StoredTensor, owner: str, parts: int) -> Row:
    shared = owner != tensor.name
    return Row(
        name=tensor.name,
        num_tensors=1,
        shape=tensor.shape,
        dtypes=(str(tensor.dtype).removeprefix("torch."),),
        numel=tensor.numel,
        nbytes=0 if shared else tensor.nbytes,
        num_parts=parts,
        same_as=owner if shared else "",
    )


def _merged(name: str, rows: list[Row]) -> Row:
    if len(rows) == 1 and rows[0].shape is not None:
        return rows[0]
    return Row(
        name=name,
        num_tensors=sum(row.num_tensors for row in rows),
        shape=None,
        dtypes=tuple(dict.fromkeys(dtype for row in rows for dtype in row.dtypes)),
        numel=sum(row.numel for row in rows),
        nbytes=sum(row.nbytes for row in rows),
        num_parts=sum(row.num_parts for row in rows),
    )


def _common(words: list[list[str]]) -> int:
    """Return the length of the common prefix of all names, without their last word."""
    depth = 0
    while all(len(name) > depth + 1 and name[depth] == words[0][depth] for name in words):
        depth += 1
    return depth


# -- Verification of all bytes
#
# Each file is read once from start to end, several files at a time, each into one buffer; the table
# at its end is read first. Nothing is unpickled, and no tensor is made.


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of the verification of one checkpoint."""

    path: Location
    step: int | None
    """Optimizer steps taken; None if the checkpoint does not say or cannot be trusted."""

    nbytes: int
    """Sum over all files, as the manifest or index has it."""

    damages: list[Damage]
    unchecked: list[str] = field(default_factory=list[str])
    """Files without a checksum, which cannot be checked (checkpoints of other tools only)."""

    @property
    def good(self) -> bool:
        """True if nothing is damaged."""
        return not self.damages


def verify(path: AnyPath, progress: Progress = silent) -> list[Damage]:
    """Compare all bytes of a checkpoint, also of another tool, with their checksums.

    Return the damages, in the order of files and bytes.
    """
    return examine(path, progress).damages


def examine(path: AnyPath, progress: Progress = silent, started: Progress = silent) -> Verification:
    """Verify as :func:`verify` does, and return the step, sizes and unchecked files as well.

    ``started`` is called once with the number of bytes to check.
    """
    place = location(path)
    with disk_errors("reading", place):
        own = (place / MANIFEST).is_taken()
        plain = not own and place.is_file()
        plain = plain and (place.suffix == PLAIN_SUFFIX or place.is_archive())
        kind = "" if own or plain else place.kind()
    if own:
        return _examine_own(place, progress, started)
    if plain:
        return _examine_file(place.reading_ahead(), progress, started)
    if has_lost_manifest(place):
        damage = Damage(file=MANIFEST, expected="the manifest of what lies here", found="nothing")
        return Verification(path=place, step=None, nbytes=0, damages=[damage])
    if place.holds(DCP_METADATA):
        return _examine_foreign(place, progress, started)
    raise CheckpointError(
        f"{place} is no sharded checkpoint: expected a directory with {MANIFEST} (or, by another "
        f"tool, {DCP_METADATA}), "
        f"found {kind}" + (" without them" if kind == "a directory" else "")
    )


def newest_verified(
    directory: AnyPath, within_s: float | None = None, other_than: Location | None = None
) -> Location | None:
    """Return the newest checkpoint of a directory that is not damaged; None if there is none.

    ``other_than`` is left out, also under the names of links to it.

    Raises:
        TimeoutError: It takes longer than ``within_s``.
    """
    deadline = None if within_s is None else time.monotonic() + within_s

    def progress(nbytes: int) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(
                f"not all checkpoints in {directory} could be verified in {within_s} s"
            )

    refused = None if other_than is None else other_than.real()
    for candidate in reversed(find_checkpoints(directory).checkpoints):
        if candidate.path.real() == refused:
            continue
        with contextlib.suppress(CheckpointError):  # it was removed meanwhile
            if not verify(candidate.path, progress):
                return candidate.path
    return None


def _examine_file(path: Location, progress: Progress, started: Progress) -> Verification:
    with path.open_source() as (_, nbytes):
        pass
    started(nbytes)
    unchecked, damages, step = list[str](), list[Damage](), None
    item = Item(file=path.name, offset=0, nbytes=nbytes)
    try:
        if carries_index(path):
            damages += damaged_records(path, progress=progress)
            step = read_index(path).run.step
        else:
            with path.open_source() as (descriptor, _):
                unchecked += [] if check_item_crc(descriptor, item) else [path.name]
            progress(nbytes)
    except (CheckpointError, OSError) as error:
        if not damages:  # of which the error may be a consequence
            intact = "an archive whose CRCs are those of its bytes"
            damages.append(Damage(file=path.name, expected=intact, found=str(error)))
    return Verification(path=path, step=step, nbytes=nbytes, damages=damages, unchecked=unchecked)


def _examine_own(path: Location, progress: Progress, started: Progress) -> Verification:
    try:
        manifest = read_manifest_alone(path)
    except (CheckpointError, OSError) as error:
        damage = Damage(file=MANIFEST, expected="a manifest that can be read", found=str(error))
        return Verification(path=path, step=None, nbytes=0, damages=[damage])
    started(manifest.nbytes)
    folder = path / manifest.folder
    check = _Check(folder, manifest, progress)
    # Reading and hashing release the GIL.
    with ThreadPoolExecutor(path.num_readers) as threads:
        try:
            found = list(threads.map(check.file, manifest.files))
        except _StoppedError as stopped:
            raise check.error or stopped from None
        finally:
            check.stop(_StoppedError())  # an interrupt of this thread ends the others, too
    damages = [damage for each in found for damage in each] or check.placement()
    # A manifest that names a folder may have siblings of that folder, left by interrupted saves.
    known = {*manifest.files} if manifest.folder else {MANIFEST, *manifest.files}
    extra = _extra(folder, known)
    # The index of torch.distributed.checkpoint may be made later, without an entry in the manifest.
    later = [it for it in extra if it.file == DCP_METADATA and it.found == kind_of(stat.S_IFREG)]
    damages += [damage for damage in extra if damage not in later]
    return Verification(
        path=path,
        step=manifest.run.step,
        nbytes=manifest.nbytes,
        damages=damages,
        unchecked=[damage.file for damage in later],
    )


class _Check:
    """Verification of one checkpoint that reads each of its files once.

    One thread at a time calls ``progress``.
    """

    def __init__(self, path: Location, manifest: Manifest, progress: Progress) -> None:
        self.error: BaseException | None = None
        """Error that ended the verification early."""

        self._path = path
        self._manifest = manifest
        self._pieces = Pieces(path, manifest)
        self._progress = progress
        self._lock = threading.Lock()
        self._buffers = [memoryview(bytearray(BLOCK_NBYTES)) for _ in range(path.num_readers)]
        self._intervals: dict[str, Rows] = {}

    def file(self, name: str) -> list[Damage]:
        """Check a file; called by several threads."""
        buffer, expected = self._buffers.pop(), self._manifest.files[name].nbytes
        path = (self._path / name).reading_ahead()
        try:
            with path.open_source() as (descriptor, nbytes):
                return list(self._file(name, descriptor, nbytes, buffer))
        except FileNotFoundError:
            found = "no such file"
        except (CheckpointError, OSError) as error:
            found = str(error)
        finally:
            self._buffers.append(buffer)
        return [Damage(file=name, expected=f"a file of {expected:,} bytes", found=found)]

    def placement(self) -> list[Damage]:
        """Compare the placement with the tables of all files."""
        pieces = Pieces(self._path.reading_ahead(), self._manifest)  # queried for each tensor
        try:
            pieces.check([self._intervals[name] for name in self._manifest.data_files])
        except CheckpointError as error:
            expected = "the files that have the elements of each tensor"
            return [Damage(file=PLACEMENT, expected=expected, found=str(error))]
        return []

    def _file(
        self, name: str, descriptor: Source, nbytes: int, buffer: memoryview
    ) -> Iterator[Damage]:
        expected = self._manifest.files[name].nbytes
        if nbytes != expected:
            yield Damage(
                file=name, expected=f"a file of {expected:,} bytes", found=f"{nbytes:,} bytes"
            )
        table = None
        if name in self._manifest.data_files:
            try:
                table = self._pieces.read_table(name)
            except CheckpointError as error:
                lost = first_three(self._tensors_in(name))
                yield Damage(
                    file=name,
                    expected=f"a table of its {self._manifest.files[name].pieces:,} pieces",
                    found=f"{error}. What it has of {lost or 'tensors'} cannot be checked",
                )
                self._advance(expected)
                return
            self._intervals[name] = table.intervals()
        yield from self._contents(name, table, descriptor, nbytes, buffer)

    def _contents(
        self,
        name: str,
        table: PieceTable | None,
        descriptor: Source,
        nbytes: int,
        buffer: memoryview,
    ) -> Iterator[Damage]:
        """Check the blocks of all pieces, and all bytes around them with one checksum."""
        expected, end = self._manifest.files[name], 0
        frames = xxhash.xxh3_128()  # of all bytes outside of blocks and of the table

        def read_frames(start: int, stop: int) -> None:
            while start < stop:
                view = buffer[: min(stop - start, len(buffer))]
                count = read_into(descriptor, view, start)
                if not count:
                    return
                frames.update(view[:count])
                start += count
                self._advance(count)

        for section, piece in () if table is None else table.by_payload():
            read_frames(end, piece.payload)
            itemsize = self._manifest.sections[section].dtype.itemsize
            end = piece.payload + piece.interval.numel * itemsize
            for index, wanted in enumerate(piece.checksums):
                start = piece.payload + index * BLOCK_NBYTES
                block = Interval(start, min(end, start + BLOCK_NBYTES))
                found = _checksum_of(descriptor, block, buffer)
                if found != wanted:
                    owner = self._manifest.owners.get(section, f"section {section}")
                    yield Damage(file=name, tensor=owner, where=block, expected=wanted, found=found)
                self._advance(block.numel)
        where = self._manifest.table_of(name)  # its checksum was compared when it was read
        where = where.intersect(Interval(0, expected.nbytes))
        read_frames(end, where.start)
        self._advance(where.numel)
        if frames.hexdigest() != expected.checksum and nbytes >= expected.nbytes:
            of_what = " over the bytes around its tensors" * bool(expected.pieces)
            yield Damage(
                file=name, expected=f"{expected.checksum}{of_what}", found=frames.hexdigest()
            )

    def _tensors_in(self, name: str) -> list[str]:
        """Return names of tensors with elements in a file, as far as the placement can be read."""
        number, found = self._manifest.data_files.index(name), list[str]()
        with contextlib.suppress(CheckpointError):
            for section in range(len(self._manifest.sections)):
                if number in self._pieces.extents(section)[1]:
                    found.append(self._manifest.owners.get(section, f"section {section}"))
        return found

    def stop(self, error: BaseException) -> None:
        """Make all threads end at their next block."""
        self.error = self.error or error

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            try:
                if self.error is None:
                    self._progress(nbytes)
            except BaseException as error:  # noqa: BLE001 - raised where the verification was asked for
                self.stop(error)
        if self.error is not None:
            raise _StoppedError


class _StoppedError(Exception):
    """Ends a thread; unlike an error of the system, it is no damage of a file."""


def _checksum_of(descriptor: Source, block: Interval, buffer: memoryview) -> str:
    view = buffer[: block.numel]
    done = read_into(descriptor, view, block.start)
    if done < len(view):
        return f"the end of the file at byte {block.start + done:,}"
    return hexdigest(view)


def _extra(path: Location, known: set[str]) -> list[Damage]:
    """Return a damage for each entry of a checkpoint that its manifest does not name."""
    return [
        Damage(file=name, expected="no such file", found=kind)
        for name, kind in path.kinds().items()
        if name not in known
    ]


def _examine_foreign(place: Location, progress: Progress, started: Progress) -> Verification:
    path = place.local_only(FOREIGN)
    try:
        checkpoint = ForeignCheckpoint(path)
    except CheckpointError as error:
        damage = Damage(
            file=DCP_METADATA, expected="an index that fits the files", found=str(error)
        )
        return Verification(path=place, step=None, nbytes=0, damages=[damage])
    items = {
        piece.item: tensor.name for tensor in checkpoint.tensors.values() for piece in tensor.pieces
    } | {stored.item: "" for stored in checkpoint.objects.values()}
    if (path / LIGHTNING_META).is_file():
        items[
            Item(file=LIGHTNING_META, offset=0, nbytes=(path / LIGHTNING_META).stat().st_size)
        ] = ""
    nbytes = sum(item.nbytes for item in items)
    started(nbytes)
    damages: list[Damage] = []
    unchecked = [DCP_METADATA]
    for item in sorted(items, key=lambda item: (item.file, item.offset)):
        where = Interval(item.offset, item.offset + item.nbytes)
        try:
            with open_regular(path / item.file) as (descriptor, _):
                if not check_item_crc(descriptor, item):
                    unchecked.append(items[item] or f"{item.file} from byte {item.offset:,}")
        except (CheckpointError, OSError) as error:
            intact = "items whose CRCs are those of their bytes"
            damages.append(
                Damage(
                    file=item.file,
                    tensor=items[item],
                    where=where,
                    expected=intact,
                    found=str(error),
                )
            )
        progress(item.nbytes)
    return Verification(path=place, step=None, nbytes=nbytes, damages=damages, unchecked=unchecked)
