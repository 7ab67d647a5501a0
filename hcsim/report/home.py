"""A picture of a home: its machines, and the switches, access points, cables and lines that join them.

Each medium of a home stands in a row above the machines, joined to those that are attached to it; a line to the
internet leads from the row to the cloud. Thunderbolt cables are arcs from machine to machine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from hcsim.config import Ethernet, Scenario, Thunderbolt, Wifi
from hcsim.config.home import AnyMedium, Wan
from hcsim.config.scenario import Node
from hcsim.report.page import DRAWING, PALETTE, Table, text_of

_MACHINE, _MACHINE_HIGH, _GAP = 132, 46, 18
_HUB, _HUB_HIGH = 168, 40
_ROW = 16
"""The most machines beside each other; more of a home are said in words."""
_CLOUD_Y, _HUBS_Y, _MACHINES_Y = 10, 84, 190
_PADDING = 16
_SOFT = ' class="soft"'


class _Place(msgspec.Struct, frozen=True):
    x: float
    y: float


def picture(scenario: Scenario) -> str:
    """Return the drawing of all homes of a scenario, beside each other."""
    homes = list(dict.fromkeys([node.home for node in scenario.nodes]))
    lines = {line.home: line for line in scenario.wan}
    top = 0 if lines else _HUBS_Y - 28
    drawn: list[str] = []
    doors: list[float] = []
    x, deepest = 0.0, 0.0
    for home in homes:
        nodes = [node for node in scenario.nodes if node.home == home]
        media = _media_of(scenario, nodes)
        wide = _width(nodes, media)
        inside, depth = _home(nodes, media, x, wide)
        drawn.append(
            f'<rect x="{x + 1}" y="{_HUBS_Y - 26}" width="{wide - 2}" height="{depth - _HUBS_Y + 34}" rx="12" '
            f'fill="none" stroke="var(--line)" stroke-dasharray="5 4"/>'
            f'<text class="soft" x="{x + 12}" y="{_HUBS_Y - 9}">'
            f"{text_of(_home_words(home, lines.get(home)))}</text>{inside}"
        )
        if home in lines:
            doors.append(x + wide / 2)
        x, deepest = x + wide + _GAP, max(deepest, depth)
    width, height = x - _GAP, deepest + 12 - top
    if doors:
        middle = width / 2
        for door in doors:
            way = f"{middle:.1f},{_CLOUD_Y + 12} {door:.1f},{_CLOUD_Y + 12} {door:.1f},{_HUBS_Y - 26}"
            drawn.append(f'<polyline points="{way}" fill="none" stroke="var(--soft)"/>')
        drawn.append(_box(_Place(middle, _CLOUD_Y + 12), (110, 26), ("the internet",), 13))
    return (
        f'<svg viewBox="0 {top} {width:.0f} {height:.0f}" role="img" aria-label="{text_of(scenario.name)}" '
        f'style="min-width: {min(460.0, width):.0f}px; max-width: {1.4 * width:.0f}px">{"".join(drawn)}</svg>'
    )


def drawing(scenario: Scenario) -> str:
    """Return the picture as a file of its own, which is light and dark as its reader's system is."""
    opening, rest = picture(scenario).split(">", 1)
    style = f"<style>{PALETTE}{DRAWING}svg {{ background: var(--card) }}</style>"
    named = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" class="drawn"', 1)
    return f"{named}>{style}{rest}\n"


def machines_table(scenario: Scenario) -> Table:
    """Return the machines and what each is attached to, as the picture shows them."""
    media = {medium.name: medium for medium in scenario.media}
    rows = []
    for node in scenario.nodes:
        links = [
            f"{_title(media[link.medium])}{f' at {_rate(link.rate_bps)}' if link.rate_bps else ''}"
            for link in node.links if link.medium in media
        ]  # fmt: skip
        links += [
            f"Thunderbolt to {next(name for name in cable.between if name != node.name)}, "
            f"{_rate(min(cable.forward_bps, cable.backward_bps))}"
            for medium in scenario.media if isinstance(medium, Thunderbolt)
            for cable in medium.cables if node.name in cable.between
        ]  # fmt: skip
        rows.append((node.name, _machine(node), node.home, "; ".join(dict.fromkeys(links))))
    return Table(("machine", "kind", "home", "links"), tuple(rows), left=("kind", "home", "links"))


def _media_of(scenario: Scenario, nodes: Sequence[Node]) -> list[AnyMedium]:
    names = {link.medium for node in nodes for link in node.links}
    here = {node.name for node in nodes}
    return [
        medium for medium in scenario.media
        if medium.name in names or (isinstance(medium, Thunderbolt) and any(here & {*c.between} for c in medium.cables))
    ]  # fmt: skip


def _width(nodes: Sequence[Node], media: Sequence[AnyMedium]) -> float:
    hubs = sum(not isinstance(medium, Thunderbolt) for medium in media)
    machines = min(len(nodes), _ROW)
    return max(machines * (_MACHINE + _GAP), hubs * (_HUB + _GAP), 240) - _GAP + 2 * _PADDING


