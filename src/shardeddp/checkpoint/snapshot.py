"""Snapshot: a checkpoint as named tensors, what each rank writes of them, copied if saved later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapreplace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shardeddp.checkpoint.interop import lightning_meta
from shardeddp.checkpoint.items import block_digests, digest
from shardeddp.checkpoint.manifest import (
    DIGEST_NBYTES,
    PLAIN_EXTRA,
    SHARDED_EXTRA,
    ItemPath,
    name_of,
)
from shardeddp.checkpoint.read import LazyTensor
from shardeddp.checkpoint.state_codec import Codec, decode, encode, opaque_paths, sparse_parts
from shardeddp.comm import Mesh, agree_on_any, gather_to_first, run_on_all_ranks
from shardeddp.comm.host_group import HostGroup
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval
from shardeddp.plan.topology import Topology
from shardeddp.tensor.shard_tensor import ShardTensor

# -- HostMemory: one buffer for the copies of all saves

_ALIGNMENT = 64


class HostMemory:
    """Keeps its memory: pages new from the system cost ten times a copy into known pages.

    It is pinned where there are devices to copy from.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, 1D and contiguous, to the host; return when they have arrived.

        The copies are valid until the next call.
        """
        offsets = [0]
        for tensor in tensors:
            offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        if self._buffer.numel() < offsets[-1]:
            # The old memory is freed before the new one is allocated.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(
                offsets[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
        copies = [
            self._buffer[offset : offset + tensor.nbytes]
            .view(tensor.dtype)
            .copy_(tensor, non_blocking=True)
            for offset, tensor in zip(offsets, tensors, strict=False)
        ]
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return copies


# -- Replica check: equal elements have equal bits

_HELD = np.dtype(
    [
        ("section", "<u4"),
        ("start", "<u8"),
        ("stop", "<u8"),
        ("written", "?"),
        ("digest", f"V{DIGEST_NBYTES}"),
    ]
)
"""A share of a rank, as it is told where replicas differ."""


def compare_replicas(
    shares: Sequence[Share],
    digests: Callable[[], Sequence[bytes]],
    part: int,
    names: Sequence[str],
    group: HostGroup,
) -> None:
    """Compare what ranks that hold the same elements hold; a collective of all ranks.

    A rank tells one checksum. Only where they differ each tells that of every share.

    Args:
        shares: What this rank holds.
        digests: Gives the checksum of each; asked once.
        part: Number of the elements: ranks with the same one hold the same.
        names: Of sections, for the error.
        group: Host group of all ranks.

    Raises:
        CheckpointError: Two of them differ: names the tensor and the ranks.
    """
    step, own = "comparing replicas", list[bytes]()

    def one() -> bytes:
        own.extend(digests())
        return part.to_bytes(8, "little") + digest(b"".join(own))

    told = gather_to_first(step, one, group)
    if not agree_on_any([len(set(told)) > len({each[:8] for each in told})], group)[0]:
        return

    def all_of_them() -> bytes:
        fields = (
            (share.section, share.interval.start, share.interval.stop, share.written, found)
            for share, found in zip(shares, own, strict=True)
        )
        return np.array(list(fields), dtype=_HELD).tobytes()

    held = [np.frombuffer(each, _HELD) for each in gather_to_first(step, all_of_them, group)]
    run_on_all_ranks(step, lambda: _refuse(held, names) if held else None, group)


def compare_shares(shares: Sequence[Share], names: Sequence[str], mesh: Mesh) -> None:
    """The same of the shares that ranks have of a checkpoint; a collective of all ranks.

    Args:
        shares: This rank's, of sharded tensors.
        names: Of sections, for the error.
        mesh: All ranks.

    Raises:
        CheckpointError: Two replicas differ.
    """
    part = part_of(mesh)
    if part is not None:

        def digests() -> list[bytes]:
            return [digest_of(block_digests(plain_elements(it.elements))) for it in shares]

        compare_replicas(shares, digests, part, names, mesh.saving)


def part_of(mesh: Ranks) -> int | None:
    """Which elements of sharded tensors this rank holds; None: no other rank holds the same."""
    topology = mesh.topology
    alone = topology.num_slices == topology.data_size
    place = topology.tensor_rank(mesh.rank) * topology.num_slices
    return None if alone else place + topology.slice_rank(mesh.rank)


def digest_of(digests: Iterable[bytes]) -> bytes:
    """The checksum of a share, from those of its blocks."""
    return digest(b"".join(digests))


def plain_elements(elements: torch.Tensor) -> torch.Tensor:
    """In host memory, one after the other, without a conjugation that is still to come."""
    return elements.as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()


def _refuse(held: Sequence[Any], names: Sequence[str]) -> None:
    writers = {
        row[:3]: (rank, row[4]) for rank, rows in enumerate(held) for row in rows.tolist() if row[3]
    }
    for rank, rows in enumerate(held):
        for section, start, stop, _, found in rows.tolist():
            writer, expected = writers[section, start, stop]
            if found != expected:
                raise CheckpointError(
                    f"replicas differ: {names[section]}, elements from {start} to {stop}, is not "
                    f"the same on rank {rank} as on rank {writer}. They have to be equal to the "
                    f"last bit: one of these ranks has computed or kept something wrong. Nothing "
                    f"was saved: go on from the last checkpoint, on other machines"
                )


# -- Snapshot: a checkpoint as named tensors, and each rank's part of it


class SectionSpec(NamedTuple):
    """What is known of a section before it is written; see :class:`Section`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()


