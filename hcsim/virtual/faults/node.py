"""Faults of machines: crashes, sleep, heat, what hangs, what runs out, and clocks that are wrong."""

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
    """The process dies in the middle of whatever it does.

    With `clean` its system lives on: it resets the connections and refuses new ones. Without, the peers hear nothing.
    """
    die(world, world.host(fault.node), clean=fault.clean)


def die(world: Surroundings, host: VirtualHost, *, clean: bool) -> None:
    """End this life of the host."""
    if not host.alive:
        return
    # Of what was closed before, a system that lives on sends the rest.
    channels = list(host.channels) if clean else world.wiring.channels_of(host.name)
    for channel in channels if clean else ():
        channel.tell_peer(f"{host.name} crashed")
    host.alive, host.system_lives = False, clean
    for channel in channels:
        channel.vanish()
    for ways in host.sleeps:
        world.wiring.mend(ways)
    host.sleeps.clear()
    world.loop.discard(host)
    world.host_ended(host, "crashed")


@prepare.register(Restart)
def expect(fault: Restart, world: Surroundings) -> None:
    """Whoever waits for the node's program must know that it comes back; a stale store is copied in time."""
    will_return(world, fault.node)
    if fault.as_of_s is not None:
        when_ns = round(fault.as_of_s * NS)
        if when_ns < world.env.now_ns:
            raise UsageError(f"the store of {fault.node} as of {fault.as_of_s:g} s is not known any more")
        world.env.process(_copy_store(world, fault.node, fault.as_of_s))


def will_return(world: Surroundings, node: str) -> None:
    """A crash of the node is not its end: `bring_back` will be called once more."""
    world.returns[node] = world.returns.get(node, 0) + 1


def _copy_store(world: Surroundings, node: str, as_of_s: float) -> FaultProcess:
    yield world.env.timeout(round(as_of_s * NS) - world.env.now_ns)
    world.host(node).store.keep_copy(as_of_s)


@apply.register(Restart)
def restart(fault: Restart, world: Surroundings) -> FaultProcess:
    """The machine is started again: at once when it is down, else it goes down first."""
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
    """Start the node with these records in its store, unless it lives already."""
    world.returns[node] -= 1
    if world.host(node).alive:
        return False
    note(world, "start", f"{node} {world.host(node).life + 1}")
    world.restart(node, records)
    return True


@apply.register(Leave)
def leave(fault: Leave, world: Surroundings) -> None:
    """A program that can be asked to leave is asked; one that has ended does not notice."""
    world.host(fault.node).leaving.set()


@apply.register(Pause)
def pause(fault: Pause, world: Surroundings) -> FaultProcess:
    """Alive but stuck: a process stopped. Its system still takes what fits its buffers."""
    host = world.host(fault.node)
    _stop(world, host)
    if fault.duration_s is None:
        world.host_ended(host, "is paused for good")
    yield from _held(world, host, fault.duration_s)


def _held(world: Surroundings, host: VirtualHost, duration_s: float | None) -> FaultProcess:
    """Let a stopped host go on after a while; None: never, as long as the host has this life."""
    yield from lasting(world, duration_s)
    _go_on(world, host)


def _stop(world: Surroundings, host: VirtualHost) -> None:
    """Stop all of the host's code."""
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
    """The machine sleeps: no code of it runs, nobody reaches it, and what measures time for its programs stands
    still."""
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
    """The machine gets slower: heat, or another job."""
    yield from slow_down(world, fault.node, fault.factor, fault.duration_s)


def slow_down(world: Surroundings, node: str, factor: float, duration_s: float | None) -> FaultProcess:
    """Let the node compute at that part of its speed for a while; None: for good."""
    world.host(node).device.slow_down(factor)
    yield from lasting(world, duration_s)
    note(world, "recover", node)
    world.host(node).device.recover(factor)


@apply.register(StuckDevice)
def hang_device(fault: StuckDevice, world: Surroundings) -> FaultProcess:
    """What the device computes is not finished: a driver or a chip that hangs."""
    world.host(fault.node).device.hang()
    yield from lasting(world, fault.duration_s)
    note(world, "unhang", fault.node)
    world.host(fault.node).device.unhang()


@apply.register(FullDisk)
def fill_disk(fault: FullDisk, world: Surroundings) -> FaultProcess:
    """Saving fails as it does where a real disk is full."""
    store = world.host(fault.node).store

    def refuse(name: str) -> None:
        raise ConfigError(f"{store.where(name)}: cannot be written: No space left on device")

    yield from _before_saving(world, fault, refuse)


@apply.register(SlowDisk)
def slow_disk(fault: SlowDisk, world: Surroundings) -> FaultProcess:
    """Saving takes its time, during which whoever saves does nothing else.

    A record that a device's function saves makes its work longer. Otherwise the process itself waits: all of the host
    is held from the end of the callback that saves. What that callback sends behind the save leaves before the wait."""
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
    """The process may not have more connections than that, as with a low `ulimit -n`."""
    limits = world.host(fault.node).descriptor_limits  # the machine's, in all of its lives
    limits.append(fault.connections)
    yield from lasting(world, fault.duration_s)
    note(world, "give", fault.node)
    limits.remove(fault.connections)
    world.host(fault.node).accept_waiting()


@prepare.register(ClockJump)
def be_wrong(fault: ClockJump, world: Surroundings) -> None:
    """A clock that is wrong from the start is so before the first line of a program runs."""
    if fault.at_s == 0.0:
        world.host(fault.node).clock.offset_s += fault.by_s


@apply.register(ClockJump)
def jump(fault: ClockJump, world: Surroundings) -> None:
    """The host's clock is set forward or back."""
    if fault.at_s > 0.0:
        world.host(fault.node).clock.offset_s += fault.by_s


@apply.register(ClockDrift)
def drift(fault: ClockDrift, world: Surroundings) -> FaultProcess:
    """The host's clock runs fast or slow, and its timers with it."""
    world.host(fault.node).clock.multiply_rate(fault.rate)
    yield from lasting(world, fault.duration_s)
    note(world, "steady", fault.node)
    world.host(fault.node).clock.multiply_rate(1.0 / fault.rate)
