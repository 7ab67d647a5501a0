"""Homes on the switch of taps (`switch.py`): stations that share air, and two homes that meet over the internet.

Each exists twice, from the same nominal figures: as the plan of a switch, and as media and lines of a scenario.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import msgspec

from experiments.fidelity.switch import Air, Pipe, Plan
from hcsim.config import AnyMedium, Attachment, Ethernet, Tcp, Wan, Wifi
from hcsim.units import BitRate, Bytes, PositiveShare, Seconds, Share

_KB = 1 << 10
FRAME_BYTES, CARRIED_BYTES = 1514, 1448
"""A frame as the switch counts it, and what it carries of a stream."""
_AIR = "air"
_HOMES = ("here", "there")
_HEADERS = 0.95


class Place(NamedTuple):
    """Where a host is in a scenario: its home, and its link."""

    home: str
    link: Attachment


class Layout(NamedTuple):
    """The part of a scenario that is not its hosts."""

    media: tuple[AnyMedium, ...]
    wan: tuple[Wan, ...]
    places: tuple[Place, ...]
    ack_share: float = Tcp().ack_share


class SharedAir(msgspec.Struct, frozen=True):
    """Stations of one access point, the first of which is slower."""

    first_bps: float
    others_bps: float
    overhead_s: float = 150e-6
    """Of a transmission opportunity, as with Wi-Fi 5: DIFS 34 us, a backoff of 67 us, a preamble of 36 us, and an
    acknowledgement, some of which fall into the transmission of others."""
    aggregate_bytes: int = 32 * _KB
    latency_s: float = 1e-3
    jitter_s: float = 0.5e-3
    queue_bytes: int = 512 * _KB

    def rates_bps(self, hosts: int) -> tuple[float, ...]:
        return (self.first_bps, *(self.others_bps,) * (hosts - 1))

    def goodput_bps(self, rate_bps: float) -> float:
        """What a station with this rate has of the air when each transmission opportunity is full."""
        frames = self.aggregate_bytes // FRAME_BYTES
        return frames * CARRIED_BYTES * 8 / (self.overhead_s + frames * FRAME_BYTES * 8 / rate_bps)

    def least_s(self, size_bytes: float, hosts: int) -> float:
        """How long all hosts take at least to send so much each."""
        rates = [self.goodput_bps(rate) for rate in self.rates_bps(hosts)]
        return sum(2 * 8 * size_bytes / rate for rate in rates)

    def plan(self, hosts: int) -> Plan:
        """Each station is a node with one queue; the access point is one with a queue for each station."""
        rates = self.rates_bps(hosts)
        half_s = self.latency_s / 2
        up = [Pipe(rate, self.queue_bytes, half_s, air=0, node=node) for node, rate in enumerate(rates)]
        down = [Pipe(rate, self.queue_bytes, half_s, self.jitter_s, air=0, node=hosts) for rate in rates]
        routes = {(here, there): (here, hosts + there) for here, there in permutations(range(hosts), 2)}
        return Plan(hosts, (*up, *down), routes, (Air(self.overhead_s, self.aggregate_bytes),))

    def layout(self, hosts: int, extra_s: float, rate_factor: float) -> Layout:
        """Model the home. A frame crosses the air twice, and waits for two transmission opportunities."""
        rates = [BitRate(self.goodput_bps(rate) * rate_factor) for rate in self.rates_bps(hosts)]
        latency = Seconds(self.latency_s + 2 * self.overhead_s + extra_s)
        air = Wifi(
            _AIR, phy_rate_bps=max(rates), latency_s=latency, jitter_s=Seconds(self.jitter_s), loss=Share(0),
            efficiency=PositiveShare(1), gate=False,
        )  # fmt: skip
        return Layout((air,), (), tuple(Place("home", Attachment(_AIR, rate)) for rate in rates))


class TwoHomes(msgspec.Struct, frozen=True):
    """Two homes, each with half of the hosts on a switch and a line to the internet."""

    up_bps: float
    down_bps: float
    local_bps: float = 200e6
    latency_s: float = 7.5e-3
    """Of a line, one way."""
    jitter_s: float = 0.25e-3
    loss: float = 0.0
    buffer_bytes: int = 256 * _KB
    local_latency_s: float = 0.2e-3
    local_queue_bytes: int = 512 * _KB

    def least_s(self, size_bytes: float, hosts: int) -> float:
        """How long so much takes at least over a line."""
        return 8 * size_bytes / (self.up_bps * _HEADERS)

    def plan(self, hosts: int) -> Plan:
        """A port has a pipe in each direction, and so has a line."""
        homes = _homes(hosts)
        port = Pipe(self.local_bps, self.local_queue_bytes, self.local_latency_s / 2)
        lines = [
            Pipe(rate, self.buffer_bytes, self.latency_s, self.jitter_s, loss=self.loss)
            for rate in (self.up_bps, self.down_bps) for _ in _HOMES
        ]  # fmt: skip
        up, down = 2 * hosts, 2 * hosts + len(_HOMES)
        routes = {
            (here, there): (
                (here, hosts + there) if homes[here] == homes[there]
                else (here, up + homes[here], down + homes[there], hosts + there)
            )
            for here, there in permutations(range(hosts), 2)
        }  # fmt: skip
        return Plan(hosts, (*(port for _ in range(2 * hosts)), *lines), routes)

    def layout(self, hosts: int, extra_s: float, rate_factor: float) -> Layout:
        """Model the homes. What a message costs the hosts beside is part of each home's latency."""
        media = tuple(
            Ethernet(
                f"{home}-lan", BitRate(self.local_bps * rate_factor), home, Seconds(self.local_latency_s + extra_s)
            )
            for home in _HOMES
        )  # fmt: skip
        wan = tuple(
            Wan(
                home, BitRate(self.up_bps * rate_factor), BitRate(self.down_bps * rate_factor), Seconds(self.latency_s),
                Seconds(self.jitter_s), Share(self.loss), Bytes(self.buffer_bytes),
            )
            for home in _HOMES
        )  # fmt: skip
        return Layout(
            media, wan, tuple(Place(_HOMES[home], Attachment(f"{_HOMES[home]}-lan")) for home in _homes(hosts))
        )


def _homes(hosts: int) -> Sequence[int]:
    """Return the home of each host: the first half is in the first one."""
    return [int(number >= hosts // 2) for number in range(hosts)]
