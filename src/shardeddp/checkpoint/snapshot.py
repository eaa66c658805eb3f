"""Snapshot: a checkpoint as named tensors, each rank's share of them, copied for later saves."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapreplace
from typing import Any, TypeAlias

import torch

from shardeddp.checkpoint.interop import lightning_meta, pickled_alone
from shardeddp.checkpoint.items import block_digests, digest, memory_view
from shardeddp.checkpoint.manifest import PLAIN_EXTRA, SHARDED_EXTRA, ItemPath, Section, name_of
from shardeddp.checkpoint.read import LazyTensor
from shardeddp.checkpoint.schema import HYPER_PARAMETERS, OPTIMIZERS, WEIGHTS, optimizers_in
from shardeddp.checkpoint.state_codec import (
    Codec,
    dotted,
    encode,
    sparse_parts,
    tensors_with_paths,
    with_leaves,
)
from shardeddp.comm import Mesh, agree_on_any, gather_to_first, run_on_all_ranks
from shardeddp.comm.host_group import HostGroup
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import storage_of

# -- HostMemory: memory for the copies of all saves

_ALIGNMENT = 64
CHUNK_NBYTES = 1 << 30
"""Size of a chunk of host memory: as pinned memory is allocated in powers of two, one block for
140 GB would take 256 GB. A single larger tensor gets a larger chunk.
"""


class HostMemory:
    """Host memory that is reused: new pages of the system cost ten times a copy into known pages.

    It is pinned if there are devices to copy from, and consists of chunks of ``CHUNK_NBYTES``.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._is_pinned = False

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, 1D and contiguous, to the host; return when the copies are complete.

        They are valid until the next call.
        """
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        offsets, chunks = self._layout(tensors)
        fits = len(chunks) <= len(self._chunks) and all(
            nbytes <= chunk.numel() for nbytes, chunk in zip(chunks, self._chunks, strict=False)
        )
        if not fits or (devices and not self._is_pinned):
            # Old chunks are freed before new ones are allocated. No copy into them is under way
            # (each call waits for its own), and no save reads them (the one before has ended).
            self._chunks = []
            self._is_pinned = bool(devices)
            self._chunks = [
                torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu")
                for nbytes in chunks
            ]
        copies = [
            self._chunks[chunk][offset : offset + tensor.nbytes]
            .view(tensor.dtype)
            .copy_(tensor, non_blocking=True)
            for (chunk, offset), tensor in zip(offsets, tensors, strict=True)
        ]
        for device in devices:
            torch.accelerator.synchronize(device)
        return copies

    def _layout(self, tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int]], list[int]]:
        """Return chunk and offset of every tensor, and the size of every chunk."""
        offsets: list[tuple[int, int]] = []
        chunks: list[int] = [0]
        for tensor in tensors:
            nbytes = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            if chunks[-1] and chunks[-1] + nbytes > CHUNK_NBYTES:
                chunks.append(0)
            offsets.append((len(chunks) - 1, chunks[-1]))
            chunks[-1] += nbytes
        return offsets, chunks


# -- Replica check: equal elements have equal bits

_Held: TypeAlias = tuple[int, Interval, bool, bytes]
"""Section and interval of a share, True if its rank writes it, and its digest."""


def compare_replicas(
    shares: Sequence[Share],
    digests: Callable[[], Sequence[bytes]],
    part: int,
    names: Sequence[str],
    group: HostGroup,
) -> None:
    """Refuse a save on all ranks if replicas differ; a collective of all ranks.

    Each rank sends one digest. Only if digests differ, each sends that of every share. ``digests``
    returns those of the shares, and is called once; ``part`` is equal on replicas, see
    :func:`part_of`.
    """
    step, own = "comparing replicas", list[bytes]()

    def one() -> bytes:
        own.extend(digests())
        return part.to_bytes(8, "little") + digest(b"".join(own))

    received = [*map(bytes, gather_to_first(step, one, group))]
    if not agree_on_any([len(set(received)) > len({each[:8] for each in received})], group)[0]:
        return

    def all_of_them() -> bytes:
        rows = zip(shares, own, strict=True)
        return pickle.dumps([(it.section, it.interval, it.written, found) for it, found in rows])

    held = [pickle.loads(each) for each in gather_to_first(step, all_of_them, group)]
    run_on_all_ranks(step, lambda: _refuse(held, names) if held else None, group)


def compare_shares(shares: Sequence[Share], names: Sequence[str], mesh: Mesh) -> None:
    """Compare the replicas of a checkpoint's shares; a collective of all ranks."""
    part = part_of(mesh)
    if part is not None:

        def digests() -> list[bytes]:
            return [share_digest(block_digests(plain_elements(it.elements))) for it in shares]

        compare_replicas(shares, digests, part, names, mesh.saving)


