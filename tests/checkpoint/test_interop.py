"""Other tools read a checkpoint by the indexes that are written for them, and get the exact values."""

import io
import os
import pickle
import pickletools
import runpy
import socket
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from shardeddp.checkpoint.interop import DCP_VERSION, dcp_metadata, lightning_meta, to_bytes
from shardeddp.checkpoint.items import DataFile, hexdigest
from shardeddp.checkpoint.manifest import (
    DCP_METADATA,
    LIGHTNING_META,
    PIECE,
    PLACEMENT,
    ItemPath,
    Manifest,
    Section,
    StoredFile,
    StoredObject,
    StoredTensor,
    TrainingRun,
    name_of,
)
from shardeddp.checkpoint.pieces import Pieces, intervals_of, placement_of
from shardeddp.plan.layout import Interval, boxes

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled, unavailable or uninitialized"
    ),
]

RUN = TrainingRun(
    uuid="0d9c",
    step=7,
    epoch=1,
    world_size=2,
    shard_size=2,
    sharding_strategy="shard",
    versions={"torch": "2"},
)
META = {
    "epoch": 1,
    "global_step": 7,
    "callbacks": {"Best": {"score": torch.tensor(0.5)}},
    "loops": {},
}


def example() -> tuple[dict[ItemPath, torch.Tensor], dict[ItemPath, object]]:
    """What a training with AdamW leaves, in the layout of Lightning's FSDPStrategy."""
    model = {
        "embedding.weight": torch.randn(7, 10),
        "norm.scale": torch.randn(11, dtype=torch.bfloat16),
        "conv.kernel": torch.randn(3, 4, 5),
        "temperature": torch.tensor(0.25),
        "empty": torch.empty(0, 4),
        "mask": torch.arange(9) % 3 == 0,
        "count": torch.tensor(12345678901, dtype=torch.int64),
    }
    tensors: dict[ItemPath, torch.Tensor] = {
        ("model", name): tensor for name, tensor in model.items()
    }
    for name in ("embedding.weight", "conv.kernel"):
        tensors["optimizer_0", "state", name, "exp_avg"] = torch.randn_like(model[name])
        tensors["optimizer_0", "state", name, "step"] = torch.tensor(7.0)
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "fused": None,
        "params": ["embedding.weight", "conv.kernel"],
    }
    return tensors, {
        ("optimizer_0", "param_groups"): [group],
        ("model", "_extra_state"): {"version": 3},
    }


def write(
    directory: Path, tensors: Mapping[ItemPath, torch.Tensor], objects: Mapping[ItemPath, object]
) -> Manifest:
    """A checkpoint of two ranks that cut every flattened tensor somewhere inside a row."""
    directory.mkdir()
    names = ["__0_0.distcp", "__1_0.distcp"]
    descriptors = [
        os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) for name in names
    ]
    files = [
        DataFile(descriptor, name) for descriptor, name in zip(descriptors, names, strict=True)
    ]
    rows: list[list[tuple[int, ...]]] = [[], []]
    digests: list[list[bytes]] = [[], []]
    for number, (_, tensor) in enumerate(tensors.items()):
        cut = tensor.numel() // 3 + 1 if tensor.numel() else 0
        for file, part in enumerate((Interval(0, cut), Interval(cut, tensor.numel()))):
            flat, start = tensor.flatten(), part.start
            for box in boxes(part, tensor.shape):
                stop = start + box.numel
                own = flat[start:stop].view(box.sizes)
                item, payload, found = files[file].put_tensor(own)
                rows[file].append((number, start, stop, item.offset, item.nbytes, payload))
                digests[file] += found
                start = stop
    values = {
        name_of(path): StoredObject(path=path, item=files[0].put_object(it))
        for path, it in objects.items()
    }
    sizes: dict[str, StoredFile] = {
        name: files[file].close(rows[file], digests[file]) for file, name in enumerate(names)
    }
    for descriptor in descriptors:
        os.close(descriptor)
    tables = [np.array(each, dtype=PIECE) for each in rows]
    intervals = [intervals_of(it["section"], it["start"], it["stop"]) for it in tables]
    numels = [tensor.numel() for tensor in tensors.values()]
    placement, counts = placement_of(intervals, numels, [name_of(path) for path in tensors])
    (directory / PLACEMENT).write_bytes(placement.tobytes())
    sections, first = list[Section](), 0
    for tensor, count in zip(tensors.values(), counts, strict=True):
        own_rows = hexdigest(placement[first : first + count].tobytes())
        sections.append(Section(tensor.dtype, tuple(tensor.shape), first, count, own_rows))
        first += count
    stored = {
        name_of(path): StoredTensor(
            path=path, dtype=tensor.dtype, shape=tuple(tensor.shape), sections=(number,)
        )
        for number, (path, tensor) in enumerate(tensors.items())
    }
    manifest = Manifest(
        run=RUN,
        algorithm="xxh3_128",
        files=sizes,
        tensors=stored,
        objects=values,
        sections=sections,
    )
    metadata = dcp_metadata(manifest, Pieces(directory, manifest))
    (directory / DCP_METADATA).write_bytes(to_bytes(metadata))
    (directory / LIGHTNING_META).write_bytes(lightning_meta(META))
    return manifest


