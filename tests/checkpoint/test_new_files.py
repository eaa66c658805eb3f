"""New files appear all together or not at all."""

import os
from pathlib import Path

import pytest

from shardeddp.checkpoint.directory import new_files
from shardeddp.errors import CheckpointError


def test_files_appear_at_the_end(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with new_files(paths) as files:
        for number, file in enumerate(files):
            file.write(b"%d" % number)
        assert not any(path.exists() for path in paths)
    assert [path.read_bytes() for path in paths] == [b"0", b"1"]
    assert len(os.listdir(tmp_path)) == 2


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with (
        pytest.raises(ZeroDivisionError),
        new_files([tmp_path / "a", tmp_path / "b"], force=True) as files,
    ):
        files[0].write(b"new")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_what_the_system_refuses_is_named(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(CheckpointError, match=r"writing .*a failed: No space left.*free"),
        new_files([tmp_path / "a"]),
    ):
        fail()


def test_a_file_that_comes_in_between_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"), new_files([tmp_path / "a"]):
        (tmp_path / "a").write_text("somebody else's")
    assert (tmp_path / "a").read_text() == "somebody else's"
    assert os.listdir(tmp_path) == ["a"]


def test_directories_are_never_replaced_and_have_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="is a directory, expected the path of a new file"):
        new_files([tmp_path / "a"], force=True).__enter__()
    with pytest.raises(CheckpointError, match=r"there is no directory .*missing: make it first"):
        new_files([tmp_path / "missing" / "a"]).__enter__()


def test_the_umask_says_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_files([tmp_path / "a"]):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
