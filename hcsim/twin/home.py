"""The media of homes that follow from what the links between machines were measured to carry.

- Machines that are far from each other are in different homes, with lines to the internet (see `lines.py`).
- Two machines with a Thunderbolt bridge between them have a cable, whose two directions were measured.
- Stations of one access point share its air: a byte from one to the other takes 1/r of the sender's and 1/r of the
  receiver's time, so the rates of the stations are the least-squares solution of 1/R = 1/rᵢ + 1/rⱼ, and no less than
  what a station exchanges with a port both ways, where the port may be the slower one. Interfaces of an unknown kind
  that carry no more both ways than one way are taken for stations.
- All others are ports of a switch. A port sends and receives at the highest rate that it reached with any other.

The line rate is the one whose goodput, less the headers that the simulator subtracts, is the rate that was measured.
Delay, loss, stalls and queues of each medium are those of the pairs on it (see `quality.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from hcsim.config import AnyMedium, Cable, Ethernet, Scenario, Thunderbolt, Wan, Wifi, parse_scenario
from hcsim.config.machine import Basis
from hcsim.config.scenario import Attachment
from hcsim.launch.virtual import simulate
from hcsim.runtime.host import Medium
from hcsim.twin.lines import FAR_S, Home, homes_of, line_rate, lines
from hcsim.twin.links import all_reduce_times
from hcsim.twin.quality import (
    Delay,
    Pair,
    Survey,
    common_queue,
    delay_of,
    losses,
    queue_basis,
    queue_of_port,
    stalls_of,
)
from hcsim.twin.timing import rounded
from hcsim.units import BitRate, PositiveBytes, PositiveSeconds, Seconds, Share

SHARED = 1.2
"""The sum of the shares of their own rates that both directions of a pair reach at once: 1 where they share a medium, 2
where they do not."""
_NOTABLE = 0.1
"""A link that differs by more from what its medium says is worth a figure of its own, or a note."""
_UNLIKE_QUEUES = 1.5
_UNFAIR = 0.6
"""Of two flows into one port, a larger share than this is worth a note."""
_NAMES = {Ethernet: "switch", Wifi: "air", Thunderbolt: "desk"}
_THUNDERBOLT_MTU = 9000
_MTU = 1500
_USUAL_RATE = BitRate(1e9)
_LONG_ENOUGH = 3.0
"""After so many of its usual intervals without a stall, a medium has none."""


class Fit(NamedTuple):
    """The media, and the links of each node to them."""

    media: tuple[AnyMedium, ...]
    links: dict[str, tuple[Attachment, ...]]
    notes: tuple[str, ...]
    """What the media cannot express, and what was concluded."""
    wan: tuple[Wan, ...] = ()
    homes: Mapping[str, str] = {}
    """The home of each node."""


def fitted(survey: Survey, known: Mapping[str, str]) -> Fit:
    """Return the media between the machines. `known` has the homes of machines that are known already."""
    homes = homes_of(survey, known)
    loss = losses(survey.found, _loss_shares(survey, homes))
    parts = [_HomeFit(survey, home, loss, f"{home.name}-" if number else "") for number, home in enumerate(homes)]
    wan = lines(survey, homes, {part.home.name: part.delay for part in parts}, loss) if len(homes) > 1 else []
    notes = [note for part in parts for note in part.notes]
    if wan:
        told = " | ".join(", ".join(survey.names[rank] for rank in home.ranks) for home in homes)
        notes.append(f"round trips of {FAR_S * 1e3:g} ms and more: taken for {len(homes)} homes, {told}")
    return Fit(
        tuple(medium for part in parts for medium in part.media),
        {name: links for part in parts for name, links in part.links.items()},
        tuple(notes),
        tuple(wan),
        {survey.names[rank]: home.name for home in homes for rank in home.ranks},
    )


def is_station(survey: Survey, rank: int, ranks: Sequence[int]) -> bool:
    """Return whether the rank is on Wi-Fi, or on a medium of unknown kind that behaves so towards all others of its
    home."""
    others = [other for other in range(len(survey.names)) if other != rank]
    media = [survey.found.media_of(rank, other) for other in others]
    if any(medium not in ("", Medium.UNKNOWN.value) for medium in media):
        return Medium.WIFI.value in media
    near = [other for other in ranks if other != rank]
    return bool(near) and all(_shares(survey, rank, other) for other in near)


def _loss_shares(survey: Survey, homes: Sequence[Home]) -> dict[Pair, dict[str, float]]:
    """Return how much of its loss each medium, or line, adds to that of each pair: media half at each end."""
    home_of = {rank: home for home in homes for rank in home.ranks}
    air = {rank: is_station(survey, rank, home_of[rank].ranks) for rank in home_of}
    shares: dict[Pair, dict[str, float]] = {}
    for pair in permutations(home_of, 2):
        if survey.kind(*pair) is Medium.THUNDERBOLT:
            continue
        ends = {home_of[rank].name for rank in pair}
        each = dict.fromkeys(sorted(ends), 1.0) if len(ends) > 1 else {}
        for rank in pair if len(ends) == 1 else ():
            name = _loss_key(home_of[rank].name, air=air[rank])
            each[name] = each.get(name, 0.0) + 0.5
        shares[pair] = each
    return shares


def _loss_key(home: str, *, air: bool) -> str:
    return f"{home}{' air' if air else ' switch'}"


def _shares(survey: Survey, one: int, other: int) -> bool:
    found = survey.found
    return (
        sum(
            flow.rate_Bps / found.rate_Bps(flow.source, flow.target)
            for flow in found.flows
            if flow.kind == "both ways" and {flow.source, flow.target} == {one, other}
        )
        < SHARED
    )


class _HomeFit:
    """The media of one home."""

    def __init__(self, survey: Survey, home: Home, loss: Mapping[str, float], prefix: str) -> None:
        self.home = home
        self.media: list[AnyMedium] = []
        self.links: dict[str, tuple[Attachment, ...]] = {survey.names[rank]: () for rank in home.ranks}
        self.notes: list[str] = []
        self.delay = Delay(0.0, 0.0)
        """Of the medium that leads out of the home."""
        self._survey = survey
        self._loss = loss
        self._prefix = prefix
        ranks = home.ranks
        cabled = [pair for pair in combinations(ranks, 2) if survey.kind(*pair) is Medium.THUNDERBOLT]
        self._pairs = [pair for pair in permutations(ranks, 2) if tuple(sorted(pair)) not in cabled]
        self._stations = [rank for rank in ranks if is_station(survey, rank, ranks)]
        self._wired = [rank for rank in ranks if rank not in self._stations]
        bridged = {rank for pair in self._pairs for rank in pair}
        if not bridged and len(survey.names) > len(ranks):
            self._unmeasured()
        if bridged.intersection(self._wired):
            self._switch()
        if bridged.intersection(self._stations):
            self._air()
        if cabled:
            cables = tuple(self._cable(pair) for pair in cabled)
            self.media.append(Thunderbolt(self._name(Thunderbolt), cables, basis=survey.basis))
        self._note_slow_pairs()

    def _name(self, kind: type[AnyMedium]) -> str:
        return self._prefix + _NAMES[kind]

    def _join(self, rank: int, link: Attachment) -> None:
        name = self._survey.names[rank]
        self.links[name] = (*self.links[name], link)

    def _unmeasured(self) -> None:
        """Between machines of other homes there is only the line to measure: the medium at this end is a usual one."""
        survey, [*ranks] = self._survey, self.home.ranks
        others = [rank for rank in range(len(survey.names)) if rank not in ranks]
        rates = [survey.found.rate_Bps(*pair) for rank in ranks for o in others for pair in ((rank, o), (o, rank))]
        basis = Basis("estimated", "a usual one: no other machine of this home was measured")
        medium: Wifi | Ethernet
        if self._stations:
            medium = replace(_usual_wifi(), name=self._name(Wifi), home=self.home.name, loss=Share(0), basis=basis)
        else:
            rate_bps = max(line_rate(max(rates), _MTU, survey), _USUAL_RATE)
            medium = Ethernet(self._name(Ethernet), rate_bps, self.home.name, basis=basis)
        self.media.append(medium)
        self.delay = Delay(medium.latency_s, medium.jitter_s)
        for rank in ranks:
            self._join(rank, Attachment(medium.name))

    def _switch(self) -> None:
        survey, ranks, name = self._survey, self._wired, self._name(Ethernet)
        among = [pair for pair in self._pairs if {*pair} <= {*ranks}]
        self.delay = self._middle_delay(among or [pair for pair in self._pairs if {*pair} & {*ranks}])
        rates = {rank: tuple(line_rate(self._best(rank, end), _MTU, survey) for end in (0, 1)) for rank in ranks}
        alone = [flow for flow in survey.found.flows if flow.kind == "alone"]
        for rank, (up_bps, down_bps) in rates.items():
            spreads = [flow.spread for flow in alone if rank in (flow.source, flow.target)]
            theirs = replace(survey.basis, spread=rounded(statistics.median(spreads), 2))
            self._join(rank, Attachment(name, up_bps=up_bps, down_bps=down_bps, basis=theirs))
        queues = {rank: queue_of_port(survey, rank, ranks) for rank in ranks}
        queue = common_queue([each for each in queues.values() if each is not None])
        if queue is not None:
            self.notes += self._notes_of_queues({rank: each.size_bytes for rank, each in queues.items() if each})
        self.notes += self._unfair_ports()
        self.media.append(
            Ethernet(
                name, max(rate for both in rates.values() for rate in both), self.home.name,
                Seconds(self.delay.latency_s), Seconds(self.delay.jitter_s), self._loss_of(air=False), _MTU,
                None if queue is None else PositiveBytes(round(rounded(queue.size_bytes, 3))),
                None if queue is None else queue_basis(queue, survey.basis), survey.basis,
            )
        )  # fmt: skip

    def _loss_of(self, *, air: bool) -> Share:
        return Share(rounded(self._loss.get(_loss_key(self.home.name, air=air), 0.0), 2))

    def _best(self, rank: int, end: int) -> float:
        """Return the highest rate of all pairs in which the rank is at this end."""
        pairs = [pair for pair in self._pairs if pair[end] == rank]
        return max(
            self._survey.rate_Bps(*pair) for pair in [pair for pair in pairs if pair[1 - end] in self._wired] or pairs
        )

    def _middle_delay(self, pairs: Sequence[Pair]) -> Delay:
        delays = [delay_of(self._survey, pair) for pair in pairs]
        return Delay(*(rounded(statistics.median(column), 3) for column in zip(*delays, strict=True)))

    def _notes_of_queues(self, sizes: Mapping[int, float]) -> list[str]:
        low, high = (choose(sizes, key=lambda rank: sizes[rank]) for choose in (min, max))
        if sizes[high] < _UNLIKE_QUEUES * sizes[low]:
            return []
        one, other = (f"{self._survey.names[rank]} has {sizes[rank] / 1024:.0f} KiB" for rank in (low, high))
        return [f"the ports' queues differ: that to {one}, that to {other}"]

    def _unfair_ports(self) -> list[str]:
        notes, found = [], self._survey.found
        for step in sorted({flow.step for flow in found.flows if flow.kind == "two into one"}):
            flows = [flow for flow in found.flows if flow.step == step]
            total_Bps = sum(flow.rate_Bps for flow in flows)
            most = max(flows, key=lambda flow: flow.rate_Bps)
            is_ours = all(rank in self._wired for flow in flows for rank in (flow.source, flow.target))
            limits = min(found.rate_Bps(flow.source, flow.target) for flow in flows) / total_Bps
            if is_ours and most.rate_Bps > _UNFAIR * total_Bps and limits > 1 - _UNFAIR:
                name, target = (self._survey.names[rank] for rank in (most.source, most.target))
                notes.append(f"of two flows into {target}, {name}'s takes {most.rate_Bps / total_Bps:.0%}")
        return notes

    def _air(self) -> None:
        survey, stations, usual = self._survey, self._stations, _usual_wifi()
        among = [pair for pair in self._pairs if {*pair} & {*stations}]
        rows = np.array([[float(rank in pair) for rank in stations] for pair in among])
        times = np.linalg.lstsq(rows, np.array([1 / survey.rate_Bps(*pair) for pair in among]), rcond=None)[0]
        least = min(1 / survey.rate_Bps(*pair) for pair in among) / 10
        goodputs_Bps = [
            max(
                [
                    1 / max(float(each), least),
                    *(_both_Bps(survey, *pair) for pair in among if rank in pair and not {*pair} <= {*stations}),
                ]
            )
            for rank, each in zip(stations, times, strict=True)
        ]
        rates = [rounded(8 * each / usual.efficiency) for each in goodputs_Bps]
        for rank, rate_bps in zip(stations, rates, strict=True):
            self._join(rank, Attachment(self._name(Wifi), BitRate(rate_bps), basis=survey.basis))
        delay = self._middle_delay(among)
        self.delay = self.delay if self._wired else delay
        medium = replace(
            usual,
            name=self._name(Wifi),
            home=self.home.name,
            phy_rate_bps=BitRate(max(rates)),
            latency_s=Seconds(delay.latency_s),
            jitter_s=Seconds(delay.jitter_s),
            loss=self._loss_of(air=True),
            basis=survey.basis,
        )
        self.media.append(self._with_gate(medium, among))

    def _with_gate(self, medium: Wifi, among: Sequence[Pair]) -> Wifi:
        """Return the medium with the gate that was seen. One that would have closed several times and did not is none;
        without time enough to tell, it is as usual."""
        stalls = stalls_of(self._survey, among)
        if stalls.number >= 2:
            self.notes.append(
                f"{medium.name}: {stalls.number} stalls within {stalls.watched_s:.0f} s, "
                f"of {1e3 * stalls.shortest_s:.0f} to {1e3 * stalls.longest_s:.0f} ms"
            )
            return replace(
                medium,
                gate_every_s=PositiveSeconds(rounded(stalls.watched_s / stalls.number, 2)),
                gate_min_s=Seconds(rounded(stalls.shortest_s, 2)),
                gate_max_s=Seconds(rounded(stalls.longest_s, 2)),
            )
        if not stalls.number and stalls.watched_s > _LONG_ENOUGH * medium.gate_every_s:
            return replace(medium, gate=False)
        return medium

    def _cable(self, pair: Pair) -> Cable:
        survey, (one, other) = self._survey, pair
        there_bps, back_bps = (
            line_rate(survey.found.rate_Bps(*each), _THUNDERBOLT_MTU, survey) for each in (pair, (other, one))
        )
        latency_s = rounded(delay_of(survey, pair).latency_s, 3)
        return Cable((survey.names[one], survey.names[other]), there_bps, back_bps, Seconds(latency_s), survey.basis)

    def _note_slow_pairs(self) -> None:
        names = self._survey.names
        for source, target in self._pairs:
            if source in self._wired and target in self._wired:
                rate_Bps = self._survey.rate_Bps(source, target)
                if rate_Bps < (1 - _NOTABLE) * min(self._best(source, 0), self._best(target, 1)):
                    self.notes.append(
                        f"{names[source]} → {names[target]} carries {8 * rate_Bps / 1e6:.4g} Mb/s, "
                        "less than their ports"
                    )


def _both_Bps(survey: Survey, one: int, other: int) -> float:
    """Return what the two directions of a pair carry at once."""
    flows = (flow for flow in survey.found.flows if flow.kind == "both ways")
    return sum(flow.rate_Bps for flow in flows if {flow.source, flow.target} == {one, other})


def _usual_wifi() -> Wifi:
    usual = parse_scenario('name = "usual"\n[[medium]]\nkind = "wifi"\nname = "air"', "usual").media[0]
    assert isinstance(usual, Wifi)
    return usual


def predicted_s(twin: Scenario, names: Sequence[str], size_bytes: int) -> float:
    """Return how long the all-reduce takes by the twin."""
    nodes = {node.name: node for node in twin.nodes}
    scenario = replace(twin, nodes=tuple(nodes[name] for name in names), faults=())
    times: list[tuple[float, ...]] = simulate(scenario, lambda group: all_reduce_times(group, size_bytes)).values()
    return float(statistics.median([max(each) for each in zip(*times, strict=True)]))
