"""The clusters that studies compare: five homes, made from the shipped scenarios, and ideal switches."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from hcsim.config import Attachment, Cable, Ethernet, Node, Scenario, Thunderbolt, idealised, load_scenario
from hcsim.units import BitRate

FLAT = ("ring", "tree", "centralized", "recursive_doubling", "halving_doubling", "direct")
THUNDERBOLT_BPS = BitRate(16.4e9)
"""TCP over a Thunderbolt 4 bridge, in the faster direction of a measured pair."""


class Cluster(msgspec.Struct, frozen=True):
    """One place to measure at."""

    title: str
    scenario: Scenario
    algorithms: tuple[str, ...] = FLAT
    groups: tuple[tuple[int, ...], ...] = ()
    alpha_beta: tuple[float, float] | None = None
    """Latency in seconds and bytes per second, where links are uniform and nothing else takes time."""

    @property
    def ranks(self) -> int:
        """How many nodes it has."""
        return len(self.scenario.nodes)


def homes() -> list[Cluster]:
    """Five kinds of link."""
    gigabit, eight = load_scenario("four-macs-1gbe"), load_scenario("eight-macs-2.5gbe")
    wifi, two_homes = load_scenario("two-macs-wifi"), load_scenario("two-homes-wan")
    minis = _copies(eight.nodes[1], "mini", 8)
    laptops = _copies(wifi.nodes[0], "air", 4)
    return [
        Cluster("4 Macs, 1 Gb/s Ethernet", gigabit),
        Cluster("8 Macs, 2.5 Gb/s Ethernet", replace(eight, name="eight-equal-macs-2.5gbe", nodes=minis)),
        Cluster("4 Macs, Thunderbolt ring", cabled_ring(4)),
        Cluster("4 Macs, one Wi-Fi 6", replace(wifi, name="four-macs-wifi", nodes=laptops)),
        Cluster("2 homes, 2 Macs each, internet", two_homes, (*FLAT, "hierarchical"), ((0, 1), (2, 3))),
    ]


def ideal(ports: int, algorithms: tuple[str, ...]) -> Cluster:
    """Ports of 1 Gb/s and 0.1 ms, and no other effect: the textbook's machine."""
    gigabit = load_scenario("four-macs-1gbe")
    nodes = _copies(gigabit.nodes[0], "port", ports)
    scenario = idealised(replace(gigabit, name=f"{ports}-ideal-ports", nodes=nodes))
    link = scenario.media[0]
    assert isinstance(link, Ethernet)
    return Cluster(f"{ports} ideal ports", scenario, algorithms, alpha_beta=(link.latency_s, link.rate_bps / 8))


def cabled_ring(count: int) -> Scenario:
    """Macs with a Thunderbolt cable from each to the next."""
    names = [f"mini-{number}" for number in range(1, count + 1)]
    around = zip(names, [*names[1:], names[0]], strict=True)
    desk = Thunderbolt("desk", tuple(Cable(pair, THUNDERBOLT_BPS, THUNDERBOLT_BPS) for pair in around))
    nodes = tuple(Node(name, "M4", "home", (Attachment(desk.name),)) for name in names)
    return Scenario(f"{count}-macs-thunderbolt", nodes, media=(desk,))


def _copies(node: Node, name: str, count: int) -> tuple[Node, ...]:
    return tuple(replace(node, name=f"{name}-{number}") for number in range(1, count + 1))
