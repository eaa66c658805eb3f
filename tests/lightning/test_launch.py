"""How processes start and end: scripts, torchrun, spawn and fork; and what remains when one rank fails."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from shardeddp import ShardedDP
from shardeddp.checkpoint.contents import open_checkpoint
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES, ShardingStrategy
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = str(TESTS / "support" / "script.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.timeout(150)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A script that has ended."""

    code: int
    stdout: str
    stderr: str
    leftover: bool
    """Whether processes that it started outlived it."""

    @property
    def said(self) -> list[dict[str, Any]]:
        """What it said about itself, by rank."""
        lines = [
            line.removeprefix("said ")
            for line in self.stdout.splitlines()
            if line.startswith("said ")
        ]
        return sorted((json.loads(line) for line in lines), key=lambda said: said["rank"])


def run_script(*arguments: str, launcher: Sequence[str] = (), timeout_s: float = 100) -> Finished:
    """Run the script in a process group of its own, of which nothing may be left."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launcher, SCRIPT, *arguments]
    process = subprocess.Popen(
        command,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        leftover = not wait_for_end_of_group(process.pid)
    finally:
        kill_group(process.pid)
        process.wait()
    return Finished(code=process.returncode, stdout=stdout, stderr=stderr, leftover=leftover)


def wait_for_end_of_group(group: int, patience_s: float = 5.0) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def weights(path: Path) -> dict[str, Tensor]:
    opened = open_checkpoint(path, None) if path.is_dir() else torch.load(path, weights_only=True)
    return {name: tensor + 0 for name, tensor in opened["state_dict"].items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# -- a script


@pytest.fixture(scope="module")
def by_script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, dict[str, Tensor]]:
    """A script that starts its second rank itself, and the weights that it saved."""
    folder = tmp_path_factory.mktemp("script")
    finished = run_script(str(folder), "sharded_dp")
    assert finished.code == 0, finished.stderr
    return finished, weights(folder / "sharded_dp.ckpt")


@pytest.mark.long
@pytest.mark.slow
def test_a_script_trains_tests_predicts_and_saves_on_every_rank(
    by_script: tuple[Finished, Any],
) -> None:
    said = by_script[0].said
    assert [each["rank"] for each in said] == [0, 1]
    for each in said:
        assert (each["is_ours"], each["saved"], each["plain"], each["predictions"]) == (
            True,
            True,
            False,
            2,
        )
    assert said[0]["test"] == said[1]["test"]


@pytest.mark.slow
def test_ranks_of_one_machine_listen_on_loopback_alone(by_script: tuple[Finished, Any]) -> None:
    assert [each["listens_on"] for each in by_script[0].said] == [["127.0.0.1"]] * 2


@pytest.mark.slow
def test_a_script_ends_without_a_word_and_leaves_no_process(
    by_script: tuple[Finished, Any],
) -> None:
    finished = by_script[0]
    assert finished.stderr == ""
    assert not finished.leftover
    others = [line for line in finished.stdout.splitlines() if not line.startswith("said ")]
    assert others == []


@pytest.mark.long
@pytest.mark.slow
def test_torchrun_gives_the_same(
    by_script: tuple[Finished, dict[str, Tensor]], tmp_path: Path
) -> None:
    finished = run_script(str(tmp_path), "sharded_dp", launcher=TORCHRUN)
    assert finished.code == 0, finished.stderr
    assert finished.said == by_script[0].said
    assert finished.stderr == ""
    assert not finished.leftover
    assert_equal(weights(tmp_path / "sharded_dp.ckpt"), by_script[1])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("sharded_dp_fork",),
        ("sharded_dp_spawn", "--only-fit"),
        ("sharded_dp_fork", "--deferred"),
        pytest.param(("sharded_dp_spawn", "--only-fit", "--deferred"), marks=pytest.mark.torture),
    ],
)
def test_forked_and_spawned_ranks_bring_the_full_weights_back(
    by_script: tuple[Finished, dict[str, Tensor]], tmp_path: Path, options: tuple[str, ...]
) -> None:
    finished = run_script(str(tmp_path), *options)
    assert finished.code == 0, finished.stderr
    assert not finished.leftover
    (said,) = finished.said
    assert (said["is_ours"], said["saved"], said["plain"]) == (True, True, True)
    assert (said["beside"], said["noted"], said["follows"]) == ([0, 1, 2], "cpu", True)
    if "--only-fit" not in options:
        assert said["test"] == by_script[0].said[0]["test"]
    assert_equal(weights(tmp_path / f"{options[0]}.ckpt"), by_script[1])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_an_exception_on_one_rank_ends_the_script_on_all(tmp_path: Path, rank: int) -> None:
    finished = run_script(str(tmp_path), "sharded_dp", "--fail-on", str(rank), timeout_s=60)
    assert finished.code != 0
    assert f"LookupError: rank {rank} lost its data" in finished.stderr
    assert finished.said == []
    assert not finished.leftover


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rank", "killed"),
    [
        ("sharded_dp_fork", 1, True),
        ("sharded_dp_notebook", 0, False),
        ("sharded_dp_spawn", 0, True),
        pytest.param("sharded_dp_fork", 1, False, marks=pytest.mark.torture),
        pytest.param("sharded_dp_notebook", 0, True, marks=pytest.mark.torture),
        pytest.param("sharded_dp_spawn", 0, False, marks=pytest.mark.torture),
    ],
)
def test_the_process_that_has_started_the_ranks_is_told_which_has_failed_and_why(
    tmp_path: Path, strategy: str, rank: int, killed: bool
) -> None:
    how = ("--fail-on", str(rank), *(["--killed"] if killed else []))
    finished = run_script(str(tmp_path), strategy, *how, timeout_s=120)
    assert finished.code != 0
    last = finished.stderr.rpartition("torch.multiprocessing.spawn.")[2]
    # The rank itself, or the other one in the text of its own error, whichever has ended first.
    assert (
        re.search(rf"process {rank} terminated with signal SIGKILL|no word from rank {rank}", last)
        if killed
        else f"LookupError: rank {rank} lost its data" in last
    )
    assert finished.said == []
    assert not finished.leftover


# -- names


def strategies_by_name() -> dict[str, ShardingStrategy]:
    found = {}
    for name in (
        "sharded_dp",
        "shardeddp",
        "shardeddp.shardeddp",
        *(f"sharded_dp_{each}" for each in SHARDING_STRATEGIES),
    ):
        trainer = make_trainer(name, max_steps=1)
        trainer.fit(TinyGpt(), token_loader(8))
        assert isinstance(trainer.strategy, ShardedDP)
        found[name] = trainer.strategy.runtime.sharding
    return found


@pytest.mark.slow
def test_every_sharding_strategy_has_a_name_that_a_trainer_takes(world: Worlds) -> None:
    full = dict.fromkeys(
        ("sharded_dp", "shardeddp", "shardeddp.shardeddp"), SHARDING_STRATEGIES["full_shard"]
    )
    assert (
        world(2).run(strategies_by_name)
        == [
            full
            | {f"sharded_dp_{name}": sharding for name, sharding in SHARDING_STRATEGIES.items()}
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("name", "in_notebooks"),
    [
        ("sharded_dp", False),
        ("sharded_dp_spawn", False),
        ("sharded_dp_fork", True),
        ("sharded_dp_notebook", True),
    ],
)
def test_the_names_for_notebooks_fork(name: str, in_notebooks: bool) -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy=name, logger=False)
    assert trainer.strategy.launcher is not None
    assert trainer.strategy.launcher.is_interactive_compatible is in_notebooks
