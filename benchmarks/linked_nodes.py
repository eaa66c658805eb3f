"""Two nodes on one machine: network namespaces joined by a link whose rate and delay are set by tc.

Processes of different nodes share cores and files but no network: what one sends to another node crosses the link,
which counts it. All of it, processes included, is gone when the context is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "link0"
NUM_NODES = 2
_ADDRESS = "10.213.77."
_MTU = 9000
_MIN_BURST_NBYTES = 1 << 17
"""Two of the largest packets that TCP hands to a link at once."""


class MissingMeans(RuntimeError):
    """This machine or this user cannot make namespaces and links; says what is missing."""


def address(node: int) -> str:
    """IPv4 address of a node on the link."""
    return f"{_ADDRESS}{node + 1}"


def shape(rate_gbit: float, delay_ms: float) -> None:
    """Limit what leaves the node that this process is on.

    Args:
        rate_gbit: In 1e9 bits per second; infinite: no limit.
        delay_ms: One way.
    """
    _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "pfifo")  # whatever was there is gone
    if delay_ms:
        _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "handle", "1:",
             "netem", "delay", f"{delay_ms}ms", "limit", "100000")  # fmt: skip
    if rate_gbit != float("inf"):
        where = ("parent", "1:1") if delay_ms else ("root",)
        burst = max(_MIN_BURST_NBYTES, int(rate_gbit * 1e9 / 8 / 1000))
        _run("tc", "qdisc", "replace", "dev", INTERFACE, *where, "handle", "10:",
             "tbf", "rate", f"{int(rate_gbit * 1e9)}bit", "burst", f"{burst}b", "latency", "50ms")  # fmt: skip


def sent_nbytes() -> int:
    """What has left the node that this process is on, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(
        f"expected the interface {INTERFACE}, found none: this process is on no node"
    )


class LinkedNodes:
    """Two nodes and the link between them, for the time of a ``with``.

    Args:
        delay_ms: Which is to be possible on the link.

    Raises:
        MissingMeans: When entered by somebody who is not root, without ``ip`` and ``tc``, or with a delay on a kernel
            without netem.
    """

    def __init__(self, delay_ms: float = 0.0) -> None:
        self._delay_ms = delay_ms
        self._spaces = [f"shardeddp-{os.getpid()}-{node}" for node in range(NUM_NODES)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LinkedNodes:
        _check_means()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def start(
        self, node: int, command: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> None:
        """Start a process on a node; its output goes to ``log``."""
        environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": INTERFACE}
        with log.open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self._spaces[node], *command],
                    env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )
            )  # fmt: skip

    def join(self, timeout_s: float) -> None:
        """Wait until all that was started has ended well.

        Raises:
            RuntimeError: One has failed; the others are ended.
            TimeoutError: They take longer than ``timeout_s`` seconds; they are ended.
        """
        until = time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for process in self._processes):
                failed = [
                    place for place, process in enumerate(self._processes) if process.returncode
                ]
                if failed:
                    raise RuntimeError(
                        f"process {failed[0]} ended with {self._processes[failed[0]].returncode}"
                    )
                if time.monotonic() > until:
                    raise TimeoutError(f"processes still run after {timeout_s:g} s")
                time.sleep(0.1)
            codes = [process.returncode for process in self._processes]
            if any(codes):
                raise RuntimeError(f"processes ended with {codes}, expected 0")
        finally:
            self._end_processes()

    def _build(self) -> None:
        for space in self._spaces:
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
        first, second = self._spaces
        _run("ip", "link", "add", INTERFACE, "mtu", str(_MTU), "netns", first,
             "type", "veth", "peer", "name", INTERFACE, "mtu", str(_MTU), "netns", second)  # fmt: skip
        for node, space in enumerate(self._spaces):
            _run("ip", "-n", space, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
            _run("ip", "-n", space, "link", "set", INTERFACE, "up")
        if self._delay_ms:
            try:
                _run(
                    "tc",
                    "-n",
                    first,
                    "qdisc",
                    "replace",
                    "dev",
                    INTERFACE,
                    "root",
                    "netem",
                    "delay",
                    "1ms",
                )
            except RuntimeError as error:
                raise MissingMeans(
                    f"a delay of {self._delay_ms:g} ms needs tc's netem, which this kernel lacks ({error}); leave "
                    f"the delay out, or use a kernel with CONFIG_NET_SCH_NETEM"
                ) from None

    def _end_processes(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes = []

    def _remove(self) -> None:
        self._end_processes()
        there = subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, check=False
        ).stdout.split()
        for space in self._spaces:
            if space in there:
                inside = subprocess.run(
                    ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
                )
                for pid in inside.stdout.split():
                    os.kill(int(pid), signal.SIGKILL)  # what a rank has started and not ended
                subprocess.run(["ip", "netns", "del", space], check=False)  # and with it the link


def _check_means() -> None:
    if os.geteuid() != 0:
        raise MissingMeans("network namespaces are made by root: run it as root (sudo -E)")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise MissingMeans(
            f"expected the programs ip and tc, found no {' and no '.join(missing)}: install iproute2"
        )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
