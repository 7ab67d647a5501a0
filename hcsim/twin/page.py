"""A page that shows a twin beside the figures of the catalogue: one HTML file, without anything from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from hcsim.config import CATALOGUE, Ethernet, Scenario, Thunderbolt, Wifi
from hcsim.config.machine import BY_FLOPS, Basis, KernelCurve, Machine
from hcsim.runtime.host import KernelGroup, Work
from hcsim.runtime.work_time import seconds

_COLOURS = (
    "#2a6fb0",
    "#c2571a",
    "#3f8f4f",
    "#8a4fa3",
    "#a8862b",
    "#c0436b",
    "#2b8f94",
    "#6b6b6b",
    "#6f8f1f",
    "#8c4b3c",
    "#4a52a8",
    "#b08fc2",
)
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 300, 84, 38, 12, 34
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --faint: #66717c; --line: #d9dee3; --paper: #fbfcfd; --card: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --faint: #98a3ae; --line: #353d45; --paper: #15191d; --card: #1d2227 }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 24px }
h1 { font-size: 26px; margin: 0 0 4px }
h2 { font-size: 20px; margin: 36px 0 4px }
h3 { font-size: 15px; margin: 20px 0 6px }
p { margin: 4px 0; color: var(--faint) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 20px 20px }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 20px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line) }
th { color: var(--faint); font-weight: 500 } th:first-child, td:first-child { text-align: left }
td.basis { color: var(--faint); font-size: 13px }
.links td:nth-child(2), .links th:nth-child(2), .links td:last-child, .links th:last-child { text-align: left }
svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--faint) }
svg .grid { stroke: var(--line) }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--faint) }
.key i { display: inline-block; width: 18px; height: 0;
  border-top: 3px solid; vertical-align: middle; margin-right: 6px }
.key i.dashed { border-top-style: dashed }
"""


class Line(NamedTuple):
    """A curve of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


def page(twin: Scenario) -> str:
    """Return the page."""
    machines = [node.machine for node in twin.nodes if isinstance(node.machine, Machine)]
    parts = [
        f"<h1>{escape(twin.name)}</h1>",
        f"<p>{', '.join(escape(node.name) for node in twin.nodes)}. Dashed lines are the catalogue's figures.</p>",
        *_links(twin),
        *(part for machine in dict.fromkeys(machines) for part in _machine(machine)),
    ]
    title = f"{escape(twin.name)}: the twin"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"<!doctype html>\n<html lang=en><head>{head}<style>{_STYLE}</style></head><body><main>\n" + "\n".join(
        [*parts, "</main></body></html>\n"]
    )


def catalogued(machine: Machine) -> Machine | None:
    """Return the catalogue's machine with the chip that was measured, if there is one."""
    names = [name for name in CATALOGUE if f"Apple {name}," in f"{machine.basis.source},"]
    return CATALOGUE[max(names, key=len)] if names else None


def _machine(machine: Machine) -> list[str]:
    known = catalogued(machine)
    usual = "" if known is None else f"The catalogue has it as {escape(known.name)}."
    rows = [
        _row("products of matrices", "FLOPS", machine, known, lambda one: one.efficiency_compute * one.peak_flops),
        _row("memory", "B/s", machine, known, lambda one: one.efficiency_memory * one.memory_Bps),
        _row("launch of a kernel", "s", machine, known, lambda one: one.overhead_s),
    ]
    if machine.step_s:
        rows.append(_row("a step beside its kernels", "s", machine, None, lambda one: one.step_s))
    if machine.messages is not None:
        costs = machine.messages
        figures = (
            ("to send a message", costs.send_s, "s"), ("to receive a message", costs.receive_s, "s"),
            ("bytes that a core sends", costs.send_rate_Bps, "B/s"),
            ("bytes that a core receives", costs.receive_rate_Bps, "B/s"),
            ("bytes that a core encrypts", costs.tls_send_rate_Bps, "B/s"),
            ("bytes that a core decrypts", costs.tls_receive_rate_Bps, "B/s"),
        )  # fmt: skip
        rows += [_cells(what, _amount(value, unit)) for what, value, unit in figures if math.isfinite(value)]
    body = [f"<h2>{escape(machine.name)}</h2>", f"<p>{_basis(machine.basis)}. {usual}</p>", "<section>"]
    body += ["<h3>Figures</h3><table><tr><th></th><th>here</th><th>catalogue</th><th>here / catalogue</th></tr>"]
    body += [*rows, '</table><div class="charts">', *_kernels(machine, known), *_codecs(machine), "</div></section>"]
    return body


