"""How busy each link was: what the ranks sent to each other, laid upon the ways between them."""

from __future__ import annotations

import msgspec

from hcsim.runtime.address import split_address
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.telemetry.metrics import HistogramSeries, HostMetrics
from hcsim.virtual.sharing import Resource
from hcsim.virtual.world import World

SENT = "hcsim_link_sent_bytes_total"
FRAMES = "hcsim_link_sent_frames_total"


class Load(msgspec.Struct, frozen=True):
    """One direction of a link, or whatever else streams share."""

    name: str
    sent_bytes: int
    """Payload that crossed it."""
    share: float
    """Of what it could have carried in all that time, as the ways are at the end."""


def loads(world: World, seconds: float) -> tuple[Load, ...]:
    """Of everything that carried something, in order of first use."""
    totals: dict[str, tuple[Resource, float, float]] = {}
    for host in world.hosts:
        for metric, labels, series in host.metrics.series():
            if metric.name != SENT or isinstance(series, HistogramSeries):
                continue
            there = split_address(dict(labels)["peer"])[0]
            path = world.topology.route(host.name, there)
            sent_bytes = series.value
            for resource, share in path.uses if path is not None and sent_bytes else ():
                _, crossed, taken = totals.get(resource.name, (resource, 0.0, 0.0))
                totals[resource.name] = resource, crossed + sent_bytes, taken + sent_bytes * share
    return tuple(
        Load(name, round(crossed), taken / (resource.capacity * seconds) if resource.capacity * seconds else 0.0)
        for name, (resource, crossed, taken) in totals.items()
    )


def sent_bytes(metrics: HostMetrics) -> int:
    """What a host has sent to others for its groups, headers included."""
    cost = {SENT: 1, FRAMES: HEADER_BYTES}
    return round(
        sum(
            cost[metric.name] * series.value
            for metric, _, series in metrics.series()
            if metric.name in cost and not isinstance(series, HistogramSeries)
        )
    )
