"""Agreement of ranks over small host messages: results, errors, flags, and checksums of plans."""

from __future__ import annotations

import json
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash

from shardeddp.comm.collectives import in_forked_process
from shardeddp.comm.host_group import HostGroup
from shardeddp.comm.step_clock import during
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
# end the process: gloo aborts it. So what is longer follows such a message.

MESSAGE_NBYTES = 512
"""Small enough to take no longer than a byte; large enough for a step of a hundred units."""

_HEADER_NBYTES = 8
_PAYLOAD_NBYTES = MESSAGE_NBYTES - _HEADER_NBYTES
_LENGTH_NBYTES = 8

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
    "rank may do what it likes. An optimizer that steps on other parameters on each rank, as Muon "
    "with an all_gather of its own does, is to leave that to ShardedDP: take its form for one "
    "device, with ShardedDP(optimizer_scope={'Muon': 'parameter'})"
)
ABOUT_UNITS = (
    "All ranks gather units in one order. If they may use different parts of the model in a step "
    "(experts, modalities, random depth), set ShardedDP(uneven_units=True): then they agree "
    "on what they gather, and those that do not use a unit take part with zeros. Or let "
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
    first: Callable[[], None] | None = None


Ranks = HostGroup | dist.ProcessGroup
"""Whose operations are counted."""

_RECORDS: weakref.WeakKeyDictionary[Ranks, _Record] = weakref.WeakKeyDictionary()


def _record_of(group: Ranks) -> _Record:
    record = _RECORDS.get(group)
    if record is None:
        record = _RECORDS[group] = _Record()
    return record


def begin(group: Ranks, kind: str) -> None:
    """Count one operation; to be called before it communicates.

    Raises:
        RuntimeError: This process was forked from the rank that the group is of.
    """
    refuse_inherited(group, kind)
    record = _record_of(group)
    if record.first is not None:
        record.first()
    record.begun[kind] += 1


def refuse_inherited(group: Ranks, operation: str) -> None:
    """Raise if this process was forked from the rank that a group is of."""
    if _record_of(group).is_inherited:
        ranks = group.ranks if isinstance(group, HostGroup) else dist.get_process_group_ranks(group)
        raise in_forked_process(operation, ranks)


def leave_to_parent(group: Ranks) -> None:
    """Refuse all that begins in a group from now on: this process was forked from its rank."""
    _record_of(group).is_inherited = True


def begun(group: Ranks) -> dict[str, int]:
    """How many operations of each kind this rank has begun in a group."""
    return dict(_record_of(group).begun)


def come_first(group: Ranks, action: Callable[[], None]) -> None:
    """Let something be done before each operation in a group.

    What ``action`` holds must not hold the group.
    """
    _record_of(group).first = action


def describe_mismatches(group: Ranks, describe: Describe) -> None:
    """Let errors say which ranks have come to what.

    What ``describe`` holds must not hold the group.
    """
    _record_of(group).describe = describe


class HostReduction:
    """The highest of each number on any rank: a reduction under way, which counts as an operation.

    Args:
        numbers: Bytes, of one shape on all ranks, on the host; each is replaced by the highest that
            any rank has in its place.
        operation: What it is for, the same on all ranks.
        group: The ranks.
        kind: As what it is counted; empty: as what it is for.
        advice: What to do if ranks have come to different operations.
        ahead: Whether it goes on behind the back of this thread until the result is waited for.
    """

    def __init__(
        self,
        numbers: torch.Tensor,
        operation: str,
        group: HostGroup,
        *,
        kind: str = "",
        advice: str = ABOUT_COLLECTIVES,
        ahead: bool = False,
    ) -> None:
        begin(group, kind or operation)
        self.operation, self.advice = operation, advice
        code = torch.tensor(
            [*zlib.crc32(operation.encode()).to_bytes(4, "big")], dtype=torch.uint8, device="cpu"
        )
        message = torch.zeros(MESSAGE_NBYTES, dtype=torch.uint8, device="cpu")
        message[:4], message[4:_HEADER_NBYTES] = code, 255 - code
        inline = numbers.view(-1)[:_PAYLOAD_NBYTES]
        message[_HEADER_NBYTES : _HEADER_NBYTES + inline.numel()] = inline
        self._message, self._numbers, self._group = message, numbers, group
        self._meeting = f"{group.name}/{sum(_record_of(group).begun.values())}"
        self._tag = group.channel.next_tag()
        # Where numbers are too many for one message.
        self._second_tag = group.channel.next_tag() if numbers.numel() > _PAYLOAD_NBYTES else 0
        self._under_way: Future[bool] | None = (
            group.begin(self._reduce) if ahead and group.size > 1 else None
        )

    def is_there_within(self, seconds: float) -> bool:
        """Whether all ranks have given theirs, of one that has begun ahead; waits that long."""
        with during(self._group.clock, "ranks"):
            return self._under_way is None or bool(wait([self._under_way], seconds).done)

    def wait(self) -> torch.Tensor:
        """The numbers, once all ranks have given theirs.

        Raises:
            DesyncError: Some have come to another operation.
        """
        with during(self._group.clock, "ranks"):
            alike = (
                self._reduce() if self._under_way is None else self._group.wait_for(self._under_way)
            )
        if not alike:
            describe = _record_of(self._group).describe
            described = (
                self.operation if describe is None else describe(self._meeting, self.operation)
            )
            raise DesyncError(f"{described}. {self.advice}")
        return self._numbers

    def _reduce(self) -> bool:
        """Whether all ranks have come to the same operation; the numbers are there if so."""
        message = self._message
        self._group.keep_highest_(message, self._tag)
        header = message[:_HEADER_NBYTES].tolist()
        if any(
            code + complement != 255
            for code, complement in zip(header[:4], header[4:], strict=True)
        ):
            return False
        numbers, payload = self._numbers.view(-1), message[_HEADER_NBYTES:]
        numbers[:_PAYLOAD_NBYTES] = payload[: numbers.numel()]
        if self._second_tag:
            self._group.keep_highest_(numbers[_PAYLOAD_NBYTES:], self._second_tag)
        return True


# -- Agreement: decisions of all ranks over the host group

T = TypeVar("T")


def all_gather_bytes(payload: bytes, group: HostGroup) -> list[bytes]:
    """Give every rank's bytes to every rank, by rank: twice log2 N hops.

    Bytes, so that nothing that arrives is ever unpickled.
    """
    step = torch.tensor([_step(len(payload))], dtype=torch.uint8, device="cpu")
    HostReduction(step, "exchange", group).wait()
    blocks = group.gather(_block(payload, int(step)), group.channel.next_tag())
    return [bytes(_payload(block)) for block in blocks]


# Lengths are told in a byte, four steps an octave: the highest step of all ranks has room for all.


def _step(length: int) -> int:
    exponent = max(0, length.bit_length() - 3)
    return 4 * exponent + -(-length >> exponent)


def _room(step: int) -> int:
    return step if step < 8 else (4 + step % 4) << step // 4 - 1


def _block(payload: bytes, step: int) -> torch.Tensor:
    """Bytes with their number before them, as long as any of a step."""
    length = len(payload).to_bytes(_LENGTH_NBYTES, "big")
    block = torch.zeros(_LENGTH_NBYTES + _room(step), dtype=torch.uint8, device="cpu")
    filled = block[: _LENGTH_NBYTES + len(payload)]
    filled.copy_(torch.frombuffer(bytearray(length + payload), dtype=torch.uint8))
    return block


def _payload(block: torch.Tensor) -> memoryview:
    """What is in a block, without a copy; it holds the memory of all blocks."""
    octets = block.numpy().data.toreadonly()
    length = int.from_bytes(octets[:_LENGTH_NBYTES], "big")
    return octets[_LENGTH_NBYTES : _LENGTH_NBYTES + length]


def run_on_all_ranks(step: str, action: Callable[[], T], group: HostGroup) -> T:
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


def gather_results(step: str, action: Callable[[], bytes], group: HostGroup) -> list[bytes]:
    """Run a step as :func:`run_on_all_ranks` does; every rank gets the results of all, by rank."""
    result, failure = _attempt(action)
    sent = all_gather_bytes(b"+" + result if failure is None else b"-" + failure.to_bytes(), group)
    _raise_failures(step, [text[1:] if text[:1] == b"-" else b"" for text in sent], failure)
    return [text[1:] for text in sent]


def gather_to_first(
    step: str, action: Callable[[], bytes], group: HostGroup
) -> list[bytes | memoryview]:
    """The same for the first rank alone, through a tree of ranks: log2 N hops on it.

    Returns:
        Every rank's result, by rank, where it has arrived; nothing on other ranks than the first.
    """
    result, failure = _attempt(action)
    first = group.rank == 0
    # The first rank's own result, which may be by far the longest, does not travel.
    sent = b"" if first else result
    told = torch.tensor([failure is not None, _step(len(sent))], dtype=torch.uint8, device="cpu")
    any_failed, room = HostReduction(told, "gathering", group).wait().tolist()
    if any_failed:
        texts = all_gather_bytes(b"" if failure is None else failure.to_bytes(), group)
        _raise_failures(step, texts, failure)
    blocks = group.gather_to_first(_block(sent, room), group.channel.next_tag())
    return [] if blocks is None else [result, *map(_payload, blocks[1:])]


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


def agree_on_layout(lines: Sequence[str], group: HostGroup) -> None:
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
    reference, other = (json.loads(broadcast_bytes(text, rank, group)) for rank in (0, odd[0]))
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


def broadcast_bytes(payload: bytes, source: int, group: HostGroup) -> bytes:
    """The bytes of one rank of the group, on all of them.

    Args:
        payload: Of that rank; others' do not count.
        source: Its place in the group.
        group: The ranks.
    """
    is_source = group.rank == source
    step = torch.tensor([_step(len(payload)) if is_source else 0], dtype=torch.uint8, device="cpu")
    HostReduction(step, f"broadcast of rank {source}", group).wait()
    block = _block(payload if is_source else b"", int(step))
    group.broadcast_(block, source, group.channel.next_tag())
    return bytes(_payload(block))


def ask_for_highest_alike(
    levels: Sequence[int], digest: bytes, group: HostGroup, operation: str, *, ahead: bool
) -> Callable[[], tuple[list[int], bool]]:
    """Ask for the highest of each level (up to 255) on any rank, and whether digests are the same.

    Digests have one length on all ranks.

    Args:
        levels: Of this rank.
        digest: Of this rank.
        group: The ranks.
        operation: See :class:`HostReduction`.
        ahead: See :class:`HostReduction`.

    Returns:
        What returns both, once all ranks have asked.
    """
    if group.size == 1:
        return lambda: (list(levels), True)
    # Equal on all ranks if and only if the highest and the lowest that any rank says in each byte
    # are equal.
    message = torch.tensor(
        [*digest, *(255 - octet for octet in digest), *levels], dtype=torch.uint8, device="cpu"
    )
    reduction, size = HostReduction(message, operation, group, ahead=ahead), len(digest)

    def answer() -> tuple[list[int], bool]:
        numbers = reduction.wait().tolist()
        pairs = zip(numbers[:size], numbers[size : 2 * size], strict=True)
        return numbers[2 * size :], all(high + low == 255 for high, low in pairs)

    return answer


def agree_on_highest_alike(
    levels: Sequence[int], digest: bytes, group: HostGroup, operation: str
) -> tuple[list[int], bool]:
    """Ask as :func:`ask_for_highest_alike` does, and wait for the answer."""
    return ask_for_highest_alike(levels, digest, group, operation, ahead=False)()


def agree_on_any(flags: Sequence[bool], group: HostGroup) -> list[bool]:
    """For each flag, whether any rank has it set.

    The number of flags must be the same on all ranks.
    """
    if group.size == 1:
        return list(flags)
    tensor = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    HostReduction(tensor, f"agreement on {len(flags)} flags", group).wait()
    return [bool(flag) for flag in tensor.tolist()]


# -- AsyncMaximum: a maximum over ranks, known one batch later


class AsyncMaximum:
    """A small maximum over all ranks, one in flight at a time, on the host so that nobody waits.

    Every rank has to call the methods in the same order.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._under_way: Callable[[], Any] | None = None  # returns the highest number

    def contribute(self, number: int) -> None:
        """Send this rank's number on its way; what was under way is dropped.

        Args:
            number: From 0 to 255.
        """
        self.result()
        if self._group.size == 1:  # there is nobody to ask
            self._under_way = lambda: number
            return
        self._under_way = HostReduction(
            torch.tensor([number], dtype=torch.uint8, device="cpu"),
            "agreement on signals",
            self._group,
            ahead=True,
        ).wait

    def result(self) -> int:
        """The highest number contributed; 0 if none was since the last result.

        Waits for what is not there yet.
        """
        under_way, self._under_way = self._under_way, None
        return 0 if under_way is None else int(under_way())
