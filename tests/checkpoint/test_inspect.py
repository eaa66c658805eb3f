"""Rows for tensors and modules add up to what the checkpoint holds."""

from pathlib import Path

import pytest
import torch

from shardeddp.checkpoint.find import read_manifest
from shardeddp.checkpoint.manifest import Manifest
from shardeddp.checkpoint.verify import as_json, module_rows, tensor_rows, total
from support.exporting import checkpoint, put


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return read_manifest(put(tmp_path / "step=7.ckpt"))


def test_every_tensor_has_a_row(manifest: Manifest) -> None:
    rows = {row.name: row for row in tensor_rows(manifest)}
    assert rows.keys() == manifest.tensors.keys()
    scale = rows["model.net.scale"]
    assert (scale.shape, scale.dtypes, scale.nbytes, scale.num_parts) == (
        (5,),
        ("bfloat16",),
        10,
        1,
    )


def test_a_tied_tensor_has_no_bytes_of_its_own(manifest: Manifest) -> None:
    [tied] = [row for row in tensor_rows(manifest) if row.same_as]
    assert (tied.name, tied.same_as, tied.nbytes) == (
        "model.net.head.weight",
        "model.net.embed.weight",
        0,
    )


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("model.net.*.weight", ["model.net.embed.weight", "model.net.head.weight"]),
        ("net.s*", ["model.net.scale"]),
        (
            "exp_avg",
            ["optimizer_0.state.net.embed.weight.exp_avg", "optimizer_0.state.net.scale.exp_avg"],
        ),
        ("nothing", []),
    ],
)
def test_names_are_matched_with_and_without_their_root(
    manifest: Manifest, pattern: str, names: list[str]
) -> None:
    assert [row.name for row in tensor_rows(manifest, pattern)] == names


def test_modules_are_told_apart_below_what_all_of_them_are_in(manifest: Manifest) -> None:
    names = [row.name for row in module_rows(manifest)]
    assert names[:2] == ["model.net.embed.weight", "model.net.head.weight"]
    assert [name.split()[0].split(".")[0] for name in names] == [
        *["model"] * 6, "optimizer_0", "optimizer_0", "extra"
    ]  # fmt: skip
    assert [name for name in names if name.startswith("optimizer")] == [
        "optimizer_0 step",
        "optimizer_0 exp_avg",
    ]


def test_thousands_of_tensors_are_a_few_rows(tmp_path: Path) -> None:
    state = {
        f"net.blocks.{number}.{kind}": torch.ones(1) for number in range(300) for kind in "abc"
    }
    state |= {"net.head": torch.ones(2)}
    manifest = read_manifest(
        put(tmp_path / "many.ckpt", checkpoint(state_dict=state, optimizer_states=[]))
    )
    rows = module_rows(manifest)
    assert [(row.name, row.num_tensors, row.nbytes) for row in rows[:2]] == [
        ("model.net.blocks", 900, 3600),
        ("model.net.head", 1, 8),
    ]
    assert len(rows) == 3  # and what a callback keeps


def test_repeated_blocks_alone_are_one_row(tmp_path: Path) -> None:
    state = {f"blocks.{number}.{kind}": torch.ones(1) for number in range(30) for kind in "ab"}
    manifest = read_manifest(
        put(tmp_path / "many.ckpt", checkpoint(state_dict=state, optimizer_states=[], callbacks={}))
    )
    assert [(row.name, row.num_tensors) for row in module_rows(manifest)] == [("model.blocks", 60)]


def test_rows_of_modules_are_the_sum_of_their_tensors(manifest: Manifest) -> None:
    modules, tensors = total(module_rows(manifest)), total(tensor_rows(manifest))
    assert (modules.num_tensors, modules.numel, modules.nbytes) == (
        tensors.num_tensors,
        tensors.numel,
        tensors.nbytes,
    )
    assert modules.num_tensors == len(manifest.tensors)


def test_other_programs_get_everything(manifest: Manifest) -> None:
    found = as_json(Path("a.ckpt"), manifest, tensor_rows(manifest))
    assert (found["step"], found["epoch"], found["sharding_strategy"]) == (7, 1, "full_shard")
    assert found["nbytes"] == sum(found["files"].values())
    entry = next(it for it in found["tensors"] if it["name"] == "model.net.head.weight")
    assert entry["path"] == ["model", "net.head.weight"]
    assert (entry["shape"], entry["dtype"], entry["nbytes"]) == ([7, 10], "float32", 280)
    assert entry["same_as"] == "model.net.embed.weight"
