"""Faults of machines: crashes, sleep, throttling, hangs, exhausted resources, and wrong clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hcsim.config import (
    ClockDrift,
    ClockJump,
    Crash,
    FewDescriptors,
    FullDisk,
    Leave,
    Lid,
    Pause,
    Restart,
    SlowDisk,
    StuckDevice,
    Throttle,
)
from hcsim.errors import ConfigError, UsageError
from hcsim.virtual.environment import NS
from hcsim.virtual.faults.apply import FaultProcess, apply, lasting, note, prepare
from hcsim.virtual.host import Surroundings, VirtualHost


@apply.register(Crash)
def crash(fault: Crash, world: Surroundings) -> None:
    """Kill the process at an arbitrary point.

    With `clean`, its operating system survives: it resets the connections and refuses new ones. Otherwise the peers
    get no notice."""
    die(world, world.host(fault.node), clean=fault.clean)


def die(world: Surroundings, host: VirtualHost, *, clean: bool) -> None:
    """End the current life of the host."""
    if not host.alive:
        return
    # Of what was closed before, a system that lives on sends the rest.
    channels = list(host.channels) if clean else world.wiring.channels_of(host.name)
    for channel in channels if clean else ():
        channel.tell_peer(f"{host.name} crashed")
    host.alive, host.system_lives = False, clean
    for channel in channels:
        channel.vanish()
    host.release_cores()
    for ways in host.sleeps:
        world.wiring.mend(ways)
    host.sleeps.clear()
    world.loop.discard(host)
    world.host_ended(host, "crashed")


@prepare.register(Restart)
def expect(fault: Restart, world: Surroundings) -> None:
    """Register that the node will return, and schedule the copy of its store for a restart with stale state."""
    will_return(world, fault.node)
    if fault.as_of_s is not None:
        when_ns = round(fault.as_of_s * NS)
        if when_ns < world.env.now_ns:
            raise UsageError(f"the store of {fault.node} as of {fault.as_of_s:g} s is not known any more")
        world.env.process(_copy_store(world, fault.node, fault.as_of_s))


def will_return(world: Surroundings, node: str) -> None:
    """Register that `bring_back` will restart the node, so that a crash is not its end."""
    world.returns[node] = world.returns.get(node, 0) + 1


def _copy_store(world: Surroundings, node: str, as_of_s: float) -> FaultProcess:
    yield world.env.timeout(round(as_of_s * NS) - world.env.now_ns)
    world.host(node).store.keep_copy(as_of_s)


@apply.register(Restart)
def restart(fault: Restart, world: Surroundings) -> FaultProcess:
    """Restart the machine. A machine that is up is crashed first; one that is down starts at once."""
    host = world.host(fault.node)
    wait_s = fault.down_s if host.alive else 0.0
    die(world, host, clean=fault.clean)
    yield from lasting(world, wait_s)
    store = world.host(fault.node).store
    records: Mapping[str, bytes] = {}
    if fault.state != "lost":
        records = store.records if fault.state == "kept" else store.copy_of(fault.as_of_s)
    if bring_back(world, fault.node, records) and fault.slow < 1:
        yield from slow_down(world, fault.node, fault.slow, fault.slow_for_s)


def bring_back(world: Surroundings, node: str, records: Mapping[str, bytes]) -> bool:
    """Start the node with these records in its store; return False if it is already up."""
    world.returns[node] -= 1
    if world.host(node).alive:
        return False
    note(world, "start", f"{node} {world.host(node).life + 1}")
    world.restart(node, records)
    return True


@apply.register(Leave)
def leave(fault: Leave, world: Surroundings) -> None:
    """Ask the program to leave; no effect if it has ended."""
    world.host(fault.node).leaving.set()


@apply.register(Pause)
def pause(fault: Pause, world: Surroundings) -> FaultProcess:
    """Suspend the process. Its operating system still accepts data up to the size of its buffers."""
    host = world.host(fault.node)
    _stop(world, host)
    if fault.duration_s is None:
        world.host_ended(host, "is paused for good")
    yield from _held(world, host, fault.duration_s)


def _held(world: Surroundings, host: VirtualHost, duration_s: float | None) -> FaultProcess:
    """Resume a suspended host after `duration_s`; None suspends it for the rest of this life."""
    yield from lasting(world, duration_s)
    _go_on(world, host)


def _stop(world: Surroundings, host: VirtualHost) -> None:
    """Suspend all code of the host."""
    host.pauses += 1
    world.loop.freeze(host)
    host.device.stop()


def _go_on(world: Surroundings, host: VirtualHost) -> None:
    host.pauses -= 1
    if host.alive and not host.pauses:
        note(world, "thaw", host.name)
        world.loop.thaw(host)
        host.device.go_on()


@apply.register(Lid)
def close_lid(fault: Lid, world: Surroundings) -> FaultProcess:
    """Put the machine to sleep: code suspended, host unreachable, monotonic clock stopped."""
    host = world.host(fault.node)
    if not host.alive:
        return
    others = [other.name for other in world.hosts if other is not host]
    ways = tuple(way for other in others for way in ((host.name, other), (other, host.name)))
    until_ns = world.env.now_ns + round(fault.duration_s * NS)
    longer_ns = until_ns - max(host.asleep_until_ns, world.env.now_ns)
    if longer_ns > 0:
        host.asleep_until_ns = until_ns
        world.loop.postpone(host, longer_ns)
    host.clock.stand_still()
    host.sleeps.append(ways)
    world.wiring.cut(ways)
    _stop(world, host)
    yield from lasting(world, fault.duration_s)
    if host.sleeps:  # else it went down meanwhile
        world.wiring.mend(host.sleeps.pop())
        if not host.sleeps:
            host.clock.go_on()
        for channel in world.wiring.channels_of(host.name) if fault.connections == "dead" else ():
            channel.lose(f"{host.name} was asleep")
    _go_on(world, host)


@apply.register(Throttle)
def throttle(fault: Throttle, world: Surroundings) -> FaultProcess:
    yield from slow_down(world, fault.node, fault.factor, fault.duration_s)


def slow_down(world: Surroundings, node: str, factor: float, duration_s: float | None) -> FaultProcess:
    """Run the node's device at this fraction of its speed; None: permanently."""
    world.host(node).device.slow_down(factor)
    yield from lasting(world, duration_s)
    note(world, "recover", node)
    world.host(node).device.recover(factor)


