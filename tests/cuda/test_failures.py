"""Ranks on NCCL end soon after one of them, also where one waits for its device (`.item()`)."""

from pathlib import Path

import pytest
import torch
from benchmarks.faults import TIMEOUT_S, inject

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize(
    "fault", ["exception in forward", "exception in backward", "exception in a callback"]
)
def test_every_rank_ends_and_says_what_one_of_them_raised(fault: str, tmp_path: Path) -> None:
    seen = inject(fault, tmp_path, "gpu")
    assert [rank.code for rank in seen] == [1, 1]
    assert max(rank.seconds for rank in seen) < TIMEOUT_S, "it waited for the timeout"
    assert all("rank 1" in rank.last_error for rank in seen)


@pytest.mark.parametrize(
    ("fault", "left"), [("killed (kill -9), rank 1", 0), ("frozen (SIGSTOP), rank 1", 0)]
)
def test_a_rank_that_is_killed_or_frozen_does_not_keep_the_others(
    fault: str, left: int, tmp_path: Path
) -> None:
    seen = inject(fault, tmp_path, "gpu")
    assert seen[left].code == 1
    assert seen[left].seconds < TIMEOUT_S + 5.0
    assert "no word from rank 1" in seen[left].output
