"""Pickles are read as data: what pickle says about data, and nothing that runs, for whatever bytes."""

import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardeddp.checkpoint.foreign_pickle import BUILTINS, Maker, check_tree, unpickle
from shardeddp.errors import CheckpointError
from support.hostile import BOMBS, PICKLES

NUMBERS = st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.booleans()
SCALARS = NUMBERS | st.text(max_size=300) | st.binary(max_size=300) | st.none()
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)
VALUES = st.recursive(
    SCALARS
    | st.sets(KEYS, max_size=4)
    | st.frozensets(NUMBERS, max_size=4)
    | st.binary(max_size=9).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(VALUES, st.sampled_from([2, 3, 4, 5]))
def test_data_comes_out_as_it_went_in(value: Any, protocol: int) -> None:
    found = unpickle(pickle.dumps(value, protocol=protocol), "it", BUILTINS)
    assert repr(found) == repr(value) or found == value


@pytest.mark.parametrize(
    "value",
    [
        torch.float32,
        torch.float8_e4m3fn,
        OrderedDict(a=1),
        3 + 4j,
        [1] * 3000,
        tuple(range(3000)),
        {n: n for n in range(3000)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_builtins_are_read(value: Any) -> None:
    for protocol in (2, 4, 5):
        assert unpickle(pickle.dumps(value, protocol=protocol), "it", BUILTINS) == value


def test_a_shape_becomes_a_tuple() -> None:
    assert unpickle(pickle.dumps(torch.Size([2, 3])), "it", BUILTINS) == (2, 3)


def test_shared_values_stay_shared() -> None:
    part = [1]
    first, second = unpickle(pickle.dumps([part, part]), "it", BUILTINS)
    assert first is second


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"it (asks for the global|is damaged, or no pickle of plain data)"
    ):
        unpickle(PICKLES[name](tmp_path / "marker"), "it", BUILTINS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_one_where_pickles_are_run(name: str, tmp_path: Path) -> None:
    pickle.loads(PICKLES[name](tmp_path / "marker"))
    assert list(tmp_path.iterdir()) == [tmp_path / "marker"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError):
        check_tree(unpickle(BOMBS[name], "it", BUILTINS), "it")


def test_the_error_names_the_global_the_file_and_the_way_to_allow_it() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"^meta\.pt asks for the global 'pathlib\.\w*\.?PosixPath'.*trust_pickle=True",
    ):
        unpickle(pickle.dumps(Path("x")), "meta.pt", BUILTINS)


def test_a_key_that_comes_twice_is_refused() -> None:
    with pytest.raises(CheckpointError, match="twice"):
        unpickle(b"\x80\x02}(K\x01K\x02K\x01K\x03u.", "it", BUILTINS)


@pytest.mark.parametrize(
    "state", [b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x04\x00\x00\x00makeK\x01s\x86"]
)
def test_what_stands_for_a_class_cannot_be_changed(state: bytes) -> None:
    known = {"a.B": Maker(dict)}
    with pytest.raises(CheckpointError, match="state of a Maker"):
        unpickle(b"\x80\x02ca\nB\n" + state + b"b.", "it", known)
    assert known["a.B"].make is dict


@pytest.mark.parametrize("value", [b"cbuiltins\nset\n", b"]cbuiltins\nset\na"])
def test_what_stands_for_a_class_is_no_value(value: bytes) -> None:
    with pytest.raises(CheckpointError, match="holds a Maker"):
        check_tree(unpickle(b"\x80\x02" + value + b".", "it", BUILTINS), "it")


def test_a_long_mapping_may_have_any_texts_and_small_numbers_as_keys() -> None:
    value = {**dict.fromkeys(range(5000)), **dict.fromkeys(map(str, range(5000)))}
    assert unpickle(pickle.dumps(value), "it", BUILTINS) == value


def test_whatever_the_bytes_only_the_documented_error_is_raised() -> None:
    random.seed(0)
    honest = [
        pickle.dumps({"a": [1, (2, "b")], "c": {torch.Size([3]): b"x"}}, protocol=n)
        for n in (2, 4, 5)
    ]
    honest += [make(Path("marker")) for make in PICKLES.values()]
    refused = 0
    for _ in range(20_000):
        data = bytearray(random.choice(honest))
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        try:
            unpickle(bytes(data[: random.randint(1, 2 * len(data))]), "it", BUILTINS)
        except CheckpointError:
            refused += 1
    assert refused > 10_000
    assert not Path("marker").exists()
