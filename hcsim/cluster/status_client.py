"""A client that queries the status of a running cluster from outside. Any machine that has the cluster's secret
may do so, and may report that a node is gone for good.

The client opens a control channel as a member does and sends a query instead of a hello, so it is in no view
and in no list of nodes. Nodes are found by their announcements, at given addresses, and through each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from hcsim.cluster.control_connections import HELLO_TIMEOUT_S, MESSAGE_LIMIT_BYTES
from hcsim.cluster.discovery import place_of
from hcsim.cluster.messages import SCHEMA, ControlMessage, Goodbye, StatusReply, StatusRequest
from hcsim.cluster.view import Member
from hcsim.errors import DeadlineExceeded, HcsimError, PeerRefused, RemoteProtocolError
from hcsim.runtime.channel import Channel
from hcsim.runtime.clock import within
from hcsim.runtime.host import Host
from hcsim.telemetry.history import MOST_MESSAGES, HistoryMessage, HistoryStep, RunHistory
from hcsim.transport.admission_queue import one_line
from hcsim.transport.messages import expect


async def ask(host: Host, address: str, timeout_s: float, forget: str = "") -> StatusReply:
    """Return the status of the node at that address; `forget` names a node that is gone for good."""
    channel = await host.connect(address, timeout_s=timeout_s)
    try:
        channel.limit(MESSAGE_LIMIT_BYTES)
        async with host.clock.timeout(HELLO_TIMEOUT_S):
            return _reply(await SCHEMA.ask(channel, StatusRequest(forget)), channel, address)
    except TimeoutError:
        raise DeadlineExceeded(f"{address} did not answer within {HELLO_TIMEOUT_S:g} s") from None
    finally:
        await channel.close()


def _reply(message: ControlMessage, channel: Channel, address: str) -> StatusReply:
    """Return the reply of the node at that address. Raises an error if it refuses, or says that it is another one."""
    if isinstance(message, Goodbye):
        raise PeerRefused(f"{address} refused us: {one_line(message.reason)}", address)
    reply = expect(message, StatusReply, address)
    node = reply.status.us.node
    if channel.identity and channel.identity != node:
        raise RemoteProtocolError(f"{address} says that it is {node}, and its key says {channel.identity}", address)
    return reply


MOST_FOREIGN = 8
"""The maximum number of machines of other clusters to report."""
MOST_ASKED = 64
"""The maximum number of announced addresses to query: anybody may have announced anything."""
MOST_NODES = 256
"""The maximum number of addresses to query, those included that nodes report."""
LOOK_S = 3.0
"""How long announcements may take to come."""
MOST_IN_VAIN = 10
"""How often an address is asked in vain before another one may take its place."""
REFUSED_S = 10.0
"""How long a node that refuses to be watched is left alone."""


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
                if ours and len(self._asking) < MOST_ASKED:
                    self._ask(place_of(sighting.service))
        except HcsimError as error:
            self.failures["the local network"] = str(error)

    def _ask(self, address: str) -> None:
        if address not in self._asking and len(self._asking) < MOST_NODES:
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
            if len(self._asking) < MOST_NODES:
                self._asking.setdefault(told.status.control, self._asking[address])
            for link in told.links:
                self._ask(link.control)


_HOTTEST_C = 1000.0
_MOST = float(1 << 53)
"""Beyond it numbers are no counts in every reader's arithmetic, and no times or rates in anybody's."""


def _amount(number: float | None, most: float = _MOST) -> float | None:
    """Return a number that a member tells; None where it can be no amount."""
    return number if number is not None and 0 <= number <= most else None


def _count(number: int | None) -> int | None:
    return number if number is not None and 0 <= number <= _MOST else None


def _plausible(reply: StatusReply) -> StatusReply:
    """Return the reply without numbers that cannot be: a member may tell anything. A loss may be any number."""
    replaced = msgspec.structs.replace
    links = tuple(
        replaced(
            link,
            latency_s=_amount(link.latency_s),
            there_Bps=_amount(link.there_Bps),
            back_Bps=_amount(link.back_Bps),
        )
        for link in reply.links
    )
    details = reply.details
    if details is None:
        return replaced(reply, links=links)
    chip, readings, now_s = details.chip, details.readings, details.now_s if abs(details.now_s) <= _MOST else 0.0
    degrees = readings.temperature_c
    details = replaced(
        details,
        now_s=now_s,
        chip=replaced(chip, memory_bytes=_count(chip.memory_bytes)),
        readings=replaced(
            readings,
            temperature_c=degrees if degrees is not None and abs(degrees) < _HOTTEST_C else None,
            power_w=_amount(readings.power_w),
            speed_limit=_amount(readings.speed_limit, 1.0),
            free_bytes=_count(readings.free_bytes),
        ),
        total_steps=_count(details.total_steps) or 0,
        needed=_count(details.needed) or 0,
        steps=tuple(_plausible_step(step) for step in details.steps if _is_step(step)),
        messages=tuple(said for said in details.messages if abs(said.at_s) <= _MOST),
    )
    return replaced(reply, links=links, details=details)


def _is_step(step: HistoryStep) -> bool:
    return 0 <= step.step <= _MOST and abs(step.at_s) <= _MOST


def _plausible_step(step: HistoryStep) -> HistoryStep:
    return msgspec.structs.replace(
        step,
        ranks=_count(step.ranks) or 0,
        samples=_count(step.samples) or 0,
        compute_s=_amount(step.compute_s) or 0.0,
        encode_s=_amount(step.encode_s) or 0.0,
        wait_s=_amount(step.wait_s) or 0.0,
        whole_s=_amount(step.whole_s) or 0.0,
        accuracy=_amount(step.accuracy, 1.0),
    )


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
        self.asked_in_vain = 0
        """How often it was asked since it answered."""
        self.refuses = False
        """Whether it answers that it is not to be watched."""
        self.history = RunHistory()
        self._channel: Channel | None = None

    @property
    def node(self) -> str:
        """Its id; empty before it has answered."""
        return "" if self.reply is None else self.reply.status.us.node

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
                self._take(_reply(reply, self._channel, self.address))
            self.heard_s, self.failure, self.refuses = host.clock.elapsed(), "", False
            self.asked_in_vain = 0
        except HcsimError as error:
            self.failure, self.has_failed = str(error), self.reply is not None
            self.asked_in_vain += 1
            self.refuses = isinstance(error, PeerRefused) and self._channel is not None
            await self.close()

    async def close(self) -> None:
        """Close the channel; the next question opens another one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _take(self, reply: StatusReply) -> None:
        reply = _plausible(reply)
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
        self._following: dict[str, asyncio.Task[None]] = {}
        self.failure = ""
        """Why the local network cannot be searched; empty if it can."""
        self.messages: deque[HistoryMessage] = deque(maxlen=MOST_MESSAGES)
        """Which nodes ceased to answer, or answer again, on the client's clock."""
        for address in peers:
            self._watch(address)
        self._began_s = host.clock.elapsed()
        self._looking = host.spawn(self._look(), name="look around")

    @property
    def nodes(self) -> tuple[WatchedNode, ...]:
        """The nodes that have answered, now or before; of several boots of a node the last one that was heard."""
        found: dict[str, WatchedNode] = {}
        for each in self._targets.values():
            if each.reply is not None:
                node = each.node
                if node not in found or (found[node].answers, found[node].heard_s) < (each.answers, each.heard_s):
                    found[node] = each
        return tuple(found[node] for node in sorted(found))

    @property
    def looks_still(self) -> bool:
        """Whether it has not looked around for long enough to say that nobody is here."""
        return not self.silent and self._host.clock.elapsed() < self._began_s + LOOK_S

    @property
    def silent(self) -> dict[str, str]:
        """The addresses at which nobody has ever answered, with the reasons."""
        return {each.address: each.failure for each in self._targets.values() if each.reply is None and each.failure}

    @property
    def refusals(self) -> dict[str, str]:
        """The addresses of nodes that answer that they are not to be watched, with the reasons."""
        return {each.address: each.failure for each in self._targets.values() if each.refuses}

    async def close(self) -> None:
        tasks = [self._looking, *self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in self._targets.values():
            await each.close()

    async def _look(self) -> None:
        try:
            async for sighting in self._host.lan.browse():
                properties = sighting.service.properties
                if properties.get("namespace") == self._namespace and "node" in properties and not sighting.gone:
                    self._watch(place_of(sighting.service), properties["node"], MOST_ASKED)
        except HcsimError as error:
            self.failure = str(error)

    def _watch(self, address: str, node: str = "", most: int = MOST_NODES) -> None:
        """Watch the node at this address, unless it is watched at another one."""
        if address in self._targets or any(each.answers and each.node == node for each in self._targets.values()):
            return
        if len(self._targets) >= most:
            vain = next((each for each in self._targets.values() if each.asked_in_vain >= MOST_IN_VAIN), None)
            if vain is None:
                return
            self._following.pop(vain.address).cancel()
            del self._targets[vain.address]
        self._targets[address] = WatchedNode(address)
        self._following[address] = self._host.spawn(self._follow(self._targets[address]), name=f"watch {address}")

    async def _follow(self, target: WatchedNode) -> None:
        try:
            while not self._is_watched_elsewhere(target):
                answered = target.answers
                await target.ask(self._host, self._timeout_s)
                if target.reply is not None and target.answers is not answered and target.has_failed:
                    self._note(target, target.reply.status.us.name)
                if target.answers and target.reply is not None:
                    for link in target.reply.links:
                        self._watch(link.control, link.node)
                await self._host.clock.sleep(REFUSED_S if target.refuses else self._every_s)
            del self._targets[target.address], self._following[target.address]
        finally:
            await target.close()

    def _is_watched_elsewhere(self, target: WatchedNode) -> bool:
        others = (each for each in self._targets.values() if each is not target)
        return bool(target.node) and any(each.answers and each.node == target.node for each in others)

    def _note(self, target: WatchedNode, name: str) -> None:
        if target.answers:
            text = f"{name} answers again"
        elif target.history.is_finished:
            text = f"{name} has finished"
        else:
            text = f"{name} does not answer: {target.failure}"
        self.messages.append(HistoryMessage(self._host.clock.elapsed(), one_line(text)))
