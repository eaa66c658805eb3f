"""Whatever JSON is decoded, a state tree or one kind of error comes of it, and nothing that it names is run."""

import json
import random
import sys
from typing import Any

import pytest
import torch

from shardeddp.checkpoint.state_codec import decode, encode, opaque_paths
from shardeddp.checkpoint.strict_json import parse_json
from shardeddp.errors import CheckpointError
from support.state_trees import EXAMPLES, MORE, Store

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    "value",
    [
        {"$unknown": 1},
        {"$": 1},
        {"$tuple": [1], "b": 2},
        {"$tuple": 3},
        {"$tensor": 3},
        {"$tensor": {"$tensor": "x"}},
        {"$opaque": ["x"]},
        {"$tuple": "text"},
        {"$tuple": {"$tensor": "x"}},
        {"$tuple": {"$array": {"$tensor": "x"}}},
        {"$set": {"$tuple": [1]}},
        {"$int": 5},
        {"$int": "zz"},
        {"$float": "7ff0"},
        {"$bytes": "a*"},
        {"$str": "ff"},
        {"$complex": [1, 2, 3]},
        {"$dict": [["a"]]},
        {"$dict": [["a", 1], ["a", 2]]},
        {"$dict": [[[], 1]]},
        {"$set": [1, 1]},
        {"$set": [[]]},
        {"$set": [{"$int": hex((2**61 - 1) * factor)} for factor in range(20_000)]},
        {"$dict": [[{"$int": hex((2**61 - 1) * factor)}, 0] for factor in range(20_000)]},
        {"$default_dict": ["eval", []]},
        {"$default_dict": [[], []]},
        {"$dtype": "load"},
        {"$dtype": "onnx"},
        {"$device": "no such device"},
        {"$device": 0},
        {"$size": ["a"]},
        {"$path": 3},
        {"$timedelta": [1e300]},
        {"$datetime": "yesterday"},
        {"$array": [1]},
        {"$numpy.int64": "1"},
        {"$numpy.int8": 300_000},
        {"$numpy.int64": {"$int": "f" * 100_000}},
        {"$dtype": {"$int": "f" * 100_000}},
        {"$default_dict": [{"$int": "f" * 100_000}, []]},
        {"$timedelta": [{"$int": "f" * 100_000}]},
        {"$size": [{"$int": "f" * 100_000}]},
        {"$complex": [{"$int": "f" * 100_000}, 0]},
        {"$numpy.float128": 1},
        {"$namespace": {"$dict": [[1, 2]]}},
        {"$namespace": 0},
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_tag_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="encoded state"):
        decode({"deep": [value]}, lambda name: torch.zeros(1), MORE)


LETTERS = torch.tensor(list(b"abc"), dtype=torch.uint8)


@pytest.mark.parametrize(
    "lengths",
    [[1, 1], [2, 2], [4, -1], [2**62] * 4 + [3], [], [1.0, 2.0], [[1, 1], [1, 1]]],
    ids=str,
)
def test_lengths_that_are_not_those_of_the_text_are_refused(lengths: Any) -> None:
    tensors = {"letters": LETTERS, "lengths": torch.tensor(lengths)}
    value = {"$strings": [{"$tensor": "letters"}, {"$tensor": "lengths"}]}
    with pytest.raises(CheckpointError, match="makes no strings"):
        decode(value, tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        {"$strings": {"$tensor": "x"}},
        {"$strings": [{"$tensor": "x"}, {"$tensor": "x"}]},
        {"$strings": ["abc", [3]]},
        {"$table": [["a"]]},
        {"$table": [["a", "a"], [1, 2]]},
        {"$table": [["a", "b"], [1]]},
        {"$table": [[["a"]], [1]]},
        {"$table": {"a": 1}},
    ],
    ids=str,
)
def test_a_table_or_a_list_of_text_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="encoded state"):
        decode(value, lambda name: LETTERS)


@pytest.mark.parametrize("name", ["os.system", "torch.onnx", "this", "antigravity"])
def test_names_in_the_data_import_and_call_nothing(name: str) -> None:
    before = set(sys.modules)
    assert decode({"$opaque": name}, lambda _: torch.zeros(1)).type_name == name
    for tag in ("$dtype", "$default_dict", "$namespace", f"${name}"):
        with pytest.raises(CheckpointError):
            decode({tag: name}, lambda _: torch.zeros(1))
    assert set(sys.modules) == before


NASTY = [
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b":",
    b"\\",
    b"\\u",
    b"$",
    b"-",
    b"0",
    b"1e999",
    b"NaN",
    b"null",
    b"\xff",
    b"\x00",
]
NASTY += [
    b'"$%s"' % tag.encode()
    for tag in ("tuple", "set", "dict", "tensor", "opaque", "array", "int", "path", "size")
]
NASTY += [
    b"9" * 20,
    b'"a":1',
    b"[" * 40,
    b'{"$set":[[]]}',
    b"\\ud800",
    b"true",
    b'"7ff"',
    b"99999999999",
]


def mutate(document: bytes, dice: random.Random) -> bytes:
    """One to four accidents: other bits, bytes that are gone, doubled, or put in."""
    for _ in range(dice.randint(1, 4)):
        start = dice.randrange(len(document) + 1)
        stop = min(len(document), start + dice.choice([0, 1, 1, 2, 5, 40]))
        part = document[start:stop]
        part = dice.choice(
            [b"", part + part, part[::-1], bytes([dice.randrange(256)]), dice.choice(NASTY)]
        )
        document = document[:start] + part + document[stop:]
    return document


def survive(count: int, seed: int) -> int:
    """Read that many mutations; how many were refused. What is raised otherwise fails the test."""
    store, dice, refused = Store(), random.Random(seed), 0
    small = [
        json.dumps(encode(EXAMPLES[name], store.put, MORE)).encode()
        for name in EXAMPLES
        if name != "edge integers"
    ]
    for _ in range(count):
        document = mutate(dice.choice(small), dice)
        try:
            tree = decode(parse_json(document, "state.json"), lambda name: torch.zeros(1), MORE)
            opaque_paths(tree)
        except CheckpointError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{document!r} raises {error!r}") from error
    return refused


@pytest.mark.slow
def test_a_mutated_document_is_read_or_refused_and_nothing_else() -> None:
    assert 0.3 < survive(30_000, seed=7) / 30_000 < 0.99


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_two_million_mutated_documents_are_read_or_refused_and_nothing_else() -> None:
    assert survive(2_000_000, seed=random.randrange(2**32)) > 0
