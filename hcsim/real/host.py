"""This machine, as a host: it dials, listens and runs tasks.

Plaintext stays on loopback unless somebody explicitly allows more. A listener limits what strangers
can take from it: handshakes run beside each other, each has a deadline, and there is a cap on
connections that nobody has accepted yet; those beyond it wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import ssl
import time
from collections.abc import Coroutine
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from hcsim import rng
from hcsim.errors import ChannelClosed, ChannelError, ConfigError, DeadlineExceeded, PeerRefused
from hcsim.real.clock import RealClock
from hcsim.real.device import RealDevice
from hcsim.real.interfaces import list_interfaces
from hcsim.real.tcp import TcpChannel, join_address, split_address, translated, tune
from hcsim.real.tls import TlsFiles, client_context, handshake, server_context
from hcsim.runtime.device import Device
from hcsim.runtime.host import CONNECT_TIMEOUT_S, Interface
from hcsim.telemetry.trace import Trace

if TYPE_CHECKING:
    from hcsim.real.mdns import MdnsLan

_HANDSHAKE_TIMEOUT_S = 5.0
_MAX_UNACCEPTED = 64
_BACKLOG = 128
_FIRST_RETRY_S = 0.02
_SLOWEST_RETRY_S = 1.0
_ACCEPT_RETRY_S = 0.1


class RealOptions(msgspec.Struct, frozen=True):
    """What a person decides about a real host."""

    name: str
    seed: int = 0
    tls: TlsFiles | None = None
    insecure: bool = False
    """Allow plaintext beyond loopback."""
    lan_interfaces: tuple[str, ...] = ()
    """Addresses to announce on; empty: all."""
    handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S


class TcpListener:
    """Accepts channels at one address."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext | None, handshake_timeout_s: float) -> None:
        self._sock = sock
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._address = join_address(sock.getsockname())
        self._slots = asyncio.Semaphore(_MAX_UNACCEPTED)
        self._welcomed: asyncio.Queue[TcpChannel | None] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._start(self._serve())

    @property
    def address(self) -> str:
        """`host:port`, with the port that was really taken."""
        return self._address

    async def accept(self) -> TcpChannel:
        """The next channel that a peer opened (and, with TLS, proved its membership on)."""
        channel = await self._welcomed.get()
        if channel is None:
            self._welcomed.put_nowait(None)  # for the next who asks
            raise ChannelClosed(f"the listener at {self._address} is closed", self._address)
        self._slots.release()
        return channel

    async def close(self) -> None:
        """Accept no more; what nobody accepted is closed."""
        if self._sock.fileno() < 0:
            return
        await asyncio.sleep(0)  # a welcome that was cancelled before its first step would leave its socket open
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()
        while not self._welcomed.empty():
            if channel := self._welcomed.get_nowait():
                await channel.close()
        self._welcomed.put_nowait(None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"listener {self._address}")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                sock, remote = await loop.sock_accept(self._sock)
            except OSError:  # out of descriptors, or the caller has gone again
                self._slots.release()
                await asyncio.sleep(_ACCEPT_RETRY_S)
            else:
                self._start(self._welcome(sock, join_address(remote)))

    async def _welcome(self, sock: socket.socket, peer: str) -> None:
        try:
            tune(sock)
            if self._context is not None:
                async with asyncio.timeout(self._handshake_timeout_s):
                    sock = await handshake(sock, self._context, server_side=True)
        except OSError:  # a stranger, or too slow (TimeoutError is an OSError)
            sock.close()
            self._slots.release()
        else:
            self._welcomed.put_nowait(TcpChannel(sock, peer))


