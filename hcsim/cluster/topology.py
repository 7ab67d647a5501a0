"""Who is there, with what, and how everybody reaches everybody: a graph of what was measured.

Nodes are machines with their capabilities. An edge is one way from one node to another: the interface that it arrives
at, the address to dial for it, and the line that was measured there, in both directions. Two nodes may have several
ways between them; the best one has the highest bandwidth (of its slower direction), and among ways that are equally
fast, as far as a measurement can tell, the least latency. An interface's name and nominal rate count for nothing.

The topology orders no ring and prices no collective: it gives the matrices that those who do ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from hcsim.cluster.probe import Line, Prober, Speed, measure_speed
from hcsim.errors import UsageError
from hcsim.runtime.address import join_address
from hcsim.runtime.device import Chip
from hcsim.runtime.host import Host, Interface, Medium

if TYPE_CHECKING:
    import networkx as nx

AS_FAST = 0.9
"""Ways that reach this share of the fastest one's bandwidth are as fast as it."""
NOT_PROBED = (Medium.LOOPBACK,)


class Node(msgspec.Struct, frozen=True):
    """One machine, as it describes itself."""

    name: str
    chip: Chip
    speed: Speed
    interfaces: tuple[Interface, ...]


class Way(msgspec.Struct, frozen=True):
    """One way from a node to another, with what was measured on it."""

    source: str
    target: str
    interface: str
    """The target's, that it arrives at."""
    address: str
    """To be dialled for it, without a port."""
    media: tuple[Medium, Medium]
    """What it leaves and enters by. The first is our best guess where the source has several: a host does not say."""
    line: Line

    @property
    def bandwidth_Bps(self) -> float:
        """Of its slower direction."""
        return min(self.line.there_Bps, self.line.back_Bps)

    @property
    def medium(self) -> Medium:
        """The slower kind of the two."""
        return max(self.media, key=list(Medium).index)


class Matrices(msgspec.Struct, frozen=True):
    """The best way from each node (row) to each (column); zero on the diagonal, and where there is no way."""

    bandwidth_Bps: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]


class Topology:
    """What was measured of a cluster. `nodes` and `ways` are plain structs, which nodes can send to each other."""

    def __init__(self, nodes: Sequence[Node], ways: Sequence[Way]) -> None:
        self.nodes = tuple(nodes)
        self.ways = tuple(sorted(ways, key=lambda way: (way.source, way.target, way.interface, way.address)))
        known = {node.name for node in nodes}
        if strangers := [name for way in ways for name in (way.source, way.target) if name not in known]:
            raise UsageError(f"a way leads to {strangers[0]}, which is no node of this topology")

    @cached_property
    def graph(self) -> nx.MultiDiGraph[str]:
        """Every way in both of its directions, keyed by where it arrives, with its bandwidth and latency."""
        import networkx as nx  # an eighth of a second, and few ask for the graph

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        for node in self.nodes:
            graph.add_node(node.name, node=node)
        for way in self.ways:
            about: dict[str, Any] = {"way": way, "latency_s": way.line.latency_s, "medium": way.medium}
            key = f"{way.source} → {way.target}%{way.interface}, {way.address}"
            graph.add_edge(way.source, way.target, key, bandwidth_Bps=way.line.there_Bps, **about)
            graph.add_edge(way.target, way.source, key, bandwidth_Bps=way.line.back_Bps, **about)
        return graph

    def best(self, source: str, target: str) -> Way | None:
        """The best of the ways that the source can dial to the target."""
        return fastest([way for way in self.ways if (way.source, way.target) == (source, target)])

    def between(self, one: str, other: str) -> Way | None:
        """The best of all ways between two nodes, whoever dials."""
        return fastest([way for way in self.ways if {way.source, way.target} == {one, other}])

    def addresses(self, source: str, names: Sequence[str], port: int) -> tuple[str, ...]:
        """What the source dials to reach each of these; those that were not reached keep their names."""
        best = [self.best(source, name) for name in names]
        return tuple(join_address((way.address if way else name, port)) for name, way in zip(names, best, strict=True))

    def matrices(self, names: Sequence[str]) -> Matrices:
        """Bandwidth and latency between these nodes, each over the best way."""
        bandwidth = [[0.0] * len(names) for _ in names]
        latency = [[0.0] * len(names) for _ in names]
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                way = self.between(one, other) if i != j else None
                if way is not None:
                    ahead = way.source == one
                    bandwidth[i][j] = way.line.there_Bps if ahead else way.line.back_Bps
                    latency[i][j] = way.line.latency_s
        return Matrices(tuple(map(tuple, bandwidth)), tuple(map(tuple, latency)))


def fastest(ways: Sequence[Way]) -> Way | None:
    """The best of some ways, by what was measured; the medium decides only where that is the same."""
    if not ways:
        return None
    enough_Bps = AS_FAST * max(way.bandwidth_Bps for way in ways)
    as_fast = [way for way in ways if way.bandwidth_Bps >= enough_Bps]
    order = list(Medium)
    return min(as_fast, key=lambda way: (way.line.latency_s, order.index(way.medium), way.interface, way.address))


async def describe(host: Host, name: str) -> Node:
    """This machine, as the others will know it; takes a moment of computing."""
    return Node(name, host.device.chip, await measure_speed(host), host.interfaces())


async def survey(prober: Prober, us: Node, others: Sequence[Node], port: int) -> list[Way]:
    """Our ways to the other nodes, each of which serves probes at that port."""
    ways = []
    for node in others:
        for interface, address in _reachable(node):
            line = await prober.measure(node.name, join_address((address, port)))
            if line is not None:
                media = (_leaves_by(us, interface), interface.medium)
                ways.append(Way(us.name, node.name, interface.name, address, media, line))
    return ways


def _reachable(node: Node) -> list[tuple[Interface, str]]:
    """Where a node may be reached from elsewhere; not at link-local IPv6 addresses, which need the caller's zone."""
    return [
        (interface, address)
        for interface in node.interfaces
        if interface.medium not in NOT_PROBED
        for address in interface.addresses
        if not address.lower().startswith("fe80:")
    ]


def _leaves_by(us: Node, arrives: Interface) -> Medium:
    """What a way to that interface probably leaves us by: the same kind, or else our fastest that a router bridges."""
    ours = [interface.medium for interface in us.interfaces if interface.medium not in NOT_PROBED]
    if arrives.medium in ours:
        return arrives.medium
    bridged = [medium for medium in ours if medium is not Medium.THUNDERBOLT]
    return min(bridged, key=list(Medium).index, default=Medium.UNKNOWN)
