"""This machine's metrics over HTTP, for a Prometheus that scrapes them.

The page is made in the event loop, between two steps of the program: nothing changes while it is written.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from hcsim.errors import ConfigError
from hcsim.real.accepting import Acceptor, OneLine
from hcsim.real.listener import listening_socket
from hcsim.runtime.address import join_address, split_address
from hcsim.telemetry.exposition import scrape
from hcsim.telemetry.metrics import HostMetrics

MOST_CONNECTIONS = 32
LONGEST_S = 10.0
"""How long a connection lasts at most; each is for one request."""


@asynccontextmanager
async def serving_metrics(metrics: HostMetrics, address: str) -> AsyncIterator[str]:
    """Answer `GET /metrics` there meanwhile; yields the address with the port that was really taken."""
    host, port = split_address(address)

    async def answer(request: web.Request) -> web.Response:
        body, content_type = scrape(metrics, request.headers.get("Accept", ""))
        response = web.Response(body=body, headers={"Content-Type": content_type})
        response.force_close()
        return response

    app = web.Application()
    app.router.add_get("/metrics", answer)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, sockaddr = found[0]
        sock = listening_socket(family, sockaddr)
    except OSError as error:
        advice = "; choose another port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise ConfigError(f"metrics cannot be served at {address}: {error.strerror or error}{advice}") from None
    except UnicodeError as error:
        raise ConfigError(f"metrics cannot be served at {address}: that is no host's name ({error})") from None
    served = join_address(sock.getsockname())
    runner = web.AppRunner(app, access_log=None, logger=OneLine(f"metrics at {served}"), shutdown_timeout=0.0)
    await runner.setup()
    assert runner.server is not None
    acceptor = Acceptor(sock, runner.server, most=MOST_CONNECTIONS, deadline_s=LONGEST_S)
    try:
        yield served
    finally:
        await acceptor.close()
        await runner.cleanup()
