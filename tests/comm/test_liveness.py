"""The liveness probe's looks at other threads."""

import subprocess
import sys
import textwrap

import pytest

LOOKS_S = 3.0

LOOKS = """
    import gc, sys, threading, time
    from shardeddp.comm.liveness import (innermost_frame)

    class Garbage:
        def __init__(self):
            self.circle = self

        def __del__(self):
            time.sleep(0.0001)  # lets other threads run, as the end of a process group does

    deadline = time.monotonic() + {seconds}

    def rest():
        while time.monotonic() < deadline:
            time.sleep(0.01)

    def start_threads():
        while time.monotonic() < deadline:
            thread = threading.Thread(target=time.time)
            thread.start()
            thread.join()

    threads = [threading.Thread(target=target) for target in [start_threads] * 2 + [rest] * 40]
    for thread in threads:
        thread.start()
    gc.set_threshold(3)
    while time.monotonic() < deadline:
        Garbage()
        assert innermost_frame(threads[2].ident) is not None or time.monotonic() > deadline - 0.1
    assert gc.isenabled()
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_looking_at_threads_never_waits_for_the_collection_of_garbage() -> None:
    script = textwrap.dedent(LOOKS.format(seconds=LOOKS_S))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LOOKS_S + 40)
