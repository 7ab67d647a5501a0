"""Routes, connections, and obstructions between the hosts.

A connection keeps the interfaces it was made over, as TCP keeps its two addresses. When a change removes one of
them, the connection stalls until the interface is back; only new connections take another route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from msgspec.structs import replace

from hcsim.config import (
    AnyMedium,
    Attachment,
    CablePulled,
    InterfaceChange,
    LinkChange,
    Node,
    RouterReboot,
    Scenario,
    Thunderbolt,
    Wan,
    Wifi,
)
from hcsim.runtime.channel import Payload
from hcsim.runtime.frame import HEADER_BYTES, Header
from hcsim.telemetry.trace import Trace
from hcsim.virtual.channel import ChannelHost, VirtualChannel
from hcsim.virtual.links import Path, ResourceGraph
from hcsim.virtual.network import FluidNetwork, Gate, Sender
from hcsim.virtual.stream import VirtualStream


class HostNetwork:
    """The network between the hosts, which are identified by name, each in its current life."""

    def __init__(self, scenario: Scenario, net: FluidNetwork, hosts: Mapping[str, ChannelHost]) -> None:
        self._scenario = scenario
        self._net = net
        self._hosts = hosts
        self.topology = ResourceGraph(scenario)
        self.on_join: Callable[[VirtualChannel], None] | None = None
        """Called with each end of a new connection."""
        self._gates: dict[str, Gate] = {}
        self._add_gates()
        self._set_bursts()
        self._connections: dict[frozenset[str], int] = {}
        """The number of connections so far, per pair of hosts, so that their names do not depend on other pairs."""
        self._speaking: dict[str, dict[int, VirtualChannel]] = {}
        """Ends whose last message has not arrived, closed or not, by sending host and stream number."""
        net.on_end = self._ended
        self._changes: list[MediumChange] = []
        self._cuts: dict[tuple[str, str], int] = {}
        self._clogged_until_ns: dict[tuple[str, str], int] = {}
        self._blocks: dict[tuple[str, int], list[str]] = {}
        """The active blocks by host and port."""

    def join(
        self, caller: ChannelHost, callee: ChannelHost, port: int, interface: str = ""
    ) -> tuple[VirtualChannel, VirtualChannel] | None:
        """Connect two hosts; return the caller's and the callee's end, or None if there is no route.

        `interface` selects an interface of the callee."""
        there = self.topology.route(caller.name, callee.name, ("", interface) if interface else None)
        if there is None:
            return None
        back = self.topology.route(callee.name, caller.name, (there.arrives_by, there.medium) if interface else None)
        if back is None:
            return None
        two = frozenset((caller.name, callee.name))
        number = self._connections[two] = self._connections.get(two, 0) + 1
        ends = f"{caller.name}%{back.interface}", f"{callee.name}%{there.interface}"
        outgoing = self._stream(f"{caller.name}→{callee.name}#{number}", there, back)
        incoming = self._stream(f"{callee.name}→{caller.name}#{number}", back, there)
        outgoing.reverse, incoming.reverse = incoming, outgoing
        called = callee.name, port
        near = VirtualChannel(caller, callee.name, outgoing, ends, called)
        far = VirtualChannel(callee, caller.name, incoming, ends[::-1], called)
        VirtualChannel.join(near, far)
        for channel in (near, far):
            source, target = channel.host.name, channel.peer
            outgoing = channel.streams[0]
            channel.host.channels[channel] = None
            self._speaking.setdefault(source, {})[outgoing.number] = channel
            if self.is_cut(source, target) or self.is_cut(target, source) or self.is_silent(*called):
                self._obstruct_one(channel)
            outgoing.hold_until(self.clogged_until_ns(source, target))
            if self.on_join is not None:
                self.on_join(channel)
        return near, far

    def channels(self, source: str, target: str) -> list[VirtualChannel]:
        """Return the first host's ends of its connections to the second: all open ones, and closed ones whose last
        message
        is in flight."""
        return [channel for channel in self.channels_of(source) if channel.peer == target]

    def channels_of(self, name: str) -> list[VirtualChannel]:
        """Return all ends of a host, like `channels`."""
        opened = self._hosts[name].channels
        return [*opened, *(channel for channel in self._speaking.get(name, {}).values() if channel not in opened)]

    def _ended(self, stream: Sender) -> None:
        for speaking in self._speaking.values():
            speaking.pop(stream.number, None)

    def neighbours(self, name: str) -> tuple[str, ...]:
        """The hosts in a host's broadcast domain."""
        homes = {node.name: self._domains(node.name) for node in self._scenario.nodes}
        return tuple(other for other in self._hosts if other != name and homes[name] & homes[other])

    def is_at_home(self, name: str, home: str) -> bool:
        """Return whether the host is on the home's network now."""
        return home in self._domains(name)

    # Partitions and clogs.

    def is_cut(self, source: str, target: str) -> bool:
        """Return whether packets from `source` to `target` are lost."""
        return self._cuts.get((source, target), 0) > 0

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Drop all packets from the first to the second host of each pair."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1
            self._obstruct(*pair)

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Undo one `cut` of each pair."""
        for pair in pairs:
            self._cuts[pair] -= 1
            self._obstruct(*pair)

    def clog(self, source: str, target: str, until_ns: int) -> None:
        """Delay everything from `source` to `target` until that time, without loss."""
        self._clogged_until_ns[source, target] = max(until_ns, self.clogged_until_ns(source, target))
        for channel in self.channels(source, target):
            channel.streams[0].hold_until(until_ns)

    def clogged_until_ns(self, source: str, target: str) -> int:
        """Return the time when the route from `source` to `target` is clear."""
        return self._clogged_until_ns.get((source, target), 0)

    # Ports.

    def block(self, name: str, port: int, how: str) -> None:
        """Close a port of a host, or drop all its traffic."""
        self._blocks.setdefault((name, port), []).append(how)
        for channel in self._called(name, port):
            if how == "closed":
                channel.reset("connection reset")
            else:
                self._obstruct_one(channel)

    def unblock(self, name: str, port: int, how: str) -> None:
        self._blocks[name, port].remove(how)
        for channel in self._called(name, port):
            self._obstruct_one(channel)

    def is_closed(self, name: str, port: int) -> bool:
        """Return whether connections to the port are refused."""
        return "closed" in self._blocks.get((name, port), ())

    def is_silent(self, name: str, port: int) -> bool:
        """Return whether all traffic of the port is dropped."""
        return "silent" in self._blocks.get((name, port), ())

    def _called(self, name: str, port: int) -> list[VirtualChannel]:
        """Return both ends of all connections made to the port."""
        return [channel for host in self._hosts for channel in self.channels_of(host) if channel.called == (name, port)]

    # Changes of the links.

    def change(self, change: MediumChange) -> None:
        """Apply a change of the network."""
        self._changes.append(change)
        self._rebuild()

    def restore(self, change: MediumChange) -> None:
        """Undo one change; later ones stay."""
        self._changes.remove(change)
        self._rebuild()

    def _rebuild(self) -> None:
        scenario = self._scenario
        for change in self._changes:
            scenario = changed(scenario, change)
        self.topology = ResourceGraph(scenario, self.topology.resources)
        for name, capacity in self.topology.capacities.items():
            self._net.capacity(self.topology.resources[name], capacity)
        self._add_gates()
        self._set_bursts()
        for name in self._hosts:
            for channel in self.channels_of(name):
                self._reroute(channel)

    def _set_bursts(self) -> None:
        resources = self.topology.resources
        self._net.set_bursts({resources[name]: burst for name, burst in self.topology.bursts.items()})

    def _add_gates(self) -> None:
        """Create a gate for the air of each access point that has stations."""
        for medium in self._scenario.media:
            air = f"{medium.name}.air"
            if isinstance(medium, Wifi) and medium.gate and air in self.topology.resources and air not in self._gates:
                self._gates[air] = Gate(self._net, self.topology.resources[air], medium)

    def _reroute(self, channel: VirtualChannel) -> None:
        there, back = self._same_way(channel)
        outgoing = channel.streams[0]
        if there is not None and back is not None and not outgoing.dead:
            outgoing.reroute(there, back)
        self._obstruct_one(channel)

    def _obstruct(self, source: str, target: str) -> None:
        for channel in (*self.channels(source, target), *self.channels(target, source)):
            self._obstruct_one(channel)

    def _obstruct_one(self, channel: VirtualChannel) -> None:
        """Update what is held back of this end's data and of their acknowledgements."""
        source, target = channel.host.name, channel.peer
        off = None in self._same_way(channel) or self.is_silent(*channel.called)
        channel.streams[0].obstruct(data=off or self.is_cut(source, target), acks=off or self.is_cut(target, source))

    def _same_way(self, channel: VirtualChannel) -> tuple[Path | None, Path | None]:
        """Return the forward and backward paths over the connection's interfaces; None where one is gone."""
        source = channel.host.name
        outgoing, incoming = channel.streams
        there = self.topology.route(source, channel.peer, outgoing.interfaces)
        return there, self.topology.route(channel.peer, source, incoming.interfaces)

    def _stream(self, name: str, there: Path, back: Path) -> VirtualStream:
        stream = VirtualStream(self._net, name, there, back)
        used = [resource.name for resource, _ in there.uses]
        stream.gates = tuple(gate for air, gate in self._gates.items() if air in used)
        return stream

    def _domains(self, name: str) -> frozenset[str]:
        scenario = self.topology.scenario
        links = next(node.links for node in scenario.nodes if node.name == name)
        attached = {link.medium for link in links}
        return frozenset(getattr(m, "home", m.name) for m in scenario.media if m.name in attached)


