"""What TCP does to a stream: its congestion window, the rate that losses leave it, and how late a message arrives.

The window starts at ten segments and grows once in a round trip by what was sent in it, so it doubles every RTT under
load.
"""

from __future__ import annotations

from math import ceil, inf, sqrt
from typing import TYPE_CHECKING

from hcsim.config import Tcp
from hcsim.rng import stream as random_stream
from hcsim.virtual.links import Path

if TYPE_CHECKING:
    from hcsim.virtual.network import Network
    from hcsim.virtual.sharing import Flow

RTO_S = 0.2
"""TCP's smallest retransmission time-out: what a loss in a message's last packets costs."""
TAIL_PACKETS = 3
"""A loss among these has no three duplicate ACKs behind it, so only the time-out finds it."""


class CongestionWindow:
    """How many bytes may be under way; it opens by what leaves, up to the receiver's window."""

    __slots__ = ("_counted_from", "_earned", "_initial", "_most", "is_opening", "size_bytes", "ticking")

    def __init__(self, initial_bytes: int, most_bytes: int) -> None:
        self._initial = float(initial_bytes)
        self._most = most_bytes
        self.size_bytes = self._initial
        self.is_opening = self._initial < most_bytes
        """Whether it is the narrower window still."""
        self.ticking = False
        """Whether the end of a round trip is waited for."""
        self._earned = 0.0
        """Bytes that left since it was last opened, and will open it."""
        self._counted_from = 0.0
        """What remained of the present message when it was last counted."""

    def next(self, message_bytes: float) -> None:
        """Another message begins to leave."""
        self._counted_from = message_bytes

    def count(self, remaining_bytes: float) -> None:
        """That much of the message has not left yet."""
        self._earned += self._counted_from - remaining_bytes
        self._counted_from = remaining_bytes

    def open(self) -> None:
        """A round trip has passed: open by what has left in it, to twice the size at most."""
        self.size_bytes += min(self._earned, self.size_bytes)
        self.is_opening = self.size_bytes < self._most
        self._earned = 0.0

    def restart(self) -> None:
        """Begin anew, after a time of silence."""
        self.size_bytes = self._initial
        self.is_opening = self._initial < self._most
        self._earned = 0.0


class Delays:
    """What jitter, loss and full queues add to the latency of a message."""

    __slots__ = ("_jitter", "_jitter_s", "_loss", "_mss", "_net", "_packet_loss", "_queues")

    def __init__(self, net: Network, name: str, path: Path, mss: int) -> None:
        self._net = net
        self._mss = mss
        self._jitter = random_stream(net.seed, "jitter", name)
        self._loss = random_stream(net.seed, "loss", name)
        self.follow(path)

    @staticmethod
    def on(path: Path) -> bool:
        """Whether messages along that path come unevenly."""
        return bool(path.jitter_s or path.loss or any(hop.queue is not None for hop in path.hops))

    def follow(self, path: Path) -> None:
        """The path has other figures from now on."""
        self._jitter_s = path.jitter_s
        self._packet_loss = path.loss
        self._queues = tuple(hop.queue for hop in path.hops if hop.queue is not None)

    def draw_s(self, size_bytes: int, rtt_s: float, flow: Flow | None) -> float:
        """How much later the next message comes. In a queue stands what others have sent, and no more than they have
        since they were idle; what the flow itself sent took its time to leave."""
        delay_s = 0.0
        if self._jitter_s > 0.0:
            delay_s += self._jitter.expovariate(1.0 / self._jitter_s)
        if self._packet_loss > 0.0:
            delay_s += self._retransmission_s(size_bytes, rtt_s)
        for resource, buffer_bytes in self._queues:
            if resource.capacity > 0.0 and self._net.sharing.is_full(resource):
                delay_s += min(buffer_bytes, self._net.burst_bytes(resource, flow)) / resource.capacity
        return delay_s

    def _retransmission_s(self, size_bytes: int, rtt_s: float) -> float:
        """One round trip when a packet of the message is hit, a time-out when it is one of the last."""
        packets = ceil(size_bytes / self._mss)
        tail = min(packets, TAIL_PACKETS)
        draw = self._loss.random()
        kept_tail = (1.0 - self._packet_loss) ** tail
        if draw < 1.0 - kept_tail:
            return max(RTO_S, rtt_s)
        return rtt_s if draw < 1.0 - kept_tail * (1.0 - self._packet_loss) ** (packets - tail) else 0.0


def loss_bound_bytes_ps(tcp: Tcp, mss: int, rtt_s: float, path: Path) -> float:
    """What TCP can sustain when each packet is lost with the path's probability."""
    loss = path.loss
    if loss <= 0.0 or rtt_s <= 0.0 or tcp.loss_model == "none":
        return inf
    if tcp.loss_model == "mathis":
        return mss / rtt_s * sqrt(1.5 / loss)
    if tcp.loss_model == "pftk":  # Padhye, Firoiu, Towsley and Kurose, with one ACK per packet
        timeouts = RTO_S * min(1.0, 3.0 * sqrt(3.0 * loss / 8.0)) * loss * (1.0 + 32.0 * loss**2)
        return mss / (rtt_s * sqrt(2.0 * loss / 3.0) + timeouts)
    if tcp.loss_model == "cubic":
        return float(1.054 * (rtt_s / loss) ** 0.75 * mss / rtt_s)
    return path.rate_bytes_ps * (1.0 - loss)
