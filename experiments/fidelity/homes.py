"""Homes that exist twice: as network namespaces with shaped ports, and as scenarios of the simulator.

A port is shaped in both directions: where the machine sends, and where the switch sends to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hcsim.config import Attachment, Ethernet, Machine, Node, Processor, Scenario, Tcp
from hcsim.config.check import complete
from hcsim.units import BitRate, Bytes, Seconds, Share
from tests.real.namespaces import PEAK, Lan, Port, lan

MBPS = 1e6
MTU = 1500
WIRE = BitRate(20e9)
"""What passes between two namespaces where no port limits it."""
FRAMING_BYTES = 14
"""What a token bucket counts of a frame beside its IP packet; a wire has 24 more (preamble, checksum, gap)."""

CORES = 16
"""Of the machine that the cells of `results/` were measured on."""
PROCESSOR = Processor("cores", CORES)


class Medium(msgspec.Struct, frozen=True):
    """The ports of a switch."""

    first_bps: float
    """Of the first machine."""
    others_bps: float
    queue_bytes: int = 512 << 10
    """What fits into the queue in front of a port; what comes then is dropped."""

    def rates_bps(self, hosts: int) -> tuple[float, ...]:
        return (self.first_bps, *(self.others_bps,) * (hosts - 1))


MEDIA = {
    "100mb": Medium(100 * MBPS, 100 * MBPS),
    "1gb": Medium(1000 * MBPS, 1000 * MBPS),
    "mixed": Medium(100 * MBPS, 1000 * MBPS),
}


def _segments(rate_bps: float) -> int:
    """One where the processor can handle each by itself; otherwise so many that it is not what limits a port."""
    return max(1, round(11 * rate_bps / (1000 * MBPS)))


def _port(rate_bps: float, queue_bytes: int) -> Port:
    return Port(round(rate_bps / 1e3), queue_bytes, segments=_segments(rate_bps))


def _ack_share(rate_bps: float) -> float:
    """An acknowledgement comes for every other piece that a port hands over, however many segments it has."""
    tcp = Tcp()
    return (tcp.header_bytes + FRAMING_BYTES) / (2 * _port(rate_bps, 0).piece_bytes)


class Network(msgspec.Struct, frozen=True):
    """What is calibrated of a medium."""

    latency_s: float = 50e-6
    rate_factor: float = 1.0
    """How much of its nominal rate a port has."""


@contextmanager
def built(medium: str, hosts: int, folder: Path) -> Iterator[Lan]:
    """The home of network namespaces."""
    shape = MEDIA[medium]
    with lan(folder, names(hosts)) as machines:
        for machine, rate_bps in zip(machines, shape.rates_bps(hosts), strict=True):
            machine.shape(_port(rate_bps, shape.queue_bytes))
        yield machines


def modelled(medium: str, hosts: int, network: Network, machine: Machine, *, tls: bool = False) -> Scenario:
    """The same home in the simulator. All of its machines share the cores of this one."""
    shape = MEDIA[medium]
    rates = shape.rates_bps(hosts)
    switch = Ethernet("switch", WIRE, latency_s=Seconds(network.latency_s))
    nodes = tuple(
        Node(name, machine, "home", (_attachment(rate, network),), processor=PROCESSOR.name)
        for name, rate in zip(names(hosts), rates, strict=True)
    )
    tcp = Tcp(
        framing_bytes=Bytes(FRAMING_BYTES), ack_share=Share(_ack_share(min(rates))), tls=tls, piggyback=True,
        autotune=True,
    )  # fmt: skip
    return complete(Scenario(f"{medium}-{hosts}", nodes, processors=(PROCESSOR,), media=(switch,), tcp=tcp))


def _attachment(rate_bps: float, network: Network) -> Attachment:
    """The port as its token buckets shape it."""
    port = _port(rate_bps, 0)
    return Attachment(
        "switch", BitRate(rate_bps * network.rate_factor), burst_bytes=Bytes(port.burst_bytes),
        peak_bps=BitRate(rate_bps * PEAK), peak_burst_bytes=Bytes(port.piece_bytes),
    )  # fmt: skip


def names(hosts: int) -> list[str]:
    return [f"m{number}" for number in range(hosts)]