def _row(what: str, unit: str, here: Machine, usual: Machine | None, figure: Callable[[Machine], float]) -> str:
    ours = figure(here)
    if usual is None:
        return _cells(what, _amount(ours, unit))
    return _cells(what, _amount(ours, unit), _amount(figure(usual), unit), f"{ours / figure(usual):.2g}")


def _cells(what: str, here: str, usual: str = "–", ratio: str = "–") -> str:
    return f"<tr><td>{what}</td><td>{here}</td><td>{usual}</td><td>{ratio}</td></tr>"


def fastest_curves(machine: Machine) -> tuple[KernelCurve, ...]:
    """Return the curve of each kind and type that reaches the highest rate."""
    best: dict[tuple[str, str], KernelCurve] = {}
    for curve in sorted(machine.kernels, key=lambda curve: max((rate for _, rate in _rates(curve.points)), default=0)):
        best[curve.kind, curve.dtype] = curve
    return tuple(best[key] for key in dict.fromkeys((curve.kind, curve.dtype) for curve in machine.kernels))


def _kernels(machine: Machine, known: Machine | None) -> list[str]:
    charts = []
    for flops in (True, False):
        curves = [curve for curve in fastest_curves(machine) if (curve.kind in BY_FLOPS) is flops]
        lines: list[Line] = []
        for curve, colour in zip(curves, _COLOURS * len(curves), strict=False):
            lines.append(Line(f"{curve.kind} {curve.dtype}", _rates(curve.points), colour))
        if known is not None and curves:
            sizes = sorted({size for curve in curves for size, _ in curve.points})
            lines.append(
                Line(known.name, _rates([(size, _usual_s(known, curves[0], size)) for size in sizes]), "#888", True)
            )
        what = "FLOP" if flops else "B"
        charts += _chart(f"Kernels, by {'FLOPs' if flops else 'bytes'}", lines, what, f"{what}/s")
    return charts


def _usual_s(known: Machine, curve: KernelCurve, size: float) -> float:
    flops, moved_bytes = (size, 0.0) if curve.kind in BY_FLOPS else (0.0, size)
    return seconds(known, Work(flops, moved_bytes, groups=(KernelGroup(curve.kind, flops, moved_bytes),)))


def _codecs(machine: Machine) -> list[str]:
    charts = []
    for what in ("encode", "decode"):
        lines = [
            Line(codec.compressor, _rates(getattr(codec, what)), colour)
            for codec, colour in zip(machine.codecs, _COLOURS * len(machine.codecs), strict=False)
        ]
        charts += _chart(f"Compressors, {what}", lines, "B", "B/s")
    return charts


def _rates(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(size, size / each_s) for size, each_s in points if each_s > 0 and size > 0]


