"""Ports that let a burst pass: the token buckets with which switches, virtual machines and internet lines limit a rate.

A bucket of size B fills at the rate r, and what passes takes as much out of it. A port may have two (RFC 2698): one for
its rate, and a smaller one for a peak rate p > r. While both hold something, data pass as fast as the medium carries
them; when the smaller one is empty, at the peak rate; when the other one is, at the rate. So of a message that finds
both full, what the smaller one holds passes at once, and whatever is longer than B·p/(p − r) takes B/r less than at the
rate alone. A port that was idle for B/r has its whole burst again.

The sharing of the network knows capacities only. So the buckets set the capacity of their resource: to the lowest rate
of those that are empty, from the instant at which one becomes empty at the present rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple, Protocol

from hcsim.virtual.environment import NS, Environment
from hcsim.virtual.rate_allocator import Resource

_EMPTY_BYTES = 64.0
"""A bucket with less is empty: rounding never makes so much."""


class TokenBucket(NamedTuple):
    """Its figures, in bytes of data."""

    rate_bytes_ps: float
    size_bytes: float


class PortBurst(NamedTuple):
    """The buckets of a port, and what it carries while none of them is empty."""

    wire_bytes_ps: float
    buckets: tuple[TokenBucket, ...]


class SharedNetwork(Protocol):
    """What buckets ask of the network."""

    env: Environment

    def capacity(self, resource: Resource, capacity: float) -> None: ...

    def settle_soon(self) -> None: ...


class TokenBuckets:
    """The buckets of one resource."""

    def __init__(self, net: SharedNetwork, resource: Resource, burst: PortBurst) -> None:
        self._net = net
        self._resource = resource
        self._burst = burst
        self._held_bytes: Sequence[float] = [bucket.size_bytes for bucket in burst.buckets]
        self._counted_ns = net.env.now_ns
        self._due = 0
        self.adjust()

    def change(self, burst: PortBurst) -> None:
        """Have other figures; what the buckets hold stays, as far as it fits."""
        self.count()
        if len(burst.buckets) == len(self._burst.buckets):
            sizes = (bucket.size_bytes for bucket in burst.buckets)
            self._held_bytes = [min(held, size) for held, size in zip(self._held_bytes, sizes, strict=True)]
        else:
            self._held_bytes = [bucket.size_bytes for bucket in burst.buckets]
        self._burst = burst
        self.adjust()

    @property
    def _used_bytes_ps(self) -> float:
        return sum(flow.rate * amount for flow, amount in self._resource.flows.values())

    def count(self) -> None:
        """Count what has passed at the rates until now."""
        now_ns, used_bytes_ps = self._net.env.now_ns, self._used_bytes_ps
        passed_s = (now_ns - self._counted_ns) / NS
        self._held_bytes = [
            max(min(held + (bucket.rate_bytes_ps - used_bytes_ps) * passed_s, bucket.size_bytes), 0.0)
            for held, bucket in zip(self._held_bytes, self._burst.buckets, strict=True)
        ]
        self._counted_ns = now_ns

    def adjust(self) -> None:
        """Set the capacity by what the buckets hold."""
        empty = [
            bucket.rate_bytes_ps
            for held, bucket in zip(self._held_bytes, self._burst.buckets, strict=True)
            if held < _EMPTY_BYTES
        ]
        self._net.capacity(self._resource, min((self._burst.wire_bytes_ps, *empty)))

    def watch(self) -> None:
        """Schedule when the next bucket becomes empty at the present rates."""
        self._due += 1
        used_bytes_ps = self._used_bytes_ps
        left_s = [
            (held - _EMPTY_BYTES) / (used_bytes_ps - bucket.rate_bytes_ps)
            for held, bucket in zip(self._held_bytes, self._burst.buckets, strict=True)
            if held >= _EMPTY_BYTES and used_bytes_ps > bucket.rate_bytes_ps
        ]
        if left_s:
            self._net.env.call_at(self._net.env.now_ns + ceil(min(left_s) * NS) + 1, self._emptied, self._due)

    def _emptied(self, due: int) -> None:
        if due == self._due:
            self._net.settle_soon()