def assert_same(found: object, expected: torch.Tensor) -> None:
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found, expected)


def nested(state: dict[str, Any], path: ItemPath) -> Any:
    value: Any = state
    for key in path:
        value = value[key]
    return value


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "step=7.ckpt"


def test_the_example_is_cut_into_boxes_over_both_files(directory: Path) -> None:
    manifest = write(directory, *example())
    tensor = manifest.tensors["model.conv.kernel"]
    pieces = Pieces(directory, manifest).of(*tensor.sections, Interval(0, tensor.numel))
    assert len(pieces) >= 4
    assert {piece.item.file for piece in pieces} == {"__0_0.distcp", "__1_0.distcp"}


def test_dcp_loads_every_tensor_and_object(directory: Path) -> None:
    tensors, objects = example()
    write(directory, tensors, objects)
    state: dict[str, Any] = {
        name_of(path): torch.full_like(tensor, 1) for path, tensor in tensors.items()
    }
    state.update({name_of(path): None for path in objects})
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    for path, tensor in tensors.items():
        assert_same(state[name_of(path)], tensor)
    for path, value in objects.items():
        assert state[name_of(path)] == value


def test_dcp_loads_a_nested_state_with_other_boxes(directory: Path) -> None:
    tensors, objects = example()
    write(directory, tensors, objects)
    state: dict[str, Any] = {"model": {"embedding.weight": torch.zeros(7, 10)}}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    assert_same(state["model"]["embedding.weight"], tensors["model", "embedding.weight"])


