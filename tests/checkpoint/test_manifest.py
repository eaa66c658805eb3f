"""A manifest comes back as it was, and one that contradicts itself is refused with what is wrong."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardeddp.checkpoint.manifest import (
    Item,
    Manifest,
    Piece,
    Run,
    StoredFile,
    StoredObject,
    StoredTensor,
    manifest_from_bytes,
    manifest_to_bytes,
)
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Box


def piece(offset: int, box: Box) -> Piece:
    item = Item(file="__0_0.distcp", offset=offset, nbytes=4 * box.numel + 10)
    return Piece(box=box, item=item, payload=offset + 5, checksums=("ab",))


def manifest() -> Manifest:
    run = Run(
        uuid="u",
        step=3,
        epoch=1,
        world_size=2,
        shard_size=1,
        sharding_strategy="hybrid_shard",
        versions={"torch": "2"},
    )
    weight = StoredTensor(
        path=("model", "weight"),
        dtype=torch.float32,
        shape=(4, 3),
        pieces=(piece(0, Box((0, 0), (1, 3))), piece(100, Box((1, 0), (3, 3)))),
    )
    scalar = StoredTensor(
        path=("optimizer_0", "state", "weight", 7),
        dtype=torch.float32,
        shape=(),
        pieces=(piece(200, Box((), ())),),
    )
    empty = StoredTensor(path=("model", "empty"), dtype=torch.bfloat16, shape=(0, 2), pieces=())
    groups = StoredObject(
        path=("optimizer_0", "param_groups"), item=Item(file="__0_0.distcp", offset=300, nbytes=50)
    )
    return Manifest(
        run=run,
        algorithm="xxh3_128",
        files={
            "__0_0.distcp": StoredFile(nbytes=400, checksum="cd"),
            "state.json": StoredFile(nbytes=2, checksum="e"),
        },
        tensors={tensor.name: tensor for tensor in (weight, scalar, empty)},
        objects={"optimizer_0.param_groups": groups},
    )


def test_a_manifest_comes_back_as_it_was() -> None:
    assert manifest_from_bytes(manifest_to_bytes(manifest())) == manifest()


def edited(edit: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file of a manifest with something changed, and a digest that fits."""
    document = json.loads(manifest_to_bytes(manifest()))["manifest"]
    edit(document)
    body = json.dumps(document, separators=(",", ":")).encode()
    return b'{"sha256":"%s",\n"manifest":%s}' % (hashlib.sha256(body).hexdigest().encode(), body)


def set_at(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value at a path, which ends with the value."""

    def edit(document: Any) -> None:
        *keys, last, value = path
        for key in keys:
            document = document[key]
        document[last] = value

    return edit


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Delete what is at a path."""

    def edit(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return edit


WRONG = {
    "another format": (set_at("format", "other"), "expected format 'shardeddp' version 1"),
    "a later version": (set_at("version", 2), "a newer shardeddp may read it"),
    "another block": (set_at("block_nbytes", 5), "expected blocks of"),
    "no step": (drop("run", "step"), "step"),
    "a negative step": (set_at("run", "step", -1), "at least 0"),
    "a step that is true": (set_at("run", "step", True), "at least 0"),
    "a file elsewhere": (set_at("files", "../x", [1, "a"]), "expected names like"),
    "a hole": (drop("tensors", 0, 3, 0), "do not tile it"),
    "an end that is missing": (drop("tensors", 0, 3, 1), "end at element 3 of 12"),
    "a piece twice": (
        lambda it: it["tensors"][0][3].append(it["tensors"][0][3][0]),
        "two pieces of the same bytes",
    ),
    "a box outside": (set_at("tensors", 0, 3, 1, 0, [2, 0]), "inside of shape"),
    "a box that is not a stretch": (
        set_at("tensors", 0, 3, 1, 1, [3, 2]),
        "do not follow each other",
    ),
    "an item behind its file": (set_at("tensors", 0, 3, 0, 3, 1000), "ends behind the 400 bytes"),
    "a payload outside of its item": (set_at("tensors", 0, 3, 0, 5, 390), "outside of"),
    "a checksum too many": (set_at("tensors", 0, 3, 0, 6, ["a", "b"]), "2 checksums for 12 bytes"),
    "a dtype that is a function": (set_at("tensors", 0, 1, "load"), "no dtype 'load'"),
    "a shape of text": (set_at("tensors", 0, 2, ["4", 3]), "at least 0"),
    "a name twice": (lambda it: it["tensors"].append(it["tensors"][0]), "'model.weight' twice"),
    "a path of nothing": (set_at("tensors", 0, 0, []), "expected a path"),
    "a file that is not listed": (set_at("objects", 0, 1, "__9_9.distcp"), "__9_9.distcp"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_manifest_that_contradicts_itself_is_refused(case: str) -> None:
    edit, reason = WRONG[case]
    with pytest.raises(CheckpointError, match=r"manifest.json contradicts itself") as caught:
        manifest_from_bytes(edited(edit))
    assert reason in str(caught.value)


def test_a_changed_byte_is_refused_before_anything_is_parsed() -> None:
    data = manifest_to_bytes(manifest())
    for position in (0, 12, 90, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(CheckpointError, match=r"expected sha256|does not start as one"):
            manifest_from_bytes(bytes(damaged))
