"""The media of a home that follow from what its links were measured to carry.

- Two machines with a Thunderbolt bridge between them have a cable, whose two directions were measured.
- Stations of one access point share its air: a byte from one to the other takes 1/r of the sender's and 1/r of the
  receiver's time, so the rates of the stations are the least-squares solution of 1/R = 1/rᵢ + 1/rⱼ, and no less than
  what a station exchanges with a port both ways, where the port may be the slower one. Interfaces of an unknown kind
  that carry no more both ways than one way are taken for stations.
- All others are ports of a switch. A port sends and receives at the highest rate that it reached with any other.

The line rate is the one whose goodput, less the headers that the simulator subtracts, is the rate that was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from hcsim.config import AnyMedium, Cable, Ethernet, Machine, Scenario, Tcp, Thunderbolt, Wifi, parse_scenario
from hcsim.config.machine import Basis
from hcsim.config.scenario import Attachment
from hcsim.launch.virtual import simulate
from hcsim.runtime.host import Medium
from hcsim.twin.links import Surveyed, all_reduce_times
from hcsim.twin.timing import rounded
from hcsim.units import BitRate, Seconds, Share

SHARED = 1.2
"""The sum of the shares of their own rates that both directions of a pair reach at once: 1 where they share a medium, 2
where they do not."""
_NOTABLE = 0.1
"""A link that differs by more from what its medium says is worth a figure of its own, or a note."""
_NAMES = {Ethernet: "switch", Wifi: "air", Thunderbolt: "desk"}
_THUNDERBOLT_MTU = 9000
_MTU = 1500


class Fit(NamedTuple):
    """The media, and the links of each node to them."""

    media: tuple[AnyMedium, ...]
    links: dict[str, tuple[Attachment, ...]]
    notes: tuple[str, ...]
    """What the media cannot express."""


def fitted(
    found: Surveyed, names: Sequence[str], costs_s: Mapping[str, float], tcp: Tcp, basis: Basis, home: str
) -> Fit:
    """Return the media between the machines of these names, by rank. `costs_s` is what each machine's processor needs
    to send and to receive a small message, which is no latency of the line."""
    pairs = [*permutations(range(len(names)), 2)]
    cabled = [pair for pair in combinations(range(len(names)), 2) if _kind(found, *pair) is Medium.THUNDERBOLT]
    stations = [rank for rank in range(len(names)) if _is_station(found, rank, len(names))]
    bridged = [pair for pair in pairs if tuple(sorted(pair)) not in cabled]
    media: list[AnyMedium] = []
    links: dict[str, tuple[Attachment, ...]] = dict.fromkeys(names, ())
    wired = [rank for rank in range(len(names)) if rank not in stations and any(rank in pair for pair in bridged)]
    if wired:
        media.append(_switch(found, names, wired, bridged, costs_s, tcp, basis, home, links))
    if any(rank in pair for rank in stations for pair in bridged):
        media.append(_air(found, names, stations, bridged, costs_s, basis, home, links))
    if cabled:
        cables = tuple(_cable(found, names, pair, costs_s, tcp, basis) for pair in cabled)
        media.append(Thunderbolt(_NAMES[Thunderbolt], cables, basis=basis))
    notes = [
        f"{names[source]} → {names[target]} carries {_mbps(found.rate_Bps(source, target))} Mb/s, less than their ports"
        for source, target in bridged
        if source in wired and target in wired
        and found.rate_Bps(source, target) < (1 - _NOTABLE) * min(
            _best(found, bridged, source, 0, wired), _best(found, bridged, target, 1, wired))
    ]  # fmt: skip
    return Fit(tuple(media), links, tuple(notes))


def _mbps(rate_Bps: float) -> str:
    return f"{8 * rate_Bps / 1e6:.4g}"


def _kind(found: Surveyed, one: int, other: int) -> Medium | None:
    """Return the medium of the pair, if both ends know the same one."""
    media = {found.media_of(one, other), found.media_of(other, one)}
    return Medium(media.pop()) if len(media) == 1 and "" not in media else None


def _is_station(found: Surveyed, rank: int, size: int) -> bool:
    """Return whether the rank is on Wi-Fi, or on a medium of unknown kind that behaves so towards all others."""
    media = [found.media_of(rank, other) for other in range(size) if other != rank]
    if any(medium not in ("", Medium.UNKNOWN.value) for medium in media):
        return Medium.WIFI.value in media
    return all(_shares(found, rank, other) for other in range(size) if other != rank)


def _shares(found: Surveyed, one: int, other: int) -> bool:
    return (
        sum(
            flow.rate_Bps / found.rate_Bps(flow.source, flow.target)
            for flow in found.flows
            if flow.kind == "both ways" and {flow.source, flow.target} == {one, other}
        )
        < SHARED
    )


def _both_Bps(found: Surveyed, one: int, other: int) -> float:
    """Return what the two directions of a pair carry at once."""
    return sum(
        flow.rate_Bps for flow in found.flows if flow.kind == "both ways" and {flow.source, flow.target} == {one, other}
    )


def _best(found: Surveyed, pairs: Sequence[tuple[int, int]], rank: int, end: int, among: Sequence[int]) -> float:
    """Return the highest rate of all pairs in which the rank is at this end."""
    rates = [found.rate_Bps(*pair) for pair in pairs if pair[end] == rank and pair[1 - end] in among]
    rates = rates or [found.rate_Bps(*pair) for pair in pairs if pair[end] == rank]
    return max(rates)


def line_rate(goodput_Bps: float, mtu: int, tcp: Tcp) -> BitRate:
    """Return the line rate that leaves this goodput."""
    headers = (mtu + tcp.framing_bytes) / (mtu - tcp.header_bytes) if tcp.headers else 1.0
    return BitRate(rounded(8 * goodput_Bps * headers))


class Delay(NamedTuple):
    """What a line adds, one way."""

    latency_s: float
    jitter_s: float


def delay_of(found: Surveyed, names: Sequence[str], pair: tuple[int, int], costs_s: Mapping[str, float]) -> Delay:
    """Return the delay between two ranks. Where it varies by more than itself, the shortest counts, and jitter comes
    on top; otherwise the median."""
    trips_s = [trip_s for call in found.calls if {call.source, call.target} == {*pair} for trip_s in call.idle_s]
    least_s, middle_s = min(trips_s), statistics.median(trips_s)
    varies = middle_s > 1.5 * least_s and middle_s - least_s > 0.5e-3
    own_s = sum(costs_s.get(names[rank], 0.0) for rank in pair)
    latency_s = max((least_s if varies else middle_s) - own_s, least_s / 10) / 2
    return Delay(latency_s, (statistics.fmean(trips_s) - least_s) / 2 if varies else 0.0)


def _middle_delay(
    found: Surveyed, names: Sequence[str], pairs: Sequence[tuple[int, int]], costs_s: Mapping[str, float]
) -> Delay:
    delays = [delay_of(found, names, pair, costs_s) for pair in pairs]
    return Delay(*(rounded(statistics.median(column), 3) for column in zip(*delays, strict=True)))


def _switch(
    found: Surveyed,
    names: Sequence[str],
    ranks: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    costs_s: Mapping[str, float],
    tcp: Tcp,
    basis: Basis,
    home: str,
    links: dict[str, tuple[Attachment, ...]],
) -> Ethernet:
    among = [pair for pair in pairs if {*pair} <= {*ranks}] or [pair for pair in pairs if {*pair} & {*ranks}]
    delay = _middle_delay(found, names, among, costs_s)
    rates = {
        rank: tuple(line_rate(_best(found, pairs, rank, end, ranks), _MTU, tcp) for end in (0, 1)) for rank in ranks
    }
    for rank, (up_bps, down_bps) in rates.items():
        spreads = [flow.spread for flow in found.flows if flow.kind == "alone" and rank in (flow.source, flow.target)]
        theirs = replace(basis, spread=rounded(statistics.median(spreads), 2))
        link = Attachment(_NAMES[Ethernet], up_bps=up_bps, down_bps=down_bps, basis=theirs)
        links[names[rank]] = (*links[names[rank]], link)
    fastest = max(rate for both in rates.values() for rate in both)
    return Ethernet(
        _NAMES[Ethernet], fastest, home, Seconds(delay.latency_s), Seconds(delay.jitter_s), mtu=_MTU, basis=basis
    )


def _air(
    found: Surveyed,
    names: Sequence[str],
    stations: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    costs_s: Mapping[str, float],
    basis: Basis,
    home: str,
    links: dict[str, tuple[Attachment, ...]],
) -> Wifi:
    text = 'name = "usual"\n[[medium]]\nkind = "wifi"\nname = "air"'
    usual = parse_scenario(text, "usual").media[0]
    assert isinstance(usual, Wifi)
    among = [pair for pair in pairs if {*pair} & {*stations}]
    rows = np.array([[float(rank in pair) for rank in stations] for pair in among])
    times = np.linalg.lstsq(rows, np.array([1 / found.rate_Bps(*pair) for pair in among]), rcond=None)[0]
    least = min(1 / found.rate_Bps(*pair) for pair in among) / 10
    goodputs_Bps = [
        max(
            [
                1 / max(float(each), least),
                *(_both_Bps(found, *pair) for pair in among if rank in pair and not {*pair} <= {*stations}),
            ]
        )
        for rank, each in zip(stations, times, strict=True)
    ]
    rates = [rounded(8 * each / usual.efficiency) for each in goodputs_Bps]
    for rank, rate_bps in zip(stations, rates, strict=True):
        links[names[rank]] = (*links[names[rank]], Attachment(usual.name, BitRate(rate_bps), basis=basis))
    delay = _middle_delay(found, names, among, costs_s)
    return replace(
        usual,
        home=home,
        phy_rate_bps=BitRate(max(rates)),
        latency_s=Seconds(delay.latency_s),
        jitter_s=Seconds(delay.jitter_s),
        loss=Share(0),
        basis=basis,
    )


def _cable(
    found: Surveyed,
    names: Sequence[str],
    pair: tuple[int, int],
    costs_s: Mapping[str, float],
    tcp: Tcp,
    basis: Basis,
) -> Cable:
    one, other = pair
    there_bps, back_bps = (line_rate(found.rate_Bps(*each), _THUNDERBOLT_MTU, tcp) for each in (pair, (other, one)))
    latency_s = rounded(delay_of(found, names, pair, costs_s).latency_s, 3)
    return Cable((names[one], names[other]), there_bps, back_bps, Seconds(latency_s), basis)


def message_cost_s(machine: Machine | str) -> float:
    """Return what a machine's processor needs to send and to receive a small message; 0 if it was not measured."""
    messages = machine.messages if isinstance(machine, Machine) else None
    return 0.0 if messages is None else messages.send_s + messages.receive_s


def predicted_s(twin: Scenario, names: Sequence[str], size_bytes: int) -> float:
    """Return how long the all-reduce takes by the twin."""
    nodes = {node.name: node for node in twin.nodes}
    scenario = replace(twin, nodes=tuple(nodes[name] for name in names), faults=())
    times: list[tuple[float, ...]] = simulate(scenario, lambda group: all_reduce_times(group, size_bytes)).values()
    return float(statistics.median([max(each) for each in zip(*times, strict=True)]))