def part_of(mesh: Mesh) -> int | None:
    """Return the index of this rank's shards, which is equal on replicas; None: no replicas."""
    axes = [mesh.topology, *([mesh.experts.topology] if mesh.experts is not None else ())]
    if all(it.num_slices == it.data_size for it in axes):
        return None
    part = 0
    for it in axes:  # ranks are replicas if they are on both
        part = part * it.tensor_size + it.tensor_rank(mesh.rank)
        part = part * it.num_slices + it.slice_rank(mesh.rank)
    return part


def share_digest(digests: Iterable[bytes]) -> bytes:
    """Return the digest of a share, from those of its blocks."""
    return digest(b"".join(digests))


def plain_elements(elements: torch.Tensor) -> torch.Tensor:
    """Return elements on the host, contiguous, with pending conjugation and negation applied."""
    return elements.as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()


def _refuse(held: Sequence[Sequence[_Held]], names: Sequence[str]) -> None:
    writers = {
        (section, interval): (rank, found)
        for rank, rows in enumerate(held)
        for section, interval, written, found in rows
        if written
    }
    for rank, rows in enumerate(held):
        for section, interval, _, found in rows:
            writer, expected = writers[section, interval]
            if found != expected:
                raise CheckpointError(
                    f"replicas differ: {names[section]}, elements from {interval.start} to "
                    f"{interval.stop}, is not the same on rank {rank} as on rank {writer}. They "
                    f"have to be equal to the last bit: one of these ranks has computed or kept "
                    f"something wrong. Nothing was saved: go on from the last checkpoint, on other "
                    f"machines"
                )


# -- Snapshot: a checkpoint as named tensors, and each rank's part of it


ParameterNames = Sequence[Sequence[str]]
"""Fqns of each optimizer's parameters, in the order of its groups."""


@dataclass(frozen=True, slots=True)
class Share:
    """Interval of a tensor that this rank holds."""

    section: int
    """Index of the tensor's section, see :class:`Snapshot`."""

    interval: Interval
    elements: torch.Tensor
    """Elements, 1D, row-major: the memory that training goes on with, or a copy of it."""

    written: bool
    """True if this rank writes the elements; else a replica does.

    In that case they are compared with those of the replica.
    """


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a checkpoint.

    Tensors that are stored once, tied parameters, are one section. Sections of sharded tensors come
    first, the same on every rank. Only rank 0 has the others, and the names and the tree.
    """

    tree: Any = None
    """The checkpoint as JSON, with names instead of tensors."""

    objects: list[tuple[ItemPath, Any]] = field(default_factory=list[tuple[ItemPath, Any]])
    """Non-tensors of model and optimizers, for other readers; this package does not use them."""

    rest: bytes = b""
    """The checkpoint without model, optimizers and sharded tensors, as Lightning reads it.

    Only rank 0 has it.
    """

    sections: list[Section] = field(default_factory=list[Section])
    """All sections, without their places in files."""

    tensors: list[tuple[ItemPath, int]] = field(default_factory=list[tuple[ItemPath, int]])
    """Path of each tensor and its section; a tensor of several sections has several entries."""

    shares: list[Share] = field(default_factory=list[Share])
    """Shares of this rank, by section."""

    num_sharded: int = 0
    """Number of sections of sharded tensors."""

    layout: bytes = b""
    """Digest of these sections, which are the same on every rank."""

    part: int | None = None
    """Index of this rank's shards, see :func:`part_of`; None: no replicas."""

    @cached_property
    def names(self) -> list[str]:
        """First name of each section."""
        found: dict[int, str] = {}
        for path, section in self.tensors:
            found.setdefault(section, name_of(path))
        return [found[section] for section in range(len(self.sections))]

    @property
    def nbytes(self) -> int:
        """Bytes of elements that this rank writes."""
        return sum(share.elements.nbytes for share in self.shares if share.written)

    def copied(self, memory: HostMemory) -> Snapshot:
        """Return the snapshot with its elements copied to ``memory``, for a background write."""
        copies = memory.copies([share.elements for share in self.shares])
        shares = [
            replace(share, elements=own) for share, own in zip(self.shares, copies, strict=True)
        ]
        # Callbacks go on with the objects that they have returned; the rest is pickled already.
        return replace(self, shares=shares, objects=copy.deepcopy(self.objects))


