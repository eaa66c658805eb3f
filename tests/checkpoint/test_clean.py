"""Only checkpoints of this package are deleted, and only what a dead process has left is removed."""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shardeddp.checkpoint import clean, directory, durable
from shardeddp.checkpoint.clean import remove, remove_leftovers
from shardeddp.checkpoint.manifest import MANIFEST
from support.small_checkpoints import fill, put, save, step_of, working_entries

pytestmark = pytest.mark.timeout(30)

ID = "0123456789abcdef" * 2
OTHER_ID = "fedcba9876543210" * 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def test_a_checkpoint_is_deleted(root: Path) -> None:
    path = put(root / "x.ckpt", step=1)
    for _ in range(2):  # the second time it is gone
        remove(path, [root])
        assert os.listdir(root) == []


def test_a_damaged_checkpoint_is_deleted_too(root: Path) -> None:
    path = put(root / "x.ckpt", step=1)
    (path / "__0_0.distcp").unlink()
    remove(f"{path}/", [root])
    assert os.listdir(root) == []


def test_what_others_have_put_into_it_stays(root: Path) -> None:
    path = put(root / "x.ckpt", step=1)
    (path / "notes.txt").write_text("mine")
    (path / "STATE.json").mkdir()
    (path / "__1_1.distcp").mkdir()
    (path / "plots" / "a").mkdir(parents=True)
    with pytest.warns(
        UserWarning, match=r"STATE.json, __1_1.distcp, notes.txt and 1 more in x.ckpt is no part"
    ):
        remove(path, [root])
    assert os.listdir(root) == ["x.ckpt"]
    assert sorted(os.listdir(path)) == ["STATE.json", "__1_1.distcp", "notes.txt", "plots"]
    assert (path / "notes.txt").read_text() == "mine"


def test_of_a_link_only_the_link_is_deleted(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "outside.ckpt", step=1)
    (root / "last.ckpt").symlink_to("../outside.ckpt")
    remove(root / "last.ckpt", [root])
    assert os.listdir(root) == []
    assert step_of(tmp_path / "outside.ckpt") == 1


def test_what_this_run_has_written_may_be_a_plain_file_anywhere(root: Path) -> None:
    for name in ("x.ckpt", "x.pt"):
        (root / name).touch()
        remove(root / name, written=True)
    put(root / "y.ckpt", step=1)
    remove(root / "y.ckpt", [root / "elsewhere"], written=True)
    assert os.listdir(root) == []


def foreign_directory(root: Path) -> Path:
    (root / "x.ckpt" / "photos").mkdir(parents=True)
    return root / "x.ckpt"


def directory_with_another_manifest(root: Path) -> Path:
    foreign_directory(root)
    (root / "x.ckpt" / MANIFEST).write_text("{}")
    return root / "x.ckpt"


def directory_with_a_linked_manifest(root: Path) -> Path:
    put(root / "ours.ckpt", step=1)
    foreign_directory(root)
    (root / "x.ckpt" / MANIFEST).symlink_to(root / "ours.ckpt" / MANIFEST)
    return root / "x.ckpt"


def upwards(root: Path) -> Path:
    put(root.parent / "victim", step=1)
    return root / ".." / "victim"


def through_a_link(root: Path) -> Path:
    put(root.parent / "other" / "victim", step=1)
    (root / "link").symlink_to("../other")
    return root / "link" / "victim"


def file_outside(root: Path) -> Path:
    (root.parent / "x.ckpt").touch()
    return root.parent / "x.ckpt"


def sibling_with_the_same_beginning(root: Path) -> Path:
    return put(root.with_name("checkpoints2") / "x.ckpt", step=1)


def plain_file(root: Path) -> Path:
    (root / "train.py").write_text("print()")
    return root / "train.py"


def plain_file_with_the_name_of_a_checkpoint(root: Path) -> Path:
    torch.save({"state_dict": {}}, root / "x.ckpt")
    return root / "x.ckpt"


def link_to_a_file(root: Path) -> Path:
    (root / "data.ckpt").symlink_to(plain_file(root))
    return root / "data.ckpt"


def link_to_nothing(root: Path) -> Path:
    (root / "data.ckpt").symlink_to("unmounted")
    return root / "data.ckpt"


