"""Strict JSON: parsed exactly, or refused with one kind of error."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from shardeddp.errors import CheckpointError
from shardeddp.garbage import collector_paused

# The parser is :mod:`json`, with hooks for stricter rules. The cost of a document is bounded by its
# size: a value takes at most some 60 bytes for each byte of its text (``[],``), and unterminated
# text, wide characters and long numbers take time in proportion to their length. Nesting is bounded
# by the interpreter.

MAX_INTEGER = 2**53 - 1
"""Limit of either sign, up to which every JSON reader keeps integers exactly."""

_MAX_NUMBER_LENGTH = 32
"""Limit in characters; ``repr`` of a float has 24 at most.

More digits take more than linear time on old interpreters.
"""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | bytearray, name: str) -> Any:
    """Parse strict JSON: ASCII, no duplicate keys, finite numbers, integers below 2**53.

    Raises:
        CheckpointError: The data is anything else; no other error is raised.
    """
    try:
        # The number of new objects is bounded by the document's size.
        with collector_paused():
            value = json.loads(
                data.decode("ascii"),
                parse_int=_integer,
                parse_float=_real,
                parse_constant=_no_constant,
                object_pairs_hook=_object,
            )
            if _SURROGATE.search(data):
                json.dumps(value, ensure_ascii=False).encode()  # half a pair has no code
        return value
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at byte {error.pos:,}"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start:,} is {data[error.start]:#04x}, expected ASCII"
    except UnicodeEncodeError:
        reason = "a string has half a surrogate pair"
    except RecursionError:
        reason = "it is nested deeper than any value that this package saves"
    except ValueError as error:
        reason = str(error)
    # Not chained: a JSONDecodeError holds the whole text.
    raise CheckpointError(
        f"{name} cannot be read as JSON: {reason}. Expected a file that this package has written"
    )


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


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
