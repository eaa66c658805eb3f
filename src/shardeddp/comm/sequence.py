"""Sequence numbers: which operation a rank has begun on its host groups, and that all ranks have begun the same one.

All ranks of a group come to its operations in one order, so equal places in a program have equal numbers. Counting
costs a microsecond on the host and sends nothing; :mod:`shardeddp.comm.desync` looks at the numbers when a rank has
been waiting for a while.

What is agreed on travels in messages of one size that begin with a fingerprint of the operation. Ranks that have come
to different ones thus all know it at once. Messages of different sizes would end the process: gloo aborts it.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardeddp.errors import DesyncError

MESSAGE_NBYTES = 512
"""Small enough to take no longer than a byte; large enough for a step of a hundred units."""

_HEADER_NBYTES = 8
_PAYLOAD_NBYTES = MESSAGE_NBYTES - _HEADER_NBYTES

ABOUT_COLLECTIVES = (
    "All ranks have to communicate alike, in one order: move this out of conditions that only some ranks fulfil, and "
    "give tensors one shape and dtype on all ranks. Barriers, gathers, self.log(sync_dist=True), saving a checkpoint "
    "(trainer.save_checkpoint) and whatever reads a sharded parameter are for all ranks"
)
ABOUT_PARAMETERS = (
    "A sharded parameter has to be asked by all ranks alike. Move this out of rank_zero_only functions and out of "
    "conditions that only some ranks fulfil, or put it inside of strategy.summon_full_params(), which all ranks enter: "
    "there parameters are whole, and each rank may do what it likes"
)
ABOUT_UNITS = (
    "All ranks gather units in one order. If they may use different parts of the model in a step (experts, modalities, "
    "random depth), set ShardedDP(uneven_units=True): then they agree before each gather, and those that do not use a "
    "unit take part with zeros. Or let auto_wrap_policy put all such parts into one unit"
)
ABOUT_TRAINED = (
    "All ranks have to train the same parameters: freeze and unfreeze (requires_grad_) the same ones on each of them, "
    "at the same time"
)
ADVICE = (ABOUT_COLLECTIVES, ABOUT_PARAMETERS, ABOUT_UNITS, ABOUT_TRAINED)
"""Kinds of advice; where ranks wait in different operations, the last one that fits any of them is the most useful."""

Describe = Callable[[str, str], str]
"""From the name of a meeting and what this rank has come to, which ranks have come to what."""


@dataclass
class _Record:
    begun: Counter[str] = field(default_factory=Counter[str])
    describe: Describe | None = None


_RECORDS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Record] = weakref.WeakKeyDictionary()


def _record_of(group: dist.ProcessGroup) -> _Record:
    record = _RECORDS.get(group)
    if record is None:
        record = _RECORDS[group] = _Record()
    return record


def begin(group: dist.ProcessGroup, kind: str) -> None:
    """Count one operation; to be called before it communicates."""
    _record_of(group).begun[kind] += 1


def begun(group: dist.ProcessGroup) -> dict[str, int]:
    """How many operations of each kind this rank has begun in a group."""
    return dict(_record_of(group).begun)


def describe_mismatches(group: dist.ProcessGroup, describe: Describe) -> None:
    """Let errors say which ranks have come to what; what ``describe`` holds must not hold the group."""
    _record_of(group).describe = describe


def reduce_highest(
    numbers: torch.Tensor,
    operation: str,
    group: dist.ProcessGroup,
    *,
    kind: str = "",
    advice: str = ABOUT_COLLECTIVES,
) -> Reduction:
    """Begin to replace each number by the highest that any rank has in its place.

    Args:
        numbers: Bytes, of one shape on all ranks, on the host.
        operation: What it is for, the same on all ranks.
        group: A host group.
        kind: As what it is counted; empty: as what it is for.
        advice: What to do if ranks have come to different operations.
    """
    begin(group, kind or operation)
    code = torch.tensor([*zlib.crc32(operation.encode()).to_bytes(4, "big")], dtype=torch.uint8)
    message = torch.zeros(MESSAGE_NBYTES, dtype=torch.uint8)
    message[:4], message[4:_HEADER_NBYTES] = code, 255 - code
    inline = numbers.view(-1)[:_PAYLOAD_NBYTES]
    message[_HEADER_NBYTES : _HEADER_NBYTES + inline.numel()] = inline
    work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group, async_op=True)
    return Reduction(numbers, message, work, group, operation, advice)


class Reduction:
    """A reduction under way; see :func:`reduce_highest` for the arguments.

    Args:
        numbers: Where the result goes.
        message: What is on its way.
        work: The handle of that; None: there is nobody else.
        group: Whose ranks take part.
        operation: What it is for.
        advice: For errors.
    """

    def __init__(
        self,
        numbers: torch.Tensor,
        message: torch.Tensor,
        work: dist.Work | None,
        group: dist.ProcessGroup,
        operation: str,
        advice: str,
    ) -> None:
        self.message, self.work = message, work
        self.operation, self.advice = operation, advice
        self._numbers, self._group = numbers, group
        self._meeting = f"{group.group_name}/{sum(_record_of(group).begun.values())}"

    def wait(self) -> torch.Tensor:
        """The numbers, once all ranks have given theirs.

        Raises:
            DesyncError: Some have come to another operation.
        """
        if self.work is not None:
            self.work.wait()
        header = self.message[:_HEADER_NBYTES].tolist()
        if any(code + complement != 255 for code, complement in zip(header[:4], header[4:], strict=True)):
            describe = _record_of(self._group).describe
            described = self.operation if describe is None else describe(self._meeting, self.operation)
            raise DesyncError(f"{described}. {self.advice}")
        numbers, payload = self._numbers.view(-1), self.message[_HEADER_NBYTES:]
        numbers[:_PAYLOAD_NBYTES] = payload[: numbers.numel()]
        if numbers.numel() > _PAYLOAD_NBYTES:
            dist.all_reduce(numbers[_PAYLOAD_NBYTES:], op=dist.ReduceOp.MAX, group=self._group)
        return self._numbers
