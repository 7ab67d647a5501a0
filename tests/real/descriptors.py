"""The sockets of this process, as the system has them."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from hcsim.runtime.address import join_address


def descriptor_to(peer: str) -> int:
    """Of the TCP socket that is connected to that address."""
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError, ValueError), socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as sock:
            if join_address(sock.getpeername()) == peer:  # ValueError: a Unix socket has none
                return number
    raise AssertionError(f"no socket goes to {peer}")
