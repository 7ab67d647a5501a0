"""Channels over WebSockets, which pass through HTTPS tunnels and reverse proxies.

A server behind a proxy listens at ws://127.0.0.1:port/path. The path of a request has to end with the server's
path, so a proxy may add or remove a prefix. Requests with an Origin header come from web pages, and are
rejected. Both ends send pings, since proxies drop idle connections. A dead machine is detected by TCP
keep-alive instead of missing pongs, because a peer that does not read for a while must not be disconnected.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

from hcsim.errors import PeerRefused
from hcsim.real.http import ConnectionAcceptor, OneLineLogger
from hcsim.real.listener import MAX_UNACCEPTED, AcceptQueue, listening_socket
from hcsim.real.message_channel import MessageChannel
from hcsim.runtime.address import join_address
from hcsim.runtime.frame import HEADER_BYTES

PIECE_BYTES = 256 * 1024
PING_S = 20.0
_CLOSE_S = 0.2
"""How long the peer may take to confirm the close after both directions have ended."""
_END = b""
"""The message after the last piece. The data sent before it arrive, and the other direction stays open."""
_LATER = (502, 503, 504)
"""The status codes of a proxy whose server is not up yet."""


class _WebSocketPipe:
    """A pipe whose pieces are binary messages."""

    carrier = "WebSocket"
    piece_bytes = PIECE_BYTES

    def __init__(self, ws: web.WebSocketResponse | aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws
        self.ended = asyncio.Event()
        self._pinging = asyncio.create_task(self._ping(), name="keep a WebSocket alive")

    async def write(self, piece: bytes) -> None:
        if self._ws.closed:
            raise ConnectionResetError("the WebSocket is closed")
        await self._ws.send_bytes(piece)

    async def read(self) -> bytes | None:
        message = await self._ws.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            return bytes(message.data) or None
        if message.type is aiohttp.WSMsgType.ERROR:
            raise ConnectionResetError(f"the WebSocket broke: {message.data}")
        if message.type is aiohttp.WSMsgType.TEXT:
            raise ConnectionResetError("a text came over the WebSocket: that is not our protocol")
        return None

    async def finish(self) -> None:
        if not self._ws.closed:
            await self._ws.send_bytes(_END)

    async def abort(self) -> None:
        self._pinging.cancel()
        try:
            await self._ws.close()
        finally:
            self.ended.set()

    async def _ping(self) -> None:
        with suppress(OSError):
            while not self._ws.closed:
                await asyncio.sleep(PING_S)
                await self._ws.ping()


class _ClientPipe(_WebSocketPipe):
    def __init__(self, ws: aiohttp.ClientWebSocketResponse, session: aiohttp.ClientSession) -> None:
        super().__init__(ws)
        self._session = session

    async def abort(self) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):  # aiohttp's own limit begins anew with all that the peer says
                    await super().abort()
        finally:
            await self._session.close()


async def dial(address: str, context: ssl.SSLContext | None) -> MessageChannel:
    """Make one attempt to open a channel."""
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
    try:
        ws = await session.ws_connect(
            address,
            ssl=context if context is not None else True,
            max_msg_size=PIECE_BYTES + HEADER_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
        )
        _keep_alive(ws.get_extra_info("socket"))
        return MessageChannel(_ClientPipe(ws, session), address)
    except aiohttp.ClientConnectorCertificateError as error:
        await session.close()
        raise error.certificate_error from None
    except aiohttp.ClientConnectorError as error:
        await session.close()
        raise error.os_error from None
    except aiohttp.WSServerHandshakeError as error:
        await session.close()
        if error.status in _LATER:
            raise ConnectionError(f"the proxy answers {error.status}") from None
        raise PeerRefused(f"{address} is no place to connect to: it answers {error.status}", address) from None
    except aiohttp.ClientError as error:
        await session.close()
        raise ConnectionError(str(error)) from None
    except BaseException:
        await session.close()
        raise


class WebSocketListener:
    """Accepts channels at one address and path."""

    def __init__(self, path: str) -> None:
        self._path = path.rstrip("/")
        self._address = ""
        self._unaccepted = AcceptQueue()
        self._runner: web.AppRunner | None = None
        self._acceptor: ConnectionAcceptor | None = None
        """Connections are unsettled in it until they have become WebSockets."""
        self._open = 0

    @classmethod
    async def open(
        cls, path: str, family: int, sockaddr: Any, context: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> WebSocketListener:
        self = cls(path)
        app = web.Application()
        app.router.add_get("/{path:.*}", self._called)
        sock = listening_socket(family, sockaddr)
        self._address = f"{'wss' if context else 'ws'}://{join_address(sock.getsockname())}{path}"
        logger = OneLineLogger(self._address)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.0, logger=logger)
        await self._runner.setup()
        assert self._runner.server is not None
        self._acceptor = ConnectionAcceptor(
            sock, self._runner.server, most=MAX_UNACCEPTED, deadline_s=handshake_timeout_s, context=context
        )
        return self

    @property
    def address(self) -> str:
        """The address with the actual port."""
        return self._address

    async def accept(self) -> MessageChannel:
        return await self._unaccepted.get(self._address)

    async def close(self) -> None:
        """Stop listening and close the channels that have not been accepted."""
        if self._unaccepted.closed:
            return
        assert self._acceptor is not None
        await self._acceptor.close()
        await self._unaccepted.close()
        await self._clean_up()

    async def _called(self, request: web.Request) -> web.StreamResponse:
        if not request.path.rstrip("/").endswith(self._path):
            raise web.HTTPNotFound
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="web pages have no business here")
        ws = web.WebSocketResponse(max_msg_size=PIECE_BYTES + HEADER_BYTES, compress=False, timeout=_CLOSE_S)
        if not ws.can_prepare(request):
            raise web.HTTPUpgradeRequired(text="this is a place for WebSockets")
        if self._unaccepted.full:
            raise web.HTTPServiceUnavailable
        await ws.prepare(request)
        assert self._acceptor is not None
        self._acceptor.settled(request.protocol)
        transport = request.transport
        peer = join_address(transport.get_extra_info("peername")) if transport is not None else "a WebSocket"
        if transport is not None:
            _keep_alive(transport.get_extra_info("socket"))
        pipe = _WebSocketPipe(ws)
        self._open += 1
        try:
            self._unaccepted.put(MessageChannel(pipe, peer))
            await pipe.ended.wait()
        finally:
            self._open -= 1
            if self._unaccepted.closed and not self._open:
                asyncio.get_running_loop().call_soon(asyncio.ensure_future, self._clean_up())
        return ws

    async def _clean_up(self) -> None:
        """Stop the server when the last accepted channel has ended, since these live on in it."""
        if not self._open and self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()


def _keep_alive(sock: Any) -> None:
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
