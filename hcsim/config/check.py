"""Checks that need more than one table, and completion of the nodes from other tables.

An error starts with the place in the file, as the decoder's errors do. Copies of a node share its place.

Faults must refer to existing nodes, media, lines and homes, and must be possible for them. An error about
an unknown name lists the names that exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

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
from hcsim.config.home import AnyMedium, Thunderbolt, Wan, Wifi
from hcsim.config.machine import CATALOGUE, Machine
from hcsim.config.scenario import TWIN_VERSION, Attachment, Node, Scenario
from hcsim.errors import ConfigError
from hcsim.units import did_you_mean

_Placed: TypeAlias = tuple[str, Node]
"""A node, and its place in the file."""


def complete(scenario: Scenario) -> Scenario:
    """Return the scenario with each node's copies, home and cables, after checking that its tables fit together."""
    if (scenario.twin or 0) > TWIN_VERSION:
        raise ConfigError(
            f"twin = {scenario.twin}: a newer hcsim wrote this file; this one reads twins up to version {TWIN_VERSION}"
        )
    media = {medium.name: medium for medium in scenario.media}
    _refuse_twice((f"medium[{i}].name", medium.name) for i, medium in enumerate(scenario.media))
    machines = {machine.name: machine for machine in scenario.machines}
    _refuse_twice((f"machine[{i}].name", machine.name) for i, machine in enumerate(scenario.machines))
    _refuse_twice((f"processor[{i}].name", processor.name) for i, processor in enumerate(scenario.processors))
    for i, node in enumerate(scenario.nodes):
        if node.processor:
            check_known(
                f"node[{i}].processor", node.processor, [each.name for each in scenario.processors], "processor"
            )
    at_home = [_settled(f"node[{i}]", node, media, machines) for i, node in enumerate(scenario.nodes)]
    copies = [(f"node[{i}]", copy) for i, node in enumerate(at_home) for copy in _copies(node)]
    _refuse_twice((f"{path}.name", node.name) for path, node in copies)
    names = [node.name for _, node in copies]
    for i, medium in enumerate(scenario.media):
        for j, cable in enumerate(medium.cables if isinstance(medium, Thunderbolt) else ()):
            check_pair(f"medium[{i}].cable[{j}].between", cable.between, names)
    plugged = [(path, _plugged_in(path, node, scenario.media)) for path, node in copies]
    _refuse_parallel_cables(scenario.media)
    homes = list(dict.fromkeys(m.home for m in scenario.media if not isinstance(m, Thunderbolt)))
    _refuse_twice((f"wan[{i}].home", line.home) for i, line in enumerate(scenario.wan))
    for i, line in enumerate(scenario.wan):
        check_known(f"wan[{i}].home", line.home, homes, "home with a medium")
    _check_headers(scenario)
    nodes = {node.name: node for _, node in plugged}
    for i, fault in enumerate(scenario.faults):
        check_fault(f"fault[{i}]", fault, nodes, media, scenario.wan)
    _check_routes(plugged, scenario)
    return replace(scenario, nodes=tuple(node for _, node in plugged))


def _refuse_twice(named: Iterable[tuple[str, str]]) -> None:
    taken: dict[str, str] = {}
    for path, name in named:
        if name in taken:
            raise ConfigError(f'{path} = "{name}": {taken[name]} is the same; each can be there once')
        taken[name] = path


def _refuse_parallel_cables(media: Sequence[AnyMedium]) -> None:
    """Reject two cables between the same hosts: a bridge would use one of them, and the file does not say which."""
    for i, medium in enumerate(media):
        laid: dict[tuple[str, ...], str] = {}
        for j, cable in enumerate(medium.cables if isinstance(medium, Thunderbolt) else ()):
            path, ends = f"medium[{i}].cable[{j}].between", tuple(sorted(cable.between))
            if ends in laid:
                raise ConfigError(
                    f'{path}: {laid[ends]} joins "{ends[0]}" and "{ends[1]}" already; '
                    "between two nodes there can be one cable of a medium"
                )
            laid[ends] = path


def _settled(path: str, node: Node, media: dict[str, AnyMedium], machines: Mapping[str, Machine]) -> Node:
    """Return the node with the file's machine that it names, and with its home, which must be that of its media."""
    if isinstance(node.machine, str) and node.machine in machines:
        node = replace(node, machine=machines[node.machine])
    elif isinstance(node.machine, str):
        check_known(f"{path}.machine", node.machine, [*machines, *CATALOGUE], "machine")
    homes: list[str] = [node.home] if node.home else []
    for i, link in enumerate(node.links):
        check_known(f"{path}.links[{i}]", link.medium, media, "medium")
        medium = media[link.medium]
        if isinstance(medium, Wifi) and (link.up_bps or link.down_bps):
            raise ConfigError(
                f'{path}.links[{i}]: "{link.medium}" is Wi-Fi, whose stations send and receive at one rate: give it as '
                "rate, instead of up and down"
            )
        if isinstance(medium, Wifi) and link.burst_bytes:
            raise ConfigError(f'{path}.links[{i}].burst: "{link.medium}" is Wi-Fi, and only ports have a burst')
        if not isinstance(medium, Thunderbolt):
            homes.append(medium.home)
        elif link != Attachment(link.medium):
            raise ConfigError(
                f'{path}.links[{i}]: "{link.medium}" is Thunderbolt: rate and latency are those of its cables, '
                "which are set with forward, backward and latency of each [[medium.cable]]"
            )
        if homes and homes[-1] != homes[0]:
            raise ConfigError(f'{path}.links[{i}]: "{link.medium}" is in {homes[-1]}, but "{node.name}" in {homes[0]}')
    _refuse_twice((f"{path}.links[{i}]", link.medium) for i, link in enumerate(node.links))
    return replace(node, home=homes[0] if homes else "home")


