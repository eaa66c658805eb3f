"""Agreement of ranks over small host messages: results, errors, flags, and checksums of plans."""

from __future__ import annotations

import json
import time
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash

from shardeddp.comm.collectives import in_forked_process
from shardeddp.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpointError,
    DesyncError,
    LayoutMismatchError,
    RankError,
)

# -- Sequence numbers of host operations
#
# All ranks of a group come to its operations in one order, so equal places in a program have equal
# numbers. Counting costs a microsecond on the host and sends nothing; :mod:`shardeddp.comm.desync`
# looks at the numbers when a rank has been waiting for a while.
#
# What is agreed on travels in messages of one size that begin with a fingerprint of the operation.
# Ranks that have come to different ones thus all know it at once. Messages of different sizes would
# end the process: gloo aborts it.

MESSAGE_NBYTES = 512
"""Small enough to take no longer than a byte; large enough for a step of a hundred units."""

_HEADER_NBYTES = 8
_PAYLOAD_NBYTES = MESSAGE_NBYTES - _HEADER_NBYTES

ABOUT_COLLECTIVES = (
    "All ranks have to communicate alike, in one order: move this out of conditions that only "
    "some ranks fulfil, and give tensors one shape and dtype on all ranks. Barriers, gathers, "
    "self.log(sync_dist=True), saving a checkpoint (trainer.save_checkpoint) and whatever reads a "
    "sharded parameter are for all ranks"
)
ABOUT_PARAMETERS = (
    "A sharded parameter has to be asked by all ranks alike. Move this out of rank_zero_only "
    "functions and out of conditions that only some ranks fulfil, or put it inside of "
    "strategy.summon_full_params(), which all ranks enter: there parameters are whole, and each "
    "rank may do what it likes"
)
ABOUT_UNITS = (
    "All ranks gather units in one order. If they may use different parts of the model in a step "
    "(experts, modalities, random depth), set ShardedDP(uneven_units=True): then they agree "
    "before each gather, and those that do not use a unit take part with zeros. Or let "
    "auto_wrap_policy put all such parts into one unit"
)
ABOUT_TRAINED = (
    "All ranks have to train the same parameters: freeze and unfreeze (requires_grad_) the same "
    "ones on each of them, at the same time"
)
ADVICE = (ABOUT_COLLECTIVES, ABOUT_PARAMETERS, ABOUT_UNITS, ABOUT_TRAINED)
"""Kinds of advice; for ranks in different operations, the last that fits any is most useful."""

Describe = Callable[[str, str], str]
"""From a sync point and this rank's operation, a text with the operation that each rank reached."""


@dataclass
class _Record:
    begun: Counter[str] = field(default_factory=Counter[str])
    describe: Describe | None = None
    is_inherited: bool = False


_RECORDS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Record] = weakref.WeakKeyDictionary()


def _record_of(group: dist.ProcessGroup) -> _Record:
    record = _RECORDS.get(group)
    if record is None:
        record = _RECORDS[group] = _Record()
    return record


def begin(group: dist.ProcessGroup, kind: str) -> None:
    """Count one operation; to be called before it communicates.

    Raises:
        RuntimeError: This process was forked from the rank that the group is of.
    """
    refuse_inherited(group, kind)
    _record_of(group).begun[kind] += 1


def refuse_inherited(group: dist.ProcessGroup, operation: str) -> None:
    """Raise if this process was forked from the rank that a group is of."""
    if _record_of(group).is_inherited:
        raise in_forked_process(operation, dist.get_process_group_ranks(group))


def leave_to_parent(group: dist.ProcessGroup) -> None:
    """Refuse all that begins in a group from now on: this process was forked from its rank."""
    _record_of(group).is_inherited = True


def begun(group: dist.ProcessGroup) -> dict[str, int]:
    """How many operations of each kind this rank has begun in a group."""
    return dict(_record_of(group).begun)


def describe_mismatches(group: dist.ProcessGroup, describe: Describe) -> None:
    """Let errors say which ranks have come to what.

    What ``describe`` holds must not hold the group.
    """
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
        if any(
            code + complement != 255
            for code, complement in zip(header[:4], header[4:], strict=True)
        ):
            describe = _record_of(self._group).describe
            described = (
                self.operation if describe is None else describe(self._meeting, self.operation)
            )
            raise DesyncError(f"{described}. {self.advice}")
        numbers, payload = self._numbers.view(-1), self.message[_HEADER_NBYTES:]
        numbers[:_PAYLOAD_NBYTES] = payload[: numbers.numel()]
        if numbers.numel() > _PAYLOAD_NBYTES:
            dist.all_reduce(numbers[_PAYLOAD_NBYTES:], op=dist.ReduceOp.MAX, group=self._group)
        return self._numbers


