"""torchrun on two nodes: a killed rank restarts the job, which goes on from the newest checkpoint, on what is left.

torchrun keeps its store over restarts, with what the ranks before have left in it. Nothing is set against that here:
the strategy has to see to it.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from support.elastic import RESTARTS, elastic
from support.said import Said

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(390)]

STEPS = 60
TRAIN = ("--steps", str(STEPS), "--save-every", "10")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Said:
    with elastic(tmp_path_factory.mktemp("whole"), *TRAIN) as job:
        assert job.wait() == [0, 0], job.text()
        return job.said


def kill_a_rank(out: Path, rank: int, moment_s: float, expected: Said, *arguments: str) -> None:
    """Kill one rank at a moment after the first checkpoint, and see the job end as if nothing had been."""
    with elastic(out, *TRAIN, *arguments) as job:
        job.until_step(12, ranks=2)
        time.sleep(moment_s)
        os.kill(job.said.pids()[rank], signal.SIGKILL)
        assert job.wait() == [0, 0], job.text()
        starts = job.said.of("started")[0]
        assert len(starts) == 2, (
            f"one restart of {RESTARTS} is enough, found starts at {starts}:\n{job.text()}"
        )
        assert starts[1] >= 10 and starts[1] % 10 == 0
        assert job.said.finished() == {0: [STEPS], 1: [STEPS]}
        assert job.said.losses() == expected.losses()
        assert job.said.digests() == expected.digests()


def lose_a_node(
    out: Path, moment_s: float, expected: Said, strategy: str, ranks_per_node: int
) -> None:
    """Kill a node of a job that may go on with one, and see it go on there, with another world and other shards."""
    with elastic(
        out, *TRAIN, "--strategy", strategy, nodes="1:2", ranks_per_node=ranks_per_node
    ) as job:
        job.until_step(12, ranks=2 * ranks_per_node)
        time.sleep(moment_s)
        left = job.lose_a_node()
        assert job.wait()[left] == 0, job.text()
        assert job.said.finished() == {rank: [STEPS] for rank in range(ranks_per_node)}
        sizes = [len(groups[0]) for groups in job.said.of("shards")[0]]
        before = ranks_per_node if strategy == "hybrid_shard" else 2 * ranks_per_node
        assert sizes == [before, ranks_per_node], "ranks that share a model, before and after"
        assert job.said.curve() == pytest.approx(expected.curve(), rel=1e-4)


@pytest.mark.parametrize(("rank", "moment_s"), [(0, 0.2)])
def test_a_killed_rank_restarts_the_job_which_ends_as_if_nothing_had_been(
    uninterrupted: Said, tmp_path: Path, rank: int, moment_s: float
) -> None:
    kill_a_rank(tmp_path, rank, moment_s, uninterrupted)


def test_a_job_goes_on_with_the_nodes_that_are_left(uninterrupted: Said, tmp_path: Path) -> None:
    lose_a_node(tmp_path, 0.2, uninterrupted, "full_shard", 1)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10))
def test_ten_killed_ranks_of_ten(uninterrupted: Said, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kill_a_rank(tmp_path, seed % 2, chance.uniform(0.0, 1.0), uninterrupted)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10))
def test_ten_lost_nodes_of_ten(uninterrupted: Said, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    strategy = ("full_shard", "hybrid_shard", "shard_grad_op")[seed % 3]
    lose_a_node(tmp_path, chance.uniform(0.0, 1.0), uninterrupted, strategy, 1 + seed % 2)


@pytest.mark.torture
def test_a_node_that_comes_back_is_taken_in(uninterrupted: Said, tmp_path: Path) -> None:
    # Else torch's agents do not let it in; see docs/cluster.md.
    steps = ("--steps", "600", "--save-every", "10")
    with elastic(tmp_path, *steps, nodes="1:2", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as job:
        job.until_step(12, ranks=2)
        left = job.lose_a_node()
        while len(job.said.of("started")[0]) < 2:  # the test's time limit ends this
            time.sleep(0.1)
        job.start_agent()
        codes = job.wait(200)
        assert (codes[left], codes[2]) == (0, 0), job.text()
        assert [len(groups[0]) for groups in job.said.of("shards")[0]] == [2, 1, 2]
        assert job.said.finished() == {0: [600], 1: [600]}
        assert job.said.curve()[:60] == pytest.approx(uninterrupted.curve(), rel=1e-4)
