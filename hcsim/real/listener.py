"""Listeners of stream channels.

A listener bounds the resources of unauthenticated clients. TLS handshakes run concurrently, each with a
deadline. The number of connections that have not been accepted yet is capped; those beyond it wait in the
kernel's queue. Each address can have only a part of them. When there is no room, the oldest handshake of the
address with the most of them is cancelled. When descriptors run out, accepting pauses, with one warning.

`AcceptQueue` bounds the channels that a server has taken and that have not been accepted yet.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from errno import EADDRINUSE
from ipaddress import ip_address
from typing import Any

import ifaddr

from hcsim.errors import ChannelBroken, ChannelClosed, ChannelError
from hcsim.real.message_channel import MessageChannel
from hcsim.real.shm.rendezvous import Rendezvous, accept, peer_process
from hcsim.real.sockets import own, readable, translated
from hcsim.real.stream_channel import StreamChannel
from hcsim.real.tcp import TcpStream, TlsStream, tune
from hcsim.real.tls import Tls
from hcsim.runtime.address import join_address

MAX_UNACCEPTED = 64


class AcceptQueue:
    """A closable queue of channels that have not been accepted yet."""

    def __init__(self) -> None:
        self._channels: asyncio.Queue[MessageChannel | None] = asyncio.Queue()
        self.closed = False

    @property
    def full(self) -> bool:
        """Whether further clients have to be rejected for now."""
        return self.closed or self._channels.qsize() >= MAX_UNACCEPTED

    def put(self, channel: MessageChannel) -> None:
        self._channels.put_nowait(channel)

    async def get(self, address: str) -> MessageChannel:
        """Wait for the next channel. Raises `ChannelClosed` after the close."""
        channel = await self._channels.get()
        if channel is None:
            self._channels.put_nowait(None)  # for the next who asks
            raise ChannelClosed(f"the listener at {address} is closed", address)
        return channel

    async def close(self) -> None:
        """Close the queue and the channels in it."""
        self.closed = True
        while not self._channels.empty():
            if channel := self._channels.get_nowait():
                await channel.close()
        self._channels.put_nowait(None)


_MAX_UNACCEPTED = 64
_MAX_HANDSHAKES_PER_ADDRESS = 32
_BACKLOG = 128
_ACCEPT_RETRY_S = 0.1


class StreamListener:
    """Accepts channels at one address, and at the local socket beside it where there is one (see `shm`)."""

    def __init__(
        self,
        sock: socket.socket,
        local: Rendezvous | None,
        tls: Tls | None,
        handshake_timeout_s: float,
        accepted: Callable[[StreamChannel], None],
        refused: Callable[[ChannelError], None],
    ) -> None:
        self._sock = sock
        self._local = local
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._refused = refused
        self._handshakes: dict[str, dict[asyncio.Task[None], None]] = {}
        """The running handshakes by address, oldest first."""
        self._cut_off: set[asyncio.Task[None]] = set()
        self._warned = False
        self._accepted = accepted
        self._address = join_address(sock.getsockname())
        self._slots = asyncio.Semaphore(_MAX_UNACCEPTED)
        self._welcomed: asyncio.Queue[StreamChannel | None] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._serving = [self._start(self._serve(sock, self._welcome))]
        own(sock, listens=True)
        if local is not None:
            self._serving.append(self._start(self._serve(local.sock, self._welcome_local)))
            own(local.sock, listens=True)

    @property
    def address(self) -> str:
        """`host:port`, with the actual port."""
        return self._address

    async def accept(self) -> StreamChannel:
        """Return the next channel opened by a peer; with TLS, the peer has proved its membership."""
        channel = await self._welcomed.get()
        if channel is None:
            self._welcomed.put_nowait(None)  # for the next who asks
            raise ChannelClosed(f"the listener at {self._address} is closed", self._address)
        self._slots.release()
        return channel

    async def close(self) -> None:
        """Stop listening and close the channels that have not been accepted."""
        if self._sock.fileno() < 0:
            return
        async with AsyncExitStack() as stack:  # from the last to the first, also where it is cancelled meanwhile
            stack.callback(self._welcomed.put_nowait, None)
            stack.push_async_callback(self._close_welcomed)
            if self._local is not None:
                stack.callback(self._local.close)
            stack.callback(self._sock.close)
            stack.push_async_callback(self._end_welcomes)
            await _end(*self._serving)

    async def _end_welcomes(self) -> None:
        try:
            await asyncio.sleep(0)  # one that was cancelled before its first step would leave its socket open
        finally:
            await _end(*self._tasks)

    async def _close_welcomed(self) -> None:
        async with AsyncExitStack() as stack:
            while not self._welcomed.empty():
                if channel := self._welcomed.get_nowait():
                    stack.push_async_callback(channel.close)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"listener {self._address}")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def _serve(
        self, listening: socket.socket, welcome: Callable[[socket.socket, Any], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            await readable(listening)
            if self._slots.locked():
                self._cut_off_one()
            await self._slots.acquire()
            # `loop.sock_accept` would drop a caller without closing it if we are cancelled in the moment it comes.
            try:
                sock, remote = listening.accept()
            except BlockingIOError:  # the caller has gone again
                self._slots.release()
            except OSError as error:  # out of descriptors
                self._slots.release()
                if not self._warned:
                    self._warned = True
                    self._refused(ChannelBroken(f"callers of {self._address} wait: {error.strerror}", self._address))
                await asyncio.sleep(_ACCEPT_RETRY_S)
            else:
                sock.setblocking(False)
                own(sock)
                self._start(welcome(sock, remote))

    async def _welcome(self, sock: socket.socket, remote: Any) -> None:
        address = remote[0].removeprefix("::ffff:")  # IPv4, as a socket of both kinds says it
        peer = join_address((address, remote[1]))
        task = asyncio.current_task()
        assert task is not None
        running = self._handshakes.setdefault(address, {})
        running[task] = None
        try:
            tune(sock)
            if self._tls is None:
                channel = StreamChannel(TcpStream(sock), peer)
            elif len(running) > _MAX_HANDSHAKES_PER_ADDRESS:
                raise ChannelBroken(f"too many TLS handshakes with {address} at once", peer)
            else:
                async with asyncio.timeout(self._handshake_timeout_s):
                    secured = await self._tls.handshake(sock, server_side=True)
                channel = StreamChannel(TlsStream(secured.sock), peer, secured.identity, secured.binding)
        except TimeoutError:
            self._turn_away(
                sock, ChannelBroken(f"{peer} did not finish the TLS handshake in {self._handshake_timeout_s:g} s", peer)
            )
        except OSError as error:
            self._turn_away(sock, translated(error, peer))
        except ChannelError as error:
            self._turn_away(sock, error)
        except asyncio.CancelledError:
            if task not in self._cut_off:
                raise
            self._cut_off.discard(task)
            self._turn_away(sock, ChannelBroken(f"{peer} has not finished the TLS handshake, and others wait", peer))
        else:
            self._accepted(channel)
            self._welcomed.put_nowait(channel)
        finally:
            del running[task]
            if not running:
                self._handshakes.pop(address, None)

    def _cut_off_one(self) -> None:
        """Cancel the oldest handshake of the address that has the most, unless each address has only one."""
        most = max(self._handshakes.values(), key=len, default={})
        waiting = [task for task in most if task not in self._cut_off]
        if len(waiting) > 1:
            self._cut_off.add(waiting[0])
            waiting[0].cancel()

    async def _welcome_local(self, sock: socket.socket, remote: Any) -> None:
        peer = "a process of this machine"
        try:
            peer = peer_process(sock)
            async with asyncio.timeout(self._handshake_timeout_s):
                met = await accept(sock, peer, self._tls)
            channel = StreamChannel(met.stream, peer, met.identity, met.binding)
        except TimeoutError:
            text = f"{peer} did not say what it wants in {self._handshake_timeout_s:g} s"
            self._turn_away(sock, ChannelBroken(text, peer))
        except OSError as error:
            self._turn_away(sock, translated(error, peer))
        except ChannelError as error:
            self._turn_away(sock, error)
        except BaseException:
            sock.close()
            raise
        else:
            self._accepted(channel)
            self._welcomed.put_nowait(channel)

    def _turn_away(self, sock: socket.socket, error: ChannelError) -> None:
        sock.close()
        self._slots.release()
        self._refused(error)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def listening_socket(family: int, sockaddr: Any) -> socket.socket:
    """Return a socket that listens there; raise `OSError` if another does, everywhere or at one of this machine's
    addresses."""
    if sockaddr[1] and ip_address(sockaddr[0]).is_unspecified:
        _check_each_address(family, sockaddr[1])
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sockaddr[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # everywhere is IPv4 too
        sock.bind(sockaddr)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _check_each_address(family: int, port: int) -> None:
    """Raise `OSError` if another socket listens at that port of one of this machine's addresses.

    On macOS one can still listen everywhere then, but is not called at that address."""
    for ip in (ip for adapter in ifaddr.get_adapters() for ip in adapter.ips):
        # IPv6 addresses come as (address, flow, scope).
        sockaddr = (ip.ip, port) if isinstance(ip.ip, str) else (ip.ip[0], port, *ip.ip[1:])
        kind = socket.AF_INET if isinstance(ip.ip, str) else socket.AF_INET6
        if kind not in (family, socket.AF_INET):
            continue
        with socket.socket(kind, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(sockaddr)
            except OSError as error:  # an address may also be too new to be used
                if error.errno == EADDRINUSE:
                    raise OSError(EADDRINUSE, f"{error.strerror} at {sockaddr[0]}") from None
