"""A home in words, and what might change in it.

    M4, M1 Air on wifi6; M3 Pro on 1gbe

are groups of machines with what joins them. A machine may stand with a number before it ("2 x M4 mini") and with its
memory behind it ("M4 24GB"), and be joined by two networks ("M4, M2 on thunderbolt + wifi6"). Wi-Fi and Ethernet of a
home are bridged by its router; Thunderbolt is a network of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hcsim.config import (
    AnyMedium,
    Attachment,
    Ethernet,
    Node,
    Scenario,
    Thunderbolt,
    Wifi,
    load_scenario,
    shipped_scenarios,
)
from hcsim.config.check import complete
from hcsim.config.machine import GIB
from hcsim.config.machine_names import machine_named
from hcsim.config.media_names import ethernet_bps, medium_name, medium_of
from hcsim.errors import ConfigError
from hcsim.units import BitRate, Bytes, did_you_mean

HOME = "home"
_EXAMPLE = '"M4, M1 Air on wifi6; M3 Pro on 1gbe"'
_COUNT = re.compile(r"(?P<count>\d+)\s*(?:[x×*]\s*|\s)(?=[A-Za-z])", re.IGNORECASE)
_MEMORY = re.compile(r"\b(?:with\s+)?(?P<gib>\d+)\s*(?:GB|GiB|G)\b(?:\s*(?:RAM|memory|of memory))?", re.IGNORECASE)
_MOST = 64
"""Machines of a home in words."""


class Machines(NamedTuple):
    """So many alike, and the networks that they are on."""

    name: str
    number: int
    memory_bytes: Bytes | None
    media: tuple[str, ...]


def home_of(words: str) -> Scenario:
    """Return the home: a scenario's or a twin's file, a shipped scenario, or one in words."""
    if words in shipped_scenarios() or words.endswith(".toml") or Path(words).is_file():
        home = load_scenario(words)
        if not home.nodes:
            raise ConfigError(f"{words}: there are no machines in it: give a file with a [[node]] for each")
        return replace(home, faults=(), processes=(), training=None, cluster=None)
    try:
        return home_in_words(words)
    except ConfigError as error:
        hint = did_you_mean(words, shipped_scenarios())
        raise ConfigError(f'"{words}"{hint}: {error}') from None


def home_in_words(words: str) -> Scenario:
    """Return the scenario that the words describe."""
    groups = [list(_group(part)) for part in words.split(";") if part.strip()]
    machines = [each for group in groups for each in group]
    if not machines:
        raise ConfigError(f"say which Macs there are, and on which network, such as {_EXAMPLE}")
    if sum(each.number for each in machines) > _MOST:
        raise ConfigError(f"more than {_MOST} machines: describe them in a file")
    nodes = tuple(_nodes(machines))
    names = list(dict.fromkeys(name for each in machines for name in each.media))
    on = {name: [node.name for node in nodes if name in [link.medium for link in node.links]] for name in names}
    if (
        lonely := next((name for name, there in on.items() if name == "thunderbolt" and len(there) < 2), None)
    ) is not None:
        raise ConfigError(f"{lonely}: a cable joins two machines, and {on[lonely][0]} is alone on it")
    _check_joined(nodes)
    media = tuple(medium_of(name, HOME, on[name]) for name in names)
    nodes = tuple(
        replace(node, links=tuple(link for link in node.links if link.medium != "thunderbolt")) for node in nodes
    )
    return complete(Scenario("home", nodes, media=media))


def _group(text: str) -> Iterator[Machines]:
    machines, on, networks = re.sub(r"\s+", " ", text.strip()).partition(" on ")
    media = tuple(medium_name(each) for each in re.split(r"\+| and ", networks)) if on else ()
    for part in re.split(r",| and ", machines):
        if not part.strip():
            raise ConfigError(f'"{text.strip()}": a machine is missing; write {_EXAMPLE}')
        yield _machines(part.strip(), media)


def _machines(text: str, media: tuple[str, ...]) -> Machines:
    count = 1
    if (number := _COUNT.match(text)) is not None:
        count, text = int(number["count"]), text[number.end() :]
    if not count:
        raise ConfigError(f'"{text}": none of them is no machine; leave it out')
    memory = _MEMORY.search(text)
    if memory is not None:
        text = text[: memory.start()] + text[memory.end() :]
    return Machines(machine_named(text), count, None if memory is None else Bytes(int(memory["gib"]) * GIB), media)


def _nodes(machines: Sequence[Machines]) -> Iterator[Node]:
    total: dict[str, int] = {}
    for each in machines:
        total[each.name] = total.get(each.name, 0) + each.number
    number = dict.fromkeys(total, 0)
    for each in machines:
        for _ in range(each.number):
            number[each.name] += 1
            called = each.name.lower().replace(" ", "-")
            called = called if total[each.name] == 1 else f"{called}-{number[each.name]}"
            links = tuple(map(Attachment, each.media))
            yield Node(called, each.name, HOME, links, memory_bytes=each.memory_bytes)


def _check_joined(nodes: Sequence[Node]) -> None:
    """Reject machines that cannot reach the others: those on Thunderbolt alone, and those on nothing."""
    if len(nodes) == 1:
        return
    media = {node.name: {link.medium for link in node.links} for node in nodes}
    if all("thunderbolt" in each for each in media.values()):
        return
    for name, each in media.items():
        if not each - {"thunderbolt"}:
            how = "is only on thunderbolt, which others are not on" if each else "is on no network"
            raise ConfigError(f"{name} {how}: say how it reaches the others, such as {_EXAMPLE}")


# What might change.


class Purchase(NamedTuple):
    """A home after something was bought."""

    words: str
    home: Scenario


def bought(home: Scenario, words: str) -> Purchase:
    """Return the home with another machine ("M4 mini"), on the network of the others, or with everybody on another
    network ("2.5gbe switch", "thunderbolt", "wifi7")."""
    try:
        name = medium_name(words)
    except ConfigError as unknown:
        try:
            [machines] = _group(words)
        except (ConfigError, ValueError):
            raise ConfigError(f'--buy "{words}": this is neither a network nor a machine: {unknown}') from None
        return Purchase(words, _with_machines(home, machines))
    return Purchase(words, on_medium(home, name))


def _with_machines(home: Scenario, machines: Machines) -> Scenario:
    known = [medium for medium in home.media if not isinstance(medium, Thunderbolt)]
    media = list(home.media)
    if machines.media:
        name = machines.media[0]
        if name not in [medium.name for medium in media]:
            media.append(medium_of(name, home.nodes[0].home))
    elif known:
        name = next((medium for medium in known if isinstance(medium, Ethernet)), known[0]).name
    else:
        raise ConfigError(f'--buy "{machines.name}": say on which network, such as "{machines.name} on 1gbe"')
    taken = {node.name for node in home.nodes}
    called = f"new-{machines.name.lower().replace(' ', '-')}"
    fresh = [each for each in (called, *(f"{called}-{n}" for n in range(2, _MOST))) if each not in taken]
    at = next((medium.home for medium in media if medium.name == name and not isinstance(medium, Thunderbolt)), HOME)
    nodes = tuple(
        Node(each, machines.name, at, (Attachment(name),), memory_bytes=machines.memory_bytes)
        for each in fresh[: machines.number]
    )
    return complete(replace(home, nodes=(*home.nodes, *nodes), media=tuple(media)))


def on_medium(home: Scenario, name: str, only: Sequence[str] | None = None) -> Scenario:
    """Return the home with its machines, or only these, on a network of that usual name. A better access point or
    switch takes the place of the one that is there."""
    if name == "thunderbolt" and len(home.nodes) < 2:
        raise ConfigError("thunderbolt: a cable joins two machines, and there is one")
    kinds = {each.name: each for each in home.media}
    wireless = [node.name for node in home.nodes if any(isinstance(kinds[link.medium], Wifi) for link in node.links)]
    usual = wireless if name.startswith("wifi") and wireless else [node.name for node in home.nodes]
    moved = [node.name for node in home.nodes if node.name in (usual if only is None else only)]
    called = name if name not in [medium.name for medium in home.media] else f"new-{name}"
    of_home = {node.home for node in home.nodes if node.name in moved}
    if len(of_home) > 1:
        raise ConfigError(f"{name}: the machines are in {len(of_home)} homes; say in a file what changes in which")
    medium = replace(medium_of(name, next(iter(of_home)), moved), name=called)
    cabled = isinstance(medium, Thunderbolt)
    replaces = (Ethernet, Wifi) if ethernet_bps(name) is not None else Wifi

    def links_of(node: Node) -> tuple[Attachment, ...]:
        if node.name not in moved or cabled:
            return node.links
        kept = tuple(link for link in node.links if not isinstance(kinds[link.medium], replaces))
        return (*kept, Attachment(called))

    nodes = tuple(replace(node, links=links_of(node)) for node in home.nodes)
    used = {link.medium for node in nodes for link in node.links}
    media = tuple(each for each in home.media if each.name in used or isinstance(each, Thunderbolt))
    return complete(replace(home, nodes=nodes, media=(*media, medium)))


def with_rates(home: Scenario, medium: str, factor: float) -> Scenario:
    """Return the home with a network that is faster by this factor."""
    changed = tuple(_faster(each, factor) if each.name == medium else each for each in home.media)
    nodes = tuple(
        replace(
            node,
            links=tuple(
                replace(link, rate_bps=BitRate(link.rate_bps * factor))
                if link.medium == medium and link.rate_bps
                else link
                for link in node.links
            ),
        )
        for node in home.nodes
    )
    return replace(home, media=changed, nodes=nodes)


def _faster(medium: Ethernet | Wifi | Thunderbolt, factor: float) -> Ethernet | Wifi | Thunderbolt:
    if isinstance(medium, Wifi):
        return replace(medium, phy_rate_bps=BitRate(medium.phy_rate_bps * factor))
    if isinstance(medium, Ethernet):
        return replace(medium, rate_bps=BitRate(medium.rate_bps * factor))
    cables = tuple(
        replace(
            cable, forward_bps=BitRate(cable.forward_bps * factor), backward_bps=BitRate(cable.backward_bps * factor)
        )
        for cable in medium.cables
    )
    return replace(medium, cables=cables)


def only_nodes(home: Scenario, names: Sequence[str]) -> Scenario:
    """Return the home with these machines alone, in its own order, and with the media that they use."""
    nodes = tuple(node for node in home.nodes if node.name in names)
    used = {link.medium for node in nodes for link in node.links}
    kept: list[AnyMedium] = []
    for medium in home.media:
        if isinstance(medium, Thunderbolt):
            cables = tuple(cable for cable in medium.cables if all(end in names for end in cable.between))
            kept += [replace(medium, cables=cables)] if cables else []
        elif medium.name in used:
            kept.append(medium)
    homes = {medium.home for medium in kept if not isinstance(medium, Thunderbolt)}
    wan = tuple(line for line in home.wan if line.home in homes)
    machines = tuple(each for each in home.machines if any(node.machine in (each, each.name) for node in nodes))
    there = {medium.name for medium in kept}
    nodes = tuple(replace(node, links=tuple(link for link in node.links if link.medium in there)) for node in nodes)
    return replace(home, nodes=nodes, media=tuple(kept), wan=wan, machines=machines)


def is_joined(home: Scenario) -> bool:
    """Return whether every machine reaches every other: over the bridged media of a home, lines between homes, and
    cables, whose ends pass on what is for others."""
    cables = [cable.between for medium in home.media if isinstance(medium, Thunderbolt) for cable in medium.cables]
    bridged = {medium.name: medium.home for medium in home.media if not isinstance(medium, Thunderbolt)}
    lines = {line.home for line in home.wan}
    at = {node.name: {bridged[link.medium] for link in node.links if link.medium in bridged} for node in home.nodes}
    edges = [*cables, *((name, "internet" if each in lines else each) for name, homes in at.items() for each in homes)]
    reached, before = {home.nodes[0].name}, 0
    while len(reached) > before:
        before = len(reached)
        reached |= {end for edge in edges if reached & set(edge) for end in edge}
    return all(node.name in reached for node in home.nodes)
