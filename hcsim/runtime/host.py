"""A host: one machine, and everything a component may take from it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import Any, Protocol

import msgspec

from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import Clock
from hcsim.runtime.device import Device
from hcsim.runtime.lan import Lan
from hcsim.runtime.metrics import Metrics
from hcsim.runtime.store import Store

CONNECT_TIMEOUT_S = 5.0


class Medium(Enum):
    """What an interface is made of; the order is from fast to slow."""

    LOOPBACK = "loopback"
    THUNDERBOLT = "thunderbolt"
    ETHERNET = "ethernet"
    WIFI = "wifi"
    TUNNEL = "tunnel"
    """A VPN, or whatever else goes over one of the others."""
    UNKNOWN = "unknown"


class Interface(msgspec.Struct, frozen=True):
    """One of a host's network interfaces."""

    name: str
    medium: Medium
    rate_bps: float | None = None
    """Nominal line rate, where the system tells."""
    addresses: tuple[str, ...] = ()


def fastest_first(interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """By medium, those of one medium by name."""
    order = list(Medium)
    return tuple(sorted(interfaces, key=lambda interface: (order.index(interface.medium), interface.name)))


class Host(Protocol):
    """One machine."""

    @property
    def name(self) -> str:
        """Unique within its cluster."""

    @property
    def clock(self) -> Clock:
        """This host's own time."""

    @property
    def device(self) -> Device:
        """What it computes with."""

    @property
    def lan(self) -> Lan:
        """The neighbourhood it announces itself in."""

    @property
    def store(self) -> Store:
        """What it remembers across restarts."""

    @property
    def metrics(self) -> Metrics:
        """Its figures, for whoever looks on."""

    def interfaces(self) -> tuple[Interface, ...]:
        """What this host is attached to, `fastest_first`."""

    async def listen(self, address: str) -> Listener:
        """Accept channels at `host:port` (port 0: any free one)."""

    async def connect(self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Channel:
        """Open a channel, trying again with backoff until the deadline.

        Raises `PeerRefused` when somebody says no until the end, `DeadlineExceeded` when nobody answers.
        """

    def spawn(
        self, work: Coroutine[Any, Any, Any], *, name: str, over: Callable[[asyncio.Task[Any]], None] | None = None
    ) -> asyncio.Task[Any]:
        """Run a task that lives and dies with this host. The name appears in reports.

        `over` gets the task once it has ended, however it has, and before those who wait for it."""

    def rng(self, *name: str | int) -> random.Random:
        """This host's random stream of that name."""

    def trace(self, kind: str, *fields: str | int | float) -> None:
        """Put an event into the run's trace."""
