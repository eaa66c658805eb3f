"""Snapshot: a checkpoint as named tensors, what each rank writes of them, copied if saved later."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch

from shardeddp.checkpoint.interop import lightning_meta
from shardeddp.checkpoint.items import block_checksums
from shardeddp.checkpoint.manifest import PLAIN_EXTRA, SHARDED_EXTRA, ItemPath, name_of
from shardeddp.checkpoint.read import LazyTensor
from shardeddp.checkpoint.state_codec import Codec, decode, encode, opaque_paths, sparse_parts
from shardeddp.comm import Mesh, gather_results
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Box, Interval, boxes
from shardeddp.plan.topology import Topology
from shardeddp.tensor.shard_tensor import ShardTensor

# -- HostMemory: one buffer that copies of shards are made into, save after save

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
            self._buffer = torch.empty(
                0, dtype=torch.uint8
            )  # the old memory goes before the new one comes
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


# -- Replicas: ranks that hold the same elements have to hold the same bits, or nothing is saved

BoxKey: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of a tensor, offsets and sizes of a box of it."""

Sums: TypeAlias = Mapping[BoxKey, tuple[str, ...]]


def compare_replicas(written: Sequence[Sums], copies: Sequence[Sums]) -> None:
    """Hold what replicas have against what is written.

    Args:
        written: By rank, the checksums of the boxes that it writes.
        copies: By rank, the checksums of the boxes that it has and another rank writes.

    Raises:
        CheckpointError: Two of them differ: names the tensor and the ranks.
    """
    writers = {key: (rank, sums) for rank, each in enumerate(written) for key, sums in each.items()}
    for rank, each in enumerate(copies):
        for key, checksums in each.items():
            writer, expected = writers[key]
            if checksums != expected:
                name, offsets, sizes = key
                raise CheckpointError(
                    f"replicas differ: {name}, elements from {offsets} of sizes {sizes}, is not "
                    f"the same on rank {rank} as on rank {writer}. They have to be equal to the "
                    f"last bit: one of these ranks has computed or kept something wrong. Nothing "
                    f"was saved: go on from the last checkpoint, on other machines"
                )


def compare_shares(shares: Sequence[Share], mesh: Mesh) -> None:
    """The same of the shares that ranks have of a checkpoint; a collective of all ranks.

    Args:
        shares: This rank's, of sharded tensors.
        mesh: All ranks.

    Raises:
        CheckpointError: Two replicas differ.
    """
    if mesh.topology.num_slices == mesh.topology.world_size:
        return  # no two ranks hold the same elements

    def sums() -> bytes:
        found = [
            (*_key(share), share.written, block_checksums(plain_elements(share.elements)))
            for share in shares
        ]
        return json.dumps(found).encode()

    by_rank = [json.loads(text) for text in gather_results("comparing replicas", sums, mesh.saving)]
    compare_replicas(*([_of_kind(each, written) for each in by_rank] for written in (True, False)))


def plain_elements(elements: torch.Tensor) -> torch.Tensor:
    """In host memory, one after the other, without a conjugation that is still to come."""
    return elements.as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()


def _key(share: Share) -> BoxKey:
    return share.name, share.box.offsets, share.box.sizes


def _of_kind(entries: Sequence[Sequence[Any]], kind: bool) -> dict[BoxKey, tuple[str, ...]]:
    return {
        (name, tuple(offsets), tuple(sizes)): tuple(sums)
        for name, offsets, sizes, written, sums in entries
        if written is kind
    }


# -- Snapshot: a checkpoint taken apart into named tensors, and what each rank holds and writes of
#    them

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
    """A box of a tensor that lies with this rank."""

    name: str
    box: Box
    elements: torch.Tensor
    """1D, row-major; what training goes on with, or a copy of it."""

    written: bool
    """Whether this rank writes the elements; else a replica does.

    In that case they are compared with what the replica writes.
    """


