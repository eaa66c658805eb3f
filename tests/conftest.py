"""What all tests share: the pool of rank processes."""

import re
from collections.abc import Iterator

import pytest

from world import Pool, Worlds

_OTHER_STRATEGY = re.compile(r"[\[-](hybrid\w*|shard_grad_op|shard_optimizer|no_shard)[\]-]")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test over several strategies runs under the first of them in `make test`."""
    for item in items:
        if _OTHER_STRATEGY.search(item.name):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def world() -> Iterator[Worlds]:
    """``world(n).run(function, *args)`` runs a function on ``n`` ranks; see ``tests/world.py``."""
    pool = Pool()
    yield pool
    pool.close()