class RealHost:
    """This machine. Use it as an async context manager, or close it."""

    def __init__(self, options: RealOptions, *, device: Device | None = None, trace: Trace | None = None) -> None:
        self._options = options
        self._own_device = RealDevice()
        self._device = device or self._own_device
        self._trace = trace
        self._clock = RealClock()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._listeners: list[TcpListener] = []
        self._server_context = server_context(options.tls) if options.tls else None
        self._client_context = client_context(options.tls) if options.tls else None

    @property
    def name(self) -> str:
        """As the options say."""
        return self._options.name

    @property
    def clock(self) -> RealClock:
        """This machine's monotonic clock."""
        return self._clock

    @property
    def device(self) -> Device:
        """What was given, or this machine's CPU."""
        return self._device

    @cached_property
    def lan(self) -> MdnsLan:
        """Multicast DNS; loaded when somebody asks for it."""
        from hcsim.real.mdns import MdnsLan

        return MdnsLan(self._options.lan_interfaces)

    def interfaces(self) -> tuple[Interface, ...]:
        """This machine's interfaces, the fastest medium first."""
        return list_interfaces()

    async def listen(self, address: str) -> TcpListener:
        """Accept channels at `host:port`."""
        try:
            family, sockaddr = (await self._resolve(*split_address(address)))[0]
            sock = _listening_socket(family, sockaddr)
        except OSError as error:
            raise ConfigError(f"cannot listen at {address}: {error.strerror}") from None
        listener = TcpListener(sock, self._server_context, self._options.handshake_timeout_s)
        self._listeners.append(listener)
        return listener

    async def connect(self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> TcpChannel:
        """Open a channel; see `Host.connect`. A certificate that is not valid ends the attempts at once."""
        host, port = split_address(address)
        draw = self.rng("connect", address)
        delay_s = _FIRST_RETRY_S
        failure: ChannelError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._dial(address, host, port)
                    except ssl.SSLCertVerificationError as error:
                        raise translated(error, address) from error
                    except OSError as error:
                        failure = translated(error, address)
                    await asyncio.sleep(delay_s * draw.uniform(0.5, 1.0))
                    delay_s = min(2 * delay_s, _SLOWEST_RETRY_S)
        except TimeoutError:
            if isinstance(failure, PeerRefused):
                raise PeerRefused(f"{failure} (tried for {timeout_s:g} s)", address) from None
            reason = f": {failure}" if failure else ""
            raise DeadlineExceeded(f"{address} did not answer within {timeout_s:g} s{reason}") from None

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Run a task until it ends or this host is closed."""
        task = asyncio.create_task(work, name=f"{self.name}/{name}")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def rng(self, *name: str | int) -> random.Random:
        """This host's random stream of that name."""
        return rng.stream(self._options.seed, self.name, *name)

    def trace(self, kind: str, *fields: str | int | float) -> None:
        """Put an event into the trace, if one is kept."""
        if self._trace is not None:
            self._trace.record(time.monotonic_ns(), kind, self.name, *fields)

    async def close(self) -> None:
        """End its tasks, listeners, announcements and worker thread. Channels belong to whoever opened them."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            await listener.close()
        if "lan" in self.__dict__:
            await self.lan.close()
        self._own_device.close()

    async def __aenter__(self) -> RealHost:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _dial(self, address: str, host: str, port: int) -> TcpChannel:
        """One attempt, at every address that the name stands for."""
        failure = OSError(f"{host} has no address")
        for family, sockaddr in await self._resolve(host, port):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                tune(sock)
                await asyncio.get_running_loop().sock_connect(sock, sockaddr)
                if sock.getsockname() == sock.getpeername():
                    # Dialling a free port of our own can meet itself in TCP's simultaneous open.
                    raise ConnectionRefusedError
                if self._client_context is not None:
                    sock = await handshake(sock, self._client_context, server_side=False)
                return TcpChannel(sock, address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        raise failure

    async def _resolve(self, host: str, port: int) -> list[tuple[int, Any]]:
        """Socket families and addresses of a name, if our security allows to use them."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError:
            raise ConfigError(f"{host!r} cannot be the name of a host") from None
        for *_, sockaddr in found:
            ip = ipaddress.ip_address(sockaddr[0])
            if self._options.tls is None and not self._options.insecure and not ip.is_loopback:
                raise ConfigError(
                    f"{host} is not on this machine, and plaintext is only allowed on loopback: "
                    "give TLS files (certificate, key, CA), or allow plaintext explicitly (insecure)"
                )
        return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def _listening_socket(family: int, sockaddr: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(sockaddr)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
