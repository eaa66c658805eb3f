"""What the tests of this folder share: DDP's results, each trained once."""

import pytest

from support.fidelity import BesideDdp
from world import Worlds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The named cases of this folder are run by ``make test-fidelity``; thirty drawn programs by ``make test``."""
    for item in items:
        if "fidelity" in item.path.parts and item.path.stem != "test_drawn_programs":
            item.add_marker("fidelity")
            if item.name.endswith("[no_shard in one unit]"):  # units matter to what is gathered
                item.add_marker("torture")


@pytest.fixture(scope="session")
def beside_ddp(world: Worlds) -> BesideDdp:
    """``beside_ddp(cases, strategy)`` fails where a case does not train as under DDP."""
    return BesideDdp(world)
