"""HTTP servers with bounded resources, and the server of this machine's metrics.

The servers of asyncio accept every connection, and write a traceback for every attempt when descriptors run
out. Here the number of unsettled connections is bounded. When there are too many, the oldest one of the address
with the most of them is closed, in its TLS handshake or after it. A connection is unsettled until `settled` is
called for it, and has a deadline for that. When descriptors run out, accepting pauses, with one warning.

The page of metrics (for Prometheus) is made in the event loop, between two steps of the program, so nothing
changes while it is written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from hcsim.errors import ConfigError
from hcsim.real.listener import listening_socket
from hcsim.real.sockets import own, readable
from hcsim.runtime.address import join_address, split_address
from hcsim.telemetry.exposition import scrape
from hcsim.telemetry.metrics import HostMetrics

RETRY_S = 0.25
"""How long accepting pauses when descriptors have run out."""
_LOG = logging.getLogger("hcsim")


class _Caller:
    def __init__(self, source: str) -> None:
        self.source = source
        self.transport: asyncio.Transport | None = None
        self.protocol: Any = None
        self.task: asyncio.Task[None] | None = None
        self.limit: asyncio.TimerHandle | None = None


class ConnectionAcceptor:
    """Accepts connections within bounds and hands them to protocols; owns the listening socket."""

    def __init__(
        self,
        sock: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        most: int,
        deadline_s: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._sock = sock
        self._address = join_address(sock.getsockname())
        self._factory = factory
        self._most = most
        self._deadline_s = deadline_s
        self._context = context
        self._unsettled: dict[_Caller, None] = {}
        self._of: dict[Any, _Caller] = {}
        self._warned = False
        own(sock, listens=True)
        self._accepting = asyncio.create_task(self._accept(), name=f"accept at {self._address}")

    def settled(self, protocol: Any) -> None:
        """Mark a connection as settled: it no longer counts against the limit, and has no deadline."""
        if (caller := self._of.pop(protocol, None)) is not None:
            self._forget(caller)

    async def close(self) -> None:
        """Stop accepting, and close the unsettled connections."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._sock.close()
        tasks = [caller.task for caller in self._unsettled if caller.task is not None]
        for caller in tuple(self._unsettled):
            self._cut_off(caller)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            await readable(self._sock)
            try:
                sock, remote = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):  # the caller has gone again
                continue
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    _LOG.warning("connections to %s wait: %s", self._address, error.strerror)
                await asyncio.sleep(RETRY_S)
                continue
            sock.setblocking(False)
            own(sock)
            self._admit(sock, remote[0].removeprefix("::ffff:"))

    def _admit(self, sock: socket.socket, source: str) -> None:
        for caller in [each for each in self._unsettled if each.transport is not None and each.transport.is_closing()]:
            self._forget(caller)
        if len(self._unsettled) >= self._most:
            self._cut_off(self._one_too_many())
        caller = _Caller(source)
        self._unsettled[caller] = None
        caller.limit = asyncio.get_running_loop().call_later(self._deadline_s, self._cut_off, caller)
        caller.task = asyncio.create_task(self._serve(caller, sock), name=f"a caller of {self._address}")

    async def _serve(self, caller: _Caller, sock: socket.socket) -> None:
        def protocol() -> Any:
            caller.protocol = self._factory()
            self._of[caller.protocol] = caller
            return caller.protocol

        tls: dict[str, Any] = {}
        if self._context is not None:
            tls = {"ssl": self._context, "ssl_handshake_timeout": self._deadline_s}
        try:
            caller.transport, _ = await asyncio.get_running_loop().connect_accepted_socket(protocol, sock, **tls)
        except (OSError, asyncio.CancelledError):  # ssl.SSLError and TimeoutError are OSErrors
            sock.close()
            self._forget(caller)

    def _one_too_many(self) -> _Caller:
        """Return the oldest connection of the address that has the most."""
        sources: dict[str, list[_Caller]] = {}
        for caller in self._unsettled:
            sources.setdefault(caller.source, []).append(caller)
        return max(sources.values(), key=len)[0]

    def _cut_off(self, caller: _Caller) -> None:
        self._forget(caller)
        if caller.transport is not None:
            caller.transport.abort()
        elif caller.task is not None:
            caller.task.cancel()

    def _forget(self, caller: _Caller) -> None:
        self._unsettled.pop(caller, None)
        self._of.pop(caller.protocol, None)
        if caller.limit is not None:
            caller.limit.cancel()


class OneLineLogger(logging.Logger):
    """A logger for aiohttp, which writes a traceback for every malformed request: it logs one line for all of them."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._said = False

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name is logging's
        return level >= logging.WARNING

    def handle(self, record: logging.LogRecord) -> None:
        """Log the first record only, without the data of the client."""
        if not self._said:
            self._said = True
            _LOG.warning("%s: a request could not be handled; further ones are not told of", self.name)


MOST_CONNECTIONS = 32
LONGEST_S = 10.0
"""The longest duration of a connection, which serves one request."""


@asynccontextmanager
async def serving_metrics(metrics: HostMetrics, address: str) -> AsyncIterator[str]:
    """Serve `GET /metrics` within this context. Yields the address with the actual port."""

    async def answer(request: web.Request) -> web.Response:
        body, content_type = scrape(metrics, request.headers.get("Accept", ""))
        response = web.Response(body=body, headers={"Content-Type": content_type})
        response.force_close()
        return response

    app = web.Application()
    app.router.add_get("/metrics", answer)
    sock = await bound(address, "metrics")
    async with serving(app, sock, "metrics"):
        yield join_address(sock.getsockname())


async def bound(address: str, what: str) -> socket.socket:
    """Return a socket that listens at `host:port`; `what` is to be served there."""
    host, port = split_address(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, sockaddr = found[0]
        return listening_socket(family, sockaddr)
    except OSError as error:
        advice = "; choose another port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise ConfigError(f"{what} cannot be served at {address}: {error.strerror or error}{advice}") from None
    except UnicodeError as error:
        raise ConfigError(f"{what} cannot be served at {address}: that is no host's name ({error})") from None


@asynccontextmanager
async def serving(
    app: web.Application, sock: socket.socket, what: str, context: ssl.SSLContext | None = None
) -> AsyncIterator[ConnectionAcceptor]:
    """Serve an application at a listening socket within this context, with bounds for its clients."""
    logger = OneLineLogger(f"{what} at {join_address(sock.getsockname())}")
    runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=0.0)
    await runner.setup()
    assert runner.server is not None
    acceptor = ConnectionAcceptor(sock, runner.server, most=MOST_CONNECTIONS, deadline_s=LONGEST_S, context=context)
    try:
        yield acceptor
    finally:
        await acceptor.close()
        await runner.cleanup()
