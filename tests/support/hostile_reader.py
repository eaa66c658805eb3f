"""Tries to read checkpoint directories in full, in a process whose time and memory are measured.

Usage: hostile_reader.py FOLDER    one line of JSON for each directory: what came of it, CPU seconds, bytes of memory
"""

import json
import math
import sys
import time
from pathlib import Path

from shardeddp.checkpoint.import_foreign import ForeignCheckpoint
from shardeddp.checkpoint.verify import verify
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval

STATUS = Path("/proc/self/status")


def read_all(folder: Path) -> None:
    """Read everything that a checkpoint holds."""
    checkpoint = ForeignCheckpoint(folder)
    for name, tensor in checkpoint.tensors.items():
        checkpoint.read(name, Interval(0, math.prod(tensor.shape)))
    for name in checkpoint.objects:
        checkpoint.read_object(name)
    assert isinstance(checkpoint.meta, dict)
    assert verify(folder) == []


def attempt(folder: Path) -> str:
    """What came of it: the text of the documented error, or what must not be."""
    try:
        read_all(folder)
    except CheckpointError as error:
        return f"refused: {error}"
    except BaseException as error:  # noqa: BLE001 - any other kind is a finding
        return f"{type(error).__name__}: {error}"
    return "read"


def reset_peak() -> int:
    """Forget how much memory was ever used; returns how much is now. Linux has that, other systems say 0."""
    if not STATUS.exists():
        return 0
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most memory in use since then, in bytes."""
    if not STATUS.exists():
        return 0
    return (
        next(
            int(line.split()[1])
            for line in STATUS.read_text().splitlines()
            if line.startswith("VmHWM")
        )
        * 1024
    )


if __name__ == "__main__":
    for directory in sorted(Path(sys.argv[1]).iterdir()):
        before, start = reset_peak(), time.process_time()
        outcome = attempt(directory)
        seconds = time.process_time() - start
        report = {
            "name": directory.name,
            "outcome": outcome,
            "seconds": seconds,
            "nbytes": peak() - before,
        }
        print(json.dumps(report), flush=True)