def _chart(title: str, lines: Sequence[Line], unit: str, rate_unit: str) -> list[str]:
    """Return a chart with two logarithmic axes."""
    lines = [line for line in lines if line.points]
    if not lines:
        return []
    sizes, rates = zip(*(point for line in lines for point in line.points), strict=True)
    x_low, x_high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    y_low, y_high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    x_high, y_high = max(x_high, x_low + 1), max(y_high, y_low + 1)

    def x(value: float) -> float:
        return _LEFT + (value - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_low) / (y_high - y_low) * (_HEIGHT - _BOTTOM - _TOP)

    drawn = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(power):.1f}" y2="{y(power):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y(power) + 4:.1f}" text-anchor="end">{_power(power, rate_unit)}</text>'
        for power in range(y_low, y_high + 1)
    ]
    drawn += [
        f'<text x="{x(power):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{_power(power, unit)}</text>'
        for power in range(x_low, x_high + 1, max(1, (x_high - x_low) // 6))
    ]
    for line in lines:
        path = " ".join(f"{x(math.log10(size)):.1f},{y(math.log10(rate)):.1f}" for size, rate in line.points)
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>')
    key = "".join(
        f'<span><i{" class=dashed" if line.dashed else ""} style="color: {line.colour}"></i>{escape(line.name)}</span>'
        for line in lines
    )
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(drawn)}</svg>'
    return [f'<div><h3>{escape(title)}</h3>{picture}<div class="key">{key}</div></div>']


def _power(power: int, unit: str) -> str:
    prefix = "kMGTP"[power // 3 - 1] if 3 <= power < 18 else ""
    return f"{10 ** (power % 3 if prefix else power):g} {prefix}{unit}"


def _amount(value: float, unit: str) -> str:
    if unit == "s":
        scale, name = next(((s, n) for s, n in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if value >= s), (1e-9, "ns"))
        return f"{value / scale:.4g} {name}"
    power = max(0, min(4, int(math.log10(value) // 3))) if value > 0 and math.isfinite(value) else 0
    return f"{value / 1000**power:.4g} {('', 'k', 'M', 'G', 'T')[power]}{unit}"


def _basis(basis: Basis | None) -> str:
    if basis is None:
        return "–"
    spread = f", ± {basis.spread:.0%}" if basis.spread else ""
    return escape(", ".join(filter(None, (basis.kind, basis.source, basis.date))) + spread)


def _links(twin: Scenario) -> list[str]:
    rows = []
    media = {medium.name: medium for medium in twin.media}
    for medium in twin.media:
        if isinstance(medium, Thunderbolt):
            for cable in medium.cables:
                one, other = cable.between
                figures = f"{_amount(cable.forward_bps, 'b/s')} / {_amount(cable.backward_bps, 'b/s')}"
                latency = _amount(cable.latency_s, "s")
                rows.append((f"{one} – {other}", medium.name, figures, latency, "–", "–", "–", _basis(cable.basis)))
    for node in twin.nodes:
        for link in node.links:
            medium = media[link.medium]
            if isinstance(medium, Thunderbolt):
                continue
            usual = medium.phy_rate_bps if isinstance(medium, Wifi) else medium.rate_bps
            up, down = (rate or link.rate_bps or usual for rate in (link.up_bps, link.down_bps))
            latency_s = medium.latency_s if link.latency_s is None else link.latency_s
            rows.append((
                node.name, f"{medium.name} ({'Wi-Fi' if isinstance(medium, Wifi) else 'Ethernet'})",
                f"{_amount(up, 'b/s')} / {_amount(down, 'b/s')}", _amount(latency_s, "s"),
                _amount(medium.jitter_s, "s"), f"{medium.loss if link.loss is None else link.loss:.2g}",
                _queued(medium.queue_bytes, medium.queue_basis) if isinstance(medium, Ethernet) else "–",
                _basis(link.basis or medium.basis),
            ))  # fmt: skip
    rows += [
        (
            line.home, "line to the internet", f"{_amount(line.up_bps, 'b/s')} / {_amount(line.down_bps, 'b/s')}",
            _amount(line.latency_s, "s"), _amount(line.jitter_s, "s"), f"{line.loss:.2g}",
            _queued(line.buffer_bytes, line.buffer_basis), _basis(line.basis),
        )
        for line in twin.wan
    ]  # fmt: skip
    headings = ("", "medium", "line rate, there / back", "latency", "jitter", "loss", "queue", "where from")
    head = f"<tr>{''.join(f'<th>{heading}</th>' for heading in headings)}</tr>"
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells[:-1])}<td class=basis>{cells[-1]}</td></tr>"
        for cells in rows
    )
    return ["<h2>Links</h2>", f"<section><table class=links>{head}{body}</table></section>"] if rows else []


def _queued(size_bytes: int | None, basis: Basis | None) -> str:
    if not size_bytes:
        return "–"
    at_least = "≥ " if basis is not None and basis.kind == "estimated" else ""
    return f"{at_least}{_amount(size_bytes, 'B')}"
