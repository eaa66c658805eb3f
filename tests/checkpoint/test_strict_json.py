"""What others may have written is parsed exactly or refused with one kind of error; its size bounds what that costs."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardeddp
from shardeddp.checkpoint.state_codec import MAX_DEPTH
from shardeddp.checkpoint.strict_json import MAX_INTEGER, parse_json
from shardeddp.errors import CheckpointError

pytestmark = pytest.mark.timeout(60)

MB = 10**6
SECONDS_PER_MB = 0.5
MB_PER_MB = 64
"""Of memory for a document: an empty list takes 56 bytes and a place in another list, for three bytes of text."""

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


def refusal(data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_json(data, "some.json")
    assert caught.value.__cause__ is None or not isinstance(
        caught.value.__cause__, json.JSONDecodeError
    )
    assert "some.json" in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=300)
@given(JSON)
def test_what_json_writes_is_read_as_it_was(value: Any) -> None:
    assert repr(parse_json(json.dumps(value).encode(), "some.json")) == repr(value)


def test_brackets_quotes_and_backslashes_inside_strings_are_no_structure() -> None:
    value = {
        '[{"\\': ["]" * 100, "[" * 100, '\\"[' * 50, "\\\\", '"', "\\[", "\n[\t", "\U0001f600["]
    }
    assert parse_json(json.dumps(value).encode(), "some.json") == value


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_is_read_as_deep_as_any_value_is_saved_and_refused_without_end(
    opening: str,
) -> None:
    closing = "]" if opening == "[" else "}"
    parse_json((opening * (MAX_DEPTH + 8) + "0" + closing * (MAX_DEPTH + 8)).encode(), "some.json")
    assert "nested deeper" in refusal((opening * 100_000 + "0" + closing * 100_000).encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b"[1", "delimiter"),
        (b"[1}", "delimiter"),
        (b"[1] 2", "Extra data"),
        (b'"a', "Unterminated"),
        (b'"\\q"', "escape"),
        (b'"\n"', "control character"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "finite"),
        (b"[0.%s1]" % (b"0" * 100), "finite"),
        (b"[9007199254740992]", "2**53"),
        (b"[-9007199254740992]", "2**53"),
        (b"[%s]" % (b"1" * 5000), "2**53"),
        (b'{"a":1,"b":2,"a":3}', "'a' stands 2 times"),
        (b'{"a":1,"\\u0061":3}', "'a' stands 2 times"),
        (b'{"%s":1,"%s":3}' % (b"k" * 10000, b"k" * 10000), "stands 2 times"),
        ('["\u00e9"]'.encode(), "expected ASCII"),
        (b'["\xff"]', "0xff"),
        (b"\xef\xbb\xbf[]", "expected ASCII"),
        (b'["\\ud800"]', "surrogate"),
        (b'{"\\udfff":[]}', "surrogate"),
        (b'["\\ude00\\ud83d"]', "surrogate"),
        (b"\x00", "Expecting value"),
        (b"['a']", "Expecting value"),
        (b"[1,]", "Expecting value"),
        (b"[01]", "delimiter"),
    ],
)
def test_what_is_no_strict_json_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    assert reason in refusal(data)


def test_the_largest_integers_and_escaped_pairs_are_read() -> None:
    data = b'[9007199254740991,-9007199254740991,"\\ud83d\\ude00","\\\\ud800",-0.0]'
    assert (
        repr(parse_json(data, "some.json"))
        == "[9007199254740991, -9007199254740991, '\U0001f600', '\\\\ud800', -0.0]"
    )


DOCUMENTS: dict[str, Callable[[], bytes]] = {
    "opening brackets": lambda: b"[" * (4 * MB),
    "opening braces": lambda: b'{"a":' * MB,
    "nesting that closes": lambda: b"[" * 2_000_000 + b"]" * 2_000_000,
    "lists in lists": lambda: b"[" + (b"[" * 100 + b"]" * 100 + b",") * 20_000 + b"0]",
    "objects in objects": lambda: b"[" + (b'{"a":' * 100 + b"0" + b"}" * 100 + b",") * 7000 + b"0]",
    "empty lists": lambda: b"[" + b"[]," * MB + b"0]",
    "empty objects": lambda: b"[" + b"{}," * MB + b"0]",
    "lists of one": lambda: b"[" + b"[0]," * MB + b"0]",
    "small objects": lambda: b"[" + b'{"a":0},' * (MB // 2) + b"0]",
    "zeros": lambda: b"[" + b"0," * (2 * MB) + b"0]",
    "numbers": lambda: b"[" + b"999," * MB + b"0]",
    "floats": lambda: b"[" + b"1e5," * MB + b"0]",
    "strings": lambda: b"[" + b'"ab",' * MB + b'""]',
    "wide strings": lambda: b"[" + b'"\\ud83d\\ude00",' * (MB // 4) + b'""]',
    "keys": lambda: b"{" + b",".join(b'"%d":0' % key for key in range(MB // 3)) + b"}",
    "one key again and again": lambda: b"{" + b'"a":0,' * (200_000) + b'"a":0}',
    "a long integer": lambda: b"[" + b"7" * (4 * MB) + b"]",
    "a long fraction": lambda: b"[0." + b"7" * (4 * MB) + b"]",
    "a long exponent": lambda: b"[1e" + b"7" * (4 * MB) + b"]",
    "a long string with a wide character": lambda: b'["\\ud83d\\ude00' + b"a" * (4 * MB) + b'"]',
    "escapes": lambda: b'["' + b"\\n" * (2 * MB) + b'"]',
    "backslashes that never end": lambda: b'["' + b"\\" * (4 * MB),
    "a string that never ends": lambda: b'["' + b"a" * (4 * MB),
    "quotes": lambda: b'"' * (4 * MB),
    "spaces": lambda: b" " * (4 * MB),
    "bytes that are no text": lambda: b"\xff" * (4 * MB),
}


# A process that has imported the parser and no more: its high-water mark shows every byte (on Linux not by `getrusage`,
# which starts at the parent's). It has as many objects as one that has imported torch, for the garbage collector to
# visit. CPU time, since the machine may be busy with other things.
MEASURE = """
import json, os, resource, sys, time, types
package = types.ModuleType("shardeddp")
package.__path__ = [sys.argv[1]]
sys.modules["shardeddp"] = package
from shardeddp.checkpoint.strict_json import (parse_json)
from shardeddp.errors import (CheckpointError)
heap = [[] for _ in range(400_000)]
def peak():
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 10**6
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024 / 10**6
for name in os.listdir(sys.argv[2]):
    process = os.fork()
    if process:
        assert os.waitpid(process, 0)[1] == 0, name
        continue
    with open(os.path.join(sys.argv[2], name), "rb") as file:
        data = file.read()
    before, start = peak(), time.process_time()
    try:
        parse_json(data, "some.json")
    except CheckpointError:
        pass
    print(json.dumps([name, time.process_time() - start, peak() - before]), flush=True)
    os._exit(0)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_document_costs_time_and_memory_in_proportion_to_its_size(tmp_path: Path) -> None:
    sizes: dict[str, float] = {}
    for name, make in DOCUMENTS.items():
        data = make()
        (tmp_path / name).write_bytes(data)
        sizes[name] = len(data) / MB
    command = [sys.executable, "-c", MEASURE, str(Path(shardeddp.__file__).parent), str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, timeout=100).stdout
    measured = [json.loads(line) for line in said.splitlines()]
    assert {name for name, _, _ in measured} == set(DOCUMENTS)
    assert [
        (name, seconds, extra_mb)
        for name, seconds, extra_mb in measured
        if seconds > 0.5 + SECONDS_PER_MB * sizes[name] or extra_mb > 8 + MB_PER_MB * sizes[name]
    ] == []


def test_the_garbage_collector_is_left_as_it_was() -> None:
    for enabled in (False, True):
        (gc.enable if enabled else gc.disable)()
        try:
            parse_json(b"[]", "some.json")
            refusal(b"[}")
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
