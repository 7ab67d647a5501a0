"""Faults of machines: crash, restart, pause, throttle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hcsim.config import Crash, Pause, Restart, Throttle
from hcsim.errors import UsageError
from hcsim.virtual.faults.apply import apply, note, prepare

if TYPE_CHECKING:
    from hcsim.virtual.host import VirtualHost
    from hcsim.virtual.world import World


@apply.register(Crash)
def crash(fault: Crash, world: World) -> None:
    """The process dies in the middle of whatever it does.

    With `clean` its system lives on and resets the connections; without, the peers hear nothing.
    """
    die(world, world.host(fault.node), clean=fault.clean)


def die(world: World, host: VirtualHost, *, clean: bool) -> None:
    """End this life of the host."""
    if not host.alive:
        return
    for channel in list(host.channels):
        channel.vanish()
        if clean:
            channel.tell_peer(f"{host.name} crashed")
    host.alive = False
    world.loop.discard(host)
    world.host_died(host)


@prepare.register(Restart)
def expect(fault: Restart, world: World) -> None:
    """Whoever waits for the node's program must know that it comes back; a stale store is copied in time."""
    world.returns[fault.node] = world.returns.get(fault.node, 0) + 1
    if fault.as_of_s is not None:
        when_ns = round(fault.as_of_s * 1e9)
        if when_ns < world.loop.now_ns:
            raise UsageError(f"the store of {fault.node} as of {fault.as_of_s:g} s is not known any more")
        world.loop.call_at_ns(when_ns, _copy_store, world, fault)


def _copy_store(world: World, fault: Restart) -> None:
    assert fault.as_of_s is not None
    world.host(fault.node).store.keep_copy(fault.as_of_s)


@apply.register(Restart)
def restart(fault: Restart, world: World) -> None:
    """The machine is started again: at once when it is down, else it goes down first."""
    host = world.host(fault.node)
    was_alive = host.alive
    die(world, host, clean=fault.clean)
    if was_alive and fault.down_s > 0:
        world.later(fault.down_s, _start, world, fault)
    else:
        _start(world, fault)


def _start(world: World, fault: Restart) -> None:
    old = world.host(fault.node)
    world.returns[fault.node] -= 1
    if old.alive:  # another restart came first
        return
    note(world, "start", f"{fault.node} {old.life + 1}")
    found = {"kept": old.store.records, "lost": {}, "stale": old.store.copy_of(fault.as_of_s)}
    host = world.restart(fault.node, found[fault.state])
    if fault.slow < 1:
        slow_down(world, host.name, fault.slow, fault.slow_for_s)


@apply.register(Pause)
def pause(fault: Pause, world: World) -> None:
    """Alive but stuck: a process stopped. Its system still takes what fits its buffers."""
    hold(world, world.host(fault.node), fault.duration_s)


def hold(world: World, host: VirtualHost, duration_s: float) -> None:
    """Stop all of the host's code for a while."""
    host.pauses += 1
    world.loop.freeze(host)
    world.later(duration_s, _thaw, world, host)


def _thaw(world: World, host: VirtualHost) -> None:
    host.pauses -= 1
    if host.alive and not host.pauses:
        note(world, "thaw", host.name)
        world.loop.thaw(host)


@apply.register(Throttle)
def throttle(fault: Throttle, world: World) -> None:
    """The machine gets slower: heat, or another job."""
    slow_down(world, fault.node, fault.factor, fault.duration_s)


def slow_down(world: World, node: str, factor: float, duration_s: float) -> None:
    """Let the node compute at that part of its speed for a while."""
    world.host(node).device.throttle *= factor
    world.later(duration_s, _recover, world, node, factor)


def _recover(world: World, node: str, factor: float) -> None:
    note(world, "recover", node)
    world.host(node).device.throttle /= factor
