"""What data in one direction of a line costs data in the other: acknowledgements that wait in its queue.

On a line with a deep queue, the acknowledgements of one direction stand in the queue behind the data of the other. They
come late and many at once, and so do the data that they release: both ends send a window, wait until it is
acknowledged, and the line idles for part of a round trip with each window (Zhang, Shenker and Clark, "Observations on
the dynamics of a congestion control algorithm: the effects of two-way traffic", SIGCOMM 1991). A window is what the
queue and the path hold, W = B + C·RTT.

How long it idles was measured between two Linux hosts that send each other 256 KiB to 1 MiB at once, with CUBIC, over
three lines (Mb/s, round trip, queue: 20, 30 ms, 256 KiB; 10, 60 ms, 128 KiB; 30, 20 ms, 512 KiB), as the time beyond
that of the bytes and of one way, in round trips for each W. With 1 MiB it is 0.83 to 0.85 on all of them, and with less
0.74 to 0.89 on the first two. Messages shorter than W on the third wait one round trip, more than the model says. A
byte so takes 1 + 0.85 · C·RTT/W of the line.
"""

from __future__ import annotations

from hcsim.virtual.links import Path
from hcsim.virtual.rate_allocator import RateAllocator, Resource

IDLE_ROUND_TRIPS = 0.85
"""For each window."""


def slowed(
    uses: tuple[tuple[Resource, float], ...], there: Path, back: Path, rtt_s: float, sharing: RateAllocator
) -> tuple[tuple[Resource, float], ...]:
    """Return what a byte takes where acknowledgements wait behind other data on their way back."""
    if not any(_is_filled(hop.queue[0], sharing) for hop in back.hops if hop.queue is not None):
        return uses
    queues = {hop.queue[0].name: hop.queue for hop in there.hops if hop.queue is not None}
    return tuple(
        (resource, amount * _factor(*queues[resource.name], rtt_s) if resource.name in queues else amount)
        for resource, amount in uses
    )


def _is_filled(line: Resource, sharing: RateAllocator) -> bool:
    """Return whether a queue stands in front of the line: data are being sent, as fast as it carries them."""
    sending = any(flow.wanted and amount >= 1.0 for flow, amount in line.flows.values())
    return sending and sharing.is_full(line)


def _factor(line: Resource, buffer_bytes: float, rtt_s: float) -> float:
    in_flight_bytes = line.capacity * rtt_s
    return 1.0 + IDLE_ROUND_TRIPS * in_flight_bytes / (buffer_bytes + in_flight_bytes)
