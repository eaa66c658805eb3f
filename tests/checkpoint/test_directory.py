"""Staging, commit and discard: what was there is replaced as a whole, or refused and left."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardeddp.checkpoint import directory, durable
from shardeddp.checkpoint.clean import remove_leftovers
from shardeddp.checkpoint.manifest import MANIFEST
from shardeddp.errors import CheckpointError
from support.small_checkpoints import (
    DATA,
    content,
    manifest_of,
    put,
    save,
    step_of,
    working_entries,
)

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(params=["swap", "two renames"], autouse=True)
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "two renames":
        monkeypatch.setattr(directory, "swap", lambda first, second: False)
    return request.param == "swap"


def staged(target: Path, step: int) -> directory.LocalStaging:
    staging = directory.stage(target)
    for name in DATA:
        staging.put(name, content(name, step))
    return staging


def write_part(folder: Path, name: str, data: bytes) -> None:
    with directory.new_part(folder, name, len(data)) as file:
        durable.write_buffers(file, [data])


def test_a_checkpoint_appears_where_nothing_was_and_directories_are_made(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "x.ckpt"
    assert save(target, step=1) == ()
    assert step_of(target) == 1
    assert os.listdir(target.parent) == ["x.ckpt"]


@pytest.mark.parametrize(
    ("permissions", "modes"), [("private", (0o700, 0o600)), ("umask", (0o750, 0o640))]
)
def test_new_files_are_private_unless_the_umask_is_asked(
    tmp_path: Path, permissions: Any, modes: tuple[int, int]
) -> None:
    previous = os.umask(0o027)
    try:
        save(tmp_path / "new" / "x.ckpt", 1, permissions)
    finally:
        os.umask(previous)
    directories = {
        stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "new", tmp_path / "new" / "x.ckpt")
    }
    files = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new" / "x.ckpt").iterdir()}
    assert (directories, files) == ({modes[0]}, {modes[1]})


def make_file(path: Path) -> None:
    path.write_text("a plain checkpoint")


def make_lightning_directory(path: Path) -> None:
    path.mkdir()
    (path / "meta.pt").write_bytes(b"")


def make_link(path: Path) -> None:
    put(path.parent / "pointed.ckpt", step=7)
    path.symlink_to("pointed.ckpt")


REPLACED: dict[str, Callable[[Path], object]] = {
    "ours": lambda path: put(path, step=1),
    "an empty directory": Path.mkdir,
    "a plain file": make_file,
    "a link to a checkpoint": make_link,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_what_may_be_a_checkpoint_is_replaced_and_gone(
    tmp_path: Path, swaps: bool, kind: str
) -> None:
    target = tmp_path / "last.ckpt"
    REPLACED[kind](target)
    notes = save(target, step=2)
    assert len(notes) == (not swaps)
    assert not target.is_symlink()
    assert step_of(target) == 2
    assert working_entries(tmp_path) == []
    if kind == "a link to a checkpoint":
        assert step_of(tmp_path / "pointed.ckpt") == 7


def test_what_others_have_put_into_a_checkpoint_that_is_replaced_is_kept_beside_it(
    tmp_path: Path,
) -> None:
    target = put(tmp_path / "last.ckpt", step=1)
    for number in (1, 2):
        (target / "notes.txt").write_text(f"mine {number}")
        (note,) = [each for each in save(target, step=number + 1) if "notes.txt" in each]
        kept = tmp_path / f"last.ckpt-kept-{number}"
        assert note == (
            f"notes.txt in last.ckpt is no part of a checkpoint, and is left in {kept}."
        )
        assert os.listdir(kept) == ["notes.txt"]
        assert (kept / "notes.txt").read_text() == f"mine {number}"
        assert step_of(target) == number + 1
    assert working_entries(tmp_path) == []


def make_dcp_directory(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(b"")


def make_directory_with_another_manifest(path: Path) -> None:
    path.mkdir()
    (path / MANIFEST).write_text('{"name": "a web page"}')


REFUSED: dict[str, Callable[[Path], object]] = {
    "a directory of files": lambda path: (path / "photos").mkdir(parents=True),
    "a plain DCP directory": make_dcp_directory,
    "a directory with a file of Lightning's name": make_lightning_directory,
    "another program's manifest": make_directory_with_another_manifest,
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_checkpoint_is_refused_before_anything_is_written(
    tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "last.ckpt"
    REFUSED[kind](target)
    with pytest.raises(
        CheckpointError,
        match=r"last.ckpt is a \w+ that is no checkpoint of this package, expected .* Move it",
    ):
        directory.stage(target)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_what_is_no_checkpoint_is_refused_when_it_comes_during_the_save(tmp_path: Path) -> None:
    target = tmp_path / "results"
    staging = staged(target, step=1)
    target.write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"results is an ordinary file that is no checkpoint of this package"
    ):
        staging.commit(manifest_of(1))
    staging.discard()
    assert os.listdir(tmp_path) == ["results"]
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    "target", ["", "/", "..", "a/..", f".tmp-x-{'0' * 32}", f".del-{'0' * 32}"]
)
def test_a_target_needs_a_name_of_its_own(target: str) -> None:
    with pytest.raises(ValueError, match="expected the path of a new checkpoint"):
        directory.stage(target)


def test_a_relative_target_keeps_its_place_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    staging = staged(Path("x.ckpt"), step=1)
    monkeypatch.chdir("/")
    staging.commit(manifest_of(1))
    assert step_of(tmp_path / "x.ckpt") == 1


@pytest.mark.parametrize(
    "name", ["x", "../x", "__0_0.distcp/", "__00_0.distcp", "__0_0.distcp\n", "/etc/x", "", "a\0"]
)
def test_only_names_of_a_checkpoint_are_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"expected manifest\.json"):
        write_part(tmp_path, name, b"")


def test_a_file_is_written_by_one_rank_only(tmp_path: Path) -> None:
    write_part(tmp_path, "__0_0.distcp", b"first")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp failed: File exists. Only one writer"):
        write_part(tmp_path, "__0_0.distcp", b"second")
    assert (tmp_path / "__0_0.distcp").read_bytes() == b"first"


def test_a_full_disk_is_told_with_the_needed_and_the_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        CheckpointError,
        match=rf"{tmp_path}/state.json failed: No space .* 12 bytes were needed, [\d,]+ are",
    ):
        write_part(tmp_path, "state.json", b"twelve bytes")
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_file_that_cannot_be_flushed_is_an_error_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(CheckpointError, match=r"flushing .*meta.pt failed"),
        directory.new_part(tmp_path, "meta.pt", 0) as descriptor,
    ):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(descriptor)


@pytest.mark.parametrize(("durability", "flushed"), [("disk", True), ("process", False)])
def test_everything_is_flushed_before_it_is_needed_or_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Any, flushed: bool
) -> None:
    events: list[str] = []
    fsync, rename, swap = os.fsync, os.rename, directory.swap

    def note(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if what == "sync" else os.fspath(args[0])
            name = os.path.basename(path)
            events.append(f"{what} {name[:5] if name.startswith('.') else name}")
            return call(*args)

        return noted

    put(tmp_path / "x.ckpt", step=1)
    monkeypatch.setattr(os, "fsync", note("sync", fsync))
    monkeypatch.setattr(os, "rename", note("rename", rename))
    monkeypatch.setattr(directory, "swap", note("swap", swap))
    save(tmp_path / "x.ckpt", step=2, durability=durability)
    syncs = [event for event in events if event.startswith("sync")]
    if not flushed:
        assert syncs == []
        return
    assert syncs[:4] == [
        "sync __0_0.distcp",
        "sync __1_0.distcp",
        "sync meta.pt",
        "sync manifest.json",
    ]
    assert syncs[4:] == ["sync .tmp-", f"sync {tmp_path.name}", f"sync {tmp_path.name}"]
    assert (
        events.index("sync .tmp-")
        < events.index("swap .tmp-")
        < events.index(f"sync {tmp_path.name}")
    )
    assert events[-2].startswith("rename ."), "what was replaced is put away before it is deleted"


def test_a_directory_that_cannot_be_flushed_is_told_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    (note,) = save(tmp_path / "x.ckpt", step=1)
    assert "cannot flush directories" in note
    assert step_of(tmp_path / "x.ckpt") == 1


@pytest.mark.parametrize("kind", ["nothing", *REPLACED])
def test_a_commit_that_cannot_be_flushed_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    target = tmp_path / "last.ckpt"
    REPLACED.get(kind, lambda path: None)(target)
    before = [(path.name, path.lstat().st_ino) for path in sorted(tmp_path.iterdir())]
    staging = staged(target, step=2)
    fsync, parent = os.fsync, tmp_path.stat().st_ino

    def failing(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == parent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match=r"committing .*last.ckpt failed: Input/output error"):
        staging.commit(manifest_of(2))
    assert step_of(staging.path) == 2
    staging.discard()
    assert [(path.name, path.lstat().st_ino) for path in sorted(tmp_path.iterdir())] == before


@pytest.mark.parametrize("kind", ["ours", "a plain file"])
def test_a_cleanup_during_a_commit_that_is_undone_leaves_one_checkpoint_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    target = tmp_path / "last.ckpt"
    REPLACED[kind](target)
    staging = staged(target, step=2)
    fsync, parent = os.fsync, tmp_path.stat().st_ino

    def clean_and_fail(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == parent:
            monkeypatch.setattr(os, "fsync", fsync)
            remove_leftovers(tmp_path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", clean_and_fail)
    with pytest.raises(CheckpointError, match="committing"):
        staging.commit(manifest_of(2))
    staging.discard()
    # What is replaced is locked against cleanups and comes back; a link cannot be, so the new one stays.
    if kind == "a plain file":
        assert target.is_file()
    else:
        assert step_of(target) == (1 if kind == "ours" else 2)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_what_a_cleanup_has_deleted_first_needs_no_deletion_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    make_file(tmp_path / "x.ckpt")
    staging = staged(tmp_path / "x.ckpt", step=2)
    rename = os.rename

    def clean_and_rename(source: Path, target: Path) -> None:
        if target.name.startswith(".del-"):
            monkeypatch.setattr(os, "rename", rename)
            remove_leftovers(tmp_path)
        rename(source, target)

    monkeypatch.setattr(os, "rename", clean_and_rename)
    assert len(staging.commit(manifest_of(2))) == (not swaps)
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_what_cannot_be_deleted_after_the_commit_is_told_and_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "x.ckpt", step=1)
    staging = staged(tmp_path / "x.ckpt", step=2)

    def fail(*args: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(directory, "delete_parts", fail)
        notes = staging.commit(manifest_of(2))
    assert "could not be deleted (Permission denied)" in notes[-1]
    assert step_of(tmp_path / "x.ckpt") == 2
    assert len(os.listdir(tmp_path)) == 2
    assert remove_leftovers(tmp_path) == ()
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_staging_is_committed_once(tmp_path: Path) -> None:
    staging = directory.stage(tmp_path / "x.ckpt")
    staging.put("meta.pt", content("meta.pt", 1))
    staging.commit(manifest_of(1, names=("meta.pt",)))
    with pytest.raises(RuntimeError, match="committed or discarded before"):
        staging.commit(manifest_of(1, names=("meta.pt",)))
    assert step_of(tmp_path / "x.ckpt") == 1


def test_a_discarded_staging_leaves_nothing_and_no_open_file(tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    staging = staged(tmp_path / "x.ckpt", step=1)
    staging.discard()
    staging.discard()
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_deleting_starts_with_what_makes_it_look_whole_and_follows_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    tree = tmp_path / "tree"
    (tree / "meta.pt").mkdir(parents=True)
    for name in ("__0_0.distcp", MANIFEST, "other", "meta.pt/__0_0.distcp"):
        (tree / name).write_text("x")
    (tree / "__1_0.distcp").symlink_to(tmp_path / "kept")
    order: list[str] = []
    unlink = os.unlink

    def noting(path: Any, **options: Any) -> None:
        order.append(os.path.basename(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", noting)
    assert directory.delete_parts(tree) == ("meta.pt", "other")
    assert (order[0], set(order)) == (MANIFEST, {MANIFEST, "__0_0.distcp", "__1_0.distcp"})
    assert sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*")) == [
        "meta.pt",
        "meta.pt/__0_0.distcp",
        "other",
    ]
    assert (tmp_path / "kept" / "file").exists()
    (tree / "meta.pt" / "__0_0.distcp").unlink()
    (tree / "meta.pt").rmdir()
    (tree / "other").rename(tree / "state.json")
    assert directory.delete_parts(tree) == ()
    assert not tree.exists()
    assert directory.delete_parts(tree) == ()
