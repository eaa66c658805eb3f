"""A save that is killed or refused by the system anywhere ends the same on all ranks: entirely old or entirely new."""

import errno
import os
import random
import re
import shutil
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardeddp.checkpoint.clean import remove_leftovers
from shardeddp.checkpoint.find import WORKING_NAME, find_checkpoints
from shardeddp.comm import all_gather_bytes
from shardeddp.errors import CheckpointError
from support import crashes
from support.host_groups import all_ranks
from support.torture_saves import Strike, alone, disk_of, save, step_of
from world import Worlds

pytestmark = pytest.mark.timeout(60)

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EMFILE)
TARGET = "last.ckpt"
ROWS = 64


def attempt(target: Path, step: int, context: Any) -> list[str]:
    """Save on all ranks; each one's error, "" for none, by rank."""
    text = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what could not be deleted after the commit
        try:
            with context:
                save(target, step, rows=ROWS)
        except CheckpointError as error:
            text = str(error)
        return [answer.decode() for answer in all_gather_bytes(text.encode(), all_ranks())]


def check(target: Path, step: int, texts: list[str]) -> bool:
    """Whether it was saved: all ranks say the same, and the file system says it as well."""
    assert len(set(texts)) == 1, f"ranks end differently: {texts}"
    failed = texts[0] != ""
    assert step_of(target) == step - failed, texts[0]
    if dist.get_rank() == 0:
        assert remove_leftovers(target.parent) == ()
        found = os.listdir(target.parent)
        assert found == [target.name], f"{found} is left"
    dist.barrier()
    return not failed


def fail_at(
    folder: str, number: int, victim: int, points: int | None, seed: int = 0
) -> Counter[str]:
    """Let calls of a save fail on one rank, one call in each save."""
    target, step = Path(folder) / TARGET, 1
    assert attempt(target, step, nullcontext()) == ["", ""]
    counting = Strike(0)
    attempt(target, step, counting)
    count = int(all_gather_bytes(str(counting.seen).encode(), all_ranks())[victim])
    chosen = random.Random(seed).sample(
        range(1, count + 1), count if points is None else min(points, count)
    )
    results: Counter[str] = Counter()
    for n in chosen:
        strike = Strike(n if dist.get_rank() == victim else 0, number)
        texts = attempt(target, step + 1, strike)
        saved = check(target, step + 1, texts)
        step += saved
        results["saved" if saved else "refused"] += 1
        if not saved:
            assert os.strerror(number) in texts[0], texts[0]
            assert folder in texts[0], texts[0]
        if n % 10 == 0:
            step += 1
            assert attempt(target, step, nullcontext()) == ["", ""], "a save after one that failed"
            assert step_of(target) == step
    return results


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_call_that_fails_on_one_rank_fails_the_save_on_all_or_is_harmless(
    world: Worlds, tmp_path: Path, number: int, victim: int
) -> None:
    for results in world(2).run(fail_at, str(tmp_path), number, victim, 6, number):
        assert results.total() >= 4


@pytest.mark.torture
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("victim", [0, 1])
def test_every_call_that_fails_on_one_rank_fails_the_save_on_all_or_is_harmless(
    world: Worlds, tmp_path: Path, number: int, victim: int
) -> None:
    results = world(2).run(fail_at, str(tmp_path), number, victim, None, timeout_s=250)[0]
    print(errno.errorcode[number], victim, dict(results))
    assert results["refused"] >= 4


# -- a full disk


def fill_disk(
    folder: str, victim: int, budgets: list[int], reports_free: bool
) -> list[tuple[int, str]]:
    """Save with less and less room on one rank."""
    target, step, results = Path(folder) / TARGET, 1, []
    assert attempt(target, step, nullcontext()) == ["", ""]
    for budget in budgets:
        limited = dist.get_rank() == victim
        texts = attempt(
            target, step + 1, disk_of(budget, reports_free) if limited else nullcontext()
        )
        step += check(target, step + 1, texts)
        results.append((budget, texts[0]))
    assert attempt(target, step + 1, nullcontext()) == ["", ""], "a save on a disk with room again"
    assert step_of(target) == step + 1
    return results