def take_snapshot(
    checkpoint: Mapping[str, Any], names: ParameterNames, mesh: Mesh, codecs: Sequence[Codec] = ()
) -> Snapshot:
    """Name every tensor of a checkpoint and cut it into shares of the ranks; no communication.

    Lightning's dictionary has the same sharded tensors in the same order on every rank. Replicas of
    a shard take turns, by the bytes assigned to each so far. Tensors that are not sharded are
    written by rank 0 with its values, as in a checkpoint of DDP.
    """
    refuse_tensors(checkpoint)
    objects = _objects(checkpoint, names)
    _refuse_opaque(objects, codecs)
    collector, opaque = _Collector(_paths(checkpoint, names), mesh), list[tuple[str, Any]]()
    tree = encode(checkpoint, collector.put, codecs, opaque)
    for path, value in opaque:
        for tensor in tensors_of(value):
            if isinstance(tensor, ShardTensor):
                raise CheckpointError(
                    f"The state cannot be saved: the {type(value).__name__} at {path} cannot be "
                    f"pickled: {pickled_alone(tensor)}"
                )
    rest = {key: value for key, value in checkpoint.items() if key not in (WEIGHTS, OPTIMIZERS)}
    pickled = _pickled(_without_shards(rest), opaque) if mesh.rank == 0 else b""
    return replace(collector.snapshot(), tree=tree, objects=objects, rest=pickled)


