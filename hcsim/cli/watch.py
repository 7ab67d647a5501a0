"""`hcsim cluster status --watch`: how a cluster stands, in a terminal that is redrawn every second."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hcsim.cli.screen import cell, duration
from hcsim.cluster.overview import NodeOverview, Overview, TrainingOverview
from hcsim.launch.real import WATCH_EVERY_S, watching_cluster
from hcsim.real.interfaces import host_name
from hcsim.real.keys import load_credentials
from hcsim.runtime.host import Readings
from hcsim.transport.admission_queue import one_line

_EVENTS = 12
"""The number of messages that are shown."""
_WORDS = {"leads": "works, leads", "member": "works", "done": "has finished"}
_WIDE = 100
"""The width of a terminal that has room for what is said of each machine beyond the five questions."""
_NAME, _CHIP, _WAY, _LEAST = 20, 20, 38, 10
"""The most characters of a machine's name, its chip and a way, and the least of a reason: each machine has one line,
and the line below the headline has the whole of the reasons."""
_FIXED_LINES = 14
"""The lines of the picture beside machines and messages."""
_STYLES = {"leads": "green", "member": "green", "done": "green", "waits": "yellow"}
_HEADLINES = {"working": "bold green", "done": "bold green", "waiting": "bold yellow"}
_TONES = {"good": "green", "bad": "red", "plain": ""}
_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 60
"""The width of the loss curve."""


def watch_cluster(home: Path, cluster: str, peers: Sequence[str]) -> None:
    """Show how the cluster stands until the user ends it."""
    load_credentials(home, cluster, host_name())  # a machine that has joined no cluster is told so at once
    with suppress(KeyboardInterrupt):  # the way to end it
        asyncio.run(_watch(home, cluster, peers))


async def _watch(home: Path, cluster: str, peers: Sequence[str]) -> None:
    console = Console()
    async with watching_cluster(home, cluster, peers) as now:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(drawn(now(), *console.size), refresh=True)
                await asyncio.sleep(WATCH_EVERY_S)


def drawn(seen: Overview, width: int = 160, height: int = 1000) -> RenderableType:
    """Return the picture of a cluster for a terminal of that size."""
    parts: list[RenderableType] = [Text(one_line(seen.headline), _HEADLINES.get(seen.state, "bold red"))]
    if seen.hint:
        parts.append(Text(one_line(seen.hint), "" if seen.state == "nobody" else "red"))
    if seen.training is not None:
        parts += _training(seen.training, width)
    room = max(4, height - _FIXED_LINES - min(_EVENTS, len(seen.events)))
    if seen.nodes:
        parts.append(_nodes(seen, room, width))
    if seen.links and len(seen.nodes) + len(seen.links) <= room:
        parts.append(_links(seen, width))
    for event in seen.events[-_EVENTS:]:
        line = f"{_time_of_day(event.at_s)}  {cell(event.who)}  {one_line(event.text)}"
        parts.append(Text(line, _TONES[event.tone], no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _time_of_day(at_s: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at_s))
    except (OverflowError, ValueError, OSError):  # a member may tell of any time
        return "--:--:--"


def _training(training: TrainingOverview, width: int) -> list[Text]:
    figures = [f"loss {training.loss:.4g}"] if math.isfinite(training.loss) else []
    if training.step_s is not None:
        figures.append(f"{_short(training.step_s)} a step")
    if training.samples_per_s is not None:
        figures.append(f"{training.samples_per_s:,.4g} samples/s")
    if training.left_s:
        figures.append(f"done in {duration_left(training.left_s)}")
    curve = [loss for _, loss in training.curve]
    line = sparkline(curve, min(_CURVE, width - len("loss ")))
    words = [Text(f"{one_line(training.title)}: {', '.join(figures)}" if figures else one_line(training.title))]
    return words if not line else [*words, Text.assemble("loss ", (line, "cyan"))]


def _short(seconds: float) -> str:
    """Return a duration in as few characters as a column has room for."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{float(f'{seconds * scale:.3g}'):g} {unit}"
    return duration(seconds)


_MOST_DRAWN = 1e300
"""Differences of larger values are not finite."""


