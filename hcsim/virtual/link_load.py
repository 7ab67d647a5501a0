"""The load of each link of a world, from the bytes that its hosts sent to each other and the routes between them."""

from __future__ import annotations

import msgspec

from hcsim.runtime.address import hosts_of
from hcsim.telemetry.metrics import HistogramSeries
from hcsim.virtual.rate_allocator import Resource
from hcsim.virtual.world import World

SENT = "hcsim_link_sent_bytes_total"


class LinkLoad(msgspec.Struct, frozen=True):
    """The load of one direction of a link, or of another shared resource."""

    name: str
    sent_bytes: int
    share: float
    """The fraction of its capacity over the whole run, by the rates at the end."""


def loads(world: World, seconds: float) -> tuple[LinkLoad, ...]:
    """Return the load of every link that carried data, in order of first use."""
    totals: dict[str, tuple[Resource, float, float]] = {}
    for host in world.hosts:
        for metric, labels, series in host.metrics.series():
            if metric.name != SENT or isinstance(series, HistogramSeries):
                continue
            there = hosts_of(dict(labels)["peer"])[0][0].partition("%")[0]
            path = world.topology.route(host.name, there)
            sent_bytes = series.value
            for resource, share in path.uses if path is not None and sent_bytes else ():
                _, crossed, taken = totals.get(resource.name, (resource, 0.0, 0.0))
                totals[resource.name] = resource, crossed + sent_bytes, taken + sent_bytes * share
    return tuple(
        LinkLoad(name, round(crossed), taken / (resource.capacity * seconds) if resource.capacity * seconds else 0.0)
        for name, (resource, crossed, taken) in totals.items()
    )
