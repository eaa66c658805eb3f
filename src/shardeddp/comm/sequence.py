"""Sequence numbers: how many operations of each kind this rank has begun in each of its host groups.

All ranks of a group come to its operations in one order, so equal places in a program have equal numbers. Counting
costs a microsecond on the host and sends nothing; the numbers are looked at when a rank has been waiting for a while.
"""

import weakref
import zlib
from collections import Counter

import torch
import torch.distributed as dist

from shardeddp.errors import DesyncError

_BEGUN: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def begin(group: dist.ProcessGroup, kind: str) -> None:
    """Count one operation; to be called before it communicates."""
    counts = _BEGUN.get(group)
    if counts is None:
        counts = _BEGUN[group] = Counter()
    counts[kind] += 1


def begun(group: dist.ProcessGroup) -> dict[str, int]:
    """How many operations of each kind this rank has begun in a group."""
    return dict(_BEGUN.get(group, ()))


def fingerprint(kind: str) -> int:
    """A number from 1 to 127 that ranks compare to see whether they are at operations of one kind."""
    return 1 + zlib.crc32(kind.encode()) % 127


def reduce_highest(numbers: torch.Tensor, kind: str, group: dist.ProcessGroup) -> "Reduction":
    """Begin to replace each number by the highest that any rank has in its place.

    Args:
        numbers: Of one shape and dtype on all ranks, on the host.
        kind: What it is for, which is compared: two entries more travel with the numbers.
        group: A host group.
    """
    begin(group, kind)
    code = fingerprint(kind)
    sent = torch.cat([torch.tensor([code, 127 - code], dtype=numbers.dtype), numbers.view(-1)])
    work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group, async_op=True)
    return Reduction(sent, work, numbers, kind)


class Reduction:
    """A reduction under way; see :func:`reduce_highest`.

    Args:
        sent: What is reduced.
        work: Its handle.
        numbers: Where the result goes.
        kind: What it is for.
    """

    def __init__(self, sent: torch.Tensor, work: dist.Work | None, numbers: torch.Tensor, kind: str) -> None:
        self.sent = sent
        self._work, self._numbers, self._kind = work, numbers, kind

    def wait(self) -> torch.Tensor:
        """The numbers, once all ranks have given theirs.

        Raises:
            DesyncError: Others have come to an operation of another kind.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        highest, other = int(self.sent[0]), 127 - int(self.sent[1])
        if highest != other:
            raise DesyncError(
                f"this rank has come to an exchange of ranks ({self._kind}), and others to another one", unplaced=True
            )
        self._numbers.view(-1).copy_(self.sent[2:])
        return self._numbers
