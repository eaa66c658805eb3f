"""What a rank allocates and frees, as the profiler records it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

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


def all_complete(sizes: list[int], kept: float = 0.0) -> bool:
    """Whether the records of all ranks end with what is to be kept; to be asked on all of them.

    Memory that a thread of the transport frees, because it was the last to let go, is missing in the record. On a busy
    machine that happens now and then.
    """
    difference = torch.tensor([abs(sum(sizes) - kept)])
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return difference.item() < SMALL_NBYTES
