"""Checkpoints of release 0.1.0, whose manifest holds all pieces itself, are read as they were."""

import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardeddp import CheckpointError, ShardedDP
from shardeddp.checkpoint.contents import open_checkpoint
from shardeddp.checkpoint.find import find_checkpoints, read_manifest
from shardeddp.checkpoint.manifest import MANIFEST
from shardeddp.checkpoint.verify import examine, tensor_rows, verify
from shardeddp.plan.layout import Interval
from shardeddp_cli import main
from support.exporting import flip, read_safetensors
from support.resuming import fit
from support.tables import edit_manifest, pieces_of
from support.tasks import TinyGpt
from support.torture_mutations import read_files, write_files
from support.torture_training import digest, whole
from world import Worlds

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled, unavailable or uninitialized"
    ),
]

WRITTEN = Path(__file__).parent / "data" / "release-0.1.0.zip"
"""Of two ranks, after four steps of :class:`Small` in one unit, by the code of that release."""

CONTENT = "1152a1a2e0e9a0ee0869263683d707fa124f9f13569501952c4dd59f1aed339a"
WEIGHTS = "eaded4357b8f5739b59bdd596573b4576a509c5f5e006140ee816e5fb9693a6b"


class Small(TinyGpt):
    """Its parameters are cut inside of rows by two ranks."""

    def __init__(self, dim: int = 7, num_blocks: int = 1) -> None:
        super().__init__(dim, num_blocks)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "step=4.ckpt"
    with zipfile.ZipFile(WRITTEN) as archive:
        archive.extractall(folder)
    return folder


def test_everything_in_it_is_read(path: Path) -> None:
    checkpoint = open_checkpoint(path, None)
    assert digest(whole(checkpoint)) == CONTENT
    assert digest({name: it + 0 for name, it in checkpoint["state_dict"].items()}) == WEIGHTS
    assert [it.step for it in find_checkpoints(path.parent).checkpoints] == [4]


def test_it_is_verified_and_every_changed_bit_is_found(path: Path) -> None:
    found = examine(path)
    assert (found.good, found.step, found.unchecked) == (True, 4, [])
    draw, files = random.Random(1), sorted(path.iterdir())
    for _ in range(60):
        file = draw.choice(files)
        before = file.read_bytes()
        flip(file, position := draw.randrange(len(before)))
        assert [damage.file for damage in verify(path)] == [file.name], position
        file.write_bytes(before)


def test_a_changed_element_is_named(path: Path) -> None:
    piece = pieces_of(path, "model.blocks.0.up.weight")[1]
    assert piece.interval == Interval(63, 64)
    flip(path / piece.item.file, piece.payload)
    (damage,) = verify(path)
    assert (damage.tensor, damage.expected) == ("model.blocks.0.up.weight", piece.checksums[0])
    with pytest.raises(CheckpointError, match=r"of model\.blocks\.0\.up\.weight have checksum"):
        whole(open_checkpoint(path, None))


def test_the_tools_take_it(path: Path, tmp_path: Path) -> None:
    weights, lightning = tmp_path / "weights.safetensors", tmp_path / "whole.ckpt"
    assert main(["verify", str(path)]) == main(["inspect", str(path)]) == 0
    assert main(["consolidate", str(path), "-o", str(weights)]) == 0
    assert main(["consolidate", str(path), "-o", str(lightning)]) == 0
    expected = open_checkpoint(path, None)["state_dict"]
    found = read_safetensors(weights)[0]
    assert all(torch.equal(tensor, expected[name] + 0) for name, tensor in found.items())
    state = torch.load(lightning, weights_only=True)["state_dict"]
    assert all(torch.equal(state[name], expected[name] + 0) for name in expected)
    rows = {row.name: row for row in tensor_rows(read_manifest(path))}
    assert rows["model.blocks.0.up.weight"].num_parts == 2
    assert rows["model.head.weight"].same_as == "model.embed.weight"


def test_dcp_reads_it(path: Path) -> None:
    expected = open_checkpoint(path, None)["state_dict"]["blocks.0.up.weight"] + 0
    state = {"model": {"blocks.0.up.weight": torch.zeros(14, 7)}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["model"]["blocks.0.up.weight"], expected)


def go_on(path: str, save_to: str) -> list[float]:
    strategy = ShardedDP("full_shard", auto_wrap_policy=None, state_dict_type="sharded")
    return fit(strategy, 2, path, save_to, Small).losses


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_training_goes_on_from_it_and_saves_it_anew(
    world: Worlds, path: Path, tmp_path: Path, size: int
) -> None:
    losses = world(size).run(go_on, str(path), str(tmp_path / "anew.ckpt"))
    assert all(len(each) == 4 for each in losses)
    assert verify(tmp_path / "anew.ckpt") == []
    text = (tmp_path / "anew.ckpt" / MANIFEST).read_text()
    assert json.loads(text)["manifest"]["version"] == 2


# -- hostile ones, as that release refused them


def set_at(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value at a path, which ends with the value."""

    def edit(document: Any) -> None:
        *keys, last, value = path
        for key in keys:
            document = document[key]
        document[last] = value

    return edit


UP = 3
"""The tensor with four pieces, among all."""

HOSTILE: dict[str, Callable[[Any], Any]] = {
    "a hole": lambda it: it["tensors"][UP][3].pop(1),
    "no start": lambda it: it["tensors"][UP][3].pop(0),
    "no end": lambda it: it["tensors"][UP][3].pop(),
    "no pieces": set_at("tensors", UP, 3, []),
    "a piece twice": lambda it: it["tensors"][UP][3].append(it["tensors"][UP][3][0]),
    "a piece of another": set_at("tensors", UP, 3, 0, 5, 384),
    "a box outside": set_at("tensors", UP, 3, 0, 0, [9, 0]),
    "a box that is not a stretch": set_at("tensors", UP, 3, 0, 1, [9, 6]),
    "a box of no elements": set_at("tensors", UP, 3, 0, 1, [0, 7]),
    "an item behind its file": set_at("tensors", UP, 3, 0, 3, 10**9),
    "an item without end": set_at("tensors", UP, 3, 0, 4, 2**53 - 1),
    "a payload outside of its item": set_at("tensors", UP, 3, 0, 5, 0),
    "a checksum too many": lambda it: it["tensors"][UP][3][0][6].append("0" * 32),
    "no checksum": lambda it: it["tensors"][UP][3][0][6].clear(),
    "a short checksum": set_at("tensors", UP, 3, 0, 6, ["ab"]),
    "a checksum that is a number": set_at("tensors", UP, 3, 0, 6, [5]),
    "checksums that are text": set_at("tensors", UP, 3, 0, 6, "0" * 32),
    "a file that is a number": set_at("tensors", UP, 3, 0, 2, 0),
    "a file that is not there": set_at("tensors", UP, 3, 0, 2, "__7_0.distcp"),
    "a file without tensors": set_at("tensors", UP, 3, 0, 2, "state.json"),
    "a payload that is a list": set_at("tensors", UP, 3, 0, 5, [1]),
    "pieces that are a number": set_at("tensors", UP, 3, 5),
    "a shape of exabytes": set_at("tensors", UP, 2, [2**30, 2**30]),
    "a table in a file": lambda it: it["files"]["__0_0.distcp"].extend([1, 1, "x"]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_one_that_contradicts_itself_is_refused(path: Path, case: str) -> None:
    files = read_files(path)
    edit_manifest(files, HOSTILE[case])
    write_files(path, files)
    with pytest.raises(CheckpointError, match=r"step=4\.ckpt"):
        whole(open_checkpoint(path, None))
    assert verify(path) != []
