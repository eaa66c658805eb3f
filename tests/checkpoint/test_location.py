"""Locations: parsed by the form of a path, errors that say what to do, and space that is asked for before."""

import errno
import os
from pathlib import Path

import pytest

from shardeddp.checkpoint.location import LocalPath, disk_errors, location, preflight
from shardeddp.checkpoint.remote import RemotePath
from shardeddp.errors import CheckpointError

pytestmark = pytest.mark.timeout(30)


def test_the_form_of_a_path_says_where_it_is(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), f"file://{tmp_path}", LocalPath(tmp_path)):
        assert location(path) == tmp_path
        assert isinstance(location(path) / "a.ckpt", LocalPath)
        assert isinstance(location(path).parent, LocalPath)
    assert location("s3://bucket/run") == RemotePath("s3://bucket") / "run"
    with pytest.raises(CheckpointError, match="s3://bucket/run: read elsewhere"):
        location("s3://bucket/run").local_only("read elsewhere")


def test_too_little_space_is_refused_with_the_path_and_both_numbers(tmp_path: Path) -> None:
    preflight(tmp_path / "not" / "yet", 1)
    with pytest.raises(
        CheckpointError,
        match=rf"{tmp_path}: 1,000,000,000,000,000,000 bytes are needed, [\d,]+ are free",
    ):
        preflight(tmp_path, 10**18)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_does_not_tell_its_space_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        f_blocks = f_bavail = f_frsize = 0

    monkeypatch.setattr(os, "statvfs", lambda path: Silent)
    preflight(tmp_path, 10**18)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (
            errno.ENOSPC,
            r"No space left on device; 1,234 bytes were needed, [\d,]+ are free. Make room there",
        ),
        (errno.EDQUOT, r"1,234 bytes were needed, [\d,]+ are free"),
        (errno.EACCES, r"Permission denied. The directory must be writable"),
        (errno.EIO, r"failed: Input/output error\.$"),
        (errno.EEXIST, r"Only one writer may make a file"),
        (errno.ENAMETOOLONG, r"Take a shorter name"),
    ],
)
def test_an_error_of_the_system_names_the_path_and_what_to_do(
    tmp_path: Path, number: int, text: str
) -> None:
    path = tmp_path / "missing" / "file"
    with (
        pytest.raises(CheckpointError, match=text) as caught,
        disk_errors("writing", path, 1234),
    ):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith(f"writing {path} failed: ")
    assert isinstance(caught.value.__cause__, OSError)
