"""The clusters that studies compare: equal Macs on one kind of link, by name, and a few that are not so equal.

All nodes are M4s, so that two clusters differ in nothing but what their names say. A link is one of
`LINKS`, or a switch of any rate: "ethernet:300 Mb/s".
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from hcsim.config import (
    AnyMedium,
    Attachment,
    Cable,
    Ethernet,
    Node,
    Scenario,
    Throttle,
    Thunderbolt,
    idealised,
    load_scenario,
)
from hcsim.config.check import complete
from hcsim.config.media_names import THUNDERBOLT_BASIS, THUNDERBOLT_BPS, access_point
from hcsim.errors import ConfigError
from hcsim.units import BitRate, PositiveSeconds, PositiveShare, Seconds, decode_quantity, did_you_mean

MACHINE = "M4"
OLD_MACHINE = "M1"
THROTTLED = PositiveShare(0.4)
_APART = 0.01
"""Of the speeds of Macs that are alike, but for what two of a kind differ in."""
FREE_FORM = "ethernet:"
ALONE = "none"
"""The link of a machine that trains alone."""
FOR_EVER = PositiveSeconds(1e9)


class Cluster(msgspec.Struct, frozen=True):
    """One place to measure at."""

    title: str
    scenario: Scenario
    groups: tuple[tuple[int, ...], ...] = ()
    """Who is in one home, where there are several: a hierarchical all-reduce needs it."""
    alpha_beta: tuple[float, float] | None = None
    """Latency in seconds and bytes per second, where links are uniform and nothing else takes time."""


class Link(msgspec.Struct, frozen=True):
    """A kind of link, and how to join that many Macs by it."""

    title: str
    join: Callable[[int], Scenario]


def cluster(link: str, world: int, variant: str = "equal") -> Cluster:
    """So many Macs on that link; `ConfigError` says which links and variants there are."""
    if link == ALONE:
        return Cluster("one Mac", Scenario("one-mac", (Node("mini-1", MACHINE, "home"),)))
    kind = link_named(link)
    if world < 2:
        raise ConfigError(f'link = "{link}": a link joins at least two Macs, not {world}')
    scenario = kind.join(world)
    if variant not in VARIANTS:
        hint = did_you_mean(variant, VARIANTS)
        raise ConfigError(f'variant = "{variant}": there is no such variant{hint}; known: {", ".join(VARIANTS)}')
    scenario = complete(VARIANTS[variant](scenario))
    homes = list(dict.fromkeys(node.home for node in scenario.nodes))
    ranks = [tuple(i for i, node in enumerate(scenario.nodes) if node.home == home) for home in homes]
    ideal = link == "ideal" and isinstance(switch := scenario.media[0], Ethernet)
    return Cluster(
        f"{world} Macs, {kind.title}",
        scenario,
        tuple(ranks) if len(homes) > 1 else (),
        (switch.latency_s, switch.rate_bps / 8) if ideal else None,
    )


def ideal(ports: int, algorithms: tuple[str, ...] = ()) -> Cluster:
    """Ideal ports, of which there may be one."""
    return Cluster(f"{ports} ideal ports", complete(_ideal(ports)))


def link_named(link: str) -> Link:
    """A link of `LINKS`, or "ethernet:" and a rate."""
    if link.startswith(FREE_FORM):
        text = link.removeprefix(FREE_FORM).strip()
        try:
            rate_bps = decode_quantity(BitRate, text)
        except ValueError as error:
            raise ConfigError(f'link = "{link}": {error}') from None
        return Link(f"{text} Ethernet", lambda world: _switched(world, rate_bps))
    if link not in LINKS:
        known = ", ".join([*LINKS, f'"{FREE_FORM}300 Mb/s"'])
        raise ConfigError(f'link = "{link}": there is no such link{did_you_mean(link, LINKS)}; known: {known}')
    return LINKS[link]


def _minis(world: int, medium: str, home: str = "home", name: str = "mini") -> tuple[Node, ...]:
    links = (Attachment(medium),) if medium else ()
    return tuple(Node(f"{name}-{number}", MACHINE, home, links) for number in range(1, world + 1))


def _switched(world: int, rate_bps: float) -> Scenario:
    switch = Ethernet("switch", BitRate(rate_bps))
    return Scenario(f"{world}-macs-{rate_bps / 1e6:g}mbps", _minis(world, switch.name), media=(switch,))


def _ideal(world: int) -> Scenario:
    """Ports of 1 Gb/s and 0.1 ms, and no other effect: the textbook's machine."""
    return idealised(replace(_switched(world, 1e9), name=f"{world}-ideal-ports"))


