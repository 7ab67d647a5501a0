"""`hcsim dashboard`: a page that shows a running cluster, or any moment of a recorded virtual run."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from hcsim.cli import screen
from hcsim.cli.options import DASHBOARD
from hcsim.cli.recorded import RecordedRun, read_record
from hcsim.errors import ConfigError
from hcsim.launch.real import WATCH_EVERY_S, watching_cluster
from hcsim.real.dashboard import Guard, Recorded, Source, serving_dashboard
from hcsim.real.http import bound
from hcsim.real.interfaces import host_name, list_interfaces, reachable_at
from hcsim.real.keys import load_credentials
from hcsim.real.tls import web_context
from hcsim.runtime.address import split_address, with_port


def show_cluster(listen: str, home: Path, cluster: str, peers: Sequence[str]) -> None:
    """Serve the page of a running cluster until the user ends it."""
    load_credentials(home, cluster, host_name())  # a machine that has joined no cluster need not begin

    async def serve() -> None:
        async with serving_cluster(listen, home, cluster, peers):
            await _until_interrupted()

    _run(serve())


def show_record(listen: str, record: Path) -> None:
    """Serve the page of a recorded run until the user ends it."""
    show_recorded(read_record(record), listen)


def show_recorded(run: RecordedRun, listen: str | None = None) -> None:
    """Serve the page of a run until the user ends it."""

    async def serve() -> None:
        async with _serving(listen, Recorded(lambda at_s: msgspec.json.encode(run.at(at_s)), run.end_s)):
            await _until_interrupted()

    _run(serve())


def _run(serving: Coroutine[Any, Any, None]) -> None:
    with suppress(KeyboardInterrupt):  # the way to end it
        asyncio.run(serving)


@asynccontextmanager
async def serving_cluster(listen: str | None, home: Path, cluster: str, peers: Sequence[str]) -> AsyncIterator[None]:
    """Serve the page of a running cluster within this context."""
    async with _serving(listen, lambda: _watching(home, cluster, peers)):
        yield


@asynccontextmanager
async def _watching(home: Path, cluster: str, peers: Sequence[str]) -> AsyncIterator[Callable[[], bytes]]:
    async with watching_cluster(home, cluster, peers) as now:
        yield lambda: msgspec.json.encode(now())


@asynccontextmanager
async def _serving(listen: str | None, shown: Source | Recorded) -> AsyncIterator[None]:
    listen = listen or await _free_place()
    guard, fingerprint = guard_for(listen)
    async with serving_dashboard(listen, shown, guard=guard, every_s=WATCH_EVERY_S) as url:
        tell_url(url, fingerprint)
        yield


async def _free_place() -> str:
    """Return the usual address, or one with any free port if another page is served there."""
    try:
        (await bound(DASHBOARD, "the dashboard")).close()
    except ConfigError:
        return with_port(split_address(DASHBOARD)[0], 0)
    return DASHBOARD


async def _until_interrupted() -> None:
    screen.note("Ctrl-C ends it")
    await asyncio.get_running_loop().create_future()


def guard_for(listen: str) -> tuple[Guard | None, str]:
    """Return what protects the page beyond the loopback, and the fingerprint of its certificate; nothing on the
    loopback."""
    try:
        host, _ = split_address(listen)
    except ConfigError:
        like = _nearest_address(listen)
        raise ConfigError(f"--listen {listen}: give an IP address of this machine and a port, as in {like}") from None
    if host == "localhost":
        return None, ""
    try:
        if ipaddress.ip_address(host).is_loopback:
            return None, ""
    except ValueError:
        raise ConfigError(f"--listen {listen}: give an IP address of this machine, or 0.0.0.0 for all") from None
    context, fingerprint = web_context(host_name())
    return Guard(secrets.token_urlsafe(24), context), fingerprint


def _nearest_address(listen: str) -> str:
    """Return the address that was probably meant, with the usual host or port where there is none."""
    host, port = split_address(DASHBOARD)
    for said in (listen, listen.rpartition(":")[0]):
        with suppress(ValueError):
            ipaddress.ip_address(said.strip("[]"))
            return with_port(said, port)
    with suppress(ConfigError):
        return with_port(host, split_address(f"{host}:{listen.lstrip(':')}")[1])
    return DASHBOARD


def tell_url(url: str, fingerprint: str) -> None:
    """Say where the page is."""
    if fingerprint:
        everywhere = next((each for each in ("//0.0.0.0:", "//[::]:") if each in url), None)
        if everywhere is not None:
            best = reachable_at(list_interfaces())[0]
            url = url.replace(everywhere, f"//[{best}]:" if ":" in best else f"//{best}:", 1)
        screen.note("whoever knows this address can look; the browser will warn once of a certificate with SHA-256")
        screen.note(fingerprint)
    screen.say(f"dashboard at {url}")
