"""Asking a running cluster how it stands, from outside: any machine that has its secret may, and may say who is gone.

Who asks opens a control channel like a member does, and asks instead of saying hello; so it is in no view and on
nobody's list. Nodes are found where they announce themselves, at addresses that a person gave, and through each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hcsim.cluster.discovery import place_of
from hcsim.cluster.lines import HELLO_TIMEOUT_S, MESSAGE_LIMIT_BYTES
from hcsim.cluster.messages import SCHEMA, Ask, Told
from hcsim.cluster.view import Member
from hcsim.errors import DeadlineExceeded, HcsimError
from hcsim.runtime.host import Host
from hcsim.transport.messages import expect


async def ask(host: Host, address: str, timeout_s: float, forget: str = "") -> Told:
    """How the node at that address stands; tell it, if that is so, that another one is gone for good."""
    channel = await host.connect(address, timeout_s=timeout_s)
    try:
        channel.limit(MESSAGE_LIMIT_BYTES)
        async with host.clock.timeout(HELLO_TIMEOUT_S):
            return expect(await SCHEMA.ask(channel, Ask(forget)), Told, address)
    except TimeoutError:
        raise DeadlineExceeded(f"{address} did not answer within {HELLO_TIMEOUT_S:g} s") from None
    finally:
        await channel.close()


MOST_FOREIGN = 8
"""Machines of other clusters that a person is told of."""
MOST_ASKED = 64
"""Addresses that are asked because somebody announced them; what nodes that answered told is asked beyond that."""


class Survey:
    """Asks everybody once."""

    def __init__(self, host: Host, namespace: str, timeout_s: float, forget: str = "") -> None:
        self._host = host
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._forget = forget
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.told: dict[str, Told] = {}
        """By node, what it said."""
        self._here: list[Member] = []
        """Everybody who said something; two, where a key was copied."""
        self.failures: dict[str, str] = {}
        """By address, why nobody said anything."""
        self.foreign: dict[str, str] = {}
        """By name, where machines of other clusters are."""

    async def run(self, peers: Sequence[str], look_s: float) -> None:
        """Ask these, and whoever announces itself within that time; return when all have answered or failed."""
        for address in peers:
            self._ask(address)
        looking = self._host.spawn(self._look(), name="look around")
        await self._host.clock.sleep(look_s)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        while waiting := [task for task in self._asking.values() if not task.done()]:
            await asyncio.gather(*waiting)

    def awaited(self) -> list[Member]:
        """Members that nobody who answered is: another machine under its name, or a copy of it, is not the member."""
        members = dict.fromkeys(member for told in self.told.values() for member in told.view.members)
        return [m for m in members if not any(us.node == m.node and not m.elsewhere(us) for us in self._here)]

    async def _look(self) -> None:
        try:
            async for sighting in self._host.lan.browse():
                properties = sighting.service.properties
                is_node = "node" in properties and not sighting.gone
                ours = properties.get("namespace") == self._namespace and is_node
                if is_node and not ours and len(self.foreign) < MOST_FOREIGN:
                    self.foreign[sighting.service.name] = place_of(sighting.service)
                if ours and len(self._asking) < MOST_ASKED:  # anybody may have announced anything
                    self._ask(place_of(sighting.service))
        except HcsimError as error:
            self.failures["the local network"] = str(error)

    def _ask(self, address: str) -> None:
        if address not in self._asking:
            self._asking[address] = self._host.spawn(self._asked(address), name=f"ask {address}")

    async def _asked(self, address: str) -> None:
        try:
            told = await ask(self._host, address, self._timeout_s, self._forget)
        except HcsimError as error:
            self.failures[address] = str(error)
        else:
            self.told[told.status.us.node] = told
            self._here.append(told.status.us)
            self._asking.setdefault(told.status.control, self._asking[address])
            for link in told.links:
                self._ask(link.control)