def _copies(node: Node) -> list[Node]:
    if node.count == 1:
        return [node]
    return [replace(node, name=f"{node.name}-{i}", count=1) for i in range(1, node.count + 1)]


def _plugged_in(path: str, node: Node, media: Sequence[AnyMedium]) -> Node:
    """Return the node with an attachment to each Thunderbolt network that has a cable to it."""
    linked = [link.medium for link in node.links]
    plugged = list(node.links)
    for medium in media:
        if isinstance(medium, Thunderbolt):
            cabled = any(node.name in cable.between for cable in medium.cables)
            if cabled and medium.name not in linked:
                plugged.append(Attachment(medium.name))
            if medium.name in linked and not cabled:
                place = f"{path}.links[{linked.index(medium.name)}]"
                raise ConfigError(f'{place} = "{medium.name}": none of its cables goes to "{node.name}"')
    return replace(node, links=tuple(plugged))


def _check_headers(scenario: Scenario) -> None:
    """Reject an MTU that leaves no room for a payload after the headers."""
    packets = [(f"medium[{i}].mtu", medium.mtu) for i, medium in enumerate(scenario.media)]
    for i, line in enumerate(scenario.wan):
        packets.append((f"wan[{i}].tunnel.mtu", line.tunnel.mtu) if line.tunnel else (f"wan[{i}].mtu", line.mtu))
    for path, mtu in packets:
        if scenario.tcp.header_bytes >= mtu:
            raise ConfigError(
                f"tcp.header: {scenario.tcp.header_bytes} B of headers fill the packets of {mtu} B that {path} says; "
                f"less than {min(mtu for _, mtu in packets)} B would fit"
            )


def _check_routes(placed: Sequence[_Placed], scenario: Scenario) -> None:
    """Check that every two nodes share a network. Hosts forward within Thunderbolt only."""
    networks: dict[tuple[str, ...], _Placed] = {}
    for path, node in placed:
        networks.setdefault(_networks_of(node, scenario), (path, node))
    if len(placed) > 1 and () in networks:
        path, node = networks[()]
        media = ", ".join(medium.name for medium in scenario.media) or "none"
        raise ConfigError(f'{path}: "{node.name}" has no links; known media: {media}')
    for mine, (path, node) in networks.items():
        for theirs, (other_path, other) in networks.items():
            if mine != theirs and not any(network in theirs for network in mine):
                raise ConfigError(
                    f'{path}, {other_path}: there is no route between "{node.name}" and "{other.name}": '
                    "they need a common medium, media of one home, or a [[wan]] line for each home"
                )


def _networks_of(node: Node, scenario: Scenario) -> tuple[str, ...]:
    """Return the separate networks of a node: its home's or the internet, and islands of cables."""
    online = any(line.home == node.home for line in scenario.wan)
    networks = []
    media = {medium.name: medium for medium in scenario.media}
    for link in node.links:
        medium = media[link.medium]
        if isinstance(medium, Thunderbolt):
            networks.append(f"{medium.name} of {_island(medium, node.name)[0]}")
        else:
            networks.append("internet" if online else f"home {medium.home}")
    return tuple(sorted(networks))


def _island(medium: Thunderbolt, node: str) -> list[str]:
    """Return all nodes that cables join to this one, sorted."""
    island = [node]
    for member in island:  # grows while it is read
        for a, b in (cable.between for cable in medium.cables):
            if member in (a, b):
                island.extend(end for end in (a, b) if end not in island)
    return sorted(island)


def check_fault(
    path: str, fault: AnyFault, nodes: Mapping[str, Node], media: Mapping[str, AnyMedium], wan: Sequence[Wan] = ()
) -> None:
    """Reject a fault that does not fit the scenario; `path` is the fault's place in the file."""
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
    """Return the nodes that a Thunderbolt cable joins to this one."""
    pairs = [cable.between for cable in medium.cables] if isinstance(medium, Thunderbolt) else []
    return [pair[1 - pair.index(node)] for pair in pairs if node in pair]


def check_known(path: str, name: str, known: Collection[str], what: str) -> None:
    """Reject a name at that place that is not among the known ones."""
    if name not in known:
        valid = ", ".join(known) or "none"
        raise ConfigError(f'{path} = "{name}": there is no such {what}{did_you_mean(name, known)}; known: {valid}')


def check_pair(path: str, pair: tuple[str, str], names: Collection[str]) -> None:
    """Reject anything but two different nodes."""
    for i, name in enumerate(pair):
        check_known(f"{path}[{i}]", name, names, "node")
    if pair[0] == pair[1]:
        raise ConfigError(f'{path}: "{pair[0]}" is there twice; two different nodes are needed')
