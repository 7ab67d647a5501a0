"""Streams over a TCP connection, plain or TLS."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import ssl
import sys
import termios
from contextlib import suppress

from hcsim.real.sockets import SocketReadiness, own
from hcsim.real.stream import Forwarder, Parts
from hcsim.real.tcp_info import segment_counts
from hcsim.runtime.channel import Fold, SegmentCounts

try:
    from hcsim.real.folding import receive_sum
except ImportError:  # there was no compiler: whoever receives adds up afterwards
    receive_sum = None  # type: ignore[assignment]

_READ_AHEAD_BYTES = 4 * 1024
_DISCARDED_BYTES = 64 * 1024
_DISCARDS_PER_LOOK = 64
_SO_NWRITE = 0x1024
"""macOS's option for the bytes that a socket still has to send, or send again."""
_TLS_RECORD_BYTES = 16 * 1024


def tune(sock: socket.socket) -> None:
    """Set the options of a connected socket, dialled or accepted.

    The socket buffers stay with the kernel: on loopback its autotuning was at least as fast as a fixed 1 or 4 MiB
    and up to twice as fast as 256 KiB, and a fixed size would also fix the window on long paths."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _SocketStream:
    """Common base of the socket streams: a connected, non-blocking socket, which the stream owns."""

    read_ahead_bytes = _READ_AHEAD_BYTES
    forwarder: Forwarder | None = None

    def __init__(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._sock = sock
        self.incoming = SocketReadiness(sock.fileno(), loop.add_reader, loop.remove_reader)
        self.outgoing = SocketReadiness(sock.fileno(), loop.add_writer, loop.remove_writer)
        self.ends = _ends(sock)
        self.read = sock.recv_into
        own(sock)

    def hides_room(self) -> bool:
        """Return False: the event loop sees the kernel's buffers."""
        return False

    def finish(self) -> None:
        with suppress(OSError):  # the peer may have been faster
            self._sock.shutdown(socket.SHUT_WR)

    def segments(self) -> SegmentCounts | None:
        return segment_counts(self._sock)

    def undelivered_bytes(self) -> int:
        return 0 if self._discard_input() else _unacknowledged_bytes(self._sock)

    def _discard_input(self) -> bool:
        """Discard the input, since closing on unread input would reset the connection; return whether the input has
        ended.

        TLS ended with `finish`, so these are raw bytes."""
        try:
            for _ in range(_DISCARDS_PER_LOOK):
                if not self._sock.recv(_DISCARDED_BYTES):
                    return True
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    def close(self) -> None:
        self._sock.close()


class TcpStream(_SocketStream):
    """A plain TCP stream."""

    carrier = "TCP"
    reports_late = False

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.write = sock.sendmsg
        self.adds = receive_sum is not None

    def add(self, fold: Fold, have: int, most: int) -> int:
        return receive_sum(self._sock.fileno(), fold.room, fold.into, fold.numbers, have, most)

    def hides_bytes(self) -> bool:
        """Return False: the event loop sees the kernel's buffers."""
        return False


class TlsStream(_SocketStream):
    """A TLS stream, after its handshake."""

    carrier = "TLS"
    reports_late = True
    """OpenSSL may hold part of a record that it has not reported as written."""
    adds = False

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock

    def write(self, parts: Parts) -> int:
        """Write the parts. OpenSSL has no gathering write; joining small frames keeps each in one record."""
        if sum(map(len, parts)) <= _TLS_RECORD_BYTES:
            return self._tls.send(b"".join(parts))
        return self._tls.send(parts[0])

    def add(self, fold: Fold, have: int, most: int) -> int:
        """Not supported, as `adds` says."""
        raise NotImplementedError

    def hides_bytes(self) -> bool:
        """Return whether OpenSSL has decrypted bytes."""
        return self._tls.pending() > 0


def _unacknowledged_bytes(sock: socket.socket) -> int:
    """Return the bytes that the peer's system has not acknowledged. On Linux the own FIN counts as one, and is
    subtracted."""
    if sys.platform == "darwin":
        return sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
    return max(int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder) - 1, 0)


def _ends(sock: socket.socket) -> tuple[str, str]:
    """Return the two addresses of a connection, with IPv4 addresses of dual-stack sockets in IPv4 notation."""
    try:
        ends = sock.getsockname(), sock.getpeername()
    except OSError:  # the peer has gone again
        return "", ""
    ours, theirs = (str(end[0]).removeprefix("::ffff:") if end else "" for end in ends)
    return ours, theirs