def describe_contents(
    checkpoint: Mapping[str, Any], names: ParameterNames, mesh: Mesh
) -> tuple[list[tuple[torch.Tensor, ItemPath]], list[ItemPath], list[Share], list[str]]:
    """Describe the content of a plain file, and the shards of replicas; no communication.

    Returns:
        All tensors with their paths; paths of the model's and optimizers' values that are no
        tensors; this rank's shares of sharded tensors; and the first name of each section.
    """
    collector = _Collector(_paths(checkpoint, names), mesh)
    tensors = list[tuple[torch.Tensor, ItemPath]]()
    for tensor in tensors_of(checkpoint):
        path = collector.path_of(tensor)
        tensors.append((tensor, path))
        if isinstance(tensor, ShardTensor):
            collector.add(path, tensor)
    stored, objects = collector.snapshot(), [path for path, _ in _objects(checkpoint, names)]
    return tensors, objects, stored.shares, stored.names


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return all tensors in nested mappings and sequences."""
    return [tensor for tensor, _ in tensors_with_paths(tree)]


def refuse_tensors(checkpoint: Mapping[str, Any], *, pickled: bool = False) -> None:
    """Refuse tensors that could not be saved or loaded again; the error has their path.

    A file of torch (``pickled``) can hold more kinds of tensors.
    """
    for tensor, keys in tensors_with_paths(checkpoint):
        if why := _why_not_saved(tensor, pickled):
            raise CheckpointError(
                f"The state cannot be saved: the {type(tensor).__name__} at {dotted(tuple(map(str, keys)))} {why}"
            )


def _why_not_saved(tensor: torch.Tensor, pickled: bool) -> str | None:
    if tensor.is_meta:
        return "is on the meta device and has no values: give it some, or leave it out"
    torch_saves = tensor.is_quantized or tensor.layout is torch.jagged
    if (tensor.is_nested or tensor.is_quantized) and not (pickled and torch_saves):
        return "is nested or quantized: keep the plain tensors that it consists of"
    if str(tensor.layout) == "torch._mkldnn":
        return "is of a layout that is not stored: keep tensor.to_dense()"
    if type(tensor) not in _STORED and tensor.layout is torch.strided:
        try:
            memory_view(plain_elements(tensor.detach().reshape(-1)[:1]))
        except Exception as error:  # noqa: BLE001 - a foreign class may raise anything
            said = (str(error).splitlines() or [""])[0]
            return f"gives no elements ({said[:200]}): keep the plain tensors that it consists of"
    return None


_STORED = (torch.Tensor, torch.nn.Parameter, ShardTensor, LazyTensor)


def where_pickling_fails(tree: Any, pickled: Callable[[Any], object]) -> str:
    """Return class and path of the first value of a tree that cannot be pickled."""
    found: list[tuple[str, Any]] = []
    with suppress(CheckpointError):  # a value that contains itself ends the search
        encode(tree, lambda tensor: "", (), found)
    for path, value in found:
        try:
            pickled(value)
        except Exception:  # noqa: BLE001 - a foreign class may raise anything
            return f"the {type(value).__name__} at {path}"
    return "something in it"


def _pickled(rest: Mapping[str, Any], opaque: Sequence[tuple[str, Any]]) -> bytes:
    """Return the pickle that Lightning reads, with the values that only pickle can hold."""
    try:
        pickled = lightning_meta(rest, {id(value) for _, value in opaque})
    except Exception as error:
        raise CheckpointError(
            f"The state cannot be saved: {where_pickling_fails(rest, lightning_meta)} cannot be "
            f"pickled: {type(error).__name__}: {error}"
        ) from error
    kept = [path for path, _ in opaque if path.split(".")[0] not in HYPER_PARAMETERS]
    if kept:
        warnings.warn(
            f"{', '.join(kept[:3])}{' and others' if len(kept) > 3 else ''} in the checkpoint can be "
            f"kept by pickle alone: to resume from it takes trainer.fit(..., weights_only=False). "
            f"Keep numbers, text, tensors and containers of them instead",
            stacklevel=2,
        )
    return pickled


def nbytes_of(tree: Any) -> int:
    """Return the bytes of all tensors in a tree, over all ranks; shared memory counts once."""
    parts = [
        part
        for tensor in tensors_of(tree)
        for part in (
            [tensor] if tensor.layout == torch.strided else tensors_of(sparse_parts(tensor))
        )
    ]
    return sum({memory_key(it): it.numel() * it.element_size() for it in parts}.values())


class _Collector:
    def __init__(self, paths: Mapping[int, ItemPath], mesh: Mesh) -> None:
        self._paths = paths
        self._rank, self._part = mesh.rank, part_of(mesh)
        self._tensors: list[tuple[ItemPath, tuple[bool, range]]] = []
        # Sharded and others apart: the numbers of the others begin after all sharded ones.
        self._sections: dict[bool, list[tuple[ItemPath, Section]]]
        self._sections = {True: [], False: []}
        self._shares: dict[bool, list[Share]] = {True: [], False: []}
        self._stored: dict[tuple[Any, ...], tuple[bool, range]] = {}  # by memory
        self._extras = {SHARDED_EXTRA: 0, PLAIN_EXTRA: 0}
        # Heaps of (bytes to write so far, rank): of this rank's replicas, and of each box's ranks
        # with the same slice of it.
        self._turns = _turns(mesh)
        self._turns_by_box = {mesh.topology: _turns_by_box(mesh)}
        if mesh.experts is not None:
            self._turns_by_box[mesh.experts.topology] = _turns_by_box(mesh.experts)

    def put(self, tensor: torch.Tensor) -> str:
        """Take a tensor and return its name, which replaces it in the tree."""
        path = self.path_of(tensor)
        self.add(path, tensor)
        return name_of(path)

    def path_of(self, tensor: torch.Tensor) -> ItemPath:
        """Return the path of a tensor; called once for each occurrence."""
        return self._paths.get(id(tensor)) or self._extra(tensor)

    def add(self, path: ItemPath, tensor: torch.Tensor) -> None:
        """Take this rank's share of a tensor, unless its memory was taken before."""
        key, sharded = memory_key(tensor), isinstance(tensor, ShardTensor)
        if isinstance(tensor, ShardTensor) and tensor.spec.mesh.topology not in self._turns_by_box:
            raise CheckpointError(
                f"the state cannot be saved: {name_of(path)} has the shards from before "
                f"strategy.reshard(). Call reshard() outside of a save (not in on_save_checkpoint), "
                f"and make copies of parameters anew after it"
            )
        if key not in self._stored:
            sections, shape = self._sections[sharded], tuple(tensor.shape)
            before = first = len(sections)
            if isinstance(tensor, ShardTensor) and tensor.spec.boxes:
                spec = tensor.spec
                first += sum(len(shared) for shared in spec.boxes[: spec.tensor_rank])
                sections += [
                    (path, Section(tensor.dtype, box.sizes, offsets=box.offsets, whole=shape))
                    for shared in spec.boxes
                    for box in shared
                ]
                self._take(first, tensor)
            else:
                sections.append((path, Section(tensor.dtype, shape)))
                self._take(first, tensor)
            self._stored[key] = sharded, range(before, len(sections))
        self._tensors.append((path, self._stored[key]))

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all tensors taken."""
        sharded, plain = self._sections[True], self._sections[False]
        first = {True: 0, False: len(sharded)}
        return Snapshot(
            sections=[section for _, section in (*sharded, *plain)],
            tensors=[
                (path, first[kind] + number)
                for path, (kind, numbers) in self._tensors
                for number in numbers
            ],
            shares=[
                *self._shares[True],
                *(replace(it, section=first[False] + it.section) for it in self._shares[False]),
            ],
            num_sharded=len(sharded),
            layout=digest(repr(sharded).encode()),
            part=self._part,
        )

    def _extra(self, tensor: torch.Tensor) -> ItemPath:
        # Counted apart: sharded tensors need the same names on all ranks, the others are rank 0's.
        kind = SHARDED_EXTRA if isinstance(tensor, ShardTensor) else PLAIN_EXTRA
        self._extras[kind] += 1
        return (*kind, str(self._extras[kind]))

    def _take(self, number: int, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, ShardTensor):
            if self._rank == 0 and tensor.numel():
                whole, elements = Interval(0, tensor.numel()), tensor.detach().reshape(-1)
                self._shares[False].append(Share(number, whole, elements, True))
            return
        interval = tensor.spec.interval
        # Replicas take turns, by the bytes assigned to each so far.
        writers: list[int] = []
        of_boxes = self._turns_by_box[tensor.spec.mesh.topology] if tensor.spec.boxes else ()
        for turns in of_boxes or [self._turns]:
            load, writer = turns[0]
            heapreplace(turns, (load + interval.numel * tensor.element_size(), writer))
            writers.append(writer)
        if interval.numel:
            written, local = self._rank in writers, tensor.to_local().detach()
            numbers = {box: number + at for at, box in enumerate(tensor.spec.shared)}
            start = 0
            for box, part in tensor.spec.pieces:
                elements = local[start : start + part.numel]
                number = number if box is None else numbers[box]
                self._shares[True].append(Share(number, part, elements, written))
                start += part.numel


_Turns = list[tuple[int, int]]


def _turns(mesh: Mesh) -> _Turns:
    topology, own = mesh.topology, mesh.topology.slice_rank(mesh.rank)
    return [(0, rank) for rank in range(topology.world_size) if topology.slice_rank(rank) == own]


def _turns_by_box(mesh: Mesh) -> list[_Turns]:
    topology = mesh.topology
    return [
        [(load, rank) for load, rank in _turns(mesh) if topology.tensor_rank(rank) == tensor_rank]
        for tensor_rank in range(topology.tensor_size)
    ]


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors stored as the same bytes; consistent across ranks."""
    if isinstance(tensor, LazyTensor) or tensor.layout != torch.strided:
        return (id(tensor),)
    local = tensor.to_local() if isinstance(tensor, ShardTensor) else tensor
    spec = id(tensor.spec) if isinstance(tensor, ShardTensor) else None
    memory = storage_of(local), local.storage_offset(), local.stride()
    return (*memory, spec, tensor.dtype, tuple(tensor.shape))


