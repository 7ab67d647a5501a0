"""Finding the others: what the local network announces, and the addresses that a person gave.

An announcement is a hint and no more: who it is shows when it answers. A record that nobody answers at is tried a few
times, and again after a while if it is still there. A node that hears nobody can still be found by those that
hear it, since a line carries both ways.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import msgspec

from hcsim.config.cluster import Cluster
from hcsim.errors import AdmissionRefused, ConfigError, HcsimError
from hcsim.runtime.address import hosts_of, with_port
from hcsim.runtime.host import Host
from hcsim.runtime.lan import Service

Dial: TypeAlias = Callable[[str, float], Awaitable[str]]
"""Calls an address, for at most so long; the id of the node that answered."""

_PAUSE_S = 0.25
_LABEL_BYTES = 63
"""A service's name is one label of DNS."""
_NOT_IN_LABELS = re.compile(r"[.\x00-\x1f\x7f]")
_HOST = re.compile(r"[\w.:%-]+", re.ASCII)


class Announcement(msgspec.Struct, frozen=True):
    """What we say about ourselves on the local network."""

    node: str
    name: str
    namespace: str
    """Only nodes of one cluster take notice of each other."""
    boot: int
    control: str

    def service(self) -> Service:
        """As a service record."""
        # The record has no order of its own for a machine's addresses, so the best first is said here.
        properties = {"node": self.node, "namespace": self.namespace, "boot": f"{self.boot:x}", "at": self.control}
        end = f"-{self.node[:8]}"
        label = _NOT_IN_LABELS.sub("-", self.name).encode()[: _LABEL_BYTES - len(end)].decode(errors="ignore")
        return Service(label + end, self.control, properties)


def place_of(service: Service) -> str:
    """Where an announced node is: where it says, the best first, or else where its record leads.

    Anybody on the local network may have written the record: what is no address is not called, nor shown to a person.
    """
    said = service.properties.get("at", "")
    try:
        hosts, _ = hosts_of(said)
    except ConfigError:
        return service.address
    return said if all(map(_HOST.fullmatch, hosts)) else service.address


class Discovery:
    """Keeps dialling whoever should be there and is not."""

    def __init__(
        self,
        host: Host,
        config: Cluster,
        us: Announcement,
        dial: Dial,
        has: Callable[[str], bool],
        tell: Callable[[str], None],
    ) -> None:
        self._host = host
        self._config = config
        self._us = us
        self._dial = dial
        self._has = has
        self._tell = tell
        self._announced = False
        self._wanted: dict[str, str] = {}
        """Addresses by node id, or by themselves where the id is not known."""
        self._nodes: dict[str, str] = {}
        """Who answered where."""
        self._calling: dict[str, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._peers = tuple(with_port(peer, config.discovery_port) for peer in config.peers)

    @property
    def known(self) -> tuple[str, ...]:
        """Who should be there: the ids of nodes, and addresses where nobody has answered yet."""
        return tuple(dict.fromkeys(self._nodes.get(key, key) for key in self._wanted))

    async def run(self) -> None:
        """Look for others, for ever."""
        for address in self._peers:
            if not _overlap(address, self._us.control):  # one list may serve all machines
                self.want(address, address)
        if self._config.discover:
            await self._announce()
        while True:
            await self._host.clock.sleep(self._config.peer_timeout_s)
            if self._announced:  # whoever was cut off when we began has not heard of us
                await self._say_again()
            for key in list(self._wanted):
                self._call(key)

    async def goodbye(self) -> None:
        """Look for nobody any more, and take back what we announced."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._announced:
            await self._host.lan.withdraw(self._us.service().name)

    def want(self, key: str, address: str) -> None:
        """There should be somebody at that address: a node's id, or the address itself where that is not known."""
        self._wanted[key] = address
        self._call(key)

    def learn(self, node: str, address: str) -> None:
        """Somebody else reaches a node there; what it said of itself counts more."""
        if node not in self._wanted:
            self.want(node, address)

    def forget(self, key: str) -> None:
        """Nobody is expected there any more."""
        if key not in self._peers:
            self._wanted.pop(key, None)

    async def _announce(self) -> None:
        """Where that cannot be done, the addresses that a person gave are left, and those who call us."""
        try:
            await self._host.lan.advertise(self._us.service())
        except HcsimError as error:
            self._tell(f"not announced: {error}")
            if not self._peers:
                raise
        else:
            self._announced = True
            self._start(self._browse(), "browse")

    async def _say_again(self) -> None:
        try:
            await self._host.lan.advertise(self._us.service())
        except HcsimError as error:
            self._host.trace("not announced", str(error))

    async def _browse(self) -> None:
        async for sighting in self._host.lan.browse():
            properties = sighting.service.properties
            node = properties.get("node", "")
            if properties.get("namespace") != self._us.namespace or not node or node == self._us.node:
                continue
            if sighting.gone:
                self.forget(node)
            else:
                self.want(node, place_of(sighting.service))

    def _call(self, key: str) -> None:
        if key not in self._calling and not self._here(key):
            self._calling[key] = None
            self._start(self._attempts(key), f"dial {self._wanted[key]}")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._host.spawn(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _here(self, key: str) -> bool:
        return self._has(self._nodes.get(key, key))

    async def _attempts(self, key: str) -> None:
        failure: HcsimError | None = None
        try:
            for attempt in range(self._config.max_retries):
                if key not in self._wanted or self._here(key):
                    return
                try:
                    node = await self._dial(self._wanted[key], self._config.connection_timeout_s)
                    if node == self._us.node or (node != key and key not in self._peers):
                        self._wanted.pop(key, None)  # we ourselves, or somebody else than was announced there
                        return
                    self._nodes[key] = node
                except HcsimError as error:
                    failure = error
                    self._host.trace("not reached", self._wanted.get(key, key), str(error))
                    await self._host.clock.sleep(min(_PAUSE_S * 2**attempt, self._config.peer_timeout_s))
                else:
                    return
            if failure is not None and not isinstance(failure, AdmissionRefused):  # of that we have heard already
                self._tell(f"{self._wanted.get(key, key)} was not reached: {failure}")
        finally:
            del self._calling[key]


def _overlap(one: str, other: str) -> bool:
    """Whether two addresses have a place in common."""
    hosts, port = hosts_of(one)
    others, other_port = hosts_of(other)
    return port == other_port and any(host in others for host in hosts)
