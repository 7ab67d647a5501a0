"""A graph of the machines of a cluster and of the measured links between them.

Nodes are machines with their capabilities. An edge is one route from one node to another: the interface at
which it arrives, the address to dial for it, and the link that was measured there, in both directions. Two
nodes may have several routes between them. The best one has the highest bandwidth (of its slower direction),
and among routes of equal bandwidth, within the precision of the measurement, the lowest latency. An interface's
name and nominal rate are ignored.

The topology orders no ring and prices no collective: it provides the matrices for modules that do.

`table` and `draw` display it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import combinations
from math import cos, isfinite, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hcsim.cluster.probe import DeviceSpeed, LinkSpeed, Prober, measure_speed
from hcsim.errors import UsageError
from hcsim.runtime.address import join_address
from hcsim.runtime.host import Chip, Host, Interface, Medium

if TYPE_CHECKING:
    import networkx as nx


AS_FAST = 0.9
"""Routes that reach this share of the fastest one's bandwidth count as equally fast."""
NOT_PROBED = (Medium.LOOPBACK, Medium.VIRTUAL)


class TopologyNode(msgspec.Struct, frozen=True):
    """A machine, as it describes itself."""

    name: str
    chip: Chip
    speed: DeviceSpeed
    interfaces: tuple[Interface, ...]


class TopologyEdge(msgspec.Struct, frozen=True):
    """A route from one node to another, with its measurements."""

    source: str
    target: str
    interface: str
    """The target's interface at which it arrives."""
    address: str
    media: tuple[Medium, Medium]
    """The media at the source and at the target. The first is a guess if the source has several: a host does not
    tell."""
    line: LinkSpeed

    @property
    def bandwidth_Bps(self) -> float:
        """Return the bandwidth of the slower direction."""
        return min(self.line.there_Bps, self.line.back_Bps)

    @property
    def medium(self) -> Medium:
        """Return the slower kind of the two."""
        return max(self.media, key=list(Medium).index)


class Matrices(msgspec.Struct, frozen=True):
    """The best route from each node (row) to each (column); zero on the diagonal, and if there is no route."""

    bandwidth_Bps: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]


class Topology:
    """The measurements of a cluster. `nodes` and `ways` are plain structs, which nodes can send to each other."""

    def __init__(self, nodes: Sequence[TopologyNode], ways: Sequence[TopologyEdge]) -> None:
        self.nodes = tuple(nodes)
        self.ways = tuple(sorted(ways, key=lambda way: (way.source, way.target, way.interface, way.address)))
        known = {node.name for node in nodes}
        if strangers := [name for way in ways for name in (way.source, way.target) if name not in known]:
            raise UsageError(f"a way leads to {strangers[0]}, which is no node of this topology")

    @cached_property
    def graph(self) -> nx.MultiDiGraph[str]:
        """Return all routes in both directions, keyed by the interface of arrival, with bandwidth and latency."""
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

    def best(self, source: str, target: str) -> TopologyEdge | None:
        return fastest([way for way in self.ways if (way.source, way.target) == (source, target)])

    def between(self, one: str, other: str) -> TopologyEdge | None:
        """Return the best of all routes between two nodes, whichever side dials."""
        return fastest([way for way in self.ways if {way.source, way.target} == {one, other}])

    def addresses(self, source: str, names: Sequence[str], port: int) -> tuple[str, ...]:
        """Return what the source dials to reach each of these nodes; nodes that were not reached keep their names."""
        best = [self.best(source, name) for name in names]
        return tuple(join_address((way.address if way else name, port)) for name, way in zip(names, best, strict=True))

    def matrices(self, names: Sequence[str]) -> Matrices:
        """Return bandwidth and latency between these nodes, each over the best route."""
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


def fastest(ways: Sequence[TopologyEdge]) -> TopologyEdge | None:
    """Return the best of these routes according to the measurements; the medium only breaks ties."""
    if not ways:
        return None
    enough_Bps = AS_FAST * max(way.bandwidth_Bps for way in ways)
    as_fast = [way for way in ways if way.bandwidth_Bps >= enough_Bps]
    order = list(Medium)
    return min(as_fast, key=lambda way: (way.line.latency_s, order.index(way.medium), way.interface, way.address))