def pipe(root: Path) -> Path:
    os.mkfifo(root / "x.ckpt")
    return root / "x.ckpt"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (foreign_directory, r"it is a directory without a manifest\.json of this package"),
        (directory_with_another_manifest, r"a directory without a manifest\.json of this package"),
        (directory_with_a_linked_manifest, r"a directory without a manifest\.json of this package"),
        (upwards, r"it lies outside of .*checkpoints\."),
        (through_a_link, r"it lies outside of"),
        (file_outside, r"it lies outside of"),
        (sibling_with_the_same_beginning, r"it lies outside of"),
        (plain_file, r"an ordinary file that this run has not written, and no checkpoint of this"),
        (plain_file_with_the_name_of_a_checkpoint, r"that this run has not written"),
        (link_to_a_file, r"a symbolic link that this run has not written"),
        (link_to_nothing, r"a symbolic link that this run has not written"),
        (pipe, r"it is a pipe"),
        (lambda root: root, r"it lies outside of"),
        (lambda root: root / "..", r"does not end in a name"),
        (lambda root: root / "x\0", r"null"),
    ],
)
def test_anything_else_is_left_and_a_warning_says_why(
    root: Path, make: Callable[[Path], Path], why: str
) -> None:
    fill(root, step=1)
    target = make(root)
    before = sorted(root.parent.rglob("*"))
    with pytest.warns(UserWarning, match=f"was not deleted: .*{why}"):
        remove(target, [root])
    assert sorted(root.parent.rglob("*")) == before


def test_without_directories_only_what_this_run_has_written_is_deleted(root: Path) -> None:
    put(root / "x.ckpt", step=1)
    with pytest.warns(UserWarning, match=r"it lies outside of all directories"):
        remove(root / "x.ckpt")
    foreign_directory(root / "y")
    with pytest.warns(UserWarning, match=r"a directory without a manifest"):
        remove(root / "y" / "x.ckpt", written=True)
    assert step_of(root / "x.ckpt") == 1


def test_the_root_may_be_given_through_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("checkpoints")
    for given, path in ((tmp_path / "link", root), (root, tmp_path / "link")):
        put(root / "x.ckpt", step=1)
        remove(path / "x.ckpt", [root / "no", given])
    assert os.listdir(root) == []


def test_a_deletion_that_the_system_refuses_is_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root / "x.ckpt", step=1)

    def refuse(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.warns(UserWarning, match="was not deleted: .*Read-only file system"):
        remove(root / "x.ckpt", [root])
    assert step_of(root / "x.ckpt") == 1


def test_a_cleanup_removes_what_was_abandoned_and_nothing_else(root: Path) -> None:
    put(root / f".tmp-checkpoint-{ID}", step=2)
    # What an exchange has put in the place of a staging directory.
    (root / f".tmp-checkpoint-{OTHER_ID}").touch()
    (root / f".tmp-file-{ID}").symlink_to("x.ckpt")
    put(root / f".del-{ID}", step=3)
    put(root / "x.ckpt", step=1)
    foreign = {
        ".tmp-x",
        f".tmp-x-{ID}",
        f".tmp-{ID}",
        f".tmp-x-{ID[:-1]}",
        f".tmp-x-{ID.upper()}",
        f"x.tmp-x-{ID}",
        f".del-x-{ID}",
    }
    for name in foreign:
        (root / name).mkdir()
    assert remove_leftovers(root) == ()
    assert set(os.listdir(root)) == {"x.ckpt", *foreign}
    assert step_of(root / "x.ckpt") == 1


def test_what_others_have_put_into_it_stays_in_a_cleanup(root: Path) -> None:
    for name in (f".tmp-checkpoint-{ID}", f".tmp-file-{ID}", f".del-{ID}"):
        put(root / name, step=1)
        (root / name / "notes.txt").write_text("mine")
    put(root / f".old-x.ckpt-{ID}", step=1)
    (root / f".old-x.ckpt-{ID}" / "notes.txt").write_text("mine")
    put(root / "x.ckpt", step=2)
    left = remove_leftovers(root)
    assert len(left) == 4
    assert all("notes.txt in " in each for each in left)
    assert len(list(root.rglob("notes.txt"))) == 4
    assert (root / "x.ckpt-kept-1" / "notes.txt").exists()
    assert step_of(root / "x.ckpt") == 2


def test_a_cleanup_gives_a_replaced_checkpoint_its_name_back_if_that_is_free(root: Path) -> None:
    put(root / f".old-lost.ckpt-{ID}", step=1)
    put(root / f".tmp-checkpoint-{ID}", step=2)
    put(root / f".old-there.ckpt-{ID}", step=3)
    put(root / "there.ckpt", step=4)
    (root / f".old-file.ckpt-{ID}").write_text("a plain checkpoint")
    (root / f".old-link.ckpt-{ID}").symlink_to("nothing")
    assert remove_leftovers(root) == ()
    assert step_of(root / "lost.ckpt") == 1
    assert step_of(root / "there.ckpt") == 4
    assert set(os.listdir(root)) == {"lost.ckpt", "there.ckpt", "file.ckpt", "link.ckpt"}


def test_a_restored_name_is_flushed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root / f".old-x.ckpt-{ID}", step=1)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    assert remove_leftovers(root) == ()
    assert os.listdir(root) == ["x.ckpt"]
    assert flushed == [root.stat().st_ino]


