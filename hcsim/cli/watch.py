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
from hcsim.cluster.overview import NodeOverview, Overview, StepTimes, TrainingOverview
from hcsim.launch.real import WATCH_EVERY_S, watching_cluster
from hcsim.real.interfaces import host_name
from hcsim.real.keys import load_credentials
from hcsim.runtime.host import Readings
from hcsim.transport.admission_queue import one_line

_EVENTS = 12
"""The number of messages that are shown."""
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
                live.update(drawn(now()), refresh=True)
                await asyncio.sleep(WATCH_EVERY_S)


def drawn(seen: Overview) -> RenderableType:
    """Return the picture of a cluster."""
    parts: list[RenderableType] = [Text(one_line(seen.headline), _HEADLINES.get(seen.state, "bold red"))]
    if seen.hint:
        parts.append(Text(one_line(seen.hint)))
    if seen.training is not None:
        parts += _training(seen.training)
    if seen.nodes:
        parts.append(_nodes(seen))
    if seen.links:
        parts.append(_links(seen))
    for event in seen.events[-_EVENTS:]:
        line = f"{_time_of_day(event.at_s)}  {cell(event.who)}  {one_line(event.text)}"
        parts.append(Text(line, _TONES[event.tone], no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _time_of_day(at_s: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at_s))
    except (OverflowError, ValueError, OSError):  # a member may tell of any time
        return "--:--:--"


def _training(training: TrainingOverview) -> list[Text]:
    figures = [f"loss {training.loss:.4g}"]
    if training.step_s is not None:
        figures.append(f"{duration(training.step_s)} a step")
    if training.samples_per_s is not None:
        figures.append(f"{training.samples_per_s:,.4g} samples/s")
    if training.left_s:
        figures.append(f"done in {duration_left(training.left_s)}")
    curve = [loss for _, loss in training.curve]
    return [Text(f"{one_line(training.title)}: {', '.join(figures)}"), Text(sparkline(curve, _CURVE), "cyan")]


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


def _nodes(seen: Overview) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("machine", "", "chip", "memory", "heat", "step", "compute / encode / wait"):
        table.add_column(heading, justify="right" if heading in ("memory", "heat", "step") else "left")
    for node in seen.nodes:
        style, words = _STYLES.get(node.state, "red"), node.state if not node.why else f"{node.state}: {node.why}"
        table.add_row(
            Text(cell(node.name), style),
            Text(cell(words), style),
            Text("" if node.chip is None else cell(node.chip.name)),
            memory(node),
            heat(node.readings),
            str(node.step or ""),
            _phases(node.phases),
        )
    return table


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


def _phases(phases: StepTimes | None) -> str:
    if phases is None:
        return ""
    return " / ".join(duration(part) if part else "–" for part in (phases.compute_s, phases.encode_s, phases.wait_s))


def _links(seen: Overview) -> Table:
    names = {node.node: node.name for node in seen.nodes}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("between", "way", "Gb/s", "round trip", ""):
        table.add_column(heading, justify="right" if heading in ("Gb/s", "round trip") else "left")
    for link in seen.links:
        rates = dict.fromkeys(f"{rate / 1e9:.2g}" for rate in (link.there_bps, link.back_bps) if rate)
        ends = " – ".join(filter(None, link.ends))
        table.add_row(
            Text(cell(f"{names.get(link.one, link.one[:8])} – {names.get(link.other, link.other[:8])}")),
            Text(cell(" ".join(filter(None, (" – ".join(link.media), ends))))),
            "/".join(rates),
            "" if link.latency_s is None else duration(link.latency_s),
            Text(cell(link.trouble), "red"),
        )
    return table
