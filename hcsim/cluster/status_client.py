"""A client that queries the status of a running cluster from outside. Any machine that has the cluster's secret
may do so, and may report that a node is gone for good.

The client opens a control channel as a member does and sends a query instead of a hello, so it is in no view
and in no list of nodes. Nodes are found by their announcements, at given addresses, and through each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from hcsim.cluster.control_connections import HELLO_TIMEOUT_S, MESSAGE_LIMIT_BYTES
from hcsim.cluster.discovery import place_of
from hcsim.cluster.messages import SCHEMA, StatusReply, StatusRequest
from hcsim.cluster.view import Member
from hcsim.errors import DeadlineExceeded, HcsimError, RemoteProtocolError
from hcsim.runtime.channel import Channel
from hcsim.runtime.clock import within
from hcsim.runtime.host import Host
from hcsim.telemetry.history import MOST_MESSAGES, HistoryMessage, RunHistory
from hcsim.transport.admission_queue import one_line
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
        self.told_at_s: dict[str, float] = {}
        """When each answer came, by the asking host's clock."""
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
            self.told_at_s[told.status.us.node] = self._host.clock.now()
            self._here.append(told.status.us)
            self._asking.setdefault(told.status.control, self._asking[address])
            for link in told.links:
                self._ask(link.control)


class WatchedNode:
    """A node that is asked again and again, over a channel that stays open, and what it has told so far."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.reply: StatusReply | None = None
        """The last one."""
        self.heard_s = 0.0
        """When that came, on the client's clock."""
        self.failure = ""
        """Why the last attempt failed; empty if it did not."""
        self.has_failed = False
        """Whether it ever ceased to answer."""
        self.history = RunHistory()
        self._channel: Channel | None = None

    @property
    def answers(self) -> bool:
        return self.reply is not None and not self.failure

    async def ask(self, host: Host, timeout_s: float) -> None:
        """Ask once; note the reply or the failure."""
        late = f"{self.address} did not answer within {timeout_s:g} s"
        try:
            async with within(host.clock, 2 * timeout_s, late):
                known_s = -1.0 if self.reply is None or self.reply.details is None else self.reply.details.now_s
                if self._channel is None:
                    self._channel = await host.connect(self.address, timeout_s=timeout_s)
                    self._channel.limit(MESSAGE_LIMIT_BYTES)
                    known_s = -1.0  # the machine's clock may have begun anew
                reply = await SCHEMA.ask(self._channel, StatusRequest(since_s=known_s))
            self._take(expect(reply, StatusReply, self.address))
            self.heard_s, self.failure = host.clock.elapsed(), ""
        except HcsimError as error:
            self.failure, self.has_failed = str(error), self.reply is not None
            await self.close()

    async def close(self) -> None:
        """Close the channel; the next question opens another one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _take(self, reply: StatusReply) -> None:
        details = reply.details
        if details is None:
            raise RemoteProtocolError(f"{self.address} told no details", self.address)
        before = self.reply
        if before is None or before.status.us != reply.status.us:  # it was started again
            self.history = RunHistory(details.title, details.total_steps)
        self.history.extend(details.steps, details.messages)
        self.reply = reply


class ClusterWatch:
    """Watches all nodes of a cluster until it is closed: those at given addresses, those that are announced, and those
    that these know."""

    def __init__(self, host: Host, namespace: str, peers: Sequence[str], every_s: float, timeout_s: float) -> None:
        self._host = host
        self._namespace = namespace
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._targets: dict[str, WatchedNode] = {}
        self._asking: list[asyncio.Task[None]] = []
        self.failure = ""
        """Why the local network cannot be searched; empty if it can."""
        self.messages: deque[HistoryMessage] = deque(maxlen=MOST_MESSAGES)
        """Which nodes ceased to answer, or answer again, on the client's clock."""
        for address in peers:
            self._watch(address)
        self._asking.append(host.spawn(self._look(), name="look around"))

    @property
    def nodes(self) -> tuple[WatchedNode, ...]:
        """The nodes that have answered, now or before; of several boots of a node the last one that was heard."""
        found: dict[str, WatchedNode] = {}
        for each in self._targets.values():
            if each.reply is not None:
                node = each.reply.status.us.node
                if node not in found or (found[node].answers, found[node].heard_s) < (each.answers, each.heard_s):
                    found[node] = each
        return tuple(found[node] for node in sorted(found))

    @property
    def silent(self) -> dict[str, str]:
        """The addresses at which nobody has ever answered, with the reasons."""
        return {each.address: each.failure for each in self._targets.values() if each.reply is None and each.failure}

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for each in self._targets.values():
            await each.close()

    async def _look(self) -> None:
        try:
            async for sighting in self._host.lan.browse():
                ours = sighting.service.properties.get("namespace") == self._namespace
                if ours and "node" in sighting.service.properties and not sighting.gone:
                    self._watch(place_of(sighting.service))
        except HcsimError as error:
            self.failure = str(error)

    def _watch(self, address: str) -> None:
        if address not in self._targets and len(self._targets) < MOST_ASKED:
            self._targets[address] = WatchedNode(address)
            self._asking = [task for task in self._asking if not task.done()]
            self._asking.append(self._host.spawn(self._follow(self._targets[address]), name=f"watch {address}"))

    async def _follow(self, target: WatchedNode) -> None:
        while True:
            answered = target.answers
            await target.ask(self._host, self._timeout_s)
            if target.reply is not None and target.answers is not answered and target.has_failed:
                self._note(target, target.reply.status.us.name)
            if target.answers and target.reply is not None:
                control = target.reply.status.control
                if self._targets.setdefault(control, target) is not target:
                    await target.close()  # the node is watched at another address
                    self._targets = {key: each for key, each in self._targets.items() if each is not target}
                    return
                for link in target.reply.links:
                    self._watch(link.control)
            await self._host.clock.sleep(self._every_s)

    def _note(self, target: WatchedNode, name: str) -> None:
        text = f"{name} answers again" if target.answers else f"{name} does not answer: {target.failure}"
        self.messages.append(HistoryMessage(self._host.clock.elapsed(), one_line(text)))
