"""Files that would take torch more memory, stack or time than they are worth are refused before it reads them."""

import io
import pickle
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from shardeddp import CheckpointError
from shardeddp.checkpoint.contents import open_file, read_file_contents
from shardeddp.checkpoint.find import last_checkpoints
from shardeddp.checkpoint.foreign_pickle import refuse_traps
from shardeddp.checkpoint.full_read import require_data

pytestmark = pytest.mark.timeout(60)

PROTO, STOP = b"\x80\x02", b"."
INT, LONG, TUPLE1, TUPLE2, EMPTY_TUPLE = b"J", b"\x8a", b"\x85", b"\x86", b")"
NONE, EMPTY_DICT, MARK, SETITEM, SETITEMS = b"N", b"}", b"(", b"s", b"u"
REDUCE, NEWOBJ, PUT, GET = b"R", b"\x81", b"q", b"h"


def called(name: str, arguments: bytes, how: bytes = REDUCE) -> bytes:
    module, _, own = name.rpartition(".")
    return b"c%s\n%s\n%s%s" % (module.encode(), own.encode(), arguments, how)


def number(value: int) -> bytes:
    return INT + struct.pack("<i", value)


def long(value: int) -> bytes:
    data = pickle.encode_long(value)
    return LONG + bytes([len(data)]) + data


MUCH = number(2**31 - 1)
SAME = [sys.hash_info.modulus * count + 1 for count in range(1, 3000)]
TRAPS: dict[str, tuple[bytes, str]] = {
    "a key of deep tuples": (
        EMPTY_DICT + EMPTY_TUPLE + TUPLE1 * 100_000 + NONE + SETITEM,
        "tuples in tuples",
    ),
    "a key of deep pairs": (
        EMPTY_DICT + NONE + (NONE + TUPLE2) * 100_000 + NONE + SETITEM,
        "tuples in tuples",
    ),
    "deep tuples by references": (
        EMPTY_DICT
        + EMPTY_TUPLE
        + b"".join(PUT + bytes([i % 200]) + GET + bytes([i % 200]) + TUPLE2 for i in range(2000))
        + NONE
        + SETITEM,
        "tuples in tuples",
    ),
    "deep sizes": (
        called("torch.Size", EMPTY_TUPLE + TUPLE1 * 1000 + TUPLE1),
        "tuples in tuples",
    ),
    "bytes by their number": (called("__builtin__.bytearray", MUCH + TUPLE1), "asks for memory"),
    "the same of Python 3": (called("builtins.bytearray", MUCH + TUPLE1), "asks for memory"),
    "a number that was remembered": (
        EMPTY_DICT
        + (number(1) + MUCH + PUT + b"\0" + SETITEM)
        + NONE
        + called("builtins.bytearray", GET + b"\0" + TUPLE1)
        + SETITEM,
        "asks for memory",
    ),
    "a long number": (called("builtins.bytearray", long(2**40) + TUPLE1), "asks for memory"),
    "bytes without a call": (
        called("builtins.bytearray", MUCH + TUPLE1, NEWOBJ),
        "asks for memory",
    ),
    "elements by their number": (called("torch.FloatStorage", MUCH + TUPLE1), "asks for memory"),
    "a storage of bytes": (
        called("torch.storage.UntypedStorage", MUCH + TUPLE1),
        "asks for memory",
    ),
    "a tensor by its sizes": (called("torch.Tensor", MUCH + MUCH + TUPLE2), "asks for memory"),
    "keys of one hash": (
        EMPTY_DICT + MARK + b"".join(long(key) + NONE for key in SAME) + SETITEMS,
        "numbers of one hash",
    ),
}


def archive(path: Path, pickled: bytes, **state: Any) -> Path:
    """A file of torch with another pickle."""
    written = io.BytesIO()
    torch.save({"state_dict": {}, **state}, written)
    with zipfile.ZipFile(written) as read, zipfile.ZipFile(path, "w") as made:
        for info in read.infolist():
            own = info.filename.endswith("data.pkl")
            made.writestr(info.filename, pickled if own else read.read(info))
    return path


def before_1_6(path: Path, pickled: bytes) -> Path:
    """The same as torch wrote it before its release 1.6."""
    written = io.BytesIO()
    torch.save({}, written, _use_new_zipfile_serialization=False)
    path.write_bytes(written.getvalue().replace(pickle.dumps({}, 2), pickled, 1))
    return path


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_refused_by_every_reader(tmp_path: Path, name: str) -> None:
    pickled, why = TRAPS[name]
    path = archive(tmp_path / "last.ckpt", PROTO + pickled + STOP)
    for read in (require_data, lambda it: open_file(str(it), None, (0, 1)), read_file_contents):
        with pytest.raises(CheckpointError, match=why) as caught:
            read(path)
        assert "last.ckpt" in str(caught.value)
    with pytest.raises(CheckpointError), pytest.warns(UserWarning, match=why):
        last_checkpoints([str(path)], [])


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_in_an_older_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    pickled, why = TRAPS[name]
    path = before_1_6(tmp_path / "last.ckpt", PROTO + pickled + STOP)
    with pytest.raises(CheckpointError, match=why):
        require_data(path)


def deep(levels: int) -> Any:
    value: Any = ()
    for _ in range(levels):
        value = (value,)
    return value


HARMLESS: dict[str, Any] = {
    "tensors": {
        "a": torch.ones(3),
        "b": torch.nn.Parameter(torch.ones(2, 2)),
        "c": torch.Size([1]),
    },
    "bytes": [bytearray(b"12"), bytearray(), b"34", b""],
    "numbers": [1, 2**31, 2**70, -(2**80), 1.5, True, None, 3 + 4j],
    "the same number again and again": [2**64 + 1] * 5000,
    "large numbers for keys": {2**64 + count: count for count in range(5000)},
    "tuples": {(1, ("a", 2.0)): deep(400)},
    "containers": [OrderedDict(a=1), Counter("abc"), {1, 2}, [[[]]]],
    "devices": [torch.device("cpu"), torch.float32, torch.strided],
    "sparse tensors": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("new", [True, False], ids=["archive", "older"])
def test_what_runs_save_is_no_trap(tmp_path: Path, name: str, new: bool) -> None:
    torch.save(HARMLESS[name], tmp_path / "a.ckpt", _use_new_zipfile_serialization=new)
    require_data(tmp_path / "a.ckpt")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_is_no_pickle_of_torch_is_left_to_its_reader(protocol: int) -> None:
    whole = pickle.dumps({"a": [1, (2, 3)], "b": object}, protocol)
    for data in (whole, whole[:-5], b"", b"\0" * 100, b"junk", whole[5:], STOP, TUPLE2 + STOP):
        refuse_traps(io.BytesIO(data), "a.ckpt", 3)
