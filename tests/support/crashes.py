"""Something done in a forked process that is killed, or refused by the system, at its n-th file-system call.

In process: a profiling function sees every call into the system before it is made; fast, works everywhere. With strace:
from outside, as the kernel sees it, for every system call that takes a file or a descriptor.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

from shardeddp.checkpoint import durable
from shardeddp.errors import CheckpointError

Action: TypeAlias = Callable[[], object]
Outcome: TypeAlias = Literal["done", "refused", "killed"]

_CODES: dict[int, Outcome] = {0: "done", 3: "refused", -signal.SIGKILL: "killed"}
_PURE = frozenset({"fspath", "_path_normpath", "_path_splitroot_ex", "getcwd", "getpid", "kill"})
"""Functions of the module for system calls that touch no file."""


def count_calls(action: Action) -> int:
    """How many calls an action makes that :func:`run` can strike."""
    reader, writer = os.pipe()
    strike = _Strike(0, None)

    def counted() -> None:
        try:
            strike.run(action)
        finally:
            os.write(writer, b"%d" % strike.seen)

    outcome = _wait(_fork(counted))
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        count = int(pipe.read())
    assert outcome == "done", f"without a fault it must work, but was {outcome}"
    return count


def run(action: Action, n: int, fault: int | None) -> Outcome:
    """Do it in a process of its own; before its n-th call (from 1) that is killed, or the call fails with an errno."""
    return _wait(_fork(lambda: _Strike(n, fault).run(action)))


class _Strike:
    """Counts calls of the running process, and strikes at one of them."""

    def __init__(self, n: int, fault: int | None) -> None:
        self.seen = 0
        self._n = n
        self._fault = fault

    def run(self, action: Action) -> None:
        sys.setprofile(self._profile)
        try:
            action()
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            if argument.__module__ not in ("posix", "fcntl") or argument.__name__ in _PURE:
                return
        elif event != "call" or frame.f_code is not durable.swap.__code__:  # called through ctypes
            return
        self.seen += 1
        if self.seen == self._n:
            if self._fault is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise OSError(self._fault, os.strerror(self._fault))


def traced_calls(action: Action, log: Path, calls: str) -> list[tuple[str, int]]:
    """The system calls of an action, each by its name and which of that name it is.

    Raises:
        PermissionError: This system does not let strace attach to a process.
    """
    assert run_traced(action, log, calls) == "done"
    seen: Counter[str] = Counter()
    points = []
    for line in log.read_text().splitlines():
        if found := re.match(r"(?:\d+ +)?(\w+)\(", line):
            seen[found[1]] += 1
            points.append((found[1], seen[found[1]]))
    return points


def run_traced(action: Action, log: Path, calls: str, inject: str | None = None) -> Outcome:
    """Do it in a process of its own under strace.

    Args:
        action: What to do.
        log: Where the calls are written.
        calls: Which, as strace has it: ``%file,%desc``.
        inject: What happens at which of them: ``fsync:signal=KILL:when=2``.
    """
    ready, go = os.pipe()

    def waiting() -> None:
        os.read(ready, 1)
        action()

    child = _fork(waiting)
    options = ["-e", f"inject={inject}"] if inject else []
    command = ["strace", "-p", str(child), "-o", str(log), "-e", f"trace={calls}", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        attached = tracer.stderr.readline()
        os.write(go, b"x")
        outcome = _wait(child)
        os.close(ready)
        os.close(go)
        tracer.stderr.read()
    if "attached" not in attached:
        raise PermissionError(errno.EPERM, attached)
    return outcome


def has_strace() -> bool:
    return shutil.which("strace") is not None


def _fork(action: Action) -> int:
    """A child that does it and ends without any of the parent's exit handlers."""
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 4
    try:
        action()
        code = 0
    except CheckpointError:
        code = 3
    except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as a second test run
        traceback.print_exc()
    os._exit(code)


def _wait(child: int) -> Outcome:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in _CODES, (
        f"neither done nor refused nor killed; exit code {code}, see the traceback above"
    )
    return _CODES[code]
