"""What the tests of this folder share: DDP's results, each trained once."""

import pytest

from support.fidelity import BesideDdp
from world import Worlds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are run by ``make test-fidelity``."""
    for item in items:
        if "fidelity" in item.path.parts:
            item.add_marker("fidelity")


@pytest.fixture(scope="session")
def beside_ddp(world: Worlds) -> BesideDdp:
    """``beside_ddp(cases, strategy)`` fails where a case does not train as under DDP."""
    return BesideDdp(world)
