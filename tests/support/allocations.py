"""What a rank allocates and frees, as the profiler records it."""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from pytest import MonkeyPatch
from torch.profiler import ProfilerActivity, profile

from shardeddp.engine import flat_group, reduction, shard_model
from shardeddp.engine.activation_checkpointing import SavedOnHost
from shardeddp.optim import elementwise
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import storage_of

ATTEMPTS = 8
"""How often to record before memory counts as kept; kept each time, it is."""

SMALL_NBYTES = 4096
"""What agreements between hosts may hold for a moment."""


@contextmanager
def record_allocations() -> Iterator[list[int]]:
    """Give a list that gets, when the block ends, the bytes of each allocation, negative where memory was freed."""
    sizes: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield sizes
    events = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    sizes.extend(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


@contextmanager
def record_new_memory() -> Iterator[list[int]]:
    """Give a list that gets, when the block ends, the bytes of what it has allocated, after each change.

    Memory that was there before does not count, freed or not.
    """
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield found
    living: dict[int, int] = {}
    for event in sorted(
        _all_events(record.profiler.kineto_results.experimental_event_tree()),
        key=lambda event: event.start_time_ns,
    ):
        if event.name == "[memory]":
            address, nbytes = event.extra_fields.ptr, event.extra_fields.alloc_size
            if nbytes > 0:
                living[address] = nbytes
            else:
                living.pop(address, None)
            found.append(sum(living.values()))


def _all_events(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all_events(event.children)


def all_complete(sizes: list[int], kept: float = 0.0) -> bool:
    """Whether the records of all ranks end with what is to be kept; to be asked on all of them.

    Memory that a thread of the transport frees, because it was the last to let go, is missing in the record. On a busy
    machine that happens now and then.
    """
    difference = torch.tensor([abs(sum(sizes) - kept)])
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return difference.item() < SMALL_NBYTES


def settled_nbytes() -> int:
    """Bytes of all tensors, when what former steps have left to other threads is gone."""
    found = [living_nbytes()]
    while len(found) < 4 or len(set(found[-4:])) > 1:
        time.sleep(0.05)
        found.append(living_nbytes())
    return found[-1]


def living_nbytes() -> int:
    """Bytes of all tensors that exist, each memory counted once."""
    gc.collect()
    memory: set[tuple[int, int]] = set()  # where it begins, and minus its bytes
    with torch._C.DisableTorchFunctionSubclass():
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.Tensor) and not issubclass(
                type(candidate), ShardTensor
            ):
                storage = torch.Tensor.untyped_storage(candidate)
                if storage.device.type != "meta":  # of what a compiler has traced; without memory
                    memory.add((storage.data_ptr(), -storage.nbytes()))
    # An unsharded parameter's storage is a part of its unit's.
    total = end = 0
    for start, negative in sorted(memory):
        counted = max(0, start - negative - max(start, end))
        total, end = total + counted, max(end, start - negative)
    return total


class RecordsPeak(Callback):
    """The most that the third step holds beside what there is before it."""

    def __init__(self) -> None:
        self.stack, self.sizes = ExitStack(), list[int]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == 2:
            self.sizes = self.stack.enter_context(record_allocations())

    def on_train_batch_end(self, *arguments: Any) -> None:
        """End."""
        self.stack.close()


class HostMemory:
    """Host memory beside that of a device that is the CPU: the engine's, and not of torch's allocator.

    So :func:`record_allocations` has the device's alone, as if the two were apart; what goes from
    one to the other is copied.

    Args:
        patch: Undoes what is patched.
    """

    def __init__(self, patch: MonkeyPatch) -> None:
        self.nbytes = self.peak = 0
        """Bytes of blocks, which are powers of two as those of pinned memory; and the most of them."""
        self.has_params = False
        """Whether main shards and gradient shards of models that are sharded from now on are there."""
        self._storages: set[int] = set()
        for module in (flat_group, reduction, elementwise):
            patch.setattr(module, "empty_on_host", self._empty)
        plan_unit, to = shard_model.plan_unit, torch.Tensor.to

        def plan(*args: Any, on_host: bool, **options: Any) -> Any:
            return plan_unit(*args, on_host=self.has_params, **options)

        def copy(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            if type(tensor) is torch.Tensor and storage_of(tensor) in self._storages:
                options["copy"] = True
            return to(tensor, *args, **options)

        def pack(_: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device, bool]:
            return self._empty(tensor, tensor.device).copy_(tensor), tensor.device, False

        patch.setattr(SavedOnHost, "pack", pack)
        patch.setattr(shard_model, "plan_unit", plan)
        patch.setattr(torch.Tensor, "to", copy)

    def _empty(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        memory = np.empty(max(1, like.numel()) * like.dtype.itemsize, dtype=np.uint8)
        tensor = torch.from_numpy(memory).view(like.dtype)[: like.numel()].view(like.shape)
        nbytes = 1 << (like.nbytes - 1).bit_length() if like.nbytes else 0
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)
        self._storages.add(storage_of(tensor))
        weakref.finalize(memory, partial(self._free, storage_of(tensor), nbytes))
        return tensor

    def _free(self, storage: int, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._storages.discard(storage)
