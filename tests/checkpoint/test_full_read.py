"""A plain checkpoint with damage around its records: it is known as one, named, and left aside."""

import struct
from pathlib import Path

import pytest
import torch

from shardeddp.checkpoint.find import checkpoints_in, last_checkpoints
from shardeddp.checkpoint.full_read import carries_index
from shardeddp.checkpoint.full_write import TorchFile
from shardeddp.checkpoint.location import location
from shardeddp.checkpoint.manifest import INDEX, TrainingRun, index_to_bytes
from shardeddp.checkpoint.verify import examine, newest_verified
from shardeddp.errors import CheckpointError

_CENTRAL = b"PK\1\2"


def put_file(path: Path, step: int = 1, more: dict[str, bytes] | None = None) -> Path:
    """Write a plain checkpoint with two weights and an optimizer."""
    weights = {name: torch.full((3,), float(step)) for name in ("a", "b")}
    run = TrainingRun(
        uuid=f"{step:032x}",
        step=step,
        epoch=0,
        world_size=1,
        shard_size=1,
        sharding_strategy="full_shard",
        versions={},
    )
    file = TorchFile({"state_dict": weights, "optimizer_states": [{"state": {}}]})
    stored = [
        (("model", name), it.dtype, tuple(it.shape), file.record_of(it))
        for name, it in weights.items()
    ]
    index = index_to_bytes(run, stored, [("optimizer_0", "param_groups")])
    with path.open("wb") as opened:
        file.write(opened, more={INDEX: index} | (more or {}))
    return path


def rename_in_directory(path: Path) -> Path:
    """Change one bit of a record's name in the directory: archive/data/1 becomes arghive/data/1."""
    data = bytearray(path.read_bytes())
    data[data.rindex(b"archive/data/1") + 2] ^= 4
    path.write_bytes(data)
    return path


def test_a_file_with_a_renamed_record_is_damaged_and_still_known_as_ours(tmp_path: Path) -> None:
    path = put_file(tmp_path / "a.ckpt")
    assert examine(path).good and examine(path).step == 1
    (damage,) = examine(rename_in_directory(path)).damages
    assert "arghive/data/1" in damage.found
    assert carries_index(path)
    assert checkpoints_in(tmp_path) == [path]


@pytest.mark.parametrize("more", [{"data/00": b""}, {"version2": b"3"}])
def test_a_file_with_other_records_than_its_index_knows_is_damaged(
    tmp_path: Path, more: dict[str, bytes]
) -> None:
    (damage,) = examine(put_file(tmp_path / "a.ckpt", more=more)).damages
    assert "archive/" + next(iter(more)) in damage.found


def test_a_run_goes_on_from_the_last_file_that_is_whole_and_is_told(tmp_path: Path) -> None:
    older = put_file(tmp_path / "step=2.ckpt", 2)
    path = rename_in_directory(put_file(tmp_path / "step=4.ckpt", 4))
    with pytest.warns(UserWarning, match=r"not whole, left aside: .*step=4\.ckpt"):
        assert last_checkpoints([], [str(tmp_path)]) == [older]
    path.unlink()
    rename_in_directory(older)
    with pytest.raises(CheckpointError, match="no checkpoint is whole"), pytest.warns(UserWarning):
        last_checkpoints([], [str(tmp_path)])


def test_a_refused_checkpoint_is_not_its_own_alternative(tmp_path: Path) -> None:
    older, newer = (put_file(tmp_path / f"step={step}.ckpt", step) for step in (2, 4))
    link = tmp_path / "last.ckpt"
    link.symlink_to(newer)
    assert newest_verified(tmp_path, other_than=location(link)) == older


def test_a_mark_that_torch_refuses_is_damage(tmp_path: Path) -> None:
    path = put_file(tmp_path / "a.ckpt")
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.rindex(_CENTRAL) + 38, 0x10)  # a folder
    path.write_bytes(data)
    assert "called a folder" in examine(path).damages[0].found
