"""Waiting for what another thread does soon."""

import time
from collections.abc import Callable

PATIENCE_S = 10.0
_POLL_S = 0.05


def until(condition: Callable[[], bool]) -> bool:
    """Whether a condition becomes true before patience ends."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