async def describe(host: Host, name: str) -> TopologyNode:
    return TopologyNode(name, host.device.chip, await measure_speed(host), host.interfaces())


async def survey(prober: Prober, us: TopologyNode, others: Sequence[TopologyNode], port: int) -> list[TopologyEdge]:
    """Measure this node's routes to the other nodes, each of which serves probes at that port."""
    ways = []
    for node in others:
        for interface, address in _reachable(node):
            line = await prober.measure(node.name, join_address((address, port)))
            if line is not None:
                media = (_leaves_by(us, interface), interface.medium)
                ways.append(TopologyEdge(us.name, node.name, interface.name, address, media, line))
    return ways


def _reachable(node: TopologyNode) -> list[tuple[Interface, str]]:
    """Return where a node may be reached from elsewhere; without link-local IPv6 addresses, which need the
    caller's zone."""
    return [
        (interface, address)
        for interface in node.interfaces
        if interface.medium not in NOT_PROBED
        for address in interface.addresses
        if not address.lower().startswith("fe80:")
    ]


def _leaves_by(us: TopologyNode, arrives: Interface) -> Medium:
    """Guess the medium by which a route to that interface leaves this node: the same kind, or else the fastest
    one that a router bridges."""
    ours = [interface.medium for interface in us.interfaces if interface.medium not in NOT_PROBED]
    if arrives.medium in ours:
        return arrives.medium
    bridged = [medium for medium in ours if medium is not Medium.THUNDERBOLT]
    return min(bridged, key=list(Medium).index, default=Medium.UNKNOWN)


_COLOURS = {
    Medium.LOOPBACK: "#7f7f7f",
    Medium.THUNDERBOLT: "#6a3d9a",
    Medium.ETHERNET: "#1f78b4",
    Medium.WIFI: "#ff7f00",
    Medium.TUNNEL: "#b15928",
    Medium.UNKNOWN: "#7f7f7f",
    Medium.VIRTUAL: "#7f7f7f",
}
_LABELLED_UP_TO = 6
"""With more nodes there is no room for a label beside each line."""


def table(topology: Topology) -> str:
    """Return a table of the machines and the routes between them; `*` marks the best route of each pair."""
    machines = [("machine", "chip", "memory", "TFLOPS", "GB/s")]
    machines += [(n.name, n.chip.name, _memory(n), _number(n.speed.flops, 1e12), _number(n.speed.memory_Bps, 1e9))
                 for n in topology.nodes]  # fmt: skip
    ways = [("", "from", "to", "interface", "medium", "Gb/s there", "Gb/s back", "latency")]
    for way in topology.ways:
        best = "*" if topology.best(way.source, way.target) is way else ""
        there, back = (_number(rate_Bps, 1e9 / 8) for rate_Bps in (way.line.there_Bps, way.line.back_Bps))
        latency = f"{1e3 * way.line.latency_s:.2f} ms"
        ways.append((best, way.source, way.target, way.interface, _media(way.media), there, back, latency))
    return "\n".join([*_aligned(machines, numbers=3), "", *_aligned(ways, numbers=3)])


