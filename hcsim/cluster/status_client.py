"""A client that queries the status of a running cluster from outside. Any machine that has the cluster's secret
may do so, and may report that a node is gone for good.

The client opens a control channel as a member does and sends a query instead of a hello, so it is in no view
and in no list of nodes. Nodes are found by their announcements, at given addresses, and through each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hcsim.cluster.control_connections import HELLO_TIMEOUT_S, MESSAGE_LIMIT_BYTES
from hcsim.cluster.discovery import place_of
from hcsim.cluster.messages import SCHEMA, StatusReply, StatusRequest
from hcsim.cluster.view import Member
from hcsim.errors import DeadlineExceeded, HcsimError
from hcsim.runtime.host import Host
from hcsim.transport.messages import expect


async def ask(host: Host, address: str, timeout_s: float, forget: str = "") -> StatusReply:
    """Return the status of the node at that address; `forget` names a node that is gone for good."""
    channel = await host.connect(address, timeout_s=timeout_s)
    try:
        channel.limit(MESSAGE_LIMIT_BYTES)
        async with host.clock.timeout(HELLO_TIMEOUT_S):
            return expect(await SCHEMA.ask(channel, StatusRequest(forget)), StatusReply, address)
    except TimeoutError:
        raise DeadlineExceeded(f"{address} did not answer within {HELLO_TIMEOUT_S:g} s") from None
    finally:
        await channel.close()


MOST_FOREIGN = 8
"""The maximum number of machines of other clusters to report."""
MOST_ASKED = 64
"""The maximum number of announced addresses to query; addresses reported by nodes that answered are not
counted."""


class StatusClient:
    """Queries every node once."""

    def __init__(self, host: Host, namespace: str, timeout_s: float, forget: str = "") -> None:
        self._host = host
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._forget = forget
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.told: dict[str, StatusReply] = {}
        self._here: list[Member] = []
        """All members that answered; two with the same id if a key was copied."""
        self.failures: dict[str, str] = {}
        self.foreign: dict[str, str] = {}
        """The addresses of machines of other clusters, by name."""

    async def run(self, peers: Sequence[str], look_s: float) -> None:
        """Query these peers and the nodes announced within that time; return when all have answered or failed."""
        for address in peers:
            self._ask(address)
        looking = self._host.spawn(self._look(), name="look around")
        await self._host.clock.sleep(look_s)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        while waiting := [task for task in self._asking.values() if not task.done()]:
            await asyncio.gather(*waiting)

    def awaited(self) -> list[Member]:
        """Return the members that did not answer; another machine under the same name, or a copy, does not count as
        the member."""
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
