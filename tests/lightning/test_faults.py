"""A rank that fails in any way ends all ranks soon, with a message that says which rank it was and what it had."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.faults import FAULTS, SIGNALS, TIMEOUT_S, Seen, inject

BUSY_S = 8.0
"""What a busy machine may add to each of these times."""

# Fault -> what each rank says in the end, and how soon it has to end.
LOST = ("no word from rank 1", "")
EXPECTED: dict[str, tuple[tuple[str, ...], float]] = {
    "killed (kill -9), rank 1": (LOST, 4.0),
    "killed (kill -9), rank 0": (("", "no word from rank 0"), 4.0),
    "frozen (SIGSTOP), rank 1": (LOST, TIMEOUT_S + 3),
    "frozen (SIGSTOP), rank 0": (("", "no word from rank 0"), TIMEOUT_S + 3),
    "exception in forward": (("LookupError: rank 1 lost its data",) * 2, 5.0),
    "exception in forward, rank 0": (("LookupError: rank 0 lost its data",) * 2, 5.0),
    "exception in backward": (("ArithmeticError: rank 1 fails in backward",) * 2, 5.0),
    "exception in forward, with uneven_units": (("LookupError: rank 1 lost its data",) * 2, 5.0),
    "exception in backward, with uneven_units": (
        ("ArithmeticError: rank 1 fails in backward",) * 2,
        5.0,
    ),
    "exception in a callback": (("PermissionError: rank 1 cannot write its log",) * 2, 5.0),
    "exception in the data": (("OSError: the file of this rank cannot be read",) * 2, 5.0),
    "out of memory": (("MemoryError: rank 1 cannot allocate 16 GiB",) * 2, 5.0),
    "exception, and a checkpoint on exceptions": (("LookupError: rank 1 lost its data",) * 2, 12.0),
    "NaN in the loss": (("non-finite",) * 2, 5.0),
    "fewer batches": (("rank 1 has 6",) * 2, 5.0),
    "unit skipped by one rank": (("ShardedDP(uneven_units=True)",) * 2, 8.0),
    "another shape in self.all_gather, with debug": (
        ("all_gather(float32 of shape (2,))", "all_gather(float32 of shape (3,))"),
        5.0,
    ),
    "another collective of torch.distributed, with debug": (
        ("RuntimeError: rank 0 is at ",) * 2,
        5.0,
    ),
    "another model": (("the ranks do not shard the same model",) * 2, 10.0),
    "another strategy": (("the ranks do not run the same",) * 2, 10.0),
    "another prefetch": (("forward_prefetch=2",) * 2, 10.0),
    "other code under the same version": (
        ("where the installed code of shardeddp differs",) * 2,
        10.0,
    ),
}
SHORT = [
    "killed (kill -9), rank 1",
    "unit skipped by one rank",
    "exception in forward, with uneven_units",
]


def check(fault: str, ranks: list[Seen]) -> None:
    words, soon = EXPECTED[fault]
    victim, _ = SIGNALS.get(fault, (-1, 0))
    for rank, (seen, word) in enumerate(zip(ranks, words, strict=True)):
        if rank == victim:
            continue
        assert seen.code not in (None, 0), f"rank {rank} after {fault}: {seen.code}\n{seen.output}"
        assert word in seen.output, f"rank {rank} after {fault}:\n{seen.output}"
        assert seen.seconds < soon + BUSY_S, f"rank {rank} after {fault}: {seen.seconds:.1f} s"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_fault_of_one_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(SHORT))]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as pool:  # most of the time is spent waiting
        for fault, ranks in zip(SHORT, pool.map(inject, SHORT, folders), strict=True):
            check(fault, ranks)


@pytest.mark.torture
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_ends_all_ranks_and_is_named(fault: str, tmp_path: Path) -> None:
    check(fault, inject(fault, tmp_path))
