"""What a fault makes of the scenario's network, for as long as it lasts: the same scenario with other links."""

from __future__ import annotations

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
    if change.node is None:
        media = tuple(_other_figures(m, change) if m.name == change.medium else m for m in scenario.media)
        return replace(scenario, media=media)
    nodes = tuple(_other_attachment(n, change) if n.name == change.node else n for n in scenario.nodes)
    return replace(scenario, nodes=nodes)


def _unplugged(scenario: Scenario, change: CablePulled) -> Scenario:
    medium = next(medium for medium in scenario.media if medium.name == change.medium)
    if isinstance(medium, Thunderbolt):
        ends = [change.node] if change.to is None else [change.node, change.to]
        cables = tuple(cable for cable in medium.cables if not all(end in cable.between for end in ends))
        left = replace(medium, cables=cables)
        return replace(scenario, media=tuple(left if m is medium else m for m in scenario.media))
    nodes = tuple(_without(n, [change.medium]) if n.name == change.node else n for n in scenario.nodes)
    return replace(scenario, nodes=nodes)


def _without(node: Node, media: list[str]) -> Node:
    return replace(node, links=tuple(link for link in node.links if link.medium not in media))


def _moved(node: Node, change: InterfaceChange) -> Node:
    left = _without(node, [change.medium]).links
    there = any(link.medium == change.to for link in left)
    return replace(node, links=left if there else (*left, Attachment(change.to)))


def _other_figures(medium: AnyMedium, change: LinkChange) -> AnyMedium:
    figures = _given(latency_s=change.latency_s)
    if isinstance(medium, Thunderbolt):
        figures |= _given(forward_bps=change.rate_bps, backward_bps=change.rate_bps)
        return replace(medium, cables=tuple(replace(cable, **figures) for cable in medium.cables))
    rate = "phy_rate_bps" if isinstance(medium, Wifi) else "rate_bps"
    return replace(medium, **figures, **_given(**{rate: change.rate_bps, "loss": change.loss}))


def _other_attachment(node: Node, change: LinkChange) -> Node:
    figures = _given(rate_bps=change.rate_bps, latency_s=change.latency_s)
    links = tuple(replace(link, **figures) if link.medium == change.medium else link for link in node.links)
    return replace(node, links=links)


def _given(**figures: float | None) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}
