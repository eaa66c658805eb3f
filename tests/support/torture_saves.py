"""Saves without a training: checkpoints whose every element tells the step, and faults of the system in the middle."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardeddp.checkpoint import durable
from shardeddp.checkpoint.contents import open_checkpoint
from shardeddp.checkpoint.interop import lightning_meta
from shardeddp.checkpoint.manifest import Section, TrainingRun
from shardeddp.checkpoint.snapshot import Share, Snapshot
from shardeddp.checkpoint.write import write_checkpoint
from shardeddp.config import CheckpointOptions
from shardeddp.plan.layout import Interval
from support.host_groups import all_ranks
from support.torture_training import PURE

ROW = 64
"""Elements."""


def weight(step: int, rows: int) -> torch.Tensor:
    """What the checkpoint of a step holds; another step has no element of it."""
    return torch.arange(rows * ROW, dtype=torch.float64).reshape(rows, ROW) + step / 1024


def snapshot_of(
    step: int, rank: int = 0, size: int = 1, rows: int = 4, tensors: int = 2
) -> Snapshot:
    """What a rank has of a checkpoint of some tensors, of which each rank holds some rows."""
    names = [f"weight_{number}" for number in range(tensors)]
    count = rows // size
    interval = Interval(rank * count * ROW, (rank + 1) * count * ROW)
    own = weight(step, rows)[rank * count : (rank + 1) * count].reshape(-1)
    return Snapshot(
        tree={
            "global_step": step,
            "state_dict": {name: {"$tensor": f"model.{name}"} for name in names},
        },
        objects=[(("optimizer_0", "param_groups"), [{"lr": 0.1, "step": step}])],
        rest=lightning_meta({"global_step": step}),
        sections=[Section(torch.float64, (rows, ROW)) for _ in names],
        tensors=[(("model", name), number) for number, name in enumerate(names)],
        shares=[Share(number, interval, own.clone(), True) for number in range(tensors)],
        num_sharded=tensors,
    )


def run_of(step: int, size: int = 1) -> TrainingRun:
    return TrainingRun(
        uuid=f"{step:032x}",
        step=step,
        epoch=0,
        world_size=size,
        shard_size=size,
        sharding_strategy="full_shard",
        versions={},
    )


def save(target: Path, step: int, rows: int = 4, **options: Any) -> None:
    """Save a step; on all ranks of the world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    write_checkpoint(
        snapshot_of(step, rank, size, rows),
        target,
        run_of(step, size),
        all_ranks(),
        CheckpointOptions(**options),
    )


def step_of(path: Path) -> int:
    """The step of a checkpoint of which every element is of that step.

    Raises:
        AssertionError: Some element is not.
        CheckpointError: It cannot be read.
    """
    checkpoint = open_checkpoint(path, None)
    step = checkpoint["global_step"]
    for name, tensor in checkpoint["state_dict"].items():
        found = tensor.clone()
        assert torch.equal(found, weight(step, found.shape[0])), (
            f"{name} in {path} is not of step {step}"
        )
    return step


def alone(action: Callable[[], object], store: Path) -> Callable[[], None]:
    """The action in a world of one rank, to be called in a forked process."""

    def act() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
        action()

    return act


class Strike:
    """Counts the calls of this thread into the system, and lets one of them fail.

    Args:
        n: Which, from 1; 0 for none.
        number: The errno.
    """

    def __init__(self, n: int, number: int = 0) -> None:
        self.seen = 0
        self.struck = ""
        self._n = n
        self._number = number

    def __enter__(self) -> Strike:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        # A descriptor is closed even where close() fails.
        closed = event == "c_return" and argument.__name__ == "close"
        if (
            (closed or (event == "c_call" and argument.__name__ != "close"))
            and argument.__module__ in ("posix", "fcntl")
            and argument.__name__ not in PURE
        ):
            name = argument.__name__
        elif event == "call" and frame.f_code is durable.swap.__code__:  # called through ctypes
            name = "renameat2"
        else:
            return
        self.seen += 1
        if self.seen == self._n:
            self.struck = name
            # Raised in a profiling function it ends profiling as well: one fault, and the handling of it goes on.
            raise OSError(self._number, os.strerror(self._number))


@contextmanager
def disk_of(nbytes: int, reports_free: bool = True) -> Iterator[None]:
    """Let this process write so many bytes, the last of them in a short write; then its disk is full.

    Args:
        nbytes: The budget.
        reports_free: Whether the file system tells how much is left, as quotas and some network ones do not.
    """
    left = nbytes
    write, writev = os.write, os.writev

    def take(wanted: int) -> int:
        nonlocal left
        if wanted and not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(wanted, left)
        left -= taken
        return taken

    def limited_write(descriptor: int, data: Any) -> int:
        return write(
            descriptor, memoryview(data).cast("B")[: take(len(memoryview(data).cast("B")))]
        )

    def limited_writev(descriptor: int, buffers: Any) -> int:
        joined = b"".join(buffers)
        return writev(descriptor, [joined[: take(len(joined))]])

    with (
        mock.patch.object(os, "write", limited_write),
        mock.patch.object(os, "writev", limited_writev),
        mock.patch.object(durable, "free_nbytes", lambda path: left if reports_free else None),
    ):
        yield
