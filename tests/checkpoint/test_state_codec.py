"""A state tree comes back from JSON as it was, bit by bit; code leaves its name, and no tree goes on for ever."""

import datetime
import json
import struct
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardeddp.checkpoint.state_codec import MAX_DEPTH, Opaque, encode, opaque_paths
from shardeddp.errors import CheckpointError
from support.state_trees import EXAMPLES, MANY, Store, picture, through_json

pytestmark = pytest.mark.timeout(60)


class Color(Enum):
    RED = 1


class Pair(NamedTuple):
    first: int
    second: int


class Text(str): ...


class Mine(dict[str, int]): ...


KEYS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
LEAVES = (
    KEYS
    | st.floats()
    | st.complex_numbers()
    | st.timedeltas()
    | st.datetimes(timezones=st.just(datetime.timezone.utc) | st.none(), allow_imaginary=False).map(
        lambda it: it.replace(fold=0)
    )
    | st.sampled_from([torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])])
    | st.sampled_from(
        [np.float32(0.1), np.float64("nan"), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)]
    )
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | KEYS | st.tuples(KEYS, KEYS), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda it: defaultdict(list, it))
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=400)
@given(TREES)
def test_a_tree_comes_back_with_the_same_types_and_bits(tree: Any) -> None:
    assert picture(through_json(tree)) == picture(tree)


@settings(max_examples=300)
@given(st.integers(0, 2**64 - 1))
def test_every_float_comes_back_bit_by_bit(bits: int) -> None:
    [value] = struct.unpack("<d", struct.pack("<Q", bits))
    assert struct.pack("<d", through_json([value])[0]) == struct.pack("<d", value)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_type_comes_back_as_it_was(name: str) -> None:
    assert picture(through_json(EXAMPLES[name])) == picture(EXAMPLES[name])


def test_an_array_of_the_other_byte_order_comes_back_with_its_values() -> None:
    assert through_json(np.arange(5, dtype=">i4")).tolist() == [0, 1, 2, 3, 4]


def test_a_state_without_special_types_is_plain_json() -> None:
    state = {"step": 3, "groups": [{"lr": 0.1, "foreach": None, "names": ["a", "b"]}]}
    assert encode(state, Store().put) == state


@pytest.mark.parametrize(
    "name", [name for name in MANY if "mixed" not in name and "large" not in name]
)
def test_many_words_and_numbers_are_stored_as_data(name: str) -> None:
    store = Store()
    assert len(json.dumps(encode(MANY[name], store.put))) < 5000
    assert sum(tensor.numel() for tensor in store.tensors.values()) >= 600


def test_the_bytes_do_not_depend_on_the_order_of_a_set_of_text() -> None:
    assert encode({"b", "a", "c"}, Store().put) == {"$set": ["a", "b", "c"]}


def test_every_kind_of_tensor_is_put_and_its_name_is_kept() -> None:
    class Sub(torch.Tensor): ...

    store, parameter = Store(), torch.nn.Parameter(torch.ones(2))
    sub = torch.ones(3).as_subclass(Sub)
    assert encode([parameter, {"a": sub}], store.put) == [
        {"$tensor": "extra.0"},
        {"a": {"$tensor": "extra.1"}},
    ]
    assert store.tensors["extra.0"] is parameter
    assert store.tensors["extra.1"] is sub


class Zone(datetime.tzinfo):
    """Somebody's own."""


OPAQUE: dict[str, Any] = {
    "builtins.type": int,
    "builtins.function": through_json,
    "test_state_codec.Color": Color.RED,
    "test_state_codec.Pair": Pair(1, 2),
    "test_state_codec.Text": Text("a"),
    "test_state_codec.Mine": Mine(a=1),
    "torch.nn.modules.linear.Linear": torch.nn.Linear(1, 1),
    "numpy.ndarray": np.array([object()]),
    "datetime.datetime": datetime.datetime(2024, 1, 1, tzinfo=Zone()),
    "numpy.datetime64": np.datetime64("2024-01-01"),
}


@pytest.mark.parametrize("type_name", OPAQUE)
def test_code_and_classes_of_others_leave_their_name_only(type_name: str) -> None:
    tree = through_json({"kept": 1, "lost": [OPAQUE[type_name]]})
    assert tree["kept"] == 1
    assert isinstance(tree["lost"][0], Opaque)
    assert tree["lost"][0].type_name.endswith(type_name)
    assert picture(through_json(tree)) == picture(tree), "what was lost stays lost under its name"


def test_opaque_values_are_listed_by_their_paths() -> None:
    tree = {
        "a": [1, Color.RED],
        "b": OrderedDict(c=(Color.RED,)),
        "d": Namespace(e=Color.RED),
        Color.RED: 0,
        "f": "g",
    }
    assert opaque_paths(through_json(tree)) == ["a.1", "b.c.0", "d.e", "(key)"]
    assert opaque_paths(through_json(Color.RED)) == [""]
    assert opaque_paths(through_json({2**20000: Color.RED, (1, 2): Color.RED, 5: Color.RED})) == [
        "(int)",
        "(tuple)",
        "5",
    ]
    assert opaque_paths(through_json({"a": {1: (2, {3})}})) == []


def test_two_keys_of_one_class_stay_two() -> None:
    assert list(through_json({object(): 1, object(): 2}).values()) == [1, 2]


def test_a_dict_with_a_foreign_default_factory_is_opaque() -> None:
    assert isinstance(through_json(defaultdict(through_json, a=1)), Opaque)


@pytest.mark.parametrize(
    "wrap", [lambda it: [it], lambda it: {"k": it}, lambda it: (it,), lambda it: OrderedDict(k=it)]
)
def test_a_tree_that_contains_itself_is_refused(wrap: Callable[[Any], Any]) -> None:
    tree: list[Any] = [0]
    tree.append(wrap(tree))
    with pytest.raises(CheckpointError, match=r"list at loops\.1.* contains itself"):
        encode({"loops": tree}, Store().put)


def test_what_the_parser_would_refuse_for_its_depth_is_not_written() -> None:
    tree: Any = 0
    for _ in range(MAX_DEPTH):
        tree = [tree]
    assert through_json(tree) == tree
    with pytest.raises(CheckpointError, match=f"0.0.* deeper than {MAX_DEPTH}"):
        encode([tree], Store().put)
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(CheckpointError, match="deeper"):
        encode(tree, Store().put)
    while tree:  # freed level by level, or the interpreter recurses
        tree = tree[0]
