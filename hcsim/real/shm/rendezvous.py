"""Where processes of one machine meet to share memory.

A process that listens at an address of the loopback also listens at a Unix socket of that address's name. A process
that dials such an address tries this socket first, and brings the memory with it. Only processes of one user meet here.
Where anything about it does not work, it is TCP as between machines.

Where there is TLS, its handshake is made over the Unix socket: both prove themselves as they would over TCP. What they
then exchange is not encrypted, because it does not leave memory that nobody else has. Lest one who got between them
has it too, each says over TLS which process it is, and the other asks the system whether that is who it speaks to.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import sys
import tempfile
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from hcsim.errors import ChannelBroken
from hcsim.real.shm.stream import SharedStream, attached, new_memory
from hcsim.real.sockets import is_distrust, own, readable
from hcsim.real.tls import Tls
from hcsim.runtime.address import join_address

ABSTRACT = sys.platform == "linux"
"""Whether a Unix socket can have a name that is no file; it belongs to a network namespace then, as addresses do."""
_VERSION = 4
"""Of the memory's layout and of how it is brought: unlike versions do not find each other's sockets."""
_BACKLOG = 128
_GREETING_BYTES = 64
"""The fixed length of a greeting: the bytes behind it may be read together with it, except for the descriptor."""
_TAKEN, _MEANT = b"!", b"."
"""The two words of the agreement: the receiver of the memory has attached it, then the sender confirms. The
channel exists only after both."""
_ANSWER_S = 5.0
"""The time limit for an answer. A process that is busy for longer (with imports, say) may still be reached by TCP,
where the kernel accepts for it."""
_PROCESS_BYTES = 8
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_LONGEST_PATH_BYTES = 103
"""A Unix socket's address has 104 bytes on macOS, with the zero at its end; Linux has four more."""
_SHORT = "/tmp"
"""Where sockets go if the temporary folder's path is too long for them."""
_EVERYWHERE = ("0.0.0.0", "::")
_SOL_LOCAL, _LOCAL_PEERCRED, _LOCAL_PEERPID = 0, 1, 2
"""Constants of macOS's <sys/un.h>, which Python does not define."""


class ShmPeer(NamedTuple):
    """A stream, and the identity of the peer as far as it is proved (see `Channel`)."""

    stream: SharedStream
    identity: str = ""
    binding: bytes = b""


class Rendezvous:
    """Where processes of this machine come in that bring memory."""

    def __init__(self, sock: socket.socket, place: str) -> None:
        self.sock = sock
        self._place = place

    @classmethod
    def open(cls, sockaddr: Any, *, tls: bool) -> Rendezvous | None:
        """Beside a socket that listens there; None where no such socket is possible."""
        if not (sockaddr[0] in _EVERYWHERE or ip_address(sockaddr[0]).is_loopback):
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            place = _place(sockaddr, tls=tls)
            _remove(place)  # left by one that was killed: the address is ours now
            sock.setblocking(False)
            sock.bind(place)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            return None
        return cls(sock, place)

    def close(self) -> None:
        """Nobody comes in any more."""
        self.sock.close()
        _remove(self._place)


def peer_process(sock: socket.socket) -> str:
    """Who is at the other end, in words; raises `OSError` if it is another user's process."""
    user, process = _credentials(sock)
    name = f"process {process} of this machine"
    if user != os.getuid():
        raise PermissionError(f"{name} is another user's")
    return name


async def accept(sock: socket.socket, peer: str, tls: Tls | None) -> ShmPeer:
    """The stream through the memory that a caller has brought."""
    await readable(sock)
    greeting, memories, _, _ = socket.recv_fds(sock, _GREETING_BYTES, 1, _CLOSED_ON_EXEC)
    try:
        address = greeting.decode("ascii", "replace").rstrip()
        try:
            brought = ip_address(address).is_loopback and len(memories) == 1
        except ValueError:
            brought = False
        if not brought:
            raise ChannelBroken(f"{peer} came in without memory to share", peer)
        met = await _meet(sock, tls, memories[0], address, caller=False)
        if met is None:  # it has lost its patience, and calls by TCP
            raise ChannelBroken(f"{peer} went away again", peer)
        return met
    finally:
        for memory in memories:
            os.close(memory)


