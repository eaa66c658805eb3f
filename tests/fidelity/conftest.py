"""What the tests of this folder share: DDP's results, each trained once."""

import pytest

from support.fidelity import BesideDdp
from world import Worlds


@pytest.fixture(scope="session")
def beside_ddp(world: Worlds) -> BesideDdp:
    """``beside_ddp(cases, strategy)`` fails where a case does not train as under DDP."""
    return BesideDdp(world)
