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
from typing import NamedTuple, TypeVar

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
# All ranks of a group begin its operations in one order, so equal positions in a program have equal
# numbers. Counting costs a microsecond on the host and sends nothing; :mod:`shardeddp.comm.desync`
# compares the numbers when a rank has been waiting for a while.
#
# Agreements travel in messages of one size that begin with a checksum of the operation. Ranks in
# different operations thus all detect it at once. Messages of different sizes would end the
# process: gloo aborts it. So longer data follows in a second message.

MESSAGE_NBYTES = 512
"""Message size: no slower than a single byte, and enough for a step of a hundred units."""

_HEADER_NBYTES = 8
_PAYLOAD_NBYTES = MESSAGE_NBYTES - _HEADER_NBYTES
_LENGTH_NBYTES = 8

ABOUT_COLLECTIVES = (
    "All ranks have to communicate alike, in one order: move this out of conditions that only "
    "some ranks fulfil, and give tensors one shape and dtype on all ranks. Barriers, gathers, "
    "self.log(sync_dist=True), saving a checkpoint (trainer.save_checkpoint) and every read of a "
    "sharded parameter are for all ranks"
)
ABOUT_PARAMETERS = (
    "A sharded parameter has to be used by all ranks alike. Move this out of rank_zero_only "
    "functions and out of conditions that only some ranks fulfil, or put it inside of "
    "strategy.summon_full_params(), which all ranks enter: inside, parameters are whole, and "
    "ranks may do different things. Let ShardedDP divide the work of an optimizer that steps on other "
    "parameters on each rank (Muon with an all_gather of its own): use its form for one device, "
    "with ShardedDP(optimizer_scope={'Muon': 'parameter'})"
)
ABOUT_UNITS = (
    "All ranks gather units in one order. If they may use different parts of the model in a step "
    "(experts, modalities, random depth), set ShardedDP(uneven_units=True): then they agree "
    "on what they gather, and those that do not use a unit take part with zeros. Or let "
    "auto_wrap_policy put all such parts into one unit"
)
ABOUT_EXPERTS = (
    "Ranks with different experts need each other in every layer. Draw the layers that a step skips "
    "alike on all ranks (seed_everything), and send no tokens (an empty batch) instead of skipping a "
    "layer on some ranks"
)
ABOUT_TRAINED = (
    "All ranks have to train the same parameters: freeze and unfreeze (requires_grad_) the same "
    "ones on each of them, at the same time"
)
ADVICE = (ABOUT_COLLECTIVES, ABOUT_PARAMETERS, ABOUT_UNITS, ABOUT_EXPERTS, ABOUT_TRAINED)
"""Kinds of advice by rising priority: ranks in different operations get the last that applies."""

Describe = Callable[[str, str], str]
"""Maps a sync point and this rank's operation to a text with the operation of each rank."""


@dataclass
class _Record:
    begun: Counter[str] = field(default_factory=Counter[str])
    describe: Describe | None = None
    is_inherited: bool = False


CountedGroup = HostGroup | dist.ProcessGroup
"""Group in which operations are counted."""

_RECORDS: weakref.WeakKeyDictionary[CountedGroup, _Record] = weakref.WeakKeyDictionary()


def _record_of(group: CountedGroup) -> _Record:
    record = _RECORDS.get(group)
    if record is None:
        record = _RECORDS[group] = _Record()
    return record


def begin(group: CountedGroup, kind: str) -> None:
    """Count one operation; call it before the operation communicates."""
    refuse_inherited(group, kind)
    _record_of(group).begun[kind] += 1


def refuse_inherited(group: CountedGroup, operation: str) -> None:
    """Raise RuntimeError if this process was forked from a rank of the group."""
    if _record_of(group).is_inherited:
        ranks = group.ranks if isinstance(group, HostGroup) else dist.get_process_group_ranks(group)
        raise in_forked_process(operation, ranks)


def leave_to_parent(group: CountedGroup) -> None:
    """Refuse all further operations of a group, in a process that was forked from its rank."""
    _record_of(group).is_inherited = True


def begun(group: CountedGroup) -> dict[str, int]:
    """Return the number of operations that this rank has begun in a group, by kind."""
    return dict(_record_of(group).begun)


def describe_mismatches(group: CountedGroup, describe: Describe) -> None:
    """Register the callback that lists each rank's operation in error messages.

    ``describe`` must not hold a reference to the group.
    """
    _record_of(group).describe = describe


