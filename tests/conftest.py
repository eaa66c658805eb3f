"""What all tests share: the pool of rank processes."""

import math
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from world import Pool, Worlds

_OTHER_STRATEGY = re.compile(
    r"(?<=[\[-])(full_shard (in|of) [^\]-]+|(hybrid\w*|shard_grad_op|shard_optimizer|no_shard)([ ,][^\]-]+)?)(?=[\]-])"
)


SLOWEST, LONGEST_S = 2, 390
"""Times as long a test may take as it says, for machines that are slow or busy; limits are for what hangs.

Only a test that says so itself takes longer than ``LONGEST_S``: after 400 s all stacks are printed, and the run ends.
"""


SUITES = {"slow", "torture", "cluster", "models", "stores", "fidelity"}
"""Marks of what `make test` leaves to others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--cases`` and ``--part``, for samples of suites that take long."""
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="of each test, at most N of the cases it has, and none where `make test` has the first of them",
    )
    parser.addoption(
        "--part",
        metavar="I/N",
        help="a part of N of the tests, which differ from those of the other parts: I from 0 to N - 1",
    )


def pytest_configure() -> None:
    """Set hypothesis up: equal examples in each run, and no limits of time, as machines may be busy."""
    if find_spec("hypothesis") is not None:  # `tests/cuda` runs without it
        settings = import_module("hypothesis").settings
        settings.register_profile("shardeddp", deadline=None, max_examples=200, derandomize=True)
        settings.load_profile("shardeddp")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Divide the cases of tests among suites; and once marks have selected, keep a sample."""
    _give_strategies_to_suites(items)
    _leave_cases_to_the_slow_suite(items)
    yield
    if most := config.getoption("cases"):
        tests = _by_test(it for it in items if not it.get_closest_marker("loop"))
        sample = (it for each in tests.values() for it in each[:: math.ceil(len(each) / most)])
        _keep({*sample}, items, config)
    if part := config.getoption("part"):
        index, count = map(int, part.split("/"))
        in_part = [*_by_test(items).values()][index % count :: count]
        _keep({it for each in in_part for it in each}, items, config)


def _keep(kept: set[pytest.Item], items: list[pytest.Item], config: pytest.Config) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _give_strategies_to_suites(items: list[pytest.Item]) -> None:
    """A test over several strategies runs under the first of them in `make test`.

    `make test-slow` and `make test-fidelity` have the others. On ranks of the pool, each test runs there every case of
    its other parameters under one of them, in turn; the name of a file says with which it begins. `make torture` has
    all combinations.
    """
    tests: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if limit := item.get_closest_marker("timeout"):
            longer = max(limit.args[0], min(SLOWEST * limit.args[0], LONGEST_S))
            item.add_marker(pytest.mark.timeout(longer), append=False)
        if found := _OTHER_STRATEGY.search(item.name):
            item.add_marker(pytest.mark.slow)
            on_ranks = "world" in getattr(item, "fixturenames", ())
            if on_ranks and not item.get_closest_marker("torture"):
                cases = tests.setdefault(item.nodeid.partition("::")[0], {})
                case = item.name[: found.start()] + item.name[found.end() :]
                cases.setdefault(case, []).append(item)
    for file, cases in tests.items():
        for turn, others in enumerate(cases.values(), zlib.crc32(file.encode())):
            for item in others:
                if item is not others[turn % len(others)]:
                    item.add_marker(pytest.mark.torture)


def _leave_cases_to_the_slow_suite(items: list[pytest.Item]) -> None:
    """Of a test that is marked `loop(n)`, only the first n cases are in `make test`."""
    for cases in _by_test(it for it in items if it.get_closest_marker("loop")).values():
        (most,) = cases[0].get_closest_marker("loop").args
        quick = [it for it in cases if not {mark.name for mark in it.iter_markers()} & SUITES]
        for item in quick[most:]:
            item.add_marker(pytest.mark.slow)


def _by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test, in their order."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests


@pytest.fixture(scope="session")
def world() -> Iterator[Worlds]:
    """``world(n).run(function, *args)`` runs a function on ``n`` ranks; see ``tests/world.py``."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def reference(world: Worlds) -> Callable[..., list[Any]]:
    """``reference(n, function, *args)`` is ``world(n).run(function, *args)``, run once for all tests of a file.

    For training by DistributedDataParallel that several cases are compared with; nobody may change what it returns.
    """
    known: dict[bytes, list[Any]] = {}

    def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        key = pickle.dumps((size, function, arguments))
        if key not in known:
            known[key] = world(size).run(function, *arguments)
        return known[key]

    return run