@apply.register(StuckDevice)
def hang_device(fault: StuckDevice, world: Surroundings) -> FaultProcess:
    """Hang the device: it finishes no work."""
    world.host(fault.node).device.hang()
    yield from lasting(world, fault.duration_s)
    note(world, "unhang", fault.node)
    world.host(fault.node).device.unhang()


@apply.register(FullDisk)
def fill_disk(fault: FullDisk, world: Surroundings) -> FaultProcess:
    """Make every save fail with the error of a full disk."""
    store = world.host(fault.node).store

    def refuse(name: str) -> None:
        raise ConfigError(f"{store.where(name)}: cannot be written: No space left on device")

    yield from _before_saving(world, fault, refuse)


@apply.register(SlowDisk)
def slow_disk(fault: SlowDisk, world: Surroundings) -> FaultProcess:
    """Make every save slow; the saving program is blocked meanwhile.

    A save within a function of the device extends that work. Otherwise the process blocks: the whole host is
    suspended from the end of the callback that saves. What that callback sends after the save leaves before the
    wait."""
    free_at_ns = 0

    def wait(name: str) -> None:
        nonlocal free_at_ns
        host = world.host(fault.node)
        if not host.device.wait(fault.takes_s):
            free_at_ns = max(free_at_ns, world.env.now_ns) + round(fault.takes_s * NS)
            _stop(world, host)
            world.env.process(_held(world, host, (free_at_ns - world.env.now_ns) / NS))

    yield from _before_saving(world, fault, wait)


def _before_saving(world: Surroundings, fault: FullDisk | SlowDisk, act: Callable[[str], None]) -> FaultProcess:
    acts = world.host(fault.node).store.before_saving  # the machine's, in all of its lives
    acts.append(act)
    yield from lasting(world, fault.duration_s)
    note(world, "mend", fault.node)
    acts.remove(act)


@apply.register(FewDescriptors)
def take_descriptors(fault: FewDescriptors, world: Surroundings) -> FaultProcess:
    """Limit the number of connections of the process, like a low `ulimit -n`."""
    limits = world.host(fault.node).descriptor_limits  # the machine's, in all of its lives
    limits.append(fault.connections)
    yield from lasting(world, fault.duration_s)
    note(world, "give", fault.node)
    limits.remove(fault.connections)
    world.host(fault.node).accept_waiting()


@prepare.register(ClockJump)
def be_wrong(fault: ClockJump, world: Surroundings) -> None:
    """Set a clock that is wrong from the start before the first line of a program runs."""
    if fault.at_s == 0.0:
        world.host(fault.node).clock.offset_s += fault.by_s


@apply.register(ClockJump)
def jump(fault: ClockJump, world: Surroundings) -> None:
    if fault.at_s > 0.0:
        world.host(fault.node).clock.offset_s += fault.by_s


@apply.register(ClockDrift)
def drift(fault: ClockDrift, world: Surroundings) -> FaultProcess:
    """Make the host's clock and timers run fast or slow."""
    world.host(fault.node).clock.multiply_rate(fault.rate)
    yield from lasting(world, fault.duration_s)
    note(world, "steady", fault.node)
    world.host(fault.node).clock.multiply_rate(1.0 / fault.rate)
