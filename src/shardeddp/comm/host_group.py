"""Host groups: small messages between ranks on the host, log2 N of them one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from shardeddp.comm.step_clock import StepClock
from shardeddp.comm.transfers import TransferThread, wait_for

T = TypeVar("T")

DIRECT_SIZE = 64
"""Largest group that is connected all to all; larger ones form a grid of rows and columns."""

CHANNELS = 4
"""Number of threads that may use the same axes."""

_TAGS = 1 << 28


def grid_of(size: int) -> tuple[int, int]:
    """Return the grid in which ranks are laid out, so that each is connected to few others.

    Returns:
        Rows and columns: one row up to :data:`DIRECT_SIZE` ranks and for a prime number of them;
        else the two closest factors, the greater one as the length of a row.
    """
    if size <= DIRECT_SIZE:
        return 1, size
    rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
    return rows, size // rows


class Channel:
    """One order of operations on some axes: their tags, and the thread for those begun ahead.

    All ranks issue the operations of a channel in one order. Groups with the same axes, one after
    the other or at the same time, share their channels, so that a message of one is never taken for
    one of another.

    Args:
        number: Index from 0 to 3; channels have different tags.
    """

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self.begun = 0
        """Number of operations so far."""
        self.thread = TransferThread()
        """Thread that waits for the operations."""

    def next_tag(self) -> int:
        """Return the tag of the next operation's messages; call it on one thread, in order."""
        self.begun += 1
        return self.begun % (_TAGS // CHANNELS) * CHANNELS + self._number


class HostGroup:
    """Ranks that send each other bytes on the host, in messages between two ranks.

    In an axis each rank receives first from the rank before it, then from two before it, four, and
    so on, and passes on all that it knows (dissemination): log2 N hops for N ranks. In a grid, rows
    come first, then columns. gloo's own collectives go around a ring: 2 (N - 1) hops, and need a
    connection between any two ranks.

    All ranks call the methods in one order for each channel.

    Args:
        axes: Process groups of this rank's row and, in a grid, its column; empty: no other rank.
        ranks: Global ranks, row by row.
        name: Name of the group in errors, the same on all ranks.
        timeout: Maximum wait for another rank; after it the axes' connections break.
        channel: Channel of these axes; groups that are used by several threads have one each.
        patience: Maximum time of an operation; after it the operation fails, and other channels
            keep the connections. None: ``timeout`` alone applies.
        mirrors: True if the other ranks do not exist (torch's fake process group): each sends the
            same as this one.
    """

    def __init__(
        self,
        axes: Sequence[dist.ProcessGroup],
        ranks: Sequence[int],
        *,
        name: str,
        timeout: timedelta,
        channel: Channel | None = None,
        patience: timedelta | None = None,
        mirrors: bool = False,
    ) -> None:
        self.name, self.ranks, self.size = name, ranks, len(ranks)
        self._row, self._column = (*axes, None, None)[:2]
        self._timeout, self._patience = timeout, patience
        self.clock: StepClock | None = None
        """Clock of the training thread's waits; None: they are not measured."""
        self.channel = Channel() if channel is None else channel
        """Tags and thread of the group's operations."""
        self.rank = 0 if self._row is None else self._row.rank()
        """Group rank of this process."""
        if self._row is not None and self._column is not None:
            self.rank += self._column.rank() * self._row.size()
        self._axes = [axis for axis in (self._row, self._column) if axis is not None]
        self._mirrors = mirrors

    def measure(self, clock: StepClock | None) -> None:
        """Let a clock measure the waits of the training thread; None ends the measurement."""
        self.clock = clock

    # -- Operations

    def keep_highest_(self, message: torch.Tensor, tag: int) -> None:
        """Replace each byte by its maximum over all ranks.

        Args:
            message: 1D bytes, of one length on all ranks.
            tag: See :meth:`Channel.next_tag`.
        """
        self._run(lambda: self._keep_highest_(message, tag))

    def gather(self, block: torch.Tensor, tag: int) -> torch.Tensor:
        """All-gather the blocks of all ranks: 2D, by rank.

        Args:
            block: 1D bytes, of one length on all ranks.
            tag: See :meth:`Channel.next_tag`.
        """
        return self._run(lambda: self._gather(block, tag))

    def gather_to_first(self, block: torch.Tensor, tag: int) -> torch.Tensor | None:
        """Gather the blocks of all ranks to the first one, through a tree of ranks.

        Returns:
            Blocks by rank, 2D; None on other ranks.
        """
        return self._run(lambda: self._gather_to_first(block, tag))

    def broadcast_(self, message: torch.Tensor, source: int, tag: int) -> None:
        """Overwrite all ranks' bytes with those of one rank.

        Args:
            message: 1D bytes, of one length on all ranks.
            source: Group rank of the sender.
            tag: See :meth:`Channel.next_tag`.
        """
        self._run(lambda: self._broadcast_(message, source, tag))

    def begin(self, action: Callable[[], T]) -> Future[T]:
        """Run operations on the channel's thread, after those begun before."""
        return self.channel.thread.begin(action)

    def wait_for(self, result: Future[T]) -> T:
        """Return the result of operations that were begun."""
        return wait_for(result, self._axes, self._patience)

    def _run(self, action: Callable[[], T]) -> T:
        if self._mirrors or self.size == 1:
            return action()
        return self.wait_for(self.begin(action))

    def _keep_highest_(self, message: torch.Tensor, tag: int) -> None:
        for axis in self._axes:
            rank, size, distance = axis.rank(), axis.size(), 1
            while distance < size:
                arrived = torch.zeros_like(message)
                self.hop(axis, message.clone(), rank + distance, arrived, rank - distance, tag)
                torch.maximum(message, arrived, out=message)
                distance *= 2

    def _gather(self, block: torch.Tensor, tag: int) -> torch.Tensor:
        for axis in self._axes:
            rank, size, known = axis.rank(), axis.size(), 1
            blocks = torch.zeros(
                size, block.numel(), dtype=torch.uint8, device="cpu"
            )  # this rank's block first
            blocks[0] = block.view(-1)
            while known < size:
                more = min(known, size - known)
                arrived = blocks[known : known + more]
                self.hop(axis, blocks[:more], rank - known, arrived, rank + known, tag)
                known += more
            block = blocks.roll(rank, 0)
        return block.view(self.size, -1)

    def _gather_to_first(self, block: torch.Tensor, tag: int) -> torch.Tensor | None:
        for axis in self._axes:
            rank, size, distance = axis.rank(), axis.size(), 1
            # Blocks of this rank and of those below it in the tree. On the first of thousands these
            # are all blocks, so each is received in its final position.
            known = min(rank & -rank or size, size - rank)
            blocks = torch.zeros(known, block.numel(), dtype=torch.uint8, device="cpu")
            blocks[0] = block.view(-1)
            while distance < size and rank % (2 * distance) == 0:
                if distance < known:
                    arrived = blocks[distance : 2 * distance]
                    self._wait(axis.recv([arrived], rank + distance, tag))
                    if self._mirrors:
                        arrived.copy_(block.view(1, -1))
                distance *= 2
            block = blocks
            if rank:
                self._wait(axis.send([block], rank - distance, tag))
                return None
        return block.view(self.size, -1)

    def _broadcast_(self, message: torch.Tensor, source: int, tag: int) -> None:
        columns = self.size if self._row is None else self._row.size()
        for axis, place in zip(self._axes, (source % columns, source // columns), strict=False):
            if axis is self._row and self.rank // columns != source // columns:
                continue  # other rows receive it through columns
            size = axis.size()
            rank = (axis.rank() - place) % size
            distance = 1
            while distance < size and rank % (2 * distance) == 0:
                distance *= 2
            if rank:
                self._wait(axis.recv([message], (rank - distance + place) % size, tag))
            while distance := distance // 2:
                if rank + distance < size:
                    self._wait(axis.send([message], (rank + distance + place) % size, tag))

    def hop(
        self,
        axis: dist.ProcessGroup,
        sent: torch.Tensor,
        target: int,
        arrived: torch.Tensor,
        source: int,
        tag: int,
    ) -> None:
        """Send a message to one rank of an axis, and receive one from another rank."""
        size = axis.size()
        receiving = axis.recv([arrived], source % size, tag)
        sending = axis.send([sent], target % size, tag)
        self._wait(receiving)
        self._wait(sending)
        if self._mirrors:
            arrived.copy_(sent)

    def _wait(self, transfer: dist.Work | None) -> None:
        if transfer is not None:
            transfer.wait(self._timeout)
