"""File operations: exclusive, complete, flushed where asked, and errors that say what to do."""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardeddp.checkpoint import durable
from shardeddp.errors import CheckpointError

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of what is flushed, in order; nothing really is."""
    paths: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    return paths


def failing(number: int) -> Any:
    def fail(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_is_made_for_its_owner_alone_and_only_once(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        for permissions, mode in (("private", 0o600), ("umask", 0o644)):
            path = tmp_path / permissions
            descriptor = durable.create_exclusively(path, permissions)
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
            assert stat.S_IMODE(path.stat().st_mode) == mode
            with pytest.raises(FileExistsError):
                durable.create_exclusively(path, permissions)
    finally:
        os.umask(previous)


def test_a_file_is_never_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        durable.create_exclusively(tmp_path / "link", "private")
    assert not (tmp_path / "elsewhere").exists()


def test_all_is_written_when_the_system_takes_it_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_less(descriptor: int, buffers: Sequence[memoryview]) -> int:
        return os.write(descriptor, bytes(buffers[0][:7]))

    monkeypatch.setattr(os, "writev", write_less)
    data = bytes(range(256))
    descriptor = durable.create_exclusively(tmp_path / "file", "private")
    durable.write_buffers(descriptor, [memoryview(data).cast("I")])
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_read_must_be_an_ordinary_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    (tmp_path / "real").write_bytes(b"x")
    {
        "link": lambda: path.symlink_to("real"),
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }[kind]()
    with pytest.raises(
        CheckpointError, match=rf"file is a (symbolic )?{kind}, expected an ordinary file"
    ):
        durable.open_regular(path).__enter__()


def test_opening_a_file_tells_its_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with durable.opened_directory(tmp_path) as directory:
        with durable.open_regular("file", directory) as (descriptor, nbytes):
            assert (os.read(descriptor, 10), nbytes) == (b"12345", 5)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        with pytest.raises(FileNotFoundError):
            durable.open_regular("other", directory).__enter__()


def test_directories_are_made_private_and_flushed_into_those_that_hold_them(
    tmp_path: Path, synced: list[str]
) -> None:
    durable.make_directories(tmp_path / "a" / "b", "private", "disk")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    durable.make_directories(tmp_path / "a" / "b", "private", "disk")
    durable.make_directories(tmp_path / "c", "private", "process")
    assert len(synced) == 2, "what is there, or is to survive the process only, is not flushed"


def test_two_processes_may_make_the_same_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = durable.make_directory

    def come_second(path: Any, permissions: Any) -> None:
        make(path, permissions)
        make(path, permissions)

    monkeypatch.setattr(durable, "make_directory", come_second)
    durable.make_directories(tmp_path / "a" / "b", "private", "disk")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_system_that_cannot_flush_directories_is_told_from_a_failing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with durable.opened_directory(tmp_path) as directory:
        assert durable.sync_directory(directory, "disk")
        for number in (errno.EINVAL, errno.ENOTSUP):
            monkeypatch.setattr(os, "fsync", failing(number))
            assert not durable.sync_directory(directory, "disk")
            assert durable.sync_directory(directory, "process")
        monkeypatch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            durable.sync_directory(directory, "disk")


def test_files_and_directories_change_places_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("file")
    if not durable.swap(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot swap names")
    assert (tmp_path / "a").read_text() == "file"
    assert (tmp_path / "b").is_dir()
    with pytest.raises(FileNotFoundError):
        durable.swap(tmp_path / "a", tmp_path / "missing")


@pytest.mark.parametrize(
    "number", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get
)
def test_where_names_cannot_be_swapped_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(durable.ctypes, "get_errno", lambda: number)
    assert not durable.swap(tmp_path / "a", tmp_path / "b", lambda *arguments: -1)
    assert not durable.swap(tmp_path / "a", tmp_path / "b", None)


def test_a_lock_belongs_to_one_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with durable.opened_directory(tmp_path) as first:
        assert durable.lock(first) is True
        with durable.opened_directory(tmp_path) as second, durable.held(tmp_path) as free:
            assert durable.lock(second) is False
            assert not free
    with durable.held(tmp_path) as free, durable.opened_directory(tmp_path) as second:
        assert free
        assert durable.lock(second) is False
        monkeypatch.setattr(durable.fcntl, "flock", failing(errno.ENOLCK))
        assert durable.lock(second) is None


def test_a_path_is_resolved_up_to_its_name(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    assert durable.resolve(tmp_path / "link") == (tmp_path, "link")
    assert durable.resolve(f"{tmp_path}/link/") == (tmp_path, "link")
    assert durable.resolve(tmp_path / "link" / ".." / "x") == (tmp_path / "real", "x")
    assert durable.resolve("x") == (Path.cwd(), "x")
    for nameless in ("/", "", f"{tmp_path}/..", "."):
        assert durable.resolve(nameless)[1] == ""
