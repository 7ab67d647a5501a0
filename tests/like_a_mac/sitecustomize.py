"""What Python imports at its start with this folder in PYTHONPATH: Unix sockets and pipes hold as little as on macOS.

There a Unix socket has 8 KiB, and a pipe may have no more than a page. A writer of more than that waits for the
reader, which hardly happens in a test with Linux's buffers.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from typing import Any

_SOCKET_BYTES = 8 << 10
_PIPE_BYTES = 4 << 10
_make_socket, _make_pipe = socket.socket.__init__, os.pipe


def _init(self: socket.socket, *args: Any, **kwargs: Any) -> None:
    _make_socket(self, *args, **kwargs)
    if self.family == socket.AF_UNIX:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.setsockopt(socket.SOL_SOCKET, buffer, _SOCKET_BYTES // 2)  # Linux doubles it, for what it keeps beside


def _pipe() -> tuple[int, int]:
    ends = _make_pipe()
    fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return ends


if sys.platform == "linux":
    socket.socket.__init__, os.pipe = _init, _pipe  # type: ignore[method-assign]
