"""Which sockets a process listens on, read from ``/proc``."""

import ipaddress
import os
import sys
from pathlib import Path

_LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of a process's listening TCP sockets, of both families."""
    own = _socket_inodes(pid)
    found: set[tuple[str, int]] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in own:
                address, _, port = fields[1].partition(":")
                found.add((_readable(address), int(port, 16)))
    return found


def _socket_inodes(pid: int) -> set[str]:
    inodes: set[str] = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _readable(address: str) -> str:
    words = [bytes.fromhex(address[i : i + 8]) for i in range(0, len(address), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return str(ipaddress.ip_address(packed))
