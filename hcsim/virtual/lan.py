"""The modelled broadcast domain: announcements are datagrams to every host of the same home.

A fault adds a rule. It maps a datagram to the extra delays of its delivered copies: an empty tuple if it is
lost, a single zero if it passes unchanged. Rules are composed: each applies to every copy that the previous one
leaves. Connections are not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from typing import NamedTuple, Protocol, Self, TypeAlias

from msgspec.structs import replace

from hcsim.runtime.host import Service, Sighting
from hcsim.virtual.loop import VirtualLoop


class Datagram(NamedTuple):
    """An announcement or a query on the local network."""

    source: str
    target: str
    media: tuple[str, str]
    """The media at the sender and at the receiver."""
    question: bool
    """Whether it is a query; otherwise it is an announcement."""


DatagramRule: TypeAlias = Callable[[Datagram], tuple[float, ...]]

PASSES = (0.0,)
LOST = ()


class DatagramRules:
    """The active datagram rules."""

    def __init__(self) -> None:
        self._rules: list[DatagramRule] = []

    def add(self, rule: DatagramRule) -> None:
        self._rules.append(rule)

    def remove(self, rule: DatagramRule) -> None:
        self._rules.remove(rule)

    def delays_s(self, datagram: Datagram) -> tuple[float, ...]:
        """Return the extra delay of each delivered copy of the datagram."""
        copies: tuple[float, ...] = PASSES
        for rule in self._rules:
            copies = tuple(so_far + extra for so_far in copies for extra in rule(datagram))
        return copies


class LanHost(Protocol):
    """What a host's local network asks of it."""

    loop: VirtualLoop
    lan: VirtualLan

    def rng(self, *name: str | int) -> Random:
        """Draws of the host's own."""

    def is_name_taken(self, name: str) -> bool:
        """Whether a stranger announces a service of that name on a network of ours."""

    def neighbours(self) -> tuple[Self, ...]:
        """The other hosts that hear our broadcasts."""

    def cast(self, target: Self, question: bool, arrive: Callable[..., None], *args: object) -> None:
        """Send a datagram."""


class VirtualLan:
    """Service discovery of one host on its local network.

    As in multicast DNS, an announcement is a datagram: a partition can drop it, it is repeated once after a second,
    and browsing starts with a query to all."""

    def __init__(self, host: LanHost, history: Sequence[Service] = ()) -> None:
        self._host = host
        self.history = list(history)
        """All announcements of this machine, including earlier lives."""
        self._ours: dict[str, Service] = {}
        """Own services by the requested name; the announced name differs if that one was taken."""
        self._seen: dict[str, Service] = {}
        self._browsers: list[asyncio.Queue[Sighting]] = []

    async def advertise(self, service: Service) -> str:
        """See `runtime.host.Lan.advertise`."""
        before = self._ours.get(service.name)
        announced = replace(service, name=self._free(service.name) if before is None else before.name)
        self._ours[service.name] = announced
        if announced not in self.history:
            self.history.append(announced)
        self._announce(announced)
        self._host.loop.call_later(1.0, self._repeat, announced)
        return announced.name

    def _free(self, name: str) -> str:
        """Return this name, or a variant of it that no other host announces."""
        free, draws = name, self._host.rng("name", name)
        while self._host.is_name_taken(free):
            free = f"{name}-{draws.randbytes(3).hex()}"
        return free

    async def withdraw(self, name: str) -> None:
        """See `runtime.host.Lan.withdraw`."""
        service = self._ours.pop(name, None)
        if service is not None:
            self._multicast(Sighting(service, gone=True))

    async def browse(self) -> AsyncIterator[Sighting]:
        """See `runtime.host.Lan.browse`."""
        queue: asyncio.Queue[Sighting] = asyncio.Queue()
        for service in self._seen.values():
            queue.put_nowait(Sighting(service))
        self._browsers.append(queue)
        for neighbour in self._host.neighbours():
            self._host.cast(neighbour, True, neighbour.lan.answer, self._host)
        try:
            while True:
                yield await queue.get()
        finally:
            self._browsers.remove(queue)

    @property
    def services(self) -> tuple[Service, ...]:
        """The services that the host announces now."""
        return tuple(self._ours.values())

    def announced(self, name: str) -> Service | None:
        """Return the service that the host announces under this name, or None."""
        return next((service for service in self._ours.values() if service.name == name), None)

    def answer(self, asker: LanHost) -> None:
        """Answer a query with the host's announcements."""
        for service in self._ours.values():
            self._host.cast(asker, False, asker.lan.hear, Sighting(service))

    def hear(self, sighting: Sighting) -> None:
        """Receive an announcement."""
        name = sighting.service.name
        if sighting.gone:
            if self._seen.pop(name, None) is None:
                return
        elif self._seen.get(name) == sighting.service:
            return
        else:
            self._seen[name] = sighting.service
        for queue in self._browsers:
            queue.put_nowait(sighting)

    def _repeat(self, service: Service) -> None:
        if service in self._ours.values():
            self._announce(service)

    def _announce(self, service: Service) -> None:
        self._multicast(Sighting(service))

    def _multicast(self, sighting: Sighting) -> None:
        for neighbour in (self._host, *self._host.neighbours()):
            self._host.cast(neighbour, False, neighbour.lan.hear, sighting)