def _wireless(world: int, standard: str) -> Scenario:
    air = access_point(standard)
    return Scenario(f"{world}-macs-{standard}", _minis(world, air.name), media=(air,))


def _cabled(world: int) -> Scenario:
    """A Thunderbolt cable from each to the next, around."""
    names = [node.name for node in _minis(world, "")]
    around = list(zip(names, [*names[1:], names[0]], strict=True))[: world if world > 2 else 1]
    desk = Thunderbolt(
        "desk", tuple(Cable(pair, THUNDERBOLT_BPS, THUNDERBOLT_BPS) for pair in around), basis=THUNDERBOLT_BASIS
    )
    return Scenario(f"{world}-macs-thunderbolt", _minis(world, ""), media=(desk,))


def _two_homes(world: int) -> Scenario:
    """The shipped scenario's lines, with equal Macs: half of them in each home."""
    shipped = load_scenario("two-homes-wan")
    near = (world + 1) // 2
    ours = _minis(near, "switch-a", "anna", "anna")
    theirs = _minis(world - near, "air-b", "ben", "ben")
    return replace(shipped, name=f"{world}-macs-two-homes", nodes=(*ours, *theirs))


LINKS: dict[str, Link] = {
    "1gbe": Link("1 Gb/s Ethernet", lambda world: _switched(world, 1e9)),
    "2.5gbe": Link("2.5 Gb/s Ethernet", lambda world: _switched(world, 2.5e9)),
    "10gbe": Link("10 Gb/s Ethernet", lambda world: _switched(world, 10e9)),
    "thunderbolt": Link("Thunderbolt ring", _cabled),
    "wifi5": Link("Wi-Fi 5", lambda world: _wireless(world, "wifi5")),
    "wifi6": Link("Wi-Fi 6", lambda world: _wireless(world, "wifi6")),
    "wifi6e": Link("Wi-Fi 6E", lambda world: _wireless(world, "wifi6e")),
    "two-homes": Link("two homes, internet", _two_homes),
    "ideal": Link("ideal 1 Gb/s ports", _ideal),
}


def _with_last(scenario: Scenario, **changes: object) -> Scenario:
    *others, last = scenario.nodes
    return replace(scenario, nodes=(*others, replace(last, **changes)))


def _uneven(scenario: Scenario) -> Scenario:
    """No two Macs are exactly alike: each of the first three of four is 1 % slower than the one before.

    Exactly equal ones all pull from a server at once, and then all push, so that its port is busy in one direction at a
    time; one that is a little slower ends that, and all would seem faster for it."""
    slower = tuple(
        _slowed(node.name, PositiveShare(1 - _APART * number))
        for number, node in enumerate(scenario.nodes[:-1])
        if number
    )
    return replace(scenario, faults=(*scenario.faults, *slower))


def _slowed(node: str, factor: PositiveShare) -> Throttle:
    return Throttle(at_s=Seconds(0), node=node, factor=factor, duration_s=FOR_EVER)


def _nearly_equal(scenario: Scenario) -> Scenario:
    last = _slowed(scenario.nodes[-1].name, PositiveShare(1 - _APART * (len(scenario.nodes) - 1)))
    uneven = _uneven(scenario)
    return replace(uneven, name=f"{scenario.name}-nearly-equal", faults=(*uneven.faults, last))


def _one_old(scenario: Scenario) -> Scenario:
    return replace(_uneven(_with_last(scenario, machine=OLD_MACHINE)), name=f"{scenario.name}-one-old")


def _one_throttled(scenario: Scenario) -> Scenario:
    hot, uneven = _slowed(scenario.nodes[-1].name, THROTTLED), _uneven(scenario)
    return replace(uneven, name=f"{scenario.name}-one-throttled", faults=(*uneven.faults, hot))


def _one_on_wifi(scenario: Scenario) -> Scenario:
    if not all(isinstance(medium, Ethernet) for medium in scenario.media):
        raise ConfigError('variant = "one-on-wifi": the others have to be on Ethernet')
    air: AnyMedium = access_point("wifi6")
    wireless = _uneven(_with_last(scenario, links=(Attachment(air.name),)))
    return replace(wireless, name=f"{scenario.name}-one-on-wifi", media=(*scenario.media, air))


VARIANTS: dict[str, Callable[[Scenario], Scenario]] = {
    "equal": lambda scenario: scenario,
    "nearly-equal": _nearly_equal,
    "one-old": _one_old,
    "one-throttled": _one_throttled,
    "one-on-wifi": _one_on_wifi,
}
"""What is different about the last Mac: an M1, one at 0.4 of its speed, or one that is on Wi-Fi 6. In all but the first
the others are 1 % apart, and with "nearly-equal" the last one is, too."""
