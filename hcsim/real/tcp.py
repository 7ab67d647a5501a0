"""A channel over one TCP connection, plain or TLS.

Throughput comes from doing little: no stream buffers, no transport. A frame leaves in one `sendmsg`
of header and payload; a payload is received straight into its destination, or added to it. Each direction tries
its system call at once, and only when the socket would block does the event loop take over. The
loop's callback then moves the bytes itself and wakes the waiting task once, when all are there.

Headers are read through a small read-ahead buffer, so that a run of small frames costs one system
call and a large one copies no more than the read-ahead.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from hcsim.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    PeerRefused,
    RemoteProtocolError,
    UsageError,
)
from hcsim.real.buffers import bytes_of, fresh, room_for
from hcsim.real.direction import Direction
from hcsim.real.forked import own
from hcsim.real.tls_failures import HandshakeCut, handshake_cut, tls_failure, unexpected_tls
from hcsim.runtime.channel import EMPTY, Fold, Payload, Place
from hcsim.runtime.frame import HEADER_BYTES, Header, decode_header, encode_header

try:
    from hcsim.real.folding import receive_sum
except ImportError:  # there was no compiler: whoever receives adds up afterwards
    receive_sum = None  # type: ignore[assignment]

FIRST_MAX_FRAME_BYTES = 64 * 1024
"""What a peer may send before somebody raises the limit: enough to say hello."""
_READ_AHEAD_BYTES = 4 * 1024
_LARGE_BYTES = 64 * 1024
_BYTES_PER_TURN = 4 * 2**20
"""How much is read in a row before other tasks get their turn."""
_SENDS_PER_TURN = 16
_LINGER_S = 0.25
_TLS_RECORD_BYTES = 16 * 1024
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_Parts: TypeAlias = list[bytes | memoryview]


def tune(sock: socket.socket) -> None:
    """Set what every connected socket of ours needs, dialled or accepted.

    The socket buffers stay with the kernel: on loopback its autotuning was at least as fast as a fixed 1 or
    4 MiB and up to twice as fast as 256 KiB, and a fixed size would also fix the window on long paths.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def translated(error: OSError, peer: str) -> ChannelError:
    """What the system's or OpenSSL's error means for the channel to `peer`."""
    if isinstance(error, ssl.SSLError):
        return tls_failure(error, peer)
    if isinstance(error, HandshakeCut):
        return handshake_cut(peer)
    if isinstance(error, ConnectionRefusedError):
        return PeerRefused(f"nobody listens at {peer}", peer)
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return ChannelBroken(f"{peer} reset the connection", peer)
    return ChannelBroken(f"the connection to {peer} failed: {error.strerror or error}", peer)


