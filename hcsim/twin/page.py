"""A page that shows a twin beside the figures of the catalogue: one HTML file, without anything from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hcsim.config import CATALOGUE, Ethernet, Scenario, Thunderbolt, Wifi
from hcsim.config.machine import BY_FLOPS, Basis, KernelCurve, Machine
from hcsim.report.chart import Axis, Line, lines, power_label
from hcsim.report.page import Figure, Page, Row, Section, Table, Text, html
from hcsim.runtime.host import KernelGroup, Work
from hcsim.runtime.work_time import seconds


def page(twin: Scenario) -> str:
    """Return the page."""
    machines = [node.machine for node in twin.nodes if isinstance(node.machine, Machine)]
    sections = (_links(twin), *(_machine(machine) for machine in dict.fromkeys(machines)))
    names = ", ".join(node.name for node in twin.nodes)
    return html(Page(f"{twin.name}: the twin", f"{names}. Dashed lines are the catalogue's figures.", sections))


def catalogued(machine: Machine) -> Machine | None:
    """Return the catalogue's machine with the chip that was measured, if there is one."""
    names = [name for name in CATALOGUE if f"Apple {name}," in f"{machine.basis.source},"]
    return CATALOGUE[max(names, key=len)] if names else None


def _machine(machine: Machine) -> Section:
    known = catalogued(machine)
    usual = "" if known is None else f" The catalogue has it as {known.name}."
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
    table = Table(("", "here", "catalogue", "here / catalogue"), tuple(rows), title="Figures")
    charts = (*_kernels(machine, known), *_codecs(machine))
    parts = (Text(f"{_basis(machine.basis)}.{usual}", soft=True), table, *((Row(charts),) if charts else ()))
    return Section(machine.name, parts)


def _row(
    what: str, unit: str, here: Machine, usual: Machine | None, figure: Callable[[Machine], float]
) -> tuple[str, ...]:
    ours = figure(here)
    if usual is None:
        return _cells(what, _amount(ours, unit))
    return _cells(what, _amount(ours, unit), _amount(figure(usual), unit), f"{ours / figure(usual):.2g}")


def _cells(what: str, here: str, usual: str = "–", ratio: str = "–") -> tuple[str, ...]:
    return what, here, usual, ratio


def fastest_curves(machine: Machine) -> tuple[KernelCurve, ...]:
    """Return the curve of each kind and type that reaches the highest rate."""
    best: dict[tuple[str, str], KernelCurve] = {}
    for curve in sorted(machine.kernels, key=lambda curve: max((rate for _, rate in _rates(curve.points)), default=0)):
        best[curve.kind, curve.dtype] = curve
    return tuple(best[key] for key in dict.fromkeys((curve.kind, curve.dtype) for curve in machine.kernels))


def _kernels(machine: Machine, known: Machine | None) -> list[Figure]:
    charts = []
    for flops in (True, False):
        curves = [curve for curve in fastest_curves(machine) if (curve.kind in BY_FLOPS) is flops]
        drawn = [Line(f"{curve.kind} {curve.dtype}", _rates(curve.points)) for curve in curves]
        if known is not None and curves:
            sizes = sorted({size for curve in curves for size, _ in curve.points})
            usual = _rates([(size, _usual_s(known, curves[0], size)) for size in sizes])
            drawn.append(Line(known.name, usual, dashed=True))
        what = "FLOP" if flops else "B"
        charts += _chart(f"Kernels, by {'FLOPs' if flops else 'bytes'}", drawn, what)
    return charts


def _usual_s(known: Machine, curve: KernelCurve, size: float) -> float:
    flops, moved_bytes = (size, 0.0) if curve.kind in BY_FLOPS else (0.0, size)
    return seconds(known, Work(flops, moved_bytes, groups=(KernelGroup(curve.kind, flops, moved_bytes),)))


def _codecs(machine: Machine) -> list[Figure]:
    charts = []
    for what in ("encode", "decode"):
        drawn = [Line(codec.compressor, _rates(getattr(codec, what))) for codec in machine.codecs]
        charts += _chart(f"Compressors, {what}", drawn, "B")
    return charts


def _rates(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((size, size / each_s) for size, each_s in points if each_s > 0 and size > 0)


def _chart(title: str, drawn: Sequence[Line], unit: str) -> list[Figure]:
    """Return a chart of rates by sizes, if there is anything in it."""
    across, up = Axis("", power_label(unit), log=True), Axis("", power_label(f"{unit}/s"), log=True)
    picture = lines(title, drawn, across, up)
    rows = tuple((line.name, f"{size:.6g}", f"{rate:.6g}") for line in drawn for size, rate in line.points)
    numbers = Table(("", unit, f"{unit}/s"), rows)
    return [Figure(title, picture, numbers, title.lower().replace(", ", "_").replace(" ", "_"))] if picture else []


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
    return ", ".join(filter(None, (basis.kind, basis.source, basis.date))) + spread


def _links(twin: Scenario) -> Section:
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
    table = Table(headings, tuple(rows), left=("medium", "where from"))
    return Section("Links", (table,) if rows else ())


def _queued(size_bytes: int | None, basis: Basis | None) -> str:
    if not size_bytes:
        return "–"
    at_least = "≥ " if basis is not None and basis.kind == "estimated" else ""
    return f"{at_least}{_amount(size_bytes, 'B')}"