Frame: TypeAlias = tuple[Header, Payload]
FLIP = "flip"
FrameChange: TypeAlias = Callable[[VirtualChannel, Header, Payload], Frame | None]
"""Maps the sender's end and a frame to the frame that arrives instead, or to None to wait for another."""
FrameRule: TypeAlias = Callable[[VirtualChannel, Header, Payload], tuple[Frame, ...] | None]
"""Maps the sender's end and a frame to the frames that arrive instead, in order, or to None for no change."""


class FrameFaults:
    """Frames that arrive other than they were sent, past every checksum of the network.

    A change waits for the next frame between two hosts that it can be made to, on whatever connection. A rule changes
    every frame that it applies to, until it is removed. While there is a change or a rule between two hosts, their
    connections take a detour through here; all others are untouched and cost nothing.
    """

    def __init__(self, wiring: HostNetwork, trace: Trace, *, sealed: bool) -> None:
        self._wiring = wiring
        self._trace = trace
        self._sealed = sealed
        self._waiting: dict[tuple[str, str], list[tuple[str, FrameChange]]] = {}
        self._rules: dict[tuple[str, str], list[tuple[str, FrameRule]]] = {}
        wiring.on_join = self._watch

    def add(self, what: str, source: str, target: str, alter: FrameChange) -> None:
        """Change one frame from `source` to `target`; `what` names the change in the trace."""
        self._waiting.setdefault((source, target), []).append((what, alter))
        self._watch_all(source, target)

    def add_rule(self, what: str, source: str, target: str, rule: FrameRule) -> None:
        """Apply a rule to all frames from `source` to `target`; `what` names it in the trace."""
        self._rules.setdefault((source, target), []).append((what, rule))
        self._watch_all(source, target)

    def remove_rule(self, source: str, target: str, rule: FrameRule) -> None:
        ways = self._rules[source, target]
        ways[:] = [entry for entry in ways if entry[1] is not rule]

    def _watch_all(self, source: str, target: str) -> None:
        for channel in self._wiring.channels(source, target):
            self._watch(channel)

    def _watch(self, channel: VirtualChannel) -> None:
        way = channel.host.name, channel.peer
        if self._waiting.get(way) or self._rules.get(way):
            channel.divert(self._passes)

    def _passes(self, channel: VirtualChannel, deliver: Callable[[Header, Payload], None], frame: Frame) -> None:
        way = channel.host.name, channel.peer
        waiting, rules = self._waiting.get(way, []), self._rules.get(way, [])
        size_bytes = frame[0].length
        for change in waiting:
            what, alter = change
            altered = alter(channel, *frame)
            if altered is not None:
                waiting.remove(change)
                self._note(channel, what)
                frame = altered
                if self._sealed and what == FLIP:
                    channel.reset("a record was damaged on its way")
                    return
                break
        frames: tuple[Frame, ...] = (frame,)
        for what, rule in rules:
            frames = tuple(out for each in frames for out in self._ruled(channel, what, rule, each))
        arrived_bytes = sum(HEADER_BYTES + header.length for header, _ in frames)
        channel.streams[0].outstanding += arrived_bytes - HEADER_BYTES - size_bytes
        if not waiting and not rules:
            channel.divert(None)
        for each in frames:
            deliver(*each)

    def _ruled(self, channel: VirtualChannel, what: str, rule: FrameRule, frame: Frame) -> tuple[Frame, ...]:
        made = rule(channel, *frame)
        if made is None:
            return (frame,)
        self._note(channel, what)
        return made

    def _note(self, channel: VirtualChannel, what: str) -> None:
        self._trace.record((channel.host.loop.env.now_ns, "fault", what, channel.streams[0].name))