def _paths(checkpoint: Mapping[str, Any], names: ParameterNames) -> dict[int, ItemPath]:
    """Return paths of model and optimizer tensors by id, as in Lightning's FSDPStrategy."""
    values = _values(checkpoint, names)
    return {id(value): path for path, value in values if isinstance(value, torch.Tensor)}


def _objects(checkpoint: Mapping[str, Any], names: ParameterNames) -> list[tuple[ItemPath, Any]]:
    return [
        (path, _without_shards(value))
        for path, value in _values(checkpoint, names)
        if not isinstance(value, torch.Tensor)
    ]


def _values(checkpoint: Mapping[str, Any], names: ParameterNames) -> Iterator[tuple[ItemPath, Any]]:
    """Yield every value of the model, and of optimizers under the names of parameters."""
    for key, value in checkpoint.get(WEIGHTS, {}).items():
        yield ("model", key), value
    optimizers = zip(optimizers_in(checkpoint), names, strict=False)
    for number, (optimizer, fqns) in enumerate(optimizers):
        root = f"optimizer_{number}"
        for index, state in optimizer.get("state", {}).items():
            # Other keys belong to no parameter.
            if isinstance(index, int) and 0 <= index < len(fqns):
                for key, value in state.items():
                    yield (root, "state", fqns[index], key), value
        # Lightning's placeholder for a module without optimizers has no groups.
        groups = optimizer.get("param_groups", ())
        named = [{**it, "params": [fqns[index] for index in it["params"]]} for it in groups]
        yield (root, "param_groups"), named


def _refuse_opaque(objects: Sequence[tuple[ItemPath, Any]], codecs: Sequence[Codec]) -> None:
    """Refuse model and optimizer values that cannot be restored without pickle."""
    for path, value in objects:
        found: list[tuple[str, Any]] = []
        encode(value, lambda tensor: "", codecs, found)
        if found:
            raise CheckpointError(
                f"{name_of(path)} is a {type(value).__name__} that only pickle can save, which "
                f"sharded checkpoints do not. Let it be made of numbers, text, tensors and "
                f"containers of them, or use state_dict_type='full'"
            )


def _without_shards(tree: Any) -> Any:
    return with_leaves(tree, lambda leaf: None if isinstance(leaf, ShardTensor) else leaf)
