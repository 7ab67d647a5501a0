"""Sockets in an event loop, which finishes what would block, and in forked children, which let go of them; and
the translation of their errors into messages for the users at both ends.

A forked child closes sockets of its parent, whose other ends wait for the end of the parent, and memory that the
parent shares with others.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Protocol
from weakref import WeakSet

from hcsim.errors import ChannelBroken, ChannelError, ConfigError, PeerRefused, RemoteProtocolError, WrongPeer
from hcsim.real.interfaces import is_in_own_network
from hcsim.runtime.address import parse

LOCAL_NETWORK = (
    "System Settings › Privacy & Security › Local Network: allow the program that hcsim was started in "
    "(iTerm, VS Code and others need that; Terminal and ssh do not)"
)
_RECORD_STARTS = {
    b"\x15\x03": "expects TLS, and we spoke plaintext to it",
    b"\x16\x03": "spoke TLS to a plaintext port",
}
"""How TLS looks to a peer that does not expect it: an alert, or the first message of a handshake."""
_SAME_PHRASE = (
    "join both to one cluster (`hcsim cluster invite` on a member, `hcsim cluster join` on the other), or give both "
    "certificates of one authority"
)
_CLOCKS = "are the clocks of both machines right?"

_IP_BOUND_IF = 25
"""Of macOS's <netinet/in.h>, which Python does not define."""
_EXPIRED, _NOT_YET_VALID = 10, 9
_UNKNOWN_AUTHORITY = (2, 7, 18, 19, 20, 21)
"""X509_V_ERR_…: no issuer found, an invalid signature, a self-signed certificate, and similar errors."""

PLAINTEXT = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "BAD_RECORD_TYPE",
)
"""OpenSSL's reasons for input that is not TLS."""
_OLD_TLS = ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE")
_ALERTS = {
    "UNKNOWN_CA": f"its authority did not sign our certificate: {_SAME_PHRASE}",
    "DECRYPT_ERROR": f"its authority did not sign our certificate: {_SAME_PHRASE}",
    "CERTIFICATE_EXPIRED": f"our certificate has expired: {_CLOCKS}",
    "BAD_CERTIFICATE": f"our certificate is not valid there: {_CLOCKS}",
    "CERTIFICATE_UNKNOWN": "our certificate is not valid there",
    "CERTIFICATE_REQUIRED": "it wants a certificate, and we showed none",
    "PROTOCOL_VERSION": "it speaks another version of TLS; hcsim needs 1.3",
}


_ABOUT_CERTIFICATES = tuple(alert for alert in _ALERTS if alert != "PROTOCOL_VERSION")


class HandshakeCut(ConnectionResetError):
    """The connection ended in the middle of the TLS handshake."""

    def __init__(self, *, theirs: bool) -> None:
        super().__init__()
        self.theirs = theirs
        """Whether the peer had dialled, and so knew that this end expects TLS."""


class AnotherNode(ConnectionError):
    """The node that answered has proved that it is not the wanted one."""

    def __init__(self, identity: str) -> None:
        super().__init__()
        self.identity = identity


def translated(error: OSError, peer: str) -> ChannelError:
    """Return the `ChannelError` that an error of the operating system or of OpenSSL means for the channel to `peer`."""
    if isinstance(error, AnotherNode):
        return WrongPeer(f"another node answers at {peer}: {error.identity}", peer, error.identity)
    if isinstance(error, ssl.SSLError):
        return _tls_failure(error, peer)
    if isinstance(error, HandshakeCut):
        doubt = "" if error.theirs else ": does it expect plaintext?"
        return ChannelBroken(f"{peer} ended the connection during the TLS handshake{doubt}", peer)
    if isinstance(error, ConnectionRefusedError):
        return PeerRefused(f"nobody listens at {peer}", peer)
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return ChannelBroken(f"{peer} reset the connection", peer)
    why = error.strerror or str(error) or "no answer"
    if error.errno == errno.EHOSTUNREACH and sys.platform == "darwin" and _is_in_reach(peer):
        why += f"; if {peer} is on: {LOCAL_NETWORK}"
    return ChannelBroken(f"the connection to {peer} failed: {why}", peer)


def _is_in_reach(peer: str) -> bool:
    """Return whether the peer is in a network of this machine's own, where no route is needed: macOS says that there is
    none when it keeps a program off the local network."""
    try:
        hosts = parse(peer).hosts
    except ConfigError:  # what a connection that was accepted is called
        return False
    return any(host.endswith(".local") or is_in_own_network(host) for host in hosts)


def is_final(error: OSError | None) -> bool:
    """Return whether further attempts at the same place are useless."""
    return error is not None and (isinstance(error, AnotherNode) or is_distrust(error))