MediumChange: TypeAlias = LinkChange | CablePulled | InterfaceChange | RouterReboot


def changed(scenario: Scenario, change: MediumChange) -> Scenario:
    """Return the scenario with one change of its network applied."""
    if isinstance(change, CablePulled):
        return _unplugged(scenario, change)
    if isinstance(change, InterfaceChange):
        nodes = tuple(_moved(node, change) if node.name == change.node else node for node in scenario.nodes)
        return replace(scenario, nodes=nodes)
    if isinstance(change, RouterReboot):
        down = [m.name for m in scenario.media if not isinstance(m, Thunderbolt) and m.home == change.home]
        return replace(scenario, nodes=tuple(_without(node, down) for node in scenario.nodes))
    return _with_other_figures(scenario, change)


def _unplugged(scenario: Scenario, change: CablePulled) -> Scenario:
    medium = next(medium for medium in scenario.media if medium.name == change.medium)
    if isinstance(medium, Thunderbolt):
        ends = [change.node] if change.to is None else [change.node, change.to]
        cables = tuple(cable for cable in medium.cables if not all(end in cable.between for end in ends))
        return _with_medium(scenario, medium, replace(medium, cables=cables))
    nodes = tuple(_without(n, [change.medium]) if n.name == change.node else n for n in scenario.nodes)
    return replace(scenario, nodes=nodes)