@dataclass(frozen=True, slots=True)
class Described:
    """A whole tensor, wherever its elements are."""

    path: ItemPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    same_as: str | None = None
    """The name under which the same memory is stored already (tied parameters)."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank has of a checkpoint; tensors and their order are the same on every rank."""

    tree: Any
    """The checkpoint as JSON, with names in place of tensors."""

    objects: list[tuple[ItemPath, Any]]
    """Non-tensors of model and optimizers, for other readers; this package does not use them."""

    rest: bytes
    """The checkpoint without model, optimizers and sharded tensors, as Lightning reads it.

    Only rank 0 has it.
    """

    tensors: list[Described] = field(default_factory=list[Described])
    shares: list[Share] = field(default_factory=list[Share])

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
    rest = {
        key: value
        for key, value in checkpoint.items()
        if key not in ("state_dict", "optimizer_states")
    }
    return Snapshot(
        tree=tree,
        objects=objects,
        rest=lightning_meta(_without_shards(rest)) if mesh.rank == 0 else b"",
        tensors=collector.tensors,
        shares=collector.shares,
    )


def describe(
    checkpoint: Mapping[str, Any], names: ParameterNames, mesh: Ranks
) -> tuple[list[tuple[torch.Tensor, ItemPath]], list[ItemPath], list[Share]]:
    """Content of a plain file, and the shards that replicas have in common; no communication.

    Args:
        checkpoint: As for :func:`take_snapshot`.
        names: As for :func:`take_snapshot`.
        mesh: The ranks that save it.

    Returns:
        Each tensor with its path; the paths of what is no tensor and belongs to the model or an
        optimizer; and what this rank has of the sharded tensors.
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
    return tensors, [path for path, _ in _objects(checkpoint, names)], collector.shares


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


class _Collector:
    def __init__(self, paths: Mapping[int, ItemPath], mesh: Ranks) -> None:
        self.tensors: list[Described] = []
        self.shares: list[Share] = []
        self._paths = paths
        self._mesh = mesh
        self._stored: dict[tuple[Any, ...], str] = {}  # by memory
        self._extras = {SHARDED_EXTRA: 0, PLAIN_EXTRA: 0}
        self._loads = [
            0
        ] * mesh.topology.world_size  # bytes of sharded tensors that each rank writes
        self._holders: defaultdict[int, list[int]] = defaultdict(list)
        for rank in range(mesh.topology.world_size):
            self._holders[mesh.topology.slice_rank(rank)].append(rank)

    def put(self, tensor: torch.Tensor) -> str:
        """Name a tensor that has been met; the value that stands for it in the tree."""
        path = self.path_of(tensor)
        self.add(path, tensor)
        return name_of(path)

    def path_of(self, tensor: torch.Tensor) -> ItemPath:
        """Where a tensor that has been met lies; asked once for each occurrence."""
        return self._paths.get(id(tensor)) or self._extra(tensor)

    def add(self, path: ItemPath, tensor: torch.Tensor) -> None:
        """Cut a tensor, unless its memory is stored already."""
        name, key = name_of(path), memory_of_shards(tensor)
        stored = self._stored.get(key)
        self.tensors.append(Described(path, tensor.dtype, tuple(tensor.shape), stored))
        if stored is None:
            self._stored[key] = name
            self._cut(name, tensor)

    def _extra(self, tensor: torch.Tensor) -> ItemPath:
        # Counted apart: the sharded ones have to have the same names on all ranks, the others are
        # rank 0's.
        kind = SHARDED_EXTRA if isinstance(tensor, ShardTensor) else PLAIN_EXTRA
        self._extras[kind] += 1
        return (*kind, str(self._extras[kind]))

    def _cut(self, name: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, ShardTensor):
            if self._mesh.rank == 0:
                whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
                self.shares += [Share(name, whole, tensor.detach().reshape(-1), True)] * (
                    tensor.numel() > 0
                )
            return
        spec, topology = tensor.spec, self._mesh.topology
        own = topology.slice_rank(self._mesh.rank)
        for rank, interval in zip(spec.mesh.owners.ranks, spec.intervals, strict=True):
            part = topology.slice_rank(rank)
            writer = min(self._holders[part], key=self._loads.__getitem__)
            self._loads[writer] += interval.numel * tensor.element_size()
            if part == own:
                self._share(name, tensor, interval, writer == self._mesh.rank)

    def _share(self, name: str, tensor: ShardTensor, interval: Interval, written: bool) -> None:
        position, local = 0, tensor.to_local().detach()
        for box in boxes(interval, tensor.shape):
            self.shares.append(Share(name, box, local[position : position + box.numel], written))
            position += box.numel


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
            for group in optimizer.get(
                "param_groups", ()
            )  # none: Lightning's placeholder for a module without optimizers
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
