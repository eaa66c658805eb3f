"""Tensors as streams of bytes: what an export writes is read, checked and converted a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from shardeddp.checkpoint.format.checksums import memory_of
from shardeddp.checkpoint.reading.lazy import LazyTensor
from shardeddp.plan.intervals import Interval

CHUNK_NBYTES = 32 * 2**20
"""Of a tensor in memory at a time; several blocks, for a block that a chunk cuts is read twice."""

Progress = Callable[[int], None]
"""Told how many more bytes have been written."""


def silent(nbytes: int) -> None:
    """Tell nobody."""


def chunks(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
    """The elements of a tensor as bytes, in row-major order; a view of each chunk is good until the next is asked for.

    Args:
        tensor: Any, on the host; of a lazy one no more than a chunk is read at a time.
        dtype: To convert the elements to.
    """
    numel = max(1, CHUNK_NBYTES // max(1, tensor.element_size()))
    take = tensor.elements if isinstance(tensor, LazyTensor) else _taker(tensor)
    for start in range(0, tensor.numel(), numel):
        part = take(Interval(start, min(tensor.numel(), start + numel)))
        yield memory_of(part if dtype is None else part.to(dtype)).cast("B")


def _taker(tensor: torch.Tensor) -> Callable[[Interval], torch.Tensor]:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return lambda interval: flat[interval.start : interval.stop]
