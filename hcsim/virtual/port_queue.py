"""What several connections do to each other at a port of a switch whose queue they fill.

The port is busy all the time, so that together they lose no throughput: what is dropped had not crossed the port.
What differs from a fair sharing is who gets how much, and when a message is complete.

Shares. The rates of k connections at a full port differ, and change from one transfer to the next. Each time that a
stream starts to send, its weight is drawn as exp(σ · z) with z normal. σ is 0.12 for CUBIC and 0.25 for BBR: of three
Linux senders of 1 or 4 MiB into a port of 100 Mb/s with queues of 128 KiB to 4 MiB, the first one to end was 5 to 44 %
faster than the mean of the others with CUBIC (six transfers, 15 % on average), and 16 to 59 % with BBR (four, 38 %).
The mean of the largest of three such weights over that of the others is exp(1.27 σ).

Losses. While the windows of all fit the queue, nothing is lost. From then on each has a window of W packets, its part
of the queue and of the line, and loses a packet in each of its cycles: the probability is p = 1.5/W² (Mathis, Semke,
Mahdavi and Ott, CCR 27:3, 1997). BBR does not give way to losses. In the same transfers it lost 7 % of its packets at
128 KiB and 0.35 % at 512 KiB, which is p = 64/W². A loss among the last W packets of a message delays its end by a
round trip through the full queue, and one among the last three by two, which a tail loss probe takes (RFC 8985).
The last of several connections to end has the port to itself by then, and loses nothing.
"""

from __future__ import annotations

from math import ceil, exp
from random import Random

from hcsim.rng import stream as random_stream
from hcsim.virtual.links import Path
from hcsim.virtual.network import FluidNetwork
from hcsim.virtual.rate_allocator import Flow, Resource

SIGMA = {"cubic": 0.12, "bbr": 0.25}
LOSSES = {"cubic": 1.5, "bbr": 64.0}
"""p · W²."""
_TAIL_PACKETS = 3


class PortQueues:
    """The ports with queues on the way of one stream."""

    def __init__(self, net: FluidNetwork, name: str, path: Path, mss: int) -> None:
        self._net = net
        self._mss = mss
        self._weights = random_stream(net.seed, "weight", name)
        self._losses = random_stream(net.seed, "drop", name)
        self.weight = 1.0
        """Of the current transfer."""
        self.lost_segments = 0.0
        """How many are dropped on average."""
        self.follow(path)

    def follow(self, path: Path) -> None:
        """Adapt to a change of the path."""
        self._ports = path.ports

    def draw_weight(self) -> None:
        """Draw the weight of the next transfer."""
        self.weight = exp(SIGMA[self._net.tcp.congestion] * self._weights.gauss(0.0, 1.0))

    def neighbours(self, flow: Flow | None) -> list[Flow]:
        """Return the flows of others that send data through these ports, besides acknowledgements.

        A stream that has its ports to itself takes no weight: that would only hold it back where its acknowledgements
        go."""
        return [
            each
            for port, _ in self._ports
            for each, amount in self._net.sharing.started(port)
            if amount == 1.0 and each is not flow
        ]

    def draw_s(self, size_bytes: int, rtt_s: float, flow: Flow | None) -> float:
        """Return by how much losses delay the end of the next message."""
        return sum(self._delay_s(port, queue_bytes, size_bytes, rtt_s, flow) for port, queue_bytes in self._ports)

    def _delay_s(self, port: Resource, queue_bytes: float, size_bytes: int, rtt_s: float, flow: Flow | None) -> float:
        others = sum(each is not flow for each, amount in port.flows.values() if amount == 1.0)
        if not others or port.capacity <= 0.0:
            return 0.0
        held_bytes = queue_bytes + port.capacity * rtt_s
        if size_bytes + self._net.burst_bytes(port, flow) <= held_bytes:
            return 0.0
        window = max(held_bytes / (others + 1) / self._mss, 2.0)
        packets, p = ceil(size_bytes / self._mss), min(LOSSES[self._net.tcp.congestion] / window**2, 0.5)
        self.lost_segments += p * packets
        return _round_trips(self._losses, p, window, packets) * (rtt_s + queue_bytes / port.capacity)


def _round_trips(rng: Random, p: float, window: float, packets: int) -> int:
    """Return how many round trips a message of so many packets takes longer, of which each is lost with probability
    p."""
    last = min(packets, round(window))
    tail = min(last, _TAIL_PACKETS)
    draw, kept_tail = rng.random(), (1.0 - p) ** tail
    if draw < 1.0 - kept_tail:
        return 2
    return 1 if draw < 1.0 - kept_tail * (1.0 - p) ** (last - tail) else 0