class HostReduction:
    """Element-wise maximum over ranks: a reduction under way, which counts as an operation.

    Args:
        numbers: uint8 tensor on the host, of one shape on all ranks; overwritten with the maximum.
        operation: Name of the operation, the same on all ranks.
        group: Host group of the ranks.
        kind: Kind under which the operation is counted; empty: ``operation``.
        advice: Remedy named in the error if ranks have reached different operations.
        ahead: True to run it on the channel's thread until the result is waited for.
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
        self._sync_point = f"{group.name}/{sum(_record_of(group).begun.values())}"
        self._tag = group.channel.next_tag()
        # Tag of a second message, for numbers that exceed the payload of the first.
        self._second_tag = group.channel.next_tag() if numbers.numel() > _PAYLOAD_NBYTES else 0
        self._under_way: Future[bool] | None = (
            group.begin(self._reduce) if ahead and group.size > 1 else None
        )

    def is_there_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether all ranks have contributed (if ``ahead``)."""
        with during(self._group.clock, "ranks"):
            return self._under_way is None or bool(wait([self._under_way], seconds).done)

    def wait(self) -> torch.Tensor:
        """Return the maximum once all ranks have contributed.

        Raises:
            DesyncError: Some ranks have reached another operation.
        """
        with during(self._group.clock, "ranks"):
            alike = (
                self._reduce() if self._under_way is None else self._group.wait_for(self._under_way)
            )
        if not alike:
            describe = _record_of(self._group).describe
            described = (
                self.operation if describe is None else describe(self._sync_point, self.operation)
            )
            raise DesyncError(f"{described}. {self.advice}")
        return self._numbers

    def _reduce(self) -> bool:
        """Return whether all ranks have reached the same operation; if so, fill the numbers."""
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
    """All-gather byte strings of any lengths, ordered by rank: twice log2 N hops.

    Bytes, so that received data is never unpickled.
    """
    step = torch.tensor([_step(len(payload))], dtype=torch.uint8, device="cpu")
    HostReduction(step, "agreement on a length", group).wait()
    blocks = group.gather(_block(payload, int(step)), group.channel.next_tag())
    return [bytes(_payload(block)) for block in blocks]


# A length is sent as one byte, four steps an octave: the highest step of all ranks fits all.


def _step(length: int) -> int:
    exponent = max(0, length.bit_length() - 3)
    return 4 * exponent + -(-length >> exponent)


def _room(step: int) -> int:
    return step if step < 8 else (4 + step % 4) << step // 4 - 1


def _block(payload: bytes, step: int) -> torch.Tensor:
    """Return a block of the step's size: the payload's length, the payload, zeros."""
    length = len(payload).to_bytes(_LENGTH_NBYTES, "big")
    block = torch.zeros(_LENGTH_NBYTES + _room(step), dtype=torch.uint8, device="cpu")
    filled = block[: _LENGTH_NBYTES + len(payload)]
    filled.copy_(torch.frombuffer(bytearray(length + payload), dtype=torch.uint8))
    return block


def _payload(block: torch.Tensor) -> memoryview:
    """Return the payload of a block as a view, which keeps the memory of all blocks alive."""
    octets = block.numpy().data.toreadonly()
    length = int.from_bytes(octets[:_LENGTH_NBYTES], "big")
    return octets[_LENGTH_NBYTES : _LENGTH_NBYTES + length]