def is_distrust(error: OSError) -> bool:
    """Return whether one side rejects the other's certificate; further attempts are then useless."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    return isinstance(error, ssl.SSLError) and (error.reason or "").rpartition("ALERT_")[2] in _ABOUT_CERTIFICATES


def _tls_failure(error: ssl.SSLError, peer: str) -> ChannelError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerRefused(f"we refused {peer}: {_what_is_wrong(error)}", peer)
    reason = error.reason or str(error)
    if "ALERT" in reason:
        alert = reason.rpartition("ALERT_")[2]
        why = _ALERTS.get(alert, alert.replace("_", " ").lower())
        return PeerRefused(f"{peer} refused the TLS connection: {why}", peer)
    if reason in PLAINTEXT:
        return RemoteProtocolError(f"{peer} speaks plaintext where TLS is needed: secure both ends or none", peer)
    if reason in _OLD_TLS:
        return PeerRefused(f"we refused {peer}: it does not speak TLS 1.3", peer)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return PeerRefused(f"we refused {peer}: it showed no certificate", peer)
    return ChannelBroken(f"TLS with {peer} failed: {reason.replace('_', ' ').lower()}", peer)


def unexpected_tls(received: bytes, peer: str) -> RemoteProtocolError | None:
    """Return an error if TLS was received where a frame should begin, or None."""
    what = _RECORD_STARTS.get(received[:2])
    return RemoteProtocolError(f"{peer} {what}: secure both ends or none", peer) if what else None


def _what_is_wrong(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return f"its certificate has expired: {_CLOCKS}"
    if error.verify_code == _NOT_YET_VALID:
        return f"its certificate is not valid yet: {_CLOCKS}"
    if error.verify_code in _UNKNOWN_AUTHORITY:
        return f"our authority did not sign its certificate: {_SAME_PHRASE}"
    return f"its certificate is not valid: {error.verify_message}"


def fresh(error: ChannelError) -> ChannelError:
    """Return a copy of an error: one exception object raised in several tasks would mix their tracebacks."""
    return type(error)(str(error), error.peer)


def bind_to_interface(sock: socket.socket, name: str) -> None:
    """Send IPv4 packets over this interface, whatever the routes say; where that is not allowed, as the routes say."""
    with suppress(PermissionError):  # Linux before 5.7 allows it only to root
        if sys.platform == "darwin":
            sock.setsockopt(socket.IPPROTO_IP, _IP_BOUND_IF, socket.if_nametoindex(name))
        elif sys.platform == "linux":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode() + b"\0")


class SocketReadiness:
    """One direction of a socket; the event loop completes what would block.

    The registration with the selector outlives the transfer, since the next one usually follows at once. It is
    dropped when the socket is ready and no task waits."""

    __slots__ = ("_fd", "_loop", "_step", "_unwatch", "_waiter", "_watch", "_watched")

    def __init__(self, fd: int, watch: Callable[..., object], unwatch: Callable[[int], bool]) -> None:
        self._fd = fd
        self._watch = watch
        self._unwatch = unwatch
        self._watched = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._step: Callable[[], bool] | None = None

    @property
    def busy(self) -> bool:
        return self._waiter is not None

    async def finish(self, step: Callable[[], bool]) -> None:
        """Call `step` whenever the socket is ready, until it returns True."""
        self._step = step
        self._waiter = waiter = self._loop.create_future()
        if not self._watched:
            self._watch(self._fd, self.ready)
            self._watched = True
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # mark as seen: the cancellation overtook it
            raise
        finally:
            self._waiter = self._step = None

    def ready(self) -> None:
        """Try the step again: the socket is ready, or something else has changed."""
        waiter, step = self._waiter, self._step
        if waiter is None or step is None:
            self._stop_watching()
        elif not waiter.done():
            failure, finished = None, False
            try:
                finished = step()
            except Exception as error:
                failure = error
            if waiter.done():
                return  # whoever took what came has given up
            if failure is not None:
                waiter.set_exception(failure)
            elif finished:
                waiter.set_result(None)

    def abandon(self, error: ChannelError) -> None:
        """Stop watching. A waiting task gets the error."""
        self._stop_watching()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(fresh(error))

    def _stop_watching(self) -> None:
        if self._watched:
            self._unwatch(self._fd)
            self._watched = False


async def readable(sock: socket.socket) -> None:
    """Return when there is something to read, or a connection to accept."""
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, called.set)
    try:
        await called.wait()
    finally:
        loop.remove_reader(sock)


class Closable(Protocol):
    """A socket or a similar resource."""

    def close(self) -> object:
        """Close it in this process only; the parent's copy stays open."""


_LISTENING: WeakSet[Closable] = WeakSet()
_OTHERS: WeakSet[Closable] = WeakSet()


def own(what: Closable, *, listens: bool = False) -> None:
    """Close this resource in every forked child. Programs started by `exec` do not inherit it anyway."""
    (_LISTENING if listens else _OTHERS).add(what)


def _let_go() -> None:
    # Listeners first: who sees a channel end, and calls again, must not be taken in for a parent that was killed.
    for what in (*_LISTENING, *_OTHERS):
        what.close()


os.register_at_fork(after_in_child=_let_go)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface on which nobody listens at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