async def dial(sockaddr: Any, patience_s: float, tls: Tls | None) -> ShmPeer | None:
    """To who listens there, if it is a process of ours that listens here too and takes what we bring in that time.

    Raises `SSLError` where one of the two does not trust the other: it would not by TCP either."""
    if not ip_address(sockaddr[0]).is_loopback:
        return None
    for host in (sockaddr[0], *_everywhere(sockaddr[0])):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            return await _bring(sock, (host, sockaddr[1]), sockaddr[0], patience_s, tls)
        except TimeoutError:
            sock.close()
            return None  # what is left of the time is for TCP
        except OSError as error:
            sock.close()
            if is_distrust(error):
                raise
        except BaseException:
            sock.close()
            raise
    return None


def _everywhere(host: str) -> tuple[str, ...]:
    """Return the wildcard addresses that cover this one. Different processes may listen at that of IPv6 and that of
    IPv4."""
    return _EVERYWHERE[1:] if ":" in host else _EVERYWHERE


async def _bring(
    sock: socket.socket, listener: tuple[str, int], address: str, patience_s: float, tls: Tls | None
) -> ShmPeer:
    sock.setblocking(False)
    own(sock)
    sock.connect(_place(listener, tls=tls is not None))
    peer_process(sock)
    memory = new_memory()
    try:
        socket.send_fds(sock, [address.encode("ascii").ljust(_GREETING_BYTES)], [memory])
        async with asyncio.timeout(min(patience_s, _ANSWER_S)):
            met = await _meet(sock, tls, memory, address, caller=True)
        if met is None:
            raise ConnectionRefusedError
        return met
    finally:
        os.close(memory)


async def _meet(sock: socket.socket, tls: Tls | None, memory: int, address: str, *, caller: bool) -> ShmPeer | None:
    """Run the TLS handshake, if any, and agree that the memory is shared.

    Return None if the peer does not agree, or is not the process that it claims to be."""
    talk, identity, binding, us, them = sock, "", b"", b"", b""
    if tls is not None:
        us, them = (number.to_bytes(_PROCESS_BYTES, "big") for number in (os.getpid(), _credentials(sock)[1]))
        talk, identity, binding = await tls.handshake(sock, server_side=not caller)
    try:
        rings = attached(memory, talk, first=caller)
        if caller:
            agreed = await _heard(talk, _TAKEN + them)
            if agreed:
                talk.send(_MEANT + us)
        else:
            talk.send(_TAKEN + us)
            agreed = await _heard(talk, _MEANT + them)
        if not agreed:
            talk.close()
            return None
        bell = talk if tls is None else _undressed(talk)
        return ShmPeer(SharedStream(bell, rings, address), identity, binding)
    except BaseException:
        talk.close()
        raise


async def _heard(talk: socket.socket, word: bytes) -> bool:
    """Return whether the peer sends that word next."""
    while True:
        try:
            return talk.recv(len(word)) == word
        except (BlockingIOError, ssl.SSLWantReadError):
            await readable(talk)


def _undressed(talk: socket.socket) -> socket.socket:
    """Return the socket without TLS. OpenSSL reads whole records, so it has read no later bytes."""
    sock = socket.socket(fileno=talk.detach())
    sock.setblocking(False)
    own(sock)
    return sock


def _place(sockaddr: Any, *, tls: bool) -> str:
    """Where the socket of an address is; a process without TLS does not find that of one with it."""
    name = f"hcsim-{_VERSION}-{'tls-' if tls else ''}{join_address((sockaddr[0], sockaddr[1]))}"
    if ABSTRACT:
        return f"\0{name}"
    folder = f"hcsim-{os.getuid()}"
    paths = (Path(base, folder, name) for base in (tempfile.gettempdir(), _SHORT))
    path = next(path for path in paths if len(os.fsencode(path)) <= _LONGEST_PATH_BYTES)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path.parent} is another user's")
    return str(path)


def _remove(place: str) -> None:
    if not ABSTRACT:
        Path(place).unlink(missing_ok=True)


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the user id and the process id of the peer."""
    if sys.platform == "linux":
        process, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return user, process
    _, user = struct.unpack("2I", sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 76)[:8])
    return user, sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
