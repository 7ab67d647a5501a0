"""A page to watch: one document without anything from outside, and the data that it shows.

The page follows a running cluster by server-sent events (`/events`), or asks for any moment of a recorded run (`/at`).
What it is given is JSON that the caller makes; this module does not look into it. While nobody looks, nothing is
collected: the first viewer opens the source, and the last one who leaves closes it.

On the loopback the page is for users of this machine. Requests with another host name are refused there, since a web
page can have its own name point to the loopback. Elsewhere a token is needed, and the page comes over TLS.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import math
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec
from aiohttp import web

from hcsim.real.http import ConnectionAcceptor, bound, serving
from hcsim.report.page import PALETTE

PAGE = Path(__file__).with_suffix(".html")
MOST_VIEWERS = 16
STUCK_S = 10.0
"""A viewer that does not take the data for so long is hung up on."""

Source: TypeAlias = Callable[[], AbstractAsyncContextManager[Callable[[], bytes]]]
"""Opens what the page shows of a running cluster, and yields a function that returns its present state."""


class Recorded(msgspec.Struct, frozen=True):
    """A finished run: what the page shows of any moment, and when it ends."""

    at: Callable[[float], bytes]
    end_s: float


class Guard(msgspec.Struct, frozen=True):
    """What a request has to have, beyond the loopback."""

    token: str
    context: ssl.SSLContext


class _Viewers:
    """Those who look at a running cluster."""

    def __init__(self, source: Source, every_s: float) -> None:
        self._source = source
        self._every_s = every_s
        self._count = 0
        self._opening = asyncio.Lock()
        self._opened = AsyncExitStack()
        self._now: Callable[[], bytes] | None = None

    async def follow(self, request: web.Request, acceptor: ConnectionAcceptor) -> web.StreamResponse:
        if self._count >= MOST_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_VIEWERS} look at this page already")
        self._count += 1
        try:
            async with self._opening:
                if self._now is None:
                    self._now = await self._opened.enter_async_context(self._source())
            return await self._send(request, acceptor, self._now)
        finally:
            self._count -= 1
            async with self._opening:
                if not self._count:
                    self._now = None
                    await self._opened.aclose()

    async def _send(
        self, request: web.Request, acceptor: ConnectionAcceptor, now: Callable[[], bytes]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        acceptor.settled(request.protocol)
        while request.transport is not None and not request.transport.is_closing():
            try:
                async with asyncio.timeout(STUCK_S):
                    await response.write(b"data: " + now() + b"\n\n")
            except (ConnectionError, TimeoutError):
                break
            await asyncio.sleep(self._every_s)
        if request.transport is not None:
            request.transport.abort()
        return response


@asynccontextmanager
async def serving_dashboard(
    address: str, shown: Source | Recorded, *, guard: Guard | None = None, every_s: float = 1.0
) -> AsyncIterator[str]:
    """Serve the page within this context. Yields its URL, with the actual port."""
    sock = await bound(address, "the dashboard")
    viewers = None if isinstance(shown, Recorded) else _Viewers(shown, every_s)
    page = _page(shown.end_s if isinstance(shown, Recorded) else None)
    acceptors: list[ConnectionAcceptor] = []

    def check(request: web.Request) -> None:
        if guard is None:
            if not _is_loopback(request.host):
                raise web.HTTPForbidden(text="this page is served on the loopback alone: call it 127.0.0.1")
        elif not hmac.compare_digest(request.query.get("token", "").encode(), guard.token.encode()):
            raise web.HTTPForbidden(text="the address lacks the token that hcsim printed when it began to serve")

    async def show_page(request: web.Request) -> web.Response:
        check(request)
        return _once(web.Response(text=page.text, content_type="text/html", headers=page.headers))

    async def follow(request: web.Request) -> web.StreamResponse:
        check(request)
        if viewers is None:
            raise web.HTTPNotFound
        return await viewers.follow(request, acceptors[0])

    async def show_moment(request: web.Request) -> web.Response:
        check(request)
        if not isinstance(shown, Recorded):
            raise web.HTTPNotFound
        try:
            at_s = float(request.query["t"])
        except (KeyError, ValueError):
            at_s = math.nan
        if math.isnan(at_s):
            raise web.HTTPBadRequest(text="give t, in seconds")
        body = shown.at(min(max(at_s, 0.0), shown.end_s))
        return _once(web.Response(body=body, content_type="application/json"))

    app = web.Application()
    app.router.add_get("/", show_page)
    app.router.add_get("/events", follow)
    app.router.add_get("/at", show_moment)
    host, port = sock.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    async with serving(app, sock, "the dashboard", None if guard is None else guard.context) as acceptor:
        acceptors.append(acceptor)
        query = "" if guard is None else f"?token={guard.token}"
        yield f"http{'' if guard is None else 's'}://{shown_host}:{port}/{query}"


def _once(response: web.Response) -> web.Response:
    response.force_close()
    return response


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


class _Page(msgspec.Struct, frozen=True):
    text: str
    headers: dict[str, str]


def _page(end_s: float | None) -> _Page:
    """Return the page, and a policy that lets the browser run no other script, and load nothing."""
    text = PAGE.read_text(encoding="utf-8").replace("/* palette */", PALETTE.strip(), 1)
    if end_s is not None:
        text = text.replace('data-end-s=""', f'data-end-s="{end_s:.9f}"', 1)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return _Page(text, headers)
