"""What a node knows of its ways to the others, and which one it dials.

A machine with several interfaces is at several addresses. Of two members of a view, the one that will dial the other
measures its ways to all of the other's addresses, once: quickly (see `probe`), over the port for control, and tells the
other what it found. It is measured again when one of the two was started anew, or when their connection has failed.

Addresses come in their owner's order, the fastest medium first. One that did not answer is dialled last, and one
that was measured to be clearly slower than another is dialled after those that were not. Which way is taken changes
how long things take, and never what is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hcsim.cluster.messages import SCHEMA, Probe
from hcsim.cluster.probe import QUICK, Line, Prober
from hcsim.cluster.view import Member
from hcsim.errors import HcsimError
from hcsim.runtime.address import address_at, hosts_of
from hcsim.runtime.channel import Channel
from hcsim.runtime.host import Host

AS_FAST = 0.8
"""A way that reaches this share of the fastest one's bandwidth is not clearly slower."""
CALL_TIMEOUT_S = 1.0
"""How long an address may take to answer before it is taken for one that does not."""


class Way(msgspec.Struct, frozen=True):
    """A way to a node, with what was measured on it."""

    host: str
    """The address that leads there, without a port."""
    line: Line

    @property
    def bandwidth_Bps(self) -> float:
        """Of its slower direction."""
        return min(self.line.there_Bps, self.line.back_Bps)


class Ways:
    """This node's ways to the others."""

    def __init__(self, host: Host, us: str, control: Callable[[str], str]) -> None:
        self._host = host
        self._prober = Prober(host, us, QUICK)
        self._control = control
        """Where a node takes calls about membership; empty where nobody knows."""
        self._found: dict[tuple[str, int], tuple[Way, ...]] = {}
        """By node and boot: ways that answered, the one to dial first."""
        self._heard: dict[str, tuple[Way, ...]] = {}
        """By node: what it has measured on its ways to us, as seen from here; their hosts are ours."""
        self.in_use: Callable[[], Mapping[str, tuple[str, str]]] = dict
        """By node: the two addresses that what is computed goes between at the moment."""

    async def measure(self, members: Sequence[Member]) -> None:
        """Measure what is not known yet of the ways to these, one after the other."""
        unknown = [member for member in members if (member.node, member.boot) not in self._found]
        places = [(member, *place) for member in unknown for place in _places(self._control(member.node))]
        channels: list[Channel] = []
        try:
            # One after the other, addresses that do not answer would take a second each.
            calls = await asyncio.gather(*(self._call(address, channels) for _, _, address in places))
            for member in unknown:
                hosts = [host for place, host, _ in places if place is member]
                theirs = [call for (place, *_), call in zip(places, calls, strict=True) if place is member]
                await self._measure(member, hosts, theirs)
        finally:
            for channel in channels:
                await channel.close()

    async def _measure(self, member: Member, hosts: Sequence[str], channels: Sequence[Channel | None]) -> None:
        ways = []
        for host, channel in zip(hosts, channels, strict=True):
            line = None if channel is None else await self._prober.over(channel, member.node)
            if line is not None:
                ways.append(Way(host, line))
                self._host.trace("measured", member.name, host, line.latency_s, line.there_Bps, line.back_Bps)
        if ways:
            self._found[member.node, member.boot] = _by_choice(ways)

    async def answer(self, channel: Channel) -> None:
        """Somebody wants to measure its way to us."""
        heard = await self._prober.answer(channel)
        if heard is not None:
            node, line = heard
            if channel.identity in ("", node):
                ours = Way(channel.ends[0], Line(line.latency_s, line.back_Bps, line.there_Bps))
                others = [way for way in self._heard.get(node, ()) if way.host != ours.host]
                self._heard[node] = _by_choice([ours, *others])

    def forget(self, node: str) -> None:
        """What is between us may have changed."""
        for known in [known for known in self._found if known[0] == node]:
            del self._found[known]
        self._heard.pop(node, None)

    def dialled(self, member: Member) -> Line | None:
        """What was measured on the way that we dial to a member."""
        ways = self._found.get((member.node, member.boot))
        return ways[0].line if ways else None

    def line(self, member: Member) -> Line | None:
        """What was measured between us, whoever did it, on the way that is or would be taken."""
        ours, theirs = self.in_use().get(member.node, ("", ""))
        found, heard = self._found.get((member.node, member.boot), ()), self._heard.get(member.node, ())
        used = [way for way in found if way.host == theirs] + [way for way in heard if way.host == ours]
        return next((way.line for way in (*used, *found, *heard)), None)

    def address(self, member: Member) -> str:
        """What to dial for what is computed: the member's address, the best place first."""
        reached = [way.host for way in self._found.get((member.node, member.boot), ())]
        hosts, port = hosts_of(member.address)
        first = [host for host in reached if host in hosts]
        return address_at([*first, *(host for host in hosts if host not in first)], port) if first else member.address

    async def _call(self, address: str, channels: list[Channel]) -> Channel | None:
        """A channel on which a measurement can begin, also into the list of those to be closed; None: no answer."""
        try:
            channel = await self._host.connect(address, timeout_s=CALL_TIMEOUT_S)
            channels.append(channel)
            await SCHEMA.send(channel, Probe())
        except HcsimError:
            return None
        return channel


def _places(address: str) -> list[tuple[str, str]]:
    """Each of a machine's hosts, and the address for it alone. Those of IPv6 lead to the same interfaces as those of
    IPv4, if there are such: one measurement is enough."""
    if not address:
        return []
    hosts, port = hosts_of(address)
    return [(host, address_at([host], port)) for host in [host for host in hosts if ":" not in host] or hosts]


def _by_choice(ways: Sequence[Way]) -> tuple[Way, ...]:
    """The first that is not clearly slower than another, then the rest as they were."""
    enough_Bps = AS_FAST * max(way.bandwidth_Bps for way in ways)
    return tuple(sorted(ways, key=lambda way: way.bandwidth_Bps < enough_Bps))
