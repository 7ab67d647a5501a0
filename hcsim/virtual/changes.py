"""What a fault makes of the scenario's network, for as long as it lasts: the same scenario with other links."""

from __future__ import annotations

from collections.abc import Mapping
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

Change: TypeAlias = LinkChange | CablePulled | InterfaceChange | RouterReboot


def changed(scenario: Scenario, change: Change) -> Scenario:
    """The scenario with one change of its network."""
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
    """Of a home's line, of one host's link, or of a medium: then all links to it have them, also those that had figures
    of their own."""
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
    links = tuple(replace(link, **figures) if link.medium == medium else link for link in node.links)
    return replace(node, links=links)


def _given(**figures: float | None) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}
