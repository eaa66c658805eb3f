"""A save over a checkpoint that is killed or refused at any file-system call leaves the old one or the new one."""

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardeddp.checkpoint import directory
from shardeddp.checkpoint.clean import remove, remove_leftovers
from shardeddp.checkpoint.find import find_checkpoints
from support.crashes import Outcome, count_calls, has_strace, run, run_traced, traced_calls
from support.small_checkpoints import put, save, step_of, working_entries

pytestmark = pytest.mark.timeout(60)

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EMFILE)
CHANGING = "openat,mkdir,write,fsync,flock,rename,renameat2,unlink,unlinkat,rmdir,close,newfstatat,getdents64"


class Stage:
    """A directory in which step 2 is saved over step 1, and what must hold of it afterwards."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkpoints"
        self.target = self.root / "last.ckpt"
        self.foreign = {
            "notes.txt": "mine",
            ".tmp-notes": "mine",
            ".del-notes": "mine",
            ".old-last.ckpt-1": "mine",
        }

    def reset(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        put(self.target, step=1)
        for name, text in self.foreign.items():
            (self.root / name).write_text(text)

    def save(self) -> object:
        return save(self.target, step=2)

    def check(self, outcome: Outcome, before_cleanup: bool = True) -> int:
        """Which step is there; the same before and after the cleanup, and nothing else."""
        found = step_of(self.target) if before_cleanup else None
        left = remove_leftovers(self.root)
        step = step_of(self.target)
        assert found in (None, step)
        assert step in {"done": (2,), "refused": (1,), "killed": (1, 2)}[outcome]
        assert left == ()
        assert working_entries(self.root) == []
        assert {path.name for path in self.root.iterdir()} == {"last.ckpt", *self.foreign}
        assert [it.step for it in find_checkpoints(self.root).checkpoints] == [step]
        return step


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.reset()
    return stage


@pytest.fixture(params=["swap", "two renames"])
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "two renames":
        monkeypatch.setattr(directory, "swap", lambda first, second: False)
    return request.param == "swap"


def kill_everywhere(stage: Stage, points: list[int], swaps: bool) -> list[int]:
    steps = []
    for n in points:
        stage.reset()
        outcome = run(stage.save, n, fault=None)
        assert outcome == "killed", f"call {n}"
        steps.append(stage.check(outcome, before_cleanup=swaps))
    return steps


@pytest.mark.slow
def test_a_kill_at_any_call_of_a_save_leaves_the_old_checkpoint_or_the_new_one(
    stage: Stage, swaps: bool
) -> None:
    count = count_calls(stage.save)
    assert count > 30
    steps = kill_everywhere(stage, list(range(1, count + 1)), swaps)
    assert steps == sorted(steps), "what is committed must stay so"
    assert set(steps) == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("number", ERRNOS[:3], ids=errno.errorcode.get)
def test_an_error_of_any_call_is_a_failed_save_or_harmless(
    stage: Stage, swaps: bool, number: int
) -> None:
    count = count_calls(stage.save)
    outcomes = []
    for n in random.Random(number).sample(range(1, count + 1), 25):
        stage.reset()
        outcome = run(stage.save, n, number)
        outcomes.append(outcome)
        stage.check(outcome)
    assert "refused" in outcomes


@pytest.mark.torture
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
def test_every_error_of_every_call_is_a_failed_save_or_harmless(
    stage: Stage, swaps: bool, number: int
) -> None:
    for n in range(1, count_calls(stage.save) + 1):
        stage.reset()
        stage.check(run(stage.save, n, number))


def test_a_kill_at_any_call_of_a_deletion_leaves_a_whole_checkpoint_or_none(stage: Stage) -> None:
    def delete() -> None:
        remove(stage.target, [stage.root])

    gone = []
    for n in range(1, count_calls(delete) + 1):
        stage.reset()
        assert run(delete, n, fault=None) == "killed"
        gone.append(not stage.target.exists())
        assert gone[-1] or step_of(stage.target) == 1
        assert len(find_checkpoints(stage.root).checkpoints) == (not gone[-1])
        remove_leftovers(stage.root)
        assert working_entries(stage.root) == []
        assert stage.target.exists() is not gone[-1]
    assert gone == sorted(gone)
    assert set(gone) == {False, True}


@pytest.mark.long
@pytest.mark.slow
def test_a_kill_at_any_call_of_a_cleanup_loses_nothing(stage: Stage, tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    put(crashed / f".old-last.ckpt-{'a' * 32}", step=1)
    put(crashed / f".tmp-checkpoint-{'a' * 32}", step=2)
    put(crashed / f".tmp-file-{'b' * 32}", step=3)
    put(crashed / f".del-{'c' * 32}", step=4)

    def reset() -> None:
        shutil.rmtree(stage.root)
        shutil.copytree(crashed, stage.root)

    reset()
    count = count_calls(lambda: remove_leftovers(stage.root))
    for n in range(1, count + 1):
        reset()
        assert run(lambda: remove_leftovers(stage.root), n, fault=None) == "killed"
        remove_leftovers(stage.root)
        assert [path.name for path in stage.root.iterdir()] == ["last.ckpt"]
        assert step_of(stage.target) == 1


def traced_points(action: Callable[[], object], log: Path, calls: str) -> list[tuple[str, int]]:
    if not has_strace():
        pytest.skip("strace is not installed; the same is done from inside the process")
    try:
        return traced_calls(action, log, calls)
    except PermissionError as error:
        pytest.skip(f"strace may not attach to a process: {error}")


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_kill_at_any_system_call_of_a_save_leaves_the_old_checkpoint_or_the_new_one(
    stage: Stage, swaps: bool, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    points = traced_points(stage.save, log, "%file,%desc")
    steps = []
    for name, n in points:
        stage.reset()
        outcome = run_traced(stage.save, log, "%file,%desc", f"{name}:signal=KILL:when={n}")
        steps.append(stage.check(outcome, before_cleanup=swaps))
    assert set(steps) == {1, 2}


@pytest.mark.torture
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
def test_every_error_of_every_system_call_is_a_failed_save_or_harmless(
    stage: Stage, number: int, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    for name, n in traced_points(stage.save, log, CHANGING):
        stage.reset()
        inject = f"{name}:error={errno.errorcode[number]}:when={n}"
        stage.check(run_traced(stage.save, log, CHANGING, inject))
