"""Network model: media become resources, routes become paths.

A resource is a shared capacity: one direction of a network card, the air time of an access point, one direction
of a cable, the uplink of a home. A path lists what one byte per second takes of each resource, so the sharing
model is independent of the media.

- Switched Ethernet: one egress and one ingress resource per card; the switch is not a limit. A card of infinite
  rate has neither: only latency remains.
- Wi-Fi: air time, capacity 1 per access point. A byte costs 1/R of a station with goodput R; from station to
  station it crosses the air twice.
- Thunderbolt: two directional resources per cable; a host that forwards for others has a forwarding resource. A
  bridge with a cycle follows its spanning tree.
- WAN: an uplink and a downlink per home; homes meet in the core.

The goodput of a wire is line rate × (MTU − headers)/(MTU + framing). The router bridges the media of a home,
except Thunderbolt. Among several routes the one with the highest rate wins, or, as on a Mac with its service
order, the first of the sender's links that leads there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from hcsim.config import Attachment, Ethernet, Node, Scenario, Tcp, Thunderbolt, Wan, Wifi
from hcsim.errors import ConfigError
from hcsim.runtime.host import Interface, Medium, fastest_first
from hcsim.virtual.rate_allocator import Resource
from hcsim.virtual.token_bucket import PortBurst, TokenBucket

if TYPE_CHECKING:
    import networkx as nx

LOOPBACK_LATENCY_S = 10e-6
BRIDGE = "bridge0"
"""The interface of all Thunderbolt cables of a host, as macOS calls it."""


@dataclass(frozen=True)
class Hop:
    """One medium crossed in one direction: the resource use per byte, and the latency."""

    uses: tuple[tuple[Resource, float], ...]
    latency_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    mtu: int = 1500
    rate_bytes_ps: float = inf
    weight: float | None = None
    """The station's weight where stations share air; None for a wire, which does not influence the sharing."""
    queue: tuple[Resource, float] | None = None
    """A resource whose full buffer delays everything behind it, and the size of that buffer in bytes."""
    port: tuple[Resource, float] | None = None
    """The port of a switch that drops packets when its queue is full, and the size of that queue in bytes."""


@dataclass(frozen=True)
class Path:
    """A route in one direction."""

    hops: tuple[Hop, ...]
    medium: str = ""
    """The medium at the sender."""
    arrives_by: str = ""
    """The medium at the receiver."""
    interface: str = ""
    """The target interface of the receiver."""
    cap_bytes_ps: float = inf
    """The limit of the two hosts for one stream, however fast the hops are."""

    @property
    def latency_s(self) -> float:
        """The one-way latency without queueing."""
        return sum(hop.latency_s for hop in self.hops)

    @property
    def jitter_s(self) -> float:
        """The mean of the extra delay."""
        return sum(hop.jitter_s for hop in self.hops)

    @property
    def loss(self) -> float:
        """The probability that a packet is lost on the way."""
        kept = 1.0
        for hop in self.hops:
            kept *= 1.0 - hop.loss
        return 1.0 - kept

    @property
    def mtu(self) -> int:
        """The smallest MTU on the way."""
        return min((hop.mtu for hop in self.hops), default=65535)

    @property
    def rate_bytes_ps(self) -> float:
        """The capacity of the path without competing traffic. Hops that share a resource take turns: two hops in the
        same
        air have half of it each.

        It follows from the nominal capacities, not from the current ones: a closed gate does not make a link slow."""
        slowest = inf
        so_far: dict[str, float] = {}
        for hop in self.hops:
            rate = hop.rate_bytes_ps
            for resource, _ in hop.uses:
                if resource.name in so_far:
                    rate = 1.0 / (1.0 / so_far[resource.name] + 1.0 / rate)
                so_far[resource.name] = rate
            slowest = min(slowest, rate)
        return slowest

    @property
    def weight(self) -> float:
        """Its weight in the sharing. Between two stations it is that of the slower one, which gets as much air time as
        any
        other station; the faster one gets what it needs to keep up."""
        return min((hop.weight for hop in self.hops if hop.weight is not None), default=1.0)

    @property
    def ports(self) -> tuple[tuple[Resource, float], ...]:
        """The ports on the way that have queues."""
        return tuple(hop.port for hop in self.hops if hop.port is not None)

    @property
    def uses(self) -> tuple[tuple[Resource, float], ...]:
        """The resource use per byte of all hops together."""
        return tuple(use for hop in self.hops for use in hop.uses)


