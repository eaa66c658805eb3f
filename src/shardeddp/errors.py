"""Errors that shardeddp raises on purpose, and the meaning of each.

A wrong argument is a ``ValueError`` (or ``TypeError``), a call at the wrong moment a
``RuntimeError``, and a stated limit a ``NotImplementedError``; the classes below refine those where
a caller may want to catch one thing alone.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches

log = logging.getLogger(__name__)

# -- Texts in messages

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return a text without effects on a terminal: control and direction characters are escaped.

    Names in files are arbitrary.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def extend_message(error: BaseException, text: str) -> None:
    """Append a text to the message of an error, or add it as a note to one that makes its message itself.

    The text of an error that takes neither is logged.
    """
    args, extended = error.args, f"{text_of(error)}\n\n{text}".lstrip()
    with suppress(Exception):  # of a class that cannot be changed, or computes with its arguments
        error.args = (extended, *args[1:])
        if str(error) == extended:
            return
    try:
        error.args = args
        error.add_note(text)  # type: ignore[attr-defined]  # Python 3.11
    except Exception:  # noqa: BLE001 - the error itself is the one to report
        log.error(text)


def text_of(error: BaseException) -> str:
    """Return the message of an error; empty if its class fails to make one."""
    with suppress(Exception):
        return str(error)
    return ""


def errors_behind(error: BaseException) -> list[BaseException]:
    """Return an error with its causes, contexts and members of groups, each once."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        at = left.pop()
        if at is not None and not any(at is it for it in found):  # one may be its own cause
            found.append(at)
            left += [at.__cause__, at.__context__, *getattr(at, "exceptions", ())]
    return found


def listing(names: Iterable[str]) -> str:
    """Return names for an error message, at most ten of them."""
    return _first(10, map(repr, names))


def first_three(names: Iterable[str]) -> str:
    """Return the first names for a warning, and the number of the others."""
    return _first(3, names)


def listed_ranks(ranks: Iterable[int]) -> str:
    """Return the first ranks for a message, and the number of the others."""
    return _first(8, map(str, ranks))


def _first(most: int, names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if every[most:] else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest known names, or all."""
    every = list(dict.fromkeys(known))
    if not every:
        return "there are none."
    if near := closest(name, every, count=3):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"there are {listing(every)}."


def did_you_mean(names: Iterable[str]) -> str:
    """Return a suggestion of names, for the end of a message; empty without names."""
    return "".join(f"; did you mean {name}?" for name in names)


def closest(
    name: object, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return the known names that are closest to another one in any case, the closest first.

    Args:
        name: Unknown name.
        known: Names to choose from; of those that differ in case alone, the last one counts.
        count: Greatest number of names to return.
        cutoff: Least similarity of a name, from 0 to 1 (equal), as `difflib` measures it.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = get_close_matches(str(name).lower(), by_lower, n=count, cutoff=cutoff)
    return [by_lower[match] for match in matches]


# -- Errors


class ConfigurationError(ValueError):
    """Options or model that cannot be trained; raised before any training, on every rank."""


class UsageError(ConfigurationError):
    """Arguments with unknown names or contradictions, independent of the model."""


class RankError(RuntimeError):
    """At least one rank failed in a step that all ranks take together.

    Raised on every rank with every traceback.

    Args:
        step: Operation that failed, as a noun phrase ("sharding the model").
        failures: Formatted traceback of every rank that failed, by rank.
        headline: Rank and error in a line, if one rank has failed by itself; else empty.
    """

    def __init__(self, step: str, failures: dict[int, str], headline: str = "") -> None:
        super().__init__(step, failures, headline)  # arguments for pickle
        self.step = step
        self.failures = failures
        self.headline = headline

    def __str__(self) -> str:
        """Return the failed ranks and their tracebacks."""
        ranks = ", ".join(str(rank) for rank in sorted(self.failures))
        traces = "\n".join(
            f"--- rank {rank} ---\n{self.failures[rank].rstrip()}" for rank in sorted(self.failures)
        )
        return f"{self.step} failed on rank {ranks}; every rank stops here.\n{traces}"


class LostRankError(RuntimeError):
    """Some ranks have stopped without an error of their own.

    It is the cause of the errors that other ranks raise.

    Args:
        ranks: Ranks that have not reported.
        places: Code line of each rank that still runs.
        ended: True if they have certainly ended, with the store that would have their reason.
    """

    def __init__(
        self, ranks: Sequence[int], places: Mapping[int, str] | None = None, ended: bool = False
    ) -> None:
        super().__init__(ranks, places, ended)  # arguments for pickle
        self.ranks = list(ranks)
        self.places = dict(places or {})
        self.ended = ended

    def __str__(self) -> str:
        """Return the ranks and possible reasons."""
        listed = ", ".join(map(str, self.ranks))
        if self.places:
            listed = ", ".join(f"rank {rank} (at {self.places[rank]})" for rank in self.ranks)
            return (
                f"ranks that are still running, while the others were interrupted: {listed}. They "
                f"have not reached the operation that the others wait for: something before it "
                f"takes longer than the timeout, or their program does not lead to it. "
                f"ShardedDP(timeout=...) is the time that ranks wait for each other"
            )
        if self.ended:
            return (
                f"no word from rank {listed}: the process that hosts the store in which ranks "
                f"leave their errors (rank 0, or torchrun on its machine) has ended or was killed. "
                f"Look for the reason in the output of rank 0"
            )
        return (
            f"no word from rank {listed}: killed (out of memory, by a scheduler, with its machine) "
            f"or frozen. Look at its output and at the system log of its machine; "
            f"ShardedDP(timeout=...) is how long ranks wait for each other"
        )


class DesyncError(RuntimeError):
    """Ranks came to different operations, each of which needs all of them; the text lists them."""


class LayoutMismatchError(ConfigurationError):
    """The ranks built different models or asked for different shardings."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or could not be written.

    The message has the expected, the found and the location.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class DamagedCheckpointError(CheckpointError):
    """Some content of a checkpoint differs from the content that was written."""
