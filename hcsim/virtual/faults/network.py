"""Faults of connections and links."""

from __future__ import annotations

from functools import partial

from hcsim.config import (
    BlockedPort,
    CablePulled,
    Clog,
    Cluster,
    HalfOpen,
    InterfaceChange,
    LinkChange,
    Partition,
    Reset,
    RouterReboot,
    WifiGate,
)
from hcsim.virtual.environment import NS
from hcsim.virtual.faults.apply import FaultProcess, apply, lasting, note
from hcsim.virtual.host import Surroundings
from hcsim.virtual.host_network import MediumChange
from hcsim.virtual.stream import NEVER_NS


@apply.register(Partition)
def partition(fault: Partition, world: Surroundings) -> FaultProcess:
    """Drop packets between the two sides; if one-way, those from the first side to the second."""
    pairs = [(a, b) for a in fault.sides[0] for b in fault.sides[1]]
    if not fault.oneway:
        pairs += [(b, a) for a, b in pairs]
    world.wiring.cut(pairs)
    yield from lasting(world, fault.duration_s)
    note(world, "heal", len(pairs))
    world.wiring.mend(pairs)


@apply.register(Clog)
def clog(fault: Clog, world: Surroundings) -> FaultProcess:
    """Hold back everything sent, including datagrams and connection requests, and deliver it at the end."""
    a, b = fault.between
    until_ns = NEVER_NS if fault.duration_s is None else world.env.now_ns + round(fault.duration_s * NS)
    world.wiring.clog(a, b, until_ns)
    world.wiring.clog(b, a, until_ns)
    yield from lasting(world, fault.duration_s)
    note(world, "unclog", f"{a} {b}")


@apply.register(HalfOpen)
def half_open(fault: HalfOpen, world: Surroundings) -> None:
    """Drop the connections of the first host to the second. Only the first host's own process gets an error."""
    here, there = fault.between
    for channel in world.wiring.channels(here, there):
        channel.lose(f"{here} lost it")


@apply.register(Reset)
def reset(fault: Reset, world: Surroundings) -> None:
    """Break every connection between the two hosts: at once, or when half of a frame has left."""
    for channel in world.wiring.channels(*fault.between):
        break_it = partial(channel.reset, "connection reset")
        if fault.mid_frame:
            for stream in channel.streams:
                stream.when_half_sent(break_it)
        else:
            break_it()


@apply.register(WifiGate)
def close_gate(fault: WifiGate, world: Surroundings) -> FaultProcess:
    """Stop all transmission on a Wi-Fi network for a moment. Data that has already left arrives."""
    air = world.topology.resources.get(f"{fault.medium}.air")
    if air is not None:  # somebody is on it
        world.net.shut(air)
        yield from lasting(world, fault.duration_s)
        note(world, "open", air.name)
        world.net.open(air)


@apply.register(LinkChange)
def change_link(fault: LinkChange, world: Surroundings) -> FaultProcess:
    """Change the rate, latency or loss of a link, temporarily or permanently."""
    yield from _change(world, fault, fault.duration_s)


@apply.register(CablePulled)
def pull_cable(fault: CablePulled, world: Surroundings) -> FaultProcess:
    """Unplug a cable. Traffic over it stalls; new connections take another route, where there is one."""
    yield from _change(world, fault, fault.duration_s)


@apply.register(RouterReboot)
def reboot_router(fault: RouterReboot, world: Surroundings) -> FaultProcess:
    """Take down all media of a home except Thunderbolt."""
    yield from _change(world, fault, fault.duration_s)


@apply.register(InterfaceChange)
def change_interface(fault: InterfaceChange, world: Surroundings) -> FaultProcess:
    """Move the host to another medium. Its old address and the connections over it are lost without notice.

    When it moves back, it keeps a medium that it had before the move, or one that another fault has given it."""
    _drop(world, fault.node, fault.medium)
    yield from _change(world, fault, fault.duration_s)
    if all(interface.name != fault.to for interface in world.topology.interfaces(fault.node)):
        _drop(world, fault.node, fault.to)


def _drop(world: Surroundings, node: str, medium: str) -> None:
    for channel in world.wiring.channels_of(node):
        outgoing, incoming = channel.streams
        if medium in (outgoing.interfaces[0], incoming.interfaces[1]):
            channel.lose(f"{node} has left {medium}", answers=False)


def _change(world: Surroundings, change: MediumChange, duration_s: float | None) -> FaultProcess:
    world.wiring.change(change)
    yield from lasting(world, duration_s)
    note(world, "restore", repr(change))
    world.wiring.restore(change)


@apply.register(BlockedPort)
def block_port(fault: BlockedPort, world: Surroundings) -> FaultProcess:
    """Close a port to other hosts, or drop all its traffic."""
    cluster = world.scenario.cluster or Cluster()
    named = {"gradient": cluster.gradient_port, "discovery": cluster.discovery_port}
    port = named[fault.port] if isinstance(fault.port, str) else fault.port
    world.wiring.block(fault.node, port, fault.how)
    yield from lasting(world, fault.duration_s)
    note(world, "unblock", f"{fault.node} {port}")
    world.wiring.unblock(fault.node, port, fault.how)
