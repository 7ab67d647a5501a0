"""Homes that exist twice: as network namespaces with shaped ports, and as scenarios of the simulator.

A port is shaped in both directions: where the machine sends, and where the switch sends to it. Homes with shared air or
lines to the internet are on a switch of our own (`emulated.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from experiments.fidelity.emulated import Layout, Place, SharedAir, TwoHomes
from experiments.fidelity.switch import Station, switched
from hcsim.config import Attachment, Ethernet, Machine, Node, Processor, Scenario, Tcp
from hcsim.config.check import complete
from hcsim.units import BitRate, Bytes, PositiveBytes, Seconds, Share
from tests.real.namespaces import PEAK, Port, lan

MBPS = 1e6
MTU = 1500
FRAMING_BYTES = 14
"""What a token bucket counts of a frame beside its IP packet; a wire has 24 more (preamble, checksum, gap)."""

WIRE = BitRate(20e9)
"""What passes between two namespaces where no port limits it."""
_HEADERS = 0.95

PROCESSOR = "cores"


class Medium(msgspec.Struct, frozen=True):
    """The ports of a switch."""

    first_bps: float
    """Of the first machine."""
    others_bps: float
    queue_bytes: int = 512 << 10
    """What fits into the queue in front of a port; what comes then is dropped."""

    def rates_bps(self, hosts: int) -> tuple[float, ...]:
        return (self.first_bps, *(self.others_bps,) * (hosts - 1))

    def least_s(self, size_bytes: float, hosts: int) -> float:
        """How long so much takes at least through the slowest port."""
        return 8 * size_bytes / (min(self.rates_bps(hosts)) * _HEADERS)

    def port(self, rate_bps: float) -> Port:
        return Port(round(rate_bps / 1e3), self.queue_bytes, segments=_segments(rate_bps))

    def layout(self, hosts: int, extra_s: float, rate_factor: float) -> Layout:
        """Model the switch, whose latency is all that a message needs beside its bytes, and the token buckets of its
        ports. An acknowledgement comes for every other piece that a port hands over, however many segments it has."""
        switch = Ethernet("switch", WIRE, latency_s=Seconds(extra_s), queue_bytes=PositiveBytes(self.queue_bytes))
        places = tuple(Place("home", self._attachment(rate, rate_factor)) for rate in self.rates_bps(hosts))
        piece_bytes = self.port(min(self.rates_bps(hosts))).piece_bytes
        return Layout((switch,), (), places, (Tcp().header_bytes + FRAMING_BYTES) / (2 * piece_bytes))

    def _attachment(self, rate_bps: float, rate_factor: float) -> Attachment:
        port = self.port(rate_bps)
        return Attachment(
            "switch", BitRate(rate_bps * rate_factor), burst_bytes=Bytes(port.burst_bytes),
            peak_bps=BitRate(rate_bps * PEAK), peak_burst_bytes=Bytes(port.piece_bytes),
        )  # fmt: skip


WIRED = {
    "100mb": Medium(100 * MBPS, 100 * MBPS),
    "1gb": Medium(1000 * MBPS, 1000 * MBPS),
    "mixed": Medium(100 * MBPS, 1000 * MBPS),
}
EMULATED = {
    "air": SharedAir(100 * MBPS, 300 * MBPS),
    "wan": TwoHomes(20 * MBPS, 50 * MBPS),
}
MEDIA: dict[str, Medium | SharedAir | TwoHomes] = {**WIRED, **EMULATED}
CONGESTION: Literal["cubic"] = "cubic"
"""Of all connections, as on a Mac."""


def _segments(rate_bps: float) -> int:
    """One where the processor can handle each by itself; otherwise so many that it is not what limits a port."""
    return max(1, round(11 * rate_bps / (1000 * MBPS)))


class Network(msgspec.Struct, frozen=True):
    """What is calibrated of a medium."""

    latency_s: float = 50e-6
    """In emulated homes, beyond the latency that they were made with."""
    rate_factor: float = 1.0
    """How much of its nominal rate a port has."""
    cores: int = 2
    """Not calibrated: those of the computer that the homes are on, which all hosts share."""


@contextmanager
def built(medium: str, hosts: int, folder: Path) -> Iterator[Sequence[Station]]:
    """The home of network namespaces."""
    shape = MEDIA[medium]
    if not isinstance(shape, Medium):
        with switched(shape.plan(hosts), folder, CONGESTION) as stations:
            yield stations
        return
    with lan(folder, names(hosts)) as machines:
        for machine, rate_bps in zip(machines, shape.rates_bps(hosts), strict=True):
            machine.shape(shape.port(rate_bps))
            machine.control_congestion(CONGESTION)
        yield [Station(machine.ip, machine.prefix) for machine in machines]


def modelled(medium: str, hosts: int, network: Network, machine: Machine, *, tls: bool = False) -> Scenario:
    """The same home in the simulator. All of its machines share the cores of this one."""
    layout = MEDIA[medium].layout(hosts, network.latency_s, network.rate_factor)
    nodes = tuple(
        Node(name, machine, place.home, (place.link,), processor=PROCESSOR)
        for name, place in zip(names(hosts), layout.places, strict=True)
    )
    tcp = Tcp(
        framing_bytes=Bytes(FRAMING_BYTES), ack_share=Share(layout.ack_share), tls=tls, piggyback=True, autotune=True,
        congestion=CONGESTION, loss_model=CONGESTION if medium in EMULATED else "bbr",
    )  # fmt: skip
    scenario = Scenario(
        f"{medium}-{hosts}", nodes, processors=(Processor(PROCESSOR, network.cores),), media=layout.media,
        wan=layout.wan, tcp=tcp,
    )  # fmt: skip
    return complete(scenario)


def names(hosts: int) -> list[str]:
    return [f"m{number}" for number in range(hosts)]
