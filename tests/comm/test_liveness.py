"""The liveness probe's looks at other threads."""

import subprocess
import sys
import textwrap

import pytest

LOOKS_S = 3.0

LOOKS = """
    import gc, sys, threading, time
    from shardeddp.garbage import collector_paused

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
        with collector_paused():
            found = sys._current_frames().get(threads[2].ident)
        assert found is not None or time.monotonic() > deadline - 0.1
    assert gc.isenabled()
"""

WALKS = """
    import copy, gc, threading, time
    from unittest import mock
    from shardeddp.comm.liveness import LivenessProbe, code_line_of

    class Garbage:
        def __init__(self):
            self.circle = self

        def __del__(self):
            time.sleep(0.00001)

    failures, places, main = [], set(), threading.get_ident()
    threading.excepthook = failures.append
    deadline = time.monotonic() + {seconds}

    def look():
        probe, check = mock.Mock(_trains=main), mock.Mock(on_sample=code_line_of)
        while time.monotonic() < deadline:
            Garbage(), Garbage()
            places.add(LivenessProbe._sample(probe, check))

    gc.set_threshold(30, 5, 5)
    thread = threading.Thread(target=look)
    thread.start()
    tree = 0
    for _ in range(60):
        tree = [tree, {{1: 2}}]
    while thread.is_alive():
        copy.deepcopy(tree)  # calls and returns all the time
    assert places and not failures, failures
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_walking_over_the_frames_of_a_thread_reads_no_memory_that_it_has_freed() -> None:
    script = textwrap.dedent(WALKS.format(seconds=2 * LOOKS_S))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LOOKS_S + 40)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_looking_at_threads_never_waits_for_the_collection_of_garbage() -> None:
    script = textwrap.dedent(LOOKS.format(seconds=LOOKS_S))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LOOKS_S + 40)