def _without(node: Node, media: list[str]) -> Node:
    return replace(node, links=tuple(link for link in node.links if link.medium not in media))


def _moved(node: Node, change: InterfaceChange) -> Node:
    left = _without(node, [change.medium]).links
    there = any(link.medium == change.to for link in left)
    return replace(node, links=left if there else (*left, Attachment(change.to)))


def _with_other_figures(scenario: Scenario, change: LinkChange) -> Scenario:
    """Apply the values to a home's line, to one host's link, or to a medium and all its links, including those with
    values of their own."""
    if any(change.medium in line.ways for line in scenario.wan):
        return replace(scenario, wan=tuple(_other_line(line, change) for line in scenario.wan))
    medium = next(medium for medium in scenario.media if medium.name == change.medium)
    if isinstance(medium, Thunderbolt):
        return _with_medium(scenario, medium, _other_cables(medium, change))
    figures = _given(rate_bps=change.rate_bps, latency_s=change.latency_s, loss=change.loss)
    if change.node is not None:
        nodes = (_other_link(n, change.medium, figures) if n.name == change.node else n for n in scenario.nodes)
        return replace(scenario, nodes=tuple(nodes))
    as_the_medium = dict.fromkeys(figures)
    nodes = (_other_link(node, change.medium, as_the_medium) for node in scenario.nodes)
    if isinstance(medium, Wifi) and change.rate_bps is not None:
        figures["phy_rate_bps"] = figures.pop("rate_bps")
    return _with_medium(replace(scenario, nodes=tuple(nodes)), medium, replace(medium, **figures))


def _with_medium(scenario: Scenario, old: AnyMedium, new: AnyMedium) -> Scenario:
    return replace(scenario, media=tuple(new if medium is old else medium for medium in scenario.media))


def _other_cables(medium: Thunderbolt, change: LinkChange) -> Thunderbolt:
    figures = _given(forward_bps=change.rate_bps, backward_bps=change.rate_bps, latency_s=change.latency_s)
    cables = tuple(
        replace(cable, **figures) if change.node in (None, *cable.between) else cable for cable in medium.cables
    )
    return replace(medium, cables=cables)


def _other_line(line: Wan, change: LinkChange) -> Wan:
    if change.medium not in line.ways:
        return line
    rates = dict.fromkeys(line.ways[change.medium], change.rate_bps)
    return replace(line, **_given(**rates, latency_s=change.latency_s, loss=change.loss))


def _other_link(node: Node, medium: str, figures: Mapping[str, float | None]) -> Node:
    if "rate_bps" in figures:
        figures = {**figures, "up_bps": None, "down_bps": None}
    links = tuple(replace(link, **figures) if link.medium == medium else link for link in node.links)
    return replace(node, links=links)


def _given(**figures: float | None) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}