def run_on_all_ranks(step: str, action: Callable[[], T], group: HostGroup) -> T:
    """Run a step on every rank, and raise on every rank if it fails on any.

    Args:
        step: Description of the step as a noun phrase, for the message.
        action: Local work of the step; it must not communicate, else a rank that fails leaves the
            others waiting inside it.
        group: Host group of all ranks.

    Raises:
        ConfigurationError: All ranks failed; this one re-raises its own error.
        CheckpointError: All errors are about checkpoints; the type and text are those of the first.
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
    """Run a step as :func:`run_on_all_ranks` does, and all-gather the results, ordered by rank."""
    result, failure = _attempt(action)
    sent = all_gather_bytes(b"+" + result if failure is None else b"-" + failure.to_bytes(), group)
    _raise_failures(step, [text[1:] if text[:1] == b"-" else b"" for text in sent], failure)
    return [text[1:] for text in sent]


def gather_to_first(
    step: str, action: Callable[[], bytes], group: HostGroup
) -> list[bytes | memoryview]:
    """Run a step as :func:`run_on_all_ranks` does, and gather the results to the first rank.

    Returns:
        Results by rank on the first rank, after log2 N hops through a tree; empty on the others.
    """
    result, failure = _attempt(action)
    first = group.rank == 0
    # The first rank's own result, which may be by far the longest, does not travel.
    sent = b"" if first else result
    summary = torch.tensor([failure is not None, _step(len(sent))], dtype=torch.uint8, device="cpu")
    any_failed, room = HostReduction(summary, "gathering", group).wait().tolist()
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
    except Exception as error:  # noqa: BLE001 - any error has to reach all ranks
        return b"", _Failure(error, traceback.format_exc())


def _raise_failures(step: str, texts: Sequence[bytes], own: _Failure | None) -> None:
    """Raise the error of the failed ranks, those with a text; return if there are none."""
    failures: dict[int, tuple[str, str, str]] = {
        rank: tuple(json.loads(text)) for rank, text in enumerate(texts) if text
    }
    if not failures:
        return
    cause = None if own is None else own.error
    if isinstance(cause, ConfigurationError) and len(failures) == len(texts):
        raise cause
    if {kind for kind, _, _ in failures.values()} <= _OF_CHECKPOINTS.keys():
        by_text: dict[str, list[int]] = {}
        for rank, (_, text, _) in failures.items():
            by_text.setdefault(text, []).append(rank)
        found = [
            f"{text} (found on rank {', '.join(map(str, ranks))})"
            for text, ranks in by_text.items()
        ]
        more = [f"and {len(found) - 3} more errors"] if len(found) > 3 else []
        first_kind = failures[min(failures)][0]
        raise _OF_CHECKPOINTS[first_kind]("\n".join([*found[:3], *more])) from cause
    raise RankError(step, {rank: trace for rank, (_, _, trace) in failures.items()}) from cause


_OF_CHECKPOINTS = {kind.__name__: kind for kind in (CheckpointError, DamagedCheckpointError)}


def agree_on_layout(lines: Sequence[str], group: HostGroup) -> None:
    """Compare the layouts that the ranks are about to shard, line by line, before any data moves.

    Raises:
        LayoutMismatchError: The lines differ between ranks; names the first difference and the
            ranks on either side.
    """
    text = json.dumps(list(lines)).encode()
    digest = xxhash.xxh3_128_digest(text)
    if agree_on_highest_alike([], digest, group, "agreement on the layout")[1]:
        return
    # Texts travel only after a mismatch, and only two of them.
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
    """Broadcast bytes from one rank of the group, and return them."""
    is_source = group.rank == source
    step = torch.tensor([_step(len(payload)) if is_source else 0], dtype=torch.uint8, device="cpu")
    HostReduction(step, f"broadcast of rank {source}", group).wait()
    block = _block(payload if is_source else b"", int(step))
    group.broadcast_(block, source, group.channel.next_tag())
    return bytes(_payload(block))


def agree_on_highest_alike(
    levels: Sequence[int], digest: bytes, group: HostGroup, operation: str
) -> tuple[list[int], bool]:
    """Return the highest of each level on any rank, and whether all digests are equal.

    Levels, from 0 to 255, and digests have one length on all ranks.
    """
    if group.size == 1:
        return list(levels), True
    # Digests are equal if and only if the maximum and the minimum over ranks are equal in each
    # byte; the minimum is the maximum of complements.
    message = torch.tensor(
        [*digest, *(255 - octet for octet in digest), *levels], dtype=torch.uint8, device="cpu"
    )
    numbers, size = HostReduction(message, operation, group).wait().tolist(), len(digest)
    pairs = zip(numbers[:size], numbers[size : 2 * size], strict=True)
    return numbers[2 * size :], all(high + low == 255 for high, low in pairs)


def agree_on_any(flags: Sequence[bool], group: HostGroup) -> list[bool]:
    """Return for each flag whether any rank has it set.

    The number of flags must be the same on all ranks.
    """
    highest, _ = agree_on_highest_alike(flags, b"", group, f"agreement on {len(flags)} flags")
    return [bool(flag) for flag in highest]


# -- AsyncMaximum: a maximum over ranks, known one batch later


class AsyncMaximum:
    """Maximum of a small number over all ranks, reduced on the host while training goes on.

    One reduction is in flight at a time. Every rank has to call the methods in the same order.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._under_way: HostReduction | None = None

    def contribute(self, number: int) -> None:
        """Begin to reduce this rank's number, 0 to 255; drop the result of an earlier reduction."""
        self.result()
        own = torch.tensor([number], dtype=torch.uint8, device="cpu")
        self._under_way = HostReduction(own, "agreement on signals", self._group, ahead=True)

    def result(self) -> int:
        """Return the highest number contributed; 0 if none was since the last result.

        Blocks until the reduction is done.
        """
        under_way, self._under_way = self._under_way, None
        return 0 if under_way is None else int(under_way.wait())
