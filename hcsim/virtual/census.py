"""How much the hosts of a world use at most, counted now and then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from hcsim.telemetry.trace import Event, Sink
from hcsim.virtual.environment import NS

if TYPE_CHECKING:
    from hcsim.virtual.host import VirtualHost
    from hcsim.virtual.world import World

EVERY_S = 1.0


class Usage(msgspec.Struct, frozen=True):
    """What a host uses."""

    descriptors: int = 0
    """Connections, those that are being made included."""
    tasks: int = 0
    buffered_bytes: int = 0
    """Sent and not delivered, or delivered and not read."""

    def most(self, other: Usage) -> Usage:
        """The larger figure of each."""
        return Usage(
            max(self.descriptors, other.descriptors),
            max(self.tasks, other.tasks),
            max(self.buffered_bytes, other.buffered_bytes),
        )


class Census:
    """Counts as events come to a trace, a second of virtual time after it last did: so it changes nothing."""

    def __init__(self, sink: Sink) -> None:
        """`sink` gets the events until all programs have ended: not those of the tearing down."""
        self.most: dict[str, Usage] = {}
        """By host, in any of its lives."""
        self.is_over = False
        self._sink = sink
        self._world: World | None = None
        self._due_ns = 0

    def watch(self, world: World) -> None:
        """Count this world's hosts."""
        self._world = world
        world.on_end = self._end

    def __call__(self, events: Sequence[Event]) -> None:
        """A sink of the world's trace: pass the events on, and count if it is time."""
        if self.is_over:
            return
        self._sink(events)
        world, now_ns = self._world, int(events[-1][0])
        if world is None or now_ns < self._due_ns:
            return
        self._due_ns = now_ns + round(EVERY_S * NS)
        for host in world.hosts:
            self.most[host.name] = self.most.get(host.name, Usage()).most(usage(host))

    def _end(self) -> None:
        assert self._world is not None
        self._world.trace.digest()  # which takes all events that there are so far
        self.is_over = True


def usage(host: VirtualHost) -> Usage:
    """What a host uses now."""
    return Usage(host.descriptors, host.loop.tasks_of(host), sum(_buffered(host)))


def _buffered(host: VirtualHost) -> Iterable[int]:
    for channel in host.channels:
        outgoing, incoming = channel.streams
        yield outgoing.queued_bytes + incoming.outstanding