def duration_left(seconds: float) -> str:
    """Return a duration as people tell it; "–" for one that is no number, as another member may say."""
    if not math.isfinite(seconds):
        return "–"
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of these values in one line: each column is the mean of its share of them."""
    count = min(width, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(share) / len(share) for share in shares]
    finite = [mean for mean in means if abs(mean) < _MOST_DRAWN]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] if mean in finite else "×" for mean in means)


def _nodes(seen: Overview, most: int, width: int) -> Table:
    nodes, is_wide = seen.nodes, width >= _WIDE
    if len(nodes) > most:  # those that want something first
        nodes = tuple(sorted(nodes, key=lambda node: node.state in _WORDS))[:most]
    columns = ["machine", "state", "step", "compute", "encode", "wait"]
    if is_wide:
        columns[2:2] = ["chip", "memory", *(["heat"] if any(heat(node.readings) for node in nodes) else [])]
    rows = [_row(node) for node in nodes]
    others = sum(2 + max(len(heading), *(len(row[heading]) for row in rows)) for heading in columns)
    others -= 2 + max(len("state"), *(len(row["state"]) for row in rows))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if len(nodes) < len(seen.nodes):
        table.caption = f"and {len(seen.nodes) - len(nodes)} more"
        table.caption_justify = "left"
    for heading in columns:
        is_left = heading in ("machine", "state", "chip")
        table.add_column(heading, justify="left" if is_left else "right", no_wrap=True)
    for node, row in zip(nodes, rows, strict=True):
        row["state"] = one_line(row["state"], max(_LEAST, width - others - 4))
        style = _STYLES.get(node.state, "red")
        table.add_row(*(Text(row[each], style if each in ("machine", "state") else "") for each in columns))
    return table


def _row(node: NodeOverview) -> dict[str, str]:
    """Return the cells of a machine, by heading."""
    words, phases = _WORDS.get(node.state, node.state), node.phases
    row = {
        "machine": one_line(node.name, _NAME),
        "state": cell(f"{words}: {node.why}" if node.why else words),
        "chip": "" if node.chip is None else one_line(node.chip.name, _CHIP),
        "memory": memory(node),
        "heat": heat(node.readings),
        "step": f"{node.step:,}" if node.step else "",
    }
    for name in ("compute", "encode", "wait"):
        part: float | None = None if phases is None else getattr(phases, f"{name}_s")
        row[name] = "" if part is None else _short(part) if part else "–"
    return row


def memory(node: NodeOverview) -> str:
    """Return the free and the whole memory, as far as they are known."""
    whole = None if node.chip is None else node.chip.memory_bytes
    figures = [f"{size / 2**30:.3g}" for size in (node.readings.free_bytes, whole) if size is not None]
    free = "" if node.readings.free_bytes is None else " free"
    return f"{' of '.join(figures)} GiB{free}" if figures else ""


def heat(readings: Readings) -> str:
    """Return temperature, power and what heat leaves of the speed, as far as they are known."""
    figures = []
    if readings.temperature_c is not None:
        figures.append(f"{readings.temperature_c:.0f} °C")
    if readings.power_w is not None:
        figures.append(f"{readings.power_w:.3g} W")
    if readings.speed_limit is not None and readings.speed_limit < 1:
        figures.append(f"held at {100 * readings.speed_limit:.0f} %")
    return ", ".join(figures)


def _links(seen: Overview, width: int) -> Table:
    names, is_wide = {node.node: node.name for node in seen.nodes}, width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = ["between", *(["way"] if is_wide else []), "Gb/s", "round trip", "trouble"]
    if not any(link.trouble for link in seen.links):
        columns.remove("trouble")
    for heading in columns:
        number = heading in ("Gb/s", "round trip")
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    reason = max(_LEAST, width - 2 * _NAME - 25 - (_WAY if is_wide else 0))
    for link in seen.links:
        rates = dict.fromkeys(f"{rate / 1e9:.2g}" for rate in (link.there_bps, link.back_bps) if rate)
        ends = " – ".join(filter(None, link.ends))
        cells: dict[str, str | Text] = {
            "between": Text(" – ".join(one_line(names.get(n, n[:8]), _NAME) for n in (link.one, link.other))),
            "way": Text(one_line(" – ".join(link.media) + (f" {ends}" if ends else ""), _WAY)),
            "Gb/s": "/".join(rates),
            "round trip": "" if link.latency_s is None else _short(link.latency_s),
            "trouble": Text(one_line(link.trouble, reason), "red"),
        }
        table.add_row(*(cells[heading] for heading in columns))
    return table