def draw(topology: Topology, path: Path) -> None:
    """Draw the machines and the best link between any two; other links are dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [node.name for node in topology.nodes]
    places = _places(names)
    for one, other in combinations(names, 2):
        _draw_pair(axes, topology, (one, other), (places[one], places[other]))
    for node in topology.nodes:
        box = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": "#333333"}
        axes.text(*places[node.name], _caption(node), ha="center", va="center", fontsize=9, bbox=box, zorder=3)
    _draw_legend(axes, topology)
    axes.set_xlim(-1.45, 1.45)
    axes.set_ylim(-1.3, 1.3)
    axes.axis("off")
    figure.savefig(path, dpi=120)


def _draw_legend(axes: Any, topology: Topology) -> None:
    """Draw the legend of the colours; without labels, also of the line widths."""
    crowded = len(topology.nodes) > _LABELLED_UP_TO
    shown: dict[tuple[int, str], TopologyEdge] = {}
    for way in topology.ways:
        rate = f" {way.bandwidth_Bps * 8 / 1e9:.2g} Gb/s" if crowded else ""
        shown.setdefault((list(Medium).index(way.medium), f"{way.medium.value}{rate}"), way)
    for (_, text), way in sorted(shown.items()):
        axes.plot([], [], color=_COLOURS[way.medium], linewidth=_width(way) if crowded else 3, label=text)
    if shown:
        axes.legend(loc="upper right", frameon=False)


def _width(way: TopologyEdge) -> float:
    return 1.0 + min(5.0, 8.0 * way.bandwidth_Bps / 1e9)


def _draw_pair(axes: Any, topology: Topology, names: tuple[str, str], ends: tuple[Any, Any]) -> None:
    (x0, y0), (x1, y1) = ends
    best = topology.between(*names)
    if best is None:
        return
    colour = _COLOURS[best.medium]
    axes.plot([x0, x1], [y0, y1], color=colour, linewidth=_width(best), zorder=1, solid_capstyle="butt")
    # Several ways arrive at the same pair of media from both sides: one dashed line stands for each kind.
    spare = {way.media if way.source == names[0] else way.media[::-1]: way for way in topology.ways
             if {way.source, way.target} == {*names} and {*way.media} != {*best.media}}  # fmt: skip
    for number, way in enumerate(spare.values(), start=1):
        dx, dy = 0.05 * number * (y1 - y0), 0.05 * number * (x0 - x1)
        line = ([x0 + dx, x1 + dx], [y0 + dy, y1 + dy])
        axes.plot(*line, color=_COLOURS[way.medium], linewidth=1.2, linestyle="--", zorder=1)
    if len(topology.nodes) <= _LABELLED_UP_TO:
        # Off the middle, where the diagonals cross.
        x, y = x0 + 0.3 * (x1 - x0), y0 + 0.3 * (y1 - y0)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(x, y, _label(best, names[0]), ha="center", va="center", fontsize=7.5, bbox=white, zorder=2)


def _label(way: TopologyEdge, first: str) -> str:
    there, back = (_number(rate_Bps, 1e9 / 8, digits=2) for rate_Bps in (way.line.there_Bps, way.line.back_Bps))
    media = way.media
    if way.source != first:
        there, back, media = back, there, media[::-1]
    rates = f"{there} Gb/s" if there == back else f"{there} →, {back} ← Gb/s"
    return f"{_media(media)}\n{rates}\n{1e3 * way.line.latency_s:.2g} ms"


def _media(media: tuple[Medium, Medium]) -> str:
    leaves, enters = (medium.value for medium in media)
    return leaves if leaves == enters else f"{leaves} – {enters}"


def _caption(node: TopologyNode) -> str:
    memory = f", {_memory(node)}" if node.chip.memory_bytes else ""
    return f"{node.name}\n{node.chip.name}{memory}\n{_number(node.speed.flops, 1e12)} TFLOPS"


def _memory(node: TopologyNode) -> str:
    return f"{node.chip.memory_bytes / 2**30:.0f} GiB" if node.chip.memory_bytes else "–"


def _number(value: float, unit: float, *, digits: int = 3) -> str:
    return f"{value / unit:.{digits}g}" if isfinite(value) else "∞"


def _places(names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Place the names on a circle, the first at the upper left, so that a square stands on its side, not on its
    tip."""
    turns = [0.5 * pi + pi / len(names) - 2 * pi * number / len(names) for number in range(len(names))]
    return {name: (1.05 * cos(turn), sin(turn)) for name, turn in zip(names, turns, strict=True)}


def _aligned(rows: Sequence[Sequence[str]], *, numbers: int) -> list[str]:
    """Align columns; the last ones, with numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if place >= len(row) - numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