class TcpChannel:
    """A channel over a connected, non-blocking socket, which it owns from now on."""

    def __init__(self, sock: socket.socket, peer: str, identity: str = "", binding: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._write: Callable[[_Parts], int] = sock.sendmsg if self._tls is None else self._write_tls
        self._peer = peer
        self._identity = identity
        self._binding = binding
        self._ends = _ends(sock)
        self._loop = loop
        self._max_frame_bytes = FIRST_MAX_FRAME_BYTES
        self._error: ChannelError | None = None

        self._incoming = Direction(sock.fileno(), loop.add_reader, loop.remove_reader)
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._ahead_start = 0
        self._ahead_end = 0
        self._into = EMPTY
        self._fold: Fold | None = None
        self._missing_bytes = 0
        self._turn_bytes = 0

        self._outgoing = Direction(sock.fileno(), loop.add_writer, loop.remove_writer)
        self._turn = asyncio.Lock()
        self._unsent: _Parts = []
        self._unsent_bytes = 0
        self._send_error: ChannelError | None = None
        own(sock)

    @property
    def peer(self) -> str:
        """The other end's address."""
        return self._peer

    @property
    def identity(self) -> str:
        """What TLS has proved; TCP alone proves nobody's."""
        return self._identity

    @property
    def ends(self) -> tuple[str, str]:
        """The socket's."""
        return self._ends

    @property
    def binding(self) -> bytes:
        """TLS's; TCP alone encrypts nothing."""
        return self._binding

    def limit(self, max_frame_bytes: int) -> None:
        """Refuse larger payloads from now on."""
        self._max_frame_bytes = max_frame_bytes

    async def send(self, header: Header, payload: Payload = EMPTY) -> None:
        """Send one frame; see `Channel.send`."""
        data, head = bytes_of(header, payload), encode_header(header)
        async with self._turn:
            self._raise_if_over(self._error or self._send_error)
            self._unsent = [head, data]
            self._unsent_bytes = frame_bytes = HEADER_BYTES + header.length
            try:
                if not self._push():
                    await self._outgoing.finish(self._push)
            except asyncio.CancelledError:
                # OpenSSL may hold part of a record that it has not reported as written.
                begun = self._unsent_bytes < frame_bytes or self._tls is not None
                if begun and self._unsent_bytes:
                    self._end(ChannelBroken(f"a frame to {self._peer} was cancelled half-way", self._peer))
                raise
            except OSError as error:
                # Only sending is over: what the peer said before it went can still be read.
                self._send_error = translated(error, self._peer)
                raise self._send_error from error
            finally:
                self._unsent = []

    async def recv(self, place: Place) -> tuple[Header, Payload]:
        """Receive the next frame; see `Channel.recv`. A `place` that fails leaves the frame unread."""
        self._raise_if_over(self._error)
        if self._incoming.busy:
            raise UsageError(f"two tasks receive from {self._peer} at once")
        if self._ahead_end - self._ahead_start < HEADER_BYTES:
            await self._read_header()
        start = self._ahead_start
        try:
            header = decode_header(
                self._ahead[start : start + HEADER_BYTES], max_length=self._max_frame_bytes, peer=self._peer
            )
        except RemoteProtocolError as error:
            raise self._end(unexpected_tls(bytes(self._ahead[start : start + 2]), self._peer) or error) from None
        where = place(header)
        while isinstance(where, asyncio.Future):
            await asyncio.shield(where)
            self._raise_if_over(self._error)
            where = place(header)
        view = room_for(header, where)
        start += HEADER_BYTES
        have = min(self._ahead_end - start, header.length)
        view[:have] = self._ahead[start : start + have]
        self._ahead_start = start + have
        if have == header.length:
            return header, view
        if isinstance(where, Fold) and receive_sum is not None and self._tls is None:
            self._fold = where
            await self._read_payload(have, header.length, self._pull_sum)
            return header, where.into
        self._into = view[have:]
        await self._read_payload(have, header.length, self._pull)
        return header, view

    async def close(self) -> None:
        """End it; see `Channel.close`."""
        if self._error is None:
            self._stop(ChannelClosed(f"we closed the channel to {self._peer}", self._peer))
            try:
                if self._tls is None and self._unread():
                    await self._drain()
            finally:
                self._sock.close()

    # -- receiving

    async def _read_header(self) -> None:
        ahead = self._ahead
        have = self._ahead_end - self._ahead_start
        ahead[:have] = ahead[self._ahead_start : self._ahead_end]
        self._ahead_start, self._ahead_end = 0, have
        self._into, self._missing_bytes = ahead[have:], HEADER_BYTES - have
        try:
            # After a large frame, who waited for it goes first: it will say where the next one goes.
            await self._fill(self._pull, at_once=self._turn_bytes < _LARGE_BYTES)
        except EOFError:
            received = bytes(ahead[: len(ahead) - len(self._into)])
            over = unexpected_tls(received, self._peer) or self._end_of_stream(within_frame=bool(received))
            raise self._end(over) from None
        finally:
            self._ahead_end = len(ahead) - len(self._into)

    async def _read_payload(self, have: int, size_bytes: int, pull: Callable[[], bool]) -> None:
        self._missing_bytes = size_bytes - have
        try:
            await self._fill(pull)
        except asyncio.CancelledError:
            self._end(ChannelBroken(f"a frame from {self._peer} was cancelled half-way", self._peer))
            raise
        except EOFError:
            raise self._end(self._end_of_stream(within_frame=True)) from None
        finally:
            self._into, self._fold = EMPTY, None

    async def _fill(self, pull: Callable[[], bool], *, at_once: bool = True) -> None:
        try:
            if at_once and pull():
                return
            self._wake_for_decrypted()
            await self._incoming.finish(lambda: self._next_turn(pull))
        except OSError as error:
            raise self._end(translated(error, self._peer)) from error

    def _pull(self) -> bool:
        """Read on; True when nothing is missing, False when the loop has to call again."""
        while self._turn_bytes < _BYTES_PER_TURN:
            try:
                count = self._sock.recv_into(self._into)
            except _WOULD_BLOCK:
                return False
            if count == 0:
                raise EOFError
            self._into = self._into[count:]
            self._turn_bytes += count
            self._missing_bytes -= count
            if self._missing_bytes <= 0:
                return True
        self._wake_for_decrypted()
        return False

    def _wake_for_decrypted(self) -> None:
        """The selector cannot see what OpenSSL has read and decrypted already."""
        if self._tls is not None and self._tls.pending():
            self._loop.call_soon(self._incoming.ready)

    def _pull_sum(self) -> bool:
        """The same for what is added up as it comes."""
        fold, most = self._fold, _BYTES_PER_TURN - self._turn_bytes
        assert fold is not None
        if most > 0:
            have = len(fold.into) - self._missing_bytes
            count = receive_sum(self._sock.fileno(), fold.room, fold.into, fold.element_bytes, have, most)
            self._turn_bytes += count
            self._missing_bytes -= count
        return not self._missing_bytes

    def _next_turn(self, pull: Callable[[], bool]) -> bool:
        self._turn_bytes = 0
        return pull()

    def _end_of_stream(self, *, within_frame: bool) -> ChannelBroken:
        where = "in the middle of a frame" if within_frame else "between two frames"
        return ChannelBroken(f"{self._peer} ended the connection {where}", self._peer)

    # -- sending

    def _push(self) -> bool:
        """Write on; True when the frame has left, False when the loop has to call again."""
        for _ in range(_SENDS_PER_TURN):
            try:
                count = self._write(self._unsent)
            except _WOULD_BLOCK:
                return False
            self._unsent_bytes -= count
            if not self._unsent_bytes:
                return True
            self._unsent = _without_first(count, self._unsent)
        return False

    def _write_tls(self, parts: Sequence[bytes | memoryview]) -> int:
        """OpenSSL gathers nothing; joining a small frame keeps it in one record."""
        assert self._tls is not None
        if sum(map(len, parts)) <= _TLS_RECORD_BYTES:
            return self._tls.send(b"".join(parts))
        return self._tls.send(parts[0])

    # -- ending

    @property
    def is_open(self) -> bool:
        """Whether it can still be used."""
        return self._error is None

    def _raise_if_over(self, error: ChannelError | None) -> None:
        if error is not None:
            raise fresh(error)

    def _end(self, error: ChannelError) -> ChannelError:
        """Close the socket; every later or waiting use raises the first error given here."""
        if self._error is None:
            self._stop(error)
            self._sock.close()
        return self._error or error

    def _stop(self, error: ChannelError) -> None:
        self._error = error
        self._incoming.abandon(error)
        self._outgoing.abandon(error)
        with suppress(OSError):  # the peer may have been faster
            self._sock.shutdown(socket.SHUT_WR)

    def _unread(self) -> bool:
        """Whether something has come that nobody read: to close on it would reset the connection."""
        try:
            return bool(self._sock.recv(1))
        except OSError:
            return False

    async def _drain(self) -> None:
        """Let what we sent arrive: a reset would overtake it."""
        rest = bytearray(_LARGE_BYTES)
        with suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(_LINGER_S):
                while await self._loop.sock_recv_into(self._sock, rest):
                    pass


def _ends(sock: socket.socket) -> tuple[str, str]:
    """The two addresses of a connection; IPv4 ones as such, also where the socket is of both kinds."""
    try:
        ends = sock.getsockname(), sock.getpeername()
    except OSError:  # the peer has gone again
        return "", ""
    ours, theirs = (str(end[0]).removeprefix("::ffff:") if end else "" for end in ends)
    return ours, theirs


def _without_first(count: int, parts: _Parts) -> _Parts:
    head = parts[0]
    if count < len(head):
        return [memoryview(head)[count:], *parts[1:]]
    if len(parts) == 1:
        return []
    return _without_first(count - len(head), parts[1:])
