"""This machine's metrics over HTTP, for a Prometheus that scrapes them.

The page is made in the event loop, between two steps of the program: nothing changes while it is written.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from hcsim.errors import ConfigError
from hcsim.runtime.address import join_address, split_address
from hcsim.telemetry.exposition import scrape
from hcsim.telemetry.metrics import HostMetrics


@asynccontextmanager
async def serving_metrics(metrics: HostMetrics, address: str) -> AsyncIterator[str]:
    """Answer `GET /metrics` there meanwhile; yields the address with the port that was really taken."""
    host, port = split_address(address)

    async def answer(request: web.Request) -> web.Response:
        body, content_type = scrape(metrics, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            advice = "; choose another port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
            raise ConfigError(f"metrics cannot be served at {address}: {error.strerror or error}{advice}") from None
        except UnicodeError as error:
            raise ConfigError(f"metrics cannot be served at {address}: that is no host's name ({error})") from None
        yield join_address(runner.addresses[0])
    finally:
        await runner.cleanup()
