"""A checkpoint is what its manifest says, and the latest is the one of the highest step, whatever clocks say."""

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardeddp.checkpoint.clean import remove
from shardeddp.checkpoint.directory import require_replaceable
from shardeddp.checkpoint.find import carries_manifest, find_checkpoints, read_manifest
from shardeddp.checkpoint.manifest import MANIFEST, manifest_to_bytes
from shardeddp.checkpoint.verify import verify
from shardeddp.errors import CheckpointError
from support.small_checkpoints import DATA, fill, manifest_of, put

pytestmark = pytest.mark.timeout(30)


def replace_by(
    make: Callable[[Path], object], name: str = "__1_0.distcp"
) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        content = (checkpoint / name).read_bytes()
        (checkpoint.parent / "aside").write_bytes(content)
        (checkpoint / name).unlink()
        make(checkpoint / name)

    return change


def append(checkpoint: Path) -> None:
    with (checkpoint / "__1_0.distcp").open("ab") as file:
        file.write(b"x")


def link_outside(path: Path) -> None:
    path.symlink_to("../aside")


def manifest_with_file(name: str) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        (checkpoint / MANIFEST).write_bytes(manifest_to_bytes(manifest_of(3, names=(*DATA, name))))

    return change


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing file": (
        lambda it: (it / "__1_0.distcp").unlink(),
        r"__1_0\.distcp is missing, expected a .* 69 bytes",
    ),
    "longer file": (append, r"__1_0\.distcp has 70 bytes, expected 69"),
    "shorter file": (
        lambda it: os.truncate(it / "__0_0.distcp", 0),
        r"__0_0\.distcp has 0 bytes, expected 69",
    ),
    "linked file": (
        replace_by(link_outside),
        r"__1_0\.distcp is a symbolic link, expected an ordinary file",
    ),
    "pipe": (replace_by(os.mkfifo), r"__1_0\.distcp is a pipe, expected an ordinary file"),
    "directory": (
        replace_by(Path.mkdir),
        r"__1_0\.distcp is a directory, expected an ordinary file",
    ),
    "device": (
        replace_by(lambda path: path.symlink_to("/dev/zero")),
        r"__1_0\.distcp is a symbolic link",
    ),
    "no manifest": (lambda it: (it / MANIFEST).unlink(), r"it has no manifest\.json: .* cut short"),
    "empty manifest": (lambda it: (it / MANIFEST).write_bytes(b""), r"does not start as one"),
    "linked manifest": (replace_by(link_outside, MANIFEST), r"manifest\.json is a symbolic link"),
    "pipe as manifest": (replace_by(os.mkfifo, MANIFEST), r"manifest\.json is a pipe"),
    "huge manifest": (
        lambda it: os.truncate(it / MANIFEST, 2**40),
        r"expected 1,099,511,627,776 bytes of text, found a zero byte",
    ),
    "path upwards": (manifest_with_file("../x"), r"'\.\./x'"),
    "absolute path": (manifest_with_file("/etc/passwd"), r"'/etc/passwd'"),
    "path downwards": (manifest_with_file("a/__0_0.distcp"), r"'a/__0_0\.distcp'"),
    "name with a newline": (manifest_with_file("__0_0.distcp\n"), r"distcp\\n'"),
    "the manifest itself": (manifest_with_file(MANIFEST), r"'manifest\.json'"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return put(tmp_path / "x.ckpt", step=3)


def test_a_whole_checkpoint_is_read_also_through_a_link(checkpoint: Path) -> None:
    link = checkpoint.with_name("last.ckpt")
    link.symlink_to(checkpoint.name)
    for path in (checkpoint, link):
        assert read_manifest(path) == manifest_of(3)
        assert carries_manifest(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_whole_is_refused_naming_the_file(
    checkpoint: Path, damage: str
) -> None:
    change, text = DAMAGES[damage]
    change(checkpoint)
    open_before = len(os.listdir("/dev/fd"))
    with pytest.raises(CheckpointError, match=rf"x\.ckpt is not a whole checkpoint: .*{text}"):
        read_manifest(checkpoint)
    assert len(os.listdir("/dev/fd")) == open_before


def test_ranks_share_the_look_at_files_and_one_of_them_sees_what_is_missing(
    checkpoint: Path,
) -> None:
    assert [read_manifest(checkpoint, (rank, 2)) for rank in range(2)] == [manifest_of(3)] * 2
    (checkpoint / "__1_0.distcp").unlink()
    for ranks in (1, 2, 3, 7):
        refused = 0
        for rank in range(ranks):
            try:
                read_manifest(checkpoint, (rank, ranks))
            except CheckpointError:
                refused += 1
        assert refused == 1


@pytest.mark.parametrize("read", [read_manifest, verify])
def test_a_manifest_of_any_size_and_no_text_costs_nothing(
    checkpoint: Path, read: Callable[[Path], Any]
) -> None:
    with open(checkpoint / MANIFEST, "r+b") as file:
        file.truncate(8 * 2**40)
    start = time.monotonic()
    try:
        assert "a zero byte" in str(read(checkpoint))
    except CheckpointError as error:
        assert "a zero byte" in str(error)
    assert time.monotonic() - start < 5


def test_what_is_no_directory_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("x")
    for name in ("file.ckpt", "missing"):
        with pytest.raises(
            CheckpointError, match=f"{name} is damaged|reading the checkpoint .*{name} failed"
        ):
            read_manifest(tmp_path / name)
        assert not carries_manifest(tmp_path / name)


def test_a_manifest_that_is_no_file_is_none_of_ours(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / MANIFEST))
        assert not carries_manifest(tmp_path)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_what_cannot_be_read_at_the_moment_is_neither_called_ours_nor_foreign(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    real = getattr(os, call)

    def failing(first: Any, *arguments: Any, **options: Any) -> Any:
        if call == "open" and not str(first).endswith(MANIFEST):
            return real(first, *arguments, **options)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(CheckpointError, match=f"reading .* failed: {os.strerror(number)}"):
        carries_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=f"reading .* failed: {os.strerror(number)}"):
        require_replaceable(checkpoint)
    with pytest.warns(UserWarning, match=f"was not deleted: .*{os.strerror(number)}"):
        remove(checkpoint, written=True)
    monkeypatch.undo()
    assert carries_manifest(checkpoint)


def test_a_manifest_of_ours_is_known_even_when_it_is_damaged_behind_its_beginning(
    checkpoint: Path,
) -> None:
    path = checkpoint / MANIFEST
    path.write_bytes(path.read_bytes()[:-10])
    assert carries_manifest(checkpoint)
    with pytest.raises(CheckpointError):
        read_manifest(checkpoint)
    path.write_text(json.dumps({"manifest": {"format": "shardeddp"}}))
    assert not carries_manifest(checkpoint)


def test_checkpoints_are_ordered_by_step_and_not_by_time(tmp_path: Path) -> None:
    for age, step in enumerate((8, 24, 16)):
        path = put(tmp_path / f"step={step}.ckpt", step)
        os.utime(path, (10**9 - age * 86400, 10**9 - age * 86400))
    os.utime(tmp_path / "step=8.ckpt")
    found = find_checkpoints(tmp_path)
    assert [it.step for it in found.checkpoints] == [8, 16, 24]
    assert found.skipped == {}


def test_at_one_step_the_later_epoch_then_the_version_then_the_name_decides(tmp_path: Path) -> None:
    for name, epoch in {
        "z.ckpt": 0,
        "a.ckpt": 1,
        "last.ckpt": 1,
        "last-v2.ckpt": 1,
        "last-v10.ckpt": 1,
    }.items():
        put(tmp_path / name, step=5, epoch=epoch)
    names = [it.name for it in find_checkpoints(tmp_path).checkpoints]
    assert names == ["z.ckpt", "a.ckpt", "last.ckpt", "last-v2.ckpt", "last-v10.ckpt"]


def test_unfinished_and_foreign_entries_are_never_candidates(tmp_path: Path) -> None:
    for name in (".tmp-x.ckpt-", ".old-x.ckpt-", ".del-"):
        put(tmp_path / f"{name}{'0' * 32}", step=9)
    (tmp_path / "plain.ckpt").write_text("a plain checkpoint")
    (tmp_path / "logs").mkdir()
    put(tmp_path / "x.ckpt", step=1)
    found = find_checkpoints(tmp_path)
    assert [it.name for it in found.checkpoints] == ["x.ckpt"]
    assert found.skipped == {}


def test_candidates_that_fail_are_skipped_and_named(tmp_path: Path) -> None:
    put(tmp_path / "whole.ckpt", step=1)
    append(put(tmp_path / "long.ckpt", step=5))
    (tmp_path / "cut.ckpt").mkdir()
    (tmp_path / "dangling.ckpt").symlink_to("nothing")
    fill(tmp_path, step=7)  # files of a checkpoint beside checkpoints are no checkpoint inside
    found = find_checkpoints(tmp_path)
    assert [it.name for it in found.checkpoints] == ["whole.ckpt"]
    assert set(found.skipped) == {"cut.ckpt", "dangling.ckpt", "long.ckpt"}


def test_a_directory_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "missing").checkpoints == ()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="looking for checkpoints in"):
        find_checkpoints(tmp_path / "file")
