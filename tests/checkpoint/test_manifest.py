"""A manifest comes back as it was, and one that contradicts itself is refused with what is wrong."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardeddp.checkpoint.manifest import (
    EXTENT,
    Item,
    ItemPath,
    Manifest,
    Section,
    StoredFile,
    StoredObject,
    StoredTensor,
    TrainingRun,
    manifest_from_bytes,
    manifest_to_bytes,
)
from shardeddp.errors import CheckpointError


def manifest() -> Manifest:
    run = TrainingRun(
        uuid="u",
        step=3,
        epoch=1,
        world_size=2,
        shard_size=1,
        sharding_strategy="hybrid_shard",
        versions={"torch": "2"},
    )
    sections = (
        Section(torch.float32, (4, 3), 0, 2, "ab"),
        Section(torch.float32, (), 2, 1, "cd"),
        Section(torch.bfloat16, (0, 2), 3, 0, "ef"),
    )
    paths: list[ItemPath] = [
        ("model", "weight"),
        ("optimizer_0", "state", "weight", 7),
        ("model", "empty"),
    ]
    tensors = [
        StoredTensor(path=path, dtype=it.dtype, shape=it.shape, sections=(number,))
        for number, (path, it) in enumerate(zip(paths, sections, strict=True))
    ]
    groups = StoredObject(
        path=("optimizer_0", "param_groups"), item=Item(file="__0_0.distcp", offset=300, nbytes=50)
    )
    return Manifest(
        run=run,
        algorithm="xxh3_128",
        files={
            "__0_0.distcp": StoredFile(nbytes=400, checksum="cd", pieces=2, blocks=3, table="t"),
            "__1_0.distcp": StoredFile(nbytes=10, checksum="ce"),
            "placement.bin": StoredFile(nbytes=3 * EXTENT.itemsize, checksum="cf"),
            "state.json": StoredFile(nbytes=2, checksum="e"),
        },
        tensors={tensor.name: tensor for tensor in tensors},
        objects={"optimizer_0.param_groups": groups},
        sections=sections,
    )


def test_a_manifest_has_the_sizes_of_the_axes_that_there_were() -> None:
    with_axes = replace(manifest().run, tensor_size=2, expert_size=4)
    found = manifest_from_bytes(manifest_to_bytes(replace(manifest(), run=with_axes)))
    assert found.run == with_axes
    assert not {"tensor_size", "expert_size"} & manifest().run.as_json().keys()


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
    "another format": (set_at("format", "other"), "expected format 'shardeddp' version 2"),
    "a later version": (set_at("version", 3), "a newer shardeddp may read it"),
    "another block": (set_at("block_nbytes", 5), "expected blocks of"),
    "no step": (drop("run", "step"), "step"),
    "a negative step": (set_at("run", "step", -1), "at least 0"),
    "a step that is true": (set_at("run", "step", True), "at least 0"),
    "a file elsewhere": (set_at("files", "../x", [1, "a"]), "expected names like"),
    "a file of all bytes": (
        lambda it: it["files"].update(
            {f"__{rank}_1.distcp": [2**53 - 1, "a"] for rank in range(513)}
        ),
        "more than files can have",
    ),
    "a table larger than its file": (
        set_at("files", "__0_0.distcp", 2, 10),
        "cannot have a table of 10 pieces and 3 checksums",
    ),
    "a table of petabytes": (set_at("files", "__0_0.distcp", 2, 2**52), "cannot have"),
    "a table in another file": (set_at("files", "state.json", [99, "e", 1, 1, "t"]), "cannot have"),
    "a field too many": (
        lambda it: it["files"]["__0_0.distcp"].append(1),
        "positional arguments",
    ),
    "a part too few": (set_at("sections", 0, 3, 1), "together have 2 rows of 12 bytes"),
    "a part too many": (set_at("sections", 0, 3, 3), "together have 4 rows of 12 bytes"),
    "no placement": (drop("files", "placement.bin"), "placement.bin"),
    "elements in no file": (set_at("sections", 0, 3, 0), r"of shape (4, 3) has 0 parts"),
    "no elements in a file": (set_at("sections", 2, 3, 1), r"of shape (0, 2) has 1 parts"),
    "a tensor larger than all files": (
        set_at("sections", 0, 2, [4, 30]),
        "has more than the 410 bytes of all data files",
    ),
    "an item behind its file": (set_at("objects", 0, 2, 1000), "ends behind the 400 bytes"),
    "a dtype that is a function": (set_at("sections", 0, 1, "load"), "no dtype 'load'"),
    "a shape of text": (set_at("sections", 0, 2, ["4", 3]), "at least 0"),
    "a name twice": (
        lambda it: it["sections"][1][0].append(["model", "weight"]),
        "'model.weight' twice",
    ),
    "a path of nothing": (set_at("sections", 0, 0, 0, []), "expected a path"),
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


@pytest.mark.long
@pytest.mark.slow
def test_the_simulation_of_thousands_of_ranks_writes_and_reads_what_ranks_do(
    tmp_path: Path,
) -> None:
    script = Path(__file__).parents[2] / "benchmarks/manifest_scale.py"
    command = [sys.executable, str(script), "--models", "tiny", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a rank of 12: all indexes it needs" in done.stdout
    assert not [*tmp_path.iterdir()]
