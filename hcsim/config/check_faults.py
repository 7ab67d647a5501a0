"""Checks that faults speak of what is there (nodes, media, lines, homes), and that such a thing can happen to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hcsim.config.faults import (
    AnyFault,
    CablePulled,
    CopiedIdentity,
    InterfaceChange,
    LinkChange,
    Misbehave,
    Partition,
    RouterReboot,
    Stranger,
    WifiGate,
)
from hcsim.config.known import check_known, check_pair
from hcsim.config.media import AnyMedium, Thunderbolt, Wan, Wifi
from hcsim.config.scenario import Node
from hcsim.errors import ConfigError


def check_fault(
    path: str, fault: AnyFault, nodes: Mapping[str, Node], media: Mapping[str, AnyMedium], wan: Sequence[Wan] = ()
) -> None:
    """Refuse what does not fit; `path` is the fault's place in the file."""
    if isinstance(fault, Partition):
        for i, side in enumerate(fault.sides):
            for j, name in enumerate(side):
                check_known(f"{path}.sides[{i}][{j}]", name, nodes, "node")
    elif isinstance(fault, RouterReboot | Stranger):
        homes = dict.fromkeys(medium.home for medium in media.values() if not isinstance(medium, Thunderbolt))
        check_known(f"{path}.home", fault.home, homes, "home with a medium")
    pair: tuple[str, str] | None = getattr(fault, "between", None)
    if pair is not None:
        check_pair(f"{path}.between", pair, nodes)
    node: str | None = getattr(fault, "node", None)
    if node is not None:
        check_known(f"{path}.node", node, nodes, "node")
    if isinstance(fault, Stranger) and fault.spoofs is not None:
        neighbours = [name for name, one in nodes.items() if one.home == fault.home]
        check_known(f"{path}.spoofs", fault.spoofs, neighbours, f"node in {fault.home}")
    if isinstance(fault, Misbehave) and fault.to is not None:
        check_known(f"{path}.to", fault.to, nodes, "node")
        if fault.to == fault.node:
            raise ConfigError(f'{path}.to = "{fault.to}": a node sends itself nothing; another one is needed')
    medium: str | None = getattr(fault, "medium", None)
    ways = {name: rates for line in wan for name, rates in line.ways.items()} if isinstance(fault, LinkChange) else {}
    if medium is not None:
        check_known(f"{path}.medium", medium, [*media, *ways], "medium or line" if ways else "medium")
    if isinstance(fault, CopiedIdentity):
        check_known(f"{path}.of", fault.of, nodes, "node")
        if fault.of == fault.node:
            raise ConfigError(f'{path}.of = "{fault.of}": a node cannot be a copy of itself')
    if isinstance(fault, LinkChange) and fault.medium in ways:
        _check_line(path, fault, nodes, media, one_way=len(ways[fault.medium]) == 1)
    else:
        _check_interfaces(path, fault, nodes, media)


def _check_interfaces(path: str, fault: AnyFault, nodes: Mapping[str, Node], media: Mapping[str, AnyMedium]) -> None:
    if isinstance(fault, WifiGate):
        air = [name for name, medium in media.items() if isinstance(medium, Wifi)]
        check_known(f"{path}.medium", fault.medium, air, "Wi-Fi medium")
    elif isinstance(fault, CablePulled):
        wires = [name for name in _links(nodes[fault.node]) if not isinstance(media[name], Wifi)]
        check_known(f"{path}.medium", fault.medium, wires, f"wire of {fault.node}")
        if fault.to is not None:
            check_known(f"{path}.to", fault.to, _cabled(fault.node, media[fault.medium]), "end of a Thunderbolt cable")
    elif isinstance(fault, InterfaceChange):
        home = nodes[fault.node].home
        bridged = [name for name, medium in media.items() if getattr(medium, "home", None) == home]
        mine = [name for name in _links(nodes[fault.node]) if name in bridged]
        check_known(f"{path}.medium", fault.medium, mine, f"Ethernet or Wi-Fi link of {fault.node}")
        check_known(f"{path}.to", fault.to, bridged, f"Ethernet or Wi-Fi medium in {home}")
    elif isinstance(fault, LinkChange):
        if fault.node is not None:
            check_known(f"{path}.medium", fault.medium, _links(nodes[fault.node]), f"link of {fault.node}")
        if fault.loss is not None and isinstance(media[fault.medium], Thunderbolt):
            raise ConfigError(
                f'{path}.loss: "{fault.medium}" is Thunderbolt, whose cables lose nothing; '
                "it can have another rate or latency, and Ethernet and Wi-Fi a loss"
            )


def _check_line(
    path: str, fault: LinkChange, nodes: Mapping[str, Node], media: Mapping[str, AnyMedium], *, one_way: bool
) -> None:
    if fault.medium in media:
        raise ConfigError(
            f'{path}.medium = "{fault.medium}": a medium and a line are called so; name the medium otherwise'
        )
    if fault.node is not None:
        check_known(f"{path}.medium", fault.medium, _links(nodes[fault.node]), f"link of {fault.node}")
    if one_way and (fault.latency_s is not None or fault.loss is not None):
        line = fault.medium.rpartition(".")[0]
        raise ConfigError(
            f'{path}: "{fault.medium}" is one direction of a line, and only its rate is its own; '
            f'latency and loss are those of "{line}"'
        )


def _links(node: Node) -> list[str]:
    return [link.medium for link in node.links]


def _cabled(node: str, medium: AnyMedium) -> list[str]:
    """The nodes that a Thunderbolt cable joins to this one."""
    pairs = [cable.between for cable in medium.cables] if isinstance(medium, Thunderbolt) else []
    return [pair[1 - pair.index(node)] for pair in pairs if node in pair]
