"""A corpus of hostile checkpoint directories: they run code, reach outside of themselves, lie about sizes, or explode.

Each case spoils an honest checkpoint of ``torch.distributed.checkpoint`` as Lightning lays it out.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from support.hostile import BOMBS, PICKLES, Bait, archive_of

DATA = "__0_0.distcp"
WEIGHT, OBJECT = "model.weight", "optimizer_0.param_groups.0.lr"

Spoil = Callable[[Path, Path], None]
"""Makes an honest checkpoint hostile; gets its directory and the marker."""


def write_honest(folder: Path) -> None:
    """A small checkpoint as `FSDPStrategy` lays it out, in one process."""
    state = {
        "model": {"weight": torch.arange(24.0).reshape(6, 4), "bias": torch.arange(6.0)},
        "optimizer_0": {
            "state": {"weight": {"exp_avg": torch.ones(6, 4)}},
            "param_groups": [{"lr": 0.1, "eps": 1e-8}],
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save(
        {"epoch": 1, "callbacks": {"early": {"best": torch.tensor(0.5)}}}, folder / "meta.pt"
    )


def edit(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Change the index of a checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def info_of(metadata: Metadata, name: str) -> _StorageInfo:
    """Where the index has the first item of a name."""
    return next(info for key, info in metadata.storage_data.items() if key.fqn == name)


def replace_item(folder: Path, name: str, data: bytes) -> None:
    """Put other bytes in the place of an item; they go to the end of the file."""
    offset = (folder / DATA).stat().st_size
    with (folder / DATA).open("ab") as file:
        file.write(data)

    def change(metadata: Metadata) -> None:
        info = info_of(metadata, name)
        info.offset, info.length = offset, len(data)

    edit(folder, change)


def _saved(value: Any, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def _index(change: Callable[[Metadata], object]) -> Spoil:
    return lambda folder, marker: edit(folder, change)


def _item(name: str, make: Callable[[Path], bytes]) -> Spoil:
    return lambda folder, marker: replace_item(folder, name, make(marker))


def _archived(name: str, make: Callable[[Path], bytes]) -> Spoil:
    return _item(name, lambda marker: archive_of(make(marker)))


def _write(name: str, make: Callable[[Path], bytes]) -> Spoil:
    def spoil(folder: Path, marker: Path) -> None:
        (folder / name).write_bytes(make(marker))

    return spoil


def _elsewhere(name: str, place: Callable[[Path, Path], object]) -> Spoil:
    """Move a file out of the directory, and put something in its place."""

    def spoil(folder: Path, marker: Path) -> None:
        away = folder / f"away-{name}"
        (folder / name).rename(away)
        place(folder / name, away)

    return spoil


def _bind_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        # The path of a socket may be short only.
        here = os.open(path.parent, os.O_RDONLY)
        try:
            unix.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def _hide(place: Callable[[Metadata, Bait], object]) -> Spoil:
    return lambda folder, marker: edit(folder, lambda metadata: place(metadata, Bait(marker)))


def _set_size(metadata: Metadata, size: Any, name: str = WEIGHT) -> None:
    entry = metadata.state_dict_metadata[name]
    entry.size = size
    entry.chunks[0].sizes = size


def _add_box(
    metadata: Metadata, offsets: list[int], sizes: list[int], like: str = "model.bias"
) -> None:
    """One more box of the weight, over the bytes of another tensor."""
    key = next(key for key in metadata.storage_data if key.fqn == like)
    info = metadata.storage_data.pop(key)
    del metadata.state_dict_metadata[like]
    metadata.state_dict_metadata[WEIGHT].chunks.append(
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    )
    metadata.storage_data[MetadataIndex(WEIGHT, torch.Size(offsets))] = info


def _list_bomb(metadata: Metadata) -> None:
    name = "optimizer_0.param_groups.30000000.lr"
    key = next(key for key in metadata.storage_data if key.fqn == OBJECT)
    metadata.storage_data[MetadataIndex(name)] = metadata.storage_data.pop(key)
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(OBJECT)
    metadata.planner_data[name] = ("optimizer_0", "param_groups", 30_000_000, "lr")


def _same_bytes(metadata: Metadata) -> None:
    first, second = info_of(metadata, WEIGHT), info_of(metadata, "optimizer_0.state.weight.exp_avg")
    second.offset, second.length = first.offset, first.length


def _shared_boxes(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata[WEIGHT]
    entry.chunks = [entry.chunks[0]] * 20_000
    for number in range(20_000):
        metadata.state_dict_metadata[f"x{number}"] = entry
        metadata.planner_data[f"x{number}"] = (f"x{number}",)


def _key_twice(metadata: Metadata) -> None:
    """Two keys that were different when they were put into the mapping."""
    info = info_of(metadata, OBJECT)
    late = MetadataIndex("late")
    metadata.storage_data[late] = _StorageInfo(DATA, info.offset, info.length)
    object.__setattr__(late, "fqn", OBJECT)


def _flip(folder: Path, marker: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    data = bytearray((folder / DATA).read_bytes())
    at = data.index(torch.arange(24.0).numpy().tobytes(), info_of(metadata, WEIGHT).offset)
    data[at + 50] ^= 1
    (folder / DATA).write_bytes(data)


def _shrink_box(metadata: Metadata) -> None:
    metadata.state_dict_metadata[WEIGHT].chunks[0].sizes = torch.Size([5, 4])


class Key(Bait):
    """Bait that may be the key of a mapping."""


TENSOR = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"
    b"0X\3\0\0\0cpuK\x18tQ"
    b"K\0K\6K\4\x86K\4K\1\x86\x89ccollections\nOrderedDict\n)RtR."
)
"""The pickle of a tensor like the weight, with its storage in record ``data/0``."""


def _overlapping(data: bytes) -> bytes:
    """The directory says that two records of 300 bytes start at the beginning."""
    changed = bytearray(data)
    for name in (b"archive/data/0", b"archive/version"):
        entry = data.rindex(name) - 46
        changed[entry + 20 : entry + 28] = struct.pack("<2I", 300, 300)
        changed[entry + 42 : entry + 46] = bytes(4)
    return bytes(changed)


def _entry_at(data: bytes, name: bytes) -> int:
    """Where the directory of an archive describes a record."""
    return data.rindex(b"archive/" + name) - 46


def _patched(offset: int, layout: str, *values: int, name: bytes = b"data/0") -> bytes:
    """The archive of a weight with other values in the directory's entry for a record."""
    data = bytearray(archive_of(TENSOR, storage=b"\0" * 96))
    struct.pack_into(layout, data, _entry_at(bytes(data), name) + offset, *values)
    return bytes(data)


