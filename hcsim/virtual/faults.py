"""Faults: an explicit list in the scenario, each applied at its moment.

A fault changes the world and nothing else; what the components make of it is theirs. Each draws
nothing at random, so a failing list can be shortened without changing the rest of the run.
"""

from __future__ import annotations

from functools import partial, singledispatch
from typing import TYPE_CHECKING

from hcsim.config import AnyFault, ClockJump, Crash, LinkChange, Partition, Pause, Reset, Throttle
from hcsim.errors import UsageError

if TYPE_CHECKING:
    from hcsim.virtual.host import VirtualHost
    from hcsim.virtual.world import World


def schedule(world: World, fault: AnyFault) -> None:
    """Apply the fault when its time comes."""
    world.loop.call_at_ns(round(fault.at_s * 1e9), _strike, world, fault)


def _strike(world: World, fault: AnyFault) -> None:
    world.trace.record((world.loop.now_ns, "fault", type(fault).__name__, repr(fault)))
    apply(fault, world)


@singledispatch
def apply(fault: object, world: World) -> None:
    """Do to the world what the fault says."""
    raise UsageError(f"{type(fault).__name__} is no fault of the virtual world")


@apply.register(Crash)
def crash(fault: Crash, world: World) -> None:
    """The process dies in the middle of whatever it does.

    With `clean` its system lives on and resets the connections; without, the peers hear nothing.
    """
    host = world.host(fault.node)
    for channel in list(host.channels):
        for stream in channel.streams:
            stream.kill()
        if fault.clean:
            channel.tell_peer(f"{host.name} crashed")
    host.alive = False
    world.loop.discard(host)
    world.host_died(host)


@apply.register(Pause)
def pause(fault: Pause, world: World) -> None:
    """Alive but stuck: a lid closed, a process stopped. Its system still takes what fits its buffers."""
    host = world.host(fault.node)
    host.pauses += 1
    world.loop.freeze(host)
    world.later(fault.duration_s, _thaw, world, host)


def _thaw(world: World, host: VirtualHost) -> None:
    host.pauses -= 1
    if host.alive and not host.pauses:
        world.trace.record((world.loop.now_ns, "fault", "thaw", host.name))
        world.loop.thaw(host)


@apply.register(Partition)
def partition(fault: Partition, world: World) -> None:
    """Packets between the two sides are lost; one-way, those from the first side to the second."""
    pairs = [(a, b) for a in fault.sides[0] for b in fault.sides[1]]
    if not fault.oneway:
        pairs += [(b, a) for a, b in pairs]
    world.cut(pairs)
    world.later(fault.duration_s, _heal, world, pairs)


def _heal(world: World, pairs: list[tuple[str, str]]) -> None:
    world.trace.record((world.loop.now_ns, "fault", "heal", len(pairs)))
    world.mend(pairs)


@apply.register(LinkChange)
def change_link(fault: LinkChange, world: World) -> None:
    """A link gets another rate, latency or loss, for a while or for good."""
    world.change_link(fault)
    if fault.duration_s is not None:
        world.later(fault.duration_s, _restore, world, fault)


def _restore(world: World, change: LinkChange) -> None:
    world.trace.record((world.loop.now_ns, "fault", "restore", repr(change)))
    world.restore_link(change)


@apply.register(Reset)
def reset(fault: Reset, world: World) -> None:
    """Every connection between the two breaks: at once, or else when half of a frame has left."""
    here, there = fault.between
    for channel in list(world.host(here).channels):
        if channel.peer == there:
            break_it = partial(channel.reset, "connection reset")
            if fault.mid_frame:
                for stream in channel.streams:
                    stream.when_half_sent(break_it)
            else:
                break_it()


@apply.register(ClockJump)
def jump(fault: ClockJump, world: World) -> None:
    """The host's clock is set forward or back."""
    world.host(fault.node).clock.offset_s += fault.by_s


@apply.register(Throttle)
def throttle(fault: Throttle, world: World) -> None:
    """The machine gets slower: heat, or another job."""
    device = world.host(fault.node).device
    device.throttle *= fault.factor
    world.later(fault.duration_s, _recover, world, fault)


def _recover(world: World, fault: Throttle) -> None:
    world.trace.record((world.loop.now_ns, "fault", "recover", fault.node))
    world.host(fault.node).device.throttle /= fault.factor