def test_dcp_to_torch_save_makes_one_file_of_it(directory: Path, tmp_path: Path) -> None:
    tensors, objects = example()
    write(directory, tensors, objects)
    dcp_to_torch_save(directory, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    for path, tensor in tensors.items():
        assert_same(nested(state, path), tensor)
    for path, value in objects.items():
        assert nested(state, path) == value


def test_the_tool_of_lightning_makes_an_ordinary_checkpoint_of_it(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, objects = example()
    write(directory, tensors, objects)
    whole = tmp_path / "whole.ckpt"
    monkeypatch.setattr(sys, "argv", ["consolidate", str(directory), "--output_file", str(whole)])
    monkeypatch.delitem(
        sys.modules, "lightning.pytorch.utilities.consolidate_checkpoint", raising=False
    )
    runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    checkpoint = torch.load(whole, weights_only=True)
    assert set(checkpoint) == {"state_dict", "optimizer_states", *META}
    for path, tensor in tensors.items():
        part = checkpoint["state_dict"] if path[0] == "model" else checkpoint["optimizer_states"][0]
        assert_same(nested(part, path[1:]), tensor)
    assert (
        checkpoint["optimizer_states"][0]["param_groups"] == objects["optimizer_0", "param_groups"]
    )
    assert checkpoint["state_dict"]["_extra_state"] == {"version": 3}
    assert checkpoint["global_step"] == 7


def test_the_index_says_what_the_writer_of_dcp_says(directory: Path, tmp_path: Path) -> None:
    tensors = {("model", "weight"): torch.randn(3, 4), ("model", "half"): torch.randn(5).half()}
    objects: dict[ItemPath, object] = {("optimizer_0", "param_groups", 0, "lr"): 0.1}
    state = {"model": {"weight": tensors["model", "weight"], "half": tensors["model", "half"]}}
    state["optimizer_0"] = {"param_groups": [{"lr": 0.1}]}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    stock = pickle.loads((tmp_path / "stock" / DCP_METADATA).read_bytes())
    write(directory, tensors, objects)
    ours = pickle.loads((directory / DCP_METADATA).read_bytes())
    assert ours.planner_data == {name_of(path): path for path in [*tensors, *objects]}
    assert {name: ours.planner_data[name] for name in stock.planner_data} == stock.planner_data
    assert ours.version == stock.version == DCP_VERSION
    for name, entry in stock.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert (found.properties, found.size) == (entry.properties, entry.size)
        else:
            assert isinstance(found, BytesStorageMetadata)
    assert {type(place) for place in ours.storage_data.values()} == {
        type(place) for place in stock.storage_data.values()
    }
    assert sorted(place.index for place in ours.storage_data if place.fqn == "model.weight") == [
        0,
        1,
        2,
        3,
    ]
    assert ours.storage_data[MetadataIndex("model.half", (2,))].relative_path == "__1_0.distcp"


def test_the_index_pickles_nothing_that_the_writer_of_dcp_does_not(
    directory: Path, tmp_path: Path
) -> None:
    def texts(content: bytes) -> set[str]:
        return {
            str(argument)
            for _, argument, _ in pickletools.genops(content)
            if isinstance(argument, str)
        }

    tensors, objects = example()
    state = {name_of(path): value for path, value in [*tensors.items(), *objects.items()]}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    write(directory, tensors, objects)
    known = {*texts((tmp_path / "stock" / DCP_METADATA).read_bytes()), RUN.uuid, "__1_0.distcp"}
    known.update(str(key) for path in [*tensors, *objects] for key in path)
    assert texts((directory / DCP_METADATA).read_bytes()) <= known


def test_no_file_says_where_it_was_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A host's own name may be two letters, which random values have among their bytes now and then.
    host = f"{socket.gethostname()}-that-writes"
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    write(directory, *example())
    secrets = [
        str(directory.parent).encode(),
        os.sep.encode() + directory.name.encode(),
        host.encode(),
    ]
    for file in directory.iterdir():
        assert not [secret for secret in secrets if secret in file.read_bytes()], file.name


class Pair(NamedTuple):
    first: int
    second: int


class Options(dict[str, Any]):
    """As Lightning's AttributeDict."""


def load_meta(tree: object) -> Any:
    return torch.load(io.BytesIO(lightning_meta(tree)), weights_only=True)


def test_containers_of_other_types_become_plain() -> None:
    counts: defaultdict[str, list[int]] = defaultdict(list, {"a": [1]})
    found = load_meta(
        {"options": Options(lr=0.1, deep=[Options()]), "pair": Pair(1, 2), "counts": counts}
    )
    assert found == {"options": {"lr": 0.1, "deep": [{}]}, "pair": (1, 2), "counts": {"a": [1]}}


def test_plain_containers_stay_what_they_are() -> None:
    tree = {
        "ordered": OrderedDict(b=1, a=(2, [3])),
        "size": torch.Size([3]),
        "set": {1, 2},
        7: None,
        "x": [True, 1e-3],
    }
    found = load_meta(tree)
    assert found == tree
    assert [type(value) for value in found.values()] == [type(value) for value in tree.values()]


def test_a_tensor_in_it_comes_without_the_rest_of_its_memory_and_without_its_graph() -> None:
    flat = torch.arange(100_000.0)
    content = lightning_meta({"score": flat[5], "weight": torch.nn.Parameter(torch.ones(2))})
    found = torch.load(io.BytesIO(content), weights_only=True)
    assert len(content) < 5000
    assert found["score"].item() == 5
    assert not found["weight"].requires_grad


def test_a_value_of_another_type_is_kept_for_readers_that_trust_it() -> None:
    content = lightning_meta({"where": Path("data")})
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(content), weights_only=True)
    assert torch.load(io.BytesIO(content), weights_only=False) == {"where": Path("data")}