# -- Agreement: decisions of all ranks over the host group

T = TypeVar("T")


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Give every rank's bytes to every rank, by rank.

    Bytes, so that nothing that arrives is ever unpickled.
    """
    begin(group, "exchange")
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(payload)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[
        : len(payload)
    ]
    arrived = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(arrived, padded, group=group)
    return [
        tensor[: int(length)].numpy().tobytes()
        for tensor, length in zip(arrived, lengths, strict=True)
    ]


def run_on_all_ranks(step: str, action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run a step that every rank takes, and raise on every rank if it fails on any.

    Args:
        step: What the step does, as a noun phrase for the message.
        action: The step; it must not communicate, else a rank that fails leaves the others waiting
            inside it.
        group: The host group of all ranks.

    Raises:
        ConfigurationError: Every rank found the same configuration wrong.
        CheckpointError: All that failed found a checkpoint wrong; with what the first of them
            found.
        RankError: Some rank failed in another way, this one or another; it carries the traceback of
            each.
    """
    results: list[T] = []

    def run() -> bytes:
        results.append(action())
        return b""

    _, failure = _attempt(run)
    if agree_on_any([failure is not None], group)[0]:
        texts = all_gather_bytes(b"" if failure is None else failure.to_bytes(), group)
        _raise_failures(step, texts, failure)
    return results[0]


def gather_results(step: str, action: Callable[[], bytes], group: dist.ProcessGroup) -> list[bytes]:
    """Run a step as :func:`run_on_all_ranks` does; every rank gets the results of all, by rank."""
    result, failure = _attempt(action)
    sent = all_gather_bytes(b"+" + result if failure is None else b"-" + failure.to_bytes(), group)
    _raise_failures(step, [text[1:] if text[:1] == b"-" else b"" for text in sent], failure)
    return [text[1:] for text in sent]


def gather_to_first(
    step: str, action: Callable[[], bytes], group: dist.ProcessGroup
) -> list[bytes]:
    """The same for the first rank alone: what the others send takes no memory but there.

    Returns:
        Every rank's result, by rank; nothing on other ranks than the first.
    """
    result, failure = _attempt(action)
    begin(group, "exchange")
    size, first = dist.get_world_size(group), dist.get_rank(group) == 0
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(
        lengths, torch.tensor([-1 if failure else 0 if first else len(result)]), group=group
    )
    if min(map(int, lengths)) < 0:
        texts = all_gather_bytes(b"" if failure is None else failure.to_bytes(), group)
        _raise_failures(step, texts, failure)
    # The first rank's own result, which may be by far the longest, does not travel.
    padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
    if not first:
        padded[: len(result)] = torch.frombuffer(bytearray(result or b"\0"), dtype=torch.uint8)[
            : len(result)
        ]
    arrived = [*torch.empty(size, len(padded), dtype=torch.uint8)] if first else None
    if len(padded):
        dist.gather(padded, arrived, dst=dist.get_global_rank(group, 0), group=group)
    if arrived is None:
        return []
    others = [
        tensor[: int(length)].numpy().tobytes()
        for tensor, length in zip(arrived[1:], lengths[1:], strict=True)
    ]
    return [result, *others]


class _Failure(NamedTuple):
    error: Exception
    trace: str

    def to_bytes(self) -> bytes:
        return json.dumps([type(self.error).__name__, str(self.error), self.trace]).encode()


def _attempt(action: Callable[[], bytes]) -> tuple[bytes, _Failure | None]:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks have to hear of it
        return b"", _Failure(error, traceback.format_exc())


def _raise_failures(step: str, texts: Sequence[bytes], own: _Failure | None) -> None:
    """Raise what has failed on some ranks, by what each of them tells; nothing for those without."""
    failures: dict[int, tuple[str, str, str]] = {
        rank: tuple(json.loads(text)) for rank, text in enumerate(texts) if text
    }
    if not failures:
        return
    cause = None if own is None else own.error
    if isinstance(cause, ConfigurationError) and len(failures) == len(texts):
        raise cause
    kind, text, _ = failures[min(failures)]
    if {kind for kind, _, _ in failures.values()} <= _OF_CHECKPOINTS.keys():
        ranks = ", ".join(map(str, failures))
        raise _OF_CHECKPOINTS[kind](f"{text} (found on rank {ranks})") from cause
    raise RankError(step, {rank: trace for rank, (_, _, trace) in failures.items()}) from cause


_OF_CHECKPOINTS = {kind.__name__: kind for kind in (CheckpointError, DamagedCheckpointError)}


