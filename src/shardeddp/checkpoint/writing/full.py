"""Full state: every sharded tensor of a nested state gathered, one at a time, to ordinary tensors on the host."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardeddp.checkpoint.disk.durable import make_directories, preflight
from shardeddp.checkpoint.disk.new_files import new_files
from shardeddp.checkpoint.format.manifest import INDEX, Run
from shardeddp.checkpoint.format.manifest_file import index_to_bytes
from shardeddp.checkpoint.reading.lazy import LazyTensor
from shardeddp.checkpoint.reading.stream import chunks
from shardeddp.checkpoint.writing.replicas import compare_shares
from shardeddp.checkpoint.writing.snapshot import ParameterNames, Share, describe, memory_of_shards
from shardeddp.checkpoint.writing.torch_file import TorchFile
from shardeddp.comm import Mesh, together
from shardeddp.config import CheckpointOptions
from shardeddp.sharding.shard_tensor import ShardTensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of one that may be sharded; a collective of all ranks if it is. No gradient flows through it."""
    return tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor


def gather_full(state: Any, keep: bool) -> Any:
    """Replace sharded tensors anywhere in a nested state by full ones; a collective of all ranks.

    One tensor is whole on the device at a time.

    Args:
        state: Mappings, lists and tuples of anything; all ranks pass the same structure.
        keep: Whether this rank wants the result. The others take part and get an empty tensor in each place.

    Returns:
        The state in plain containers, sharded tensors as CPU tensors.
    """
    if isinstance(state, ShardTensor):
        full = state.full_tensor().detach()
        return full.cpu() if keep else torch.empty(0, dtype=full.dtype)
    if isinstance(state, Mapping):
        gathered = {key: gather_full(value, keep) for key, value in state.items()}
        return _same_mapping(state, gathered)
    if isinstance(state, tuple):
        items = [gather_full(item, keep) for item in state]
        return type(state)(*items) if _is_namedtuple(state) else tuple(items)
    if isinstance(state, list):
        return [gather_full(item, keep) for item in state]
    return state


def save_full(state: Any, name: str, write: Callable[[Any], None], mesh: Mesh | None) -> None:
    """Gather a state and let rank 0 write it; every rank raises if that fails.

    Args:
        state: As for :func:`gather_full`.
        name: Of what is written, for the message.
        write: Called on rank 0 with the full state.
        mesh: All ranks; None in the process that spawned the ranks, which holds full states and writes by itself.
    """
    keep = mesh is None or mesh.rank == 0
    full = gather_full(state, keep)
    if mesh is None:
        write(full)
    else:
        together(f"writing {name}", lambda: write(full) if keep else None, mesh.control)


def stream_full(
    checkpoint: Mapping[str, Any], path: Path, mesh: Mesh, names: ParameterNames, run: Run, options: CheckpointOptions
) -> None:
    """Write a checkpoint as one file that ``torch.load`` reads; a collective of all ranks.

    One tensor is whole at a time, on the device and in rank 0's host memory. The file appears under its name when all
    of it is on the disk.

    Args:
        checkpoint: Nested dicts, lists and tuples; the same sharded tensors in the same order on every rank.
        path: Of the file, as rank 0 has it.
        mesh: All ranks.
        names: Of the parameters of each optimizer in the checkpoint.
        run: The training.
        options: Permissions and durability.

    Raises:
        CheckpointError: It cannot be written, or replicas differ. What was there is still there.
        RankError: Something in the checkpoint cannot be pickled.
    """

    def prepare() -> tuple[TorchFile, bytes, list[Share]]:
        file = TorchFile(checkpoint, memory_of_shards)
        found, objects, shares = describe(checkpoint, names, mesh)
        strided = [(tensor, at) for tensor, at in found if tensor.layout == torch.strided]
        tensors = [(at, tensor.dtype, tuple(tensor.shape), file.record_of(tensor)) for tensor, at in strided]
        return file, index_to_bytes(run, tensors, objects), shares

    file, index, shares = together(f"pickling {path}", prepare, mesh.saving)
    compare_shares(shares, mesh)
    gathered = (it.full_tensor().detach().cpu() for it in file.tensors if isinstance(it, ShardTensor))

    def read(tensor: torch.Tensor) -> Iterator[memoryview]:
        if isinstance(tensor, ShardTensor):
            tensor = next(gathered)
        return chunks(tensor if isinstance(tensor, LazyTensor) else tensor.cpu())

    def write() -> None:
        permissions = options.permissions or "umask"
        try:
            if mesh.rank == 0:
                make_directories(path.parent, permissions, options.durability)
                preflight(path.parent, sum(tensor.nbytes for tensor in file.tensors))
                with new_files([path], True, permissions, options.durability) as (opened,):
                    file.write(opened, read, more={INDEX: index})
        finally:
            deque(gathered, maxlen=0)  # the others gather all of it, whatever has become of the file

    together(f"writing {path}", write, mesh.saving)


def _same_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """The items in the original's own type where nothing in it had to be gathered, else in a plain dict."""
    unchanged = len(original) == len(items) and all(items[key] is value for key, value in original.items())
    return original if unchanged else items


def _is_namedtuple(value: tuple[Any, ...]) -> bool:
    return "_fields" in vars(type(value))
