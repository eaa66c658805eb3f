"""Tries to read checkpoint directories in full, in a process whose time and memory are measured.

Usage: hostile_reader.py FOLDER    one line of JSON for each directory: what came of it, seconds, bytes at the peak
"""

import json
import resource
import sys
import time
from pathlib import Path

from shardeddp.checkpoint.foreign import ForeignCheckpoint
from shardeddp.errors import CheckpointError
from shardeddp.plan.intervals import Interval


def read_all(folder: Path) -> None:
    """Read everything that a checkpoint holds."""
    checkpoint = ForeignCheckpoint(folder)
    for name, tensor in checkpoint.tensors.items():
        checkpoint.read(name, Interval(0, tensor.numel))
        checkpoint.check(name)
    for name in checkpoint.objects:
        checkpoint.read_object(name)
    assert isinstance(checkpoint.meta, dict)


def attempt(folder: Path) -> str:
    """What came of it: the text of the documented error, or what must not be."""
    try:
        read_all(folder)
    except CheckpointError as error:
        return f"refused: {error}"
    except BaseException as error:  # noqa: BLE001 - any other kind is a finding
        return f"{type(error).__name__}: {error}"
    return "read"


if __name__ == "__main__":
    for directory in sorted(Path(sys.argv[1]).iterdir()):
        start = time.perf_counter()
        outcome = attempt(directory)
        seconds = time.perf_counter() - start
        # KiB on Linux, bytes on macOS.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        print(json.dumps({"name": directory.name, "outcome": outcome, "seconds": seconds, "peak": peak}), flush=True)
