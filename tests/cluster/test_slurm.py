"""An ordinary training script on a real SLURM cluster: started, preempted, requeued, resumed, killed.

``make test-cluster`` runs the short draw, ``make torture-cluster`` the long one.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.said import TRAINING, Said
from support.slurm import TESTS, Cluster, Job, cluster, missing

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(390)]

STEPS = 60
TRAIN = ("--strategy", "hybrid_shard", "--steps", str(STEPS), "--dropout", "0.1")
WAYS: dict[str, tuple[str, ...]] = {
    "in step": (),
    "skewed": ("--skew", "0.1"),
    "workers": ("--workers", "2"),
    "skewed, workers": ("--skew", "0.1", "--workers", "2"),
    "ckpt_path='last'": ("--save-every", "1000"),
}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if absent := missing():
        pytest.skip(f"{', '.join(absent)} not installed: `make test-cluster` does that")
    with cluster() as running:
        yield running


@pytest.fixture(scope="module")
def uninterrupted(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Said:
    job = slurm.submit(tmp_path_factory.mktemp("whole"), *TRAIN)
    assert job.wait() == "COMPLETED exit=0:0 restarts=0", job.text()
    assert job.said.finished() == {rank: [STEPS] for rank in range(4)}
    return job.said


def assert_same(job: Job, expected: Said) -> None:
    """Every loss that any attempt ever had is that of an uninterrupted run, and so are the weights."""
    assert {rank: set(steps) for rank, steps in job.said.finished().items()} == {
        rank: {STEPS} for rank in range(4)
    }
    assert job.said.losses() == expected.losses()
    assert job.said.digests() == expected.digests()


def preempt(slurm: Cluster, out: Path, way: str, moment_s: float, expected: Said) -> None:
    """Send the signal that SLURM sends before it takes the nodes away, at a moment after the first step."""
    job = slurm.submit(out, *TRAIN, *WAYS[way])
    job.until_step(0)
    time.sleep(moment_s)
    slurm.call("scancel", "--signal=USR1", job.number)
    assert job.wait() == "COMPLETED exit=0:0 restarts=1", job.text()
    first, second = job.said.of("started")[0]
    assert first == 0 < second < STEPS, "the second attempt goes on where the first has saved"
    assert "Traceback" not in job.text() or "--workers" in WAYS[way], (
        "workers of loaders get SLURM's signals too"
    )
    assert_same(job, expected)


@pytest.mark.parametrize(("way", "moment_s"), [("skewed, workers", 0.3), ("ckpt_path='last'", 0.9)])
def test_a_preempted_job_is_requeued_and_goes_on_exactly(
    slurm: Cluster, uninterrupted: Said, tmp_path: Path, way: str, moment_s: float
) -> None:
    preempt(slurm, tmp_path, way, moment_s, uninterrupted)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(20))
def test_twenty_preemptions_of_twenty(
    slurm: Cluster, uninterrupted: Said, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    preempt(slurm, tmp_path, list(WAYS)[seed % len(WAYS)], chance.uniform(0.0, 1.5), uninterrupted)


# -- ranks and nodes, one process, a killed task: one job


@pytest.fixture(scope="module")
def killed(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, str, float]:
    """A job whose ranks are dealt out to nodes like cards, and whose rank 3 is killed; its end, and how soon."""
    out = tmp_path_factory.mktemp("killed")
    arguments = ("--strategy", "hybrid_shard", "--steps", "100000")
    job = slurm.submit(out, *arguments, srun=("SLURM_DISTRIBUTION=cyclic",))
    job.until_step(20)
    os.kill(job.said.pids()[3], signal.SIGKILL)
    began = time.monotonic()
    return job, job.wait(60), time.monotonic() - began


def test_a_killed_task_ends_the_job_within_seconds(killed: tuple[Job, str, float]) -> None:
    job, end, took_s = killed
    assert end.startswith("FAILED "), job.text()
    assert took_s < 15
    assert job.said.finished() == {}


def test_a_shard_group_stays_inside_its_node_wherever_slurm_places_ranks(
    killed: tuple[Job, str, float],
) -> None:
    said = killed[0].said
    assert {environment for found in said.of("environment").values() for environment in found} == {
        "SLURMEnvironment"
    }
    assert {rank: found[0] for rank, found in said.of("node").items()} == {0: 0, 1: 1, 2: 0, 3: 1}
    assert said.of("shards")[0] == [[[0, 2], [1, 3]]]


def test_two_nodes_have_the_losses_of_one_process(
    killed: tuple[Job, str, float], tmp_path: Path
) -> None:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM")
    }
    command = [sys.executable, "-W", "ignore", str(TRAINING), str(tmp_path), "--steps", "20"]
    subprocess.run(
        command,
        env=environment | {"PYTHONPATH": path},
        check=True,
        capture_output=True,
        timeout=120,
    )
    alone = Said(tmp_path).curve()
    assert len(alone) == 20
    losses = killed[0].said.losses()
    together = [sum(next(iter(losses[step, rank])) for rank in range(4)) / 4 for step in range(20)]
    assert together == pytest.approx(alone, rel=1e-5)


# -- what cannot work


@pytest.mark.torture
def test_nodes_with_different_numbers_of_tasks_are_listed(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path, *TRAIN, options=("--ntasks=3",))
    assert job.wait(60).startswith("FAILED "), job.text()
    assert "expected 2 nodes with 2 ranks each" in job.text()
    assert re.search(
        r"node 0 \(.*\) with 2 ranks \(0, 1\); node 1 \(.*\) with 1 rank \(2\)", job.text()
    )