def _shared() -> bytes:
    """An archive whose version has the bytes of the weight, and their CRC."""
    data = archive_of(TENSOR, storage=b"\0" * 96)
    weight = _entry_at(data, b"data/0")
    fields = data[weight + 16 : weight + 28], data[weight + 42 : weight + 46]
    changed, entry = bytearray(data), _entry_at(data, b"version")
    changed[entry + 16 : entry + 28], changed[entry + 42 : entry + 46] = fields
    return bytes(changed)


def _twice() -> bytes:
    """An archive with two pickles: a reader may check the one and use the other."""
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as archive:
        warnings.simplefilter("ignore")  # that it is there twice
        for name, data in (("data.pkl", TENSOR), ("data/0", bytes(96)), ("data.pkl", TENSOR)):
            archive.writestr(f"archive/{name}", data)
    return stream.getvalue()


def _wide(extra: bytes) -> bytes:
    """An archive whose last entry leaves its sizes to an extra field."""
    data = archive_of(TENSOR, storage=b"\0" * 96)
    end = data.rindex(b"PK\5\6")
    entry = data.rindex(b"PK\1\2")
    changed = bytearray(data[:end] + extra + data[end:])
    struct.pack_into("<2I", changed, entry + 20, 2**32 - 1, 2**32 - 1)
    struct.pack_into("<H", changed, entry + 30, len(extra))
    struct.pack_into("<I", changed, end + len(extra) + 12, end - data.index(b"PK\1\2") + len(extra))
    return bytes(changed)


def _directory_64(nbytes: int, start: int) -> bytes:
    """An archive whose end leaves the directory's place to a record of 64-bit numbers."""
    data = archive_of(TENSOR, storage=b"\0" * 96)
    end = data.rindex(b"PK\5\6")
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 4, 4, nbytes, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    closing = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, *[2**32 - 1] * 2, 0)
    return data[:end] + record + locator + closing