ParameterNames = Sequence[Sequence[str]]
"""For each optimizer, the fqns of its parameters in the order of its groups."""


class Ranks(Protocol):
    """Those who save a checkpoint together: a ``Mesh``."""

    @property
    def rank(self) -> int:
        """This one's."""
        ...

    @property
    def topology(self) -> Topology:
        """All of them."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """An interval of a tensor that lies with this rank."""

    section: int
    """Number of the tensor among those that are stored, see :class:`Snapshot`."""

    interval: Interval
    elements: torch.Tensor
    """1D, row-major; what training goes on with, or a copy of it."""

    written: bool
    """Whether this rank writes the elements; else a replica does.

    In that case they are compared with what the replica writes.
    """


@dataclass(frozen=True)
class Snapshot:
    """What one rank has of a checkpoint.

    Tensors that are stored once, tied parameters, are one section. Sections of sharded tensors have
    the first numbers, the same on every rank. The others are rank 0's, and so are names and tree.
    """

    tree: Any
    """The checkpoint as JSON, with names in place of tensors."""

    objects: list[tuple[ItemPath, Any]]
    """Non-tensors of model and optimizers, for other readers; this package does not use them."""

    rest: bytes
    """The checkpoint without model, optimizers and sharded tensors, as Lightning reads it.

    Only rank 0 has it.
    """

    sections: list[SectionSpec] = field(default_factory=list[SectionSpec])
    """Dtype and shape of each."""

    tensors: list[tuple[ItemPath, int]] = field(default_factory=list[tuple[ItemPath, int]])
    """Where each tensor lies in the checkpoint, and its section; once for each section it has."""

    shares: list[Share] = field(default_factory=list[Share])
    """By section."""

    num_sharded: int = 0
    """How many of the sections are of sharded tensors."""

    layout: bytes = b""
    """Checksum of those, which are the same on every rank."""

    part: int | None = None
    """Which elements of them this rank holds; None: no other rank holds the same."""

    @cached_property
    def names(self) -> list[str]:
        """The first name of each section."""
        found: dict[int, str] = {}
        for path, section in self.tensors:
            found.setdefault(section, name_of(path))
        return [found[section] for section in range(len(self.sections))]

    @property
    def nbytes(self) -> int:
        """Bytes of elements that this rank writes."""
        return sum(share.elements.nbytes for share in self.shares if share.written)

    def copied(self, memory: HostMemory) -> Snapshot:
        """The snapshot with its own elements in host memory, for a write in the background."""
        copies = memory.copies([share.elements for share in self.shares])
        shares = [
            replace(share, elements=own) for share, own in zip(self.shares, copies, strict=True)
        ]
        # Callbacks go on with the very objects that they have handed out; the rest was pickled
        # already.
        return replace(self, shares=shares, objects=copy.deepcopy(self.objects))


def take_snapshot(
    checkpoint: Mapping[str, Any], names: ParameterNames, mesh: Ranks, codecs: Sequence[Codec] = ()
) -> Snapshot:
    """Name every tensor of a checkpoint and cut it into what each rank writes; no communication.

    Replicas of a shard take turns by the bytes that each has been given so far. What is not sharded
    is written by rank 0, whose values count, as in a checkpoint of DDP.

    Args:
        checkpoint: As Lightning has put it together: ``state_dict``, ``optimizer_states`` and
            anything else; the same sharded tensors in the same order on every rank.
        names: Of the parameters of each optimizer in it.
        mesh: The ranks that save it.
        codecs: For values of further types in it.

    Raises:
        CheckpointError: The model or an optimizer has a state that JSON and tensors cannot hold.
    """
    objects = _objects(checkpoint, names)
    _refuse_opaque(objects, codecs)
    collector = _Collector(_paths(checkpoint, names), mesh)
    tree = encode(checkpoint, collector.put, codecs)
    stored = collector.stored()
    rest = {
        key: value
        for key, value in checkpoint.items()
        if key not in ("state_dict", "optimizer_states")
    }
    return Snapshot(
        tree=tree,
        objects=objects,
        rest=lightning_meta(_without_shards(rest)) if mesh.rank == 0 else b"",
        sections=[spec for _, spec in stored.sections],
        tensors=stored.tensors,
        shares=stored.shares,
        num_sharded=stored.num_sharded,
        layout=stored.layout,
        part=part_of(mesh),
    )


def describe(
    checkpoint: Mapping[str, Any], names: ParameterNames, mesh: Ranks
) -> tuple[list[tuple[torch.Tensor, ItemPath]], list[ItemPath], list[Share], list[str]]:
    """Content of a plain file, and the shards that replicas have in common; no communication.

    Args:
        checkpoint: As for :func:`take_snapshot`.
        names: As for :func:`take_snapshot`.
        mesh: The ranks that save it.

    Returns:
        Each tensor with its path; the paths of what is no tensor and belongs to the model or an
        optimizer; and what this rank has of the sharded tensors, with the names of these.
    """
    collector, tensors = (
        _Collector(_paths(checkpoint, names), mesh),
        list[tuple[torch.Tensor, ItemPath]](),
    )
    for tensor in tensors_of(checkpoint):
        path = collector.path_of(tensor)
        tensors.append((tensor, path))
        if isinstance(tensor, ShardTensor):
            collector.add(path, tensor)
    stored, objects = collector.stored(), [path for path, _ in _objects(checkpoint, names)]
    return tensors, objects, stored.shares, [name_of(path) for path, _ in stored.sections]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested mappings and sequences."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = (
        tree.values()
        if isinstance(tree, Mapping)
        else tree
        if isinstance(tree, (list, tuple))
        else ()
    )
    return [tensor for value in values for tensor in tensors_of(value)]


def nbytes_of(tree: Any) -> int:
    """Bytes of all tensors in nested mappings and sequences, on all ranks; shared memory once."""
    parts = [
        part
        for tensor in tensors_of(tree)
        for part in (
            [tensor] if tensor.layout == torch.strided else tensors_of(sparse_parts(tensor))
        )
    ]
    return sum({memory_of_shards(it): it.numel() * it.element_size() for it in parts}.values())


class _Stored(NamedTuple):
    """What a collector has found."""

    sections: list[tuple[ItemPath, SectionSpec]]
    tensors: list[tuple[ItemPath, int]]
    shares: list[Share]
    num_sharded: int
    layout: bytes


class _Collector:
    def __init__(self, paths: Mapping[int, ItemPath], mesh: Ranks) -> None:
        self._paths = paths
        self._rank = mesh.rank
        self._tensors: list[tuple[ItemPath, tuple[bool, range]]] = []
        # By kind, sharded or not, because the numbers of the others begin behind all of these.
        self._sections: dict[bool, list[tuple[ItemPath, SectionSpec]]]
        self._sections = {True: [], False: []}
        self._shares: dict[bool, list[Share]] = {True: [], False: []}
        self._stored: dict[tuple[Any, ...], tuple[bool, range]] = {}  # by memory
        self._extras = {SHARDED_EXTRA: 0, PLAIN_EXTRA: 0}
        topology = mesh.topology
        own = topology.slice_rank(mesh.rank)
        holders = [rank for rank in range(topology.world_size) if topology.slice_rank(rank) == own]
        # Heaps: bytes that each rank writes which holds the same elements as this one, or the same
        # of another box, and the rank.
        self._turns = [(0, rank) for rank in holders]
        self._turns_by_box = [
            [(0, rank) for rank in holders if topology.tensor_rank(rank) == place]
            for place in range(topology.tensor_size)
        ]

    def put(self, tensor: torch.Tensor) -> str:
        """Name a tensor that has been met; the value that stands for it in the tree."""
        path = self.path_of(tensor)
        self.add(path, tensor)
        return name_of(path)

    def path_of(self, tensor: torch.Tensor) -> ItemPath:
        """Where a tensor that has been met lies; asked once for each occurrence."""
        return self._paths.get(id(tensor)) or self._extra(tensor)

    def add(self, path: ItemPath, tensor: torch.Tensor) -> None:
        """Take this rank's share of a tensor, unless its memory is stored already."""
        key, sharded = memory_of_shards(tensor), isinstance(tensor, ShardTensor)
        if key not in self._stored:
            sections, shape = self._sections[sharded], tuple(tensor.shape)
            first = len(sections)
            if isinstance(tensor, ShardTensor) and tensor.spec.boxes:
                sections += [
                    (path, SectionSpec(tensor.dtype, box.sizes, box.offsets, shape))
                    for box in tensor.spec.boxes
                ]
                self._take(first + tensor.spec.place, tensor)
            else:
                sections.append((path, SectionSpec(tensor.dtype, shape)))
                self._take(first, tensor)
            self._stored[key] = sharded, range(first, len(sections))
        self._tensors.append((path, self._stored[key]))

    def stored(self) -> _Stored:
        """All that was met."""
        sharded, plain = self._sections[True], self._sections[False]
        first = {True: 0, False: len(sharded)}
        return _Stored(
            [*sharded, *plain],
            [
                (path, first[kind] + number)
                for path, (kind, numbers) in self._tensors
                for number in numbers
            ],
            [
                *self._shares[True],
                *(replace(it, section=first[False] + it.section) for it in self._shares[False]),
            ],
            len(sharded),
            digest(repr(sharded).encode()),
        )

    def _extra(self, tensor: torch.Tensor) -> ItemPath:
        # Counted apart: the sharded ones have to have the same names on all ranks, the others are
        # rank 0's.
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
        # Replicas take turns by the bytes that each has been given so far.
        writers: list[int] = []
        for turns in self._turns_by_box if tensor.spec.boxes else [self._turns]:
            load, writer = turns[0]
            heapreplace(turns, (load + interval.numel * tensor.element_size(), writer))
            writers.append(writer)
        if interval.numel:
            written, local = self._rank in writers, tensor.to_local().detach()
            self._shares[True].append(Share(number, interval, local, written))