def merged(*parts: tuple[tuple[tuple[Resource, float], ...], float]) -> tuple[tuple[Resource, float], ...]:
    """Add up uses, each part scaled by its factor. A resource appears once, in order of first use."""
    total: dict[str, tuple[Resource, float]] = {}
    for uses, factor in parts:
        for resource, share in uses:
            before = total.get(resource.name, (resource, 0.0))[1]
            total[resource.name] = (resource, before + share * factor)
    return tuple((resource, share) for resource, share in total.values() if share > 0.0)


@dataclass
class _Port:
    """The attachment of one host to a shared medium: the hop onto it and the hop off it."""

    medium: Ethernet | Wifi
    out: Hop
    into: Hop


@dataclass
class ResourceGraph:
    """The resources of a scenario and the paths over them."""

    scenario: Scenario
    resources: dict[str, Resource] = field(default_factory=dict)
    """Resources by name; those of an earlier topology are reused."""

    def __post_init__(self) -> None:
        self.capacities: dict[str, float] = {}
        self.bursts: dict[str, PortBurst] = {}
        """Those of resources that let a burst pass, by name."""
        self._ports: dict[str, list[_Port]] = {node.name: [] for node in self.scenario.nodes}
        self._service_order = {node.name: [link.medium for link in node.links] for node in self.scenario.nodes}
        self._caps = {node.name: node.cap_bps / 8 for node in self.scenario.nodes if node.cap_bps is not None}
        self._cables: dict[str, nx.Graph] = {}
        """The cables in the spanning tree of each Thunderbolt bridge. A host does not forward between two media."""
        self._routes: dict[tuple[str, str, tuple[str, str] | None], Path | None] = {}
        media = {medium.name: medium for medium in self.scenario.media}
        for node in self.scenario.nodes:
            for link in node.links:
                medium = media[link.medium]
                if isinstance(medium, Ethernet):
                    self._ports[node.name].append(self._ethernet(node, medium, link))
                elif isinstance(medium, Wifi):
                    self._ports[node.name].append(self._wifi(node, medium, link))
        self._uplinks = {wan.home: self._wan(wan) for wan in self.scenario.wan}
        for medium in self.scenario.media:
            if isinstance(medium, Thunderbolt):
                self._cables[medium.name] = self._thunderbolt(medium)

    def path(self, source: str, target: str) -> Path:
        """Return the best route; raise `ConfigError` if there is none."""
        path = self.route(source, target)
        if path is None:
            raise ConfigError(f"there is no route from {source} to {target}: they share no medium, home or WAN")
        return path

    def route(self, source: str, target: str, over: tuple[str, str] | None = None) -> Path | None:
        """Return the best route, or None. `over` gives the media at the sender and at the receiver; if its first part
        is
        empty, the second is an interface of the receiver."""
        key = (source, target, over)
        if key not in self._routes:
            self._routes[key] = self._find(source, target, over)
        return self._routes[key]

    def interfaces(self, name: str) -> tuple[Interface, ...]:
        found = [
            _interface(name, port.medium.name, _medium(port.medium), port.out.rate_bytes_ps * 8)
            for port in self._ports[name]
        ]
        trees = [tree for tree in self._cables.values() if name in tree]
        if trees:
            rate = max(float(data["rate_bps"]) for tree in trees for _, _, data in tree.edges(name, data=True))
            found.append(_interface(name, BRIDGE, Medium.THUNDERBOLT, rate))
        return fastest_first(found)

    def resource(self, name: str, capacity: float) -> Resource:
        """Return the resource of that name, with this capacity."""
        self.capacities[name] = capacity
        if name not in self.resources:
            self.resources[name] = Resource(name, capacity)
        return self.resources[name]

    def _ethernet(self, node: Node, medium: Ethernet, link: Attachment) -> _Port:
        usual_bps = link.rate_bps or medium.rate_bps
        latency, loss = _latency_and_loss(medium, link)

        def hop(way: str, rate_bps: float) -> Hop:
            rate = goodput_bytes_ps(rate_bps, medium.mtu, self.scenario.tcp)
            # The wire's latency belongs to the medium; each end carries half of it.
            uses = ((self.resource(_name(node.name, medium.name, way), rate), 1.0),) if rate < inf else ()
            if uses and (buckets := _buckets(link, rate, rate_bps)):
                wire = goodput_bytes_ps(medium.rate_bps, medium.mtu, self.scenario.tcp)
                self.bursts[uses[0][0].name] = PortBurst(max(wire, rate), buckets)
            port = (uses[0][0], float(medium.queue_bytes)) if uses and way == "in" and medium.queue_bytes else None
            return Hop(uses, latency / 2, medium.jitter_s / 2, half(loss), medium.mtu, rate, port=port)

        return _Port(medium, hop("out", link.up_bps or usual_bps), hop("in", link.down_bps or usual_bps))

    def _wifi(self, node: Node, medium: Wifi, link: Attachment) -> _Port:
        rate = (link.rate_bps or medium.phy_rate_bps) * medium.efficiency / 8
        latency, loss = _latency_and_loss(medium, link)
        air = self.resource(f"{medium.name}.air", 1.0)
        nominal = medium.phy_rate_bps * medium.efficiency / 8
        weight = rate / nominal if medium.fairness == "airtime" else 1.0
        hop = Hop(((air, 1.0 / rate),), latency / 2, medium.jitter_s / 2, half(loss), medium.mtu, rate, weight)
        return _Port(medium, hop, hop)

    def _wan(self, wan: Wan) -> tuple[Hop, Hop]:
        mtu = wan.tunnel.mtu if wan.tunnel else wan.mtu
        cap = wan.tunnel.cap_bps / 8 if wan.tunnel and wan.tunnel.cap_bps else inf
        latency = wan.latency_s + (wan.tunnel.delay_s if wan.tunnel else 0.0)

        def hop(way: str, rate_bps: float) -> Hop:
            rate = min(goodput_bytes_ps(rate_bps, mtu, self.scenario.tcp), cap)
            pipe = self.resource(f"{wan.home}.wan.{way}", rate)
            queue = (pipe, float(wan.buffer_bytes)) if wan.buffer_bytes else None
            return Hop(((pipe, 1.0),), latency, wan.jitter_s, wan.loss, mtu, rate, queue=queue)

        return hop("up", wan.up_bps), hop("down", wan.down_bps)

    def _thunderbolt(self, medium: Thunderbolt) -> nx.Graph:
        import networkx as nx  # an eighth of a second, and few have such cables

        graph = nx.Graph()
        for cable in medium.cables:
            a, b = cable.between
            hops = {}
            for source, target, rate_bps in ((a, b, cable.forward_bps), (b, a, cable.backward_bps)):
                rate = goodput_bytes_ps(rate_bps, medium.mtu, self.scenario.tcp)
                wire = self.resource(_name(medium.name, f"{source}→{target}"), rate)
                hops[source] = Hop(((wire, 1.0),), cable.latency_s, mtu=medium.mtu, rate_bytes_ps=rate)
            graph.add_edge(a, b, hops=hops, rate_bps=max(cable.forward_bps, cable.backward_bps))
        tree = nx.minimum_spanning_tree(graph, weight="weight")
        for node in sorted(tree.nodes):
            if medium.forwarding_bps and tree.degree(node) > 1:
                rate = goodput_bytes_ps(medium.forwarding_bps, medium.mtu, self.scenario.tcp)
                passed_on = self.resource(_name(medium.name, node, "forwards"), rate)
                tree.nodes[node]["forwards"] = Hop(((passed_on, 1.0),), 0.0, rate_bytes_ps=rate)
        return tree

    def _find(self, source: str, target: str, over: tuple[str, str] | None) -> Path | None:
        if source == target:
            return Path((Hop((), LOOPBACK_LATENCY_S, mtu=65535),))
        candidates = [*self._bridged(source, target), *self._over_thunderbolt(source, target)]
        if over is not None:
            candidates = [p for p in candidates if over in ((p.medium, p.arrives_by), ("", p.interface))]
        if not candidates:
            return None
        if self.scenario.routes == "service_order":
            order = self._service_order[source]
            first = min((path.medium for path in candidates), key=order.index)
            candidates = [path for path in candidates if path.medium == first]
        best = max(candidates, key=lambda path: (path.rate_bytes_ps, -path.latency_s))
        cap = min(self._caps.get(source, inf), self._caps.get(target, inf))
        return best if cap == inf else replace(best, cap_bytes_ps=cap)

    def _bridged(self, source: str, target: str) -> list[Path]:
        paths = []
        for out in self._ports[source]:
            for into in self._ports[target]:
                ends = (out.medium.name, into.medium.name, into.medium.name)
                if out.medium.home == into.medium.home:
                    paths.append(Path((out.out, into.into), *ends))
                elif out.medium.home in self._uplinks and into.medium.home in self._uplinks:
                    up, down = self._uplinks[out.medium.home][0], self._uplinks[into.medium.home][1]
                    paths.append(Path((out.out, up, down, into.into), *ends))
        return paths

    def _over_thunderbolt(self, source: str, target: str) -> list[Path]:
        if not self._cables:
            return []
        import networkx as nx

        paths = []
        for medium, tree in self._cables.items():
            if source not in tree or target not in tree or not nx.has_path(tree, source, target):
                continue
            hops: list[Hop] = []
            for here, there in pairwise(nx.shortest_path(tree, source, target)):
                if here != source and "forwards" in tree.nodes[here]:
                    hops.append(tree.nodes[here]["forwards"])
                hops.append(tree.edges[here, there]["hops"][here])
            paths.append(Path(tuple(hops), medium, medium, BRIDGE))
        return paths


