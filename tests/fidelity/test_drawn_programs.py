"""Programs that are drawn at random train under ShardedDP as under DDP: every loss, what users read, the final weights.

A seed again, with the smallest program that fails in the same way (in `tests/`)::

    PYTHONPATH=../src:. python -m support.drawn_survey 17 --shrink
    PYTHONPATH=../src:. python -m support.drawn_survey --program "Program(seed=17, blocks=(Block(parts=('mlp',)),))"

or `pytest tests/fidelity/test_drawn_programs.py -k seed17-`.
"""

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from support.drawn_comparison import RANKS_RUN, Outcome, run
from support.drawn_model import DrawnModel
from support.drawn_programs import Program, draw
from world import Pool

pytestmark = pytest.mark.timeout(150)

QUICK = range(30)
LONG = range(1000, 1500)

NO_LSTM = "could not create a primitive descriptor for the LSTM"
"""Of oneDNN, under plain torch, where the CPU has no instructions for bfloat16."""

REFUSED: dict[str, str] = {}
"""What ShardedDP may refuse by the name of a parameter: the error's text, and where that is documented."""


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    """Outcomes; most programs have to be comparable."""
    counts: Counter[str] = Counter()
    yield counts
    for kind, share in {"discarded": 0.1, "refused": 0.05, "sensitive": 0.05}.items():
        assert counts[kind] <= max(2, share * counts.total()), (
            f"too many programs are {kind}: {counts}"
        )


@pytest.fixture(autouse=True)
def _young_ranks(world: Pool, tally: Counter[str]) -> None:
    if tally.total() % RANKS_RUN == RANKS_RUN - 1:
        world.kill()


@pytest.mark.loop(6)
@pytest.mark.parametrize(
    "seed",
    [*QUICK, *(pytest.param(seed, marks=pytest.mark.torture) for seed in LONG)],
    ids=lambda seed: f"seed{seed}-",
)
def test_a_drawn_program_trains_as_under_ddp(world: Pool, tally: Counter[str], seed: int) -> None:
    program = draw(seed)
    outcome = run(world, program)
    kind = "refused" if outcome.kind == "raises" and is_refusal(program, outcome) else outcome.kind
    if kind == "discarded" and NO_LSTM in outcome.text:
        pytest.skip("torch has no LSTM in bfloat16 on this CPU")
    tally[kind] += 1
    if kind == "refused" or not outcome.failed:
        return
    pytest.fail(f"{kind}: {outcome.text}\n{program!r}\n{outcome.details}", pytrace=False)


def is_refusal(program: Program, outcome: Outcome) -> bool:
    """Whether an error is documented and names a parameter."""
    names = DrawnModel(program).state_dict()
    return any(name in outcome.text for name in names) and any(
        re.search(text, outcome.text) for text in REFUSED
    )