def test_what_vanishes_during_a_cleanup_is_not_mentioned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / f".tmp-checkpoint-{ID}").mkdir()
    opened = os.open

    def vanish(path: os.PathLike[str], *args: int, **options: int) -> int:
        if os.fspath(path).endswith(ID):
            os.rmdir(path)
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", vanish)
    assert remove_leftovers(root) == ()


@contextlib.contextmanager
def process_that_is_saving(target: Path) -> Iterator[int]:
    """Another process that has staged a checkpoint and writes on it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        fill(directory.stage(target).path, step=1)
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(reader, 1)
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_what_a_living_process_writes_is_left_to_it_and_removed_when_it_is_dead(root: Path) -> None:
    with process_that_is_saving(root / "x.ckpt"):
        own = directory.stage(root / "y.ckpt")
        assert remove_leftovers(root) == ()
        assert len(working_entries(root)) == 2
    assert remove_leftovers(root) == ()
    assert working_entries(root) == [own.path.name]
    own.discard()


def of_another_host(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """What another host writes; its lock does not reach here."""
    with monkeypatch.context() as patch:
        patch.setattr(directory, "kernel", lambda: ("far_away", "0" * 8))
        staging = directory.stage(path)
        fill(staging.path, step=1)
        staging.close()
    return staging.path


def test_what_another_host_writes_is_left_and_both_hosts_are_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_another_host(monkeypatch, root / "x.ckpt")
    (why,) = remove_leftovers(root)
    assert "far_away" in why
    assert durable.kernel()[0] in why
    assert path.is_dir()
    assert working_entries(root) == [path.name]


@pytest.mark.parametrize("hours", [-5, 5], ids=["behind", "ahead"])
def test_what_another_host_has_left_is_removed_by_the_clock_of_the_file_system(
    root: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    path = of_another_host(monkeypatch, root / "x.ckpt")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600 * hours)  # this host's clock is wrong
    assert len(remove_leftovers(root)) == 1
    assert working_entries(root) == [path.name]
    for entry in [*path.iterdir(), path]:
        os.utime(entry, (now - 1000, now - 1000))
    assert remove_leftovers(root) == ()
    assert os.listdir(root) == []


def test_a_new_file_of_another_host_is_left_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f".tmp-file-elsewhere-{'0' * 8}-{ID}"
    (root / name).write_text("half of a file")
    assert "elsewhere" in remove_leftovers(root)[0]
    assert os.listdir(root) == [name]
    os.utime(root / name, (0, 0))
    assert remove_leftovers(root) == ()
    assert os.listdir(root) == []


def test_what_this_host_has_left_is_removed_at_once(root: Path) -> None:
    staging = directory.stage(root / "x.ckpt")
    staging.close()
    assert durable.kernel()[1] in staging.path.name
    assert remove_leftovers(root) == ()
    assert os.listdir(root) == []


def test_only_one_process_cleans_up_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / f".del-{ID}").mkdir()
    with durable.held(root):
        assert remove_leftovers(root) == ()
    with monkeypatch.context() as patch:
        patch.setattr(clean, "lock", lambda descriptor: None)
        (why,) = remove_leftovers(root)
        assert "its file system has no locks" in why
    assert os.listdir(root) == [f".del-{ID}"]
    assert remove_leftovers(root) == ()
    assert os.listdir(root) == []


def test_what_a_cleanup_cannot_delete_is_told_and_the_rest_is_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / f".tmp-checkpoint-{ID}").mkdir()
    (root / f".tmp-checkpoint-{OTHER_ID}").mkdir()
    delete = directory.delete_parts

    def refuse_one(path: Path) -> tuple[str, ...]:
        if path.name.endswith(ID):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return delete(path)

    monkeypatch.setattr(directory, "delete_parts", refuse_one)
    assert "Permission denied" in remove_leftovers(root)[0]
    assert os.listdir(root) == [f".tmp-checkpoint-{ID}"]


def test_a_cleanup_of_what_does_not_exist_does_nothing(root: Path) -> None:
    assert remove_leftovers(root / "missing") == ()


@pytest.mark.parametrize("exchanges", [True, False])
def test_cleanups_beside_saves_destroy_none_of_them(
    root: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(directory, "swap", lambda first, second: False)
    ended = threading.Event()
    cleanups: list[tuple[str, ...]] = []

    def clean_on() -> None:
        while not ended.is_set():
            cleanups.append(remove_leftovers(root))

    cleanup = threading.Thread(target=clean_on)
    cleanup.start()
    try:
        for step in range(1, 61):
            save(root / "last.ckpt", step, durability="process")
            assert step_of(root / "last.ckpt") == step
    finally:
        ended.set()
        cleanup.join()
    assert len(cleanups) > 60
    remove_leftovers(root)
    assert os.listdir(root) == ["last.ckpt"]
