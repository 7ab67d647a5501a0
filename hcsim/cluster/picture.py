"""A topology for people: as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import cos, isfinite, pi, sin
from pathlib import Path
from typing import Any

from hcsim.cluster.topology import Node, Topology, Way
from hcsim.runtime.host import Medium

_COLOURS = {
    Medium.LOOPBACK: "#7f7f7f",
    Medium.THUNDERBOLT: "#6a3d9a",
    Medium.ETHERNET: "#1f78b4",
    Medium.WIFI: "#ff7f00",
    Medium.TUNNEL: "#b15928",
    Medium.UNKNOWN: "#7f7f7f",
}
_LABELLED_UP_TO = 6
"""Nodes: with more there is no room for what stands beside each line."""


def table(topology: Topology) -> str:
    """Machines, then the ways between them; `*` marks the best way of each pair."""
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
    """Draw the machines and the best line between any two; other lines are dashed."""
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
    """What the colours mean; where the lines have no labels, their widths too."""
    crowded = len(topology.nodes) > _LABELLED_UP_TO
    shown: dict[tuple[int, str], Way] = {}
    for way in topology.ways:
        rate = f" {way.bandwidth_Bps * 8 / 1e9:.2g} Gb/s" if crowded else ""
        shown.setdefault((list(Medium).index(way.medium), f"{way.medium.value}{rate}"), way)
    for (_, text), way in sorted(shown.items()):
        axes.plot([], [], color=_COLOURS[way.medium], linewidth=_width(way) if crowded else 3, label=text)
    if shown:
        axes.legend(loc="upper right", frameon=False)


def _width(way: Way) -> float:
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


def _label(way: Way, first: str) -> str:
    """What there is between a pair, as seen from the first of it."""
    there, back = (_number(rate_Bps, 1e9 / 8, digits=2) for rate_Bps in (way.line.there_Bps, way.line.back_Bps))
    media = way.media
    if way.source != first:
        there, back, media = back, there, media[::-1]
    rates = f"{there} Gb/s" if there == back else f"{there} →, {back} ← Gb/s"
    return f"{_media(media)}\n{rates}\n{1e3 * way.line.latency_s:.2g} ms"


def _media(media: tuple[Medium, Medium]) -> str:
    leaves, enters = (medium.value for medium in media)
    return leaves if leaves == enters else f"{leaves} – {enters}"


def _caption(node: Node) -> str:
    memory = f", {_memory(node)}" if node.chip.memory_bytes else ""
    return f"{node.name}\n{node.chip.name}{memory}\n{_number(node.speed.flops, 1e12)} TFLOPS"


def _memory(node: Node) -> str:
    return f"{node.chip.memory_bytes / 2**30:.0f} GiB" if node.chip.memory_bytes else "–"


def _number(value: float, unit: float, *, digits: int = 3) -> str:
    return f"{value / unit:.{digits}g}" if isfinite(value) else "∞"


def _places(names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """On a circle, the first at the upper left: a square stands on its side, not on its tip."""
    turns = [0.5 * pi + pi / len(names) - 2 * pi * number / len(names) for number in range(len(names))]
    return {name: (1.05 * cos(turn), sin(turn)) for name, turn in zip(names, turns, strict=True)}


def _aligned(rows: Sequence[Sequence[str]], *, numbers: int) -> list[str]:
    """Columns side by side; the last ones, with numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if place >= len(row) - numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
