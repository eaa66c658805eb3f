"""Runs of the scripts in `examples/`."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(folder: Path, *arguments: str) -> str:
    """What a script prints; it runs in a folder, in a process group of which nothing is left."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            out, err = process.communicate()  # the test has a limit, which raises here
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    return out