def _home(nodes: Sequence[Node], media: Sequence[AnyMedium], x: float, wide: float) -> tuple[str, float]:
    """Return what is drawn within a home, and how far down it goes."""
    hubs = [medium for medium in media if not isinstance(medium, Thunderbolt)]
    shown = nodes[:_ROW]
    at = {
        medium.name: _Place(x + wide * (n + 0.5) / len(hubs), _HUBS_Y + _HUB_HIGH / 2) for n, medium in enumerate(hubs)
    }
    machines_y = _MACHINES_Y if hubs else _HUBS_Y + 20
    places = {
        node.name: _Place(x + wide / 2 + (n - (len(shown) - 1) / 2) * (_MACHINE + _GAP), machines_y + _MACHINE_HIGH / 2)
        for n, node in enumerate(shown)
    }
    kinds = {medium.name: medium for medium in hubs}
    drawn = [
        f'<line x1="{at[link.medium].x:.1f}" y1="{at[link.medium].y:.1f}" x2="{places[node.name].x:.1f}" '
        f'y2="{places[node.name].y:.1f}" stroke="var(--c{1 if isinstance(kinds[link.medium], Wifi) else 0})" '
        f'stroke-width="1.6"{" stroke-dasharray=" + chr(34) + "3 4" + chr(34) if _is_air(kinds[link.medium]) else ""}/>'
        for node in shown for link in node.links if link.medium in at
    ]  # fmt: skip
    # The router of a home bridges its media.
    rows = list(at.values())
    drawn += [
        f'<line x1="{one.x:.1f}" y1="{one.y:.1f}" x2="{other.x:.1f}" y2="{other.y:.1f}" stroke="var(--soft)"/>'
        for one, other in pairwise(rows)
    ]
    arcs, depth = _cables(media, places, machines_y + _MACHINE_HIGH)
    drawn += arcs
    drawn += [_box(at[medium.name], (_HUB, _HUB_HIGH), _hub_words(medium), 8) for medium in hubs]
    drawn += [_box(places[node.name], (_MACHINE, _MACHINE_HIGH), (node.name, _machine(node)), 6) for node in shown]
    if len(nodes) > _ROW:
        drawn.append(
            f'<text class="soft" x="{x + wide / 2:.1f}" y="{depth + 18:.0f}" text-anchor="middle">'
            f"and {len(nodes) - _ROW} more</text>"
        )
        depth += 22
    return "".join(drawn), depth


def _cables(media: Sequence[AnyMedium], places: dict[str, _Place], below_y: float) -> tuple[list[str], float]:
    drawn: list[str] = []
    deepest = below_y
    for medium in media:
        for cable in medium.cables if isinstance(medium, Thunderbolt) else ():
            if not all(name in places for name in cable.between):
                continue
            one, other = sorted((places[name] for name in cable.between), key=lambda place: place.x)
            drop = 26 + 0.14 * (other.x - one.x)
            middle = (one.x + other.x) / 2
            drawn.append(
                f'<path d="M {one.x:.1f} {below_y:.1f} C {one.x:.1f} {below_y + drop:.1f} {other.x:.1f} '
                f'{below_y + drop:.1f} {other.x:.1f} {below_y:.1f}" fill="none" stroke="var(--c3)" stroke-width="2"/>'
                f'<text class="soft halo" x="{middle:.1f}" y="{below_y + 0.75 * drop + 14:.1f}" text-anchor="middle">'
                f"{text_of(_cable_words(cable.forward_bps, cable.backward_bps))}</text>"
            )
            deepest = max(deepest, below_y + 0.75 * drop + 20)
    return drawn, deepest


def _cable_words(forward_bps: float, backward_bps: float) -> str:
    if forward_bps == backward_bps:
        return _rate(forward_bps)
    return f"{_rate(forward_bps)} / {_rate(backward_bps)}"


def _box(middle: _Place, size: tuple[float, float], words: Sequence[str], radius: float) -> str:
    wide, high = size
    first_y = middle.y + 4.5 - 8 * (len(words) - 1)
    texts = "".join(
        f'<text{_SOFT if number else ""} x="{middle.x:.1f}" y="{first_y + 16 * number:.1f}" '
        f'text-anchor="middle">{text_of(_fitting(line, wide))}</text>'
        for number, line in enumerate(words)
    )
    return (
        f'<rect class="box" x="{middle.x - wide / 2:.1f}" y="{middle.y - high / 2:.1f}" width="{wide:.0f}" '
        f'height="{high:.0f}" rx="{radius}"><title>{text_of(", ".join(words))}</title></rect>{texts}'
    )


def _fitting(text: str, wide: float) -> str:
    most = int(wide / 7)
    return text if len(text) <= most else text[: most - 1] + "…"


def _hub_words(medium: AnyMedium) -> tuple[str, str]:
    if isinstance(medium, Wifi):
        return _named("access point", medium.name), f"{_standard(medium)}, {_rate(medium.phy_rate_bps)}"
    assert isinstance(medium, Ethernet)
    return _named("switch", medium.name), f"Ethernet, {_rate(medium.rate_bps)} a port"


def _home_words(home: str, line: Wan | None) -> str:
    words = home or "home"
    return words if line is None else f"{words}: {_rate(line.up_bps)} up, {_rate(line.down_bps)} down"


def _named(kind: str, name: str) -> str:
    return kind if name == kind else f"{kind} {name}"


def _title(medium: AnyMedium) -> str:
    return f"{medium.name} ({_standard(medium) if isinstance(medium, Wifi) else 'Ethernet'})"


def _standard(medium: Wifi) -> str:
    return "Wi-Fi " + medium.standard.removeprefix("wifi").upper()


def _is_air(medium: AnyMedium) -> bool:
    return isinstance(medium, Wifi)


def _machine(node: Node) -> str:
    return node.machine if isinstance(node.machine, str) else node.machine.name


def _rate(bps: float) -> str:
    for unit, scale in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if bps >= scale:
            return f"{bps / scale:.3g} {unit}"
    return f"{bps:.3g} b/s"
