"""A corpus of hostile pickles, and of archives around them: they run code, or explode.

Code creates a file, the *marker*, so a reader that runs it is found out. `hostile_directories.py` puts all of them into
checkpoint directories.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Bait:
    """An object whose pickle creates a file when it is run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (os.fspath(self.marker), "w"))


def _text(value: str | Path) -> bytes:
    data = os.fspath(value).encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _open_arguments(marker: Path) -> bytes:
    return b"(" + _text(marker) + _text("w") + b"t"


def _new_objects(marker: Path) -> bytes:
    """The class and the arguments of `tuple(map(open, [marker], ["w"]))`, where the map is a new object, too."""
    arguments = b"]" + _text(marker) + b"a]" + _text("w") + b"a"
    return b"cbuiltins\ntuple\ncbuiltins\nmap\n(cio\nopen\n" + arguments + b"t\x81\x85"


PICKLES: Mapping[str, Callable[[Path], bytes]] = {
    "reduce, protocol 2": lambda m: pickle.dumps(Bait(m), protocol=2),
    "reduce, protocol 5": lambda m: pickle.dumps(Bait(m), protocol=5),
    "reduce, protocol 0": lambda m: pickle.dumps(Bait(m), protocol=0),
    "reduce in a list in a mapping": lambda m: pickle.dumps({"a": [1, Bait(m)]}),
    "reduce as a key": lambda m: b"\x80\x02}" + b"cio\nopen\n" + _open_arguments(m) + b"RK\x01s.",
    "object": lambda m: b"\x80\x02(cio\nopen\n" + _text(m) + _text("w") + b"o.",
    "instance": lambda m: b"\x80\x02(" + _text(m) + _text("w") + b"iio\nopen\n.",
    "new object": lambda m: b"\x80\x02" + _new_objects(m) + b"\x81.",
    "new object with keywords": lambda m: b"\x80\x04" + _new_objects(m) + b"}\x92.",
    "build": lambda m: (
        # The state is made before it is set: a call on the way.
        b"\x80\x02cargparse\nNamespace\n)\x81}"
        + _text("x")
        + b"cio\nopen\n"
        + _open_arguments(m)
        + b"Rsb."
    ),
    "stack global": lambda m: (
        b"\x80\x04" + _text("io") + _text("open") + b"\x93" + _open_arguments(m) + b"R."
    ),
    "dotted name of an innocent module": lambda m: (
        b"\x80\x04"
        + _text("torch")
        + _text("serialization.io.open")
        + b"\x93"
        + _open_arguments(m)
        + b"R."
    ),
    "global of the metadata's own module": lambda m: (
        b"\x80\x04"
        + _text("torch.distributed.checkpoint.metadata")
        + _text("os.open")
        + b"\x93("
        + _text(m)
        + b"J"
        + struct.pack("<i", os.O_CREAT | os.O_WRONLY)
        + b"tR."
    ),
    "behind the end of another": lambda m: (
        b"\x80\x02(" + pickle.dumps(Bait(m), protocol=0)[:-1] + b"t."
    ),
    "thrown away": lambda m: b"\x80\x02" + pickle.dumps(Bait(m), protocol=0)[:-1] + b"0}.",
}
"""Pickles that create the marker when they are run."""


def _shared(repeat: Callable[[Any], Any], times: int) -> Any:
    """Containers that hold one container several times, which does: small in memory, endless to walk through."""
    value: Any = []
    for _ in range(times):
        value = repeat(value)
    return value


def _nested(around: bytes = b"") -> bytes:
    """An empty tuple in 200,000 tuples; whatever hashes or prints it recursively overflows the stack."""
    return b")" + b"\x85" * 200_000 + around


def _equal_hashes(opened: bytes, as_key: Callable[[bytes], bytes], ended: bytes) -> bytes:
    """20,000 integers of one hash: a mapping finds one by comparing it with all others, which takes seconds.

    The pickle is written by hand; who made the mapping first would wait as long.
    """
    numbers = (pickle.dumps(n * (2**61 - 1), protocol=2)[2:-1] for n in range(1, 20_001))
    return opened + b"(" + b"".join(map(as_key, numbers)) + ended


BOMBS: Mapping[str, bytes] = {
    "place in the memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
    "length of bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",
    "length of a byte array": b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
    "length of a text": b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x00.",
    "length of an integer": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "byte array of a length": b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    "tuples in tuples as a key": b"\x80\x02}" + _nested(b"K\x01s."),
    "tuples in tuples as one of many keys": b"\x80\x02}(" + _nested(b"K\x01u."),
    "tuples in tuples, kept and used as a key": b"\x80\x02" + _nested(b"q\0}h\0K\x01s\x86."),
    "tuples in tuples in a set": b"\x80\x04\x8f(" + _nested(b"\x90."),
    "tuples in tuples in a frozen set": b"\x80\x04(" + _nested(b"\x91."),
    "tuples in tuples in a set that is made": b"\x80\x02cbuiltins\nset\n]" + _nested(b"a\x85R."),
    "tuples in tuples as the name of a global": b"\x80\x04" + _nested(_text("open") + b"\x93."),
    "tuples in tuples as a shape": b"\x80\x02ctorch\nSize\n" + _nested(b"\x85R."),
    "tuples in tuples": b"\x80\x02" + _nested(b"."),
    "keys with equal hashes": _equal_hashes(b"\x80\x02}", lambda n: n + b"N", b"u."),
    "tuples with equal hashes": _equal_hashes(
        b"\x80\x02}", lambda n: n + _text("") + b"\x86N", b"u."
    ),
    "members with equal hashes": _equal_hashes(b"\x80\x04\x8f", lambda n: n, b"\x90."),
    "a number of a million digits": b"\x80\x02L" + b"9" * 1_000_000 + b"L\n.",
    "a place behind the next of the memo": b"\x80\x02]q\x01.",
    "a place of the memo that is empty": b"\x80\x02h\x00.",
    "sets only": b"\x80\x04" + b"\x8f" * 1_000_000 + b".",
    "a stack that ends below its mark": b"\x80\x02N(\x86.",
    "a value that does not end": b"\x80\x02N",
    "lists shared by lists": pickle.dumps(_shared(lambda part: [part] * 10, 30), protocol=2),
    "tuples shared by tuples": pickle.dumps(_shared(lambda part: (part, part), 60), protocol=2),
    "mappings shared by mappings": pickle.dumps(
        _shared(lambda part: {"a": part, "b": part}, 60), protocol=2
    ),
    "bytes that double": b"\x80\x02"
    + b"c_codecs\nencode\n" * 40
    + _text("a" * 100)
    + (_text("utf-16") + b"\x86R") * 40
    + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "marks only": b"\x80\x02" + b"(" * 1_000_000 + b".",
}
"""Small pickles that keep a reader busy, or take its memory, or its stack."""


def archive_of(
    data: bytes,
    compression: int = zipfile.ZIP_STORED,
    storage: bytes = b"",
    byteorder: bytes = b"little",
) -> bytes:
    """An archive like that of ``torch.save``, around any pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", storage)
        archive.writestr("archive/byteorder", byteorder)
        archive.writestr("archive/version", b"3\n")
    return stream.getvalue()
