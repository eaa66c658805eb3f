"""Checkpoints in object stores: whole or not at all, whatever fails and wherever a process is killed."""

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from shardeddp.checkpoint import clean, remote, remote_directory
from shardeddp.checkpoint.find import (
    checkpoints_in,
    find_checkpoints,
    last_checkpoints,
    read_manifest,
)
from shardeddp.checkpoint.location import location
from shardeddp.checkpoint.manifest import FOLDER, MANIFEST
from shardeddp.checkpoint.read import CheckpointReader
from shardeddp.checkpoint.remote import RemotePath
from shardeddp.checkpoint.verify import verify
from shardeddp.checkpoint.write import write_checkpoint
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError, DamagedCheckpointError
from shardeddp.plan.layout import Interval
from support.host_groups import all_ranks
from support.object_stores import Shelf, die_at, s3_server, use_s3, use_shelf
from support.torture_saves import ROW, run_of, snapshot_of, weight
from world import Worlds

pytestmark = pytest.mark.timeout(120)

ROWS = 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    """An empty place in a store that other processes see as well."""
    monkeypatch.setattr(remote, "DELAYS_S", (0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(Shelf, "operations", 0)
    monkeypatch.setattr(Shelf, "fault", None)
    use_shelf()
    yield RemotePath(f"shelf://{tmp_path}/run")


def save(target: Any, step: int, rows: int = ROWS) -> None:
    snapshot = snapshot_of(step, rows=rows)
    write_checkpoint(snapshot, location(target), run_of(step), all_ranks(), CheckpointOptions())


def step_in(target: Any, rows: int = ROWS) -> int | None:
    """The step of a checkpoint, every element of which is that step's; None if there is none."""
    if not remote_directory.carries_manifest(location(target)):
        return None
    reader = CheckpointReader(location(target))
    step = reader.manifest.run.step
    for name, tensor in reader.tensors.items():
        found = reader.read(name, Interval(0, tensor.numel))
        assert torch.equal(found.view(rows, ROW), weight(step, rows)), (target, step)
    assert verify(target) == []
    return step


def objects(folder: RemotePath) -> list[str]:
    root = str(folder).removeprefix("shelf://")
    return sorted(
        os.path.relpath(os.path.join(at, name), root)
        for at, _, names in os.walk(root)
        for name in names
    )


# -- a checkpoint's life


def test_a_save_in_a_store_replaces_the_one_before_and_leaves_nothing_of_it(
    folder: RemotePath,
) -> None:
    for step in (1, 2):
        save(folder / "last.ckpt", step)
        assert step_in(folder / "last.ckpt") == step
        folders = {name.split("/")[1] for name in objects(folder)} - {MANIFEST}
        assert folders == {read_manifest(folder / "last.ckpt").folder}
    clean.remove(str(folder / "last.ckpt"), [str(folder)])
    assert objects(folder) == []
    assert step_in(folder / "last.ckpt") is None


def test_a_save_reads_what_it_has_written_by_the_file_and_not_by_the_tensor(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def note(name: str, path: str) -> str:
        if name == "cat":
            read.append(os.path.basename(path))
        return ""

    monkeypatch.setattr(Shelf, "fault", note)
    snapshot = snapshot_of(1, rows=ROWS, tensors=20)
    write_checkpoint(snapshot, folder / "a.ckpt", run_of(1), all_ranks(), CheckpointOptions())
    assert read
    assert len(read) == len(set(read))


def test_a_checkpoint_of_a_store_is_read_where_it_was_copied_to(
    folder: RemotePath, tmp_path: Path
) -> None:
    save(folder / "last.ckpt", 3)
    copied = Path(str(folder / "last.ckpt").removeprefix("shelf://"))
    assert step_in(copied) == 3
    assert [found.step for found in find_checkpoints(copied.parent).checkpoints] == [3]


def test_a_checkpoint_of_a_directory_is_read_from_a_store(
    folder: RemotePath, tmp_path: Path
) -> None:
    save(tmp_path / "run" / "a.ckpt", 3)
    assert step_in(folder / "a.ckpt") == 3


def test_the_last_checkpoint_is_the_one_of_the_highest_step(folder: RemotePath) -> None:
    for name, step in (("b.ckpt", 3), ("a.ckpt", 7), ("last.ckpt", 5)):
        save(folder / name, step)
    assert [it.step for it in find_checkpoints(folder).checkpoints] == [3, 5, 7]
    assert last_checkpoints([str(folder / "last.ckpt")], [str(folder)])[0] == folder / "a.ckpt"
    assert checkpoints_in(folder)[0] == folder / "a.ckpt"


@pytest.mark.parametrize("kind", ["missing", "short", "changed"])
def test_what_is_not_as_it_was_written_is_named(folder: RemotePath, kind: str) -> None:
    save(folder / "last.ckpt", 1)
    held = folder / "last.ckpt" / read_manifest(folder / "last.ckpt").folder / "__0_0.distcp"
    content = held.get(0, held.nbytes())
    if kind == "missing":
        held.delete()
    else:
        held.put(content[:-1] if kind == "short" else content.replace(b"\x3f", b"\x3e"))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp") as caught:
        step_in(folder / "last.ckpt")
    assert isinstance(caught.value, DamagedCheckpointError) == (kind == "changed")
    assert [each.file for each in verify(folder / "last.ckpt")] != []
    assert (len(find_checkpoints(folder).skipped) == 1) == (kind != "changed")


def test_nothing_but_a_checkpoint_is_replaced_or_deleted(folder: RemotePath) -> None:
    (folder / "notes.ckpt" / "thesis.txt").put(b"mine")
    (folder / "table").put(b"mine")
    for name in ("notes.ckpt", "table"):
        with pytest.raises(CheckpointError, match="no checkpoint of this package"):
            save(folder / name, 1)
        with pytest.warns(UserWarning, match="was not deleted"):
            clean.remove(str(folder / name), [str(folder)])
    save(folder / "last.ckpt", 1)
    with pytest.warns(UserWarning, match="lies outside of"):
        clean.remove(str(folder / "last.ckpt"), [str(folder / "other")])
    assert step_in(folder / "last.ckpt") == 1
    assert {"notes.ckpt/thesis.txt", "table"} <= {*objects(folder)}


def test_a_cleanup_deletes_what_killed_saves_have_left_a_day_ago_and_nothing_else(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder / "last.ckpt", 1)
    for checkpoint in ("last.ckpt", "never.ckpt"):
        for part in ("__0_0.distcp", "state.json"):
            (folder / checkpoint / ("ab" * 16) / part).put(b"cut short")
        (folder / checkpoint / ("cd" * 16) / "thesis.txt").put(b"mine")
    before = objects(folder)
    assert clean.remove_leftovers(folder) == ()  # it may still be written to
    assert objects(folder) == before
    monkeypatch.setattr(remote_directory, "ABANDONED_S", -1.0)
    assert clean.remove_leftovers(folder) == ()
    assert {*before} - {*objects(folder)} == {name for name in before if "abab" in name}
    assert step_in(folder / "last.ckpt") == 1
    assert [it.name for it in find_checkpoints(folder).checkpoints] == ["last.ckpt"]


# -- faults


@pytest.mark.slow
def test_of_a_hundred_faults_none_makes_a_partial_checkpoint(folder: RemotePath) -> None:
    chance, faults, saved, failed = random.Random(0), 0, 0, 0
    down = 0  # operations for which the store stays away

    def fault(name: str, path: str) -> str:
        nonlocal faults, down
        if down == 0 and chance.random() < 0.02:
            down = 12
        if down or chance.random() < 0.08:
            down = max(0, down - 1)
            faults += 1
            return chance.choice(["before", "after"])
        return ""

    held, step = None, 0
    while faults < 300 or not failed or saved < 10:
        step += 1
        Shelf.fault = fault
        try:
            save(folder / "last.ckpt", step)
            expected: tuple[int | None, ...] = (step,)
            saved += 1
        except CheckpointError:
            expected = (held, step)  # an error may come after the commit
            failed += 1
        Shelf.fault = None
        down = 0
        held = step_in(folder / "last.ckpt")
        assert held in expected
        found = [it.step for it in find_checkpoints(folder).checkpoints]
        assert found == ([] if held is None else [held])
    # Whatever failed saves have left, a later cleanup finds.
    remote_directory.ABANDONED_S, kept = -1.0, remote_directory.ABANDONED_S
    clean.remove_leftovers(folder)
    remote_directory.ABANDONED_S = kept
    assert len({name.split("/")[1] for name in objects(folder) if FOLDER.search(name)}) == 1


def test_a_manifest_that_arrives_in_spite_of_an_error_commits_the_save(folder: RemotePath) -> None:
    save(folder / "last.ckpt", 1)

    def fault(name: str, path: str) -> str:
        return "after" if name == "put" and path.endswith(MANIFEST) else ""

    Shelf.fault = fault
    save(folder / "last.ckpt", 2)
    Shelf.fault = None
    assert step_in(folder / "last.ckpt") == 2


def test_a_store_that_loses_an_upload_gets_no_manifest(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder / "last.ckpt", 1)
    whole = RemotePath.list

    def without(self: RemotePath) -> dict[str, int | None]:
        return {name: size for name, size in whole(self).items() if name != "__0_0.distcp"}

    monkeypatch.setattr(RemotePath, "list", without)
    with pytest.raises(
        CheckpointError, match=r"was not committed: the store has __0_0\.distcp not"
    ):
        save(folder / "last.ckpt", 2)
    monkeypatch.undo()
    use_shelf()
    assert step_in(folder / "last.ckpt") == 1


def save_as_rank(target: str, step: int, fails_on: int) -> str:
    use_shelf()
    group = all_ranks()
    Shelf.fault = None
    if group.rank == fails_on:
        remote.DELAYS_S = ()

        def fault(name: str, path: str) -> str:
            return "before" if name == "part" else ""

        Shelf.fault = fault
    try:
        snapshot = snapshot_of(step, group.rank, group.size)
        run = run_of(step, group.size)
        write_checkpoint(snapshot, location(target), run, group, CheckpointOptions())
    except CheckpointError as error:
        return str(error)
    finally:
        Shelf.fault = None
    return ""


def test_an_upload_that_fails_on_one_rank_fails_the_save_on_all(
    folder: RemotePath, world: Worlds
) -> None:
    target = str(folder / "last.ckpt")
    assert world(2).run(save_as_rank, target, 1, -1) == ["", ""]
    first, second = world(2).run(save_as_rank, target, 2, 1)
    assert "__1_0.distcp failed" in first
    assert "__1_0.distcp failed" in second
    assert step_in(target) == 1
    assert len({name.split("/")[1] for name in objects(folder)}) == 2  # the manifest, one folder


def save_slowly(target: str, steps: int) -> list[int | None]:
    """The steps that are read after each save, in a store that answers each rank after other times."""
    use_shelf()
    group = all_ranks()
    chance = random.Random(group.rank)

    def fault(name: str, path: str) -> str:
        time.sleep(0.5 if chance.random() < 0.05 else 0.02 * chance.random())
        return ""

    Shelf.fault, found = fault, []
    try:
        for step in range(1, steps + 1):
            snapshot = snapshot_of(step, group.rank, group.size)
            run = run_of(step, group.size)
            write_checkpoint(snapshot, location(target), run, group, CheckpointOptions())
            found.append(step_in(target))
            dist.barrier()  # nobody saves before all have read
    finally:
        Shelf.fault = None
    return found


@pytest.mark.long
@pytest.mark.slow
def test_a_store_that_answers_late_has_the_same_checkpoints(
    folder: RemotePath, world: Worlds
) -> None:
    target = str(folder / "last.ckpt")
    assert world(4).run(save_slowly, target, 5) == [[1, 2, 3, 4, 5]] * 4
    assert verify(folder / "last.ckpt") == []
    assert len({name.split("/")[1] for name in objects(folder)}) == 2  # the manifest, one folder


# -- kills


def save_until_killed(target: str, step: int, at: int) -> None:
    use_shelf()
    Shelf.operations = 0
    Shelf.fault = die_at(at)
    save(target, step)


@pytest.mark.slow
def test_a_process_killed_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(
    folder: RemotePath,
) -> None:
    forks, held, kills, seen = multiprocessing.get_context("fork"), None, 0, set[bool]()
    for first in (True, False):  # where there is nothing, and over a checkpoint
        for at in range(1, 200):
            if first:
                clean.remove(str(folder / "last.ckpt"), [str(folder)])
                held = None
            process = forks.Process(
                target=save_until_killed, args=(str(folder / "last.ckpt"), 1000 * first + at, at)
            )
            process.start()
            process.join()
            before, held = held, step_in(folder / "last.ckpt")
            assert held in (before, 1000 * first + at)
            seen.add(held == before)
            if process.exitcode == 0:
                break
            kills += 1
        assert process.exitcode == 0
    assert kills > 30
    assert seen == {True, False}


def save_all_the_time(address: str, target: str, first: int, ready: Any) -> None:
    use_s3(address)
    location(target).list()  # the client is made
    ready.send(None)
    for step in range(first, first + 1000):
        save(target, step, rows=400)


@pytest.mark.stores
@pytest.mark.torture
@pytest.mark.timeout(390)
@pytest.mark.parametrize("part", range(4))
def test_a_hundred_kills_at_any_time_leave_whole_checkpoints_in_a_server_of_s3(part: int) -> None:
    chance, held, saves = random.Random(part), 0, 0
    forks = multiprocessing.get_context("forkserver")  # without this process's threads
    forks.set_forkserver_preload([__name__])
    with s3_server() as address:
        for kill in range(25):
            here, there = forks.Pipe()
            arguments = (address, "s3://bucket/run/last.ckpt", held + 1, there)
            process = forks.Process(target=save_all_the_time, args=arguments)
            process.start()
            here.recv()
            time.sleep(chance.uniform(0.0, 2.0))
            process.kill()
            process.join()
            found = step_in("s3://bucket/run/last.ckpt", rows=400) or 0
            assert found >= held, kill
            held, saves = found, saves + (found > held)
    assert saves > 5


# -- a server of S3


@pytest.mark.stores
def test_checkpoints_live_in_a_server_of_s3() -> None:
    with s3_server() as address:
        target = "s3://bucket/run/last.ckpt"
        for step in (1, 2):
            save(target, step, rows=40_000)  # 40 MB
            assert step_in(target, rows=40_000) == step
        names = fsspec.filesystem("s3").find("bucket")
        assert len({name.split("/")[3] for name in names}) == 2  # the manifest, one folder
        # Any server of files will do for reading.
        web = f"{address}/bucket/run/last.ckpt"
        assert CheckpointReader(location(web)).manifest.run.step == 2
        assert verify(web) == []
        clean.remove(target, ["s3://bucket/run"])
        fsspec.filesystem("s3").invalidate_cache()
        assert fsspec.filesystem("s3").find("bucket") == []
