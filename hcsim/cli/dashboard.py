"""`hcsim dashboard`: a page that shows a running cluster, or any moment of a recorded virtual run."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from hcsim.cli import screen
from hcsim.cli.recorded import read_record
from hcsim.errors import ConfigError
from hcsim.launch.real import WATCH_EVERY_S, watching_cluster
from hcsim.real.dashboard import Guard, Recorded, serving_dashboard
from hcsim.real.interfaces import host_name, list_interfaces, reachable_at
from hcsim.real.keys import load_credentials
from hcsim.real.tls import web_context
from hcsim.runtime.address import split_address


def show_cluster(listen: str, home: Path, cluster: str, peers: Sequence[str]) -> None:
    """Serve the page of a running cluster until the user ends it."""
    load_credentials(home, cluster, host_name())  # a machine that has joined no cluster need not begin
    asyncio.run(_serve(listen, lambda: _watching(home, cluster, peers)))


def show_record(listen: str, record: Path) -> None:
    """Serve the page of a recorded run until the user ends it."""
    run = read_record(record)
    asyncio.run(_serve(listen, Recorded(lambda at_s: msgspec.json.encode(run.at(at_s)), run.end_s)))


@asynccontextmanager
async def _watching(home: Path, cluster: str, peers: Sequence[str]) -> AsyncIterator[Callable[[], bytes]]:
    async with watching_cluster(home, cluster, peers) as now:
        yield lambda: msgspec.json.encode(now())


async def _serve(listen: str, shown: Callable[..., object] | Recorded) -> None:
    guard, fingerprint = guard_for(listen)
    async with serving_dashboard(listen, shown, guard=guard, every_s=WATCH_EVERY_S) as url:  # type: ignore[arg-type]
        tell_url(url, fingerprint)
        await asyncio.get_running_loop().create_future()


def guard_for(listen: str) -> tuple[Guard | None, str]:
    """Return what protects the page beyond the loopback, and the fingerprint of its certificate; nothing on the
    loopback."""
    host, _ = split_address(listen)
    if host == "localhost":
        return None, ""
    try:
        if ipaddress.ip_address(host).is_loopback:
            return None, ""
    except ValueError:
        raise ConfigError(f"--listen {listen}: give an IP address of this machine, or 0.0.0.0 for all") from None
    context, fingerprint = web_context(host_name())
    return Guard(secrets.token_urlsafe(24), context), fingerprint


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
    screen.note("Ctrl-C ends it")
