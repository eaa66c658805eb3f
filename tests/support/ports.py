"""Ports of this machine that a test may listen on."""

import os
import socket

FIRST, LAST = 20_000, 32_000  # below those that the kernel gives to connections (32768 and up)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has.

    A rank may come to listen on it seconds later, when its imports are done. The kernel's own choice (port 0) is one
    that any connection of another test can have got by then.
    """
    while True:
        port = FIRST + int.from_bytes(os.urandom(4), "little") % (LAST - FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
