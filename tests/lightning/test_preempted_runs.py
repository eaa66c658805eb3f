"""Signals to any ranks end a run in one batch with a checkpoint; an error on one rank holds up nobody.

Real processes get real signals, at moments that are drawn; whatever hangs runs into a timeout.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardeddp.checkpoint.verify import verify
from shardeddp.lightning.preemption import EXIT_CODE, FILE_NAME
from support.preemption import EVERY_RANK, TORCHRUN, Job, job

pytestmark = pytest.mark.timeout(150)

GRACE_S = 20.0
LAUNCHERS: dict[str, Sequence[str] | None] = {"script": (), "torchrun": TORCHRUN, "each": None}
SUBSETS = ([0], [1], [0, 1])


def send(pids: dict[int, int], ranks: Sequence[int], signum: int = signal.SIGTERM) -> None:
    """One signal to each of some ranks."""
    for rank in ranks:
        os.kill(pids[rank], signum)


def assert_preempted(running: Job, launcher: str) -> None:
    """Ended in time and in one step, by the signal, on all ranks."""
    codes = running.wait(GRACE_S)
    assert codes == ([1] if launcher == "torchrun" else [EXIT_CODE] * len(codes)), running.stderr()
    heard = [(each["rank"], each["heard"]) for each in running.said() if "heard" in each]
    assert sorted(heard) == [(0, "SIGTERMException"), (1, "SIGTERMException")]
    assert all(each["received_sigterm"] for each in running.said() if "heard" in each)
    last = [
        max(each["step"] for each in running.said() if "step" in each and each["rank"] == rank)
        for rank in (0, 1)
    ]
    assert last[0] == last[1]
    if launcher != "torchrun":  # whose agent reports how its ranks have ended
        assert "Traceback" not in running.stderr()


def finish(folder: Path, *arguments: str) -> tuple[list[str], int]:
    """Run to the end; the final weights of the ranks, and the first step."""
    with job(folder, *arguments) as running:
        assert running.wait(60) == [0], running.stderr()
        said = running.said()
    return [each["digest"] for each in said if "digest" in each], min(
        each["step"] for each in said if "step" in each
    )


def preempt(
    folder: Path, launcher: str, ranks: Sequence[int], moment_s: float, *arguments: str
) -> Path:
    """Run, send SIGTERM at a moment after the first steps, and check how the run ends; the checkpoint."""
    with job(folder / "first", str(folder), *arguments, launcher=LAUNCHERS[launcher]) as running:
        pids = running.pids()
        time.sleep(moment_s)
        send(pids, ranks)
        assert_preempted(running, launcher)
    return folder / FILE_NAME


def draw(count: int, seed: int) -> list[tuple[str, list[int], float]]:
    """Launchers, ranks and moments."""
    chance = random.Random(seed)
    names = list(LAUNCHERS)
    return [(names[i % 3], chance.choice(SUBSETS), chance.uniform(0.0, 0.5)) for i in range(count)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks", "moment_s"), draw(3, seed=1))
def test_a_signal_to_any_ranks_ends_all_in_one_step(
    tmp_path: Path, launcher: str, ranks: list[int], moment_s: float
) -> None:
    assert preempt(tmp_path, launcher, ranks, moment_s).exists()


@pytest.mark.torture
@pytest.mark.timeout(380)
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_signals_leave_ten_whole_checkpoints_and_runs_that_go_on_exactly(
    tmp_path: Path, seed: int
) -> None:
    options = ("--epoch", "7")
    for index, (launcher, ranks, moment_s) in enumerate(draw(10, seed)):
        folder = tmp_path / str(index)
        path = preempt(folder, launcher, ranks, moment_s, *options)
        assert verify(path) == [], (seed, index)
    straight, _ = finish(tmp_path / "straight", str(tmp_path), "--steps", "150", *options)
    resumed, first = finish(
        folder / "second", str(folder), "--steps", "150", *options, "--resume", str(path)
    )
    assert (resumed, first > 0) == (straight, True), (seed, launcher, ranks, moment_s)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--accumulate", "3", "--epoch", "7"),
        pytest.param((), marks=pytest.mark.torture),
        pytest.param(("--epoch", "1"), marks=pytest.mark.torture),
    ],
)
def test_a_preempted_run_goes_on_exactly(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    straight, _ = finish(tmp_path / "straight", str(tmp_path), "--steps", "60", *arguments)
    path = preempt(tmp_path, "each", [1], 0.1, *arguments)
    resumed, first = finish(
        tmp_path / "second", str(tmp_path), "--steps", "60", "--resume", str(path), *arguments
    )
    assert resumed == straight
    assert 2 < first < 60


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "name"),
    [
        ("last", "last.ckpt"),
        pytest.param("beside", FILE_NAME, marks=pytest.mark.torture),
        ("on_exception", "excepted.ckpt"),
        pytest.param("exception", "excepted.ckpt", marks=pytest.mark.torture),
    ],
)
def test_it_is_saved_once_where_a_callback_wants_it(tmp_path: Path, save: str, name: str) -> None:
    with job(tmp_path / "first", str(tmp_path / "out"), "--save", save, launcher=None) as running:
        send(running.pids(), [0])
        assert_preempted(running, "each")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.long
@pytest.mark.slow
def test_more_signals_change_nothing_and_the_handler_of_the_user_hears_all(tmp_path: Path) -> None:
    with job(tmp_path / "first", str(tmp_path), "--own-handler", launcher=None) as running:
        pids = running.pids()
        for _ in range(3):
            send(pids, [1])
            time.sleep(0.005)
        assert_preempted(running, "each")
        assert sum("user" in each for each in running.said()) in (
            1,
            2,
            3,
        )  # signals that wait for Python become one
    assert (tmp_path / FILE_NAME).exists()


@pytest.mark.long
@pytest.mark.slow
def test_sigusr1_does_the_same(tmp_path: Path) -> None:
    with job(tmp_path / "first", str(tmp_path), launcher=None) as running:
        send(running.pids(), [1], signal.SIGUSR1)
        assert_preempted(running, "each")
    assert (tmp_path / FILE_NAME).exists()


# -- SLURM


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [SUBSETS[1], *(pytest.param(ranks, marks=pytest.mark.torture) for ranks in SUBSETS)]
)
def test_slurm_requeues_once_and_training_goes_on_until_it_ends_the_job(
    tmp_path: Path, ranks: list[int]
) -> None:
    calls = tmp_path / "calls"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    scontrol.chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    with job(tmp_path / "first", str(out), scontrol=scontrol.parent) as running:
        pids = running.pids()
        send(pids, ranks)  # SIGTERM, which is passed over where SLURM requeues
        for _ in range(2):
            send(pids, ranks, signal.SIGUSR1)
            time.sleep(0.1)
        while not calls.exists():  # the test's time limit ends this
            time.sleep(0.01)
        steps = max(each["step"] for each in running.said() if "step" in each)
        running.pids(step=steps + 5)
        send(pids, ranks)  # and which is how SLURM ends a job that it has been given back
        assert_preempted(running, "each")
    assert calls.read_text() == "requeue 4711\n"
    assert [path.name for path in out.iterdir()] == ["hpc_ckpt_1.ckpt"]


# -- errors


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "rank", "save"),
    [
        ("script", 1, "exception"),
        *(
            pytest.param(launcher, rank, save, marks=pytest.mark.torture)
            for launcher, rank, save in itertools.product(
                ("script", "each"), (0, 1), ("exception", "on_exception")
            )
        ),
    ],
)
def test_an_error_on_one_rank_ends_all_with_what_it_was(
    tmp_path: Path, save: str, rank: int, launcher: str
) -> None:
    arguments = (str(tmp_path / "out"), "--save", save, "--fail-on", str(rank))
    with job(tmp_path / "first", *arguments, launcher=LAUNCHERS[launcher]) as running:
        running.pids(step=1)
        assert all(code != 0 for code in running.wait(GRACE_S)), running.stderr()
        text = running.stderr()
    assert f"LookupError: rank {rank} lost its data" in text
    assert "nothing is saved on exception: that needs every rank" in text
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "save", ["on_exception", pytest.param("exception", marks=pytest.mark.torture)]
)
def test_an_error_on_all_ranks_is_saved(tmp_path: Path, save: str) -> None:
    arguments = (str(tmp_path / "out"), "--save", save, "--fail-on", str(EVERY_RANK))
    with job(tmp_path / "first", *arguments, launcher=None) as running:
        assert running.wait(60) == [1, 1]
        assert "nothing is saved" not in running.stderr()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["excepted.ckpt"]