def memory_of_shards(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that would be stored as the same bytes; on all ranks or on none."""
    if isinstance(tensor, LazyTensor) or tensor.layout != torch.strided:
        return (id(tensor),)
    local = tensor.to_local() if isinstance(tensor, ShardTensor) else tensor
    spec = id(tensor.spec) if isinstance(tensor, ShardTensor) else None
    place = local.untyped_storage()._cdata, local.storage_offset(), local.stride()
    return (*place, spec, tensor.dtype, tuple(tensor.shape))


def _paths(checkpoint: Mapping[str, Any], names: ParameterNames) -> dict[int, ItemPath]:
    """Names of model and optimizer tensors by identity, as in Lightning's FSDPStrategy."""
    model = checkpoint.get("state_dict", {})
    paths: dict[int, ItemPath] = {
        id(value): ("model", key) for key, value in model.items() if isinstance(value, torch.Tensor)
    }
    for number, (optimizer, fqns) in enumerate(
        zip(checkpoint.get("optimizer_states", ()), names, strict=False)
    ):
        for path, value in _states(number, optimizer, fqns):
            if isinstance(value, torch.Tensor):
                paths[id(value)] = path
    return paths


def _objects(checkpoint: Mapping[str, Any], names: ParameterNames) -> list[tuple[ItemPath, Any]]:
    model = checkpoint.get("state_dict", {})
    found: list[tuple[ItemPath, Any]] = [
        (("model", key), value)
        for key, value in model.items()
        if not isinstance(value, torch.Tensor)
    ]
    for number, (optimizer, fqns) in enumerate(
        zip(checkpoint.get("optimizer_states", ()), names, strict=False)
    ):
        values = _states(number, optimizer, fqns)
        found += [
            (path, _without_shards(value))
            for path, value in values
            if not isinstance(value, torch.Tensor)
        ]
        groups = [
            {**group, "params": [fqns[index] for index in group["params"]]}
            # A placeholder of Lightning, for a module without optimizers, has no groups.
            for group in optimizer.get("param_groups", ())
        ]
        found.append(((f"optimizer_{number}", "param_groups"), groups))
    return found


def _states(
    number: int, optimizer: Mapping[str, Any], fqns: Sequence[str]
) -> Iterator[tuple[ItemPath, Any]]:
    """Every value that an optimizer keeps of a parameter, under the parameter's name."""
    states: Mapping[Any, Any] = optimizer.get("state", {})
    for index, state in states.items():
        if not isinstance(index, int):
            continue  # what an optimizer keeps of no parameter
        for key, value in state.items():
            yield (f"optimizer_{number}", "state", fqns[index], key), value


def _refuse_opaque(objects: Sequence[tuple[ItemPath, Any]], codecs: Sequence[Codec]) -> None:
    """Refuse model and optimizer values that cannot be restored without pickle."""
    for path, value in objects:
        there = encode(value, lambda tensor: "", codecs)
        if opaque_paths(decode({"": there}, lambda name: torch.empty(0), codecs)):
            raise CheckpointError(
                f"{name_of(path)} is a {type(value).__name__} that only pickle can save, which "
                f"sharded checkpoints do not. Let it be made of numbers, text, tensors and "
                f"containers of them, or use state_dict_type='full'"
            )


def _without_shards(value: Any) -> Any:
    if isinstance(value, ShardTensor):
        return None
    if isinstance(value, Mapping):
        kept = {key: _without_shards(item) for key, item in value.items()}
        return value if all(kept[key] is item for key, item in value.items()) else kept
    if type(value) in (list, tuple):
        return type(value)(map(_without_shards, value))
    return value