def _latency_and_loss(medium: Ethernet | Wifi, link: Attachment) -> tuple[float, float]:
    """Return the values of the link, or else those of its medium."""
    return (
        medium.latency_s if link.latency_s is None else link.latency_s,
        medium.loss if link.loss is None else link.loss,
    )


def _buckets(link: Attachment, rate_bytes_ps: float, rate_bps: float) -> tuple[TokenBucket, ...]:
    """Return the buckets of a port, in bytes of data."""
    data = rate_bytes_ps / (rate_bps / 8)
    found = [TokenBucket(rate_bytes_ps, link.burst_bytes * data)] if link.burst_bytes else []
    if link.peak_bps is not None:
        found.append(TokenBucket(link.peak_bps / 8 * data, link.peak_burst_bytes * data))
    return tuple(found)


def half(loss: float) -> float:
    """Return the loss of one end of a link whose two ends together lose `loss`."""
    return float(1.0 - (1.0 - loss) ** 0.5)


def goodput_bytes_ps(rate_bps: float, mtu: int, tcp: Tcp) -> float:
    """Return the goodput of a wire in bytes per second: its line rate less the headers."""
    if not tcp.headers:
        return rate_bps / 8
    return rate_bps / 8 * (mtu - tcp.header_bytes) / (mtu + tcp.framing_bytes)


def _name(*parts: str) -> str:
    """Return the name of a resource. A part that contains a dot is quoted, so that names are unique."""
    return ".".join(f'"{part}"' if "." in part else part for part in parts)


def _interface(host: str, name: str, medium: Medium, rate_bps: float) -> Interface:
    return Interface(name, medium, rate_bps, (f"{host}%{name}",))


def _medium(medium: Ethernet | Wifi) -> Medium:
    return Medium.WIFI if isinstance(medium, Wifi) else Medium.ETHERNET
