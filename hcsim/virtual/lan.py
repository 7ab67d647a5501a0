"""The modelled broadcast domain: announcements reach every host of the same home.

They are datagrams. A fault is a rule that says when the copies of one arrive.

A rule gives the extra delays of the copies that arrive: none when it is lost, one zero when it just passes.
Several rules apply one after the other, to each copy. Connections know nothing of this.
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
    """One packet of the local network's announcements."""

    source: str
    target: str
    media: tuple[str, str]
    """What it leaves and arrives by."""
    question: bool
    """Whether it asks who is there; otherwise it says so."""


Rule: TypeAlias = Callable[[Datagram], tuple[float, ...]]

PASSES = (0.0,)
LOST = ()


class Datagrams:
    """The rules of this moment."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def add(self, rule: Rule) -> None:
        """Have a rule from now on."""
        self._rules.append(rule)

    def remove(self, rule: Rule) -> None:
        """Have it no longer."""
        self._rules.remove(rule)

    def delays_s(self, datagram: Datagram) -> tuple[float, ...]:
        """How much later than usual each copy of the datagram arrives."""
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
    """One host's ear and voice on its local network.

    As with multicast DNS, an announcement is a datagram: it can be lost to a partition, it is
    repeated once after a second, and who starts to browse asks everybody first.
    """

    def __init__(self, host: LanHost, history: Sequence[Service] = ()) -> None:
        self._host = host
        self.history = list(history)
        """All that this machine has ever announced, in earlier lives too."""
        self._ours: dict[str, Service] = {}
        """By the name that it was to have; it has another one where somebody else announces that."""
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
        """That name, or one like it that nobody else announces."""
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
        """All that we say at the moment."""
        return tuple(self._ours.values())

    def announced(self, name: str) -> Service | None:
        """What we say under that name at the moment."""
        return next((service for service in self._ours.values() if service.name == name), None)

    def answer(self, asker: LanHost) -> None:
        """Somebody asks who is there."""
        for service in self._ours.values():
            self._host.cast(asker, False, asker.lan.hear, Sighting(service))

    def hear(self, sighting: Sighting) -> None:
        """An announcement arrives."""
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
