"""JSON that somebody else may have written: parsed in bounded time and memory, or refused with one kind of error.

The size, the memory that the values will take and the nesting are all checked on the raw bytes, by scans that run at
the speed of C, before the first value is made. What passes is read by :mod:`json`, with hooks for the other rules.
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from shardeddp.errors import CheckpointError

MAX_INTEGER = 2**53 - 1
"""Of either sign: what every JSON reader keeps exactly."""

_MAX_NUMBER_LENGTH = 32
"""Characters; ``repr`` of a float has 24 at most. Longer digits take more than linear time on old interpreters."""

# Bytes that one such character of the text may take once parsed, rounded up.
_COSTS = {
    b"[": 100,  # a list, its first four slots, and its place in the container around it
    b"{": 176,  # a dict, with the list of pairs that it is made of
    b":": 176,  # a slot in a growing dict, the key's second half, and the pair for as long as the object is open
    b",": 42,  # a number, and its slot in a growing list
    b'"': 24,  # half a string's header
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STRING = re.compile(rb'"[^"]*"')
_ONE_KIND_OF_BRACKET = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))


@dataclass(frozen=True, kw_only=True)
class JsonLimits:
    """What a JSON document may ask for.

    The defaults keep whatever is refused under 100 MB. A manifest takes about 8 times its own size: those of some
    80,000 pieces pass. For a larger one, raise `memory_nbytes`, if its writer is trusted that far.
    """

    nbytes: int = 64 * 10**6
    """Of the text."""

    memory_nbytes: int = 96 * 10**6
    """Of the decoded text and the parsed values together, as estimated from the text: never less than it takes."""

    depth: int = 32
    """Arrays and objects inside each other."""


def parse_json(data: bytes, name: str, limits: JsonLimits = JsonLimits()) -> Any:
    """Parse a JSON document, strictly: ASCII, no duplicate keys, finite numbers, integers below 2**53.

    Args:
        data: The whole document.
        name: Of the file, for errors.
        limits: What the document may ask for.

    Raises:
        CheckpointError: It is not such a document, or asks for more than its limits; nothing else is raised.
    """
    try:
        _check_limits(data, limits)
        with _collector_paused():
            value = json.loads(
                data.decode("ascii"),
                parse_int=_integer,
                parse_float=_real,
                parse_constant=_no_constant,
                object_pairs_hook=_object,
            )
        if _SURROGATE.search(data):
            for text in _strings(value):
                text.encode()
        return value
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at byte {error.pos:,}"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start:,} is {data[error.start]:#04x}, expected ASCII"
    except UnicodeEncodeError:
        reason = "a string has half a surrogate pair"
    except RecursionError:
        reason = "the interpreter has no room for its nesting here"
    except ValueError as error:
        reason = str(error)
    # Not chained: a JSONDecodeError holds the whole text.
    raise CheckpointError(f"{name} cannot be read as JSON: {reason}. Expected a file that this package has written")


def estimated_memory(data: bytes) -> int:
    """Bytes that parsing takes at most, from the characters that values need: a bracket in a string counts as well."""
    # One escape beyond U+FFFF widens its whole string to 4 bytes a character, in a buffer that grows by a quarter.
    width = 5 if b"\\u" in data else 2 if b"\\" in data else 1
    return len(data) * (1 + width) + sum(data.count(character) * cost for character, cost in _COSTS.items())


def _check_limits(data: bytes, limits: JsonLimits) -> None:
    if len(data) > limits.nbytes:
        raise ValueError(f"it has {len(data):,} bytes, expected at most {limits.nbytes:,}")
    memory = estimated_memory(data)
    if memory > limits.memory_nbytes:
        raise ValueError(
            f"its {len(data):,} bytes hold values of up to {memory:,} bytes, expected at most {limits.memory_nbytes:,} "
            "(JsonLimits.memory_nbytes raises that)"
        )
    if _is_deeper_than(limits.depth, data):
        raise ValueError(f"its brackets or quotes do not match, or it is nested more than {limits.depth} deep")


@contextmanager
def _collector_paused() -> Generator[None]:
    """JSON has no cycles, and each collection on the way would visit all objects of the process: 10 times the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_deeper_than(depth: int, data: bytes) -> bool:
    """Whether brackets are left once the innermost pairs were taken away `depth` times; exact for valid JSON."""
    # Pairs of backslashes first: a quote is part of a string if one backslash is left before it.
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_STRUCTURE)
    brackets = _STRING.sub(b"", unescaped).translate(_ONE_KIND_OF_BRACKET)
    for _ in range(depth):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _integer(text: str) -> int:
    if len(text) > _MAX_NUMBER_LENGTH or not -MAX_INTEGER <= (value := int(text)) <= MAX_INTEGER:
        raise ValueError(f"the integer {_shorten(text)} is not below 2**53")
    return value


def _real(text: str) -> float:
    if len(text) > _MAX_NUMBER_LENGTH or not math.isfinite(value := float(text)):
        raise ValueError(f"the number {_shorten(text)} is not a finite 64-bit float")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        [(key, count)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {_shorten(ascii(key))} stands {count} times in one object")
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
