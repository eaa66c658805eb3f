"""Safetensors files are read as they were written, or refused; a model finds its weights in them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardeddp.checkpoint.load_states import rename_weights
from shardeddp.checkpoint.safetensors import (
    Entry,
    index_bytes,
    index_path,
    names_in_model,
    read_safetensors,
    safetensors_in,
    write_safetensors,
)
from shardeddp.errors import CheckpointError

WEIGHTS = {
    "layers.0.weight": torch.arange(6.0).view(2, 3),
    "layers.0.scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "none": torch.empty(0, 4, dtype=torch.float16),
    "mask": torch.tensor([True, False]),
    "wave": torch.tensor([1 + 2j]),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> list[Entry]:
    entries = [Entry(name=name, tensor=it, dtype=it.dtype) for name, it in tensors.items()]
    with path.open("wb") as file:
        write_safetensors(file, entries, {"format": "pt"})
    return entries


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], it) and found[name].dtype == it.dtype
        for name, it in expected.items()
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, WEIGHTS)
    assert safetensors_in(path) == safetensors_in(tmp_path) == path
    found = read_safetensors(path)
    assert same(found, WEIGHTS)
    found["layers.0.weight"].zero_()  # a copy of this process's own
    assert same(read_safetensors(path), WEIGHTS)


def test_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    names = list(WEIGHTS)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    entries = {
        file: write(tmp_path / file, {name: WEIGHTS[name] for name in part})
        for file, part in parts.items()
    }
    index = index_path(tmp_path / "model.safetensors")
    index.write_bytes(index_bytes(entries, {}))
    assert safetensors_in(tmp_path) == safetensors_in(index) == index
    assert same(read_safetensors(index), WEIGHTS)
    write(tmp_path / "b.safetensors", {"none": WEIGHTS["none"]})
    with pytest.raises(CheckpointError, match=r"names tensors that its files lack: mask, wave"):
        read_safetensors(index)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        read_safetensors(index)


def header(**entry: Any) -> Callable[[bytes], bytes]:
    """Another entry for the one tensor of a file, whose elements are those of 4 floats."""
    whole = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **entry}
    text = json.dumps({"weight": whole}).encode()
    return lambda content: struct.pack("<Q", len(text)) + text + bytes(16)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: struct.pack("<Q", 2**63) + content[8:],
        lambda content: struct.pack("<Q", 3) + b"[1]",
        lambda content: struct.pack("<Q", 9) + b'{"a": 1  ',
        lambda content: struct.pack("<Q", 8) + b'{"a": 1}',
        header(dtype="F999"),
        header(shape=[-2, -2]),
        header(shape=[5]),
        header(shape=[2**40, 2**40]),
        header(data_offsets=[-16, 0]),
        header(data_offsets=[8, 24]),
        header(data_offsets=[16, 0]),
        header(shape="weights"),
        header(data_offsets=None),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(
    change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"weight": torch.ones(4)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("stored", "own", "expected"),
    [
        ("a.w b.w", "a.w b.w", "a.w b.w"),
        ("a.w b.w", "net.a.w net.b.w head.w", "net.a.w net.b.w"),
        ("body.a.w body.b.w head.w", "net.a.w net.b.w other.w", "net.a.w net.b.w"),
        ("body.a.w head.w", "net.body.a.w net.head.w", "net.body.a.w net.head.w"),
        ("body.a.w body.b.w", "net.body.a.w net.body.b.w", "net.body.a.w net.body.b.w"),
        ("a.w more.w b.w", "net.a.w net.b.w", "net.a.w net.b.w"),
    ],
)
def test_weights_find_their_submodule(stored: str, own: str, expected: str) -> None:
    assert sorted(names_in_model(stored.split(), own.split()).values()) == sorted(expected.split())


def test_weights_that_fit_two_submodules_are_refused_by_their_names() -> None:
    with pytest.raises(CheckpointError, match=r"fits student, teacher alike"):
        names_in_model(
            ["a.w", "b.w"], [f"{it}.{p}.w" for it in ("student", "teacher") for p in "ab"]
        )


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"none of a\.w is in the model.*net\.b\.bias"):
        names_in_model(["a.w"], ["net.b.bias"])


def test_a_tied_weight_that_is_stored_once_is_placed_twice() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    placed = rename_weights(nn.ModuleDict({"net": model}), {"embed.weight": torch.ones(3, 2)})
    assert sorted(placed) == ["net.embed.weight", "net.head.weight"]
