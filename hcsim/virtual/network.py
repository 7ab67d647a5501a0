"""The fluid network model: streams share resources, each at its weighted max-min fair rate.

Rates are computed at most once per instant, at its end, if anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from hcsim.config import Tcp, Wifi
from hcsim.rng import stream as random_stream
from hcsim.virtual.environment import NS, Environment
from hcsim.virtual.links import Path
from hcsim.virtual.rate_allocator import Flow, RateAllocator, Resource
from hcsim.virtual.token_bucket import PortBurst, TokenBuckets

if TYPE_CHECKING:
    from hcsim.telemetry.trace import Trace


class Sender(Protocol):
    """What the network asks of a stream."""

    number: int
    flow: Flow | None
    has_line: bool
    """Whether it goes over a line with a queue, where acknowledgements may have to wait."""

    @property
    def burst_bytes(self) -> float:
        """What has left since it was last idle."""

    def share_port(self) -> None:
        """Another one sends through a port of this one."""

    def rate_changed(self, rate: float) -> None:
        """It has that share from now on."""

    def consider_acknowledgements(self) -> None:
        """The way of its acknowledgements may have become full or free."""


class FluidNetwork:
    """All streams and the resources between them."""

    def __init__(self, env: Environment, tcp: Tcp, seed: int, trace: Trace) -> None:
        self.env = env
        self.tcp = tcp
        self.seed = seed
        self.trace = trace
        self.sharing = RateAllocator()
        self.streams: dict[int, Sender] = {}
        self._started: dict[int, Sender] = {}
        self._on_lines: dict[int, Sender] = {}
        """Those that send over lines with queues."""
        self._numbers = 0
        self._settling = False
        self._nominal: dict[str, float] = {}
        self._closed: dict[str, int] = {}
        self._at_opening: dict[str, list[Callable[[], None]]] = {}
        self._buckets: dict[str, TokenBuckets] = {}
        self.on_end: Callable[[Sender], None] | None = None
        """Called with each stream that has ended."""

    def add(self, stream: Sender) -> int:
        """Take a new stream in; the number that it has from now on."""
        self._numbers += 1
        self.streams[self._numbers] = stream
        return self._numbers

    def start(self, stream: Sender) -> None:
        assert stream.flow is not None
        self._started[stream.flow.id] = stream
        if stream.has_line:
            self._on_lines[stream.flow.id] = stream
        self.sharing.start(stream.flow)
        if not self._settling:
            self.settle_soon()

    def stop(self, flow: Flow) -> None:
        self._started.pop(flow.id, None)
        self._on_lines.pop(flow.id, None)
        self.sharing.stop(flow)
        if not self._settling:
            self.settle_soon()

    def bound(self, flow: Flow, bytes_ps: float) -> None:
        self.sharing.set_bound(flow, bytes_ps)
        self.settle_soon()

    def burst_bytes(self, resource: Resource, besides: Flow | None) -> float:
        """Return the bytes that other flows have sent through the resource since each was last idle."""
        others = [(flow, amount) for flow, amount in resource.flows.values() if flow is not besides]
        return sum(amount * self.streams[flow.id].burst_bytes for flow, amount in others if flow.id in self.streams)

    def forget(self, stream: Sender) -> None:
        """Remove a stream that has ended."""
        if self.streams.pop(stream.number, None) is None:
            return
        if stream.flow is not None:
            self.sharing.forget(stream.flow)
        if self.on_end is not None:
            self.on_end(stream)

    def capacity(self, resource: Resource, capacity: float) -> None:
        """Set the capacity of the resource, effective while it is not shut."""
        self._nominal[resource.name] = capacity
        if not self._closed.get(resource.name):
            self.sharing.set_capacity(resource, capacity)
            self.settle_soon()

    def shut(self, resource: Resource) -> None:
        """Block the resource until each `shut` is undone by an `open`."""
        self._nominal.setdefault(resource.name, resource.capacity)
        self._closed[resource.name] = self._closed.get(resource.name, 0) + 1
        self.sharing.set_capacity(resource, 0.0)
        self.settle_soon()

    def open(self, resource: Resource) -> None:
        self._closed[resource.name] -= 1
        if not self._closed[resource.name]:
            self.sharing.set_capacity(resource, self._nominal[resource.name])
            self.settle_soon()
            for act in self._at_opening.pop(resource.name, ()):
                act()

    def set_bursts(self, bursts: Mapping[Resource, PortBurst]) -> None:
        """Let these resources, and no others, let a burst pass."""
        before = self._buckets
        self._buckets = {}
        for resource, burst in bursts.items():
            if resource.name in before:
                self._buckets[resource.name] = before[resource.name]
                before[resource.name].change(burst)
            else:
                self._buckets[resource.name] = TokenBuckets(self, resource, burst)

    def waits(self, path: Path, act: Callable[[], None]) -> bool:
        """Return whether a resource on the path is shut; if so, `act` is called once it is open."""
        for resource, _ in path.uses:
            if self._closed.get(resource.name):
                self._at_opening.setdefault(resource.name, []).append(act)
                return True
        return False

    def settle_soon(self) -> None:
        """Recompute the shares at the end of this instant."""
        if not self._settling:
            self._settling = True
            self.env.call_at_instant_end(self._settle)

    def _settle(self) -> None:
        """Recompute the shares and notify the streams whose rate has changed."""
        streams, started = self.streams, self._started
        for bucket in self._buckets.values():
            bucket.count()
            bucket.adjust()
        self._settling = False
        changed = self.sharing.solve()
        for bucket in self._buckets.values():
            bucket.watch()
        for flow in changed:
            started.pop(flow.id, None)
            if flow.id in streams:
                streams[flow.id].rate_changed(flow.rate)
        if started:
            # Stopped and started again within the instant: the share is as before.
            self._started = {}
            for stream in started.values():
                assert stream.flow is not None
                stream.rate_changed(stream.flow.rate)
        for stream in tuple(self._on_lines.values()):
            stream.consider_acknowledgements()


class Gate:
    """Wi-Fi stalls: from time to time the medium closes for a moment, then flushes.

    The times come from the gate's own random stream. A timer is set only while a station transmits, so an idle
    network has no events."""

    def __init__(self, net: FluidNetwork, air: Resource, wifi: Wifi) -> None:
        self._net = net
        self._env = net.env
        self._air = air
        self._wifi = wifi
        self._rng = random_stream(net.seed, "gate", wifi.name)
        self._armed = False
        self._from_ns = self._until_ns = 0
        self._draw()

    def watch(self) -> None:
        """Schedule the next stall: a station starts to transmit."""
        if self._armed:
            return
        now = self._env.now_ns
        while self._until_ns <= now:
            self._draw()
        self._armed = True
        self._env.call_at(max(self._from_ns, now), self._close)

    def _draw(self) -> None:
        self._from_ns = self._until_ns + round(self._rng.expovariate(1.0 / self._wifi.gate_every_s) * NS)
        self._until_ns = self._from_ns + round(self._rng.uniform(self._wifi.gate_min_s, self._wifi.gate_max_s) * NS)

    def _close(self) -> None:
        if not self._net.sharing.is_used(self._air):
            self._armed = False
            return
        self._net.trace.record((self._env.now_ns, "gate", self._air.name, self._until_ns))
        self._net.shut(self._air)
        self._env.call_at(self._until_ns, self._reopen)

    def _reopen(self) -> None:
        self._net.open(self._air)
        self._armed = False
        if self._net.sharing.is_used(self._air):
            self.watch()
