"""Ranks that are killed at any moment of training and saving lose nothing that had been saved, and leave nothing."""

import random
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from support.torture_kills import KillServer, Outcome, Trial

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="ranks are forked and die with their parent"
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[KillServer]:
    with KillServer() as server:
        yield server


@pytest.fixture(scope="module")
def hybrid_server() -> Iterator[KillServer]:
    with KillServer("hybrid_shard") as server:
        yield server


def trials(
    seed: int, count: int, asynchronous: bool, resume_every: int, company: bool = False
) -> list[Trial]:
    draw = random.Random(seed)
    return [
        Trial(
            seed=draw.randrange(2**32),
            asynchronous=asynchronous,
            resumes=number % resume_every == resume_every - 1,
            company=company,
        )
        for number in range(count)
    ]


def summary(outcomes: list[Outcome]) -> str:
    """What was hit, in a few lines."""
    calls = Counter(
        phase.partition("(")[2].rstrip(")") or "outside" for it in outcomes for phase in it.phases
    )
    return "\n".join(
        [
            f"{len(outcomes)} kills, {sum(it.in_save for it in outcomes)} of them in a save, "
            f"{sum(it.seconds for it in outcomes) / len(outcomes):.2f} s each",
            f"killed: {dict(Counter(it.killed for it in outcomes))}",
            f"last call: {dict(calls.most_common())}",
            f"runs that left something: {sum(it.leftovers > 0 for it in outcomes)}; "
            f"newer than what had returned: {sum(it.found > it.returned for it in outcomes)}",
            f"survivors: slowest {max(it.survivors_s for it in outcomes):.1f} s, "
            f"hung {sum(it.hung for it in outcomes)}",
            f"beside: Trainers started, exports, refusals: {beside(outcomes)}",
        ]
    )


def beside(outcomes: list[Outcome]) -> list[int]:
    counts = [list(map(int, it.company.split())) for it in outcomes if it.company]
    return list(map(sum, zip(*counts, strict=True)))


def check(outcomes: list[Outcome], seed: int) -> None:
    wrong = [it for it in outcomes if it.problem]
    print(f"seed {seed}\n{summary(outcomes)}")
    assert wrong == [], f"seed {seed}: " + "\n".join(
        f"{it.trial} {it.phases}\n{it.problem}" for it in wrong[:3]
    )
    assert sum(it.hung for it in outcomes) == 0, [it for it in outcomes if it.hung]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_killed_ranks_lose_nothing_that_was_saved_and_leave_nothing(
    server: KillServer, asynchronous: bool
) -> None:
    seed = 20 + asynchronous
    check(list(server.run(trials(seed, 2, asynchronous, resume_every=2, company=True))), seed)


@pytest.mark.torture
@pytest.mark.timeout(380)
@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_two_hundred_kills_lose_nothing_that_was_saved_and_leave_nothing(
    server: KillServer, asynchronous: bool, batch: int
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    outcomes = list(server.run(trials(seed, 50, asynchronous, resume_every=10)))
    check(outcomes, seed)
    assert sum(it.in_save for it in outcomes) >= 20, "most kills were to hit a save"


@pytest.mark.torture
@pytest.mark.timeout(380)
@pytest.mark.parametrize("batch", range(8))
def test_two_hundred_kills_beside_trainers_that_start_and_exports_lose_nothing(
    server: KillServer, batch: int
) -> None:
    check_company(server, 25)


@pytest.mark.torture
@pytest.mark.timeout(380)
@pytest.mark.parametrize("batch", range(4))
def test_a_hundred_kills_of_hybrid_trainings_in_company_lose_nothing(
    hybrid_server: KillServer, batch: int
) -> None:
    check_company(hybrid_server, 25)


def check_company(server: KillServer, count: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    outcomes = list(server.run(trials(seed, count, True, resume_every=5, company=True)))
    check(outcomes, seed)
    started, exported, _ = beside(outcomes)
    assert started > count // 5
    assert exported > count // 5
