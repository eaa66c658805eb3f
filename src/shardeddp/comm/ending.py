"""Ending: before the interpreter ends, gloo's threads let go of the last tensors that were communicated.

A collective that has been waited for is held for another moment by the thread that has carried it out. If that thread
lets go last of a tensor that Python knows, it needs the interpreter; where that has begun to end, the process is
aborted, although all of its work is done. On a busy machine the moment can be long.
"""

import atexit
import sys
import threading
import time
from pathlib import Path

LIMIT_S = 0.5
"""How long to wait at most; threads that compute for themselves do not end by waiting."""

_LOOK_S = 0.005
_TASKS = Path("/proc/self/task")


def end_quietly() -> None:
    """Let the end of this process wait for its threads; to be called when there are groups."""
    atexit.unregister(wait_until_idle)
    atexit.register(wait_until_idle)


def wait_until_idle(limit_s: float = LIMIT_S) -> None:
    """Return when no other thread of this process runs or is about to; where that cannot be told, after a while.

    Args:
        limit_s: Return after that time in any case.
    """
    deadline, idle = time.monotonic() + limit_s, 0
    while idle < 2 and time.monotonic() < deadline:  # one look may fall between two steps of a thread
        time.sleep(_LOOK_S)  # in which others have the interpreter
        idle = 0 if _others_run() else idle + 1


def _others_run() -> bool:
    if not sys.platform.startswith("linux"):
        return True
    own = threading.get_native_id()
    return any(_state(task) == "R" for task in _TASKS.iterdir() if int(task.name) != own)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
