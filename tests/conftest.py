"""What all tests share: the pool of rank processes."""

from collections.abc import Iterator

import pytest

from world import Pool, Worlds


@pytest.fixture(scope="session")
def world() -> Iterator[Worlds]:
    """``world(n).run(function, *args)`` runs a function on ``n`` ranks; see ``tests/world.py``."""
    pool = Pool()
    yield pool
    pool.close()
