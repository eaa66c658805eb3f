"""Agreement: what all ranks decide together, over the host group; errors of one rank become errors of all."""

import json
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from shardeddp.comm.sequence import begin, reduce_highest
from shardeddp.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpointError,
    LayoutMismatchError,
    RankError,
)

T = TypeVar("T")


def exchange(payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Give every rank's bytes to every rank, by rank. Bytes, so that nothing that arrives is ever unpickled."""
    begin(group, "exchange")
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(payload)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
    arrived = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(arrived, padded, group=group)
    return [tensor[: int(length)].numpy().tobytes() for tensor, length in zip(arrived, lengths, strict=True)]


def together(step: str, action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run a step that every rank takes, and raise on every rank if it fails on any.

    Args:
        step: What the step does, as a noun phrase for the message.
        action: The step; it must not communicate, else a rank that fails leaves the others waiting inside it.
        group: The host group of all ranks.

    Raises:
        ConfigurationError: Every rank found the same configuration wrong.
        CheckpointError: All that failed found a checkpoint wrong; with what the first of them found.
        RankError: Some rank failed in another way, this one or another; it carries the traceback of each.
    """
    results: list[T] = []

    def run() -> bytes:
        results.append(action())
        return b""

    gather_results(step, run, group)
    return results[0]


def gather_results(step: str, action: Callable[[], bytes], group: dist.ProcessGroup) -> list[bytes]:
    """Run a step as :func:`together` does, and give every rank's result to every rank, by rank."""
    result, failure, cause = b"", None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks have to hear of it
        failure, cause = _Failure(type(error).__name__, str(error), traceback.format_exc()), error
    sent = exchange(b"+" + result if failure is None else b"-" + json.dumps(failure).encode(), group)
    failures = {rank: _Failure(*json.loads(text[1:])) for rank, text in enumerate(sent) if text[:1] == b"-"}
    if not failures:
        return [text[1:] for text in sent]
    if isinstance(cause, ConfigurationError) and len(failures) == len(sent):
        raise cause
    first = min(failures)
    kinds = {failure.kind for failure in failures.values()}
    if kinds <= _OF_CHECKPOINTS.keys():
        ranks = ", ".join(map(str, failures))
        raise _OF_CHECKPOINTS[failures[first].kind](f"{failures[first].text} (found on rank {ranks})") from cause
    raise RankError(step, {rank: failure.trace for rank, failure in failures.items()}) from cause


_OF_CHECKPOINTS = {kind.__name__: kind for kind in (CheckpointError, DamagedCheckpointError)}


class _Failure(NamedTuple):
    kind: str
    text: str
    trace: str


def agree_on_layout(lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Compare what every rank is about to shard, line by line, before any of it moves.

    Args:
        lines: One line for the options and one per parameter, in order.
        group: The host group of all ranks.

    Raises:
        LayoutMismatchError: Some rank has other lines; names the first difference and the ranks on either side.
    """
    everyones = [json.loads(text) for text in exchange(json.dumps(list(lines)).encode(), group)]
    reference = everyones[0]
    odd = [rank for rank, other in enumerate(everyones) if other != reference]
    if not odd:
        return
    other = everyones[odd[0]]
    index = next(
        (i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), min(len(reference), len(other))
    )
    expected, found = (side[index] if index < len(side) else "nothing more" for side in (reference, other))
    raise LayoutMismatchError(
        f"the ranks do not shard the same model: rank 0 has {expected!r} where rank {odd[0]} has {found!r}"
        f" (ranks that differ from rank 0: {odd}). Build the same model with the same options on every rank; "
        f"look for sizes that depend on the rank, on a random number or on a file that only some ranks see"
    )


def agree_on_highest(numbers: torch.Tensor, group: dist.ProcessGroup, operation: str = "agreement on units") -> None:
    """Replace each number by the highest that any rank has in its place.

    Args:
        numbers: Bytes that this rank says, of one shape on all ranks, on the host.
        group: The host group of all ranks.
        operation: What it is about; ranks that come to different ones raise.
    """
    reduce_highest(numbers, operation, group).wait()


def agree_on_any_alike(
    flags: Sequence[bool], checksum: int, group: dist.ProcessGroup, operation: str
) -> tuple[list[bool], bool]:
    """For each flag, whether any rank has it set; and whether all ranks have the same checksum of 32 bits."""
    if dist.get_world_size(group) == 1:
        return list(flags), True
    said = checksum.to_bytes(4, "big")
    # Equal on all ranks if and only if the highest and the lowest that any rank says in each byte are equal.
    ballot = torch.tensor([*said, *(255 - octet for octet in said), *flags], dtype=torch.uint8)
    agree_on_highest(ballot, group, operation)
    numbers = ballot.tolist()
    same = all(high + low == 255 for high, low in zip(numbers[:4], numbers[4:8], strict=True))
    return [bool(flag) for flag in numbers[8:]], same


def agree_on_any(flags: Sequence[bool], group: dist.ProcessGroup) -> list[bool]:
    """For each flag, whether any rank has it set. The flags' number must be the same on all ranks."""
    if dist.get_world_size(group) == 1:
        return list(flags)
    tensor = torch.tensor(flags, dtype=torch.uint8)
    agree_on_highest(tensor, group, f"agreement on {len(flags)} flags")
    return [bool(flag) for flag in tensor.tolist()]