def _numbers_for_keys(metadata: Metadata) -> None:
    """A name of many places in lists in lists: each of them is a prefix of the path."""
    name = ".".join(["0"] * 100_000)
    key = next(key for key in metadata.storage_data if key.fqn == OBJECT)
    metadata.storage_data[MetadataIndex(name)] = metadata.storage_data.pop(key)
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(OBJECT)
    metadata.planner_data[name] = (0,) * 100_000


def _long_keys(metadata: Metadata) -> None:
    """A path that would be joined to a text of 10 GB."""
    metadata.planner_data[OBJECT] = ("x" * 200_000,) * 50_000


NAMES = (
    "../x__0_0.distcp",
    "/etc/hostname",
    "./__0_0.distcp",
    "x/../__0_0.distcp",
    "__0_0.distcp/",
    "__0_0.distcp\0",
    "__0_0.distcp\n",
    "__00_0.distcp",
    "__0_0.DISTCP",
    "__0_-1.distcp",
    "__0_0.safetensors",
    ".metadata",
    "meta.pt",
    "..",
    "",
    "a" * 10_000,
    "__\u0661_0.distcp",
    None,
    7,
)
"""What is no name of a data file, or not where a data file is."""

CASES: Mapping[str, Spoil] = {
    # Code.
    **{f"metadata: {name}": _write(".metadata", make) for name, make in PICKLES.items()},
    **{f"object: {name}": _archived(OBJECT, make) for name, make in PICKLES.items()},
    "metadata: hidden in storage_meta": _hide(
        lambda metadata, bait: setattr(metadata, "storage_meta", bait)
    ),
    "metadata: hidden in planner_data": _hide(
        lambda metadata, bait: metadata.planner_data.update(x=bait)
    ),
    "metadata: hidden in a path": _hide(
        lambda metadata, bait: metadata.planner_data.update({OBJECT: (bait,)})
    ),
    "metadata: hidden in a shape": _hide(lambda metadata, bait: _set_size(metadata, bait)),
    "metadata: hidden in an attribute": _hide(
        lambda metadata, bait: setattr(metadata, "more", bait)
    ),
    "object: saved": _item(OBJECT, lambda marker: _saved(Bait(marker))),
    "object: hidden": _item(OBJECT, lambda marker: _saved({"a": [torch.ones(2), Bait(marker)]})),
    "object: a pickle alone": _item(OBJECT, lambda marker: pickle.dumps(Bait(marker))),
    "object: as torch saved before 1.6": _item(
        OBJECT, lambda marker: _saved(Bait(marker), legacy=True)
    ),
    "tensor: saved": _item(WEIGHT, lambda marker: _saved(Bait(marker))),
    "tensor: a pickle alone": _item(
        WEIGHT, lambda marker: pickle.dumps(Bait(marker)).ljust(500, b".")
    ),
    "meta: saved": _write("meta.pt", lambda marker: _saved(Bait(marker))),
    "meta: state of a callback": _write(
        "meta.pt", lambda marker: _saved({"callbacks": {"early": {"x": Bait(marker)}}})
    ),
    "meta: a key": _write("meta.pt", lambda marker: _saved({"callbacks": {Key(marker): 1}})),
    "meta: a pickle alone": _write("meta.pt", lambda marker: pickle.dumps(Bait(marker))),
    "meta: as torch saved before 1.6": _write(
        "meta.pt", lambda marker: _saved(Bait(marker), legacy=True)
    ),
    # Names and files.
    **{
        f"name: {name!r:.40}": _index(
            lambda it, name=name: setattr(info_of(it, WEIGHT), "relative_path", name)
        )
        for name in NAMES
    },
    "data: a link": _elsewhere(DATA, lambda path, away: path.symlink_to(away)),
    "data: a link to a device": _elsewhere(DATA, lambda path, away: path.symlink_to("/dev/zero")),
    "data: a FIFO": _elsewhere(DATA, lambda path, away: os.mkfifo(path)),
    "data: a socket": _elsewhere(DATA, _bind_socket),
    "data: a directory": _elsewhere(DATA, lambda path, away: path.mkdir()),
    "data: missing": _elsewhere(DATA, lambda path, away: None),
    "data: half of it": lambda folder, marker: os.truncate(
        folder / DATA, (folder / DATA).stat().st_size // 2
    ),
    "data: without its last byte": lambda folder, marker: os.truncate(
        folder / DATA, (folder / DATA).stat().st_size - 1
    ),
    "metadata: a link": _elsewhere(".metadata", lambda path, away: path.symlink_to(away)),
    "metadata: a FIFO": _elsewhere(".metadata", lambda path, away: os.mkfifo(path)),
    "metadata: missing": _elsewhere(".metadata", lambda path, away: None),
    "metadata: empty": lambda folder, marker: os.truncate(folder / ".metadata", 0),
    "metadata: half of it": lambda folder, marker: os.truncate(
        folder / ".metadata", (folder / ".metadata").stat().st_size // 2
    ),
    "metadata: a hole of 1 TiB": lambda folder, marker: os.truncate(folder / ".metadata", 2**40),
    "meta: a link": _elsewhere("meta.pt", lambda path, away: path.symlink_to(away)),
    "meta: a FIFO": _elsewhere("meta.pt", lambda path, away: os.mkfifo(path)),
    "meta: a hole of 1 TiB": lambda folder, marker: os.truncate(folder / "meta.pt", 2**40),
    # Sizes.
    "size: 4 TiB": _index(lambda it: _set_size(it, torch.Size([2**40]))),
    "size: negative": _index(lambda it: _set_size(it, [-6, -4])),
    "size: no integer": _index(lambda it: _set_size(it, (6.0, 4))),
    "size: thousands of dims": _index(lambda it: _set_size(it, (1,) * 5000)),
    "size: beyond any address": _index(lambda it: _set_size(it, (2**70,))),
    "size: another than in the item": _index(lambda it: _set_size(it, torch.Size([4, 6]))),
    "size: no shape": _index(lambda it: _set_size(it, "64")),
    "length: 4 TiB": _index(lambda it: setattr(info_of(it, WEIGHT), "length", 2**42)),
    "length: none": _index(lambda it: setattr(info_of(it, WEIGHT), "length", 0)),
    "length: one less": _index(
        lambda it: setattr(info_of(it, WEIGHT), "length", info_of(it, WEIGHT).length - 1)
    ),
    "offset: negative": _index(lambda it: setattr(info_of(it, WEIGHT), "offset", -1)),
    "offset: behind the end": _index(lambda it: setattr(info_of(it, WEIGHT), "offset", 2**62)),
    # Boxes.
    "boxes: one is missing": _index(lambda it: it.state_dict_metadata[WEIGHT].chunks.clear()),
    "boxes: without bytes": _index(lambda it: it.storage_data.popitem()),
    "boxes: a hole": _index(lambda it: _shrink_box(it)),
    "boxes: one too many": _index(lambda it: _add_box(it, [3, 0], [1, 4])),
    "boxes: one outside": _index(lambda it: _add_box(it, [6, 0], [1, 4])),
    "boxes: of other dims": _index(lambda it: _add_box(it, [6], [1])),
    "boxes: twice the same bytes": _index(_same_bytes),
    "boxes: shared by many tensors": _index(_shared_boxes),
    "boxes: bytes of nothing": _index(lambda it: it.state_dict_metadata.pop("model.bias")),
    "boxes: a key twice": _index(_key_twice),
    "boxes: another dtype": _index(
        lambda it: setattr(it.state_dict_metadata[WEIGHT].properties, "dtype", torch.int32)
    ),
    "boxes: a quantized dtype": _index(
        lambda it: setattr(it.state_dict_metadata[WEIGHT].properties, "dtype", torch.qint8)
    ),
    "boxes: of a list": _index(lambda it: setattr(it, "state_dict_metadata", [])),
    "paths: a list of 30 million": _index(_list_bomb),
    "paths: numbers only": _index(_numbers_for_keys),
    "paths: one long text many times": _index(_long_keys),
    "paths: another name": _index(lambda it: it.planner_data.update({WEIGHT: ("model", "bias")})),
    "paths: none": _index(lambda it: it.planner_data.pop(WEIGHT)),
    # Archives.
    **{
        f"metadata: {name}": _write(".metadata", lambda _, data=data: data)
        for name, data in BOMBS.items()
    },
    **{
        f"object: {name}": _archived(OBJECT, lambda _, data=data: data)
        for name, data in BOMBS.items()
    },
    **{
        f"meta: {name}": _write("meta.pt", lambda _, data=data: archive_of(data))
        for name, data in BOMBS.items()
    },
    "archive: a flipped bit": _flip,
    "archive: a zip bomb": _item(
        OBJECT, lambda _: archive_of(b"\x80\x02N." + b"\0" * 2**27, zipfile.ZIP_DEFLATED)
    ),
    "archive: a compressed tensor": _item(
        WEIGHT, lambda _: archive_of(TENSOR, zipfile.ZIP_DEFLATED, b"\0" * 96)
    ),
    "archive: a storage too short": _item(WEIGHT, lambda _: archive_of(TENSOR, storage=b"\0" * 95)),
    "archive: a storage too long": _item(WEIGHT, lambda _: archive_of(TENSOR, storage=b"\0" * 97)),
    "archive: a storage of 4 TiB": _item(
        WEIGHT, lambda _: archive_of(TENSOR.replace(b"K\x18t", b"\x8a\x06" + b"\0" * 5 + b"\1t"))
    ),
    "archive: one element for all": _item(
        WEIGHT,
        lambda _: archive_of(
            TENSOR.replace(b"K\4K\1\x86", b"K\0K\0\x86").replace(b"K\x18t", b"K\1t"),
            storage=b"\0" * 4,
        ),
    ),
    "archive: of a big-endian machine": _item(
        WEIGHT, lambda _: archive_of(TENSOR, storage=b"\0" * 96, byteorder=b"big")
    ),
    "archive: two records in one place": _item(
        WEIGHT, lambda _: _overlapping(archive_of(TENSOR, storage=b"\0" * 96))
    ),
    "archive: encrypted": _item(
        WEIGHT,
        lambda _: archive_of(TENSOR, storage=b"\0" * 96).replace(
            b"PK\1\2\x14\3\x14\0\0", b"PK\1\2\x14\3\x14\0\1"
        ),
    ),
    "archive: a record twice": _item(WEIGHT, lambda _: _twice()),
    "archive: a record inside of another": _item(WEIGHT, lambda _: _shared()),
    "archive: a record behind the end": _item(WEIGHT, lambda _: _patched(42, "<I", 2**31)),
    "archive: a record in the directory": _item(WEIGHT, lambda _: _patched(20, "<2I", 400, 400)),
    "archive: sizes in 64 bits, too large": _item(
        WEIGHT, lambda _: _wide(struct.pack("<2H2Q", 1, 16, 2**63, 2**63))
    ),
    "archive: sizes in 64 bits, missing": _item(WEIGHT, lambda _: _wide(struct.pack("<2H", 1, 0))),
    "archive: sizes in 64 bits, cut off": _item(
        WEIGHT, lambda _: _wide(struct.pack("<2HI", 1, 16, 0))
    ),
    "archive: a directory of 2**62 bytes": _item(WEIGHT, lambda _: _directory_64(2**62, 0)),
    "archive: a directory at 2**62": _item(WEIGHT, lambda _: _directory_64(200, 2**62)),
    "archive: an object that is a storage": _item(
        OBJECT,
        lambda _: archive_of(
            b"\x80\x02(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpuK\x18tQ.",
            storage=b"\0" * 96,
        ),
    ),
    "archive: an object that is a function": _archived(
        OBJECT, lambda _: b"\x80\x02}K\1ctorch._utils\n_rebuild_tensor_v2\ns."
    ),
    "archive: a reference of tuples in tuples": _archived(
        OBJECT, lambda _: b"\x80\x02)" + b"\x85" * 200_000 + b"Q."
    ),
    "archive: an element repeated without end": _item(
        OBJECT,
        lambda _: archive_of(
            TENSOR.replace(b"K\4K\1\x86", b"K\0K\0\x86").replace(
                b"K\6K\4\x86", b"\x8a\6" + b"\xff" * 5 + b"\7" + b"K\4\x86"
            ),
            storage=b"\0" * 96,
        ),
    ),
    "archive: a quantized storage": _item(
        OBJECT,
        lambda _: archive_of(TENSOR.replace(b")RtR.", b")Rctorch\nqint8\ntR."), storage=b"\0" * 96),
    ),
    "archive: its end elsewhere": _item(
        WEIGHT, lambda _: archive_of(TENSOR, storage=b"\0" * 96) + b"\0" * 30
    ),
}
"""What makes an honest checkpoint hostile, by name."""