def agree_on_layout(lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Compare what every rank is about to shard, line by line, before any of it moves.

    Args:
        lines: One line for the options and one per parameter, in order.
        group: The host group of all ranks.

    Raises:
        LayoutMismatchError: Some rank has other lines; names the first difference and the ranks on
            either side.
    """
    text = json.dumps(list(lines)).encode()
    digest = xxhash.xxh3_128_digest(text)
    if agree_on_highest_alike([], digest, group, "agreement on the layout")[1]:
        return
    # Only now do texts travel, and only two of them.
    digests = all_gather_bytes(digest, group)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    reference, other = (json.loads(_broadcast_bytes(text, rank, group)) for rank in (0, odd[0]))
    index = next(
        (i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b),
        min(len(reference), len(other)),
    )
    expected, found = (
        side[index] if index < len(side) else "nothing more" for side in (reference, other)
    )
    raise LayoutMismatchError(
        f"the ranks do not shard the same model: rank 0 has {expected!r} where rank {odd[0]} has "
        f"{found!r} (ranks that differ from rank 0: {odd}). Build the same model with the same "
        f"options on every rank; look for sizes that depend on the rank, on a random number or on "
        f"a file that only some ranks see"
    )


def _broadcast_bytes(payload: bytes, source: int, group: dist.ProcessGroup) -> bytes:
    """The bytes of one rank of the group, on all of them."""
    begin(group, "exchange")
    length = torch.tensor([len(payload)])
    dist.broadcast(length, group=group, group_src=source)
    sent = torch.zeros(int(length), dtype=torch.uint8)
    if dist.get_rank(group) == source:
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    dist.broadcast(sent, group=group, group_src=source)
    return sent.numpy().tobytes()


def agree_on_highest(
    numbers: torch.Tensor, group: dist.ProcessGroup, operation: str = "agreement on units"
) -> None:
    """Replace each number by the highest that any rank has in its place.

    Args:
        numbers: Bytes that this rank says, of one shape on all ranks, on the host.
        group: The host group of all ranks.
        operation: What it is about; ranks that come to different ones raise.
    """
    reduce_highest(numbers, operation, group).wait()


def agree_on_highest_alike(
    levels: Sequence[int], digest: bytes, group: dist.ProcessGroup, operation: str
) -> tuple[list[int], bool]:
    """The highest of each level (up to 255) on any rank, and whether all say the same digest.

    Digests have one length on all ranks.
    """
    if dist.get_world_size(group) == 1:
        return list(levels), True
    # Equal on all ranks if and only if the highest and the lowest that any rank says in each byte
    # are equal.
    message = torch.tensor(
        [*digest, *(255 - octet for octet in digest), *levels], dtype=torch.uint8
    )
    agree_on_highest(message, group, operation)
    numbers, size = message.tolist(), len(digest)
    pairs = zip(numbers[:size], numbers[size : 2 * size], strict=True)
    return numbers[2 * size :], all(high + low == 255 for high, low in pairs)


def agree_on_any(flags: Sequence[bool], group: dist.ProcessGroup) -> list[bool]:
    """For each flag, whether any rank has it set.

    The number of flags must be the same on all ranks.
    """
    if dist.get_world_size(group) == 1:
        return list(flags)
    tensor = torch.tensor(flags, dtype=torch.uint8)
    agree_on_highest(tensor, group, f"agreement on {len(flags)} flags")
    return [bool(flag) for flag in tensor.tolist()]


# -- AsyncMaximum: a maximum over ranks, known one batch later

_LET_GO_S = 1.0


class AsyncMaximum:
    """A small maximum over all ranks, one in flight at a time, on the host so that nobody waits.

    Every rank has to call the methods in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._alone = group.size() == 1
        self._message = torch.zeros(1, dtype=torch.uint8)
        # Returns the highest number under way.
        self._under_way: Callable[[], int] | None = None

    def contribute(self, number: int) -> None:
        """Send this rank's number on its way; what was under way is dropped.

        Args:
            number: From 0 to 255.
        """
        self.result()
        if self._alone:
            self._under_way = lambda: number
            return
        reduction = reduce_highest(
            torch.tensor([number], dtype=torch.uint8), "agreement on signals", self._group
        )
        self._message = reduction.message
        self._under_way = lambda: int(reduction.wait())

    def result(self) -> int:
        """The highest number contributed; 0 if none was since the last result.

        Waits for what is not there yet.
        """
        under_way, self._under_way = self._under_way, None
        return 0 if under_way is None else under_way()

    def close(self) -> int:
        """The last result, after which nothing is on its way.

        A process may end right after it, so this also waits until gloo's thread has let go of the
        message: for that it needs the interpreter, and a thread that asks for one that is ending
        aborts the process.
        """
        highest = self.result()
        deadline = time.monotonic() + _LET_GO_S
        while self._message._use_count() > 1 and time.monotonic() < deadline:  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(0.0005)
        return highest
