"""Memory of one rank: the tensors that training keeps, and what a step takes on top and gives back."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PROC = Path("/proc/self")
RESET_PEAK_RSS = "5"  # written to clear_refs, see `man 5 proc_pid_clear_refs`


@runtime_checkable
class Sharded(Protocol):
    """A tensor of global shape of which this rank holds a part."""

    def to_local(self) -> Tensor:
        """The part that lies on this rank."""
        ...


def state_nbytes(module: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer states that lie on this rank; a tied weight counts once."""
    parameters = list(module.parameters())
    held = [
        *parameters,
        *(p.grad for p in parameters),
        *(v for s in optimizer.state.values() for v in s.values()),
    ]
    local = (tensor.to_local() if isinstance(tensor, Sharded) else tensor for tensor in held)
    return sum(tensor.nbytes for tensor in local if isinstance(tensor, Tensor))


class MemoryGauge(Protocol):
    """Measures from its creation on."""

    def growth_nbytes(self) -> float:
        """The most this rank has held since creation, less what it held then; nan where that cannot be told."""
        ...


class ResidentMemoryGauge:
    """The peak of a CPU process over its resident memory at the beginning, as kept by the Linux kernel."""

    def __init__(self) -> None:
        gc.collect()
        _return_free_memory()
        (PROC / "clear_refs").write_text(RESET_PEAK_RSS)
        self._before_nbytes = _status_nbytes("VmRSS")

    def growth_nbytes(self) -> float:
        """Bytes between the beginning and the peak."""
        return float(_status_nbytes("VmHWM") - self._before_nbytes)


class CUDAMemoryGauge:
    """The peak of what tensors hold on one GPU over what they held at the beginning."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before_nbytes = torch.cuda.memory_allocated(device)

    def growth_nbytes(self) -> float:
        """Bytes between the beginning and the peak."""
        return float(torch.cuda.max_memory_allocated(self._device) - self._before_nbytes)


class NoGauge:
    """Stands in where a peak cannot be reset, so that what an earlier fit used would be counted again."""

    def growth_nbytes(self) -> float:
        """Not a number."""
        return math.nan


def start_gauge(device: torch.device) -> MemoryGauge:
    """Begin to measure this rank's memory where its tensors lie."""
    if device.type == "cuda":
        return CUDAMemoryGauge(device)
    if device.type == "cpu" and os.access(PROC / "clear_refs", os.W_OK):
        return ResidentMemoryGauge()
    return NoGauge()


def _status_nbytes(field: str) -> int:
    """One line of /proc/self/status, which counts in KiB."""
    lines = (PROC / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _return_free_memory() -> None:
    """Have the allocator give its free pages back, or they would hide what the first measured step takes."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return  # not glibc; other allocators return large blocks when they are freed