@pytest.mark.loop(1)
@pytest.mark.parametrize("reports_free", [True, False], ids=["tells what is free", "does not tell"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_is_full_at_any_byte_refuses_the_save_on_all_ranks(
    world: Worlds, tmp_path: Path, victim: int, reports_free: bool
) -> None:
    budgets = [0, 1, *(round(45_000 * part / 17) for part in range(1, 18)), 1_000_000]
    results = world(2).run(fill_disk, str(tmp_path), victim, budgets, reports_free)[0]
    refused = [text for _, text in results if text]
    assert len(refused) >= 10
    assert results[-1] == (1_000_000, "")
    for text in refused:
        assert str(tmp_path) in text
        assert re.search(r"[\d,]+ bytes (were|are) needed", text), text
        assert "free" in text or "full" in text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def save_into(folder: str, rooms: list[int]) -> list[str]:
    """Save on a real file system that something else has filled up to some bytes."""
    checkpoints, ballast, step, results = (
        Path(folder) / "checkpoints",
        Path(folder) / "ballast",
        1,
        [],
    )
    target = checkpoints / TARGET
    assert attempt(target, step, nullcontext()) == ["", ""]
    for room in rooms:
        if dist.get_rank() == 0:
            found = os.statvfs(folder)
            ballast.write_bytes(bytes(found.f_bavail * found.f_frsize - room))
        dist.barrier()
        texts = attempt(target, step + 1, nullcontext())
        step += check(target, step + 1, texts)
        results.append(texts[0])
        if dist.get_rank() == 0:
            ballast.unlink()
        dist.barrier()
    return results


def test_a_real_disk_that_is_full_refuses_the_save_on_all_ranks(
    world: Worlds, small_disk: Path
) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    results = world(2).run(
        save_into, str(small_disk), [number * page for number in [0, 8, *range(16, 34)]]
    )[0]
    full = [text for text in results if text]
    assert all(
        str(small_disk) in text
        and re.search(r"[\d,]+ bytes (were|are) needed, [\d,]+ are free", text)
        for text in full
    )
    assert any("not enough space" in text for text in full), "refused before the first byte"
    assert any("No space left" in text for text in full), "refused in the middle"
    assert results[-1] == ""


# -- a kill, in a world of one rank


class Stage:
    """A directory in which step 2 is saved over step 1."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stores = 0
        self.checkpoints = root / "checkpoints"
        self.reset()
        assert crashes.run(self.act(1), 0, None) == "done"
        shutil.copytree(self.checkpoints, root / "old")

    def reset(self) -> None:
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        if (self._root / "old").exists():
            shutil.copytree(self._root / "old", self.checkpoints)

    def act(self, step: int) -> crashes.Action:
        self._stores += 1
        return alone(
            lambda: save(self.checkpoints / TARGET, step), self._root / f"store-{self._stores}"
        )

    def check(self) -> int:
        before = step_of(self.checkpoints / TARGET)
        assert remove_leftovers(self.checkpoints) == ()
        assert [name for name in os.listdir(self.checkpoints) if WORKING_NAME.fullmatch(name)] == []
        assert [it.step for it in find_checkpoints(self.checkpoints).checkpoints] == [before]
        return before


def kill_at(stage: Stage, points: list[int]) -> list[int]:
    steps = []
    for n in points:
        stage.reset()
        assert crashes.run(stage.act(2), n, fault=None) == "killed"
        steps.append(stage.check())
    assert steps == sorted(steps), "what is committed must stay so"
    return steps


@pytest.mark.slow
def test_a_kill_at_some_call_of_a_whole_save_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    count = crashes.count_calls(stage.act(2))
    draw = random.Random(1).sample(range(1, count), 15)
    assert set(kill_at(stage, [1, *sorted(draw), count])) == {1, 2}


@pytest.mark.torture
@pytest.mark.timeout(300)
def test_a_kill_at_every_call_of_a_whole_save_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    count = crashes.count_calls(stage.act(2))
    steps = kill_at(stage, list(range(1, count + 1)))
    print(f"{count} calls: {steps.count(1)} times the old one, {steps.count(2)} times the new one")
    assert set(steps) == {1, 2}


@pytest.mark.torture
@pytest.mark.timeout(380)
def test_a_kill_at_every_system_call_of_a_whole_save_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path,
) -> None:
    if not crashes.has_strace():
        pytest.skip("strace is not installed; the same is done from inside the process")
    stage, log = Stage(tmp_path), tmp_path / "calls"
    calls = "mkdir,fsync,write,writev,pwrite64,ftruncate,flock,rename,renameat,renameat2,unlink,unlinkat,rmdir"
    try:
        points = crashes.traced_calls(stage.act(2), log, calls)
    except PermissionError as error:
        pytest.skip(f"strace may not attach to a process: {error}")
    steps = []
    for name, n in points:
        stage.reset()
        assert (
            crashes.run_traced(stage.act(2), log, calls, f"{name}:signal=KILL:when={n}") == "killed"
        )
        steps.append(stage.check())
    print(
        f"{len(points)} system calls: {steps.count(1)} times the old one, {steps.count(2)} times the new one"
    )
    assert set(steps) == {1, 2}
